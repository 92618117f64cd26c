"""Runs the experiments of `launch/compare.py`: plans the runs of recipes and controls, trains those that are missing, compares all."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from launch.comparison.comparison import Absent, Comparison, compare_experiments
from launch.comparison.interleaved import train_interleaved
from launch.comparison.runs import read_run
from launch.comparison.trials import CannotRun, Experiment, Trial, fitting_groups, in_order, plan_experiment
from launch.config.hardware import device_type, gpus
from launch.errors import UsageError, one_line, print_once
from recipes.registry import ROOT, read_recipe

CPU_RANKS = 2  # with one rank nothing is partitioned and nothing is sent


def run_experiments(folders: Sequence[Path | str], passed_on: Sequence[str], flags: argparse.Namespace) -> tuple[Comparison, list[str]]:
    """Train the runs of these recipes and of their controls that are missing, and compare them.

    Args:
        folders: of the recipes.
        passed_on: flags of `launch/pretrain.py` for all runs.
        flags: of `launch/compare.py`. With `all`, recipes that cannot run on this machine are listed in the report instead of refused.

    Returns:
        The comparison, and the names of the runs that did not finish, other than by diverging.

    Raises:
        UsageError: a recipe is damaged or cannot run here, or `runs_dir` cannot be used.
    """
    os.environ.setdefault("DS_ACCELERATOR", device_type())
    ranks = flags.ranks or (len(gpus()) if device_type() == "cuda" else CPU_RANKS)
    planned: list[Experiment] = []
    absent = []
    for folder in folders:
        try:
            recipe = read_recipe(folder)
        except ValueError as reason:
            raise UsageError(str(reason)) from None
        try:
            planned.append(plan_experiment(recipe, passed_on, range(1, flags.seeds + 1), ranks))
        except CannotRun as reason:
            if not flags.all:
                raise UsageError(f"{folder}: {reason}") from None
            absent.append(Absent(recipe.name, str(reason)))
            print_once(f"{recipe.name} cannot run here: {reason}")
    runs_dir = Path(flags.runs_dir)
    failures = train_missing(flags, planned, runs_dir)
    names = {trial.name for one in planned for trial in (*one.control, *one.own)}
    runs = {name: read_run(runs_dir / name) for name in sorted(names) if (runs_dir / name / "run.json").exists()}
    experiments = []
    for one in planned:
        control, own = ([runs[trial.name] for trial in trials if trial.name in runs] for trials in (one.control, one.own))
        if control and own:
            experiments.append((one.recipe, control, own))
        else:
            reasons = [failures[trial.name] for trial in (*one.control, *one.own) if trial.name in failures]
            absent.append(Absent(one.recipe.name, reasons[0] if reasons else "its runs left no run.json"))
    unfinished = [name for name in failures if name not in runs or runs[name].state == "unfinished"]
    return compare_experiments(experiments, absent, flags.force), unfinished


def train_missing(flags: argparse.Namespace, experiments: Sequence[Experiment], runs_dir: Path) -> dict[str, str]:
    """Train the runs that are not finished. Returns the reasons of those that failed, by name."""

    def missing() -> list[list[Trial]]:
        by_seed = ([trial for trial in trials if not is_finished(runs_dir / trial.name)] for trials in in_order(experiments))
        return [trials for trials in by_seed if trials]

    failures: dict[str, str] = {}
    if not missing():
        return failures
    with _locked(runs_dir):
        groups = [group for trials in missing() for group in fitting_groups(trials, flags.at_once)]
        trials = [trial for group in groups for trial in group]
        print_once(f"training {len(trials)} runs, at most {max(map(len, groups), default=0)} of them interleaved, in {runs_dir}")
        steps = sum(trial.config.steps_to_make for trial in trials)
        done = sum(_steps_done(runs_dir / trial.name) for trial in trials)
        with tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True, disable=flags.quiet or None) as bar:  # None: off a terminal
            for number, group in enumerate(groups, 1):
                outputs = {trial.name: runs_dir / f"{trial.name}.out" for trial in group}
                sizes = {name: output.stat().st_size if output.exists() else 0 for name, output in outputs.items()}
                try:
                    codes = train_interleaved(group, runs_dir, lambda trial, made: bar.update(made))
                except SystemExit:
                    bar.close()
                    print_once("stopped; the same command resumes the runs", sys.stderr)
                    raise
                for name, code in codes.items():
                    if code:
                        failures[name] = error_of(outputs[name], sizes[name], code)
                        print_once(one_line(f"{name} failed: {failures[name]}"), sys.stderr)
                    elif not flags.keep_checkpoints:
                        shutil.rmtree(runs_dir / name / "checkpoints", ignore_errors=True)
                if bar.disable and not flags.quiet:
                    print_once(f"{sum(map(len, groups[:number]))} of {len(trials)} runs have ended")
    return failures


def is_finished(run: Path) -> bool:
    """Whether the folder `run` holds a run that has trained on all its tokens."""
    return os.path.exists(run / "run.json") and read_run(run).finished


def _steps_done(run: Path) -> int:
    return int(max(read_run(run).columns["step"], default=0)) if os.path.exists(run / "run.json") else 0


@contextlib.contextmanager
def _locked(runs_dir: Path) -> Iterator[None]:
    """Hold the lock of `runs_dir`. Refuse a folder in which another command trains, or that cannot be written."""
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        lock = open(runs_dir / ".lock", "a", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as reason:
        raise UsageError(f"--runs_dir {runs_dir}: cannot be written ({reason.strerror}); give another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--runs_dir {runs_dir}: another launch/compare.py is training there; wait, or give another folder") from None
        yield


def error_of(output: Path, before: int, code: int) -> str:
    """The last error in a run's output after the first `before` bytes, which are of earlier attempts; else its exit code."""
    lines = output.read_bytes()[before:].decode("utf-8", "replace").splitlines()
    errors = [line.removeprefix("error: ").replace(f"{ROOT}/", "") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else f"exit code {code}, see {output}"
