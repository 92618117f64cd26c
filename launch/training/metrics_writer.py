"""Writes the numbers of a run: `metrics.jsonl` with one line per step, and the same numbers as TensorBoard events."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

from launch.formats.files import write_atomically
from launch.formats.metrics import is_finite_number, parse_line, split_lines

METRICS_FILE = "metrics.jsonl"
#: Files with lines of some steps only, which a resume cuts back too.
OTHER_FILES = ("histograms.jsonl", "blocks.jsonl")


class MetricsWriter:
    """Opens the files of the run in `folder`, which starts or continues after `step`.

    Attributes:
        seconds_before: what the run took up to `step`.
        notes: lines for the log.
    """

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter  # takes a second, and only global rank 0 needs it

        self.notes: list[str] = []
        for name in OTHER_FILES:
            self._cut_back(folder / name, step)
        kept = self._cut_back(folder / METRICS_FILE, step)
        seconds = (line.get("seconds") for line in reversed(kept))
        self.seconds_before: float = next((value for value in seconds if is_finite_number(value)), 0.0)
        self._path = folder / METRICS_FILE
        self._open()
        threading.excepthook = _ignore_tensorboard_thread
        self._events: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)

    def _open(self) -> None:
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def _cut_back(self, file: Path, step: int) -> list[dict[str, Any]]:
        """Move the lines of the steps after `step`, which are made again, to `<file>.cut`. Returns the valid lines that stay.

        At step 0 all lines are moved: the line of step 0 is written again too.
        """
        if not file.exists():
            return []
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
        return [line for line in lines[:end] if line is not None]

    def write(self, line: dict[str, Any], durable: bool = False) -> None:
        """Append the line of one step. It has reached the operating system on return, so that a killed run loses none.

        Args:
            durable: wait until it is on the disk. A checkpoint must not outlive the line of its step.
        """
        self._file.write(_as_json(line) + "\n")
        self._file.flush()
        if not os.fstat(self._file.fileno()).st_nlink:  # writing to a removed file raises no error
            raise FileNotFoundError(errno.ENOENT, "the file was removed during the run", self._file.name)
        self._add_events(line["step"], line)
        if durable:
            os.fsync(self._file.fileno())
            self._events.flush()

    def add_to_last(self, values: dict[str, Any]) -> None:
        """Add `values`, which hold the last step, to the last line; as a line of their own if that of the step is missing."""
        texts = split_lines(self._path.read_bytes())
        last = parse_line(texts[-1]) if texts else None
        if last is None or last["step"] != values["step"]:
            return self.write(values, durable=True)
        self._file.close()
        write_atomically(self._path, b"".join(text + b"\n" for text in (*texts[:-1], _as_json(last | values).encode())))
        self._open()
        self._add_events(values["step"], values)

    def _add_events(self, step: int, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if key != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                self._events.add_scalar(key, value, step)

    def close(self) -> None:
        self._file.close()
        self._events.close()


def _as_json(line: dict[str, Any]) -> str:
    """A line without its line break. JSON has no NaN and no infinity: they become null."""
    finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()}
    return json.dumps(finite, allow_nan=False)


def _ignore_tensorboard_thread(failed: threading.ExceptHookArgs) -> None:
    """Print no traceback from TensorBoard's thread: `SummaryWriter` raises its error again in the main thread."""
    if type(failed.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failed)
