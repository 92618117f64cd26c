"""Finds the recipes: every folder beside this file that holds a `recipe.json`. Adding a recipe touches its own folder only."""

from __future__ import annotations

import difflib
import importlib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from recipes.claims import CLAIMS
from recipes.technique import Run, Technique, Techniques

ROOT = Path(__file__).resolve().parent.parent

#: The fields of a recipe.json; the optional ones have their default beside them.
REQUIRED = {"title": str, "config": str, "control": str, "differs": list, "claims": dict}
OPTIONAL = {"paper": str, "needs": str, "flags": list}


@dataclass(frozen=True)
class Recipe:
    """A recipe as its `recipe.json` states it.

    Attributes:
        name: the name of the folder.
        title: what it does, in one line.
        config: its DeepSpeed JSON, e.g. `ds_configs/zero2_bf16.json`.
        control: the JSON that it is compared with.
        differs: dotted keys in which `config` and `control` differ, all of them (a test holds this).
        claims: what it should show against its control, as numbers, e.g. `{"loss_within": 0.02}`.
        paper: where the technique comes from.
        needs: what it takes to see the effect: ranks, a slow network, a GPU.
        flags: suggested flags of `launch/pretrain.py`, used by `--recipe` unless the user gives the same flag.
    """

    name: str
    title: str
    config: str
    control: str
    differs: list[str]
    claims: dict[str, float]
    paper: str = ""
    needs: str = ""
    flags: list[str] = field(default_factory=list)


def read_recipe(folder: str | Path) -> Recipe:
    """Read the recipe in `folder`.

    Raises:
        ValueError: `folder` is not a recipe, or its `recipe.json` is wrong; one line.
    """
    folder = Path(folder)
    path = folder / "recipe.json"
    names = ", ".join(recipe_names())
    if not path.is_file():
        close = difflib.get_close_matches(folder.name, recipe_names(), n=1)
        meant = f"; did you mean recipes/{close[0]}" if close else ""
        raise ValueError(f"--recipe {folder}: has no recipe.json{meant}; the recipes are: {names} (recipes/<name>)")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as reason:
        raise ValueError(f"{path}: not a readable JSON file: {reason}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: holds a {type(fields).__name__}, must be an object with {', '.join(REQUIRED)}")
    if unknown := sorted(fields.keys() - REQUIRED.keys() - OPTIONAL.keys()):
        raise ValueError(f"{path}: unknown key '{unknown[0]}'; allowed are {', '.join([*REQUIRED, *OPTIONAL])}")
    if missing := sorted(REQUIRED.keys() - fields.keys()):
        raise ValueError(f"{path}: lacks {', '.join(missing)}")
    for key, value in fields.items():
        kind = (REQUIRED | OPTIONAL)[key]
        if not isinstance(value, kind):
            raise ValueError(f"{path}: '{key}' is a {type(value).__name__}, must be a {kind.__name__}")
    for claim, value in fields["claims"].items():
        if claim not in CLAIMS:
            raise ValueError(f"{path}: 'claims.{claim}' is not a claim; allowed are {', '.join(CLAIMS)}")
        if type(value) not in (int, float) or not 0 <= value < 1e9:
            raise ValueError(f"{path}: 'claims.{claim}' is {json.dumps(value)}, must be a number of at least 0")
    return Recipe(name=folder.resolve().name, **fields)


def recipe_names() -> list[str]:
    """Names of all recipe folders, in alphabetical order."""
    return sorted(path.parent.name for path in ROOT.glob("recipes/*/recipe.json"))


@cache
def technique_classes() -> tuple[type[Technique], ...]:
    """The `Technique` of every recipe folder that has a `technique.py`. Imports torch."""
    classes: list[type[Technique]] = []
    for path in sorted(ROOT.glob("recipes/*/technique.py")):
        module = importlib.import_module(f"recipes.{path.parent.name}.technique")
        own = [
            item
            for item in vars(module).values()
            if isinstance(item, type) and issubclass(item, Technique) and item.__module__ == module.__name__
        ]
        assert len(own) == 1, f"{path} must define exactly one Technique, it defines {len(own)}"
        classes += own
    return tuple(classes)


def make_techniques(run: Run) -> Techniques:
    """Build the techniques that the resolved configuration `run` switches on, each from its section of the JSON.

    `run.techniques` has the sections, `run.optimizer` the optimizer with its type and parameters.

    Raises:
        ValueError: one line, which begins with the key, for each technique or pair of techniques that is refused.
    """
    members: list[Technique] = []
    faults = []
    for cls in technique_classes():
        declared = cls.declaration
        section = run.techniques.get(declared.section)
        if section is None and run.optimizer["type"] == declared.optimizer_type:
            section = run.optimizer["params"]
        if section is None:
            continue
        try:
            members.append(cls(section, run))
        except ValueError as reason:
            faults.append(str(reason))
            continue
        if declared.changes_tokens and run.scheduler["type"] != "WarmupCosineTokens":
            faults.append(f"'scheduler.type' is {run.scheduler['type']}, which counts steps of equal size; use WarmupCosineTokens")
        for other in members[:-1]:
            if shared := declared.shared_with(other.declaration):
                faults.append(f"'{declared.name}' and '{other.declaration.name}' both control {shared}; switch one of them off")
    if faults:
        raise ValueError(*faults)
    return Techniques(members)
