"""Reads a run's folder, finished or not, into arrays: one entry for each optimizer step, and the numbers that stand for the whole run.

Only `run.json`, `metrics.jsonl` and the last line of `log.txt` are read; nothing here needs torch, DeepSpeed or the corpus.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
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

#: The columns that every run has, of NaN where its lines have none.
COLUMNS = ("step", "tokens", "seconds", "loss", "val_loss", "step_seconds", "tokens_per_second", "peak_memory_bytes", "bytes_sent")
#: What `run.json` must say for a run to be compared with others.
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
#: Steps before the medians of time begin: the first ones compile, allocate and fill caches.
WARM_UP_STEPS = 10
#: A step whose loss is above the lowest before it by this factor is a spike: the "loss ratio" of Li et al., arXiv 2108.06084, section 3.
SPIKE_RATIO = 1.2


@dataclass(frozen=True, eq=False)
class Run:
    """One run as its folder holds it.

    Attributes:
        folder: where it was read.
        name: the folder's name: any text, to be escaped wherever it is shown.
        description: its `run.json`.
        columns: float64, an entry for each line that was read, all of one length. Beside `COLUMNS` and every other numeric metric of the
            lines: "flops" (of all ranks) and "bytes" (sent by rank 0), both summed from the start. NaN where a line lacks the key, or had a
            number that was not finite. The line of step 0, the untrained model's validation, has no loss.
        finished: the last step has reached the run's tokens.
        diverged: it ended, or could not go on, because a loss or a gradient was no number.
        remarks: how it was read, in sentences without a full stop: what is missing, torn, rewound or not finite.
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
        """In a word: "finished", "failed" (it could not go on) or "unfinished" (still going, or stopped)."""
        return "finished" if self.finished else "failed" if self.diverged else "unfinished"

    def measures(self) -> dict[str, float]:
        """The numbers that stand for the run up to its last line, each left out where there is none.

        final_val_loss: nats a token; +inf for a run that diverged, left out for one that is unfinished or was not evaluated at its end.
        step_seconds, tokens_per_second, mfu: medians over the steps after the first `WARM_UP_STEPS`.
        seconds, flops (of all ranks), bytes_sent (by rank 0): sums. bytes_per_step: the mean. peak_memory_bytes: of rank 0, the largest.
        skipped_steps: updates skipped for an overflow in fp16. spikes: steps with a loss above `SPIKE_RATIO` x the lowest before, or none
        that is finite. non_finite_losses: the latter alone.
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
        warm = columns["step"] > WARM_UP_STEPS
        for name in ("step_seconds", "tokens_per_second", "mfu"):
            if name in columns and len(values := _finite(columns[name][warm])):
                measures[name] = float(np.median(values))
        if len(values := _finite(columns["seconds"])):
            measures["seconds"] = float(values[-1])
        if len(values := _finite(columns["peak_memory_bytes"])):
            measures["peak_memory_bytes"] = float(values.max())
        if len(values := _finite(columns["bytes_sent"])):
            measures |= {"bytes_per_step": float(values.mean()), "bytes_sent": float(values.sum())}
        if "skipped_steps" in columns and len(values := _finite(columns["skipped_steps"])):
            measures["skipped_steps"] = float(values[-1])
        loss = np.nan_to_num(columns["loss"][trained], nan=np.inf)
        lowest_before = np.minimum.accumulate([np.inf, *loss[:-1]])
        measures["spikes"] = float(np.count_nonzero((loss > SPIKE_RATIO * lowest_before) | np.isinf(loss)))
        measures["non_finite_losses"] = float(np.count_nonzero(np.isinf(loss)))
        measures["flops"] = float(columns["flops"][-1])
        return measures


def read_run(folder: str | Path) -> Run:
    """The run in `folder`, as far as its files are good.

    Raises:
        UsageError: this is no run folder, or its `run.json` is damaged or lacks what a comparison needs.
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
        raise UsageError(f"{file}: cannot be read ({reason.strerror}); give a run folder that can") from None
    if damaged == [len(lines) + 1]:
        remarks.append("the last line of metrics.jsonl is torn, and was left out")
    elif damaged:
        remarks.append(f"{len(damaged)} damaged line{'s' * (len(damaged) > 1)} of metrics.jsonl, the first is line {damaged[0]}, left out")
    lines, rewound = _without_rewound(lines)
    if rewound:
        remarks.append(f"{rewound} lines were left out, of steps that a resume went back behind: each step counts as it was written last")
    if not lines:
        remarks.append("no step is in metrics.jsonl")
    columns = _columns(lines, model)
    if gaps := _gaps(columns["step"]):
        remarks.append(f"no lines of {gaps}: sums over the run lack them")
    for key, name in (("loss", "training loss"), ("val_loss", "validation loss")):
        steps = [line["step"] for line in lines if key in line and not _is_finite(line[key])]
        if steps:
            remarks.append(f"the {name} is not finite in {len(steps)} step{'s' * (len(steps) > 1)}, first in step {steps[0]}")
    finished, diverged = _ending(folder, description, lines, remarks)
    return Run(folder, folder.resolve().name, description, columns, finished, diverged, tuple(remarks))


