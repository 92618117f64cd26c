"""Reading what a run has written: `run.json`, and `metrics.jsonl`, the file that everything downstream starts from."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from launch.errors import UsageError

#: Steps over whose batches the training loss that people are shown is a mean. One batch of a small model says little.
MEAN_STEPS = 50
MAX_TEXT_BYTES = 2**26
MAX_LOSS = 1e30  # a larger one is no loss: NaN, infinity, an integer of hundreds of digits


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` that are good; what a kill left of a last line is not one."""
    return read_good_lines(file)[0]


def read_good_lines(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The good lines of a `metrics.jsonl`, and the numbers (from 1) of the damaged ones between and after them."""
    parsed = [parse_line(text) for text in split_lines(Path(file).read_bytes())]
    return [line for line in parsed if line is not None], [number for number, line in enumerate(parsed, 1) if line is None]


def split_lines(content: bytes) -> list[bytes]:
    """The lines of a file, without their line breaks."""
    return content.removesuffix(b"\n").split(b"\n") if content else []


def parse_line(text: bytes) -> dict[str, Any] | None:
    """The object of one line, None where it is damaged: it is no JSON object with a whole number as its `step`."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def recent_loss(losses: Iterable[Any]) -> str:
    """The mean of the last `MEAN_STEPS` losses that are finite, with their number, for people: `6.4201 (mean of 50 steps)`."""
    finite = [loss for loss in losses if type(loss) in (int, float) and abs(loss) < MAX_LOSS][-MEAN_STEPS:]
    return f"{sum(finite) / len(finite):.4f} (mean of {len(finite)} step{'s' * (len(finite) > 1)})" if finite else "not finite"


def read_text(file: Path) -> str:
    """The text of a `run.json` or a `state.json`.

    Raises:
        OSError: it is missing, not a regular file (a pipe may never end), or larger than any of them.
        UnicodeDecodeError: it is not UTF-8.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    with open(file, "rb") as stream:
        content = stream.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
    return content.decode()


def read_run_json(file: Path) -> dict[str, Any]:
    """The object in a `run.json`.

    Raises:
        FileNotFoundError: it is not there.
        UsageError: it cannot be read, or holds no object of JSON.
    """
    try:
        description = json.loads(read_text(file), parse_constant=_refuse)
    except FileNotFoundError:
        raise
    except OSError as reason:
        raise UsageError(f"{file}: cannot be read ({reason.strerror}); give a run folder that can") from None
    except (ValueError, RecursionError) as reason:
        raise UsageError(f"{file}: is not JSON ({reason}); it cannot be told which run this is; give another run") from None
    if not isinstance(description, dict):
        raise UsageError(
            f"{file}: holds a {type(description).__name__}, must be an object; it cannot be told which run this is; give another run"
        )
    return description


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}")
