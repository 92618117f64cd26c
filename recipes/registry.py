"""Finds the recipes (folders beside this file with a `recipe.json`) and the testbeds (folders in `testbeds`)."""

from __future__ import annotations

import difflib
import importlib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from recipes.claims import Claim
from recipes.technique import RunForTechniques, Technique, Techniques

ROOT = Path(__file__).resolve().parent.parent
TESTBEDS = ROOT / "recipes" / "testbeds"
LADDER = TESTBEDS / "ladder" / "plan.json"

#: Flags of `launch/pretrain.py`, by name without the dashes.
Flags = dict[str, Any]
#: Flag -> the values of a sweep.
Sweep = dict[str, list[int | float | str]]
#: pydantic's settings for the dataclasses that are read from files.
STRICT: Any = {"strict": True, "extra": "forbid"}
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
        corpus: flags of `data_pipeline/prepare.py` that make the corpus in the folder `flags["data"]`.
        flags: of `launch/pretrain.py`, the same for all runs: model, corpus, tokens, batch, evaluations.
        sweep: flag -> the values of the control's sweep, a number or a word each. Flags are varied one after another, and each starts at
            its first value. Empty if all values are fixed in `flags`; `reason` then says why.
        tuned: flag -> the value chosen from the sweep. Runs take it unless their recipe is tuned itself.
        noise: nats below which a difference may come from tuning alone.
        target_loss: nats per token of validation text; times and tokens are compared where a run first reaches it.
        reason: why these values were chosen, if not for the sweep alone.
    """

    __pydantic_config__ = STRICT

    name: str
    title: str
    device: Literal["cpu", "cuda"]
    corpus: Flags
    flags: Flags
    target_loss: float
    noise: float = 0.0
    sweep: Sweep = field(default_factory=dict)
    tuned: Flags = field(default_factory=dict)
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.sweep and not self.reason:
            raise ValueError("it has neither a 'sweep' nor a 'reason'; state why its values are fixed")
        _check_sweep(self.sweep, self.tuned, "fixed values belong in 'flags'")


@dataclass(frozen=True)
class Experiment:
    """How a recipe is compared with its control on a testbed.

    Attributes:
        seeds: number of runs, with seeds from 1 on; planned before the first run.
        claims: at most one about each measure.
        sweep: flag -> the values of the recipe's sweep. Empty for a recipe that does not change the optimization.
        tuned: flag -> the value chosen from the sweep, in place of the testbed's. Other flags are those of the testbed.
    """

    __pydantic_config__ = STRICT

    seeds: int
    claims: list[Claim] = field(default_factory=list)
    sweep: Sweep = field(default_factory=dict)
    tuned: Flags = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"'seeds' is {self.seeds}; it must be at least 2, because a test needs two pairs")
        if len({claim.measure for claim in self.claims}) < len(self.claims):
            raise ValueError("'claims' has two claims about one measure; keep one")
        _check_sweep(self.sweep, self.tuned, "only swept flags may differ from the testbed's")


@dataclass(frozen=True)
class Rung:
    """A size of the ladder.

    Attributes:
        flags: of `launch/pretrain.py`, in place of the ladder's: model, steps, warm-up.
        rates: the learning rates of a sweep, as factors of the best rate of the rung below.
        seeds: number of judged runs of each side, with seeds from 1 on.
    """

    __pydantic_config__ = STRICT

    name: str
    flags: Flags
    rates: list[float]
    seeds: int


@dataclass(frozen=True)
class Ladder:
    """Models of growing size on which recipes are compared, as `recipes/testbeds/ladder/plan.json` states them.

    Attributes:
        corpus: flags of `data_pipeline/prepare.py` that make the corpus in the folder `flags["data"]`.
        flags: of `launch/pretrain.py`, the same for all runs.
        lr: the learning rate around which the first rung is swept.
        rungs: from the smallest to the largest.
    """

    __pydantic_config__ = STRICT

    name: str
    corpus: Flags
    flags: Flags
    lr: float
    rungs: list[Rung]


def _check_sweep(sweep: Sweep, tuned: Flags, why: str) -> None:
    for name, values in sweep.items():
        if not values:
            raise ValueError(f"'sweep.{name}' is []; it must be a list of numbers or words")
    if sweep and "lr" not in sweep:
        raise ValueError("'sweep' has no lr; every sweep varies the learning rate")
    if unswept := sorted(tuned.keys() - sweep.keys()):
        raise ValueError(f"'tuned.{unswept[0]}' is not in 'sweep'; {why}")


@dataclass(frozen=True)
class Recipe:
    """A recipe as its `recipe.json` states it.

    Attributes:
        name: the name of the folder.
        title: what it does, in one line.
        config: its DeepSpeed JSON, e.g. `ds_configs/zero2_bf16.json`.
        control: the JSON that it is compared with.
        differs: dotted keys in which `config` and `control` differ, all of them (a test holds this).
        experiments: by the name of the testbed.
        paper: where the technique comes from.
        needs: what the effect requires: ranks, a slow network, a GPU.
        flags: suggested flags of `launch/pretrain.py`, used by `--recipe` unless the user gives the same flag or a preset.
        ranks: of each run in its experiments.
        ladder: flags of its runs on the ladder in place of the ladder's, such as the first `lr`; None if it is not compared there.
        history: claims that were changed after a result was known, a sentence each; the page shows them.
    """

    __pydantic_config__ = STRICT

    name: str
    title: str
    config: str
    control: str
    differs: list[str]
    experiments: dict[str, Experiment]
    paper: str = ""
    needs: str = ""
    flags: list[str] = field(default_factory=list)
    ranks: int = 1
    ladder: Flags | None = None
    history: list[str] = field(default_factory=list)

    @property
    def needs_own_tuning(self) -> bool:
        """Whether its best settings may differ from the control's: an experiment has a sweep, or the optimizer or the schedule differs."""
        swept = [name for name, one in self.experiments.items() if one.sweep]
        return bool(swept or [key for key in self.differs if key.startswith(("optimizer", "scheduler"))])


