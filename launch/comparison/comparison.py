"""Compares runs as controlled experiments: groups them by configuration, pairs each configuration with its control, computes differences.

A side is a set of runs of one configuration with different seeds. A pair is a side and its control; their runs are compared seed by seed.
`Comparison` holds everything that the terminal, `report.html`, `report.json` and the recipes' pages show.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

from launch.comparison.runs import MIN_TIMED_STEPS, WARM_UP_STEPS, Column, Run
from launch.comparison.verdicts import Interval, Verdict, judge, paired_interval
from launch.config.flags import AUTO, flags_of
from launch.config.optimizer import without_defaults
from launch.config.run_config import SCRATCH
from launch.errors import UsageError
from launch.training.run_folder.run_json import changes_numbers, starts_of
from launch.training.run_folder.run_json import differences as differences_of
from recipes.claims import Claim
from recipes.registry import ROOT, Experiment, Recipe, Testbed

Group = tuple[Run, ...]  # runs of one configuration, in the order of their seeds

#: Settings that repeat one of the sections `engine`, `optimizer` and `scheduler`, and are not compared.
REPEATED = {*flags_of(AUTO), "zero_stage", "gradient_accumulation_steps", "scheduler.params.total_tokens"}
LOSS = "final_val_loss"
EQUAL_TIME = "loss_at_equal_time"
#: Figures about reaching the target loss -> the column that they are read from.
TO_TARGET = {"seconds_to_target": "seconds", "tokens_to_target": "tokens"}


class Quantity(NamedTuple):
    """How a figure is shown: label with unit, size of the unit, decimals."""

    label: str
    unit: float
    decimals: int


#: Every figure, in the order of the report. Those that are 0 in every run are left out.
FIGURES = {
    LOSS: Quantity("final validation loss (nats)", 1, 4),
    EQUAL_TIME: Quantity("loss on the evaluations' batches when the faster run of the seed ends (nats)", 1, 4),
    "tokens_per_second": Quantity("tokens per second", 1, 0),
    "step_seconds": Quantity("step time, mean (ms)", 1e-3, 1),
    "mfu": Quantity("MFU (%)", 0.01, 2),
    "seconds": Quantity("run time (s)", 1, 1),
    "seconds_to_target": Quantity("time to the target loss (s)", 1, 1),
    "tokens_to_target": Quantity("tokens to the target loss", 1, 0),
    "peak_memory_bytes": Quantity("peak memory per rank (MiB)", 2**20, 1),
    "bytes_per_step": Quantity("sent per rank and step (MiB)", 2**20, 3),
    "bytes_sent": Quantity("sent per rank in the run (MiB)", 2**20, 1),
    "flops": Quantity("model FLOPs of the run, all ranks (10¹²)", 1e12, 2),
    "skipped_steps": Quantity("skipped steps", 1, 1),
}


def quantity(name: str) -> Quantity:
    """How a figure of `FIGURES` is shown, or `final_val_loss/NAME` of a mixture's source."""
    return FIGURES.get(name) or Quantity(f"final validation loss on {name.partition('/')[2]} (nats)", 1, 4)


#: Figures that depend on the speed of the machine, and so can be compared only between interleaved runs of `MIN_TIMED_STEPS` or more.
TIMED = {EQUAL_TIME, "tokens_per_second", "step_seconds", "mfu", "seconds", "seconds_to_target"}
#: Figures that are sums over a run, and so cannot be compared if the run ended early.
SUMS = {"seconds", "bytes_sent", "flops", "skipped_steps"}


@dataclass(frozen=True, eq=False)
class Side:
    """Runs of one configuration, in the order of their seeds.

    name: of the recipe or of the control's DeepSpeed JSON; of runs that were given as folders, what their names begin with. Untrusted text.
    """

    name: str
    runs: Group

    def by_seed(self) -> dict[int, Run]:
        """The run that is compared for each seed: the first one."""
        first: dict[int, Run] = {}
        for run in self.runs:
            first.setdefault(run.seed, run)
        return first


