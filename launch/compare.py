"""Compare runs as controlled experiments: the runs that exist, or recipes with their controls, trained first where they are missing.

    python launch/compare.py runs/dropping_1 runs/whole_1
    python launch/compare.py --recipe recipes/one_bit_adam --seeds 3 --preset nano --steps 400
    python launch/compare.py --all --seeds 5 --preset nano --steps 200

Writes `report.html` (one file, works offline), `report.json` and `loss.png`. With `--recipe`, control and recipe are trained with the same
seeds, side by side in turns of a few steps, so that a drifting machine hits both alike; what is there is not trained again, and what was
interrupted goes on where it was. Exit codes: 0 done, 1 failed, 2 the user's mistake, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# As in launch/pretrain.py: this script's folder is not where its modules are.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.config.flags import (
    Parser,
    add_evaluation_flags,
    add_length_flags,
    add_model_flags,
    add_set_flag,
    add_value_flags,
    given,
    whole_number,
)
from launch.config.hardware import device_type, gpus
from launch.errors import TrainingFailed, UsageError, one_line, run_command, say
from launch.training.folder import write_atomically
from recipes.registry import ROOT, read_recipe, recipe_names

if TYPE_CHECKING:
    from launch.comparison.trials import Experiment, Trial

PLAIN_SECONDS = 30.0  # between two plain lines of progress
REPORT = ("report.html", "report.json", "loss.png")
RANKS_ON_A_CPU = 2  # with one rank there is nothing to partition or to send


def build_parser() -> Parser:
    """The flags of `launch/compare.py`."""
    parser = Parser(
        prog="python launch/compare.py",
        description="Compare runs as controlled experiments: paired seeds, intervals, and a verdict for each claim of a recipe.",
        epilog="Example: python launch/compare.py --recipe recipes/zero_2 --seeds 3 --preset nano --steps 200",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run folders that exist; the first is the control, unless a recipe's own is here"
    )
    parser.add_argument(
        "--recipe", metavar="DIR", action="append", default=[], help="a recipe folder, against its control; may be repeated"
    )
    parser.add_argument("--all", action="store_true", help="every recipe that this machine can run; the rest with what they need")
    parser.add_argument("--seeds", type=whole_number(1, 1000), default=3, help="seeds 1 to N of each (3)")
    parser.add_argument("--out", metavar="DIR", help="folder of the report (runs/reports/<name>, or the next free <name>-N)")
    parser.add_argument(
        "--publish", action="store_true", help="keep what was found in recipes/results.json, from which the recipes' pages are written"
    )
    parser.add_argument(
        "--force", action="store_true", help="compare what differs in corpus, tokenizer, validation set or tokens; marked in red"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress; the verdicts and the report's path only")
    training = parser.add_argument_group("where runs are trained")
    training.add_argument("--ranks", type=whole_number(1, 1024), help=f"ranks of a run on this host (its GPUs; {RANKS_ON_A_CPU} on a CPU)")
    training.add_argument("--runs_dir", default="runs/trials", metavar="DIR", help="where runs are made, and found again (runs/trials)")
    training.add_argument(
        "--at_once", type=whole_number(1, 100), help="runs that take turns; 1 is one run after another (what fits in memory)"
    )
    natural = whole_number(0)
    training.add_argument("--save_every", type=natural, help="steps between checkpoints; 0: only when it is stopped, and at its end (0)")
    training.add_argument("--keep_checkpoints", action="store_true", help="leave the last checkpoint of a finished run where it is")
    add_model_flags(parser)
    add_value_flags(parser)
    add_set_flag(add_evaluation_flags(add_length_flags(parser)))
    return parser


#: Flags that say how runs are trained and go to `launch/pretrain.py` as they are.
PASSED_ON = sorted({action.dest for action in build_parser()._actions} - {
    "help", "runs", "recipe", "all", "seeds", "out", "publish", "force", "quiet", "ranks", "runs_dir", "at_once", "keep_checkpoints"
})  # fmt: skip


def main() -> int:
    """Train what is missing, compare, write the report."""
    flags = build_parser().parse(sys.argv[1:])
    names = given(build_parser(), sys.argv[1:])
    asked = [word for word, value in (("run folders", flags.runs), ("--recipe", flags.recipe), ("--all", flags.all)) if value]
    if len(asked) != 1:
        raise UsageError(f"give one of: run folders, --recipe DIR, --all{'; given are ' + ' and '.join(asked) if asked else ''}")
    if flags.runs and (training := sorted(names & {*PASSED_ON, "seeds", "publish", "ranks", "runs_dir", "at_once", "keep_checkpoints"})):
        raise UsageError(
            f"--{training[0]} says how runs are trained, and {flags.runs[0]} is one that exists; leave it out, or give --recipe"
        )
    _check_folder(flags.out)
    _check_recipes(flags)
    # Numbers of a run that are beyond all reason are in the report, and so is what came of them.
    warnings.simplefilter("ignore", RuntimeWarning)
    warnings.simplefilter("ignore", UserWarning)
    unended: list[str] = []
    if flags.runs:
        from launch.comparison.comparison import compare
        from launch.comparison.runs import read_run

        comparison = compare([read_run(Path(run)) for run in flags.runs], flags.force)
    else:
        if flags.publish:
            if flags.seeds < 2:
                raise UsageError("--publish --seeds 1: the noise shows with 2 seeds or more, and a page without says nothing; give 5")
            from launch.comparison.publish import check_checkout

            check_checkout()
        comparison, unended = _experiments(flags, _passed_on(flags, names))
    _write(comparison, flags)
    if unended:
        named = ", ".join(unended[:3]) + (f" and {len(unended) - 3} more" if len(unended) > 3 else "")
        raise TrainingFailed(f"not all runs came to their end, as the report says: {named}; the same command goes on with them")
    if flags.publish:
        from launch.comparison.publish import check_publishable, publish

        check_publishable(comparison)
        publish(comparison, ["--seeds", str(flags.seeds), *_passed_on(flags, names)])
        say("written: recipes/results.json, the recipes' pictures and pages")
    return 0


def _check_folder(out: str | None) -> None:
    """Refuse an --out in which something would be overwritten, or nothing can be written. Creates nothing."""
    if out is None:
        return
    if not out:
        raise UsageError("--out is empty; give a folder, such as runs/reports/first")
    try:
        above = Path(out)
        for name in REPORT:
            if (above / name).exists():
                held = "a report" if name.startswith("report") else f"a {name}"
                raise UsageError(f"--out {out}: holds {held} already; give another folder, or remove it yourself")
        while not above.exists():
            above = above.parent
    except OSError as reason:
        raise UsageError(f"--out {out}: cannot be written ({reason.strerror}); give another folder") from None
    if not above.is_dir():
        raise UsageError(f"--out {out}: {'' if above == Path(out) else f'{above} '}is a file; give a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: cannot be made, {above} is not writable; give another folder")


def _check_recipes(flags: argparse.Namespace) -> None:
    """Refuse a recipe that is given twice, and to publish one that has no page."""
    folders = [Path(recipe).resolve() for recipe in flags.recipe]
    for recipe, folder in zip(flags.recipe, folders, strict=True):
        if folders.count(folder) > 1:
            raise UsageError(f"--recipe {recipe}: this recipe is given twice; leave one out")
        if flags.publish and folder.is_dir() and folder.parent != ROOT / "recipes":
            raise UsageError(f"--publish: {recipe} is not in {ROOT / 'recipes'}, whose pages are written; leave out --publish")


def _make_folder(flags: argparse.Namespace) -> Path:
    """Make the folder of the report, now that there is one. Nothing is overwritten, also of a command that ran at the same time."""
    if flags.out is not None:
        _check_folder(flags.out)
        Path(flags.out).mkdir(parents=True, exist_ok=True)
        return Path(flags.out)
    name = "all" if flags.all else "+".join(Path(folder).resolve().name for folder in flags.recipe or flags.runs)[:60]
    out, number = Path("runs/reports") / name, 2
    while True:
        try:
            out.mkdir(parents=True)
            return out
        except FileExistsError:
            if not out.parent.is_dir():
                raise
            out, number = out.with_name(f"{name}-{number}"), number + 1


def _passed_on(flags: argparse.Namespace, names: set[str]) -> list[str]:
    """The user's flags for `launch/pretrain.py`."""
    words: list[str] = []
    for name in (name for name in PASSED_ON if name in names):
        value = getattr(flags, name)
        if name == "overrides":
            words += [word for change in value for word in ("--set", change)]
        else:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


