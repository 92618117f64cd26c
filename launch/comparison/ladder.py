"""The ladder: whether the gain of a recipe holds as the model grows at 20 tokens per parameter (Hoffmann et al., arXiv 2203.15556).

Each side climbs by itself. At each rung, a sweep around the best learning rate of the rung below finds its own best one, on a seed that
judges nothing, and runs with the seeds from 1 on give its loss there. `recipes/testbeds/ladder/plan.json` states sizes, rates and seeds;
what was found is in the `ladder.json` of the recipe's folder, and that of AdamW, the control of all, beside the plan. Rungs that are
published for the same plan are not trained again.

Compute saved (Wen et al., arXiv 2509.02046, call it speed-up): the FLOPs of the control at a rung, divided by those at which the recipe's
own line, its losses over its FLOPs with straight lines between in log-log, has the control's loss.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from launch.comparison.comparison import LOSS
from launch.comparison.experiments import check_corpus, check_parallel, share_cores
from launch.comparison.pictures import PALETTE, STYLE
from launch.comparison.runs import Run
from launch.comparison.sweep import SWEEP_SEED, Arm, train_arms
from launch.comparison.tables import Table, mean, signed, with_interval
from launch.comparison.trials import Trial, make_trial
from launch.comparison.tuning import CONTROL, origin_of
from launch.comparison.verdicts import Interval, paired_interval
from launch.config.flags import as_words
from launch.errors import TrainingFailed, UsageError, print_once
from launch.formats.files import read_committed
from recipes.registry import LADDER, ROOT, Flags, Recipe, Rung, read_ladder, read_recipes

#: The file of a side, in the folder of the recipe or of the ladder.
FOUND = "ladder.json"

Found = dict[str, dict[str, Any]]  # by rung


class Gain(NamedTuple):
    """A recipe at a rung.

    loss: its difference to the control, paired by seed. saved: the control's compute as a multiple of what the recipe needs for its loss,
    with the interval that follows from that of `loss`; None for one rung, or a line that does not fall. beyond: whether the control's loss
    is outside the recipe's line.
    """

    loss: Interval
    saved: Interval | None
    beyond: bool


def found_by(recipe: Recipe | None) -> Found:
    """What is published of a recipe, or of the control."""
    return read_committed((ROOT / "recipes" / recipe.name if recipe else LADDER.parent) / FOUND)


def control_of(recipe: Recipe) -> Recipe | None:
    """The recipe on the ladder whose JSON is the recipe's control; None for the control of all, which any other stands for."""
    return next((one for one in read_recipes() if one.config == recipe.control and one.ladder is not None), None)


def published_sides(recipe: Recipe) -> tuple[Found, Found] | None:
    """What is published of a recipe's control, and of the recipe; None if it is not on the ladder, or not yet."""
    found = found_by(recipe) if recipe.ladder is not None else {}
    return (found_by(control_of(recipe)), found) if found else None


def climb(recipe: Recipe | None, control: Found, top: str, flags: argparse.Namespace) -> tuple[Found, list[Run]]:
    """Train what is missing of a recipe, or of the control, up to the rung `top`; what was found, and the runs that were trained for it.

    control: what is published of its control.

    Raises:
        UsageError: the recipe is not on the ladder, or a run cannot be trained here; nothing is trained.
        TrainingFailed: a run did not finish other than by diverging, or every rate of a sweep diverged.
    """
    ladder, name = read_ladder(), recipe.name if recipe else Path(CONTROL).stem
    if recipe and recipe.ladder is None:
        raise UsageError(
            f"--ladder: recipes/{name} is not on the ladder; give its recipe.json a 'ladder' with its flags there, such as {{}}"
        )
    names = [rung.name for rung in ladder.rungs]
    top = names[-1] if top == "all" else top
    if top not in names:
        raise UsageError(f"--ladder {top}: no such rung; there are {', '.join(names)}")
    config, own, ranks = (recipe.config, recipe.ladder or {}, recipe.ranks) if recipe else (CONTROL, {}, 1)
    check_corpus(ladder)
    share_cores(flags, ranks)
    check_parallel(flags, ranks)
    published, found, rate = found_by(recipe), Found(), own.get("lr", ladder.lr)
    runs: list[Run] = []
    climbed = ladder.rungs[: names.index(top) + 1]
    corpora = {corpus for one in control.values() for corpus in one["corpora"]}
    first = make_trial(config, as_words({**ladder.flags, **climbed[0].flags, **own}), ranks)
    if corpora and first.described["corpus_fingerprint"] not in corpora:
        raise UsageError(f"{ladder.flags['data']}: is not the corpus of the published control; make it from the same packages")
    for number, rung in enumerate(climbed):
        planned = {"config": config, "flags": {**ladder.flags, **rung.flags, **own}, "lr": rate, "rates": rung.rates, "seeds": rung.seeds}
        if published.get(rung.name, {}).get("planned") == planned:
            found[rung.name] = published[rung.name]
        else:
            if not runs:
                _say_hours(name, climbed[number:], control, flags)
            found[rung.name], trained = _on_rung(f"{name} on rung {rung.name}", planned, ranks, flags)
            runs += trained
            if recipe is None and None in found[rung.name]["losses"]:
                raise TrainingFailed(f"{name} on rung {rung.name}: a run of the control diverged; lower its rates in {LADDER.name}")
        rate = found[rung.name]["lr"]
    return found, runs