@dataclass(frozen=True)
class Figure:
    """One quantity of the runs of a pair.

    control, other: seed -> value; +inf for the loss of a diverged run, and for the time of a run that did not reach the target.
    difference: the mean of other - control over the seeds of both sides. ratio: the geometric mean of other / control. Both are None
    without such seeds, and where a run did not reach the target; the ratio also for losses, and if a value is not positive.
    """

    control: dict[int, float]
    other: dict[int, float]
    difference: Interval | None
    ratio: Interval | None

    @property
    def paired_values(self) -> dict[int, tuple[float, float]]:
        """The values of control and recipe by seed, where both are finite."""
        both = {seed: (self.control[seed], self.other[seed]) for seed in self.control if seed in self.other}
        return {seed: pair for seed, pair in both.items() if np.isfinite(pair).all()}


@dataclass(frozen=True)
class Pair:
    """A treatment and its control.

    recipe: of the treatment; None for runs given as folders. testbed: of the runs; None for any other setting. figures: those of `FIGURES`
    that any run has, and the final loss on each source of a mixture; `TO_TARGET` refers to the testbed's target loss, `EQUAL_TIME` to
    evaluations during training. verdicts: one per claim, if exactly the planned seeds were run to their end.
    """

    control: Side
    treatment: Side
    recipe: Recipe | None
    testbed: Testbed | None
    figures: dict[str, Figure]
    verdicts: tuple[Verdict, ...] = ()

    @property
    def name(self) -> str:
        """The name of the treatment for readers: the heading of the recipe's page if it has one."""
        page = ROOT / "recipes" / self.recipe.name / "README.md" if self.recipe else None
        return page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") if page and page.exists() else self.treatment.name

    @property
    def title(self) -> str:
        return f"{self.treatment.name} against {self.control.name}" + (f" on {self.testbed.name}" if self.testbed else "")

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of both sides."""
        return tuple(sorted(self.control.by_seed().keys() & self.treatment.by_seed().keys()))

    @property
    def runs(self) -> list[tuple[Run, Run]]:
        """The runs of control and recipe of each seed of both sides."""
        control, own = self.control.by_seed(), self.treatment.by_seed()
        return [(control[seed], own[seed]) for seed in self.seeds]

    @property
    def experiment(self) -> Experiment | None:
        """The recipe's experiment on the testbed."""
        return self.recipe.experiments.get(self.testbed.name) if self.recipe and self.testbed else None

    @property
    def differences(self) -> list[tuple[str, Any, Any]]:
        """The settings that differ between the sides: dotted path in `run.json`, values of control and recipe, None where absent."""
        return differences(self.control.runs[0], self.treatment.runs[0])

    def differ_in(self, key: str) -> bool:
        """Whether the two runs of any seed have another `key` of `run.json`, such as "commit"."""
        return any(control.description.get(key) != own.description.get(key) for control, own in self.runs)

    @property
    def interleaved(self) -> bool:
        """Whether the two runs of every seed were interleaved with each other, also after each resume."""
        groups = ([[start.get("interleaved") for start in starts_of(run.description)] for run in runs] for runs in self.runs)
        return all(control == own and None not in control for control, own in groups)

    @property
    def published_figures(self) -> dict[str, Figure]:
        """`figures`, without those that depend on time if the runs were not interleaved."""
        return {name: figure for name, figure in self.figures.items() if self.interleaved or name not in TIMED}

    @property
    def times_comparable(self) -> bool:
        """Whether times can be compared: the runs were interleaved, on one machine."""
        return self.interleaved and not self.differ_in("machine")


class Absent(NamedTuple):
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
            "sides": [{"name": side.name, "runs": [_run_as_json(run) for run in side.runs]} for side in self.sides],
            "absent": [one._asdict() for one in self.absent],
        }
        plain: dict[str, Any] = json.loads(json.dumps(content), parse_constant=lambda not_finite: None)
        return plain


