"""Sweeps of training settings, for `launch/compare.py`: `--sweep` at a setting of the user, `--tune` on a testbed.

Each side is swept alike: its flags are varied one after another (coordinate descent), or in all combinations (`--grid`), and the point of
the lowest final validation loss is chosen. `--extend` adds values while the best one is the first or the last. The trials are runs in
`--runs_dir`: finished ones are reused, so that an interrupted sweep continues.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.comparison.comparison import LOSS, Comparison, compare_experiments, mismatches_of
from launch.comparison.experiments import check_corpus, check_parallel, ranks_of, share_cores, testbed_named, train_missing
from launch.comparison.runs import Run
from launch.comparison.tables import Table, mean, signed, with_interval
from launch.comparison.trials import CannotRun, Trial, make_trial, only_in_recipe, pair_trials, tuned_by
from launch.comparison.tuning import CONTROL, edges, in_words, numbers_in, origin_of, published_sweep
from launch.comparison.verdicts import Interval, paired_interval
from launch.config.deepspeed_schema import deepspeed_schema
from launch.config.flags import INITIAL, OF_RECIPES, RUN, TRAINING, VALUES, as_words, flags_of, open_recipe, without
from launch.errors import TrainingFailed, UsageError, nearest
from recipes.claims import LARGEST_MARGIN
from recipes.registry import ROOT, Flags, Recipe, Sweep, Testbed

#: The seed of sweeps on testbeds; verdicts use the seeds from 1 on.
SWEEP_SEED = 0
#: `--extend` adds at most this number of values to a side: with a factor of two, up to 256 times the best one.
MOST_ADDED = 8
#: The flags that `--sweep` may vary: those of the model and its training.
SWEPT = {name: flag for group in OF_RECIPES for name, flag in flags_of(group).items() if name != "data"}
SWEPT |= {name: one.flag for name, one in VALUES.items() if one.group == RUN and one.kind in (TRAINING, INITIAL) and name != "ranks"}


@dataclass
class Arm:
    """The sweep of one side. Flags not varied yet have their first value, earlier ones the value chosen so far.

    Attributes:
        sweep: flag, or dotted key of the JSON -> its values; `--extend` adds to them.
        trials: the runs of a point, one for each seed.
        combined: every combination of the values is a point.
        grid: the points that have ended: the value of each flag, and the "loss", the mean over the seeds, None if a run diverged; of
            several seeds also their "losses".
        published_in: the file that `grid` was read from; nothing is then trained.
        ends: flag -> why `--extend` added no further value.
    """

    name: str
    sweep: Sweep
    trials: Callable[[Flags], list[Trial]]
    combined: bool = False
    extends: bool = False
    grid: list[Flags] = field(default_factory=list)
    published_in: str = ""
    ends: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sweep = {name: [*values] for name, values in self.sweep.items()}
        self.start = {name: values[0] for name, values in self.sweep.items()}
        every = itertools.product(*self.sweep.values()) if self.combined or not self.sweep else ()
        self._combinations = [dict(zip(self.sweep, values, strict=True)) for values in every]
        self.size = len(self._combinations) or 1 + sum(len(values) - 1 for values in self.sweep.values())
        self._added = 0

    @property
    def best(self) -> Flags | None:
        """The entry of `grid` with the lowest loss; None if all diverged."""
        return min((row for row in self.grid if row["loss"] is not None), key=lambda row: float(row["loss"]), default=None)

    @property
    def chosen(self) -> Flags | None:
        """The point of the lowest loss; None if all diverged."""
        return self.best and self.point(self.best)

    def point(self, row: Flags) -> Flags:
        """The values of an entry of `grid`."""
        return {name: row[name] for name in self.sweep}

    def add(self, point: Flags, losses: Sequence[float]) -> None:
        """Add a point that has ended, with the loss of each seed."""
        mean = sum(losses) / len(losses)
        of_seeds = {"losses": losses} if len(losses) > 1 and math.isfinite(mean) else {}
        self.grid.append({**point, "loss": mean if math.isfinite(mean) else None, **of_seeds})

    def rounds(self) -> Iterator[list[Flags]]:
        """The points to train in each round; those of a round that have ended must be in `grid` before the next one is asked for."""
        yield self._combinations
        for name in self.sweep:
            yield [{**(self.chosen or self.start), name: value} for value in self.sweep[name]]
            while self.extends and self.chosen and name in edges(self.grid, self.chosen) and (beyond := self._beyond(name, self.chosen)):
                yield [beyond]

    def _beyond(self, name: str, chosen: Flags) -> Flags | None:
        """The point beyond the chosen one at the edge of a flag's values, by the factor between it and the next; None if there is none."""
        best = chosen[name]
        inner = min((row[name] for row in self.grid if row[name] != best), key=lambda value: abs(value - best))
        value: float = float(f"{best * best / inner if inner > 0 else 2 * best:.4g}")
        point = {**chosen, name: round(value) if isinstance(best, int) else value}
        try:
            if self._added == MOST_ADDED or point == chosen:
                raise CannotRun(f"--extend adds at most {MOST_ADDED} values" if point != chosen else "the next is the same whole number")
            self.trials(point)
        except CannotRun as reason:
            self.ends[name] = f"{in_words(point[name])} cannot be tried: {reason}" if point != chosen else str(reason)
            return None
        self._added, self.size = self._added + 1, self.size + 1
        return point

    def above_best(self, row: Flags) -> Interval | None:
        """How much higher the loss of an entry of `grid` is than the lowest, paired by seed; None for the lowest, or if it diverged."""
        if self.best in (None, row) or row["loss"] is None:
            return None
        return paired_interval(*(one.get("losses", [one["loss"]]) for one in (self.best, row)))


