"""The parts of `python -m benchmarks.gpu`, their cells, and where things lie."""

from __future__ import annotations

import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
#: What is brought along and made on the way; ignored by git.
WORK = ROOT / ".gpu"
WHEELS, SITE, BUNDLE = WORK / "wheels", WORK / "site", WORK / "repository.bundle"
PARTS = ("setup", "correctness", "utilization")


def corpus(tiny: bool) -> Path:
    """Where set-up prepares the text."""
    return ROOT / "data" / ("packages_tiny" if tiny else "packages")


def commands(part: str, tiny: bool) -> dict[str, list[str]]:
    """The command of each cell of `part`, by the cell's name."""
    small = ["--tiny"] if tiny else []
    if part == "setup":
        return {"setup": ["benchmarks/gpu/setup.py", *small]}
    data = [] if part == "correctness" else ["--data", str(corpus(tiny).relative_to(ROOT))]
    cells = importlib.import_module(f"benchmarks.{part}").cells(tiny)
    return {name: [f"benchmarks/{part}.py", "--only", name, *small, *data] for name in cells}
