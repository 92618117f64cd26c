"""Saves the results of a comparison in recipes/results.json, with each recipe's picture, and updates the recipes' pages from them.

python launch/compare.py --all --seeds 5 --preset nano --steps 200 --publish
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

import numpy as np

from launch.comparison.comparison import Comparison, Figure, Pair
from launch.comparison.page import draw_losses
from launch.errors import UsageError
from launch.formats.files import write_atomically
from launch.training.provenance import machine, repository_commit
from recipes.pages import FIGURES, RESULTS, read_results, write_pages
from recipes.registry import ROOT, recipe_names


def check_checkout() -> None:
    """Refuse to publish from a checkout whose results nobody could reproduce, before anything is trained."""
    commit = repository_commit()
    if commit is None or "+" in commit:
        what = "this checkout has uncommitted changes" if commit else "this is not a git checkout"
        raise UsageError(f"--publish: {what}, so its results could not be reproduced; commit first, or leave out --publish")


def _check_publishable(comparison: Comparison) -> None:
    """Refuse runs of uncommitted changes or of several commits, and comparisons that needed --force."""
    if comparison.mismatches:
        raise UsageError(f"--publish: {comparison.mismatches[0]}; publish a comparison that needs no --force")
    for pair in comparison.pairs:
        commits = {str(run.description.get("commit")) for side in (pair.control, pair.side) for run in side.runs}
        if len(commits) > 1 or "+" in next(iter(commits)) or "None" in commits:
            raise UsageError(
                f"--publish: the runs of {pair.side.name} are of {' and '.join(sorted(commits))}; train them again on one commit, in"
                " another --runs_dir"
            )


def publish(comparison: Comparison, flags: Sequence[str]) -> None:
    """Write recipes/results.json, the pictures, and the pages.

    Args:
        flags: of `launch/compare.py`: how the runs were trained, and the number of seeds.

    Raises:
        UsageError: the results could not be reproduced.
    """
    _check_publishable(comparison)
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
        "in_turns": pair.interleaved,
        "ranks": description["ranks"],
        "tokens": description["total_tokens"],
        "lr": description["lr"],
        "warmup_steps": description["warmup_steps"],
        "seeds": list(pair.seeds),
        "figures": {name: _figure(pair.figures[name]) for name, *_ in FIGURES if name in pair.figures},
        "claims": [asdict(verdict) for verdict in pair.verdicts],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    """The means of both sides, and `[mean, low, high]` of the difference and of the ratio."""
    sides = {"control": figure.control, "other": figure.other}
    means = {name: float(np.mean(list(values.values()))) if values else None for name, values in sides.items()}
    intervals = {name: found and list(astuple(found)) for name, found in (("difference", figure.difference), ("ratio", figure.ratio))}
    return {**means, **intervals}


def _machine(found: dict[str, Any]) -> str:
    gpus = found.get("gpus", [])
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{found['processor']}, {found['cores']} cores"