def _say_hours(name: str, rungs: Sequence[Rung], control: Found, flags: argparse.Namespace) -> None:
    """By the control's runs on these rungs, of those where it has been."""
    if known := [(len(rung.rates) + rung.seeds, control[rung.name]) for rung in rungs if rung.name in control]:
        hours = sum(runs * one["seconds"] for runs, one in known) / (flags.parallel or 1) / 3600
        print_once(f"{name}: about {hours:.1f} hours, if a step takes as long as the control's on {known[-1][1]['machine']}")


def _on_rung(where: str, planned: dict[str, Any], ranks: int, flags: argparse.Namespace) -> tuple[dict[str, Any], list[Run]]:
    """Sweep the rate, then train with the best one."""

    def trials(point: Flags, seeds: Sequence[int]) -> list[Trial]:
        words = as_words({**planned["flags"], **point})
        return [make_trial(planned["config"], [*words, "--seed", str(seed)], ranks) for seed in seeds]

    rates: list[int | float | str] = [float(f"{planned['lr'] * factor:.3g}") for factor in planned["rates"]]
    arm = Arm(where, {"lr": rates}, lambda point: trials(point, [SWEEP_SEED]), extends=True)
    tokens = trials(arm.start, [SWEEP_SEED])[0].config.total_tokens
    print_once(
        f"{where}: {len(rates)} rates around {planned['lr']:g}, then {planned['seeds']} seeds at the best, of {tokens:,} tokens each"
    )
    swept = train_arms([arm], flags)
    if arm.chosen is None:
        raise TrainingFailed(f"{where}: every run diverged; lower its first learning rate, {planned['lr']:g}")
    best = Arm(where, {"lr": [arm.chosen["lr"]]}, lambda point: trials(point, range(1, planned["seeds"] + 1)))
    runs = train_arms([best], flags)
    measures = [runs[one.name].measures for one in best.trials(arm.chosen)]
    losses = [one[LOSS] if math.isfinite(one[LOSS]) else None for one in measures]
    means = {name: float(np.mean([one[name] for one in measures])) for name in ("flops", "seconds")}
    found = {"planned": planned, **origin_of(runs.values()), **arm.chosen, "grid": arm.grid, "losses": losses, **means}
    return found, [*swept.values(), *runs.values()]


# --- what was gained ------------------------------------------------------------------------------------------------------------------


def line_of(found: Found) -> list[tuple[float, float]]:
    """The FLOPs and the mean final loss of each rung, without those where a run diverged."""
    return [(one["flops"], float(np.mean(one["losses"]))) for one in found.values() if None not in one["losses"]]


def compute_for(loss: float, line: Sequence[tuple[float, float]]) -> float:
    """The FLOPs at which a line of (FLOPs, loss), straight between its points in log-log and beyond them, has this loss."""
    flops, losses = np.log(np.array(line).T)
    at = int(np.clip(np.searchsorted(-losses, -math.log(loss)), 1, len(line) - 1))  # losses fall
    slope = (flops[at] - flops[at - 1]) / (losses[at] - losses[at - 1])
    return math.exp(flops[at] + slope * (math.log(loss) - losses[at]))


