"""Reads JSON with the line number of every key, so that messages can name file, key path and line.

The standard library's parser gives no positions, and silently keeps the last of two equal keys; this reader refuses them. As DeepSpeed's
reader does, it accepts comments (`//`, `#`, `/* */`) and trailing commas. Keys that hold a comment, such as "_comment", are left out.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from launch.errors import UsageError
from launch.formats.files import read_text

_STRING = r'"(?:[^"\\]|\\.)*"'
#: The strings and the punctuation of valid JSON.
_TOKEN = re.compile(_STRING + r"|[{}\[\],:]")
#: What DeepSpeed's reader accepts beside JSON, outside of strings: comments, and then commas before a closing bracket.
_BESIDE_JSON = [re.compile(rf"{_STRING}?|({extra})", re.DOTALL) for extra in (r"(?://|\#)[^\n]*|/\*.*?\*/", r",(?=\s*[}\]])")]
#: Keys of which the value is a comment.
_COMMENT_KEY = re.compile(r"_+comment.*|comments?|//.*|\#.*", re.DOTALL | re.IGNORECASE)
LARGEST = 2**63  # later code computes in int64 and fp64
MAX_BYTES = 2**22

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
        text = read_text(Path(path), MAX_BYTES).removeprefix("\ufeff")  # an editor may have put a byte order mark first
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
    elif isinstance(value, (int, float)) and not abs(value) < LARGEST:
        line = max((line for key, line in lines.items() if key == path[: len(key)]), default=1)
        where = f"line {line}: '{dotted(path)}'" if path else "the number"
        raise UsageError(f"{source}: {where} must be finite and below 2^63")


def dotted(path: KeyPath) -> str:
    """`("optimizer", "params", "betas", 0)` as `optimizer.params.betas[0]`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out
