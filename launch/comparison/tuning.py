"""The experiments that set up a testbed, for `launch/compare.py --tune` and `--noise`: sweeps of training settings, and null experiments.

A sweep trains control and recipe at every point of a grid, with a seed that no verdict uses, and chooses the point of the lowest final
validation loss. Both sides have grids of the same size. A null experiment compares two configurations whose true difference is zero; the
standard deviation of their difference is the noise of the testbed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from launch.comparison.experiments import ranks_of, testbed_named, train_missing
from launch.comparison.runs import Run, read_run
from launch.comparison.trials import CannotRun, Trial, as_words, plan_trial, settings_on
from launch.errors import TrainingFailed, UsageError
from launch.formats.files import write_atomically
from launch.training.provenance import machine_in_words
from recipes.registry import ROOT, TESTBEDS, Flags, Recipe, Testbed, read_recipe, recipe_names

#: The DeepSpeed JSON whose sweep sets the values of a testbed.
CONTROL = "ds_configs/zero0_bf16.json"
#: The seed of sweeps, and the first of the null experiments with their number; verdicts use the seeds from 1 on.
SWEEP_SEED = 0
NOISE_SEED, NOISE_SEEDS = 101, 5
#: The relative perturbation of the initial weights in the trajectory null.
PERTURBATION = 1e-3


def tune(flags: argparse.Namespace, passed_on: Sequence[str]) -> tuple[dict[str, Any], list[str], list[Run]]:
    """Train the sweeps of `flags.testbed` that are missing: of the control, and of the recipe if one is given.

    Returns:
        The content of a `tuning.json`, by the name of the testbed, lines that say what was chosen, and the runs.

    Raises:
        UsageError: the grids of the two sides differ in size, or the recipe is not tuned on this testbed.
        TrainingFailed: a run did not finish, other than by diverging.
    """
    recipe = read_recipe(flags.recipe[0]) if flags.recipe else None
    planned = {name: _grids(testbed_named(name), recipe, flags, passed_on) for name in flags.testbed}
    trials = [trial for arms in planned.values() for grid in arms.values() for _, trial in grid]
    runs = _train(flags, [list({trial.name: trial for trial in trials}.values())])
    found, lines = {}, []
    for name, arms in planned.items():
        measured = {config: _measured([(point, runs[trial.name]) for point, trial in grid]) for config, grid in arms.items()}
        found[name] = {**_origin(runs), "seed": SWEEP_SEED, "arms": measured}
        for config, arm in measured.items():
            lines.append(f"{name}, {config}: {arm['chosen']} is best" + "".join(f"; {edge}" for edge in edges(arm["grid"], arm["chosen"])))
    return found, lines, list(runs.values())


def _grids(
    testbed: Testbed, recipe: Recipe | None, flags: argparse.Namespace, passed_on: Sequence[str]
) -> dict[str, list[tuple[Flags, Trial]]]:
    """The grid of each side by the name of its DeepSpeed JSON: the swept values and the run of every point."""
    sweeps = {CONTROL: testbed.sweep}
    if recipe is not None:
        experiment = recipe.experiments.get(testbed.name)
        if experiment is None or not experiment.sweep:
            raise UsageError(f"--tune: recipes/{recipe.name} names no sweep on {testbed.name}; it takes the values of its control")
        # Controls that are not tuned themselves are mathematically the testbed's control, and take its sweep.
        if (other := tuned_by(recipe.control, testbed)) is not None:
            sweeps = {recipe.control: other.experiments[testbed.name].sweep}
        sweeps[recipe.config] = experiment.sweep
    sizes = {config: math.prod(map(len, sweep.values())) for config, sweep in sweeps.items()}
    if len(set(sizes.values())) > 1:
        told = " and ".join(f"{config} {size}" for config, size in sizes.items())
        raise UsageError(f"--tune: the sweeps on {testbed.name} have different numbers of points ({told}); give both sides the same")
    grids = {}
    for config, sweep in sweeps.items():
        points = [dict(zip(sweep, values, strict=True)) for values in product(*sweep.values())]
        ranks = ranks_of(recipe if recipe and config == recipe.config else None, testbed, flags)
        grids[Path(config).stem] = [(point, _trial(testbed, config, point, passed_on, SWEEP_SEED, ranks)) for point in points]
    return grids


def tuned_by(config: str, testbed: Testbed) -> Recipe | None:
    """The recipe whose DeepSpeed JSON `config` is, if it is tuned on the testbed itself; None if it takes the values of the control."""
    recipes = (read_recipe(ROOT / "recipes" / name) for name in recipe_names())
    tuned = (one for one in recipes if one.config == config and testbed.name in one.experiments and one.experiments[testbed.name].sweep)
    return next(tuned, None)


def _trial(testbed: Testbed, config: str, changed: Flags, passed_on: Sequence[str], seed: int, ranks: int) -> Trial:
    """The run of `config` on a testbed with some flags changed. Raises UsageError if it cannot run here."""
    try:
        return plan_trial(config, [*as_words({**settings_on(testbed, config), **changed}), *passed_on, "--seed", str(seed)], ranks)
    except CannotRun as reason:
        raise UsageError(f"{config} on {testbed.name}: {reason}") from None


def _measured(grid: Iterable[tuple[Flags, Run]]) -> dict[str, Any]:
    """The loss (null for a run that diverged) and the spikes of each point, and the point of the lowest loss."""
    points = []
    for point, run in grid:
        measures = run.measures()
        loss = measures["final_val_loss"]
        points.append({**point, "loss": loss if math.isfinite(loss) else None, "spikes": measures.get("spikes")})
    finished = [point for point in points if point["loss"] is not None]
    best = min(finished, key=lambda point: float(point["loss"]), default=None)
    return {"grid": points, "chosen": best and {name: value for name, value in best.items() if name not in ("loss", "spikes")}}


def edges(grid: Sequence[dict[str, Any]], chosen: dict[str, float] | None) -> list[str]:
    """Which of the chosen values are not between others of the grid, in words."""
    if chosen is None:
        return ["every run diverged"]
    swept = {name: {point[name] for point in grid} for name in chosen}
    at_edge = [name for name, values in swept.items() if len(values) > 1 and chosen[name] in (min(values), max(values))]
    return [f"{name} {chosen[name]:g} is at the edge of the grid, extend it" for name in at_edge]


def measure_noise(flags: argparse.Namespace, passed_on: Sequence[str]) -> tuple[dict[str, Any], list[Run]]:
    """Train the null experiments of `flags.testbed` that are missing.

    Returns:
        The content of a `noise.json`, by the testbed's name, and the runs.

    Raises:
        TrainingFailed: a run did not finish, or diverged.
    """
    found: dict[str, Any] = {}
    every: list[Run] = []
    seeds = range(NOISE_SEED, NOISE_SEED + (flags.seeds or NOISE_SEEDS))
    for name in flags.testbed:
        testbed = testbed_named(name)
        ranks = ranks_of(None, testbed, flags)
        micro_batch = _trial(testbed, CONTROL, {}, passed_on, 0, ranks).config.micro_batch_size
        variants: dict[str, tuple[str, Flags]] = {
            "control": (CONTROL, {}),
            "precision": (CONTROL.replace("bf16", "fp32"), {}),
            "accumulation": (CONTROL, {"micro_batch_size": max(1, micro_batch // 4)}),
            "trajectory": (CONTROL, {"perturb_init": PERTURBATION}),
        }
        trials = {
            variant: [_trial(testbed, config, changed, passed_on, seed, ranks) for seed in seeds]
            for variant, (config, changed) in variants.items()
        }
        runs = _train(flags, [list(of_seed) for of_seed in zip(*trials.values(), strict=True)])
        if diverged := [run.name for run in runs.values() if run.diverged]:
            raise TrainingFailed(f"{diverged[0]} diverged; the values of testbed {name} are not stable, tune it again")
        losses = {variant: [runs[trial.name].measures()["final_val_loss"] for trial in own] for variant, own in trials.items()}
        control = losses.pop("control")
        nulls = {variant: {"seeds": list(seeds), "control": control, "other": other} for variant, other in losses.items()}
        found[name] = {**_origin(runs), "nulls": nulls}
        every += runs.values()
    return found, every


def _train(flags: argparse.Namespace, batches: Sequence[Sequence[Trial]]) -> dict[str, Run]:
    """Train the missing runs. Returns all of them by name; each has finished or diverged."""
    runs_dir = Path(flags.runs_dir)
    failures = train_missing(flags, batches, runs_dir)
    runs = {}
    for trial in (trial for batch in batches for trial in batch):
        if not (runs_dir / trial.name / "run.json").exists() or (run := read_run(runs_dir / trial.name)).state == "unfinished":
            raise TrainingFailed(f"{trial.name} did not finish: {failures.get(trial.name, 'stopped')}; the same command resumes it")
        runs[trial.name] = run
    return runs


def _origin(runs: Mapping[str, Run]) -> dict[str, Any]:
    first = next(iter(runs.values())).description
    return {"commit": first["commit"], "machine": machine_in_words(first["machine"])}


def write_tuning(found: dict[str, Any], recipe: str | None, out: Path, publish: bool) -> list[Path]:
    """Write `tuning.json` and `tuning.png` into `out`, and with `publish` into the folder of the recipe, or of each testbed without one."""
    folders = {out: found}
    if publish:
        folders |= {ROOT / "recipes" / recipe: found} if recipe else {TESTBEDS / name: {name: one} for name, one in found.items()}
    written = []
    for folder, own in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "tuning.json"
        merged = {**(json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}), **own}
        write_atomically(file, json.dumps(merged, indent=1, allow_nan=False) + "\n")
        draw_tuning(merged, folder / "tuning.png")
        written.append(file)
    return written


def write_noise(found: dict[str, Any], out: Path, publish: bool) -> list[Path]:
    """Write `noise.json` into `out`, and with `publish` into the folder of each testbed."""
    files = {out / "noise.json": found} | ({TESTBEDS / name / "noise.json": one for name, one in found.items()} if publish else {})
    for file, own in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(own, indent=1, allow_nan=False) + "\n")
    return list(files)


def deviation(null: dict[str, Any]) -> float:
    """The standard deviation of the differences of a null experiment, in nats per token."""
    return float(np.std(np.subtract(null["other"], null["control"]), ddof=1))


def noise_lines(found: dict[str, Any]) -> list[str]:
    """What the null experiments found, a line each."""
    lines = []
    for name, noise in found.items():
        for null, one in noise["nulls"].items():
            mean = np.mean(np.subtract(one["other"], one["control"]))
            lines.append(f"{name}, {null}: standard deviation of the difference {deviation(one):.5f}, mean {mean:+.5f}")
    return lines


def draw_tuning(found: dict[str, Any], file: Path) -> None:
    """Draw the final validation loss over the learning rate: a panel per testbed and side, a line per value of the other swept flag."""
    panels = [(name, config, arm) for name, one in found.items() for config, arm in one["arms"].items()]
    with rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        picture = Figure(figsize=(4.8 * len(panels), 3.8), dpi=110, layout="constrained")
        row = picture.subplots(1, len(panels), squeeze=False)[0]
        for axes, (name, config, arm) in zip(row, panels, strict=True):
            others = [key for key in arm["grid"][0] if key not in ("lr", "loss", "spikes")]
            lines: dict[str, list[tuple[float, float]]] = {}
            for point in arm["grid"]:
                label = ", ".join(f"{key} {point[key]:g}" for key in others)
                lines.setdefault(label, []).append((point["lr"], math.nan if point["loss"] is None else point["loss"]))
            for label, points in lines.items():
                axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, linewidth=1.5, label=label)
            if arm["chosen"]:
                best = min(point["loss"] for point in arm["grid"] if point["loss"] is not None)
                axes.plot(arm["chosen"]["lr"], best, marker="*", markersize=15, color="black", linestyle="", label=f"chosen: {best:.4f}")
            axes.set_xscale("log", base=2)
            axes.set_xticks(rates := sorted({point["lr"] for point in arm["grid"]}), [f"{rate:g}" for rate in rates])
            axes.minorticks_off()
            axes.set(title=f"{config}\non {name}", xlabel="peak learning rate", ylabel="final validation loss (nats per token)")
            axes.grid(alpha=0.25)
            axes.legend(fontsize=8, frameon=False)
        picture.savefig(file)
