"""Compares runs as controlled experiments: sides, pairs of a recipe and its control, what differs, figures and verdicts.

A side is a set of runs of one configuration with different seeds. A pair is a side with its control; a number of the one is compared with
the number of the other of the same seed. `Comparison` holds everything that the page and `report.json` say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from launch.comparison.runs import Column, Run
from launch.comparison.verdicts import Verdict, judge, paired_interval
from launch.config.run_config import SCRATCH
from launch.errors import UsageError
from launch.formats.json_lines import dotted
from launch.training.run_json import INCIDENTAL
from recipes.claims import CLAIMS
from recipes.registry import ROOT, Recipe, read_recipe, recipe_names

Role = Literal["control", "recipe", "run"]
Settings = dict[str, Any]  # by dotted path

#: Of run.json, what is no part of an experiment: the seed, by which runs are paired, and what only names and places a run.
NAMES = {*INCIDENTAL, "resumes", "turns", "seed", "run_name", "runs_dir", "recipe", "config_file"}
#: What may differ between the runs of one side: where and with what they ran, and names of what stands there resolved as well.
CIRCUMSTANCES = {"preset", "data", "corpus", "commit", "versions", "machine"}
#: Settings that say again what another one says; where both differ alike, one is shown.
RESTATED = {
    "zero_stage": "engine.zero_optimization.stage",
    "global_batch_size": "engine.train_batch_size",
    "micro_batch_size": "engine.train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "engine.gradient_accumulation_steps",
    "lr": "optimizer.params.lr",
    "min_lr": "scheduler.params.min_lr",
    "warmup_steps": "scheduler.params.warmup_steps",
    "scheduler.params.total_tokens": "total_tokens",
    "corpus.path": "data",
}
#: Settings that follow from others: the precision from which section is on, accumulation from the micro-batch.
FOLLOWING = {"precision", "engine.gradient_accumulation_steps"}
LOSS = "final_val_loss"
#: Every figure, in the order in which they are read.
FIGURES = (
    LOSS,
    "tokens_per_second",
    "step_seconds",
    "mfu",
    "seconds",
    "seconds_to_reach",
    "tokens_to_reach",
    "peak_memory_bytes",
    "bytes_per_step",
    "bytes_sent",
    "flops",
    "skipped_steps",
    "spikes",
    "non_finite_losses",
)
#: Figures that add up over a run, and are those of another experiment where it ended early.
SUMS = {"seconds", "bytes_sent", "flops", "skipped_steps", "spikes", "non_finite_losses"}


@dataclass(frozen=True, eq=False)
class Side:
    """Runs of one configuration, in the order of their seeds.

    name: of its engine JSON, with a setting in which it differs where several sides have the same. Made of file names: to be escaped.
    role: "control" where it is the control of any pair, "recipe" where claims are judged of it, else "run".
    """

    name: str
    role: Role
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Difference:
    """A setting, or a circumstance, that is not the same in all runs of a pair.

    key: dotted path in `run.json`. control, other: the value on each side, None where there is none; where runs of one side differ, a text
    that has each value with its seeds.
    """

    key: str
    control: Any
    other: Any


@dataclass(frozen=True)
class Spread:
    """Numbers of several seeds; entry i of `values` is that of seed i of `seeds`.

    mean: None without values; +inf where a run diverged, whose loss is +inf. deviation: of the sample; None with fewer than two values, or
    where one is +inf. low, high: of a side the least and the greatest value; of a paired difference or ratio the two-sided 95% interval of
    the mean, None with fewer than two pairs.
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float | None
    deviation: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Figure:
    """One number of the runs of a pair, on both sides.

    difference: other - control, of the seeds that both have, its mean the arithmetic one; ratio: other / control, its mean the geometric
    one. None without pairs; the ratio also where a value is not above 0, and of losses.
    """

    control: Spread
    other: Spread
    difference: Spread | None
    ratio: Spread | None


