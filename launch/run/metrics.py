"""Reading a run's `metrics.jsonl`, the file that everything downstream starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; what a kill left of a last line is not one."""
    lines = []
    for text in Path(file).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break
        if not isinstance(line, dict) or "step" not in line:
            break
        lines.append(line)
    return lines
