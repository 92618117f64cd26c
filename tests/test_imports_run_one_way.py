"""Imports run one way: between the folders, between the parts of `launch/`, and between files; and `--help` imports no torch."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("launch", "recipes", "model", "data_pipeline", "benchmarks")
#: What each package may import of the others.
BELOW = {
    "benchmarks": {"launch", "recipes", "model", "data_pipeline"},
    "launch": {"recipes", "model", "data_pipeline"},
    "recipes": {"model"},
    "model": set(),
    "data_pipeline": set(),
}
#: The parts of `launch/`, each of which imports those below it: a command is on the floor above all parts.
FLOORS = {"errors": 0, "formats": 1, "config": 2, "training": 3, "comparison": 4, "trained_model": 4}
COMMANDS = 5
#: The one place for the other ranks.
DISTRIBUTED = "launch/training/ranks/distributed.py"
HELPS = [f"launch/{name}.py" for name in ("pretrain", "compare", "export", "generate", "score", "plan")] + ["data_pipeline/prepare.py"]


def modules(root: Path) -> dict[str, Path]:
    """Every module of the packages below `root`, by its dotted name."""
    files = sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports(name: str, file: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import of a file, inside functions too; `from a import b` as a.b."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def floor(name: str) -> int | None:
    """On which floor of `launch/` a module is; None outside it."""
    parts = name.split(".")
    return FLOORS.get(parts[1], COMMANDS) if parts[0] == "launch" and len(parts) > 1 else None


def faults(root: Path) -> list[str]:
    """Every import that runs the wrong way, as `file:line: what`, and every circle of files."""
    known, found = modules(root), []
    graph: dict[str, set[str]] = {name: set() for name in known}
    for name, file in known.items():
        package = name.split(".")[0]
        for imported, line in imports(name, file):
            here = f"{file.relative_to(root).as_posix()}:{line}: "
            top = imported.split(".")[0]
            if top in PACKAGES and top != package and top not in BELOW[package]:
                found.append(f"{here}{package} imports {imported}")
            if (
                imported.startswith(("torch.distributed", "deepspeed.comm"))
                and package != "benchmarks"
                and not here.startswith(DISTRIBUTED)
            ):
                found.append(f"{here}{imported} is for {DISTRIBUTED} alone")
            module = next((one for one in (imported, imported.rpartition(".")[0]) if one in known and one != name), None)
            own, theirs = floor(name), floor(imported)
            same_part = imported.split(".")[:2] == name.split(".")[:2]
            if own is not None and theirs is not None and (theirs > own or (theirs == own and own > 3 and not same_part)):
                found.append(f"{here}{name} imports {imported}, which is not below it")
            if module:
                graph[name].add(module)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as circle:
        found.append(f"a circle of imports: {' <- '.join(circle.args[1])}")
    return sorted(set(found))


def unsafe_names(root: Path) -> list[str]:
    """Files beside a launched script that carry the name of a module that others import: the script's folder is first on the path."""
    others = set(sys.stdlib_module_names) | {name for name in importlib.metadata.packages_distributions() if name not in PACKAGES}
    beside = [path for package in ("launch", "data_pipeline") for path in [*(root / package).glob("*.py"), *(root / package).glob("*/")]]
    return [path.relative_to(root).as_posix() for path in beside if path.stem in others]


def test_imports_run_one_way():
    assert faults(ROOT) == []


def test_no_script_carries_the_name_of_a_module():
    assert unsafe_names(ROOT) == []


@pytest.mark.parametrize("script", HELPS)
def test_help_imports_no_torch(script):
    done = subprocess.run([sys.executable, "-X", "importtime", script, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "deepspeed", "transformers"}


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("recipes/x/technique.py", "def f():\n    import launch", "recipes imports launch"),
        ("model/x.py", "from recipes.registry import read_recipe", "model imports recipes.registry"),
        ("data_pipeline/x.py", "from model import gpt", "data_pipeline imports model"),
        ("recipes/x/kernel.py", "import torch.distributed as dist", f"for {DISTRIBUTED} alone"),
        ("launch/training/x.py", "def f():\n    from deepspeed.comm import comm", f"for {DISTRIBUTED} alone"),
        ("launch/config/x.py", "def f():\n    from launch.training import engine", "which is not below it"),
        ("launch/comparison/x.py", "from launch.trained_model import load", "which is not below it"),
        ("launch/export.py", "from launch import score", "which is not below it"),
    ],
)
def test_a_wrong_import_is_found(file, text, fault, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert any(fault in line for line in faults(tmp_path)), faults(tmp_path)


def test_a_circle_is_found(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.py").write_text("from model import b")
    (tmp_path / "model" / "b.py").write_text("def f():\n    from model.a import x")
    assert "a circle of imports" in "".join(faults(tmp_path))


@pytest.mark.parametrize("name", ["data_pipeline/tokenize.py", "launch/inspect/x.py", "launch/numpy.py"])
def test_a_shadowing_name_is_found(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.touch()
    assert len(unsafe_names(tmp_path)) == 1
