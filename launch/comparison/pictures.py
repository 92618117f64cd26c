"""Pictures of comparisons: the curves of control and recipe, and forest plots of the differences with their 95% intervals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from scipy import stats
from scipy.ndimage import uniform_filter1d

from launch.comparison.comparison import LOSS, Comparison, Pair, sequences_evaluated
from launch.comparison.runs import Column, Run
from launch.comparison.tables import LOSS_COLUMN, TIME_COLUMN, estimate, final_losses, mean, signed
from launch.comparison.verdicts import SIGNS
from launch.errors import printable_line
from recipes.claims import Claim

#: Colours of the sides, grey for the control; all have a contrast of 3:1 with white.
PALETTE = ("#808890", "#2f80cf", "#d9601a", "#149071", "#b065ab", "#a87b12", "#d2477f", "#5b73d8")
#: In nats per token.
LOSSES = {"val_loss": "validation loss", "loss": "training loss"}
#: Colours in forest plots by outcome; None for a figure without a claim.
COLORS = {"holds": "#1a7f45", "fails": "#c0362c", "inconclusive": "#a87b12", None: "#5b6b7b"}
#: The measure of claims in each panel of a forest plot -> the column of the figures, its title, and the range that is always in view.
PANELS = {
    "loss": (LOSS_COLUMN, "final validation loss − control's (nats)", (-0.02, 0.02)),
    "step_time": (TIME_COLUMN, TIME_COLUMN, (0.8, 1.25)),
}

Curve = tuple[Column, Column]
STYLE: Any = {"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}  # a name may hold dollars


# --- curves ---------------------------------------------------------------------------------------------------------------------------


def draw_losses(comparison: Comparison, file: Path | BinaryIO, axis: str = "tokens") -> None:
    """Draw the validation loss over tokens or seconds, or the training loss without evaluations after step 0.

    Each pair is a row: the losses, and the recipe's difference to its control with the same seed. Without pairs there is one side.
    Thin lines are runs, thick lines the mean over seeds, the band its 95% interval.
    """
    evaluated = any(np.isfinite(run.columns["val_loss"][run.columns["step"] > 0]).any() for side in comparison.sides for run in side.runs)
    metric = "val_loss" if evaluated else "loss"
    pairs = comparison.pairs
    with rc_context(STYLE):
        picture = Figure(figsize=(12.0 if pairs else 8.0, 1.0 + 4.0 * (len(pairs) or 1)), dpi=120, layout="constrained")
        for number, panels in enumerate(picture.subplots(len(pairs) or 1, 2 if pairs else 1, squeeze=False)):
            pair = pairs[number] if pairs else None
            sides = (pair.control, pair.treatment) if pair else comparison.sides
            for side, color in zip(sides, PALETTE, strict=False):
                losses = final_losses(side)
                what = "whole split" if side.runs[0].description.get("whole_eval") else "final loss"
                final = f": {what} {mean(LOSS, losses)}, {len(losses)} seed{'s' * (len(losses) > 1)}" if losses else ""
                _draw_band(panels[0], [_curve(run, metric, axis) for run in side.runs], color, printable_line(side.name) + final)
            _show(panels[0], after=0.1, title=f"on {pair.testbed.name}; " if pair and pair.testbed else "")
            what = LOSSES[metric]
            if metric == "val_loss" and sides and (first := sides[-1].runs[0].description).get("whole_eval"):
                what += f" on {first['eval_batches']} batches"
            if pair and (metric == "loss" or len(sequences_evaluated(*sides)) == 1):
                panels[1].axhline(0, color=PALETTE[0], linewidth=1)
                _draw_band(panels[1], [_gap(*(_curve(run, metric, axis) for run in runs)) for runs in pair.runs], PALETTE[1])
                _show(panels[1], after=0.25, also=0.0)
            for axes, label in zip(panels, (f"{what} (nats)", f"{what} − control's (nats)"), strict=False):
                axes.set(xlabel=axis, ylabel=label)
                axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
                axes.grid(alpha=0.25)
            if panels[0].get_legend_handles_labels()[0]:
                panels[0].legend(fontsize=9, frameon=False)
            if not panels[0].lines:
                panels[0].text(0.5, 0.5, "no loss after step 0 yet", ha="center")
                panels[0].set_axis_off()
        picture.suptitle(
            f"{LOSSES[metric]} over {axis}; thin: each seed, thick: mean, band: 95% interval; ±: standard deviation", fontsize=11
        )
        picture.savefig(file, metadata={"Software": None})


def _curve(run: Run, metric: str, axis: str) -> Curve:
    """The places on an axis and the values of the rows that have both."""
    x, y = run.columns[axis], run.columns.get(metric, np.full(len(run.columns[axis]), np.nan))
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], y[known]


def together(curves: Sequence[Curve]) -> tuple[Column, Column]:
    """The places of the sparsest curve that all curves reach, and the values of each there: (places,), (curves, places).

    The sparsest, because a line between two evaluations lies above a curve that falls fast.
    """
    x = min((one for one, _ in curves), key=len)
    x = x[(x >= max(one[0] for one, _ in curves)) & (x <= min(one[-1] for one, _ in curves))]
    return x, np.array([np.interp(x, *curve) for curve in curves])


def _gap(control: Curve, own: Curve) -> Curve:
    """The difference of two curves; empty if one is."""
    if not len(control[0]) or not len(own[0]):
        return np.zeros(0), np.zeros(0)
    x, (before, after) = together([control, own])
    return x, after - before


def _draw_band(axes: Any, curves: Sequence[Curve], color: str, label: str = "") -> None:
    """Each curve, their mean, smoothed over 1% of its points, and from three curves on its 95% interval: that of two tells too little."""
    curves = [curve for curve in curves if len(curve[0])]
    for curve in curves:
        axes.plot(*curve, color=color, linewidth=0.6, alpha=0.5)
    x, values = together(curves) if curves else (np.zeros(0), np.zeros((0, 0)))
    if not len(x):
        return
    smooth = partial(uniform_filter1d, size=2 * (len(x) // 200) + 1, mode="nearest")
    middle = smooth(values.mean(axis=0))
    if len(values) > 2:
        half = stats.t.ppf(0.975, len(values) - 1) * smooth(stats.sem(values))
        axes.fill_between(x, middle - half, middle + half, color=color, alpha=0.15, linewidth=0)
    axes.plot(x, middle, color=color, linewidth=1.8, label=label or None, marker="o" if len(x) == 1 else None, markersize=4)


def _show(axes: Any, after: float, also: float | None = None, title: str = "") -> None:
    """Let only what comes `after` a share of the run set the scale: before, losses fall fast. also: a value that stays in view."""
    points = np.concatenate([line.get_xydata() for line in axes.lines] or [np.zeros((0, 2))])  # (points, 2)
    late = points[points[:, 0] >= after * points[:, 0].max(initial=0.0), 1]
    late = np.append(late, [] if also is None else also)
    if len(late) > 1:
        margin = 0.08 * float(np.ptp(late)) or 0.01
        axes.set_ylim(late.min() - margin, late.max() + margin)
        title += f"scaled to the last {1 - after:.0%} of the run"
    axes.set_title(title.removesuffix("; "), fontsize=9)


# --- forest plots ---------------------------------------------------------------------------------------------------------------------


def draw_forest(rows: Sequence[tuple[str, str, Pair]], file: Path | BinaryIO) -> None:
    """Draw the intervals of pairs, a column per panel. The shaded region is where the claim holds.

    rows: (group, label, pair); the rows of a group are adjacent, under its heading.
    """
    shown = [name for name, (column, *_) in PANELS.items() if any(estimate(pair.published_figures, column) for *_, pair in rows)] or [
        "loss"
    ]
    places: list[float] = []
    headings: list[tuple[float, str]] = []
    y = 0.0
    for group, members in groupby(rows, key=lambda row: row[0]):
        if group:
            headings.append((y, group))
        else:
            y -= 1
        places += [y := y + 1 for _ in members]
        y += 1.4
    with rc_context({"text.parse_math": False, "font.size": 9}):
        picture = Figure(figsize=(max(10.0, 2.5 + 3.5 * len(shown)), 1.0 + 0.235 * y), dpi=120, layout="constrained")
        for place, (axes, name) in enumerate(zip(picture.subplots(1, len(shown), squeeze=False)[0], shown, strict=True)):
            _draw_panel(axes, name, [pair for *_, pair in rows], places)
            axes.set_ylim(y - 0.6, -0.7)
            axes.set_title(PANELS[name][1], fontsize=9)
            axes.set_yticks(places if place == 0 else [], [label for _, label, _ in rows] if place == 0 else [])
            axes.tick_params(left=False, labelsize=8.5)
            axes.spines[["left", "right", "top"]].set_visible(False)
            for at, group in headings if place == 0 else ():
                axes.text(0, at, group, fontweight="bold", va="center", ha="right", transform=axes.get_yaxis_transform())
        words = "dots: mean over seeds, lines: 95% interval"
        if any(pair.verdicts for *_, pair in rows):
            words += "\nshaded, and in parentheses: where the claim holds; ✓ the interval is inside, ✗ outside, ? neither"
        if len(shown) > 1 and not all(estimate(pair.published_figures, TIME_COLUMN) for *_, pair in rows):
            words += "\nrows without times: the two runs of a seed were not interleaved"
        picture.supxlabel(words, fontsize=8.5)
        picture.savefig(file, metadata={"Software": None})


def _draw_panel(axes: Any, name: str, pairs: Sequence[Pair], places: Sequence[float]) -> None:
    column, _, in_view = PANELS[name]
    found = [estimate(pair.published_figures, column) for pair in pairs]
    judged = [next((one for one in pair.verdicts if one.claim.measure == name), None) for pair in pairs]
    values = [value for one in found if one for value in (one.mean, one.low, one.high) if value is not None]
    values += [value for one in judged if one for value in one.claim.bounds if 0 < abs(value) < np.inf]
    low, high = min([*in_view, *values]), max([*in_view, *values])
    view = axes.set_xlim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    axes.grid(axis="x", color="#e4e7ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", nbins=5)
    axes.axvline(0.0 if name == "loss" else 1.0, color="#808890", linewidth=1.0, zorder=1)
    for one, verdict, y in zip(found, judged, places, strict=True):
        if one is None:
            continue
        color = COLORS[verdict.outcome if verdict else None]
        if verdict:
            low, high = np.clip(verdict.claim.bounds, *view)
            axes.barh(y, high - low, left=low, height=0.62, alpha=0.16, zorder=2, color="#2f80cf", linewidth=0)
        if one.low is not None and one.high is not None:
            axes.plot([one.low, one.high], [y, y], color=color, linewidth=2, zorder=3)
        axes.plot([one.mean], [y], marker="o", markersize=4, color=color, zorder=4)
        value = (signed(one.mean) if one.mean else "0") if name == "loss" else f"{one.mean:.3f}"
        text = f"{value} {SIGNS[verdict.outcome]} {_bounds(verdict.claim)}" if verdict else value
        axes.text(1.01, y, text, color=color, va="center", fontsize=7.5, transform=axes.get_yaxis_transform())


def _bounds(claim: Claim) -> str:
    """Where a claim holds, such as "(≤ +0.05)"."""
    bound = claim.bounds[1]
    return f"(± {bound:g})" if claim.question == "equal" else f"(≤ {bound:g})" if claim.scale == "ratio" else f"(≤ {signed(bound, 'g')})"
