"""Reads what a run writes: `run.json`, and `metrics.jsonl` with one JSON object per step."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any

from launch.errors import UsageError, print_once
from launch.formats.files import Types, read_json_object, wrong_type
from model.presets import GPTConfig

#: The keys of `run.json` that its readers need.
RUN_KEYS: Types = {
    **dict.fromkeys(("shape", "corpus", "optimizer", "techniques", "engine", "machine", "versions"), (dict,)),
    **dict.fromkeys(("config_file", "corpus_fingerprint", "precision"), (str,)),
    **dict.fromkeys(("seed", "ranks", "zero_stage", "total_tokens", "eval_every", "eval_batches"), (int,)),
    **dict.fromkeys(("global_batch_size", "micro_batch_size"), (int,)),
    "no_cross_document": (bool,),
    "command": (list,),
    **dict.fromkeys(("finished.step", "finished.tokens"), (int,)),  # once it has finished
}
#: Those that earlier versions did not write, or that depend on the run.
OPTIONAL_RUN_KEYS: Types = {
    **dict.fromkeys(("optimizer.params", "resumes.*"), (dict,)),
    "techniques.*": (dict, int),
    **dict.fromkeys(("resumes", "resumes.*.command", "corpus.sources", "machine.gpus"), (list,)),
    **dict.fromkeys(("flags", "resumes.*.flags"), (dict, NoneType)),  # `--resume FOLDER` reads them
    **dict.fromkeys(("folder", "resumes.*.folder"), (str, NoneType)),
    "resumes.*.changes": (list, NoneType),
    "resumes.*.changes.*": (str,),
    "spike_rule": (str, NoneType),
    "finished": (dict, NoneType),
}
#: The numbers of a line that every reader needs; null where one is not finite.
COLUMNS = ("step", "tokens", "seconds", "loss", "val_loss", "step_seconds", "tokens_per_second", "peak_memory_bytes", "bytes_sent", "flops")
#: The displayed training loss is a mean over this many steps, because the loss of one batch is noisy.
MEAN_STEPS = 50


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The valid lines of a `metrics.jsonl`. Damaged lines are skipped, with a warning on standard error that counts them."""
    lines, skipped = read_valid_lines(file)
    if skipped:
        print_once(f"warning: {file.parent}/{skipped}", sys.stderr)
    return lines


def read_valid_lines(file: Path) -> tuple[list[dict[str, Any]], str]:
    """The valid lines of a `metrics.jsonl`, and a sentence that counts the damaged ones; it is empty if there are none."""
    parsed = [parse_line(text) for text in split_lines(Path(file).read_bytes())]
    damaged = [number for number, line in enumerate(parsed, 1) if line is None]
    skipped = f"{file.name}: {len(damaged)} damaged line{'s' * (len(damaged) > 1)} skipped, first line {damaged[0]}" if damaged else ""
    return [line for line in parsed if line is not None], skipped


def by_step(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per step. An evaluation after the last step of a run has a line of its own."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        found.setdefault(line["step"], {}).update(line)
    return [*found.values()]


def split_lines(content: bytes) -> list[bytes]:
    """The lines of a file, without their line breaks."""
    return content.removesuffix(b"\n").split(b"\n") if content else []


def parse_line(text: bytes) -> dict[str, Any] | None:
    """The JSON object on one line, or None if it is damaged: not an object with an integer `step` and numbers or null in `COLUMNS`."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    return line if all(type(line.get(name)) in (int, float, type(None)) for name in COLUMNS) else None


def is_finite_number(value: Any) -> bool:
    """Whether a value read from JSON is a finite number; `json.loads` also returns NaN, infinity and integers of any length."""
    return type(value) in (int, float) and abs(value) < 1e30


def read_log(run: Path) -> list[str]:
    """The lines of a run's `log.txt`; none if it cannot be read."""
    try:
        return (run / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def resumed_after(log: Iterable[str]) -> list[int]:
    """The step after which each resume continued, by the lines of a log."""
    found = (re.fullmatch(r"\S+ \S+ resuming after step (\d{1,18})", line) for line in log)
    return [int(one[1]) for one in found if one]


def recent_loss(losses: Iterable[Any]) -> str:
    """The mean of the last `MEAN_STEPS` finite losses as text: `6.4201 (mean of 50 steps)`."""
    finite = [loss for loss in losses if is_finite_number(loss)][-MEAN_STEPS:]
    return f"{sum(finite) / len(finite):.4f} (mean of {len(finite)} step{'s' * (len(finite) > 1)})" if finite else "not finite"


def evaluated_losses(line: dict[str, Any]) -> str:
    """The losses of an evaluation as text: `validation 4.6815`, of a mixture with those of its sources; empty without one."""
    own = ", ".join(f"{key.partition('/')[2]} {value:.4f}" for key, value in line.items() if key.startswith("val_loss/"))
    return f"validation {line['val_loss']:.4f}{own and f' ({own})'}" if "val_loss" in line else ""


def read_run_json(file: Path) -> dict[str, Any]:
    """The content of a `run.json`.

    Raises:
        UsageError: it cannot be read, is not a JSON object, lacks one of `RUN_KEYS`, has a value of another type, or does not
            describe a model.
    """
    description = read_json_object(file, "give a run folder, such as runs/first")
    if fault := wrong_type(description, RUN_KEYS, OPTIONAL_RUN_KEYS):
        raise UsageError(f"{file}: {fault}; give a run folder that training wrote")
    try:
        model_of_run(description)
    except (TypeError, ValueError) as reason:
        raise UsageError(f"{file}: 'shape' and 'corpus.vocab_size' do not describe a model ({reason}); give another run") from None
    return description


def model_of_run(description: dict[str, Any]) -> GPTConfig:
    """The model that a `run.json` describes."""
    return GPTConfig(**description["shape"], vocab_size=description["corpus"].get("vocab_size"), init_seed=description["seed"])
