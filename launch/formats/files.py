"""Small files, read with a limit."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, NoReturn

from data_pipeline.staging import require_regular
from launch.errors import UsageError

MAX_TEXT_BYTES = 2**26


def read_text(file: Path, limit: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a small file, such as a `run.json`.

    Raises:
        OSError: it is missing, not a regular file, or larger than `limit` bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    require_regular(file)
    with open(file, "rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
    return content.decode()


def read_committed(file: Path) -> dict[str, Any]:
    """The JSON object in a file of this repository; empty without the file."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def read_json_object(file: Path, fix: str) -> dict[str, Any]:
    """The JSON object in a small file.

    Raises:
        UsageError: it cannot be read, is not JSON, or is not an object; the message ends with `fix`.
    """
    try:
        content = json.loads(read_text(file), parse_constant=_refuse)
    except OSError as reason:
        raise UsageError(f"{file}: cannot be read ({reason.strerror}); {fix}") from None
    except (ValueError, RecursionError) as reason:
        raise UsageError(f"{file}: is not JSON ({reason}); {fix}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file}: holds a {type(content).__name__}, must be an object; {fix}")
    return content


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}")


def check_writable(path: Path, flag: str) -> None:
    """Raise UsageError, which names `flag`, unless a file or folder can be made at `path`. Creates nothing."""
    try:
        above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        why = "" if above.is_dir() and os.access(above, os.W_OK | os.X_OK) else f", {above} is not a writable folder"
    except OSError as reason:
        why = f" ({reason.strerror})"
    if why:
        raise UsageError(f"{flag} {path}: cannot be written{why}; give another folder")
