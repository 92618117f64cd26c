"""Reads the folder of a run, finished or not, into arrays with an entry per optimizer step, and summarizes the run in a few numbers.

Only `run.json`, `metrics.jsonl` and the last line of `log.txt` are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launch.errors import UsageError
from launch.formats.metrics import read_good_lines, read_run_json
from model.accounting import flops_per_token
from model.presets import GPTConfig

Column = npt.NDArray[np.float64]

#: The columns that every run has, filled with NaN if its lines lack them.
COLUMNS = ("step", "tokens", "seconds", "loss", "val_loss", "step_seconds", "tokens_per_second", "peak_memory_bytes", "bytes_sent")
#: Keys of `run.json` that a comparison needs.
NEEDED = {
    "seed": int,
    "config_file": str,
    "total_tokens": int,
    "global_batch_size": int,
    "eval_every": int,
    "eval_batches": int,
    "corpus_fingerprint": str,
    "corpus": dict,
    "shape": dict,
}
#: Steps that the medians of time exclude: the first ones compile, allocate and fill caches.
WARM_UP_STEPS = 10
#: A step whose loss exceeds the lowest one before it by this factor is a spike: the "loss ratio" of Li et al., arXiv 2108.06084, section 3.
SPIKE_RATIO = 1.2


@dataclass(frozen=True, eq=False)
class Run:
    """One run as its folder holds it.

    Attributes:
        folder: where it was read.
        name: the folder's name; text of unknown origin.
        description: its `run.json`.
        columns: float64, an entry for each line, all of one length: `COLUMNS`, every other numeric metric, and the running sums "flops" (of
            all ranks) and "bytes" (sent by rank 0). NaN where a line lacks the key or its number is not finite. The line of step 0, the
            validation of the untrained model, has no loss.
        finished: the run has trained on all its tokens.
        diverged: the run ended or failed because of a non-finite loss or gradient.
        remarks: what is missing, damaged, repeated or not finite, in sentences without a full stop.
    """

    folder: Path
    name: str
    description: dict[str, Any]
    columns: dict[str, Column]
    finished: bool
    diverged: bool
    remarks: tuple[str, ...]

    @property
    def seed(self) -> int:
        return int(self.description["seed"])

    @property
    def state(self) -> str:
        """ "finished", "failed" (it diverged before its end) or "unfinished" (still training, or stopped)."""
        return "finished" if self.finished else "failed" if self.diverged else "unfinished"

    def measures(self) -> dict[str, float]:
        """The numbers that summarize the run up to its last line; those that it lacks are absent.

        final_val_loss: nats per token; +inf if the run diverged, absent if it is unfinished or was not evaluated at its end.
        step_seconds, tokens_per_second, mfu: medians over the steps after the first `WARM_UP_STEPS`.
        seconds, flops (of all ranks), bytes_sent (by rank 0): sums. bytes_per_step: the mean. peak_memory_bytes: of rank 0, the largest.
        skipped_steps: updates skipped for an overflow in fp16. spikes: steps with a loss above `SPIKE_RATIO` x the lowest before, or a
        non-finite one. non_finite_losses: only the latter.
        """
        columns = self.columns
        measures: dict[str, float] = {}
        if self.diverged and self.description["eval_every"]:
            measures["final_val_loss"] = math.inf
        elif self.finished and math.isfinite(final := columns["val_loss"][-1]):
            measures["final_val_loss"] = float(final)
        trained = columns["step"] > 0
        if not trained.any():
            return measures

        def finite(name: str, rows: Any = slice(None)) -> Column:
            column = columns.get(name, np.zeros(len(trained)) + np.nan)[rows]
            return column[np.isfinite(column)]

        summaries: dict[str, tuple[Callable[[Column], Any], Column]] = {}
        summaries |= {
            name: (np.median, finite(name, columns["step"] > WARM_UP_STEPS)) for name in ("step_seconds", "tokens_per_second", "mfu")
        }
        summaries |= {name: (_last, finite(name)) for name in ("seconds", "skipped_steps")}
        summaries |= {"peak_memory_bytes": (np.max, finite("peak_memory_bytes"))}
        summaries |= {"bytes_per_step": (np.mean, finite("bytes_sent")), "bytes_sent": (np.sum, finite("bytes_sent"))}
        measures |= {name: float(summarize(values)) for name, (summarize, values) in summaries.items() if len(values)}
        loss = np.nan_to_num(columns["loss"][trained], nan=np.inf)
        lowest_before = np.minimum.accumulate([np.inf, *loss[:-1]])
        measures["spikes"] = float(np.count_nonzero((loss > SPIKE_RATIO * lowest_before) | np.isinf(loss)))
        measures["non_finite_losses"] = float(np.count_nonzero(np.isinf(loss)))
        measures["flops"] = float(columns["flops"][-1])
        return measures


def read_run(folder: str | Path) -> Run:
    """Read the run in `folder`; damaged lines of its metrics are ignored and remarked.

    Raises:
        UsageError: this is not a run folder, or its `run.json` is damaged or lacks keys that a comparison needs.
    """
    folder = Path(folder)
    description, model = _read_description(folder)
    file = folder / "metrics.jsonl"
    remarks: list[str] = []
    lines: list[dict[str, Any]] = []
    damaged: list[int] = []
    try:
        lines, damaged = read_good_lines(file)
    except FileNotFoundError:
        pass
    except OSError as reason:
        raise UsageError(f"{file}: cannot be read ({reason.strerror}); give a readable run folder") from None
    if damaged == [len(lines) + 1]:
        remarks.append("the last line of metrics.jsonl is incomplete and was ignored")
    elif damaged:
        remarks.append(f"{len(damaged)} damaged line{'s' * (len(damaged) > 1)} of metrics.jsonl ignored, the first is line {damaged[0]}")
    lines, repeated = _without_repeated(lines)
    if repeated:
        remarks.append(f"{repeated} lines were ignored because a resume repeated their steps or went back before them")
    if not lines:
        remarks.append("metrics.jsonl contains no step")
    columns = _columns(lines, model)
    if gaps := _gaps(columns["step"]):
        remarks.append(f"metrics.jsonl lacks {gaps}, and so do sums over the run")
    for key, name in (("loss", "training loss"), ("val_loss", "validation loss")):
        steps = [line["step"] for line in lines if key in line and not _is_finite(line[key])]
        if steps:
            remarks.append(f"the {name} is not finite in {len(steps)} step{'s' * (len(steps) > 1)}, first in step {steps[0]}")
    finished, diverged = _ending(folder, description, lines, remarks)
    return Run(folder, folder.resolve().name, description, columns, finished, diverged, tuple(remarks))


def _read_description(folder: Path) -> tuple[dict[str, Any], GPTConfig]:
    """`run.json`, and the model that it describes."""
    file = folder / "run.json"
    try:
        found = "" if folder.is_dir() else "is a file" if folder.exists() else "no such folder"
    except OSError as reason:  # a name that is too long, or a parent folder without permission
        found = f"cannot be read ({reason.strerror})"
    if found:
        raise UsageError(f"{folder}: {found}; give run folders, such as runs/first")
    try:
        description = read_run_json(file)
    except FileNotFoundError:
        raise UsageError(f"{folder}: contains no run.json, so it is not a run folder; give folders such as runs/first") from None
    for key, kind in NEEDED.items():
        if type(description.get(key)) is not kind:
            found = f"'{key}' is {json.dumps(description[key])[:40]}" if key in description else f"lacks '{key}'"
            raise UsageError(f"{file}: {found}, must be of type {kind.__name__} for a comparison")
    description.setdefault("no_cross_document", False)  # runs older than this flag lack it
    try:
        model = GPTConfig(**description["shape"], vocab_size=description["corpus"].get("vocab_size"))
        flops_per_token(model, int(model.seq_len), float(model.n_layer))
        return description, model
    except (TypeError, ValueError, OverflowError) as reason:
        raise UsageError(f"{file}: 'shape' and 'corpus.vocab_size' do not describe a model ({reason}), which a comparison needs") from None


def _without_repeated(lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The last line of each step, without later steps that a resume discarded; and how many lines were left out."""
    kept: list[dict[str, Any]] = []
    lowest_after = math.inf
    for line in reversed(lines):
        if line["step"] < lowest_after:
            kept.append(line)
            lowest_after = line["step"]
    return kept[::-1], len(lines) - len(kept)


