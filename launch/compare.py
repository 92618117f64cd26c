"""Compare runs as controlled experiments: existing runs, or recipes with their controls, which are trained first where they are missing.

    python launch/compare.py runs/whole_1 runs/dropping_1
    python launch/compare.py --recipe recipes/zero_2 --seeds 3 --preset nano --steps 400
    python launch/compare.py --recipe recipes/lamb --testbed nano-0.5M
    python launch/compare.py --recipe recipes/lamb --testbed nano-0.5M --tune
    python launch/compare.py --recipe recipes/muon --sweep lr=1e-3,2e-3,4e-3 --extend --data data/mine --preset nano
    python launch/compare.py --recipe recipes/muon --ladder

A recipe's claims are judged on its testbeds, with the planned seeds; at other settings the figures are shown without verdicts. `--tune`
sweeps a testbed's settings for control and recipe; `--sweep` sweeps the given flags at a setting of your own, with or without a recipe.
`--ladder` asks whether a gain holds as the model grows: it tunes and trains a recipe, or without one the control, at three sizes.

Writes `report.html` (a single file that works offline), `report.json` and `loss.png`. Control and recipe are trained with the same seeds.
Their steps are interleaved, so that a slow moment of the machine affects both alike; `--parallel` trains several runs at the same time
instead. Finished runs of the same settings and code are reused, interrupted runs are resumed.
Exit codes: 0 done, 1 failed, 2 a mistake in the command, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

# As in launch/pretrain.py: import from the checkout's root, not from this script's folder.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from data_pipeline.staging import write_atomically
from launch.config.flags import (
    AUTO,
    EVALUATION,
    LENGTH,
    MODEL,
    TECHNIQUE,
    Parser,
    add_flags,
    as_words,
    flags_of,
    given,
    open_recipe,
    whole_number,
)
from launch.errors import TrainingFailed, UsageError, print_once, printable_line, run_command
from launch.formats.files import check_writable, read_committed
from recipes.registry import LADDER, ROOT, TESTBEDS, recipe_names


def build_parser() -> Parser:
    """The flags of `launch/compare.py`."""
    parser = Parser(
        prog="python launch/compare.py",
        description="Compare runs as controlled experiments: paired seeds, confidence intervals, and a verdict for each claim of a recipe.",
        epilog="Example: python launch/compare.py --recipe recipes/zero_2 --seeds 3 --preset nano --steps 200",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="existing run folders; the first is the control")
    parser.add_argument(
        "--recipe", metavar="DIR", action="append", default=[], help="a recipe folder to compare with its control; repeatable"
    )
    parser.add_argument("--all", action="store_true", help="compare every recipe that this machine can run, and list what the others need")
    parser.add_argument(
        "--testbed",
        metavar="NAME",
        action="append",
        default=[],
        help="a testbed of recipes/testbeds: model, budget and tuned values; repeatable (all of the recipe's, or none if a flag below"
        " gives a setting)",
    )
    parser.add_argument(
        "--seeds",
        type=whole_number(1, 1000),
        help="number of seeds (the recipe's on a testbed, else 3); if given on a testbed, they start at 201, and nothing is judged",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="sweep the testbed's settings, such as the learning rate, for its control, or for a recipe and its control",
    )
    parser.add_argument(
        "--sweep",
        metavar="NAME=VALUE,...",
        action="append",
        default=[],
        help="train with each value of a flag of pretrain.py, or of a dotted key of the JSON, and choose the best; repeatable: one flag is"
        " varied after another; with --recipe, each recipe and its control are swept, and the bests compared; --seeds: of each trial (1)",
    )
    parser.add_argument("--grid", action="store_true", help="sweep all combinations of the values")
    parser.add_argument("--extend", action="store_true", help="add values to a sweep while the best one is the first or the last")
    parser.add_argument(
        "--ladder",
        nargs="?",
        const="all",
        metavar="RUNG",
        help="tune and train a recipe, or the control, on each rung of recipes/testbeds/ladder/plan.json up to RUNG (all)",
    )
    parser.add_argument("--deepspeed_config", metavar="FILE", help="the JSON of a --sweep without --recipe (ds_configs/zero0_bf16.json)")
    parser.add_argument("--out", metavar="DIR", help="folder of the report; an earlier report there is replaced (runs/reports/<name>)")
    parser.add_argument("--publish", action="store_true", help="store the runs in results.json of each recipe and update the pages")
    parser.add_argument(
        "--force",
        action="store_true",
        help="compare runs that differ in corpus, tokenizer, validation set or tokens; the report shows a warning",
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--ranks",
        type=whole_number(1, 1024),
        help="ranks per run (on a testbed: the recipe's number, else 1; otherwise the number of GPUs, or 2 on a CPU)",
    )
    training.add_argument(
        "--runs_dir", default="runs/trials", metavar="DIR", help="folder of the trained runs; finished ones are reused (runs/trials)"
    )
    training.add_argument("--at_once", type=whole_number(1, 100), help="maximum number of interleaved runs (as many as fit in memory)")
    training.add_argument(
        "--parallel",
        type=whole_number(1, 100),
        help="train this number of runs at the same time instead of interleaving them; on GPUs, each run uses one; times are then not"
        " judged or published",
    )
    training.add_argument("--save_every", type=whole_number(0), help="steps between checkpoints; 0: only when the run stops or ends (0)")
    training.add_argument("--keep_checkpoints", action="store_true", help="keep the last checkpoint of finished runs")
    add_flags(parser, MODEL, LENGTH, AUTO, EVALUATION)
    parser.add_argument("--set", **flags_of(TECHNIQUE)["set"])
    return parser


#: Flags that apply only to runs that this command trains.
TRAINING = {"testbed", "seeds", "publish", "ranks", "runs_dir", "at_once", "parallel", "keep_checkpoints"}
#: Flags that are passed on to `launch/pretrain.py` unchanged.
PASSED_ON = {action.dest for action in build_parser()._actions} - TRAINING
PASSED_ON -= {"help", "runs", "recipe", "all", "tune", "sweep", "grid", "extend", "ladder", "deepspeed_config", "out", "force", "quiet"}


def main() -> int:
    """Train the missing runs, compare, and write the report."""
    flags = build_parser().parse(sys.argv[1:])
    names = given(build_parser(), sys.argv[1:])
    _check_sources(flags, names)
    _check_out(flags.out)
    # Extreme values in a run overflow in numpy and matplotlib; the report shows what came of them.
    warnings.simplefilter("ignore", RuntimeWarning)
    warnings.simplefilter("ignore", UserWarning)
    # After parsing: torch, scipy and matplotlib take seconds.
    from launch.comparison import comparison, experiments, publish, report, runs

    passed_on = _passed_on(flags, names)
    if flags.publish:
        publish.check_checkout()
    if flags.ladder:
        return _ladder(flags)
    if flags.tune or flags.sweep:
        return _sweep(flags, passed_on)
    unfinished: list[str] = []
    if flags.runs:
        compared = comparison.compare([runs.read_run(run) for run in flags.runs], flags.force)
    else:
        folders = [ROOT / "recipes" / name for name in recipe_names()] if flags.all else flags.recipe
        compared, unfinished = experiments.run_experiments(folders, passed_on, flags)
    page = report.write_report(compared, _out(flags))
    for line in [*report.summary(compared), f"report: {page}"]:
        print_once(printable_line(line))
    if unfinished:
        raise TrainingFailed(f"not all runs finished: {', '.join(unfinished)}; the same command resumes them")
    if flags.publish:
        publish.publish(compared, flags.parallel)
        print_once("written: results.json of each recipe, and the pictures and pages")
    return 0


def _sweep(flags: argparse.Namespace, passed_on: list[str]) -> int:
    """`--sweep` and `--tune`."""
    from launch.comparison import publish, recipe_pages, report, sweep, tuning  # as above

    out = _out(flags)
    swept = (sweep.tune if flags.tune else sweep.sweep)(flags, passed_on)
    found, written = swept.as_json(), [out / "tuning.json", out / "best.sh"]
    tuning.write_tuning(found, written[0])
    script = swept.script(flags.runs_dir if "runs_dir" in given(build_parser(), sys.argv[1:]) else None)
    written[1].write_text(script, encoding="utf-8")
    if flags.publish:
        publish.check_runs("--publish", [*swept.runs.values()])
        written.append((Path(flags.recipe[0]).resolve() if flags.recipe else TESTBEDS / swept.name) / "tuning.json")
        tuning.write_tuning({**read_committed(written[-1]), **found}, written[-1])  # the sweeps on other testbeds stay
        recipe_pages.write_pages()
    lines = [*swept.table().text().splitlines(), *swept.lines()]
    if compared := swept.comparison():
        written.append(report.write_report(compared, out))
        lines += report.summary(compared)
    print_once("\n".join([*map(printable_line, lines), script, *(f"written: {printable_line(str(file))}" for file in written)]))
    return 0


def _ladder(flags: argparse.Namespace) -> int:
    """`--ladder`."""
    from launch.comparison import ladder, publish, recipe_pages  # as above

    recipe = open_recipe(flags.recipe[0]) if flags.recipe else None
    control = ladder.found_by(other := recipe and ladder.control_of(recipe))
    if recipe and not control:
        first = f"python launch/compare.py --ladder{f' --recipe recipes/{other.name}' if other else ''} --publish"
        raise UsageError(f"--ladder: the control of {recipe.name} is not published; first: {first}")
    found, runs = ladder.climb(recipe, control, flags.ladder, flags)
    files = [_out(flags) / ladder.FOUND]
    if flags.publish:
        publish.check_runs("--publish", runs)
        files.append((Path(flags.recipe[0]).resolve() if recipe else LADDER.parent) / ladder.FOUND)
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(found, indent=1, allow_nan=False) + "\n")
    lines = ladder.control_table(found).text().splitlines()
    if recipe:
        ladder.draw_ladder({recipe.name: (control, found)}, files[0].with_suffix(".png"))
        lines = [*ladder.table(control, found).text().splitlines(), ladder.whether_gain_holds(ladder.gains(control, found))]
    if flags.publish:
        recipe_pages.write_pages()
    print_once("\n".join([*lines, *(f"written: {printable_line(str(file))}" for file in files)]))
    return 0


def _out(flags: argparse.Namespace) -> Path:
    """The folder of the report: --out, or one named after what is compared."""
    names = [Path(folder).resolve().name for folder in flags.recipe or flags.runs] or flags.testbed or ["own"]
    name = "all" if flags.all else "+".join(names)[:60]
    kind = "-tuning" * flags.tune + "-sweep" * bool(flags.sweep) + "-ladder" * bool(flags.ladder)
    return Path(flags.out or f"runs/reports/{name}{kind}")


def _check_sources(flags: argparse.Namespace, names: set[str]) -> None:
    """Refuse flags that contradict each other."""
    sources = [word for word, value in (("run folders", flags.runs), ("--recipe", flags.recipe), ("--all", flags.all)) if value]
    if flags.sweep:
        others = ("runs", "all", "tune", "testbed", "publish", *(["deepspeed_config"] if flags.recipe else []))
        if extra := [name for name in others if getattr(flags, name)]:
            raise UsageError(f"--sweep trains at a setting of your own; leave out {'the run folders' if flags.runs else '--' + extra[0]}")
    elif flags.ladder:
        others = ("runs", "all", "tune", "testbed", "seeds", "grid", "extend", "deepspeed_config", "force")
        if extra := [*(name for name in others if getattr(flags, name)), *sorted(names & {*PASSED_ON, "ranks"} - {"save_every"})]:
            raise UsageError(
                f"--ladder: recipes/testbeds/ladder/plan.json states its runs; leave out --{extra[0].replace('overrides', 'set')}"
            )
        if len(flags.recipe) > 1:
            raise UsageError("--ladder takes at most one --recipe; leave out the others")
    elif only := [name for name in ("grid", "extend", "deepspeed_config") if getattr(flags, name) and not flags.tune]:
        raise UsageError(f"--{only[0]} applies to a sweep; give --sweep NAME=VALUE,..., or leave it out")
    elif flags.tune:
        if len(flags.testbed) != 1:
            raise UsageError("--tune needs exactly one --testbed NAME")
        if flags.runs or flags.all or len(flags.recipe) > 1:
            raise UsageError("--tune takes --testbed and at most one --recipe; leave out the others")
        if flags.seeds:
            raise UsageError("--seeds: --tune uses one seed, which no verdict uses; leave it out")
    elif len(sources) != 1:
        raise UsageError(f"give one of: run folders, --recipe DIR, --all{'; given are ' + ' and '.join(sources) if sources else ''}")
    if flags.publish and flags.seeds:
        raise UsageError("--publish --seeds: the recipe states the number of seeds; leave out --seeds")
    if flags.parallel and flags.at_once:
        raise UsageError("--at_once: the number of interleaved runs, and --parallel interleaves none; leave out one of the two")
    if flags.runs and (training := sorted(names & (PASSED_ON | TRAINING))):
        why = f"applies to runs that compare.py trains; leave it out, or replace {flags.runs[0]} by --recipe"
        raise UsageError(f"--{training[0].replace('overrides', 'set')} {why}")
    setting = sorted(names & {*PASSED_ON, "ranks"} - {"save_every"})  # which changes no number
    if setting and (flags.testbed or flags.publish):
        why = f"--testbed {flags.testbed[0]} sets it" if flags.testbed else "--publish is for the recipe's testbeds"
        raise UsageError(f"--{setting[0].replace('overrides', 'set')}: {why}; leave out one of the two")


def _check_out(out: str | None) -> None:
    """Refuse an --out that cannot be written, or holds anything but an earlier report, before anything is trained. Creates nothing."""
    if out is None:
        return
    check_writable(folder := Path(out), "--out")
    if folder.is_dir() and (there := {*os.listdir(folder)}) and not there & {"report.json", "best.sh", "ladder.json"}:
        raise UsageError(f"--out {out}: is not empty, and holds no report to replace; give another folder")


def _passed_on(flags: argparse.Namespace, names: set[str]) -> list[str]:
    """The given flags that are passed on to `launch/pretrain.py`."""
    values = {name: getattr(flags, name) for name in sorted(PASSED_ON & names - {"overrides"})}
    return [*as_words(values), *(word for change in flags.overrides for word in ("--set", change))]


if __name__ == "__main__":
    run_command(main)