def compare(runs: Sequence[Run], force: bool = False) -> Comparison:
    """Groups runs by configuration, and compares each group with the first run's, the control. Claims are not judged, because the runs may
    have any setting.

    Raises:
        UsageError: without `force`, corpora, vocabularies, validation sets or token budgets differ.
    """
    mismatches = mismatches_of([{str(run.folder): run.description for run in runs}], force)
    groups = group(runs)
    of_seeds = [dict.fromkeys(re.sub(r"[-_. ]*\d+$", "", run.name) or run.name for run in own) for own in groups]
    sides = [Side(", ".join(names) if len(own) > 1 else own[0].name, own) for names, own in zip(of_seeds, groups, strict=True)]
    if len({side.name for side in sides}) < len(sides):
        sides = [Side(", ".join(run.name for run in own), own) for own in groups]
    return _compared(sides, [_pair(sides[0], own, None, None) for own in sides[1:]], mismatches)


def compare_experiments(
    experiments: Iterable[tuple[Recipe, Testbed | None, Sequence[Run], Sequence[Run]]],
    absent: Sequence[Absent] = (),
    force: bool = False,
) -> Comparison:
    """Compares the runs of each recipe with those of its control, and judges the claims on testbeds.

    Args:
        experiments: (recipe, testbed, runs of the control, runs of the recipe). The testbed is None unless the runs have its unchanged
            setting. This is not checked here: `launch.comparison.trials` names runs by a hash of their configuration.

    Raises:
        UsageError: as by `compare`.
    """
    experiments = list(experiments)
    described = [{str(run.folder): run.description for run in (*control, *own)} for _, _, control, own in experiments]
    mismatches = mismatches_of(described, force)
    sides: dict[Group, Side] = {}  # a control that recipes share is one side

    def side(name: str, runs: Sequence[Run]) -> Side:
        return sides.setdefault(members := _in_order(runs), Side(name, members))

    pairs = []
    for recipe, testbed, control, own in experiments:
        pairs.append(_pair(side(Path(recipe.control).stem, control), side(recipe.name, own), recipe, testbed))
    return _compared([*sides.values()], pairs, mismatches, absent)


def group(runs: Iterable[Run]) -> list[Group]:
    """The runs of each configuration. If a seed occurs twice, they are also grouped by commit and package versions."""

    def code(run: Run) -> str:
        return json.dumps([run.description.get("commit"), run.description.get("versions")], sort_keys=True)

    alike: list[list[Run]] = []
    for run in runs:
        same = next((members for members in alike if not differences(members[0], run)), None)
        if same is None:
            alike.append([run])
        else:
            same.append(run)
    groups: list[list[Run]] = []
    for members in alike:
        by_code: dict[str, list[Run]] = {}
        for run in members:
            by_code.setdefault(code(run), []).append(run)
        groups += by_code.values() if len({run.seed for run in members}) < len(members) else [members]
    return [_in_order(members) for members in groups]


def _in_order(runs: Iterable[Run]) -> Group:
    return tuple(sorted(runs, key=lambda run: run.seed))


def differences(one: Run, other: Run) -> list[tuple[str, Any, Any]]:
    """The settings of two runs that differ: dotted path in `run.json` and both values, None where absent."""
    before, after = _settings(one), _settings(other)
    found = [difference for key in before | after for difference in differences_of(key, before.get(key), after.get(key))]
    return [difference for difference in found if difference[0] not in REPEATED]


def _settings(run: Run) -> dict[str, Any]:
    """The configuration of a run as `run.json` records it."""
    # "nvme_path": "auto" is resolved to a folder that contains the run's name.
    scratch = json.dumps(str(Path(str(run.description.get("runs_dir"))) / str(run.description.get("run_name")) / SCRATCH))
    described = json.loads(json.dumps(without_defaults(run.description)).replace(scratch, '"auto"'))
    return {key: value for key, value in described.items() if changes_numbers(key) and key not in {"seed", "versions"} | REPEATED}