@dataclass(frozen=True)
class Pair:
    """A side and its control.

    recipe: whose claims are judged; None: there are only figures. seeds: that both have. figures: those of `FIGURES` that a side has, as
    `Run.measures` names them, and "seconds_to_reach" and "tokens_to_reach", when the validation loss was first at or below the mean of the
    control's final ones, by linear interpolation between evaluations. verdicts: one for each claim, in the order of the recipe.
    """

    control: Side
    side: Side
    recipe: Recipe | None
    differences: tuple[Difference, ...]
    seeds: tuple[int, ...]
    figures: dict[str, Figure]
    verdicts: tuple[Verdict, ...]

    @property
    def in_turns(self) -> bool:
        """Whether the runs of every seed made all their steps in turns with each other, also those after a resume."""
        theirs, ours = ({seed: _moments(run) for seed, run in _by_seed(side).items()} for side in (self.control, self.side))
        return all(theirs[seed] == ours[seed] and None not in theirs[seed] for seed in self.seeds)


@dataclass(frozen=True)
class Absent:
    """A recipe that was not run, and why."""

    recipe: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """All that is compared.

    marks: why it would have been refused without --force, in sentences; what they touch is no experiment. remarks: what a reader must know
    of how runs were paired. What concerns one run alone is in its own remarks.
    """

    sides: tuple[Side, ...]
    pairs: tuple[Pair, ...]
    marks: tuple[str, ...]
    absent: tuple[Absent, ...]
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """What `report.json` holds: plain numbers, null for one that is not finite; no curves."""
        return _plain(
            {
                "marks": self.marks,
                "remarks": self.remarks,
                "pairs": [_pair_as_json(pair) for pair in self.pairs],
                "sides": [{"name": side.name, "role": side.role, "runs": [_run_as_json(run) for run in side.runs]} for side in self.sides],
                "absent": [asdict(one) for one in self.absent],
            }
        )


def compare(runs: Sequence[Run], force: bool = False) -> Comparison:
    """Compares runs as they are given: those of one configuration are a side, and each side has a control.

    That is the side of the engine JSON that its recipe names as its control, if it is among them. Where two name each other, as `bf16` and
    `fp32` do, the one started by `--recipe` is the recipe, else the one given later. A side without is compared with the first one given,
    by figures only.

    Raises:
        UsageError: a folder is given twice; or, without `force`, corpora, vocabularies, validation sets or token budgets differ.
    """
    marks = _marks([runs], force)
    groups = group(runs)
    known = [read_recipe(ROOT / "recipes" / name) for name in recipe_names()]
    wanted: list[list[tuple[int, Recipe]]] = []  # for each side: its recipes, each with the place of its control
    for at, (run, *_) in enumerate(groups):
        found = [recipe for recipe in known if recipe.name == run.description.get("recipe")]
        found = found or [recipe for recipe in known if recipe.config == _engine_json(run)]
        controls = [_nearest_side(groups, at, recipe.control) for recipe in found]
        wanted.append([(control, recipe) for control, recipe in zip(controls, found, strict=True) if control is not None])
    priority = [(bool(side[0].description.get("recipe")), at) for at, side in enumerate(groups)]
    pairings: list[tuple[int, int, Recipe | None]] = []
    for at, own in enumerate(wanted):
        for control, recipe in own:
            mutual = any(place == at for place, _ in wanted[control])
            if not mutual or priority[at] > priority[control]:
                pairings.append((control, at, recipe))
    paired = {at for control, side, _ in pairings for at in (control, side)}
    pairings += [(0, at, None) for at in range(1, len(groups)) if at not in paired]
    return _compared(groups, sorted(pairings, key=lambda pairing: pairing[:2]), marks, ())