def _columns(lines: list[dict[str, Any]], model: GPTConfig) -> dict[str, Column]:
    names = dict.fromkeys([*COLUMNS, *(name for line in lines for name in line)])
    columns = {}
    for name in names:
        column = _column([line.get(name) for line in lines])
        if name in COLUMNS or not np.isnan(column).all():
            columns[name] = column
    tokens = np.diff(np.nan_to_num(columns["tokens"]), prepend=0.0)
    columns["flops"] = np.cumsum(tokens * _flops_per_token(columns, model))
    columns["bytes"] = np.nancumsum(columns["bytes_sent"])
    return columns


def _column(values: Sequence[Any]) -> Column:
    """Finite numbers as they are, everything else as NaN."""
    return np.array([value if _is_finite(value) else np.nan for value in values], dtype=np.float64)


def _last(values: Column) -> float:
    return float(values[-1])


def _is_finite(value: Any) -> bool:
    """Whether a JSON value is a number in the range of float64."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False


def _flops_per_token(columns: dict[str, Column], model: GPTConfig) -> Column:
    """FLOPs per token in each step, of the blocks and the sequence length that the step used: all blocks and the full length by default."""
    defaults = {"seq_len": model.seq_len, "kept_blocks": model.n_layer}
    missing = np.full(len(columns["step"]), np.nan)
    lengths, blocks = (np.nan_to_num(columns.get(name, missing), nan=value).tolist() for name, value in defaults.items())
    shapes = list(zip(lengths, blocks, strict=True))
    flops = {(length, kept): flops_per_token(model, int(length), kept) for length, kept in set(shapes)}
    return np.array([flops[shape] for shape in shapes], dtype=np.float64)


def _gaps(steps: Column) -> str:
    """The steps without a line, in words."""
    before = np.concatenate([[0.0], steps])
    gaps = [(int(low) + 1, int(high) - 1) for low, high in zip(before, steps, strict=False) if high - low > 1]
    named = [f"step {low}" if low == high else f"steps {low} to {high}" for low, high in gaps[:3]]
    return ", ".join(named) + (f" and {len(gaps) - 3} more gaps" if len(gaps) > 3 else "")


def _ending(folder: Path, description: dict[str, Any], lines: list[dict[str, Any]], remarks: list[str]) -> tuple[bool, bool]:
    """Whether the run has finished, and whether it diverged; adds a remark if it has not finished."""
    last = lines[-1] if lines else {"step": 0, "tokens": 0}
    tokens, total = last.get("tokens"), description["total_tokens"]
    tokens = tokens if _is_finite(tokens) else 0
    if lines and tokens >= total:
        diverged = "val_loss" in last and not _is_finite(last["val_loss"])
        if not diverged and description["eval_every"] and "val_loss" not in last:
            remarks.append("the run was not evaluated at its end")
        return True, diverged
    error = _last_error(folder)
    # A non-finite loss ends a run, except in fp16, where the step is skipped and the loss scale lowered.
    lost = "loss" in last and not _is_finite(last["loss"]) and description.get("precision") != "fp16"
    if error or lost:
        remarks.append(f"failed after step {last['step']}, {tokens:,} of {total:,} tokens" + (f": {error}" if error else ""))
        return False, True
    remarks.append(f"unfinished (still training, or stopped): step {last['step']}, {tokens:,} of {total:,} tokens")
    return False, False


def _last_error(folder: Path) -> str:
    """The error in the last line of the log, if it is one."""
    try:
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    error = re.fullmatch(r"\S+ \S+ error: (.*?)(; .*)?", lines[-1]) if lines else None
    return error[1] if error else ""