# --- what may be compared, and with what ----------------------------------------------------------------------------------------------


def mismatches_of(experiments: Iterable[Mapping[str, Mapping[str, Any]]], force: bool) -> tuple[str, ...]:
    """Why the losses of an experiment's runs cannot be compared. experiments: name of a run -> its `run.json`; the first is the control.

    Raises:
        UsageError: there are reasons and no `force`.
    """
    found: dict[tuple[Any, ...], str] = {}  # of the runs with one control, a line per kind and value
    for runs in experiments:
        control, first = next((name, _basis_of_losses(described)) for name, described in runs.items())
        for name, described in runs.items():
            for kind, value in _basis_of_losses(described).items():
                if value != first[kind]:
                    found.setdefault((control, kind, value), f"{name}: its {kind} is {value}, that of {control} is {first[kind]}")
    if found and not force:
        fix = "give runs that agree, or --force, which marks the report (launch/score.py compares models in bits per byte)"
        raise UsageError(*(f"{one}; {fix}" for one in found.values()))
    return tuple(found.values())


def _basis_of_losses(described: Mapping[str, Any]) -> dict[str, str]:
    """The values that must be equal for the losses of two runs to be comparable. described: the content of their `run.json`."""
    windows = "the whole split at the end in" if described.get("whole_eval") else f"{_sequences_evaluated(described):,}"
    masked = ", attention within documents" if described["no_cross_document"] else ""
    return {
        "corpus_fingerprint": described["corpus_fingerprint"][:16],
        "vocabulary": f"{described['corpus']['vocab_size']:,} ids",
        "validation set": f"{windows} sequences of {described['shape']['seq_len']:,} tokens{masked}",
        "token budget (total_tokens)": f"{described['total_tokens']:,}",
    }


def _sequences_evaluated(described: Mapping[str, Any]) -> int:
    return int(described["eval_batches"] * described["global_batch_size"])


def sequences_evaluated(*sides: Side) -> set[int]:
    """The numbers of sequences of an evaluation during training. With `--whole_eval`, runs of different batch sizes are compared too."""
    return {_sequences_evaluated(run.description) for side in sides for run in side.runs}


# --- figures and verdicts -------------------------------------------------------------------------------------------------------------


def _compared(sides: Sequence[Side], pairs: Sequence[Pair], mismatches: tuple[str, ...], absent: Sequence[Absent] = ()) -> Comparison:
    remarks = [remark for side in sides for remark in _side_remarks(side)]
    remarks += [f"{pair.title}: {remark}" for pair in pairs for remark in _pair_remarks(pair)]
    return Comparison(tuple(sides), tuple(pairs), mismatches, tuple(absent), tuple(remarks))


def _pair(control: Side, side: Side, recipe: Recipe | None, testbed: Testbed | None) -> Pair:
    pair = Pair(control, side, recipe, testbed, {})
    # Losses during training can be compared if they are of the same sequences.
    same_evaluations = len(sequences_evaluated(control, side)) == 1
    target = testbed.target_loss if testbed and same_evaluations else None
    before, after = ({seed: _comparable_measures(run, target) for seed, run in one.by_seed().items()} for one in (control, side))
    for runs in pair.runs if same_evaluations else ():
        losses = losses_at_equal_time(*runs)
        for measures, loss in zip((before, after), losses, strict=False):
            measures[runs[0].seed][EQUAL_TIME] = loss
    of_sources = sorted({name for side in (before, after) for one in side.values() for name in one if name.startswith(f"{LOSS}/")})
    pair = replace(pair, figures={name: found for name in (*FIGURES, *of_sources) if (found := _figure(name, before, after))})
    claims = pair.experiment.claims if pair.experiment and _as_planned(pair.experiment, control, side) else ()
    return replace(pair, verdicts=tuple(_judged(claim, pair, before, after) for claim in claims))


