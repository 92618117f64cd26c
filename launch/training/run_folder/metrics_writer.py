"""Writes the numbers of a run: `metrics.jsonl` with one line per step, and the same numbers to TensorBoard and the other monitors."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

from data_pipeline.staging import write_atomically
from launch.formats.metrics import is_finite_number, parse_line, split_lines
from launch.training.run_folder.monitors import Monitors, monitor_folder, numbers

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Opens the files of the run in `folder`, which starts or continues after `step`.

    Args:
        ds_config: the engine's JSON, of which the sections in `launch.training.run_folder.monitors.SECTIONS` are used.
        run_id: the id in `run.json`.

    Attributes:
        seconds_before: what the run took up to `step`.
        lr_before: the learning rate of `step`; None if its line is lost.
        notes: lines for the log.
    """

    def __init__(self, folder: Path, step: int, ds_config: dict[str, Any], run_id: str | None):
        from torch.utils.tensorboard import SummaryWriter  # takes a second, and only global rank 0 needs it

        self.notes: list[str] = []
        kept, cut = self._cut_back(folder / METRICS_FILE, step)
        seconds = (line.get("seconds") for line in reversed(kept))
        self.seconds_before: float = next((value for value in seconds if is_finite_number(value)), 0.0)
        rates = (line.get("lr") for line in kept if line["step"] == step)
        self.lr_before: float | None = next(filter(is_finite_number, rates), None)
        self._file = open(folder / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        threading.excepthook = _ignore_tensorboard_thread
        folders = (folder, monitor_folder(ds_config, "tensorboard", folder))
        self._events: list[Any] = [SummaryWriter(str(one), purge_step=step + 1 if step else 0) for one in folders if one]
        self._monitors = Monitors(ds_config, folder, run_id, kept, cut)

    def _cut_back(self, file: Path, step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Move the lines of the steps after `step`, which will be repeated, to `<file>.cut`.

        If the run starts again at step 0, every line is moved, including that of step 0. Returns the valid lines that stay and those moved.
        """
        if not file.exists():
            return [], []
        texts = split_lines(file.read_bytes())
        lines = [parse_line(text) for text in texts]
        end = max((number for number, line in enumerate(lines, 1) if line and step and line["step"] <= step), default=0)
        if cut := texts[end:]:
            copy = file.with_name(f"{file.name}.cut")
            with open(copy, "ab") as stream:
                stream.write(b"".join(text + b"\n" for text in cut))
                stream.flush()
                os.fsync(stream.fileno())
            self.notes.append(f"{len(cut)} line(s) beyond step {step} were cut off {file}; {copy.name} keeps them")
        write_atomically(file, b"".join(text + b"\n" for text in texts[:end]))
        return [line for line in lines[:end] if line], [line for line in lines[end:] if line]

    def write(self, line: dict[str, Any], durable: bool = False) -> None:
        """Append the line of one step. It has reached the operating system on return, so that a killed run loses none.

        Args:
            durable: wait until it is on the disk. A checkpoint must not outlive the line of its step.
        """
        # JSON has no NaN and no infinity: they become null.
        line = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if not os.fstat(self._file.fileno()).st_nlink:  # writing to a removed file raises no error
            raise FileNotFoundError(errno.ENOENT, "the file was removed during the run", self._file.name)
        for name, value in numbers(line).items():
            for writer in self._events:
                writer.add_scalar(name, value, line["step"])
        self._monitors.write(line)
        if durable:
            os.fsync(self._file.fileno())
            for writer in self._events:
                writer.flush()

    def close(self) -> None:
        self._file.close()
        for writer in self._events:
            writer.close()
        self._monitors.close()


def _ignore_tensorboard_thread(failed: threading.ExceptHookArgs) -> None:
    """Print no traceback from TensorBoard's thread: `SummaryWriter` raises its error again in the main thread."""
    if type(failed.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failed)