@dataclass
class Swept:
    """Sweeps that have ended. name: of the setting. opponents: recipe, arm of its control, own arm, whose bests are compared."""

    name: str
    arms: list[Arm]
    runs: dict[str, Run]
    about: dict[str, Any]
    opponents: Sequence[tuple[Recipe, Arm, Arm]] = ()

    def as_json(self) -> dict[str, Any]:
        """The content of a `tuning.json`."""
        published = {arm.name: {"published_in": arm.published_in} if arm.published_in else {} for arm in self.arms}
        by_name = {arm.name: {**published[arm.name], "grid": arm.grid, "chosen": arm.chosen} for arm in self.arms}
        return {self.name: {**origin_of(self.runs.values()), **self.about, "arms": by_name}}

    def script(self, runs_dir: str | None) -> str:
        """The commands that train the best point of each side, in `runs_dir` if it is given, as runs that are not there yet."""
        best = {arm.name: arm.trials(arm.chosen)[0] for arm in self.arms if arm.chosen is not None}
        commands = list[str]()
        for name, trial in best.items():
            names = itertools.chain([f"{name}-best"], (f"{name}-best-{number}" for number in itertools.count(2)))
            free = next(one for one in names if not Path(runs_dir or "runs", one).exists())
            commands.append(f"# the best of {name}\n{_command(trial, free, runs_dir)}\n")
        return "".join([f"cd {shlex.quote(str(Path.cwd()))}\n", *commands])

    def comparison(self) -> Comparison | None:
        """Each recipe at its best point against its control at its own; None without such a pair."""

        def best(arm: Arm) -> list[Run]:
            return [self.runs[one.name] for one in arm.trials(arm.chosen or {})]

        chosen = [one for one in self.opponents if None not in (one[1].chosen, one[2].chosen)]
        experiments = [(recipe, None, best(control), best(own)) for recipe, control, own in chosen]
        remark = "the seeds of this comparison also chose the settings of both sides, which flatters both; other seeds judge better"
        compared = compare_experiments(experiments)
        return replace(compared, remarks=(remark, *compared.remarks)) if experiments else None

    def table(self) -> Table:
        """All trials."""
        names = [*dict.fromkeys(name for arm in self.arms for name in arm.sweep)]
        rows = []
        for arm in self.arms:
            for row in sorted(arm.grid, key=lambda row: [numbers_in(row[name]) for name in arm.sweep]):
                values = [in_words(row[name]) if name in arm.sweep else "–" for name in names]
                loss = "diverged" if row["loss"] is None else mean(LOSS, row.get("losses", [row["loss"]]))
                rows.append([arm.name, *values, loss, "best" if row is arm.best else with_interval(arm.above_best(row), signed)])
        return Table("Trials", ["", *names, "final loss (nats)", "above the best"], rows)

    def lines(self) -> Iterator[str]:
        """What was chosen, and how far it can be trusted."""
        for arm in self.arms:
            if arm.best is None:
                yield f"{arm.name}: every run diverged; lower the values, the learning rate first"
                continue
            yield f"{arm.name}: best is {_words(arm.point(arm.best)) or 'its one setting'}, {arm.best['loss']:.4f} nats"
            for name in edges(arm.grid, arm.point(arm.best)):
                why = arm.ends.get(name, "give further values, or --extend")
                yield f"{arm.name}: {name} {in_words(arm.best[name])} is at the edge of its values, and a better one may lie beyond: {why}"
            gaps = {_words(arm.point(row)): gap for row in arm.grid if (gap := arm.above_best(row))}
            if close := [what for what, gap in gaps.items() if gap.low is not None and gap.low <= 0]:
                yield f"{arm.name}: {len(arm.best['losses'])} seeds do not tell the best from {'; '.join(close)}"
            elif gaps and "losses" not in arm.best:
                second = min(gaps, key=lambda what: gaps[what].mean)
                if gaps[second].mean <= LARGEST_MARGIN["equal"]:
                    yield f"{arm.name}: one seed shows no noise, so {second} ({signed(gaps[second].mean)}) may be as good"


