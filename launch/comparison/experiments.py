"""Runs the experiments of `launch/compare.py`: names the runs of recipes and controls, trains those that are missing, compares all."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from launch.comparison.comparison import Absent, Comparison, compare_experiments
from launch.comparison.interleaved import run_interleaved
from launch.comparison.runs import Run, progress, read_run
from launch.comparison.trials import CannotRun, PairedTrials, Trial, corpus_command, in_order, interleaved_groups, pair_trials
from launch.config.flags import open_recipe, without
from launch.config.hardware import device_type, gpus
from launch.errors import UsageError, bar_options, print_once, printable_line
from launch.formats.files import check_writable, read_json_object
from launch.formats.metrics import read_log
from recipes.registry import ROOT, Ladder, Recipe, Testbed, read_testbed, read_testbeds

#: Ranks of runs on no testbed; with one rank nothing is partitioned or sent.
CPU_RANKS = 2
#: Seeds of runs on no testbed.
SEEDS = 3
#: The first seed of explorations on a testbed. Training is deterministic, so the seeds that judge would show the verdict in advance.
FIRST_EXPLORED = 201
#: Between two lines about a run that trains, without a terminal.
SECONDS_BETWEEN_LINES = 30.0


def run_experiments(
    folders: Sequence[Path | str],
    passed_on: Sequence[str],
    flags: argparse.Namespace,
) -> tuple[Comparison, list[str]]:
    """Train the missing runs of these recipes and their controls, and compare all.

    Args:
        folders: of the recipes.
        passed_on: flags of `launch/pretrain.py` for all runs.
        flags: of `launch/compare.py`. With `all`, recipes that cannot run on this machine are listed in the report instead of refused.

    Returns:
        The comparison, and the names of the runs that did not finish, other than by diverging.

    Raises:
        UsageError: a recipe is damaged or cannot run here, or `runs_dir` cannot be used.
    """
    absent: list[Absent] = []

    def leave_out(recipe: Recipe, reason: CannotRun) -> None:
        if not flags.all:
            raise UsageError(f"{recipe.name}: {reason}") from None
        absent.append(Absent(recipe.name, str(reason)))
        print_once(f"{recipe.name} cannot run here: {reason}")

    found: list[tuple[Recipe, Testbed | None]] = []
    for recipe in map(open_recipe, folders):
        try:
            found += [(recipe, testbed) for testbed in _testbeds(recipe, passed_on, flags)]
        except CannotRun as reason:
            leave_out(recipe, reason)
    used = {testbed.name for _, testbed in found if testbed}
    if not flags.all and (unused := [name for name in flags.testbed if name not in used]):
        raise UsageError(f"--testbed {unused[0]}: none of the recipes has an experiment on it; leave it out")
    share_cores(flags, max((ranks_of(recipe, testbed, flags) for recipe, testbed in found), default=1))
    paired: list[PairedTrials] = []
    for recipe, testbed in found:
        try:
            paired.append(_paired_trials(recipe, testbed, passed_on, flags))
        except CannotRun as reason:
            leave_out(recipe, reason)
    untuned = [line for one in paired for line in _untuned(one, flags)]
    own = [f"note: {line}" for one in paired for line in one.own[0].config.notes if line not in one.control[0].config.notes]
    for line in (*own, *untuned):
        print_once(line)
    if not paired:
        raise UsageError(f"--all: no recipe can run here; {absent[0].recipe}: {absent[0].reason}")
    runs, failures = train_missing(flags, in_order(paired))
    experiments = []
    for one in paired:
        control, own_runs = ([runs[trial.name] for trial in trials if trial.name in runs] for trials in (one.control, one.own))
        if control and own_runs:
            experiments.append((one.recipe, one.testbed, control, own_runs))
        else:
            why = next(failures[trial.name] for trial in (*one.control, *one.own) if trial.name in failures)
            absent.append(Absent(one.recipe.name, f"{one.testbed.name}: {why}" if one.testbed else why))
    unfinished = [name for name in failures if name not in runs or runs[name].state == "unfinished"]
    compared = compare_experiments(experiments, absent, flags.force)
    return replace(compared, remarks=(*untuned, *compared.remarks)), unfinished


def _untuned(pair: PairedTrials, flags: argparse.Namespace) -> list[str]:
    """A line with the command that tunes both sides, if the recipe changes the optimization and no sweep chose its values here."""
    recipe, testbed, own, control = pair.recipe, pair.testbed, pair.own[0].config, pair.control[0].config
    here = testbed and recipe.experiments[testbed.name]
    if not (here.sweep and not here.tuned if here else recipe.needs_own_tuning):
        return []
    rest = without(sys.argv[1:], "--recipe", "--all", "--testbed", "--publish", "--lr", "--out")
    how = ["--tune", "--testbed", testbed.name] if testbed else ["--sweep", f"lr={own.lr / 2:g},{own.lr:g},{own.lr * 2:g}", "--extend"]
    folder = next((one for one in flags.recipe if Path(one).resolve().name == recipe.name), f"recipes/{recipe.name}")
    command = shlex.join(["python", "launch/compare.py", "--recipe", str(folder), *how, *rest])
    rates = f"{own.lr:g} ({own.origins.get('optimizer.params.lr', own.config_file)}), and that of its control, {control.lr:g}"
    return [f"{recipe.name} changes the optimization; its learning rate, {rates}, are not tuned here; to tune both: {command}"]


def testbed_named(name: str) -> Testbed:
    """`read_testbed`, but UsageError if the testbed is for another device."""
    testbed = read_testbed(name)
    if testbed.device != device_type():
        here = [one.name for one in read_testbeds(device_type())]
        raise UsageError(
            f"--testbed {name}: it is for {testbed.device}, and this machine has {device_type()}; give one of {', '.join(here)}"
        )
    return testbed


def check_corpus(testbed: Testbed | Ladder) -> None:
    """Raises CannotRun if the testbed's corpus is missing, or has another tokenizer than the testbed states."""
    manifest, command = Path(testbed.flags["data"]) / "manifest.json", corpus_command(testbed)
    options = read_json_object(manifest, f"make it again: {command}").get("options", {}) if manifest.exists() else {}
    if options.get("tokenizer") != testbed.corpus["tokenizer"]:
        found = f"has the tokenizer {options.get('tokenizer')}; move it away, and" if options else "does not exist;"
        raise CannotRun(f"the corpus of {testbed.name}, {manifest.parent}, {found} make it: {command}")


