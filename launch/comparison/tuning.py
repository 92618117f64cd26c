"""Sweeps of training settings on a testbed, for `launch/compare.py --tune`.

A sweep varies the flags of control and recipe one after another, with a seed that no verdict uses, and chooses the values of the lowest
final validation loss. Both sides have the same number of runs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data_pipeline.staging import write_atomically
from launch.comparison.experiments import check_corpus, share_cores, testbed_named, train_missing
from launch.comparison.runs import Run
from launch.comparison.trials import Trial, make_trial, tuned_by
from launch.config.flags import as_words, open_recipe
from launch.errors import TrainingFailed, UsageError, print_once
from launch.formats.files import read_committed
from launch.training.run_folder.provenance import machine_in_words
from recipes.registry import ROOT, TESTBEDS, Flags, Recipe, Testbed

#: The DeepSpeed JSON whose sweep sets the values of a testbed.
CONTROL = "ds_configs/zero0_bf16.json"
#: The seed of sweeps; verdicts use the seeds from 1 on.
SWEEP_SEED = 0
#: Flag -> its label on an axis of a sweep's picture.
FLAGS = {"lr": "peak learning rate", "min_lr": "learning rate at the end", "warmup_steps": "steps of warm-up"}
#: The range of losses in that picture, in nats.
LOSSES_SHOWN = 0.25


def tune(flags: argparse.Namespace, passed_on: Sequence[str]) -> tuple[dict[str, Any], list[str], list[Run]]:
    """Train the missing sweeps of the testbed: of the control; or of the given recipe, and of its control if that has no published sweep.

    Returns:
        The content of a `tuning.json`, lines that say what was chosen, and the runs.

    Raises:
        UsageError: the sweeps of the two sides differ in size, or the recipe is not tuned on this testbed.
        TrainingFailed: a run did not finish, other than by diverging.
    """
    testbed = testbed_named(flags.testbed[0])
    arms = _arms(testbed, open_recipe(flags.recipe[0]) if flags.recipe else None, flags, passed_on)
    check_corpus(testbed)
    missing = [arm for arm in arms if not arm.grid]
    rounds = max(len(arm.sweep) for arm in missing)
    print_once(f"a sweep in {rounds} round{'s' * (rounds > 1)}, a flag in each")
    runs: dict[str, Run] = {}
    for number in range(rounds):
        points = [(arm, point, trial) for arm in missing for point, trial in arm.round(number)]
        trained, failures = train_missing(flags, [[*{trial.name: trial for _, _, trial in points}.values()]])
        runs |= trained
        for arm, point, trial in points:
            if trial.name not in runs or runs[trial.name].state == "unfinished":
                raise TrainingFailed(f"{trial.name} did not finish: {failures.get(trial.name, 'stopped')}; the same command resumes it")
            loss = runs[trial.name].measures["final_val_loss"]
            measured = {**point, "loss": loss if math.isfinite(loss) else None}
            if measured not in arm.grid:
                arm.grid.append(measured)
    by_config, lines = {}, []
    for arm in arms:
        config = Path(arm.config).stem
        origin = {"published_in": arm.published_in} if arm.published_in else {}
        by_config[config] = {**origin, "grid": arm.grid, "chosen": arm.chosen}
        best = f"{arm.chosen} is best; " if arm.chosen else ""
        lines.append(f"{testbed.name}, {config}: {best}{'; '.join(edges(arm.grid, arm.chosen))}".removesuffix("; "))
    return {testbed.name: {**_origin(runs), "flags": testbed.flags, "seed": SWEEP_SEED, "arms": by_config}}, lines, [*runs.values()]


@dataclass
class _Arm:
    """The sweep of one side on a testbed: its flags are varied one after another (coordinate descent).

    Flags not swept yet have their first value, earlier ones the value chosen so far. `grid` and `published_in`, its file, are given if the
    sweep is published.
    """

    testbed: Testbed
    config: str
    sweep: dict[str, list[Any]]
    passed_on: Sequence[str]
    ranks: int
    grid: list[Flags] = field(default_factory=list)
    published_in: str = ""

    @property
    def size(self) -> int:
        return 1 + sum(len(values) - 1 for values in self.sweep.values())

    @property
    def chosen(self) -> Flags | None:
        """The point of the lowest loss; None if every run diverged."""
        finished = [point for point in self.grid if point["loss"] is not None]
        best = min(finished, key=lambda point: float(point["loss"]), default=None)
        return best and {name: best[name] for name in self.sweep}

    def round(self, number: int) -> list[tuple[Flags, Trial]]:
        """The values and the run of each point in the sweep of flag `number`."""
        start = self.chosen or {name: values[0] for name, values in self.sweep.items()}
        points = [{**start, name: value} for name, values in [*self.sweep.items()][number : number + 1] for value in values]
        base = {**self.testbed.flags, **self.testbed.tuned}  # as in the experiments, also for flags that this side does not sweep
        settings = [as_words({**base, **point}) for point in points]
        return [
            (point, make_trial(self.config, [*words, *self.passed_on, "--seed", str(SWEEP_SEED)], self.ranks))
            for point, words in zip(points, settings, strict=True)
        ]


def _arms(testbed: Testbed, recipe: Recipe | None, flags: argparse.Namespace, passed_on: Sequence[str]) -> list[_Arm]:
    """The sweep of each side."""
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
    arms = []
    for config, sweep in sweeps.items():
        arm = _Arm(testbed, config, sweep, passed_on, ranks[config])
        if recipe and config != recipe.config:
            file, published = published_sweep(config, testbed)
            arm.grid, arm.published_in = published["grid"], str(file.relative_to(ROOT)) if published["grid"] else ""
        arms.append(arm)
    if len({arm.size for arm in arms}) > 1:
        sizes = " and ".join(f"{arm.config} {arm.size}" for arm in arms)
        raise UsageError(f"--tune: the sweeps on {testbed.name} have different numbers of points ({sizes}); give both sides the same")
    return arms


def published_sweep(config: str, testbed: Testbed, recipe: Recipe | None = None) -> tuple[Path, dict[str, Any]]:
    """The `tuning.json` with the sweep that sets the values of `config` on a testbed, and that sweep; its grid is empty if unpublished.

    It is the sweep of `recipe`, by default of `tuned_by`.
    """
    own = recipe or tuned_by(config, testbed)
    file = (ROOT / "recipes" / own.name if own else TESTBEDS / testbed.name) / "tuning.json"
    arms = read_committed(file).get(testbed.name, {}).get("arms", {})
    return file, arms.get(Path(config if own else CONTROL).stem, {"grid": [], "chosen": None})


def edges(grid: Sequence[Flags], chosen: Flags | None) -> list[str]:
    """The chosen numbers at an edge of the grid, in words. Strings (words, `set`) have no edge, and neither has 0: no value is below it."""
    if chosen is None:
        return ["every run diverged, lower the values of 'sweep'"]
    swept = {name: {point[name] for point in grid} for name, value in chosen.items() if value and not isinstance(value, str)}
    at_edge = [name for name, values in swept.items() if len(values) > 1 and chosen[name] in (min(values), max(values))]
    return [f"{name} {chosen[name]:g} is at the edge of the grid, extend it" for name in at_edge]


def _origin(runs: Mapping[str, Run]) -> dict[str, Any]:
    """The commits, the machines and the corpora of the runs."""
    descriptions = [run.description for run in runs.values()]
    machines = dict.fromkeys(machine_in_words(one["machine"]) for one in descriptions)
    commits, corpora = ([*dict.fromkeys(one[key] for one in descriptions)] for key in ("commit", "corpus_fingerprint"))
    return {"commits": commits, "machine": " and ".join(machines), "corpora": corpora}


def write_tuning(found: dict[str, Any], folders: Sequence[Path]) -> list[Path]:
    """Write `tuning.json` and `tuning.png` into each folder; a published file keeps its sweeps on other testbeds."""
    files = [folder / "tuning.json" for folder in folders]
    for file in files:
        merged = {**read_committed(file), **found}
        file.parent.mkdir(parents=True, exist_ok=True)
        draw_tuning(merged, file.with_suffix(".png"))
        write_atomically(file, json.dumps(merged, indent=1, allow_nan=False) + "\n")
    return files


def draw_tuning(found: dict[str, Any], file: Path) -> None:
    """Draw the final validation loss over the values of each swept flag: a panel per testbed and flag, with a line per side.

    The panels of a testbed have one scale, which ends `LOSSES_SHOWN` above the best loss of the worse side.
    """
    panels = dict.fromkeys((name, flag) for name, one in found.items() for arm in one["arms"].values() for flag in _lines(arm["grid"]))
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    with rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        picture = Figure(figsize=(4.2 * across + 0.4, 3.2 * down + 0.2), dpi=110, layout="constrained")
        every = picture.subplots(down, across, squeeze=False).flatten()
        for axes, (name, flag) in zip(every, panels, strict=False):
            axes.set_title(name, fontsize=10, loc="left")
            _draw_panel(axes, flag, found[name]["arms"])
        for axes in every[len(panels) :]:
            axes.set_axis_off()
        note = "★ chosen; one run per point, with a seed that no verdict uses; higher losses are above the frame"
        picture.supxlabel(note if across > 1 else note.replace("uses; ", "uses;\n"), fontsize=9)
        picture.savefig(file, metadata={"Software": None})


def _draw_panel(axes: Axes, flag: str, arms: dict[str, Any]) -> None:
    lines = {config: _lines(arm["grid"]).get(flag, []) for config, arm in arms.items()}
    values = sorted({point[flag] for points in lines.values() for point in points}, key=numbers_in)
    for color, (config, points) in enumerate(lines.items()):
        places = [values.index(point[flag]) for point in points]
        losses = [math.inf if point["loss"] is None else point["loss"] for point in points]
        axes.plot(places, losses, marker="o", markersize=4, linewidth=1.5, color=f"C{color}", label=config)
        for place, loss in zip(places, losses, strict=True):
            if arms[config]["chosen"] and values[place] == arms[config]["chosen"][flag]:
                axes.plot(place, loss, marker="*", markersize=14, color=f"C{color}", markeredgecolor="black")
    bests = [min(losses) for arm in arms.values() if (losses := [point["loss"] for point in arm["grid"] if point["loss"] is not None])]
    axes.set_ylim(min(bests, default=0.0) - 0.02, max(bests, default=0.0) + LOSSES_SHOWN)
    axes.set_ylabel("final validation loss\n(nats per token)")
    turned: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(values) > 4 else {}
    axes.set_xticks(range(len(values)), [in_words(value) for value in values], **turned)
    axes.set_xlabel(FLAGS.get(flag, setting_name(flag, values[0])))
    axes.margins(x=0.15)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _lines(grid: Sequence[Flags]) -> dict[str, list[Flags]]:
    """Flag of a sweep -> its points in ascending order: those that differ in this flag alone."""
    lines: dict[str, list[Flags]] = {}
    for flag in (key for key in grid[0] if key not in ("loss", "spikes")):
        agreeing: dict[str, list[Flags]] = {}
        for point in grid:
            others = {key: value for key, value in point.items() if key not in (flag, "loss", "spikes")}
            agreeing.setdefault(str(others), []).append(point)
        points = max(agreeing.values(), key=len)
        if len(points) > 1 or not lines:
            lines[flag] = sorted(points, key=lambda point: numbers_in(point[flag]))
    return lines


def setting_name(flag: str, value: Any) -> str:
    """The name of a setting: the key of `--set KEY=VALUE`, else the flag."""
    return str(value).partition("=")[0] if flag == "set" else flag


def numbers_in(value: Any) -> list[float]:
    """The numbers of a flag's value, by which values are sorted."""
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?", in_words(value))] if isinstance(value, str) else [value]


def in_words(value: Any) -> str:
    """A flag's value; of `--set KEY=VALUE`, the value."""
    if value is True:
        return "yes"
    return f"{value:g}" if isinstance(value, (int, float)) else str(value).partition("=")[2] or str(value)
