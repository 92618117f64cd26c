"""Compares runs as controlled experiments: groups them by configuration, pairs each configuration with its control, computes differences.

A side is a set of runs of one configuration with different seeds. A pair is a side and its control; their runs are compared seed by seed.
`Comparison` holds everything that `report.html` and `report.json` show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from launch.comparison.runs import MIN_TIMED_STEPS, WARM_UP_STEPS, Run
from launch.comparison.time_to_target import RatioToTarget, Reached, ratio_to_target, reached_at
from launch.comparison.verdicts import Interval, Verdict, judge, paired_interval
from launch.config.flags import AUTO, RECORD, flags_of
from launch.config.optimizer import without_defaults
from launch.config.run_config import SCRATCH
from launch.errors import UsageError
from launch.formats.json_lines import dotted
from launch.training.run_folder.run_json import is_compared, kind_of, starts_of
from model.presets import FIELDS
from recipes.claims import Claim
from recipes.registry import Experiment, Recipe, Testbed, read_recipes

T = TypeVar("T")
Role = Literal["control", "recipe", "run"]
Group = tuple[Run, ...]  # runs of one configuration, in the order of their seeds
Pairing = tuple[Group, Group, Recipe | None, Testbed | None]  # control, side, the side's recipe, the testbed

#: Settings that repeat one of the sections `engine`, `optimizer` and `scheduler`, and are not compared.
REPEATED = {*flags_of(AUTO), "zero_stage", "gradient_accumulation_steps", "scheduler.params.total_tokens", "corpus.path"}
#: Settings that follow from others: the precision from the enabled section, accumulation from the micro-batch.
DERIVED = {"precision", "engine.gradient_accumulation_steps"}
LOSS = "final_val_loss"
EQUAL_TIME = "loss_at_equal_time"
#: Figures about reaching the target loss -> the column that they are read from.
TO_TARGET = {"seconds_to_target": "seconds", "tokens_to_target": "tokens"}
#: Every figure, in the order of the report: label with unit, size of the unit, decimals shown.
FIGURES = {
    LOSS: ("final validation loss (nats)", 1, 4),
    EQUAL_TIME: ("loss on the evaluations' batches when the faster run of the seed ends (nats)", 1, 4),
    "tokens_per_second": ("tokens per second", 1, 0),
    "step_seconds": ("step time, mean (ms)", 1e-3, 1),
    "mfu": ("MFU (%)", 0.01, 2),
    "seconds": ("run time (s)", 1, 1),
    "seconds_to_target": ("time to the target loss (s)", 1, 1),
    "tokens_to_target": ("tokens to the target loss", 1, 0),
    "peak_memory_bytes": ("peak memory per rank (MiB)", 2**20, 1),
    "bytes_per_step": ("sent per rank and step (MiB)", 2**20, 3),
    "bytes_sent": ("sent per rank in the run (MiB)", 2**20, 1),
    "flops": ("model FLOPs of the run, all ranks (10¹²)", 1e12, 2),
    "skipped_steps": ("skipped steps", 1, 1),
    "warmup_spikes": ("spikes of the gradient norm in the warm-up", 1, 1),
    "spikes": ("spikes of the gradient norm after the warm-up", 1, 1),
}
#: Figures that depend on the speed of the machine, and so can be compared only between interleaved runs of `MIN_TIMED_STEPS` or more.
TIMED = {EQUAL_TIME, "tokens_per_second", "step_seconds", "mfu", "seconds", "seconds_to_target"}
#: Figures that are not shown if they are 0 in every run.
SHOWN_IF_ANY = {"bytes_per_step", "bytes_sent", "skipped_steps"}
#: Figures that are sums over a run, and so cannot be compared if the run ended early.
SUMS = {"seconds", "bytes_sent", "flops", "skipped_steps", "warmup_spikes", "spikes"}


def signed(value: float, form: str = ".4f") -> str:
    """A difference with its sign, U+2212 for minus."""
    return f"{value:+{form}}".replace("-", "−")


@dataclass(frozen=True, eq=False)
class Side:
    """Runs of one configuration, in the order of their seeds.

    name: of its DeepSpeed JSON, with the name of its first run if several sides have the same JSON. Untrusted text.
    role: "control" if a recipe, or an unknown side, is compared with it; "recipe" if it is the side of another pair; else "run".
    """

    name: str
    role: Role
    runs: Group

    def by_seed(self) -> dict[int, Run]:
        """The run that is compared for each seed: the first one."""
        first: dict[int, Run] = {}
        for run in self.runs:
            first.setdefault(run.seed, run)
        return first


@dataclass(frozen=True)
class Difference:
    """A setting or a circumstance that differs between the sides of a pair.

    key: dotted path in `run.json`. control, other: the value on each side, None where the key is absent; if the runs of one side differ, a
    text with all values.
    """

    key: str
    control: Any
    other: Any


@dataclass(frozen=True)
class Figure:
    """One quantity of the runs of a pair.

    control, other: seed -> value; +inf for the loss of a diverged run, and for the time of a run that did not reach the target.
    difference: the mean of other - control over the seeds of both sides. ratio: the geometric mean of other / control. Both are None
    without such seeds; the ratio also for losses, and if a value is not positive.
    to_target: for times and tokens to the target loss. If a run did not reach it, there is no difference, and the ratio is a bound or None.
    """

    control: dict[int, float]
    other: dict[int, float]
    difference: Interval | None
    ratio: Interval | None
    to_target: RatioToTarget | None = None

    @property
    def pairs(self) -> dict[int, tuple[float, float]]:
        """The values of control and recipe by seed, where both are finite."""
        return _finite_pairs(self.control, self.other)


@dataclass(frozen=True)
class Pair:
    """A side and its control.

    recipe: of the side, or None. testbed: of the runs; None for any other setting. seeds: those of both sides. figures: those of `FIGURES`
    that any run has; `TO_TARGET` refers to the testbed's target loss, `EQUAL_TIME` to evaluations during training. verdicts: one per claim,
    if exactly the planned seeds were run to their end.
    """

    control: Side
    side: Side
    recipe: Recipe | None
    testbed: Testbed | None
    differences: tuple[Difference, ...]
    seeds: tuple[int, ...]
    figures: dict[str, Figure]
    verdicts: tuple[Verdict, ...] = ()

    @property
    def experiment(self) -> Experiment | None:
        """The recipe's experiment on the testbed."""
        return self.recipe.experiments.get(self.testbed.name) if self.recipe and self.testbed else None

    @property
    def title(self) -> str:
        return f"{self.side.name} against {self.control.name}"

    @property
    def interleaved(self) -> bool:
        """Whether the two runs of every seed were interleaved with each other, also after each resume."""
        control, own = ({seed: _interleaved_with(run) for seed, run in side.by_seed().items()} for side in (self.control, self.side))
        return all(control[seed] == own[seed] and None not in control[seed] for seed in self.seeds)

    @property
    def published_figures(self) -> dict[str, Figure]:
        """`figures`, without those that depend on time if the runs were not interleaved."""
        return {name: figure for name, figure in self.figures.items() if self.interleaved or name not in TIMED}

    @property
    def on_equal_terms(self) -> bool:
        """Whether times can be compared: the runs were interleaved, on one machine."""
        return self.interleaved and not any(_section(one.key) == "machine" for one in self.differences)


