"""Finds the recipes and the testbeds: every folder beside this file that holds a `recipe.json`, and those in `testbeds`.

Adding a recipe touches its own folder only.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from recipes.claims import Claim
from recipes.technique import Run, Technique, Techniques

ROOT = Path(__file__).resolve().parent.parent
TESTBEDS = ROOT / "recipes" / "testbeds"

#: Flags of `launch/pretrain.py`, by name without the dashes.
Flags = dict[str, Any]
T = TypeVar("T")


class RecipeError(Exception):
    """A recipe.json or a testbed.json is missing or wrong; one line."""


@dataclass(frozen=True)
class Testbed:
    """A model and a token budget on which recipes are compared, as `recipes/testbeds/<name>/testbed.json` states it.

    Attributes:
        name: the name of the folder.
        title: the model and the budget in one line.
        device: "cpu" or "cuda"; the testbed is used only there.
        flags: of `launch/pretrain.py`, the same for all runs: model, corpus, tokens, batch, evaluations.
        sweep: flag -> the values of the control's sweep, a number or a word each. One flag is varied after another; it
            starts at its first value.
        tuned: flag -> the value chosen from the sweep. Runs take it unless their recipe is tuned itself.
        target_loss: nats per token of validation text; times and tokens are compared where a run first reaches it.
        ranks: of each run, unless the recipe states another number.
        reason: why these values were chosen, where the sweep alone does not say it.
    """

    name: str
    title: str
    device: str
    flags: Flags
    sweep: dict[str, list[Any]]
    tuned: Flags
    target_loss: float
    ranks: int = 1
    reason: str = ""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"'device' is {self.device!r}; allowed are cpu, cuda")
        _check_sweep(self.sweep)


@dataclass(frozen=True)
class Experiment:
    """What a recipe claims on a testbed.

    Attributes:
        seeds: planned before the first run; the runs have the seeds 1 to this.
        claims: each is judged, and true for its `expected`; none before the recipe is tuned.
        sweep: flag -> the values of the recipe's sweep. Empty for a recipe that does not change the optimization.
        tuned: flag -> the value chosen from the sweep, in place of the testbed's.
    """

    seeds: int
    claims: list[Claim] = field(default_factory=list)
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    tuned: Flags = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"'seeds' is {self.seeds}; it must be at least 1")
        if self.sweep:
            _check_sweep(self.sweep)
        for claim in self.claims:
            low, high = claim.bounds
            if not low < claim.expected < high:
                raise ValueError(
                    f"'{claim.label}' is false for its 'expected' {claim.expected:g}; that must be above {low:g} and below {high:g}"
                )


def _check_sweep(sweep: dict[str, list[Any]]) -> None:
    for name, values in sweep.items():
        if not isinstance(values, list) or not values or not all(type(value) in (int, float, str) for value in values):
            raise ValueError(f"'sweep.{name}' is {values!r}; it must be a list of numbers or words")
    if "lr" not in sweep:
        raise ValueError("'sweep' has no lr; every sweep varies the learning rate")


@dataclass(frozen=True)
class Recipe:
    """A recipe as its `recipe.json` states it.

    Attributes:
        name: the name of the folder.
        title: what it does, in one line.
        config: its DeepSpeed JSON, e.g. `ds_configs/zero2_bf16.json`.
        control: the JSON that it is compared with.
        differs: dotted keys in which `config` and `control` differ, all of them (a test holds this).
        experiments: what it should show against its control, by the name of the testbed.
        paper: where the technique comes from.
        needs: what it takes to see the effect: ranks, a slow network, a GPU.
        flags: suggested flags of `launch/pretrain.py`, used by `--recipe` unless the user gives the same flag.
        ranks: of each run in its experiments; None for the testbed's.
        history: claims that were changed after a result was known, a sentence each; the page shows them.
    """

    name: str
    title: str
    config: str
    control: str
    differs: list[str]
    experiments: dict[str, Experiment]
    paper: str = ""
    needs: str = ""
    flags: list[str] = field(default_factory=list)
    ranks: int | None = None
    history: list[str] = field(default_factory=list)


def read_recipe(folder: str | Path) -> Recipe:
    """Read the recipe in `folder`.

    Raises:
        RecipeError: `folder` is not a recipe, or its `recipe.json` is wrong; one line.
    """
    folder = Path(folder)
    path = folder / "recipe.json"
    names = ", ".join(recipe_names())
    if not path.is_file():
        close = difflib.get_close_matches(folder.name, recipe_names(), n=1)
        meant = f"; did you mean recipes/{close[0]}" if close else ""
        raise RecipeError(f"--recipe {folder}: has no recipe.json{meant}; the recipes are: {names} (recipes/<name>)")
    fields = _read_object(path)
    experiments = fields.get("experiments")
    if isinstance(experiments, dict):
        fields["experiments"] = {name: _experiment(f"{path}: 'experiments.{name}'", name, one) for name, one in experiments.items()}
    return _made(Recipe, str(path), {"name": folder.resolve().name, **fields})


def read_testbed(name: str) -> Testbed:
    """Read the testbed `name`. Raises RecipeError if there is none of this name, or if its file is wrong."""
    path = TESTBEDS / name / "testbed.json"
    if not path.is_file():
        raise RecipeError(f"--testbed {name}: unknown; the testbeds are: {', '.join(testbed_names())}")
    return _made(Testbed, str(path), {"name": name, **_read_object(path)})


def read_testbeds(device: str | None = None) -> list[Testbed]:
    """All testbeds, or those of a device, "cpu" or "cuda", in alphabetical order."""
    return [testbed for testbed in map(read_testbed, testbed_names()) if device in (None, testbed.device)]


def _experiment(where: str, testbed: str, fields: Any) -> Experiment:
    if testbed not in testbed_names():
        raise RecipeError(f"{where}: unknown testbed; allowed are {', '.join(testbed_names())}")
    if isinstance(fields, dict) and isinstance(fields.get("claims"), list):
        claims = [_made(Claim, f"{where}.claims[{place}]", claim) for place, claim in enumerate(fields["claims"])]
        fields = {**fields, "claims": claims}
    return _made(Experiment, where, fields)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as reason:
        raise RecipeError(f"{path}: not a readable JSON file: {reason}") from None
    if not isinstance(fields, dict):
        raise RecipeError(f"{path}: contains a {type(fields).__name__}; it must be an object")
    return fields


def _made(cls: type[T], where: str, fields: Any) -> T:
    """An object of the dataclass `cls` from `fields`, whose names and types are checked."""
    if not isinstance(fields, dict):
        raise RecipeError(f"{where}: is a {type(fields).__name__}; it must be an object")
    known = {one.name: one for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
    allowed = ", ".join(name for name in known if name != "name")
    if unknown := sorted(fields.keys() - known.keys()):
        raise RecipeError(f"{where}: unknown key '{unknown[0]}'; allowed are {allowed}")
    required = {name for name, one in known.items() if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING}
    if missing := sorted(required - fields.keys()):
        raise RecipeError(f"{where}: lacks {', '.join(missing)}")
    for key, value in fields.items():
        kind = str(known[key].type).partition("[")[0].removesuffix(" | None")
        kinds: Any = {"float": (int, float), "int": int, "str": str, "list": list, "dict": dict, "Flags": dict}[kind]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise RecipeError(f"{where}: '{key}' is a {type(value).__name__}; it must be a {'dict' if kind == 'Flags' else kind}")
    try:
        return cls(**fields)
    except (TypeError, ValueError) as reason:
        raise RecipeError(f"{where}: {reason}") from None


def recipe_names() -> list[str]:
    """Names of all recipe folders, in alphabetical order."""
    return sorted(path.parent.name for path in ROOT.glob("recipes/*/recipe.json"))


def testbed_names() -> list[str]:
    """Names of all testbeds, in alphabetical order."""
    return sorted(path.parent.name for path in TESTBEDS.glob("*/testbed.json"))


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
        if declared.changes_tokens and run.token_schedule is None:
            faults.append(f"'scheduler.type' is {run.scheduler['type']}, which counts steps of equal size; use WarmupCosineTokens")
        for other in members[:-1]:
            if shared := declared.shared_with(other.declaration):
                faults.append(f"'{declared.name}' and '{other.declaration.name}' both control {shared}; switch one of them off")
    if faults:
        raise ValueError(*faults)
    return Techniques(members)
