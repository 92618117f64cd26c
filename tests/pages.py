"""The pages of the documentation and the commands in them, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Path from the root -> text.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}


def commands(start: str = "") -> list[str]:
    """Every indented command of all pages that begins with `start`, each once. Fenced blocks are not among them."""
    text = "\n".join(re.sub(r"^```\w*\n.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL) for page in PAGES.values())
    text = re.sub(r" *\\\n +", " ", text)  # a command on several lines
    lines = re.findall(r"^    ((?:deepspeed|torchrun|sbatch|python|make|lm_eval) .*)$", text, re.MULTILINE)
    return [line for line in dict.fromkeys(lines) if line.startswith(start)]
