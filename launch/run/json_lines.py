"""JSON with the line number of every value, so that a fault in a configuration is named by file, key path and line.

The standard library's parser gives no positions and keeps the last of two equal keys in silence; this reader does neither.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring
from pathlib import Path
from typing import Any

from launch.run.errors import UsageError

_WHITESPACE = re.compile(r"[ \t\r\n]*")
_ATOM = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")

KeyPath = tuple[str | int, ...]


def read_json(path: str | Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Read a JSON object from `path`.

    Returns:
        The object, and the line (from 1) of each key by its path, e.g. `("optimizer", "params", "lr")`.

    Raises:
        UsageError: the file cannot be read, is not JSON (line and column), repeats a key, or holds no object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; the engine configurations that ship are in ds_configs/") from None
    except (OSError, UnicodeDecodeError) as reason:
        raise UsageError(f"{path}: cannot be read ({reason}); give a JSON file in UTF-8") from None
    try:
        json.loads(text)  # the standard parser's own message and position, for text that is not JSON at all
    except json.JSONDecodeError as fault:
        raise UsageError(f"{path}: line {fault.lineno}, column {fault.colno}: not JSON: {fault.msg}") from None
    lines: dict[KeyPath, int] = {}
    value, _ = _read_value(text, _skip(text, 0), (), lines, str(path))
    if not isinstance(value, dict):
        raise UsageError(f'{path}: holds a {type(value).__name__}, must be an object: {{"zero_optimization": ...}}')
    return value, lines


def _skip(text: str, at: int) -> int:
    return _WHITESPACE.match(text, at).end()


def _read_value(text: str, at: int, path: KeyPath, lines: dict[KeyPath, int], file: str) -> tuple[Any, int]:
    """The value that starts at `at`, and the position behind it. The text is known to be JSON."""
    if text[at] == '"':
        return scanstring(text, at + 1)
    if text[at] == "[":
        items: list[Any] = []
        at = _skip(text, at + 1)
        while text[at] != "]":
            item, at = _read_value(text, at, (*path, len(items)), lines, file)
            items.append(item)
            at = _skip(text, at)
            if text[at] == ",":
                at = _skip(text, at + 1)
        return items, at + 1
    if text[at] == "{":
        members: dict[str, Any] = {}
        at = _skip(text, at + 1)
        while text[at] != "}":
            line = text.count("\n", 0, at) + 1
            key, at = scanstring(text, at + 1)
            if key in members:
                raise UsageError(
                    f"{file}: line {line}: '{dotted((*path, key))}' stands twice (first on line {lines[(*path, key)]}); remove one"
                )
            lines[(*path, key)] = line
            at = _skip(text, _skip(text, at) + 1)  # the colon
            members[key], at = _read_value(text, at, (*path, key), lines, file)
            at = _skip(text, at)
            if text[at] == ",":
                at = _skip(text, at + 1)
        return members, at + 1
    atom = _ATOM.match(text, at)
    if atom is None:  # NaN and Infinity, which json.loads accepts and JSON does not know
        raise UsageError(f"{file}: line {text.count(chr(10), 0, at) + 1}: '{dotted(path)}' is not a JSON number; write a finite one")
    return json.loads(atom.group()), atom.end()


def dotted(path: KeyPath) -> str:
    """`("optimizer", "params", "betas", 0)` as `optimizer.params.betas[0]`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out
