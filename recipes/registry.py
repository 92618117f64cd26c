"""Finds the recipes: every folder beside this file that holds a `recipe.json`. Adding a recipe touches its own folder only.

python -m recipes.registry            # prints the index table
python -m recipes.registry --write    # writes it into recipes/README.md and into the README's own table
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from recipes.technique import Run, Technique, Techniques

ROOT = Path(__file__).resolve().parent.parent
INDEX = Path(__file__).with_name("README.md")
README = ROOT / "README.md"

#: The fields of a recipe.json; the optional ones have their default beside them.
REQUIRED = {"title": str, "config": str, "control": str, "differs": list, "claims": dict}
OPTIONAL = {"paper": str, "needs": str, "flags": list}


@dataclass(frozen=True)
class Recipe:
    """A recipe as its `recipe.json` states it.

    Attributes:
        name: the folder's name.
        title: what it does, in one line.
        config: its engine JSON, e.g. `ds_configs/zero2_bf16.json`.
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
    claims: dict[str, Any]
    paper: str = ""
    needs: str = ""
    flags: list[str] = field(default_factory=list)


def read_recipe(folder: str | Path) -> Recipe:
    """The recipe in `folder`. Raises ValueError, one line, where that is no recipe or its `recipe.json` is wrong."""
    folder = Path(folder)
    path = folder / "recipe.json"
    names = ", ".join(recipe_names())
    if not path.is_file():
        raise ValueError(f"--recipe {folder}: no recipe.json in it; the recipes are: {names} (recipes/<name>)")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as reason:
        raise ValueError(f"{path}: not a readable JSON file: {reason}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: holds a {type(fields).__name__}, must be an object with {', '.join(REQUIRED)}")
    for key, value in fields.items():
        kind = {**REQUIRED, **OPTIONAL}.get(key)
        if kind is None:
            raise ValueError(f"{path}: unknown key '{key}'; allowed are {', '.join([*REQUIRED, *OPTIONAL])}")
        if not isinstance(value, kind):
            raise ValueError(f"{path}: '{key}' is a {type(value).__name__}, must be a {kind.__name__}")
    if missing := [key for key in REQUIRED if key not in fields]:
        raise ValueError(f"{path}: lacks {', '.join(missing)}")
    return Recipe(name=folder.resolve().name, **fields)


def recipe_names() -> list[str]:
    """Names of all recipe folders, in alphabetical order."""
    return sorted(path.parent.name for path in ROOT.glob("recipes/*/recipe.json"))


@cache
def technique_classes() -> tuple[type[Technique], ...]:
    """The `Technique` of every recipe folder that has a `technique.py`. Imports none of torch."""
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
    """The techniques that the resolved configuration `run` switches on, each built from its JSON section.

    Raises ValueError, a line for each technique or pair that cannot be, which begins with the key.
    `run.techniques` holds the sections, `run.optimizer` the optimizer with its type and parameters.
    """
    members: list[Technique] = []
    faults = []
    for cls in technique_classes():
        section = next((run.techniques[name] for name in cls.sections if name in run.techniques), None)
        if section is None and run.optimizer["type"] in cls.optimizer_types:
            section = run.optimizer["params"]
        if section is None:
            continue
        try:
            members.append(cls(section, run))
        except ValueError as reason:
            faults.append(str(reason))
            continue
        for other in members[:-1]:
            if clash := both_decide(cls, type(other)):
                faults.append(f"'{cls.name()}' and '{other.name()}' both decide {clash}; switch one of them off")
    if faults:
        raise ValueError(*faults)
    return Techniques(members)


def both_decide(one: type[Technique], other: type[Technique]) -> str:
    """Why two techniques cannot be in one run: what each of them decides alone. Empty where they can."""
    shared = set(one.decides) & set(other.decides)
    if one.optimizer_types and other.optimizer_types:
        shared = {"the optimizer"}
    return ", ".join(sorted(shared))


def index_table() -> str:
    """The index of all recipes as a Markdown table."""
    rows = ["| recipe | what it does | engine JSON | control | claims | needs |", "|---|---|---|---|---|---|"]
    for name in recipe_names():
        recipe = read_recipe(ROOT / "recipes" / name)
        claims = ", ".join(f"`{key}` {value}" for key, value in recipe.claims.items())
        rows.append(
            f"| [{name}]({name}/README.md) | {recipe.title} | `{recipe.config}` | `{recipe.control}` | {claims} | {recipe.needs or '-'} |"
        )
    return "\n".join(rows) + "\n"


def combination_table() -> str:
    """Which recipes with a technique of their own go together, pair by pair, as a Markdown table."""
    classes = {cls.__module__.split(".")[1]: cls for cls in technique_classes()}
    rows = [f"| | {' | '.join(classes)} |", "|---" * (len(classes) + 1) + "|"]
    for name, one in classes.items():
        cells = [
            "" if one is other else f"no: both decide {clash}" if (clash := both_decide(one, other)) else "yes"
            for other in classes.values()
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def index_page() -> str:
    """The whole of recipes/README.md, of which the table is generated and the rest is constant."""
    return (
        "# Recipes\n\n"
        "One folder per technique. Each names the engine JSON that switches it on, the control that it is compared with, the keys in\n"
        "which the two differ, and what it claims. This table is written by `python -m recipes.registry --write`; a test holds it.\n\n"
        + index_table()
        + "\nRun one with `deepspeed launch/pretrain.py --recipe recipes/<name>`. Claims are against the control with the same flags:\n"
        "`loss_within` x: the final validation loss is at most x (nats a token) above; `loss_lower_by` x: at least x below;\n"
        "`step_time_ratio`, `peak_memory_ratio` and `bytes_ratio` r: at most r of the control's.\n\n"
        "## Which go together\n\n"
        "Recipes that change only DeepSpeed's own sections go with all others that the engine can run; what it cannot is refused before\n"
        "a run starts. Two together are one recipe and a section more, such as `--recipe recipes/progressive_layer_drop --set\n"
        "curriculum_learning.enabled=true`, or a JSON with both sections. Those with a technique of their own, pair by pair:\n\n"
        + combination_table()
    )


def with_table(readme: str) -> str:
    """The text of the project's README with its table of recipes written anew; unchanged where it has none."""
    table = index_table().replace("](", "](recipes/")
    return re.sub(r"^\| recipe \|.*\n(\|.*\n)*", lambda _: table, readme, count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        INDEX.write_text(index_page(), encoding="utf-8")
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(index_table(), end="")