def sweep(flags: argparse.Namespace, passed_on: Sequence[str]) -> Swept:
    """`--sweep`: train the missing trials of each recipe and its control, or without a recipe of `--deepspeed_config`.

    Raises:
        UsageError: a flag or a value is wrong, or the losses of two points could not be compared; nothing is trained.
        TrainingFailed: a run did not finish, other than by diverging.
    """
    arms, opponents = own_arms(flags, passed_on)
    return Swept("sweep", arms, train_arms(arms, flags), {"flags": [*passed_on]}, opponents)


def own_arms(flags: argparse.Namespace, passed_on: Sequence[str]) -> tuple[list[Arm], list[tuple[Recipe, Arm, Arm]]]:
    """The sweep of each side at a setting of the user, and which are compared. Raises UsageError as `sweep`."""
    values, ranks = read_sweep(flags.sweep), ranks_of(None, None, flags)
    if twice := sorted(values.keys() & {*(word[2:] for word in passed_on), *(one.partition("=")[0] for one in flags.overrides)}):
        raise UsageError(f"{twice[0]} is swept and given too; leave out one of the two")
    if flags.eval_every == 0 and not flags.whole_eval:
        raise UsageError("--eval_every 0: a sweep compares validation losses; leave it out, or give --whole_eval")
    share_cores(flags, ranks)
    check_parallel(flags, ranks)
    seeds = range(1, 1 + (flags.seeds or 1))
    arms: dict[str, Arm] = {}  # by the name of their first run: recipes may share a control

    def add(name: str, trials: Callable[[list[str]], Sequence[Trial]], swept: Sweep) -> Arm:
        name += f"-{len(arms)}" * (name in {arm.name for arm in arms.values()})
        arm = Arm(name, swept, lambda point: [*trials([*passed_on, *_as_words(point)])], flags.grid, flags.extend)
        _check(arm, flags.force)
        return arms.setdefault(arm.trials(arm.start)[0].name, arm)

    def sides(recipe: Recipe) -> tuple[Recipe, Arm, Arm]:
        shared = {key: one for key, one in values.items() if key.partition(".")[0] not in only_in_recipe(recipe)}
        control = add(Path(recipe.control).stem, lambda words: pair_trials(recipe, words, seeds, ranks).control, shared)
        return recipe, control, add(recipe.name, lambda words: pair_trials(recipe, words, seeds, ranks).own, values)

    opponents = [sides(open_recipe(folder)) for folder in flags.recipe]
    if not opponents:
        config = str(Path(flags.deepspeed_config or ROOT / CONTROL).absolute())
        add(Path(config).stem, lambda words: [make_trial(config, [*words, "--seed", str(seed)], ranks) for seed in seeds], values)
    return [*arms.values()], opponents