@dataclass(frozen=True)
class Absent:
    """A recipe that was not run, and why."""

    recipe: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """A whole report.

    mismatches: why the comparison would have been refused without --force. remarks: what a reader must know about how runs were paired;
    remarks about one run are in `Run.remarks`.
    """

    sides: tuple[Side, ...]
    pairs: tuple[Pair, ...]
    mismatches: tuple[str, ...] = ()
    absent: tuple[Absent, ...] = ()
    remarks: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The content of `report.json`, without curves. Non-finite numbers are null."""
        content = {
            "mismatches": self.mismatches,
            "remarks": self.remarks,
            "pairs": [_pair_as_json(pair) for pair in self.pairs],
            "sides": [{"name": side.name, "role": side.role, "runs": [_run_as_json(run) for run in side.runs]} for side in self.sides],
            "absent": [asdict(one) for one in self.absent],
        }
        plain: dict[str, Any] = json.loads(json.dumps(content), parse_constant=lambda not_finite: None)
        return plain


def compare(runs: Sequence[Run], force: bool = False) -> Comparison:
    """Groups runs by configuration, and compares each group with the first run's, the control. Claims are not judged, because the runs may
    have any setting.

    Raises:
        UsageError: without `force`, corpora, vocabularies, validation sets or token budgets differ.
    """
    mismatches = _mismatches([runs], force)
    control, *others = groups = group(runs)
    return _compared(groups, [(control, own, _recipe_of(own[0], control[0]), None) for own in others], mismatches, ())


def _recipe_of(run: Run, control: Run) -> Recipe | None:
    """The recipe of a run, among those with this control: the one that `run.json` names, else one with the run's DeepSpeed JSON."""
    found = [recipe for recipe in read_recipes() if recipe.control == _engine_json(control)]
    own = [recipe for recipe in found if recipe.name == run.description.get("recipe")]
    return next(iter(own or [recipe for recipe in found if recipe.config == _engine_json(run)]), None)