# --- training what is missing --------------------------------------------------------------------------------------------------------


def _experiments(flags: argparse.Namespace, passed_on: list[str]) -> tuple[Any, list[str]]:
    """Plan the runs of all recipes, train those that are missing, and compare. Returns the comparison, and which runs failed.

    A run that diverged did not fail: it is evidence.
    """
    from launch.comparison.comparison import Absent, compare_pairs
    from launch.comparison.runs import Run, read_run
    from launch.comparison.trials import CannotRun, plan_experiment

    os.environ.setdefault("DS_ACCELERATOR", device_type())
    runs_dir = Path(flags.runs_dir)
    ranks = flags.ranks or (len(gpus()) if device_type() == "cuda" else RANKS_ON_A_CPU)
    experiments: list[Experiment] = []
    absent = []
    for folder in [ROOT / "recipes" / name for name in recipe_names()] if flags.all else flags.recipe:
        try:
            recipe = read_recipe(folder)
        except ValueError as reason:
            raise UsageError(str(reason)) from None
        try:
            experiments.append(plan_experiment(recipe, passed_on, range(1, flags.seeds + 1), ranks))
        except CannotRun as reason:
            if not flags.all:
                raise UsageError(f"{folder}: {reason}") from None
            absent.append(Absent(recipe.name, str(reason)))
            say(f"{recipe.name} cannot run here: {reason}")
    failures = _train_missing(flags, experiments, runs_dir)

    def runs_of(trials: Iterable[Trial]) -> list[Run]:
        return [read_run(runs_dir / trial.name) for trial in trials if (runs_dir / trial.name / "run.json").exists()]

    pairs = []
    for experiment in experiments:
        control, own = runs_of(experiment.control), runs_of(experiment.own)
        if control and own:
            pairs.append((experiment.recipe, control, own))
        else:
            trials = (*experiment.control, *experiment.own)
            reasons = [failures[trial.name] for trial in trials if trial.name in failures]
            absent.append(Absent(experiment.recipe.name, reasons[0] if reasons else "its runs left no run.json"))
    read = {run.name: run.state for _, control, own in pairs for run in (*control, *own)}
    return compare_pairs(pairs, absent, flags.force), [name for name in failures if read.get(name) not in ("finished", "failed")]