def tune(flags: argparse.Namespace, passed_on: Sequence[str]) -> Swept:
    """`--tune`: train the missing trials of the testbed: of the control; or of the given recipe, and of its control if that has no
    published sweep. Raises as `sweep`, and UsageError if the recipe is not tuned on this testbed.
    """
    testbed = testbed_named(flags.testbed[0])
    arms = testbed_arms(testbed, open_recipe(flags.recipe[0]) if flags.recipe else None, flags, passed_on)
    check_corpus(testbed)
    return Swept(testbed.name, arms, train_arms(arms, flags), {"flags": testbed.flags, "seed": SWEEP_SEED})


def testbed_arms(testbed: Testbed, recipe: Recipe | None, flags: argparse.Namespace, passed_on: Sequence[str]) -> list[Arm]:
    """The sweep of each side on a testbed."""
    if not testbed.sweep:
        raise UsageError(f"--tune: {testbed.name} has fixed values: {testbed.reason}")
    sweeps = {CONTROL: testbed.sweep}
    if recipe is not None:
        experiment = recipe.experiments.get(testbed.name)
        if experiment is None or not experiment.sweep:
            raise UsageError(
                f"--tune: recipes/{recipe.name} names no sweep on {testbed.name}, so it takes the values of its control; leave out"
                " --recipe, or add a 'sweep' to its recipe.json"
            )
        # Controls that are not tuned themselves are mathematically the testbed's control, and take its sweep.
        if (other := tuned_by(recipe.control, testbed)) is not None:
            sweeps = {recipe.control: other.experiments[testbed.name].sweep}
        sweeps[recipe.config] = experiment.sweep
    ranks = {config: recipe.ranks if recipe and config == recipe.config else 1 for config in sweeps}
    share_cores(flags, max(ranks.values()))
    # As in the experiments, also for flags that this side does not sweep.
    base = {**testbed.flags, **testbed.tuned}

    def trials(config: str) -> Callable[[Flags], list[Trial]]:
        return lambda point: [make_trial(config, [*as_words({**base, **point}), *passed_on, "--seed", str(SWEEP_SEED)], ranks[config])]

    arms = [Arm(Path(config).stem, own, trials(config), flags.grid, flags.extend) for config, own in sweeps.items()]
    if len({arm.size for arm in arms}) > 1:
        sizes = " and ".join(f"{arm.name} {arm.size}" for arm in arms)
        raise UsageError(f"--tune: the sweeps on {testbed.name} have different numbers of points ({sizes}); give both sides the same")
    for config, arm in zip(sweeps, arms, strict=True):
        if recipe and config != recipe.config:
            file, published = published_sweep(config, testbed)
            arm.grid, arm.published_in = published["grid"], str(file.relative_to(ROOT)) if published["grid"] else ""
    return arms


# --- the flags of a sweep -------------------------------------------------------------------------------------------------------------


def read_sweep(given: Sequence[str]) -> Sweep:
    """The flags and keys of `--sweep NAME=VALUE,...` with their values. Raises UsageError for a flag that no sweep can vary."""
    found: Sweep = {}
    for text in given:
        name, _, values = text.partition("=")
        words = re.split(r",(?![^\[{]*[\]}])", values)  # not at the commas within [0.9,0.95]
        if not name or not all(words):
            raise UsageError(f"--sweep {text}: must be NAME=VALUE,VALUE,..., e.g. --sweep lr=5e-4,1e-3,2e-3")
        if name not in SWEPT and name in {"data", "set", "recipe", "deepspeed_config", *flags_of(RUN)}:
            raise UsageError(f"--sweep {name}: is not a value of the model or its training; a sweep varies these, and keys of the JSON")
        found[name] = [*dict.fromkeys([*found.get(name, []), *map(_value, words)])]
    return found