def compare_pairs(
    experiments: Iterable[tuple[Recipe, Sequence[Run], Sequence[Run]]], absent: Sequence[Absent] = (), force: bool = False
) -> Comparison:
    """Compares each recipe's own runs, the last of the three, with those of its control. Raises UsageError as `compare` does."""
    experiments = list(experiments)
    marks = _marks([[*control, *own] for _, control, own in experiments], force)
    groups: list[tuple[Run, ...]] = []
    pairings: list[tuple[int, int, Recipe | None]] = []
    places: dict[tuple[Path, ...], int] = {}

    def place(runs: Sequence[Run]) -> int:
        """Where the side of these runs is; several recipes may share one."""
        side = tuple(sorted(runs, key=lambda run: run.seed))
        at = places.setdefault(tuple(run.folder.resolve() for run in side), len(groups))
        if at == len(groups):
            groups.append(side)
        return at

    for recipe, control, own in experiments:
        pairings.append((place(control), place(own), recipe))
    return _compared(groups, pairings, marks, absent)


def group(runs: Iterable[Run]) -> list[tuple[Run, ...]]:
    """The runs of each configuration, in the order of their seeds; configurations in the order in which they are given."""
    groups: dict[frozenset[tuple[str, Any]], list[Run]] = {}
    for run in runs:
        own = {key: _value(value) for key, value in settings(run).items() if value is not None and _section(key) not in CIRCUMSTANCES}
        groups.setdefault(frozenset(own.items()), []).append(run)
    sides = (part for side in groups.values() for part in _by_code(side))
    return [tuple(sorted(side, key=lambda run: run.seed)) for side in sides]


def _by_code(side: list[Run]) -> list[list[Run]]:
    """The runs of one configuration; where a seed is there more than once, those of each commit and each set of versions for themselves."""
    parts: dict[str, list[Run]] = {}
    for run in side:
        parts.setdefault(json.dumps([run.description.get("commit"), run.description.get("versions")], sort_keys=True), []).append(run)
    return list(parts.values()) if len({run.seed for run in side}) < len(side) else [side]


# --- what differs ---------------------------------------------------------------------------------------------------------------------


