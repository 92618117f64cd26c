"""Saves the runs of a comparison in the results.json of each recipe, and updates the pages and pictures from them.

python launch/compare.py --recipe recipes/zero_1 --publish
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from data_pipeline.staging import write_atomically
from launch.comparison.comparison import Comparison, Pair
from launch.comparison.recipe_pages import RESULTS, protocol, write_pages
from launch.comparison.runs import Run, stored_run
from launch.comparison.trials import CODE
from launch.errors import UsageError
from launch.formats.files import read_committed
from launch.training.run_folder.provenance import machine_in_words, repository_commit
from launch.training.run_folder.run_json import commits_of
from recipes.registry import ROOT, read_recipe

#: The files that the numbers of a run depend on, as git pathspecs.
TRAINING = [*CODE, "ds_configs", "constraints.txt", ":(glob)recipes/*.py", ":(glob)recipes/*/*.py"]
TRAINING += [":(exclude)recipes/claims.py"]


def check_checkout() -> None:
    """Refuse to publish from a checkout whose results nobody could reproduce, before anything is trained."""
    commit = repository_commit()
    if commit is None or "+" in commit:
        what = "this checkout has uncommitted changes" if commit else "this is not a git checkout"
        raise UsageError(f"--publish: {what}, so its results could not be reproduced; commit first, or leave out --publish")
    if unknown := (_git("ls-files", "--others", "--exclude-standard", "--", *TRAINING) or "").splitlines():
        raise UsageError(f"--publish: {unknown[0]} is not in git, so results could not be reproduced; commit it first, or remove it")


def publish(comparison: Comparison, parallel: int | None = None) -> None:
    """Write results.json of each recipe, the pictures, and the pages.

    parallel: the value of --parallel, for the command that is published.

    Raises:
        UsageError: the results could not be reproduced, or are not those of the experiment that the recipe states.
    """
    if comparison.mismatches:
        raise UsageError(f"--publish: {comparison.mismatches[0]}; publish a comparison that needs no --force")
    entries = [(pair, _entry(pair, parallel)) for pair in comparison.pairs]
    for pair, entry in entries:
        assert pair.recipe is not None and pair.testbed is not None
        file = ROOT / "recipes" / pair.recipe.name / RESULTS
        write_atomically(file, _as_text(dict(sorted({**read_committed(file), pair.testbed.name: entry}.items()))))
    write_pages()


def _entry(pair: Pair, parallel: int | None) -> dict[str, Any]:
    """The entry of results.json for a pair. Raises UsageError if it may not be published."""
    recipe, testbed, experiment = pair.recipe, pair.testbed, pair.experiment
    if recipe is None or testbed is None or experiment is None:
        raise UsageError(f"--publish: {pair.title} is on none of the recipe's testbeds; leave out the flags that change the setting")
    where = f"--publish: {recipe.name} on {testbed.name}"
    runs = (*pair.control.runs, *pair.treatment.runs)
    check_runs(where, runs)
    if recipe != read_recipe(ROOT / "recipes" / recipe.name):
        raise UsageError(f"{where}: it is not a recipe of this checkout, so it has no page to update; leave out --publish")
    if pair.seeds != tuple(range(1, experiment.seeds + 1)) or len(runs) != 2 * len(pair.seeds):
        raise UsageError(f"{where}: {experiment.seeds} seeds are planned, and the pairs have seeds {pair.seeds}; give no --seeds")
    if unfinished := [run.name for run in runs if run.state == "unfinished"]:
        raise UsageError(f"{where}: {unfinished[0]} is unfinished; the same command without --publish resumes it")
    if pair.differ_in("versions"):
        raise UsageError(f"{where}: control and recipe used different package versions; train both in another --runs_dir")
    now = protocol(recipe.name, testbed.name)
    trained_at = {commit for run in pair.treatment.runs for commit in commits_of(run.description)}
    if later := [commit for commit in trained_at if protocol_at(commit, recipe.name, testbed.name) != now]:
        raise UsageError(
            f"{where}: its runs are of commit {later[0][:7]}, which does not contain the current claims and setting; commit them first,"
            " then train again in another --runs_dir"
        )
    at_once = f" --parallel {parallel}" if parallel else ""
    return {
        "command": f"python launch/compare.py --recipe recipes/{recipe.name} --testbed {testbed.name}{at_once}",
        "commit": pair.treatment.runs[0].description["commit"],
        "machine": " and ".join(dict.fromkeys(machine_in_words(run.description["machine"]) for run in runs)),
        "planned": now,
        "control": [stored_run(run) for run in pair.control.runs],
        "recipe": [stored_run(run) for run in pair.treatment.runs],
    }


def check_runs(where: str, runs: Sequence[Run]) -> None:
    """Refuse runs, or parts of runs before a resume, whose code was not committed or does not train like this checkout."""
    commits = sorted({str(commit) for run in runs for commit in commits_of(run.description)})
    if other := [commit for commit in commits if "+" in commit or commit == "None" or not same_code(commit)]:
        raise UsageError(
            f"{where}: it has runs of {other[0]}, whose code was not committed or trains differently from this checkout; train them again"
            " in another --runs_dir"
        )


def protocol_at(commit: str, recipe: str, testbed: str) -> dict[str, Any]:
    """`protocol` at a commit; {} if the files did not exist."""
    return protocol(recipe, testbed, lambda file: json.loads(_git("show", f"{commit}:{file}") or "{}"))


def same_code(commit: str) -> bool:
    """Whether the files that training depends on are the same at this commit as in the checkout's."""
    return _git("diff", "--quiet", commit, "HEAD", "--", *TRAINING) is not None


def _git(*words: str) -> str | None:
    """The output of git; None if it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _as_text(results: dict[str, Any]) -> str:
    """JSON with a line per run."""
    lines = []
    for name, entry in results.items():
        fields = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items() if key not in ("control", "recipe")]
        for side in ("control", "recipe"):
            runs = ",\n".join(f"   {json.dumps(run, allow_nan=False, separators=(',', ':'))}" for run in entry[side])
            fields.append(f"  {json.dumps(side)}: [\n{runs}\n  ]")
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"