Measures = Mapping[int, Mapping[str, float]]  # by seed


def _figure(name: str, control: Measures, other: Measures) -> Figure | None:
    before, after = ({seed: own[name] for seed, own in sorted(side.items()) if name in own} for side in (control, other))
    values = [*before.values(), *after.values()]
    if not any(values):
        return None
    found = Figure(before, after, None, None)
    if name in TO_TARGET and not all(map(math.isfinite, values)):
        return found  # without the runs that did not reach it, the rest would look faster
    control_values, own_values = ([pair[side] for pair in found.paired_values.values()] for side in (0, 1))
    ratio = None if name.startswith(LOSS) or name == EQUAL_TIME else paired_interval(control_values, own_values, "ratio")
    return replace(found, difference=paired_interval(control_values, own_values), ratio=ratio)


def _judged(claim: Claim, pair: Pair, *measures: Measures) -> Verdict:
    """The verdict on a claim from the measures of control and recipe by seed: inconclusive unless all planned pairs can be compared."""
    if claim.measure == "step_time" and not pair.times_comparable:
        return Verdict(
            claim,
            "the runs of a seed were not interleaved on one machine; train both in another --runs_dir, with memory for both (--at_once 2)",
        )
    if claim.key != LOSS and (failed := [run.name for runs in zip(*pair.runs, strict=True) for run in runs if not run.finished]):
        return Verdict(claim, f"a run diverged, so its {claim.measure} is not that of a whole run: {', '.join(failed)}")
    before, after = ([one[seed].get(claim.key, math.nan) for seed in pair.seeds] for one in measures)
    # A diverged run of the recipe is evidence about the loss; a diverged run of the control leaves nothing to compare with.
    if lacking := [seed for seed, x, y in zip(pair.seeds, before, after, strict=True) if not math.isfinite(x) or math.isnan(y)]:
        return Verdict(claim, f"the control diverged, or a run lacks the measure, with seed {', '.join(map(str, lacking))}")
    return judge(claim, before, after)


def _as_planned(experiment: Experiment, *sides: Side) -> bool:
    """Whether both sides have the planned seeds, no other, and all their runs have ended."""
    planned = [*range(1, experiment.seeds + 1)]
    return all(sorted(side.by_seed()) == planned and all(run.state != "unfinished" for run in side.runs) for side in sides)


def _side_remarks(side: Side) -> Iterator[str]:
    compared = side.by_seed()
    for run in side.runs:
        if (first := compared[run.seed]) is not run:
            yield f"{side.name}: seed {run.seed} was run more than once; {first.folder} is compared, {run.folder} is only plotted"


def _pair_remarks(pair: Pair) -> Iterator[str]:
    """Sentences on excluded runs, and on what else may cause the differences."""
    if alone := sorted(pair.control.by_seed().keys() ^ pair.treatment.by_seed().keys()):
        yield f"seed {', '.join(map(str, alone))} was run on one side only, and is excluded from differences and verdicts"
    for control, own in pair.runs:
        for run in (control, own):
            if run.diverged or not run.finished:
                sums = "" if run.finished else " and of sums over the run"
                why = f"{run.folder} {'diverged' if run.diverged else 'is unfinished'}"
                yield f"seed {run.seed} is excluded from the difference of the final loss{sums}, because {why}"
    if pair.testbed and pair.experiment and pair.experiment.claims and not pair.verdicts:
        planned = f"{pair.experiment.seeds} seeds, from 1 on, all to their end, are planned on {pair.testbed.name}"
        yield f"exploratory, without verdicts: {planned}"
    if len(evaluated := sequences_evaluated(pair.control, pair.treatment)) > 1:
        counts = " and ".join(f"{count:,}" for count in sorted(evaluated))
        yield f"evaluations during training are of {counts} sequences, so these losses cannot be compared; those of the whole split can"
    untimed = sorted({run.seed for runs in pair.runs for run in runs if run.timed_steps < MIN_TIMED_STEPS})
    if untimed:
        steps = f"{MIN_TIMED_STEPS} timed steps, those after the first {WARM_UP_STEPS} of each start"
        yield f"times of seed {', '.join(map(str, untimed))} are not compared, because a run has fewer than {steps}"
    if not pair.interleaved and untimed != [*pair.seeds]:
        yield "not all runs were interleaved, so differences in time may come from the load of the machine at different times"
    for key, effect in (("machine", "in time and memory may come from the machine"), ("commit", "may come from the code")):
        if pair.differ_in(key):
            yield f"not all runs used the same {key}, so differences {effect}"
    if pair.differ_in("versions"):
        yield "not all runs used the same package versions, so differences may come from these"