def compare_experiments(
    experiments: Iterable[tuple[Recipe, Testbed | None, Sequence[Run], Sequence[Run]]],
    absent: Sequence[Absent] = (),
    force: bool = False,
) -> Comparison:
    """Compares the runs of each recipe with those of its control, and judges the claims on testbeds. If a testbed has two recipes, they are
    also compared with each other, in the last pairs.

    Args:
        experiments: (recipe, testbed, runs of the control, runs of the recipe). The testbed is None unless the runs have its unchanged
            setting. This is not checked here: `launch.comparison.trials` names runs by a hash of their configuration.

    Raises:
        UsageError: as by `compare`.
    """
    pairings: list[Pairing] = [(_in_order(control), _in_order(own), recipe, testbed) for recipe, testbed, control, own in experiments]
    mismatches = _mismatches([(*control, *own) for control, own, *_ in pairings], force)
    groups = dict.fromkeys(group for control, own, *_ in pairings for group in (control, own))
    return _compared(list(groups), [*pairings, *_pairs_of_recipes(pairings)], mismatches, absent)


def _pairs_of_recipes(pairings: Sequence[Pairing]) -> Iterator[Pairing]:
    """The two recipes of each testbed (or setting) that has exactly two, paired with each other, without claims."""
    known = {pairing[:2] for pairing in pairings}
    for found in _grouped(pairings, lambda pairing: pairing[3] and pairing[3].name):
        if len(found) == 2 and not {(found[0][1], found[1][1]), (found[1][1], found[0][1])} & known:
            (_, one, *_), (_, other, _, testbed) = found
            if one != other and _basis_of_losses(one[0]) == _basis_of_losses(other[0]):
                yield one, other, None, testbed


def group(runs: Iterable[Run]) -> list[Group]:
    """The runs of each configuration. If a seed occurs twice, they are also grouped by commit and package versions."""

    def configuration(run: Run) -> Any:
        own = {key: _hashable(value) for key, value in settings(run).items() if value is not None and not _is_circumstance(key)}
        return frozenset(own.items())

    def code(run: Run) -> str:
        return json.dumps([run.description.get("commit"), run.description.get("versions")], sort_keys=True)

    groups: list[list[Run]] = []
    for same in _grouped(runs, configuration):
        groups += _grouped(same, code) if len({run.seed for run in same}) < len(same) else [same]
    return [_in_order(members) for members in groups]


