"""Reads the folder of a run, finished or not, into arrays with an entry per optimizer step, and summarizes the run in a few numbers.

Only `run.json`, `metrics.jsonl` and a few lines of `log.txt` are read. A published run is stored in a `results.json` in a short form,
which is read into the same object.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launch.config.flags import VALUES
from launch.formats.metrics import COLUMNS, by_step, is_finite_number, read_log, read_run_json, read_valid_lines, resumed_after
from launch.training.run_folder.run_json import changes_numbers, starts_of

Column = npt.NDArray[np.float64]

#: Steps after each start that the means of time exclude: the first ones compile, allocate and fill caches.
WARM_UP_STEPS = 10
#: The fewest timed steps of a run whose times are compared. The mean of fewer follows a few slow moments of the machine.
MIN_TIMED_STEPS = 20
#: The measures that need the lines of all steps.
OF_EVERY_STEP = {"step_seconds", "tokens_per_second", "mfu", "bytes_per_step", "bytes_sent", "flops"}


@dataclass(frozen=True, eq=False)
class Run:
    """One run as its folder holds it.

    Attributes:
        folder: where it was read.
        name: the folder's name; untrusted text.
        description: its `run.json`.
        columns: float64, an entry for each step, all of one length: `COLUMNS`, every other numeric metric, and "bytes", the running sum of
            "bytes_sent"; "flops" is a running sum too. NaN where a line lacks the key or its number is not finite. The line of step 0, the
            validation of the untrained model, has no loss.
        finished: the run has trained on all its tokens, and has evaluated the whole validation split if `--whole_eval` is given.
        diverged: the run ended or failed because of a non-finite loss or gradient.
        remarks: what is missing, damaged or not finite, in sentences without a full stop.
        measures: the numbers that summarize the run, see `_measures`. The columns of a published run hold evaluations only.
    """

    folder: Path
    name: str
    description: dict[str, Any]
    columns: dict[str, Column]
    finished: bool
    diverged: bool
    remarks: tuple[str, ...]
    measures: dict[str, float]

    @property
    def seed(self) -> int:
        return int(self.description["seed"])

    @property
    def timed_steps(self) -> float:
        """The steps that the means of time are over; infinite for runs that were published before they were counted."""
        return self.measures.get("timed_steps", math.inf)

    @property
    def state(self) -> str:
        """ "finished", "failed" (it diverged before its end) or "unfinished" (still training, stopped, or failed for another reason)."""
        return "finished" if self.finished else "failed" if self.diverged else "unfinished"


def _end(description: dict[str, Any]) -> dict[str, Any]:
    """The entry of `run.json` about the end of the run; {} before it."""
    return description.get("finished") or {}


def read_run(folder: str | Path) -> Run:
    """Read the run in `folder`; damaged lines of its metrics are ignored and remarked.

    Raises:
        UsageError: this is not a run folder, or its `run.json` is damaged or lacks keys that a comparison needs.
    """
    folder = Path(folder)
    description = read_run_json(folder / "run.json")
    lines: list[dict[str, Any]] = []
    skipped = ""
    with contextlib.suppress(FileNotFoundError):
        lines, skipped = read_valid_lines(folder / "metrics.jsonl")
    lines = by_step(lines)
    remarks = [skipped] if skipped else []
    if not lines:
        remarks.append("metrics.jsonl contains no step")
    changed = [line for start in starts_of(description) for line in start.get("changes") or ()]
    if settings := [line for line in changed if changes_numbers(re.split("[.:]", line)[0])]:
        remarks.append(f"a resume changed {'; '.join(settings)}: the settings shown are the last ones")
    columns = _columns(lines)
    steps = [line["step"] for line in lines if line["step"] > 0]
    if lacking := max(steps, default=0) - len(steps):
        remarks.append(f"metrics.jsonl lacks {lacking:,} of {max(steps):,} steps, so times per step and sums are not compared")
    for key, name in (("loss", "training loss"), ("val_loss", "validation loss")):
        steps = [line["step"] for line in lines if key in line and not is_finite_number(line[key])]
        if steps:
            remarks.append(f"the {name} is not finite in {len(steps)} step{'s' * (len(steps) > 1)}, first in step {steps[0]}")
    log = read_log(folder)
    finished, diverged = _ending(log, description, lines, remarks)
    measures = _measures(description, columns, finished, diverged, resumed_after(log))
    if lacking:
        measures = {name: value for name, value in measures.items() if name not in OF_EVERY_STEP}
    return Run(folder, folder.resolve().name, description, columns, finished, diverged, tuple(remarks), measures)


def _columns(lines: list[dict[str, Any]]) -> dict[str, Column]:
    columns = {}
    for name in dict.fromkeys([*COLUMNS, *(name for line in lines for name in line)]):
        values = (line.get(name) for line in lines)
        column = np.array([value if is_finite_number(value) else np.nan for value in values], dtype=np.float64)
        if name in COLUMNS or not np.isnan(column).all():
            columns[name] = column
    columns["flops"] = np.nancumsum(columns["flops"])
    columns["bytes"] = np.nancumsum(columns["bytes_sent"])
    return columns


def _ending(log: list[str], description: dict[str, Any], lines: list[dict[str, Any]], remarks: list[str]) -> tuple[bool, bool]:
    """Whether the run has finished, and whether it diverged; adds a remark if it has not finished."""
    last = lines[-1] if lines else {"step": 0, "tokens": 0}
    tokens, total = last.get("tokens"), description["total_tokens"]
    tokens = tokens if is_finite_number(tokens) else 0
    error = _last_error(log)
    # A non-finite loss ends a run, except in fp16, where the step is skipped and the loss scale lowered.
    lost = "loss" in last and not is_finite_number(last["loss"]) and description.get("precision") != "fp16"
    diverged = lost or error.startswith("step ")  # other errors, such as of a rank that hangs, say nothing about the numbers
    if lines and tokens >= total and not diverged:
        end, whole = _end(description), description.get("whole_eval")
        if whole and "whole_val_loss" not in end:
            remarks.append("unfinished: the whole validation split was not evaluated")
            return False, False
        if not whole and description["eval_every"] and "val_loss" not in last:
            remarks.append("the run was not evaluated at its end")
        return True, any(key in one and not is_finite_number(one[key]) for key, one in (("val_loss", last), ("whole_val_loss", end)))
    if error or lost:
        remarks.append(f"failed after step {last['step']}, {tokens:,} of {total:,} tokens" + (f": {error}" if error else ""))
        return False, diverged
    logged = f"; last logged: {text}" if (text := progress(log).rpartition(", ")[0]) else ""
    remarks.append(f"unfinished (still training, or stopped): step {last['step']}, {tokens:,} of {total:,} tokens{logged}")
    return False, False


def progress(log: list[str]) -> str:
    """Step, losses and time left of a run, by what `launch/training/run_folder/progress.py` logs; empty before the first step."""
    text = "\n".join(log)
    steps = re.findall(r"step +(\d+/\d+)  (loss [\d.]+|loss not finite).*  (\S+ left)$", text, re.MULTILINE)
    evaluated = re.findall(r"(?:, |: )(validation \d[\d.]*(?: \(.*?\))?)", text)
    return ", ".join([f"step {steps[-1][0]}, {steps[-1][1]}", *evaluated[-1:], steps[-1][2]]) if steps else ""


def _last_error(log: list[str]) -> str:
    """The error in the last line of the log, if it is one."""
    error = re.fullmatch(r"\S+ \S+ error: (.*?)(; .*)?", next(reversed(log), ""))
    return error[1] if error else ""


def _measures(
    description: dict[str, Any], columns: dict[str, Column], finished: bool, diverged: bool, resumes: list[int]
) -> dict[str, float]:
    """The numbers that summarize the run up to its last line; those that it lacks are absent.

    final_val_loss: nats per token, of the whole validation split with `--whole_eval`, otherwise of the last evaluation; +inf if the
    run diverged, absent if it is unfinished or was not evaluated at its end. final_val_loss/NAME: that of a source of a mixture.
    step_seconds: the mean over the steps after the first `WARM_UP_STEPS` of each start, without the last step before each resume: when
    several runs are stopped together, all make that step at the same time. timed_steps: their number. tokens_per_second, mfu: of these
    steps together.
    seconds, flops (of all ranks), bytes_sent (by rank 0): sums. bytes_per_step: the mean. peak_memory_bytes: of rank 0, the largest.
    skipped_steps: updates skipped for an overflow in fp16.
    """
    measures: dict[str, float] = {}
    whole = description.get("whole_eval")
    ended = _end(description)
    of_sources = [key.removeprefix("whole_") for key in (*columns, *ended) if "val_loss/" in key]
    for key in dict.fromkeys(["val_loss", *of_sources]):
        final = ended.get(f"whole_{key}") if whole else next(reversed(columns.get(key, np.zeros(0)).tolist()), None)
        if diverged and (description["eval_every"] or whole):
            measures[f"final_{key}"] = math.inf
        elif finished and final is not None and is_finite_number(final):
            measures[f"final_{key}"] = float(final)
    trained = columns["step"] > 0
    if not trained.any():
        return measures

    def summarize(measure: str, summary: Callable[[Column], Any], name: str = "", rows: npt.NDArray[np.bool_] = trained) -> None:
        values = columns.get(name or measure, np.full(len(trained), np.nan))
        values = values[np.isfinite(values) & rows]
        if len(values):
            measures[measure] = float(summary(values))

    step, seconds = columns["step"], columns["step_seconds"]
    timed = step > WARM_UP_STEPS
    for last in resumes:
        timed &= (step < last) | (step > last + WARM_UP_STEPS)
    measures["timed_steps"] = float((timed & np.isfinite(seconds)).sum())
    summarize("step_seconds", np.mean, rows=timed)
    for name in ("tokens_per_second", "mfu"):  # rates: their means over time
        values = columns.get(name, np.full(len(seconds), np.nan))
        known = timed & np.isfinite(values) & (seconds > 0)
        if known.any():
            measures[name] = float(np.average(values[known], weights=seconds[known]))
    for name in ("seconds", "skipped_steps", "flops"):
        summarize(name, lambda values: values[-1])
    summarize("peak_memory_bytes", np.max)
    summarize("bytes_per_step", np.mean, "bytes_sent")
    summarize("bytes_sent", np.sum)
    return measures


# --- published runs -------------------------------------------------------------------------------------------------------------------

#: Columns of a published run, at its evaluations, and the decimals that are kept.
CURVE = {"step": 0, "tokens": 0, "seconds": 2, "val_loss": 5}


def stored_run(run: Run) -> dict[str, Any]:
    """The entry of `run` in a `results.json`: the keys of its description that a comparison needs, its measures, and its evaluations."""
    private = {"command", "folder", "flags", *(name for name, one in VALUES.items() if one.local)}
    description = {key: value for key, value in run.description.items() if key not in private}
    description["config_file"] = "/".join(Path(run.description["config_file"]).parts[-2:])
    description["corpus"] = {key: value for key, value in description["corpus"].items() if key != "path"}
    description["machine"] = {key: value for key, value in (description.get("machine") or {}).items() if key != "host"}
    description["resumes"] = [{key: one.get(key) for key in ("interleaved", "commit")} for one in description.get("resumes", [])]
    rows = np.isfinite(run.columns["val_loss"])
    curve = {name: _numbers(run.columns[name][rows], decimals) for name, decimals in CURVE.items()}
    measures = {name: value if math.isfinite(value) else None for name, value in run.measures.items()}
    state = {"name": run.name, "seed": run.seed, "finished": run.finished, "diverged": run.diverged}
    return {**state, "description": description, "measures": measures, "curve": curve}


def read_stored_run(stored: dict[str, Any]) -> Run:
    """The run that `stored_run` wrote; a measure that is null is +inf."""
    curve = {name: np.array([np.nan if value is None else value for value in stored["curve"][name]], np.float64) for name in CURVE}
    missing = {name: np.full(len(curve["step"]), np.nan) for name in COLUMNS}
    sums = {name: np.zeros(len(curve["step"])) for name in ("flops", "bytes")}
    measures = {name: math.inf if value is None else float(value) for name, value in stored["measures"].items()}
    name = stored["name"]
    return Run(Path(name), name, stored["description"], {**missing, **sums, **curve}, stored["finished"], stored["diverged"], (), measures)


def _numbers(values: Column, decimals: int) -> list[float | int | None]:
    rounded = [round(value, decimals) if math.isfinite(value) else None for value in values.tolist()]
    return [int(value) if value is not None and not decimals else value for value in rounded]
