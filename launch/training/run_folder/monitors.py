"""Sends the numbers of `metrics.jsonl` to the monitors that the engine's JSON switches on: "tensorboard", "csv_monitor", "wandb", "comet".

The sections are DeepSpeed's. DeepSpeed's engine itself would log only the learning rate and the loss scale, by samples, so it gets none of
them (`launch/training/engine.py`). Used on global rank 0.
"""

from __future__ import annotations

import contextlib
import csv
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data_pipeline.errors import one_line
from launch.errors import UsageError, print_once
from launch.formats.files import refuse_links

#: The sections of the engine's JSON that switch monitors on.
SECTIONS = ("tensorboard", "csv_monitor", "wandb", "comet")
#: How long wandb's process outlives the run, as a duration of Go.
WANDB_IDLE = "15s"
#: How long the end of a run waits for wandb's server. wandb itself would wait until the server answers, and a stopped job would be killed
#: before it is requeued.
WANDB_FINISH_SECONDS = 30.0
#: What sends a line to a monitor, and what ends it.
Monitor = tuple[Callable[[dict[str, Any]], Any], Callable[[], Any]]


def monitor_folder(ds_config: dict[str, Any], name: str, run: Path) -> Path | None:
    """The folder of the files of "tensorboard" or "csv_monitor"; None if that section is off.

    It is `output_path/job_name`, as in DeepSpeed. Without `output_path` it is in the run's folder; without `job_name` it has the section's
    name there, and the run's name elsewhere.
    """
    section = ds_config.get(name) or {}
    if not section.get("enabled"):
        return None
    output = section.get("output_path")
    return Path(output or run) / (section.get("job_name") or (run.name if output else name))


def check_monitors(ds_config: dict[str, Any], run: Path) -> None:
    """Refuse a new run whose CSV files would replace those of another one, and CSV files that are links. Creates nothing.

    Raises:
        UsageError: the folder of "csv_monitor" holds such files.
    """
    folder = monitor_folder(ds_config, "csv_monitor", run)
    if folder:
        refuse_links(folder)
    if folder and not (run / "run.json").exists() and any(folder.glob("*.csv")):
        raise UsageError(f"{folder}: holds CSV files, and {run.name} is a new run; give another csv_monitor.job_name, or leave it out")


class Monitors:
    """Writes the lines of `metrics.jsonl` to "csv_monitor", "wandb" and "comet". TensorBoard is `MetricsWriter`'s own.

    A row has the number of its step. CSV files are rewritten from the lines that a resume keeps. wandb and comet continue the run with the
    same id; they cannot remove rows, so repeated steps have two rows, of which the later one counts. If a monitor fails, the run continues
    without it, because `metrics.jsonl` has every line.

    Args:
        ds_config: the engine's JSON.
        run: the run's folder.
        run_id: the id in `run.json`.
        kept: the lines of `metrics.jsonl` that stay.
        cut: the lines that the resume has cut off.
    """

    def __init__(self, ds_config: dict[str, Any], run: Path, run_id: str | None, kept: list[dict[str, Any]], cut: list[dict[str, Any]]):
        self._monitors: dict[str, Monitor] = {}
        if folder := monitor_folder(ds_config, "csv_monitor", run):
            folder.mkdir(parents=True, exist_ok=True)
            for name in {name for line in (*kept, *cut) for name in numbers(line)}:
                _column(folder, name).unlink(missing_ok=True)
            _append_columns(folder, kept)
        self._csv = folder
        for name, start in (("wandb", _start_wandb), ("comet", _start_comet)):
            if (section := ds_config.get(name) or {}).get("enabled"):
                with self._continuing_without(name):
                    self._monitors[name] = start(section, run, run_id)

    def write(self, line: dict[str, Any]) -> None:
        """Write the numbers of one line."""
        if self._csv:
            _append_columns(self._csv, [line])
        for name, (send, _) in list(self._monitors.items()):
            with self._continuing_without(name):
                send(line)

    def close(self) -> None:
        """Wait until all rows are written. The process ends in `os._exit`, which would lose them."""
        for name, (_, end) in list(self._monitors.items()):
            with self._continuing_without(name):
                end()

    @contextlib.contextmanager
    def _continuing_without(self, name: str) -> Iterator[None]:
        """If the monitor fails in the body, warn, and switch it off."""
        try:
            yield
        except Exception as reason:
            print_once(f"warning: {name}: {type(reason).__name__}: {one_line(reason)}; the run continues without it", sys.stderr)
            self._monitors.pop(name, None)


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of `metrics.jsonl`, without the step."""
    return {name: value for name, value in line.items() if name != "step" and isinstance(value, (int, float))}


def _start_wandb(section: dict[str, Any], run: Path, run_id: str | None) -> Monitor:
    import wandb

    _start_wandb_service()
    started = wandb.init(
        project=section.get("project") or "deepspeed",
        group=section.get("group"),
        entity=section.get("team"),
        id=run_id,
        name=run.name,
        dir=str(run),
        resume="allow",
        reinit="create_new",
        settings=wandb.Settings(console="off", finish_timeout=WANDB_FINISH_SECONDS),  # log.txt has what the run prints
    )
    # wandb drops rows whose step is not above the last one, as after a resume. So its own step counts rows, and ours is a metric.
    started.define_metric("*", step_metric="step")
    return lambda line: started.log({"step": line["step"], **numbers(line)}), started.finish


def _start_wandb_service() -> None:
    """Start wandb's writer process outside of this process's tree, unless WANDB_SERVICE names one.

    A launcher that is stopped signals all processes below it, but this process must still write the last rows. It ends by itself.

    Raises:
        OSError: it cannot be started.
    """
    if "WANDB_SERVICE" not in os.environ:
        command = [sys.executable, "-m", "wandb", "beta", "core", "start", "--idle-timeout", WANDB_IDLE]
        started = subprocess.run(command, capture_output=True, text=True)
        if started.returncode:
            raise OSError(f"its service did not start: {started.stderr.strip() or started.stdout.strip()}")
        os.environ["WANDB_SERVICE"] = started.stdout.strip()


def _start_comet(section: dict[str, Any], run: Path, run_id: str | None) -> Monitor:
    from deepspeed.monitor.comet import CometMonitor
    from deepspeed.monitor.config import CometConfig

    own = {"samples_log_interval": 1, "experiment_key": section.get("experiment_key") or run_id}  # every step
    comet = CometMonitor(CometConfig(**{"experiment_name": run.name, **section, **own}))
    return lambda line: comet.write_events([(name, value, line["step"]) for name, value in numbers(line).items()]), comet.experiment.end


def _append_columns(folder: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append the numbers of `lines` to the CSV files in `folder`, with the names and headers of DeepSpeed's `csvMonitor`."""
    columns: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in numbers(line).items():
            columns.setdefault(name, []).append((line["step"], value))
    for name, rows in columns.items():
        with open(_column(folder, name), "a", newline="") as stream:
            csv.writer(stream).writerows(rows if stream.tell() else [("step", name.rpartition("/")[2]), *rows])


def _column(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