def _grouped(members: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    groups: dict[Any, list[T]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return list(groups.values())


def _in_order(runs: Iterable[Run]) -> Group:
    return tuple(sorted(runs, key=lambda run: run.seed))


# --- what differs ---------------------------------------------------------------------------------------------------------------------


def settings(run: Run) -> dict[str, Any]:
    """The configuration and the circumstances of a run as `run.json` records them, by dotted path."""
    description = {key: value for key, value in without_defaults(run.description).items() if is_compared(key)}
    # "nvme_path": "auto" is resolved to a folder that contains the run's name.
    scratch = str(Path(str(run.description.get("runs_dir"))) / str(run.description.get("run_name")) / SCRATCH)
    leaves = {dotted(path): "auto" if value == scratch else value for path, value in _leaves(description, ())}
    return {key: value for key, value in leaves.items() if key not in REPEATED}


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Each value with its path. A list of numbers or strings is one value, and so is an empty section, except the top and `techniques`."""
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


def _hashable(value: Any) -> Any:
    """A hashable form, equal for values that are equal in JSON: 50000000 and 5e7, but not 1 and true."""
    if isinstance(value, list):
        return tuple(_hashable(item) for item in value)
    return type(value) is bool, "{}" if value == {} else value


def differences(control: Sequence[Run], other: Sequence[Run]) -> tuple[Difference, ...]:
    """Every setting and circumstance that differs between two sides: settings first, in the order of `run.json`."""
    before, after = (_settings_of_side(runs) for runs in (control, other))
    found = [
        Difference(key, before.get(key), after.get(key))
        for key in before | after
        if _hashable(before.get(key)) != _hashable(after.get(key))
    ]
    return tuple(sorted(found, key=lambda one: _is_circumstance(one.key)))


def _is_circumstance(key: str) -> bool:
    """Whether the runs of a side may differ in a setting: names, places, code, machine, what is saved and logged."""
    return kind_of(_section(key)) == RECORD or _section(key) == "versions"


def _settings_of_side(runs: Sequence[Run]) -> dict[str, Any]:
    """The `settings` of a side; where its runs differ, a string with all values."""
    values: dict[str, dict[Any, Any]] = {}
    for run in runs:
        for key, value in settings(run).items():
            values.setdefault(key, {})[_hashable(value)] = value
    return {key: next(iter(found.values())) if len(found) == 1 else "; ".join(map(str, found.values())) for key, found in values.items()}


# --- what may be compared, and with what ----------------------------------------------------------------------------------------------


def _mismatches(experiments: Iterable[Sequence[Run]], force: bool) -> tuple[str, ...]:
    """Why the losses of an experiment's runs cannot be compared.

    Raises:
        UsageError: there are reasons and no `force`.
    """
    found: dict[tuple[Any, ...], str] = {}
    for runs in experiments:
        first = _basis_of_losses(runs[0])
        for run in runs:
            for kind, value in _basis_of_losses(run).items():
                if value != first[kind]:
                    text = f"{run.folder}: its {kind} is {value}, that of {runs[0].folder} is {first[kind]}"
                    found.setdefault((runs[0].folder, kind, value), text)
    if found and not force:
        fix = "give runs that agree, or --force, which marks the report"
        vocabularies = f"{fix}; launch/score.py compares models of different vocabularies in bits per byte"
        raise UsageError(*(f"{one}; {vocabularies if kind == 'vocabulary' else fix}" for (_, kind, _), one in found.items()))
    return tuple(found.values())


def _basis_of_losses(run: Run) -> dict[str, str]:
    """The values that must be equal for the losses of two runs to be comparable."""
    described = run.description
    windows = "the whole split at the end in" if described.get("whole_eval") else f"{_sequences_evaluated(run):,}"
    masked = ", attention within documents" if described["no_cross_document"] else ""
    return {
        "corpus_fingerprint": described["corpus_fingerprint"][:16],
        "vocabulary": f"{described['corpus']['vocab_size']:,} ids",
        "validation set": f"{windows} sequences of {described['shape']['seq_len']:,} tokens{masked}",
        "token budget (total_tokens)": f"{described['total_tokens']:,}",
    }


def _sequences_evaluated(run: Run) -> int:
    return int(run.description["eval_batches"] * run.description["global_batch_size"])


def sequences_evaluated(*sides: Side) -> set[int]:
    """The numbers of sequences of an evaluation during training. With `--whole_eval`, runs of different batch sizes are compared too."""
    return {_sequences_evaluated(run) for side in sides for run in side.runs}


def _engine_json(run: Run) -> str:
    """`ds_configs/<name>.json`, as recipes name it; the run may come from another checkout."""
    return "/".join(Path(run.description["config_file"]).parts[-2:])


# --- figures and verdicts -------------------------------------------------------------------------------------------------------------


def _compared(
    groups: Sequence[Group],
    pairings: Sequence[Pairing],
    mismatches: tuple[str, ...],
    absent: Sequence[Absent],
) -> Comparison:
    roles: dict[Group, Role] = {control: "control" for control, *_ in pairings}
    roles |= {side: "recipe" for _, side, recipe, _ in pairings if recipe}
    roles |= {control: "control" for control, _, recipe, _ in pairings if recipe}  # not a recipe that another recipe is compared with
    sides = {runs: Side(name, roles.get(runs, "run"), runs) for name, runs in zip(_side_names(groups), groups, strict=True)}
    pairs = [_pair(sides[control], sides[own], recipe, testbed) for control, own, recipe, testbed in pairings]
    remarks = [remark for side in sides.values() for remark in _side_remarks(side)]
    remarks += [f"{pair.title}: {remark}" for pair in pairs for remark in _pair_remarks(pair)]
    if len(sides) == 1:
        remarks.append("all runs have the same configuration, so there is nothing to compare them with")
    return Comparison(tuple(sides.values()), tuple(pairs), mismatches, tuple(absent), tuple(dict.fromkeys(remarks)))


def _side_names(groups: Sequence[Group]) -> list[str]:
    """The name of each group's DeepSpeed JSON; where several groups have the same, with the name of their first run."""
    stems = [Path(runs[0].description["config_file"]).stem for runs in groups]
    return [f"{stem} ({runs[0].name})" if stems.count(stem) > 1 else stem for stem, runs in zip(stems, groups, strict=True)]


def _interleaved_with(run: Run) -> list[Any]:
    """The group that a run was interleaved with, at its start and after each resume; None where it trained alone."""
    return [start.get("interleaved") for start in starts_of(run.description)]


def _pair(control: Side, side: Side, recipe: Recipe | None, testbed: Testbed | None) -> Pair:
    runs = [one.by_seed() for one in (control, side)]
    numbers = [{seed: _comparable_measures(one[seed]) for seed in sorted(one)} for one in runs]
    same_evaluations = len(sequences_evaluated(control, side)) == 1

    def figure(name: str) -> Figure | None:
        if not same_evaluations and name in (EQUAL_TIME, *TO_TARGET):
            return None
        if name in TO_TARGET:
            sides = [_timed(one) if name in TIMED else one for one in runs]
            return _to_target(sides, TO_TARGET[name], testbed.target_loss) if testbed else None
        before, after = ({seed: own[name] for seed, own in one.items() if name in own} for one in numbers)
        if name == EQUAL_TIME:
            before, after = losses_at_equal_time(*map(_timed, runs))
        values = (*before.values(), *after.values())
        if not values or (name in SHOWN_IF_ANY and not any(values)):
            return None
        ratio = None if name in (LOSS, EQUAL_TIME) else _paired(before, after, "ratio")
        return Figure(before, after, _paired(before, after, "difference"), ratio)

    figures = {name: found for name in FIGURES if (found := figure(name))}
    seeds = tuple(sorted(runs[0].keys() & runs[1].keys()))
    pair = Pair(control, side, recipe, testbed, differences(control.runs, side.runs), seeds, figures)
    claims = pair.experiment.claims if pair.experiment and _as_planned(pair.experiment, *runs) else ()
    return replace(pair, verdicts=tuple(_judged(claim, pair, *numbers) for claim in claims))


def _judged(claim: Claim, pair: Pair, *numbers: Mapping[int, Mapping[str, float]]) -> Verdict:
    """The verdict on a claim from the measures of control and recipe by seed: inconclusive unless all planned pairs can be compared."""
    if claim.measure == "step_time" and not pair.on_equal_terms:
        return Verdict(
            claim,
            "the runs of a seed were not interleaved on one machine; train both in another --runs_dir, with memory for both (--at_once 2)",
        )
    if claim.key != LOSS and (
        failed := [run.name for side in (pair.control, pair.side) for run in side.by_seed().values() if not run.finished]
    ):
        return Verdict(claim, f"a run diverged, so its {claim.measure} is not that of a whole run: {', '.join(failed)}")
    before, after = ([one[seed].get(claim.key, math.nan) for seed in pair.seeds] for one in numbers)
    # A diverged run of the recipe is evidence about the loss; a diverged run of the control leaves nothing to compare with.
    if lacking := [seed for seed, x, y in zip(pair.seeds, before, after, strict=True) if not math.isfinite(x) or math.isnan(y)]:
        return Verdict(claim, f"the control diverged, or a run lacks the measure, with seed {', '.join(map(str, lacking))}")
    return judge(claim, before, after)


def _as_planned(experiment: Experiment, *sides: Mapping[int, Run]) -> bool:
    """Whether both sides have the planned seeds, no other, and all their runs have ended."""
    planned = set(range(1, experiment.seeds + 1))
    return all(set(runs) == planned and all(run.finished or run.diverged for run in runs.values()) for runs in sides)


def _side_remarks(side: Side) -> Iterator[str]:
    compared = side.by_seed()
    for run in side.runs:
        if (first := compared[run.seed]) is not run:
            yield f"{side.name}: seed {run.seed} was run more than once; {first.folder} is compared, {run.folder} is only plotted"


def _pair_remarks(pair: Pair) -> Iterator[str]:
    """Sentences on excluded runs, and on differences besides the recipe."""
    control, own = pair.control.by_seed(), pair.side.by_seed()
    if alone := sorted(control.keys() ^ own.keys()):
        yield f"seed {', '.join(map(str, alone))} was run on one side only, and is excluded from differences and verdicts"
    for seed in pair.seeds:
        for run in (control[seed], own[seed]):
            if run.diverged or not run.finished:
                sums = "" if run.finished else " and of sums over the run"
                infinite = pair.verdicts and run.diverged and run is own[seed] and not control[seed].diverged
                judged = "; in claims about the loss it counts as infinite" if infinite else ""
                why = f"{run.folder} {'diverged' if run.diverged else 'is unfinished'}{judged}"
                yield f"seed {seed} is excluded from the difference of the final loss{sums}, because {why}"
    if pair.testbed and pair.experiment and pair.experiment.claims and not pair.verdicts:
        planned = f"{pair.experiment.seeds} seeds, from 1 on, all to their end, are planned on {pair.testbed.name}"
        yield f"exploratory, without verdicts: {planned}"
    if len(evaluated := sequences_evaluated(pair.control, pair.side)) > 1:
        counts = " and ".join(f"{count:,}" for count in sorted(evaluated))
        yield f"evaluations during training are of {counts} sequences, so these losses cannot be compared; those of the whole split can"
    untimed = [run for seed in pair.seeds for run in (control[seed], own[seed]) if run.timed_steps < MIN_TIMED_STEPS]
    if untimed:
        run = min(untimed, key=lambda run: run.timed_steps)
        yield (
            f"times of seed {', '.join(map(str, sorted({run.seed for run in untimed})))} are not compared: {run.folder} has"
            f" {run.timed_steps:.0f} timed steps, those after the first {WARM_UP_STEPS} of each start, and {MIN_TIMED_STEPS} are needed"
        )
    if not pair.interleaved and {run.seed for run in untimed} != {*pair.seeds}:
        yield "not all runs were interleaved, so differences in time may come from the load of the machine at different times"
    if any(_section(one.key) == "machine" for one in pair.differences):
        yield "not all runs used the same machine, so differences in time and memory may come from the machine"
    if len({str(run.description.get("commit")) for run in (*pair.control.runs, *pair.side.runs)}) > 1:
        yield "not all runs used the same commit, so differences may come from the code"
    if packages := other_versions(pair):
        yield f"not all runs used the same {', '.join(packages)}, so differences may come from the version"
    if pair.recipe and (others := [one.key for one in pair.differences if not _is_expected(one.key, pair)]):
        yield f"settings that the recipe does not name differ too, and may cause the effect: {', '.join(others)}"


def other_versions(pair: Pair) -> list[str]:
    """The packages of which the sides of a pair used different versions."""
    return [one.key.partition(".")[2] for one in pair.differences if _section(one.key) == "versions"]


def _is_expected(key: str, pair: Pair) -> bool:
    """Whether a difference in `key` is named by the recipe, tuned for each side, a circumstance, or derived from others."""
    if pair.recipe and "--architecture" in pair.recipe.flags and key.removeprefix("shape.") in FIELDS:
        return True
    in_json = key.removeprefix("engine.").removeprefix("techniques.")
    named = pair.recipe.differs if pair.recipe else []
    flags = {**(pair.testbed.tuned if pair.testbed else {}), **(pair.experiment.tuned if pair.experiment else {})}
    tuned = {str(flags["set"]).partition("=")[0].rpartition(".")[2] if flag == "set" else flag for flag in flags}
    is_tuned = key.rpartition(".")[2] in (tuned | {"min_lr"} if "lr" in tuned else tuned)
    return is_tuned or _is_circumstance(key) or key in DERIVED or any(f"{in_json}.".startswith(f"{one}.") for one in named)


def _comparable_measures(run: Run) -> dict[str, float]:
    """The measures of a run, without sums if it ended early, and without times if it has too few timed steps."""
    left_out = (set() if run.finished else SUMS) | (set() if _timed({0: run}) else TIMED)
    return {name: value for name, value in run.measures.items() if name not in left_out}


def _timed(runs: Mapping[int, Run]) -> dict[int, Run]:
    """The runs whose times can be compared."""
    return {seed: run for seed, run in runs.items() if run.timed_steps >= MIN_TIMED_STEPS}


def losses_at_equal_time(control: Mapping[int, Run], other: Mapping[int, Run]) -> tuple[dict[int, float], dict[int, float]]:
    """The validation losses of the two runs of each seed when the faster one ends, interpolated between evaluations.

    The learning rate of the slower run has not fully decayed by then. Unfinished runs are left out.
    """
    before, after = dict[int, float](), dict[int, float]()
    for seed in sorted(control.keys() & other.keys()):
        runs = (control[seed], other[seed])
        known = [np.isfinite(run.columns["val_loss"]) & np.isfinite(run.columns["seconds"]) for run in runs]
        if all(run.finished for run in runs) and all(one.any() for one in known):
            seconds, losses = ([run.columns[name][one] for run, one in zip(runs, known, strict=True)] for name in ("seconds", "val_loss"))
            end = min(one[-1] for one in seconds)
            before[seed], after[seed] = (float(np.interp(end, *one)) for one in zip(seconds, losses, strict=True))
    return before, after


def _to_target(sides: Sequence[Mapping[int, Run]], column: str, target: float) -> Figure | None:
    """Where the runs of control and recipe reach the target loss, in "seconds" or "tokens"; None if none was evaluated."""

    def reached(runs: Mapping[int, Run]) -> dict[int, Reached]:
        found = ((seed, reached_at(runs[seed].columns[column], runs[seed].columns["val_loss"], target)) for seed in sorted(runs))
        return {seed: one for seed, one in found if one is not None}

    control, other = (reached(runs) for runs in sides)
    if not control and not other:
        return None
    before, after = ({seed: math.inf if one.censored else one.at for seed, one in side.items()} for side in (control, other))
    if (found := ratio_to_target(control, other)) is None:
        return Figure(before, after, None, None)
    return Figure(before, after, _paired(before, after, "difference") if min(found.reached) == found.seeds else None, found.ratio, found)


def _paired(control: Mapping[int, float], other: Mapping[int, float], scale: Literal["difference", "ratio"]) -> Interval | None:
    """The mean difference or ratio over the seeds whose values are finite on both sides."""
    pairs = _finite_pairs(control, other).values()
    return paired_interval([before for before, _ in pairs], [after for _, after in pairs], scale)


def _finite_pairs(control: Mapping[int, float], other: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    both = {seed: (control[seed], other[seed]) for seed in control if seed in other}
    return {seed: pair for seed, pair in both.items() if np.isfinite(pair).all()}


# --- report.json ----------------------------------------------------------------------------------------------------------------------


def _pair_as_json(pair: Pair) -> dict[str, Any]:
    return {
        "recipe": pair.recipe and pair.recipe.name,
        "control": pair.control.name,
        "side": pair.side.name,
        "seeds": pair.seeds,
        "differences": [asdict(one) for one in pair.differences],
        "figures": {name: asdict(figure) for name, figure in pair.figures.items()},
        "testbed": pair.testbed and pair.testbed.name,
        "claims": [{**asdict(one), "statement": str(one.claim)} for one in pair.verdicts],
    }


def _run_as_json(run: Run) -> dict[str, Any]:
    origin = ("created", "command", "config_file", "recipe", "commit", "machine", "versions", "interleaved")
    return {
        "name": run.name,
        "folder": str(run.folder),
        "seed": run.seed,
        "state": run.state,
        "remarks": run.remarks,
        "measures": run.measures,
        **{key: run.description.get(key) for key in origin},
    }
