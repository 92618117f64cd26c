"""Reading a run's `metrics.jsonl`, the file that everything downstream starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; what a kill left of a last line is not one."""
    return read_good_lines(file)[0]


def read_good_lines(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a `metrics.jsonl` up to the first that is none, and how many there are from that one on."""
    lines: list[dict[str, Any]] = []
    texts = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            break
        lines.append(line)
    return lines, len(texts) - len(lines)