def gains(control: Found, own: Found) -> dict[str, Gain]:
    """The gain at each rung that both sides have reached without a diverged run."""
    line, found = line_of(own), {}
    falls = len(line) > 1 and all(one[1] > other[1] for one, other in itertools.pairwise(line))
    for rung in [name for name in own if None not in (*own[name]["losses"], *control.get(name, {"losses": [None]})["losses"])]:
        gap = paired_interval(control[rung]["losses"], own[rung]["losses"])
        assert gap is not None, "both have the planned seeds"
        own_loss, flops = float(np.mean(own[rung]["losses"])), control[rung]["flops"]
        # A gap is that of the recipe's loss to the control's, which the recipe's line reaches at less compute if the gap is below 0.
        saved = [None if one is None or not falls else flops / compute_for(own_loss - one, line) for one in (gap.mean, gap.high, gap.low)]
        beyond = not line[-1][1] <= own_loss - gap.mean <= line[0][1]
        found[rung] = Gain(gap, saved[0] and Interval(saved[0], *saved[1:]), beyond)
    return found


def control_table(control: Found) -> Table:
    """A row for each rung of the control: its best rate, its loss, and how far that is above the line from the first to the last rung."""
    rows = []
    for rung, one in control.items():
        first, last = np.log(np.array(line_of(control)))[[0, -1]]
        slope = (last[1] - first[1]) / ((last[0] - first[0]) or 1.0)
        loss = float(np.mean(one["losses"]))
        above = loss - math.exp(first[1] + slope * (math.log(one["flops"]) - first[0]))
        rows.append([rung, f"{one['flops']:.1e}", f"{one['lr']:g}", mean(LOSS, one["losses"]), signed(above)])
    return Table("Control", ["rung", "FLOPs", "learning rate", "final loss (nats)", "above the line from first to last"], rows)


def table(control: Found, own: Found) -> Table:
    """A row for each rung."""
    rows = []
    for rung, gain in gains(control, own).items():
        saved = with_interval(gain.saved, lambda factor: f"{factor:.2f}×") + " (beyond its line)" * gain.beyond
        rates = f"{own[rung]['lr']:g} ({control[rung]['lr']:g})"
        rows.append([rung, f"{control[rung]['flops']:.1e}", with_interval(gain.loss, signed), saved, rates])
    return Table("Ladder", ["rung", "FLOPs of the control", "loss − control's", "compute saved", "learning rate (control's)"], rows)


def whether_gain_holds(found: Mapping[str, Gain]) -> str:
    """Whether the gain in loss at the largest rung is at least half of that at the smallest."""
    if len(found) < 2:
        return "One rung does not show whether it grows or fades with scale."
    (first, small), *_, (last, large) = found.items()
    if small.loss.mean >= 0:
        return f"There is no gain at {first} ({signed(small.loss.mean)} nats)."
    holds = large.loss.mean <= small.loss.mean / 2
    return f"The gain {'holds' if holds else 'fades'}: {signed(large.loss.mean)} nats at {last}, {signed(small.loss.mean)} at {first}."


def draw_ladder(sides: Mapping[str, tuple[Found, Found]], file: Path) -> None:
    """Draw compute saved over compute, a line for each recipe.

    sides: by recipe, what its control and it have reached. Hollow points are beyond the recipe's line. Bands are 95% intervals.
    """
    with rc_context(STYLE):
        picture = Figure(figsize=(7.2, 3.8), dpi=120, layout="constrained")
        axes = picture.subplots()
        axes.axhline(1, color=PALETTE[0], linewidth=1.2)
        for color, (name, (control, own)) in zip([*PALETTE[1:], *PALETTE[1:]], sides.items(), strict=False):
            found = {rung: gain for rung, gain in gains(control, own).items() if gain.saved}
            x = [control[rung]["flops"] for rung in found]
            every = [gain.saved for gain in found.values() if gain.saved]
            axes.plot(x, [one.mean for one in every], color=color, linewidth=1.8, label=name)
            axes.fill_between(x, [one.low or one.mean for one in every], [one.high or one.mean for one in every], color=color, alpha=0.15)
            for at, one, gain in zip(x, every, found.values(), strict=True):
                axes.plot(at, one.mean, "o", color=color, markerfacecolor="white" if gain.beyond else color)
        rungs = {one["flops"]: rung for control, _ in sides.values() for rung, one in control.items()}
        axes.set(xscale="log", xlabel="FLOPs of the control's runs", ylabel="compute saved (1: the control)")
        axes.set_xticks([*rungs], [f"{rung}\n{flops:.1e}" for flops, rung in rungs.items()])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=9, frameon=False)
        picture.savefig(file, metadata={"Software": None})