def settings(run: Run) -> Settings:
    """Everything that `run.json` says of how the run was made, by dotted path; without its seed and its names."""
    description = {key: value for key, value in run.description.items() if key not in NAMES}
    # An "nvme_path": "auto" is resolved to a folder that has the run's name.
    scratch = str(Path(str(run.description.get("runs_dir"))) / str(run.description.get("run_name")) / SCRATCH)
    return {dotted(path): "auto" if value == scratch else value for path, value in _leaves(description, ())}


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Each value at its path. A list of numbers or texts is one value; so is an empty section, but for the one of all techniques."""
    if isinstance(value, dict) and (value or path in ((), ("techniques",))):
        for key, member in value.items():
            yield from _leaves(member, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, (*path, place))
    else:
        yield path, value


def _section(key: str) -> str:
    return key.partition(".")[0]


def _value(value: Any) -> Any:
    """Equal, and hashed alike, where two values of a JSON are the same: 50000000 and 5e7 are, 1 and true are not."""
    if isinstance(value, list):
        return tuple(_value(item) for item in value)
    return type(value) is bool, "{}" if value == {} else value


def differences(control: Sequence[Run], other: Sequence[Run]) -> tuple[Difference, ...]:
    """Every setting and circumstance that is not the same in all of these runs: settings first, in the order of `run.json`."""
    sides = [[(run.seed, settings(run)) for run in runs] for runs in (control, other)]
    keys = dict.fromkeys(key for side in sides for _, own in side for key in own)
    found = {}
    for key in keys:
        seen = [[(seed, own.get(key)) for seed, own in side] for side in sides]
        if len({_value(value) for side in seen for _, value in side}) > 1:
            found[key] = Difference(key, *(_of_side(side) for side in seen))
    shown = [
        one
        for key, one in found.items()
        if (said := found.get(RESTATED.get(key, ""))) is None or (said.control, said.other) != (one.control, one.other)
    ]
    return tuple(sorted(shown, key=lambda one: _section(one.key) in CIRCUMSTANCES))


def _of_side(seen: list[tuple[int, Any]]) -> Any:
    """The value that the runs of a side have; where they differ, each with its seeds, as a text."""
    seeds: dict[Any, list[int]] = {}
    for seed, value in seen:
        seeds.setdefault(_value(value), []).append(seed)
    if len(seeds) == 1:
        return seen[0][1]
    values = {_value(value): value for _, value in seen}
    return "; ".join(f"{values[key]} (seed {', '.join(map(str, of))})" for key, of in seeds.items())


# --- what may be compared, and with what ----------------------------------------------------------------------------------------------


def _marks(groups: Iterable[Sequence[Run]], force: bool) -> tuple[str, ...]:
    """Why the runs of a group are no experiment together. Raises UsageError for them without `force`, and for a folder given twice."""
    marks: dict[str, None] = {}
    for runs in groups:
        folders: set[Path] = set()
        for run in runs:
            if run.folder.resolve() in folders:
                raise UsageError(f"{run.folder}: this run is given twice; leave one out")
            folders.add(run.folder.resolve())
        said: set[tuple[str, str]] = set()
        for run in runs:
            for (kind, first), value in zip(_terms(runs[0]).items(), _terms(run).values(), strict=True):
                if value != first and (kind, value) not in said:
                    said.add((kind, value))
                    marks[f"{run.folder}: its {kind} is {value}, that of {runs[0].folder} is {first}"] = None
    if marks and not force:
        fix = "give runs that have the same, or --force, which marks the report"
        of_ids = f"{fix}; losses of different ids are compared in bits per byte, by launch/score.py"
        raise UsageError(*(f"{mark}; {of_ids if 'vocabulary' in mark else fix}" for mark in marks))
    return tuple(marks)


def _terms(run: Run) -> dict[str, str]:
    """What must be the same for losses to be of the same thing."""
    said = run.description
    sequences = said["eval_batches"] * said["global_batch_size"]
    apart = ", documents apart" if said["no_cross_document"] else ""
    return {
        "corpus_fingerprint": said["corpus_fingerprint"][:16],
        "vocabulary": f"{said['corpus']['vocab_size']:,} ids",
        "validation set": f"{sequences:,} sequences of {said['shape']['seq_len']:,} tokens{apart}",
        "token budget (total_tokens)": f"{said['total_tokens']:,}",
    }


def _engine_json(run: Run) -> str:
    """`ds_configs/<name>.json`, as recipes name it; the run may have been made in another checkout."""
    return "/".join(Path(run.description["config_file"]).parts[-2:])


def _nearest_side(groups: Sequence[tuple[Run, ...]], at: int, config: str) -> int | None:
    """Which other side is of the engine JSON `config`; of several, the one that differs least."""
    found = [place for place, side in enumerate(groups) if place != at and _engine_json(side[0]) == config]
    return min(found, key=lambda place: len(differences(groups[place], groups[at])), default=None)


# --- figures and verdicts -------------------------------------------------------------------------------------------------------------


def _compared(
    groups: Sequence[tuple[Run, ...]],
    pairings: Iterable[tuple[int, int, Recipe | None]],
    marks: tuple[str, ...],
    absent: Sequence[Absent],
) -> Comparison:
    pairings = list(pairings)
    roles: dict[int, Role] = {side: "recipe" for _, side, recipe in pairings if recipe}
    roles |= {control: "control" for control, _, _ in pairings}
    names = _side_names(groups)
    sides = [Side(name, roles.get(at, "run"), runs) for at, (name, runs) in enumerate(zip(names, groups, strict=True))]
    pairs = [_pair(sides[control], sides[side], recipe) for control, side, recipe in pairings]
    remarks = [remark for side in sides for remark in _side_remarks(side)] + [remark for pair in pairs for remark in _pair_remarks(pair)]
    if len(sides) == 1:
        remarks.append("all runs are of one configuration, and so one side: there is nothing to compare it with")
    return Comparison(tuple(sides), tuple(pairs), marks, tuple(absent), tuple(dict.fromkeys(remarks)))


def _side_names(groups: Sequence[tuple[Run, ...]]) -> list[str]:
    """The name of each side's engine JSON; where several sides have the same, with a setting that tells them apart, or a number."""
    stems = [Path(side[0].description["config_file"]).stem for side in groups]
    names = list(stems)
    for stem in dict.fromkeys(stem for stem in stems if stems.count(stem) > 1):
        places = [place for place, one in enumerate(stems) if one == stem]
        own = [settings(groups[place][0]) for place in places]
        keys = dict.fromkeys(key for one in own for key in one if _section(key) not in CIRCUMSTANCES - {"commit", "versions"})
        telling = next((key for key in keys if len({_value(one.get(key)) for one in own}) == len(places)), None)
        for number, (place, one) in enumerate(zip(places, own, strict=True), 1):
            names[place] = f"{stem}, {telling.rpartition('.')[2]} {one.get(telling)}" if telling else f"{stem} ({number})"
    return names