def _testbeds(recipe: Recipe, passed_on: Sequence[str], flags: argparse.Namespace) -> list[Testbed | None]:
    """The testbeds to compare a recipe on: those given, else all of its own for this device; [None] if flags give a setting."""
    if not flags.testbed and (flags.ranks or any(word.startswith("--") and word != "--save_every" for word in passed_on)):
        return [None]
    given = [testbed_named(name) for name in flags.testbed] or read_testbeds(device_type())
    testbeds: list[Testbed | None] = [testbed for testbed in given if testbed.name in recipe.experiments]
    if not testbeds:
        asked = ", ".join(flags.testbed) or f"a testbed for {device_type()}"
        own = f"its testbeds are {', '.join(recipe.experiments)}; " if recipe.experiments else ""
        raise CannotRun(f"it has no experiment on {asked}; {own}or give a setting, such as --steps 200")
    for testbed in testbeds:
        if testbed:
            check_corpus(testbed)
    return testbeds


def _paired_trials(recipe: Recipe, testbed: Testbed | None, passed_on: Sequence[str], flags: argparse.Namespace) -> PairedTrials:
    count = flags.seeds or (recipe.experiments[testbed.name].seeds if testbed else SEEDS)
    first = FIRST_EXPLORED if testbed and flags.seeds else 1
    ranks = ranks_of(recipe, testbed, flags)
    check_parallel(flags, ranks)
    timed = [claim for claim in recipe.experiments[testbed.name].claims if claim.measure == "step_time"] if testbed else []
    if flags.parallel and flags.publish and timed:
        raise UsageError(f"--parallel: recipes/{recipe.name} claims '{timed[0]}', which needs interleaved runs; leave out --parallel")
    return pair_trials(recipe, passed_on, range(first, first + count), ranks, testbed)


