"""Imports run one way: launch -> recipes -> model, launch -> data_pipeline; and what must start fast imports no torch."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("launch", "recipes", "model", "data_pipeline")
#: What each package may import of the others.
BELOW = {"launch": {"launch", "recipes", "model", "data_pipeline"}, "recipes": {"recipes", "model"}}
BELOW |= {"model": {"model"}, "data_pipeline": {"data_pipeline"}}
HEAVY = {"torch", "deepspeed", "transformers"}
#: The one place for the other ranks.
DISTRIBUTED = "launch/engine/distributed.py"


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether it is imported when the file is) of every import, `from a import b` as a and as a.b.

    Inside a function it is not; nor is it under `if TYPE_CHECKING`.
    """

    def walk(node: ast.AST, at_start: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, at_start
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = [*parts[: len(parts) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, node.lineno, at_start
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno, at_start
        else:
            function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, at_start and not function and not typing)

    yield from walk(tree, True)


def starts_fast(file: str) -> bool:
    """Whether `file` is imported before a user's mistake has been looked for."""
    package, _, rest = file.partition("/")
    if package == "data_pipeline":
        return rest != "loader.py"
    return (
        file.startswith(("launch/run/", "launch/comparison/"))
        or (file.startswith("launch/trained/") and not file.endswith(("/checkpoint_weights.py", "/scoring.py")))
        or file in ("launch/pretrain.py", "launch/compare.py", "launch/export.py", "launch/generate.py", "launch/score.py")
        or (package == "recipes" and rest.endswith(("registry.py", "technique.py", "claims.py", "pages.py")))
    )


def faults(root: Path) -> list[str]:
    """Every import that runs the wrong way, as `file:line: what`."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        package = file.split("/")[0]
        for module, line, at_start in imports(ast.parse(path.read_text(encoding="utf-8")), ".".join(Path(file).parent.parts)):
            top = module.split(".")[0]
            here = f"{file}:{line}: "
            if top in PACKAGES and top not in BELOW[package]:
                found.append(f"{here}{package} imports {module}")
            if module.startswith(("torch.distributed", "deepspeed.comm")) and file != DISTRIBUTED:
                found.append(f"{here}{module} is for {DISTRIBUTED} alone")
            if at_start and top in HEAVY and starts_fast(file):
                found.append(f"{here}{module} at the start of a module that must load fast")
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


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("recipes/x/technique.py", "from launch.run import config", "recipes imports launch.run"),
        ("recipes/x/technique.py", "def f():\n    import launch", "recipes imports launch"),
        ("model/x.py", "from recipes.registry import read_recipe", "model imports recipes.registry"),
        ("model/x.py", "import data_pipeline.shards", "model imports data_pipeline.shards"),
        ("data_pipeline/x.py", "from model import gpt", "data_pipeline imports model"),
        ("data_pipeline/x.py", "import torch", "must load fast"),
        ("data_pipeline/x.py", "class A:\n    from torch import nn", "must load fast"),
        ("recipes/x/technique.py", "import torch", "must load fast"),
        ("recipes/x/kernel.py", "import torch.distributed as dist", "for launch/engine/distributed.py alone"),
        ("launch/engine/x.py", "from torch import distributed", "for launch/engine/distributed.py alone"),
        ("launch/engine/x.py", "def f():\n    from deepspeed.comm import comm", "for launch/engine/distributed.py alone"),
        ("launch/run/x.py", "try:\n    import deepspeed\nexcept ImportError:\n    pass", "must load fast"),
        ("launch/run/x.py", "from transformers import AutoModel", "must load fast"),
        ("launch/pretrain.py", "import torch", "must load fast"),
        ("launch/comparison/x.py", "import torch", "must load fast"),
    ],
)
def test_a_wrong_import_is_found(file, text, fault, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert any(fault in line for line in faults(tmp_path)), faults(tmp_path)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("launch/run/x.py", "def f():\n    import torch"),
        ("launch/run/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from launch.engine import engine"),
        ("data_pipeline/loader.py", "import torch\nfrom . import shards"),
        ("launch/engine/distributed.py", "import torch.distributed\nfrom deepspeed import comm"),
        ("recipes/x/technique.py", "from model.gpt import GPT\nfrom recipes.technique import Technique"),
        ("recipes/x/kernel.py", "import torch"),
    ],
)
def test_a_right_import_is_not(file, text, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert faults(tmp_path) == []


@pytest.mark.parametrize("name", ["launch/profile.py", "data_pipeline/tokenize.py", "launch/inspect/x.py", "launch/numpy.py"])
def test_a_shadowing_name_is_found(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.touch()
    assert len(unsafe_names(tmp_path)) == 1