def read_recipe(folder: str | Path) -> Recipe:
    """Read the recipe in `folder`.

    Raises:
        RecipeError: `folder` is not a recipe, or its `recipe.json` is wrong; one line.
    """
    folder = Path(folder)
    path = folder / "recipe.json"
    if not path.is_file():
        close = difflib.get_close_matches(folder.name, names := recipe_names(), n=1)
        meant = f"; did you mean recipes/{close[0]}" if close else ""
        raise RecipeError(f"--recipe {folder}: has no recipe.json{meant}; the recipes are: {', '.join(names)} (recipes/<name>)")
    recipe = _read(Recipe, path)
    if unknown := sorted(recipe.experiments.keys() - testbed_names()):
        raise RecipeError(f"{path}: 'experiments.{unknown[0]}': unknown testbed; allowed are {', '.join(testbed_names())}")
    return recipe


def read_recipes() -> list[Recipe]:
    """All recipes, in alphabetical order."""
    return [read_recipe(ROOT / "recipes" / name) for name in recipe_names()]


def read_testbed(name: str) -> Testbed:
    """Read the testbed `name`. Raises RecipeError if it does not exist, or if its file is wrong."""
    path = TESTBEDS / name / "testbed.json"
    if not path.is_file():
        raise RecipeError(f"--testbed {name}: unknown; the testbeds are: {', '.join(testbed_names())}")
    return _read(Testbed, path)


def read_ladder() -> Ladder:
    """The ladder."""
    return _read(Ladder, LADDER)


def read_testbeds(device: str | None = None) -> list[Testbed]:
    """All testbeds, or those of a device, "cpu" or "cuda", in alphabetical order."""
    return [testbed for testbed in map(read_testbed, testbed_names()) if device in (None, testbed.device)]


@cache
def _adapter(cls: Any) -> Any:
    from pydantic import TypeAdapter  # as in `_read`

    return TypeAdapter(cls)


def _read(cls: type[T], path: Path) -> T:
    """The dataclass `cls` from a JSON file, whose folder gives the name. Keys and types are checked."""
    from pydantic import ValidationError  # its import takes longer than --help

    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise RecipeError(f"{path}: not a readable JSON file: {reason}") from None
    if not isinstance(fields, dict):
        raise RecipeError(f"{path}: it must be an object")
    if "name" in fields:
        raise RecipeError(f"{path}: 'name' is that of the folder; leave it out")
    try:
        checked = _adapter(cls)  # type: ignore[arg-type] # a class is hashable
        return checked.validate_json(json.dumps({"name": path.resolve().parent.name, **fields}))  # strict dataclasses: JSON only
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RecipeError(f"{path}: {f'{place!r}: ' if place else ''}{first['msg'].removeprefix('Value error, ')}") from None


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


def make_techniques(run: RunForTechniques) -> Techniques:
    """Build the techniques that the resolved configuration `run` switches on, each from its section of the JSON.

    `run.techniques` has the sections, `run.optimizer` the optimizer with its type and parameters.

    Raises:
        ValueError: one line, which begins with the key, for each refused technique or pair of techniques.
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