def ranks_of(recipe: Recipe | None, testbed: Testbed | None, flags: argparse.Namespace) -> int:
    """The ranks of each run: `--ranks`; else on a testbed those of the recipe; else one per GPU, or two on a CPU."""
    if flags.ranks:
        return int(flags.ranks)
    if testbed and recipe:
        return recipe.ranks
    return len(gpus()) if device_type() == "cuda" else CPU_RANKS


def check_parallel(flags: argparse.Namespace, ranks: int) -> None:
    """Raises CannotRun if `--parallel` has too few GPUs for runs of so many ranks."""
    if flags.parallel and ranks > 1 and device_type() == "cuda":
        raise CannotRun(f"its runs have {ranks} ranks (--ranks), and --parallel gives each run one GPU; leave out --parallel")


def share_cores(flags: argparse.Namespace, ranks: int) -> None:
    """With `--parallel`, give each rank an equal share of the cores. Call it first: the number of threads is part of a name."""
    if flags.parallel:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // (flags.parallel * ranks))))


def train_missing(
    flags: argparse.Namespace, batches: Sequence[Sequence[Trial]], labels: Mapping[str, str] | None = None, before: int = 0, total: int = 0
) -> tuple[dict[str, Run], dict[str, str]]:
    """Train the runs that have not ended: those of a batch interleaved, or with `--parallel`, several at the same time.

    labels: by name, what the line calls a run that has ended. before: the number of runs in earlier calls. total: in all calls, if known.

    Returns all runs that have begun, and the reasons for those that failed, by name. Raises UsageError as `Trial.check_folder` does.
    """
    runs_dir = Path(flags.runs_dir)
    every = {trial.name: trial for trials in batches for trial in trials}
    for name, trial in every.items():
        trial.check_folder(runs_dir / name)
    missing = [[trial for trial in trials if not has_ended(runs_dir / trial.name)] for trials in batches]
    if flags.parallel:
        missing = [[trial for trials in missing for trial in trials]]
    groups = [group for trials in missing if trials for group in interleaved_groups(trials, flags.parallel or flags.at_once)]
    failures: dict[str, str] = {}
    if groups:
        reused = len(every) - sum(map(len, groups))
        ended, total = before + reused, max(total, before + len(every))
        with _locked(runs_dir):
            failures = _train(flags, groups, {name: name for name in every} | {**(labels or {})}, reused, ended, total)
    return {name: read_run(runs_dir / name) for name in every if (runs_dir / name / "run.json").exists()}, failures


