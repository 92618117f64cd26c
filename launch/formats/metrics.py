"""Reads what a run writes: `run.json`, and `metrics.jsonl` with one JSON object a step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from launch.errors import UsageError
from launch.formats.files import read_text

#: The training loss that people are shown is a mean over this many steps, because the loss of one batch is noisy.
MEAN_STEPS = 50


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The valid lines of a `metrics.jsonl`. A line that a kill left incomplete is skipped."""
    return read_good_lines(file)[0]


def read_good_lines(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The valid lines of a `metrics.jsonl`, and the numbers (from 1) of the damaged ones."""
    parsed = [parse_line(text) for text in split_lines(Path(file).read_bytes())]
    return [line for line in parsed if line is not None], [number for number, line in enumerate(parsed, 1) if line is None]


def split_lines(content: bytes) -> list[bytes]:
    """The lines of a file, without their line breaks."""
    return content.removesuffix(b"\n").split(b"\n") if content else []


def parse_line(text: bytes) -> dict[str, Any] | None:
    """The JSON object on one line, or None if it is damaged: not an object with an integer `step`."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def is_finite_number(value: Any) -> bool:
    """Whether a value read from JSON is a finite number; `json.loads` also returns NaN, infinity and integers of any length."""
    return type(value) in (int, float) and abs(value) < 1e30


def recent_loss(losses: Iterable[Any]) -> str:
    """The mean of the last `MEAN_STEPS` finite losses as text: `6.4201 (mean of 50 steps)`."""
    finite = [loss for loss in losses if is_finite_number(loss)][-MEAN_STEPS:]
    return f"{sum(finite) / len(finite):.4f} (mean of {len(finite)} step{'s' * (len(finite) > 1)})" if finite else "not finite"


def read_run_json(file: Path) -> dict[str, Any]:
    """The object in a `run.json`.

    Raises:
        FileNotFoundError: it does not exist.
        UsageError: it cannot be read, or is not a JSON object.
    """
    try:
        description = json.loads(read_text(file), parse_constant=_refuse)
    except FileNotFoundError:
        raise
    except OSError as reason:
        raise UsageError(f"{file}: cannot be read ({reason.strerror}); give another run") from None
    except (ValueError, RecursionError) as reason:
        raise UsageError(f"{file}: is not JSON ({reason}); give another run") from None
    if not isinstance(description, dict):
        raise UsageError(f"{file}: holds a {type(description).__name__}, must be an object; give another run")
    return description


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}")