def _train_missing(flags: argparse.Namespace, experiments: Sequence[Experiment], runs_dir: Path) -> dict[str, str]:
    """Train the runs that are not finished. Returns why those that failed did, by name."""
    failures: dict[str, str] = {}
    if not any(_missing(experiments, runs_dir)):
        return failures
    with _alone_in(runs_dir):
        seeds = _missing(experiments, runs_dir)
        if any(seeds):
            _train(flags, seeds, runs_dir, failures)
    return failures


def _train(flags: argparse.Namespace, seeds: list[list[Trial]], runs_dir: Path, failures: dict[str, str]) -> None:
    """Train `seeds`, the missing runs of each seed; `failures` gets why those that failed did."""
    from launch.comparison.in_turns import Interrupted, train_in_turns
    from launch.comparison.trials import fitting_groups

    missing = [trial for trials in seeds for trial in trials]
    groups = [group for trials in seeds for group in fitting_groups(trials, flags.at_once)]
    say(f"{len(missing)} runs to train, in turns of at most {max(map(len, groups))}; into {runs_dir}")
    with _Progress(missing, runs_dir, flags.quiet) as progress:
        for group in groups:
            outputs = {trial.name: runs_dir / f"{trial.name}.out" for trial in group}
            before = {name: output.stat().st_size if output.exists() else 0 for name, output in outputs.items()}
            try:
                codes = train_in_turns(group, runs_dir, lambda trial: (runs_dir / trial.name).exists(), progress.update)
            except Interrupted as stopped:
                progress.close()
                say(f"{stopped}; the same command goes on from there", sys.stderr)
                raise SystemExit(128 + stopped.number) from None
            for trial in group:
                if codes[trial.name]:
                    failures[trial.name] = _reason(outputs[trial.name], before[trial.name], codes[trial.name])
                    say(one_line(f"{trial.name} failed: {failures[trial.name]}"), sys.stderr)
                elif not flags.keep_checkpoints:
                    shutil.rmtree(runs_dir / trial.name / "checkpoints", ignore_errors=True)


def _missing(experiments: Sequence[Experiment], runs_dir: Path) -> list[list[Trial]]:
    """The runs of each seed that are not finished."""
    from launch.comparison.trials import in_order

    return [[trial for trial in trials if not _is_finished(runs_dir / trial.name)] for trials in in_order(experiments)]