def _train(
    flags: argparse.Namespace, groups: Sequence[Sequence[Trial]], labels: dict[str, str], reused: int, there: int, total: int
) -> dict[str, str]:
    """Train the runs of each group; why runs failed, by name.

    there: the number of runs of `total` that had ended before. reused: of these, the number that this call would else train.
    """
    runs_dir, trials = Path(flags.runs_dir), [trial for group in groups for trial in group]
    together = f"at most {max(map(len, groups))} {'at the same time' if flags.parallel else 'interleaved'}, "
    together = f"{reused} reused, " * bool(reused) + together * (len(trials) > len(groups))
    print_once(f"training {len(trials)} run{'s' * (len(trials) > 1)}, {together}in {runs_dir}")
    failures: dict[str, str] = {}
    steps = {trial.name: trial.config.steps_to_make for trial in trials}
    made = {name: _steps_done(runs_dir / name) for name in steps}
    start, before, ended = time.monotonic(), sum(made.values()), there
    width = None if flags.quiet else bar_options()
    with tqdm(total=sum(steps.values()), initial=before, unit="step", disable=width is None, **(width or {})) as bar:
        lines: dict[str, tqdm[Any]] = {}  # on a terminal a line for each run that trains, below the bar
        due: dict[str, float] = {}  # when the line of a run is read from its log again

        def on_steps(name: str, number: int) -> None:
            made[name] += number
            bar.update(number)
            if flags.quiet or time.monotonic() < due.get(name, 0.0) or not (text := progress(read_log(runs_dir / name))):
                return
            due[name] = time.monotonic() + (1.0 if width else SECONDS_BETWEEN_LINES)
            if width:
                if name not in lines:
                    lines[name] = tqdm(bar_format="{desc}", leave=False, **width)
                lines[name].set_description_str(f"{labels[name]}: {text}")
            else:
                print_once(printable_line(f"{labels[name]}: {text}"))

        def on_end(name: str, code: int) -> None:
            nonlocal ended
            ended += 1
            bar.update(steps[name] - made[name])  # those since it last waited; a run that failed leaves none to make
            made[name] = steps[name]
            if name in lines:
                lines.pop(name).close()
            if code:
                failures[name] = error_of(runs_dir / f"{name}.out", code)
                print_once(printable_line(f"{name} failed: {failures[name]}"), sys.stderr)
            elif not flags.keep_checkpoints:
                shutil.rmtree(runs_dir / name / "checkpoints", ignore_errors=True)
            if not flags.quiet:
                how = "failed" if code else progress(read_log(runs_dir / name)).rpartition(", ")[0]
                there_now, whole = sum(made.values()), sum(steps.values()) * (total - there) / len(trials)
                step_seconds = (time.monotonic() - start) / max(1, there_now - before)
                left = tqdm.format_interval(step_seconds * max(0, whole - there_now))
                bar.write(printable_line(f"run {ended} of {total}: {labels[name]}: {how}; about {left} left"))

        try:
            for group in [trials] if flags.parallel else groups:
                scripts = {trial.name: (trial.config.ranks, script_of(trial, runs_dir)) for trial in group}
                run_interleaved(scripts, runs_dir, on_steps, on_end, flags.parallel)
        except SystemExit:
            for one in (*lines.values(), bar):
                one.close()
            print_once("stopped; the same command resumes the runs", sys.stderr)
            raise
    return failures


def script_of(trial: Trial, runs_dir: Path) -> list[str]:
    """`launch/pretrain.py` with the arguments of a run, which is resumed if it has a folder already."""
    resume = ["--resume"] if (runs_dir / trial.name).exists() else []
    return [str(ROOT / "launch/pretrain.py"), *trial.flags, "--runs_dir", str(runs_dir), "--run_name", trial.name, *resume]


def has_ended(run: Path) -> bool:
    """Whether the folder `run` holds a run that has trained on all its tokens, or has diverged."""
    return os.path.exists(run / "run.json") and read_run(run).state != "unfinished"


def _steps_done(run: Path) -> int:
    return int(max(read_run(run).columns["step"], default=0)) if os.path.exists(run / "run.json") else 0


@contextlib.contextmanager
def _locked(runs_dir: Path) -> Iterator[None]:
    """Hold the lock of `runs_dir`. Refuse a folder in which another command trains, or that cannot be written."""
    check_writable(runs_dir, "--runs_dir")
    runs_dir.mkdir(parents=True, exist_ok=True)
    with open(runs_dir / ".lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--runs_dir {runs_dir}: another launch/compare.py is training there; wait, or give another folder") from None
        yield


def error_of(output: Path, code: int) -> str:
    """The last error in a run's output, else its exit code."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ").replace(f"{ROOT}/", "") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else f"exit code {code}, see {output}"
