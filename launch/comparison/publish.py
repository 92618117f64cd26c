"""Keeps what a comparison found: recipes/results.json and each recipe's picture, from which the pages are written.

python launch/compare.py --all --seeds 5 --preset nano --steps 200 --publish
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from launch.comparison.comparison import Comparison, Figure, Pair, Spread
from launch.comparison.page import draw_losses
from launch.errors import UsageError
from launch.formats.files import write_atomically
from launch.training.provenance import machine, repository_commit
from recipes.pages import FIGURES, RESULTS, read_results, write_pages
from recipes.registry import ROOT, recipe_names


def check_checkout() -> None:
    """Refuse, before anything is trained, what `check_publishable` would refuse of every run."""
    commit = repository_commit()
    if commit is None or "+" in commit:
        what = "this checkout has changes that no commit holds" if commit else "this is no checkout of a commit"
        raise UsageError(f"--publish: {what}, and its figures could not be had again; commit first, or leave out --publish")


def check_publishable(comparison: Comparison) -> None:
    """Refuse what would put into the pages a figure that cannot be had again.

    Raises:
        UsageError: runs of changes that no commit holds, runs of several commits, or a comparison that is none.
    """
    if comparison.marks:
        raise UsageError(f"--publish: {comparison.marks[0]}; publish a comparison that needs no --force")
    for pair in comparison.pairs:
        commits = {str(run.description.get("commit")) for side in (pair.control, pair.side) for run in side.runs}
        if len(commits) > 1 or "+" in next(iter(commits)) or "None" in commits:
            raise UsageError(
                f"--publish: the runs of {pair.side.name} are of {' and '.join(sorted(commits))}; train them anew on one commit, in another"
                " --runs_dir"
            )


def publish(comparison: Comparison, flags: Sequence[str]) -> None:
    """Write recipes/results.json, the pictures, and the pages.

    Args:
        flags: how the runs were trained, and with how many seeds, as `launch/compare.py` was told.
    """
    results = {name: found for name, found in read_results().items() if name in recipe_names()}
    for pair in comparison.pairs:
        if pair.recipe is not None:
            results[pair.recipe.name] = _entry(pair, flags)
            draw_losses(replace(comparison, sides=(pair.control, pair.side), pairs=(pair,)), ROOT / "recipes" / pair.recipe.name)
    for absent in comparison.absent:
        results[absent.recipe] = {"absent": absent.reason, "machine": _machine(machine())}
    write_atomically(RESULTS, json.dumps(dict(sorted(results.items())), indent=1, allow_nan=False) + "\n")
    write_pages(write_atomically)


def _entry(pair: Pair, flags: Sequence[str]) -> dict[str, Any]:
    assert pair.recipe is not None
    description = pair.control.runs[0].description
    return {
        "command": " ".join(["python launch/compare.py --recipe", f"recipes/{pair.recipe.name}", *flags]),
        "commit": description["commit"][:7],
        "machine": _machine(description["machine"]),
        "in_turns": pair.in_turns,
        "ranks": description["ranks"],
        "tokens": description["total_tokens"],
        "lr": description["lr"],
        "warmup_steps": description["warmup_steps"],
        "seeds": list(pair.seeds),
        "figures": {name: _figure(pair.figures[name]) for name, *_ in FIGURES if name in pair.figures},
        "claims": [asdict(verdict) for verdict in pair.verdicts],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    """Means of both sides; of the pairs `[mean, low, high]` of the difference and of the ratio."""

    def compared(spread: Spread | None) -> list[float | None] | None:
        return None if spread is None else [spread.mean, spread.low, spread.high]

    means = {"control": figure.control.mean, "other": figure.other.mean}
    return {**means, "difference": compared(figure.difference), "ratio": compared(figure.ratio)}


def _machine(found: dict[str, Any]) -> str:
    gpus = found.get("gpus", [])
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{found['processor']}, {found['cores']} cores"