def _is_finished(run: Path) -> bool:
    from launch.comparison.runs import read_run

    return os.path.exists(run / "run.json") and read_run(run).finished


def _steps_made(run: Path) -> int:
    """The steps of a run that was begun, as far as its metrics go."""
    from launch.comparison.runs import read_run

    return int(max(read_run(run).columns["step"], default=0)) if os.path.exists(run / "run.json") else 0


@contextlib.contextmanager
def _alone_in(runs_dir: Path) -> Iterator[None]:
    """Refuse to train where another command does, whose finished runs would be begun anew, and where nothing can be written."""
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        lock = open(runs_dir / ".lock", "a", encoding="utf-8")  # noqa: SIM115 - held as long as runs are trained
    except OSError as reason:
        raise UsageError(f"--runs_dir {runs_dir}: cannot be written ({reason.strerror}); give another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--runs_dir {runs_dir}: another launch/compare.py trains there; wait for its end, or give another folder"
            ) from None
        yield


def _reason(output: Path, before: int, code: int) -> str:
    """Why a run ended with `code`: the error line of what it printed, after the `before` bytes of earlier attempts."""
    lines = output.read_bytes()[before:].decode("utf-8", "replace").splitlines()
    errors = [line.removeprefix("error: ").replace(f"{ROOT}/", "") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else f"exit code {code}, see {output}"


class _Progress:
    """A bar over the optimizer steps of all missing runs on a terminal, plain lines elsewhere."""

    def __init__(self, trials: Sequence[Trial], runs_dir: Path, quiet: bool):
        self._left = {trial.name: max(0, trial.config.steps_to_make - _steps_made(runs_dir / trial.name)) for trial in trials}
        self._total, self._start, self._last = sum(self._left.values()), time.monotonic(), time.monotonic()
        self._bar: Any = None
        self._quiet = quiet
        if not quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="step", dynamic_ncols=True)

    def update(self, trial: Trial, steps: int) -> None:
        steps = min(steps, self._left[trial.name])
        self._left[trial.name] -= steps
        if self._bar is not None:
            self._bar.set_postfix_str(trial.name, refresh=False)
            self._bar.update(steps)
        elif not self._quiet and time.monotonic() - self._last > PLAIN_SECONDS:
            self._last = time.monotonic()
            done = self._total - sum(self._left.values())
            left = f"{(self._last - self._start) * (self._total - done) / done / 60:.0f} minutes left" if done else "starting"
            say(f"{done:,} of {self._total:,} steps of all runs, now {trial.name}; {left}")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


# --- the report ----------------------------------------------------------------------------------------------------------------------


def _write(comparison: Any, flags: argparse.Namespace) -> None:
    from launch.comparison.page import draw_losses, write_page

    out = Path(flags.out or "runs/reports")
    try:
        out = _make_folder(flags)
        write_atomically(out / "report.json", json.dumps(comparison.as_json(), indent=1, allow_nan=False) + "\n")
        draw_losses(comparison, out)
        write_page(comparison, out)
    except OSError as reason:
        raise UsageError(f"{out}: cannot be written ({reason.strerror}); give another --out") from None
    for mark in comparison.marks:
        say(one_line(f"marked: {mark}"))
    for pair in comparison.pairs:
        for verdict in pair.verdicts:
            say(f"{pair.recipe.name}: {verdict.claim} {verdict.threshold:g} {verdict.outcome}: {verdict.reason}")
        if not pair.verdicts:
            say(one_line(f"{pair.side.name} against {pair.control.name}: {_in_short(pair)}"))
    for missing in comparison.absent:
        say(one_line(f"{missing.recipe} was not run: {missing.reason}"))
    say(one_line(f"the report is {out / 'report.html'}"))


def _in_short(pair: Any) -> str:
    """What was found of a pair of which nothing is claimed, on a line."""
    from recipes.overview import PANELS

    parts = []
    for name, title, scale, _ in PANELS:
        found = getattr(pair.figures.get(name), scale, None)
        if found is not None and found.mean is not None:
            between = "" if found.low is None else " ({} to {})".format(*(_shown(value, scale) for value in (found.low, found.high)))
            parts.append(f"{title} {_shown(found.mean, scale)}{between}")
    return ", ".join(parts) or "there is nothing that both have"


def _shown(value: float, scale: str) -> str:
    return f"{value:+.4f}" if scale == "difference" else f"x{value:.3f}"


if __name__ == "__main__":
    run_command(main)
