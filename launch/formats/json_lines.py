"""JSON with the line number of every value, so that a fault in a configuration is named by file, key path and line.

The standard library's parser gives no positions and keeps the last of two equal keys in silence; this reader does neither.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

from launch.errors import UsageError

_STRINGS = json.JSONDecoder()
_WHITESPACE = re.compile(r"[ \t\r\n]*")
_ATOM = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
LARGEST = 2**63  # what follows computes in int64 and in doubles
MAX_CHARACTERS = 4_000_000

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
        kind = os.stat(path).st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # a pipe or a device may never end
            raise UsageError(f"{path}: is not a regular file; give a JSON file such as those in ds_configs/")
        with open(path, encoding="utf-8-sig") as file:  # an editor may have put a byte order mark first
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; the engine configurations that ship are in ds_configs/") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder; give a JSON file such as those in ds_configs/") from None
    except UnicodeDecodeError as fault:
        raise UsageError(f"{path}: not a text file in UTF-8 (byte {fault.start}); give a JSON file") from None
    except OSError as reason:
        raise UsageError(f"{path}: cannot be read ({reason.strerror}); give a JSON file that can") from None
    if len(text) > MAX_CHARACTERS:
        raise UsageError(
            f"{path}: has more than {MAX_CHARACTERS:,} characters, and an engine configuration a few thousand; give another file"
        )
    value, lines = parse_json(text, str(path))
    if not isinstance(value, dict):
        raise UsageError(f'{path}: holds {json.dumps(value)[:40]}, must be an object: {{"zero_optimization": ...}}')
    return value, lines


def parse_json(text: str, source: str) -> tuple[Any, dict[KeyPath, int]]:
    """The value that `text` holds, and the line of each key. `source` names the text in the UsageError for text that is not JSON."""
    try:
        json.loads(text, parse_int=len)  # the standard parser's own message and position, for text that is not JSON at all
        lines: dict[KeyPath, int] = {}
        return _read_value(text, _skip(text, 0), (), lines, source)[0], lines
    except json.JSONDecodeError as fault:
        raise UsageError(f"{source}: line {fault.lineno}, column {fault.colno}: not JSON: {fault.msg}") from None
    except RecursionError:
        raise UsageError(f"{source}: nested too deep; an engine configuration has four levels") from None


def _skip(text: str, at: int) -> int:
    space = _WHITESPACE.match(text, at)
    assert space is not None, "the pattern matches no space too"
    return space.end()


def _read_value(text: str, at: int, path: KeyPath, lines: dict[KeyPath, int], source: str) -> tuple[Any, int]:
    """The value that starts at `at`, and the position behind it. The text is known to be JSON."""
    if text[at] == '"':
        return _STRINGS.raw_decode(text, at)
    if text[at] == "[":
        items: list[Any] = []
        at = _skip(text, at + 1)
        while text[at] != "]":
            item, at = _read_value(text, at, (*path, len(items)), lines, source)
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
            key, at = _STRINGS.raw_decode(text, at)
            here = (*path, key)
            if key in members:
                raise UsageError(f"{source}: line {line}: '{dotted(here)}' stands twice (first on line {lines[here]}); remove one")
            lines[here] = line
            at = _skip(text, _skip(text, at) + 1)  # the colon
            members[key], at = _read_value(text, at, here, lines, source)
            at = _skip(text, at)
            if text[at] == ",":
                at = _skip(text, at + 1)
        return members, at + 1
    atom = _ATOM.match(text, at)
    value: Any = None
    if atom is not None:
        value = json.loads(atom.group()) if len(atom.group()) < 400 else math.inf
    # No atom are NaN and Infinity, which json.loads accepts and JSON does not know.
    if atom is None or (isinstance(value, (int, float)) and not abs(value) < LARGEST):
        where = f"line {text.count(chr(10), 0, at) + 1}: '{dotted(path)}' is" if path else "is"
        raise UsageError(f"{source}: {where} no finite number of a sensible size; write one below 2^63")
    return value, atom.end()


def dotted(path: KeyPath) -> str:
    """`("optimizer", "params", "betas", 0)` as `optimizer.params.betas[0]`."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out