def _comparable_measures(run: Run, target: float | None) -> dict[str, float]:
    """The measures of a run, without sums if it ended early, and without times if it has too few timed steps.

    target: the loss for `TO_TARGET`; None leaves these out.
    """
    measures = dict(run.measures)
    for name, column in TO_TARGET.items():
        reached = None if target is None else reached_at(run.columns[column], run.columns["val_loss"], target)
        if reached is not None:
            measures[name] = reached
    left_out = (set() if run.finished else SUMS) | (set() if run.timed_steps >= MIN_TIMED_STEPS else TIMED)
    return {name: value for name, value in measures.items() if name not in left_out}


def reached_at(x: Column, val_loss: Column, target: float) -> float | None:
    """Where a run first reaches the validation loss `target`: seconds or tokens. +inf if it does not, None if it was never evaluated.

    The loss of each evaluation is noisy, so the first one below the target comes too early by chance. The curve is therefore fitted by
    isotonic regression, the non-increasing curve with the least squared error (Barlow et al., Statistical Inference under Order
    Restrictions, 1972). It pools evaluations that are out of order into blocks; the target is reached where the line through the centres
    of the blocks crosses it.

    Args:
        x: (rows,), the seconds or tokens so far, not decreasing.
        val_loss: (rows,), NaN in rows without an evaluation.
    """
    known = np.isfinite(val_loss) & np.isfinite(x)
    if not known.any():
        return None
    fit = isotonic_regression(val_loss[known], increasing=False)
    levels = fit.x[fit.blocks[:-1]]
    centres = np.add.reduceat(x[known], fit.blocks[:-1]) / np.diff(fit.blocks)
    return math.inf if levels[-1] > target else float(np.interp(-target, -levels, centres))  # np.interp needs values that rise


def losses_at_equal_time(*runs: Run) -> list[float]:
    """The validation losses of two runs when the faster one ends, interpolated between evaluations; [] unless both have finished and were
    timed. The learning rate of the slower run has not fully decayed by then.
    """
    known = [np.isfinite(run.columns["val_loss"]) & np.isfinite(run.columns["seconds"]) for run in runs]
    if not all(run.finished and run.timed_steps >= MIN_TIMED_STEPS and rows.any() for run, rows in zip(runs, known, strict=True)):
        return []
    curves = [(run.columns["seconds"][rows], run.columns["val_loss"][rows]) for run, rows in zip(runs, known, strict=True)]
    end = min(seconds[-1] for seconds, _ in curves)
    return [float(np.interp(end, *curve)) for curve in curves]


# --- report.json ----------------------------------------------------------------------------------------------------------------------


def _pair_as_json(pair: Pair) -> dict[str, Any]:
    return {
        "recipe": pair.recipe and pair.recipe.name,
        "control": pair.control.name,
        "side": pair.treatment.name,
        "seeds": pair.seeds,
        "differences": [dict(zip(("key", "control", "other"), one, strict=True)) for one in pair.differences],
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