def _by_seed(side: Side) -> dict[int, Run]:
    """The run of each seed that counts: the first."""
    return {run.seed: run for run in reversed(side.runs)}


def _moments(run: Run) -> list[Any]:
    """With whom a run took turns, at its start and from each resume on; None where it ran alone."""
    resumes = run.description.get("resumes", [])
    return [start.get("turns") for start in (run.description, *(one for one in resumes if isinstance(one, dict)))]


def _pair(control: Side, side: Side, recipe: Recipe | None) -> Pair:
    theirs, ours = _by_seed(control), _by_seed(side)
    seeds = tuple(sorted(theirs.keys() & ours.keys()))
    finals = [value for run in theirs.values() if math.isfinite(value := run.measures().get(LOSS, math.inf))]
    target = float(np.mean(finals)) if finals else None
    numbers = [{seed: _numbers(runs[seed], target) for seed in sorted(runs)} for runs in (theirs, ours)]
    figures = {}
    for name in FIGURES:
        before, after = ({seed: own[name] for seed, own in side.items() if name in own} for side in numbers)
        if before or after:
            ratio = None if name == LOSS else _paired(before, after, "ratio")
            figures[name] = Figure(_spread(before), _spread(after), _paired(before, after, "difference"), ratio)
    verdicts = []
    for claim, threshold in recipe.claims.items() if recipe else ():
        measure = CLAIMS[claim].measure
        # A loss of a control that diverged is nothing to compare with; one of a recipe that did is evidence.
        known = [seed for seed in seeds if math.isfinite(numbers[0][seed].get(measure, math.inf)) and measure in numbers[1][seed]]
        verdicts.append(judge(claim, threshold, *([side[seed][measure] for seed in known] for side in numbers)))
    return Pair(control, side, recipe, differences(control.runs, side.runs), seeds, figures, tuple(verdicts))


def _side_remarks(side: Side) -> Iterator[str]:
    counted = _by_seed(side)
    for run in side.runs:
        if (first := counted[run.seed]) is not run:
            yield f"{side.name}: seed {run.seed} was run more than once; {first.folder} counts, {run.folder} is only drawn"


def _pair_remarks(pair: Pair) -> Iterator[str]:
    """What was left out, and what else than the recipe differs."""
    title = f"{pair.side.name} against {pair.control.name}"
    theirs, ours = _by_seed(pair.control), _by_seed(pair.side)
    if alone := sorted(theirs.keys() ^ ours.keys()):
        yield f"{title}: seed {', '.join(map(str, alone))} was run on one side only, and is in no difference and no verdict"
    for seed in pair.seeds:
        for run in (theirs[seed], ours[seed]):
            sums = "" if run.finished else " and of sums over the run"
            if run.diverged:
                judged = "" if run is theirs[seed] else "; for a claim about the loss it counts as infinite"
                yield f"{title}: seed {seed} is left out of the difference of the final loss{sums}, as {run.folder} diverged{judged}"
            elif sums:
                yield f"{title}: seed {seed} is left out of the final loss{sums}, as {run.folder} is unfinished"
    if not pair.in_turns:
        yield f"{title}: not all pairs made their steps in turns, so that figures of time are of different hours of a machine too"
    if any(_section(one.key) == "machine" for one in pair.differences):
        yield f"{title}: not all on one machine, so that figures of time and memory are of machines too"
    if pair.recipe and (others := [one.key for one in pair.differences if not _is_named(one.key, pair.recipe)]):
        yield f"{title}: more differs than the recipe says, and what is seen may be its doing: {', '.join(others)}"


