"""Sends the numbers of `metrics.jsonl` to the monitors that the engine's JSON switches on: "tensorboard" and "wandb".

The sections are DeepSpeed's. DeepSpeed's engine itself would log only the learning rate and the loss scale, by samples, so it gets none of
them (`launch/training/engine.py`). Used on global rank 0.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_pipeline.errors import one_line
from launch.errors import print_once

#: The sections of the engine's JSON that switch monitors on.
SECTIONS = ("tensorboard", "wandb")
#: How long wandb's process outlives the run, as a duration of Go.
WANDB_IDLE = "15s"


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of `metrics.jsonl`, by name, without its step."""
    return {name: value for name, value in line.items() if name != "step" and isinstance(value, (int, float))}


def tensorboard_folder(engine: dict[str, Any], run: Path) -> Path | None:
    """The folder of the section "tensorboard"; None if it is off.

    It is `output_path/job_name`, as in DeepSpeed. Without `output_path` it is in the run's folder; without `job_name` it has the section's
    name there, and the run's name elsewhere.
    """
    section = engine.get("tensorboard") or {}
    if not section.get("enabled"):
        return None
    output = section.get("output_path")
    return Path(output or run) / (section.get("job_name") or (run.name if output else "tensorboard"))


class Wandb:
    """Writes the lines of `metrics.jsonl` to wandb if the engine's JSON switches it on.

    A resume continues the run with the same id. It cannot remove rows, so steps that are trained again have two, of which the later one
    holds. If wandb cannot be reached at the start, its rows stay in the run's folder. If it fails later, the run continues without it,
    because `metrics.jsonl` has every line.

    Args:
        engine: the engine's JSON.
        run: the run's folder.
        run_id: the id in `run.json`.
    """

    def __init__(self, engine: dict[str, Any], run: Path, run_id: str | None):
        self._run: Any = None
        section = engine.get("wandb") or {}
        if not section.get("enabled"):
            return
        import wandb

        arguments: dict[str, Any] = {
            "project": section.get("project") or "deepspeed",
            "group": section.get("group"),
            "entity": section.get("team"),
            "id": run_id,
            "name": run.name,
            "dir": str(run),
            "resume": "allow",
            "reinit": "create_new",
            "settings": wandb.Settings(console="off"),  # log.txt has what the run prints
        }
        try:
            _start_wandb_service()
            self._run = wandb.init(**arguments)
        except (wandb.errors.Error, OSError) as reason:
            print_once(f"warning: wandb: {one_line(reason)}; its rows stay in {run / 'wandb'}, and `wandb sync` sends them", sys.stderr)
            with self._continuing_without():
                self._run = wandb.init(**arguments, mode="offline")
        with self._continuing_without():
            if self._run:
                # wandb drops rows whose step is not above the last one, as after a resume. So its own step counts rows, and ours is a
                # metric.
                self._run.define_metric("*", step_metric="step")

    def write(self, line: dict[str, Any]) -> None:
        """Write the numbers of one line."""
        with self._continuing_without():
            if self._run:
                self._run.log({"step": line["step"], **numbers(line)})

    def close(self) -> None:
        """Wait until all rows are written. The process ends in `os._exit`, which would lose them."""
        with self._continuing_without():
            if self._run:
                self._run.finish()

    @contextlib.contextmanager
    def _continuing_without(self) -> Iterator[None]:
        """If wandb fails in the body, warn, and switch it off."""
        try:
            yield
        except Exception as reason:
            print_once(f"warning: wandb: {type(reason).__name__}: {one_line(reason)}; the run continues without it", sys.stderr)
            self._run = None


def _start_wandb_service() -> None:
    """Start the process that writes wandb's rows apart from this one, unless WANDB_SERVICE names one.

    A launcher that is told to stop signals all processes below it, and this one must write the last rows. It ends by itself.

    Raises:
        OSError: it cannot be started.
    """
    if "WANDB_SERVICE" not in os.environ:
        command = [sys.executable, "-m", "wandb", "beta", "core", "start", "--idle-timeout", WANDB_IDLE]
        started = subprocess.run(command, capture_output=True, text=True)
        if started.returncode:
            raise OSError(f"its service did not start: {started.stderr.strip() or started.stdout.strip()}")
        os.environ["WANDB_SERVICE"] = started.stdout.strip()
