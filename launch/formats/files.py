"""Small files, read with a limit."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from data_pipeline.staging import require_regular
from launch.errors import UsageError

MAX_TEXT_BYTES = 2**26
#: Dotted keys, where `*` is every entry of an object or a list -> the types that their values may have.
Types = dict[str, tuple[type, ...]]
_IN_WORDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    NoneType: "null",
    int: "a whole number",
    float: "a number",
}
_MISSING = object()


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


def wrong_type(content: Any, required: Types, optional: Types) -> str | None:
    """The first value in `content` of another type: "'seed' is null, must be a whole number". None if there is none.

    A whole number must not be negative. A key of `optional` may be missing, and then those below it.
    """
    for key, types in (required | optional).items():
        above = key.rpartition(".")[0]
        if above in optional and not any(isinstance(value, (dict, list)) for _, value in _values_at(content, above.split("."), ())):
            continue
        for name, value in _values_at(content, key.split("."), ()):
            if (value is _MISSING and key in optional) or (type(value) in types and not (type(value) is int and value < 0)):
                continue
            found = "is missing" if value is _MISSING else f"is {json.dumps(value)[:60]}"
            return f"'{name}' {found}, must be {' or '.join(_IN_WORDS[one] for one in types)}"
    return None


def _values_at(value: Any, path: list[str], at: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The dotted key and the value of each place in `value` that `path` names."""
    if not path:
        yield ".".join(at), value
        return
    members = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
    for name in members if path[0] == "*" else path[:1]:
        yield from _values_at(members.get(name, _MISSING), path[1:], (*at, str(name)))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}")


def refuse_links(folder: Path) -> None:
    """Raise UsageError if a file in `folder` is a link: writing would change a file elsewhere. Links to folders may be there."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink() and not path.is_dir():
            raise UsageError(f"{path}: is a link to {os.readlink(path)}, and a run writes its own files; remove the link")


def check_writable(path: Path, flag: str) -> None:
    """Raise UsageError, which names `flag`, unless a file or folder can be made at `path`. Creates nothing."""
    try:
        above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        why = "" if above.is_dir() and os.access(above, os.W_OK | os.X_OK) else f", {above} is not a writable folder"
    except OSError as reason:
        why = f" ({reason.strerror})"
    if why:
        raise UsageError(f"{flag} {path}: cannot be written{why}; give another folder")