def _read_description(folder: Path) -> tuple[dict[str, Any], GPTConfig]:
    """`run.json`, and the model that it names."""
    file = folder / "run.json"
    try:
        found = "" if folder.is_dir() else "is a file" if folder.exists() else "no such folder"
    except OSError as reason:  # a name that is too long, a folder above that may not be searched
        found = f"cannot be read ({reason.strerror})"
    if found:
        raise UsageError(f"{folder}: {found}; give run folders, such as runs/first")
    try:
        description = read_run_json(file)
    except FileNotFoundError:
        raise UsageError(f"{folder}: holds no run.json, so it is not a run folder; give folders such as runs/first") from None
    for key, kind in NEEDED.items():
        if type(description.get(key)) is not kind:
            found = f"'{key}' is {json.dumps(description[key])[:40]}" if key in description else f"lacks '{key}'"
            raise UsageError(f"{file}: {found}, must be a {kind.__name__}; the run cannot be compared without")
    description.setdefault("no_cross_document", False)  # a run from before there was this flag
    try:
        model = GPTConfig(**description["shape"], vocab_size=description["corpus"].get("vocab_size"))
        flops_per_token(model, int(model.seq_len), float(model.n_layer))
        return description, model
    except (TypeError, ValueError, OverflowError) as reason:
        raise UsageError(f"{file}: 'shape' and 'corpus.vocab_size' are no model ({reason}); the run cannot be compared without") from None


def _without_rewound(lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The lines of the run as it went in the end, and how many of steps that a resume went back behind."""
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
    """Numbers as they are; everything else, and what is not finite, as NaN."""
    try:
        column = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):  # texts, or integers of hundreds of digits, are among them
        column = np.empty((0, 0))
    if column.ndim != 1:
        column = np.array([value if _is_finite(value) else np.nan for value in values], dtype=np.float64)
    column[~np.isfinite(column)] = np.nan
    return column


def _finite(column: Column) -> Column:
    return column[np.isfinite(column)]


def _is_finite(value: Any) -> bool:
    """Whether a value of a JSON is a number that a float64 holds."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False


def _flops_per_token(columns: dict[str, Column], model: GPTConfig) -> Column:
    """FLOPs of a token in each step: of the blocks that ran, on rows of the length that they had."""
    rows = len(columns["step"])
    # A technique that is not on reports nothing, which is all blocks on rows of the model's length.
    lengths, blocks = (
        np.nan_to_num(columns.get(name, np.full(rows, np.nan)), nan=value).tolist()
        for name, value in (("seq_len", model.seq_len), ("kept_blocks", model.n_layer))
    )
    shapes = list(zip(lengths, blocks, strict=True))
    flops = {(length, kept): flops_per_token(model, int(length), kept) for length, kept in set(shapes)}
    return np.array([flops[shape] for shape in shapes], dtype=np.float64)


def _gaps(steps: Column) -> str:
    """The steps of which there is no line, in words."""
    before = np.concatenate([[0.0], steps])
    gaps = [(int(low) + 1, int(high) - 1) for low, high in zip(before, steps, strict=False) if high - low > 1]
    named = [f"step {low}" if low == high else f"steps {low} to {high}" for low, high in gaps[:3]]
    return ", ".join(named) + (f" and {len(gaps) - 3} more gaps" if len(gaps) > 3 else "")


def _ending(folder: Path, description: dict[str, Any], lines: list[dict[str, Any]], remarks: list[str]) -> tuple[bool, bool]:
    """Whether the run has finished, and whether it diverged; says so among the remarks where it has not, or did."""
    last = lines[-1] if lines else {"step": 0, "tokens": 0}
    tokens, total = last.get("tokens"), description["total_tokens"]
    tokens = tokens if _is_finite(tokens) else 0
    if lines and tokens >= total:
        diverged = "val_loss" in last and not _is_finite(last["val_loss"])
        if not diverged and description["eval_every"] and "val_loss" not in last:
            remarks.append("its end was not evaluated")
        return True, diverged
    error = _last_error(folder)
    # A loss that is no number ends a run, but in fp16, where the loss scale is there for that.
    lost = "loss" in last and not _is_finite(last["loss"]) and description.get("precision") != "fp16"
    if error or lost:
        remarks.append(f"failed after step {last['step']}, {tokens:,} of {total:,} tokens" + (f": {error}" if error else ""))
        return False, True
    remarks.append(f"unfinished, still going or stopped: step {last['step']}, {tokens:,} of {total:,} tokens")
    return False, False


def _last_error(folder: Path) -> str:
    """Why the run could not go on, where that is the last that its log says."""
    try:
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    error = re.fullmatch(r"\S+ \S+ error: (.*?)(; .*)?", lines[-1]) if lines else None
    return error[1] if error else ""
