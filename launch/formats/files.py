"""Reads small text files with a limit, and JSON with the line number of every key, so that messages can name file, key path and line.

The standard library's parser gives no positions, and silently keeps the last of two equal keys; `read_json` refuses them. As DeepSpeed's
reader does, it accepts comments (`//`, `#`, `/* */`) and trailing commas. Keys that hold a comment, such as "_comment", are left out.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
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


# --- JSON with the lines of its keys ----------------------------------------------------------------------------------------------------

_STRING = r'"(?:[^"\\]|\\.)*"'
#: The strings and the punctuation of valid JSON.
_TOKEN = re.compile(_STRING + r"|[{}\[\],:]")
#: What DeepSpeed's reader accepts beside JSON, outside of strings: comments, and then commas before a closing bracket.
_BESIDE_JSON = [re.compile(rf"{_STRING}?|({extra})", re.DOTALL) for extra in (r"(?://|\#)[^\n]*|/\*.*?\*/", r",(?=\s*[}\]])")]
#: Keys of which the value is a comment.
_COMMENT_KEY = re.compile(r"_+comment.*|comments?|//.*|\#.*", re.DOTALL | re.IGNORECASE)
NUMBER_BOUND = 2**63  # later code computes in int64 and fp64
MAX_JSON_BYTES = 2**22

KeyPath = tuple[str | int, ...]


def read_json(path: str | Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Read a JSON object from `path`.

    Returns:
        The object, and the line (from 1) of each key by its path, e.g. `("optimizer", "params", "lr")`.

    Raises:
        UsageError: the file cannot be read, is not JSON (line and column), repeats a key, holds a number that is not finite, or
            holds no object.
    """
    try:
        text = read_text(Path(path), MAX_JSON_BYTES).removeprefix("\ufeff")  # an editor may have put a byte order mark first
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; shipped configurations are in ds_configs/") from None
    except UnicodeDecodeError as fault:
        raise UsageError(f"{path}: not a text file in UTF-8 (byte {fault.start}); give a JSON file") from None
    except OSError as reason:
        raise UsageError(f"{path}: cannot be read ({reason.strerror}); give a JSON file such as those in ds_configs/") from None
    value, lines = parse_json(text, str(path))
    if not isinstance(value, dict):
        raise UsageError(f'{path}: holds {json.dumps(value)[:40]}, must be an object: {{"zero_optimization": ...}}')
    return value, lines


def parse_json(text: str, source: str) -> tuple[Any, dict[KeyPath, int]]:
    """The value that `text` holds, and the line of each key. `source` names the text in the UsageError for text that is not JSON."""
    for beside in _BESIDE_JSON:  # becomes spaces, so that lines and columns stay
        text = beside.sub(lambda found: re.sub(r"[^\n]", " ", found[0]) if found[1] else found[0], text)
    try:
        value = json.loads(text, parse_int=_integer, object_pairs_hook=_without_comments)
        lines = _lines_of_keys(text, source)
        _check_numbers(value, (), lines, source)
        return value, lines
    except json.JSONDecodeError as fault:
        raise UsageError(f"{source}: line {fault.lineno}, column {fault.colno}: not JSON: {fault.msg}") from None
    except RecursionError:
        raise UsageError(f"{source}: nested too deep; an engine configuration has four levels") from None


def _without_comments(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if not _COMMENT_KEY.fullmatch(key)}


def _integer(digits: str) -> float:
    return int(digits) if len(digits) < 400 else math.inf  # Python refuses to convert thousands of digits


def _lines_of_keys(text: str, source: str) -> dict[KeyPath, int]:
    """The line of each key of the JSON `text`. Raises UsageError for a key that an object has twice."""
    lines: dict[KeyPath, int] = {}
    path: list[str | int] = []  # the key or the index in each open object and list
    line, counted, string, line_of_string = 1, 0, "", 1
    for token in _TOKEN.finditer(text):
        line += text.count("\n", counted, token.start())
        counted, mark = token.start(), token[0]
        if mark in ("{", "["):
            path.append("" if mark == "{" else 0)
        elif mark in ("}", "]"):
            path.pop()
        elif mark == ",":
            last = path[-1]
            path[-1] = last + 1 if isinstance(last, int) else ""
        elif mark == ":":
            path[-1] = string
            key = tuple(path)
            if any(_COMMENT_KEY.fullmatch(str(part)) for part in key):
                continue
            if key in lines:
                raise UsageError(f"{source}: line {line_of_string}: '{dotted(key)}' is repeated (first on line {lines[key]}); remove one")
            lines[key] = line_of_string
        else:
            string, line_of_string = json.loads(mark), line
    return lines


def _check_numbers(value: Any, path: KeyPath, lines: dict[KeyPath, int], source: str) -> None:
    """Raise UsageError for a number that is not finite or too large; `json.loads` also reads NaN and Infinity."""
    if isinstance(value, (dict, list)):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(member, (*path, key), lines, source)
    elif isinstance(value, (int, float)) and not abs(value) < NUMBER_BOUND:
        line = max((line for key, line in lines.items() if key == path[: len(key)]), default=1)
        where = f"line {line}: '{dotted(path)}'" if path else "the number"
        raise UsageError(f"{source}: {where} must be finite and below 2^63")


def dotted(path: KeyPath) -> str:
    """`("optimizer", "params", "betas", 0)` as `optimizer.params.betas[0]`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out
