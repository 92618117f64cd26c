"""Compare runs as controlled experiments: existing runs, or recipes with their controls, which are trained first where they are missing.

    python launch/compare.py runs/dropping_1 runs/whole_1
    python launch/compare.py --recipe recipes/zero_2 --seeds 3 --preset nano --steps 400
    python launch/compare.py --all --seeds 5 --preset nano --steps 200

Writes `report.html` (a single file that works offline), `report.json` and `loss.png`. With `--recipe`, control and recipe are trained
with the same seeds and interleaved steps, so that a slow moment of the machine affects both alike. Finished runs are reused, interrupted
runs are resumed. Exit codes: 0 done, 1 failed, 2 a mistake in the command, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

# As in launch/pretrain.py: imports start at the repository, not at this script's folder.
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
from launch.errors import TrainingFailed, UsageError, one_line, print_once, run_command
from launch.formats.files import check_writable
from recipes.registry import ROOT, recipe_names

REPORT = ("report.html", "report.json", "loss.png")


def build_parser() -> Parser:
    """The flags of `launch/compare.py`."""
    parser = Parser(
        prog="python launch/compare.py",
        description="Compare runs as controlled experiments: paired seeds, confidence intervals, and a verdict for each claim of a recipe.",
        epilog="Example: python launch/compare.py --recipe recipes/zero_2 --seeds 3 --preset nano --steps 200",
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="existing run folders; the first is the control, unless a recipe's own control is among them"
    )
    parser.add_argument(
        "--recipe", metavar="DIR", action="append", default=[], help="a recipe folder to compare with its control; repeatable"
    )
    parser.add_argument("--all", action="store_true", help="compare every recipe that this machine can run, and list what the others need")
    parser.add_argument(
        "--seeds", type=whole_number(1, 1000), default=3, help="number of seeds: each configuration is run with seeds 1 to N (3)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the report (runs/reports/<name>, or the next free <name>-N)")
    parser.add_argument("--publish", action="store_true", help="save the results in recipes/results.json and update the recipes' pages")
    parser.add_argument(
        "--force",
        action="store_true",
        help="compare runs that differ in corpus, tokenizer, validation set or tokens; the report warns of it",
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    training = parser.add_argument_group("training")
    training.add_argument("--ranks", type=whole_number(1, 1024), help="ranks per run (the number of GPUs; 2 on a CPU)")
    training.add_argument(
        "--runs_dir", default="runs/trials", metavar="DIR", help="folder of the trained runs, where they are reused (runs/trials)"
    )
    training.add_argument("--at_once", type=whole_number(1, 100), help="maximum number of interleaved runs (as many as fit in memory)")
    training.add_argument("--save_every", type=whole_number(0), help="steps between checkpoints; 0: only when the run stops or ends (0)")
    training.add_argument("--keep_checkpoints", action="store_true", help="keep the last checkpoint of finished runs")
    add_model_flags(parser)
    add_value_flags(parser)
    add_set_flag(add_evaluation_flags(add_length_flags(parser)), "the JSONs of recipe and control")
    return parser


#: Flags that are passed on to `launch/pretrain.py` unchanged.
PASSED_ON = sorted({action.dest for action in build_parser()._actions} - {
    "help", "runs", "recipe", "all", "seeds", "out", "publish", "force", "quiet", "ranks", "runs_dir", "at_once", "keep_checkpoints"
})  # fmt: skip


def main() -> int:
    """Train the missing runs, compare, and write the report."""
    flags = build_parser().parse(sys.argv[1:])
    names = given(build_parser(), sys.argv[1:])
    sources = [word for word, value in (("run folders", flags.runs), ("--recipe", flags.recipe), ("--all", flags.all)) if value]
    if len(sources) != 1:
        raise UsageError(f"give one of: run folders, --recipe DIR, --all{'; given are ' + ' and '.join(sources) if sources else ''}")
    if flags.runs and (training := sorted(names & {*PASSED_ON, "seeds", "publish", "ranks", "runs_dir", "at_once", "keep_checkpoints"})):
        raise UsageError(f"--{training[0]} applies to runs that compare.py trains; leave it out, or replace {flags.runs[0]} by --recipe")
    _check_out(flags.out)
    _check_recipes(flags)
    # Extreme values in a run overflow in numpy and matplotlib; the report shows what came of them.
    warnings.simplefilter("ignore", RuntimeWarning)
    warnings.simplefilter("ignore", UserWarning)
    # After parsing: torch, scipy, matplotlib and plotly take seconds.
    from launch.comparison import comparison, experiments, page, publish, runs

    passed_on = _passed_on(flags, names)
    unfinished: list[str] = []
    if flags.runs:
        compared = comparison.compare([runs.read_run(run) for run in flags.runs], flags.force)
    else:
        if flags.publish:
            publish.check_checkout()
        folders = [ROOT / "recipes" / name for name in recipe_names()] if flags.all else flags.recipe
        compared, unfinished = experiments.run_experiments(folders, passed_on, flags)
    name = "all" if flags.all else "+".join(Path(folder).resolve().name for folder in flags.recipe or flags.runs)[:60]
    try:
        report = page.write_report(compared, page.new_folder(name) if flags.out is None else Path(flags.out))
    except OSError as reason:
        raise UsageError(f"{flags.out or page.REPORTS}: cannot be written ({reason.strerror}); give another --out") from None
    for line in page.summary(compared):
        print_once(one_line(line))
    print_once(one_line(f"report: {report}"))
    if unfinished:
        named = ", ".join(unfinished[:3]) + (f" and {len(unfinished) - 3} more" if len(unfinished) > 3 else "")
        raise TrainingFailed(f"not all runs finished: {named}; the same command resumes them")
    if flags.publish:
        publish.publish(compared, ["--seeds", str(flags.seeds), *passed_on])
        print_once("written: recipes/results.json, and the pictures and pages of the recipes")
    return 0


def _check_out(out: str | None) -> None:
    """Refuse an --out that holds a report or cannot be written, before anything is trained. Creates nothing."""
    if out is None:
        return
    check_writable(Path(out), "--out")
    if held := [name for name in REPORT if (Path(out) / name).exists()]:
        raise UsageError(f"--out {out}: already contains {held[0]}; give another folder, or remove the file")


def _check_recipes(flags: argparse.Namespace) -> None:
    """Refuse a recipe that is given twice, and --publish for results without a page or without noise."""
    if flags.publish and flags.seeds < 2:
        raise UsageError("--publish --seeds 1: one seed shows no noise, so no verdict is possible; give at least 2, better 5")
    folders = [Path(recipe).resolve() for recipe in flags.recipe]
    for recipe, folder in zip(flags.recipe, folders, strict=True):
        if folders.count(folder) > 1:
            raise UsageError(f"--recipe {recipe}: this recipe is given twice; leave one out")
        if flags.publish and folder.is_dir() and folder.parent != ROOT / "recipes":
            raise UsageError(f"--publish: {recipe} is not in {ROOT / 'recipes'}, so it has no page to update; leave out --publish")


def _passed_on(flags: argparse.Namespace, names: set[str]) -> list[str]:
    """The given flags that are passed on to `launch/pretrain.py`."""
    words: list[str] = []
    for name in (name for name in PASSED_ON if name in names):
        value = getattr(flags, name)
        if name == "overrides":
            words += [word for change in value for word in ("--set", change)]
        else:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


if __name__ == "__main__":
    run_command(main)