def _is_named(key: str, recipe: Recipe) -> bool:
    """Whether a recipe says that its runs differ at `key`, or that follows from what it says, or is no setting."""
    in_json = key.removeprefix("engine.").removeprefix("techniques.")
    return _section(key) in CIRCUMSTANCES or key in FOLLOWING or any(f"{in_json}.".startswith(f"{named}.") for named in recipe.differs)


def _numbers(run: Run, target: float | None) -> dict[str, float]:
    """The run's figures, as far as they can be compared; `target` is the loss that is to be reached."""
    numbers = {name: value for name, value in run.measures().items() if run.finished or name not in SUMS}
    if target is not None:
        for name in ("seconds", "tokens"):
            if (reached := reached_at(run.columns[name], run.columns["val_loss"], target)) is not None:
                numbers[f"{name}_to_reach"] = reached
    return numbers


def reached_at(x: Column, loss: Column, target: float) -> float | None:
    """The `x` at which `loss`, (rows,) both, is first at or below `target`, on straight lines between the rows that have a loss.

    None where it never is.
    """
    known = np.isfinite(loss) & np.isfinite(x)
    x, loss = x[known], loss[known]
    below = np.flatnonzero(loss <= target)
    if not len(below):
        return None
    at = below[0]
    if at == 0:
        return float(x[0])
    part = (loss[at - 1] - target) / (loss[at - 1] - loss[at])
    return float(x[at - 1] + part * (x[at] - x[at - 1]))


def _spread(values: Mapping[int, float]) -> Spread:
    numbers = list(values.values())
    if not numbers:
        return Spread((), (), None, None, None, None)
    return Spread(tuple(values), tuple(numbers), float(np.mean(numbers)), _deviation(numbers), min(numbers), max(numbers))


def _paired(control: Mapping[int, float], other: Mapping[int, float], scale: Literal["difference", "ratio"]) -> Spread | None:
    """What other has over control, seed by seed, of the seeds of which both are finite."""
    seeds = tuple(seed for seed in control if seed in other and math.isfinite(control[seed]) and math.isfinite(other[seed]))
    before, after = ([side[seed] for seed in seeds] for side in (control, other))
    if not seeds or (scale == "ratio" and min(*before, *after) <= 0):
        return None
    values = tuple(b / a if scale == "ratio" else b - a for a, b in zip(before, after, strict=True))
    mean, low, high = paired_interval(before, after, scale) or (values[0], None, None)
    return Spread(seeds, values, mean, _deviation(values), low, high)


def _deviation(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 and all(map(math.isfinite, values)) else None


# --- report.json ----------------------------------------------------------------------------------------------------------------------


def _pair_as_json(pair: Pair) -> dict[str, Any]:
    return {
        "recipe": pair.recipe and pair.recipe.name,
        "control": pair.control.name,
        "side": pair.side.name,
        "seeds": pair.seeds,
        "differences": [asdict(one) for one in pair.differences],
        "figures": {name: asdict(figure) for name, figure in pair.figures.items()},
        "claims": [{**asdict(verdict), "statement": CLAIMS[verdict.claim].says(verdict.threshold)} for verdict in pair.verdicts],
    }


def _run_as_json(run: Run) -> dict[str, Any]:
    origin = ("created", "command", "config_file", "recipe", "commit", "machine", "versions", "turns")
    return {
        "name": run.name,
        "folder": str(run.folder),
        "seed": run.seed,
        "state": run.state,
        "remarks": run.remarks,
        "measures": run.measures(),
        **{key: run.description.get(key) for key in origin},
    }


def _plain(value: Any) -> Any:
    """`value` as JSON has it: lists for tuples, null for a number that is not finite."""
    if isinstance(value, dict):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
