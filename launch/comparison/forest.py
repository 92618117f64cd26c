"""Forest plots: the 95% interval of each recipe's difference to its control, beside the region in which its claim holds.

`row` collects the values, `draw_forest` draws them, for the index of recipes and for the report of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure as Picture

from launch.comparison.comparison import LOSS, Figure, signed
from launch.comparison.verdicts import SIGNS, Interval
from recipes.claims import Claim

#: Panel -> (key of the figure, scale, title). "loss" and "step_time" are also measures of claims. The time is per token, because a shorter
#: step with fewer tokens is no gain.
PANELS = {
    "loss": (LOSS, "difference", "final validation loss − control's (nats)"),
    "step_time": ("tokens_per_second", "ratio", "time per token ÷ control's"),
    "to_target": ("seconds_to_target", "ratio", "time to the target loss ÷ control's"),
}
#: The range that is always in view.
IN_VIEW = {"difference": (-0.02, 0.02), "ratio": (0.8, 1.25)}
#: Colours by outcome; None for a figure without a claim.
COLORS = {"holds": "#1a7f45", "fails": "#c0362c", "inconclusive": "#a87b12", None: "#5b6b7b"}


@dataclass(frozen=True)
class Mark:
    """One value of a row. interval, claim, outcome: None where there is none."""

    interval: Interval | None
    claim: Claim | None
    outcome: str | None

    @property
    def values(self) -> list[float]:
        """The values to keep in view: the interval and the bounds of the claim."""
        interval = () if self.interval is None else astuple(self.interval)
        return [value for value in (*interval, *(self.claim.bounds if self.claim else ())) if value is not None]


@dataclass(frozen=True)
class Row:
    """A recipe (`label`) on a testbed (`group`). note: shown instead of the interval, such as "not measured yet"."""

    group: str
    label: str
    marks: dict[str, Mark]
    note: str = ""


def row(group: str, label: str, figures: Mapping[str, Figure], outcomes: Mapping[Claim, str | None], note: str = "") -> Row:
    """The row of a pair with these figures. outcomes: of each of its claims, None without a verdict."""
    claims = {claim.measure: claim for claim in outcomes}
    marks = {}
    for name, (key, scale, _) in PANELS.items():
        figure, claim = figures.get(key), claims.get(name)
        interval = None if figure is None else figure.difference if scale == "difference" else figure.ratio
        if key == "tokens_per_second" and interval is not None:
            interval = interval.inverse()
        if figure is not None and figure.to_target is not None and figure.to_target.bound:
            interval = None  # runs that did not reach the target leave a bound only
        marks[name] = Mark(interval, claim, outcomes[claim] if claim else None)
    return Row(group, label, marks, note)


def draw_forest(rows: Sequence[Row], file: Path | BinaryIO) -> None:
    """Draw the rows, grouped, a column per panel. The shaded region is where the claim holds; it is only outlined without a measurement."""
    panels = [name for name in PANELS if any(one.marks[name].interval or one.marks[name].claim for one in rows)] or ["loss"]
    places: list[float] = []
    headings: list[tuple[float, str]] = []
    y = 0.0
    for group, members in groupby(rows, key=lambda one: one.group):
        if group:
            headings.append((y, group))
        else:
            y -= 1
        places += [y := y + 1 for _ in members]
        y += 1.4
    with rc_context({"text.parse_math": False, "font.size": 9}):
        picture = Picture(figsize=(max(10.0, 2.5 + 3.0 * len(panels)), 1.0 + 0.235 * y), dpi=120, layout="constrained")
        for place, (axes, name) in enumerate(zip(picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True)):
            _draw_panel(axes, name, rows, places)
            axes.set_ylim(y - 0.6, -0.7)
            axes.set_title(PANELS[name][2], fontsize=9)
            axes.set_yticks(places if place == 0 else [], [one.label for one in rows] if place == 0 else [])
            axes.tick_params(left=False, labelsize=8.5)
            axes.spines[["left", "right", "top"]].set_visible(False)
            for at, group in headings if place == 0 else ():
                axes.text(0, at, group, fontweight="bold", va="center", ha="right", transform=axes.get_yaxis_transform())
        words = "dots: mean over seeds, lines: 95% interval"
        if any(mark.claim for one in rows for mark in one.marks.values()):
            words += "\nshaded, and in parentheses: where the claim holds (outlined: not measured yet)\n"
            words += "✓ the interval is inside, ✗ outside, ? neither; rows without times: the two runs of a seed were not interleaved"
        picture.supxlabel(words, fontsize=8.5)
        picture.savefig(file, metadata={"Software": None})


def _draw_panel(axes: Any, name: str, rows: Sequence[Row], places: Sequence[float]) -> None:
    marks = [one.marks[name] for one in rows]
    scale = PANELS[name][1]
    is_ratio, neutral = scale == "ratio", 1.0 if scale == "ratio" else 0.0
    values = [*IN_VIEW[scale], *(value for mark in marks for value in mark.values if math.isfinite(value) and (value > 0 or not is_ratio))]
    margin = 0.06 * (max(values) - min(values))
    view = axes.set_xlim(min(values) - margin, max(values) + margin)
    axes.grid(axis="x", color="#e4e7ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", nbins=5)
    axes.axvline(neutral, color="#808890", linewidth=1.0, zorder=1)
    for one, mark, y in zip(rows, marks, places, strict=True):
        color = COLORS[mark.outcome]
        if mark.claim is not None:
            low, high = np.clip(mark.claim.bounds, *view)
            region = {"color": "#2f80cf", "linewidth": 0} if mark.interval else {"color": "none", "edgecolor": "#2f80cf", "linewidth": 1.5}
            axes.barh(y, high - low, left=low, height=0.62, alpha=0.16, zorder=2, **region)
        if mark.interval is not None:
            if mark.interval.low is not None and mark.interval.high is not None:
                axes.plot(np.clip([mark.interval.low, mark.interval.high], *view), [y, y], color=color, linewidth=2, zorder=3)
            axes.plot([mark.interval.mean], [y], marker="o", markersize=4, color=color, zorder=4)
            value = f"{mark.interval.mean:.3f}" if is_ratio else signed(mark.interval.mean) if mark.interval.mean else "0"
            _write(axes, y, " ".join(filter(None, [value, SIGNS.get(mark.outcome or ""), _bounds(mark.claim)])), color)
        elif one.note and (mark.claim or name == "loss"):
            _write(axes, y, f"{one.note} {_bounds(mark.claim)}".rstrip(), "#59626b")


def _bounds(claim: Claim | None) -> str:
    """Where a claim holds, such as "(≤ +0.05)"."""
    if claim is None:
        return ""
    low, high = claim.bounds
    if claim.scale == "ratio":
        return f"(≤ {high:g})"
    return f"(± {high:g})" if math.isfinite(low) else f"(≤ {signed(high, 'g')})"


def _write(axes: Any, y: float, text: str, color: str) -> None:
    """Write beside the panel."""
    axes.text(1.01, y, text, color=color, va="center", fontsize=7.5, transform=axes.get_yaxis_transform())