def _value(text: str) -> int | float | str:
    """A value as a number, where it is one."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and "." not in text else number


def _as_words(point: Flags) -> list[str]:
    """The flags of a point on a command line. A key of the JSON is given by --set, and a switch by its name or not at all."""
    switches = {name: {"true": True, "false": False}.get(value, value) for name, value in point.items() if "action" in SWEPT.get(name, {})}
    flags = {name: value for name, value in point.items() if name in SWEPT}
    return [*as_words(flags | switches), *(word for name in point if name not in SWEPT for word in ("--set", f"{name}={point[name]}"))]


def _check(arm: Arm, force: bool) -> None:
    """Refuse a sweep that cannot be trained, or whose losses cannot be compared, before any run: each value, varied alone."""
    described = {}
    for point in [arm.start, *({**arm.start, name: value} for name, values in arm.sweep.items() for value in values)]:
        where = f"{arm.name}, {_words(point)}"
        try:
            described[where] = arm.trials(point)[0].described
        except CannotRun as reason:
            message, unknown = str(reason), ""
            for name in point.keys() - SWEPT.keys():
                message = message.replace(f"--set {name}", f"--sweep {name}")
                unknown = name if f"--sweep {name}: unknown key" in message else unknown
            if hint := nearest(unknown, [*SWEPT, *deepspeed_schema().keys]):
                message = re.sub("; (remove it|did you mean .*)$", "", message) + hint
            raise UsageError(f"{where}: {message}") from None
    mismatches_of([described], force)


# --- training -------------------------------------------------------------------------------------------------------------------------


def train_arms(arms: Sequence[Arm], flags: argparse.Namespace) -> dict[str, Run]:
    """Train the missing trials of all arms, one after another unless flags say otherwise; all runs by name. Raises as `sweep`."""
    flags.at_once = flags.at_once or 1
    runs: dict[str, Run] = {}
    arms = [arm for arm in arms if not arm.published_in]
    for together in itertools.zip_longest(*(arm.rounds() for arm in arms), fillvalue=[]):
        every = [(arm, point) for arm, points in zip(arms, together, strict=True) for point in points]
        points = [(arm, point, arm.trials(point)) for arm, point in every if point not in map(arm.point, arm.grid)]
        trials = {trial.name: trial for *_, its_trials in points for trial in its_trials}
        labels = {one.name: f"{arm.name}, {_words(point)}, seed {one.seed}" for arm, point, its_trials in points for one in its_trials}
        total = sum(arm.size for arm in arms) * max((len(its_trials) for *_, its_trials in points), default=0)
        found, failures = train_missing(flags, [[*trials.values()]], labels, len(runs), total)
        runs |= found
        for name in trials:
            if name not in runs or runs[name].state == "unfinished":
                raise TrainingFailed(f"{name} did not finish: {failures.get(name, 'stopped')}; the same command resumes it")
        for arm, point, its_trials in points:
            arm.add(point, [runs[trial.name].measures[LOSS] for trial in its_trials])
    return runs


def _words(point: Flags) -> str:
    return ", ".join(f"{name} {in_words(value)}" for name, value in point.items())


def _command(trial: Trial, run_name: str, runs_dir: str | None) -> str:
    """The command of a user that trains a trial as it was trained, from this folder."""
    launcher = "python" if trial.config.ranks == 1 else f"deepspeed --num_gpus {trial.config.ranks}"
    words = [*without(trial.flags, "--save_every"), *as_words({"runs_dir": runs_dir, "run_name": run_name})]
    return f"{launcher} {shlex.join([str(ROOT / 'launch/pretrain.py'), *words])}".replace(f"{Path.cwd()}/", "")
