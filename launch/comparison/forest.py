"""Forest plots: the 95% interval of each recipe's difference to its control, beside the region in which its claim holds.

`forest` collects the values, `draw_forest` draws them as a picture for the index of recipes. `page.html` draws the same values in the
report of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure as Picture

from launch.comparison.comparison import LOSS, Figure
from launch.comparison.verdicts import SIGNS, Interval, Verdict
from recipes.claims import Claim

#: What is drawn: measure of a claim -> (key of the figure, scale, title). The time per token is that per step, except for recipes whose
#: steps differ in tokens, where a shorter step is no gain.
PANELS = {
    "loss": (LOSS, "difference", "final validation loss − control's (nats)"),
    "step_time": ("tokens_per_second", "ratio", "time per token ÷ control's"),
    "to_target": ("seconds_to_target", "ratio", "time to the target loss ÷ control's"),
}
#: Differences below this are drawn on a linear scale, larger ones on a logarithmic one.
LINEAR = 0.01
TICKS = {
    "difference": (-3, -1, -0.3, -0.1, -0.05, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.3, 1, 3),
    "ratio": (0.1, 0.2, 0.33, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10),
}
#: What is always in view.
IN_VIEW = {"difference": (-0.02, 0.02), "ratio": (0.8, 1.25)}
#: Colours by outcome; None for a figure without a claim.
COLORS = {"holds": "#1a7f45", "fails": "#c0362c", "inconclusive": "#a87b12", None: "#5b6b7b"}


@dataclass(frozen=True)
class Mark:
    """One value of a row: the interval, the claim about it, and the outcome; None for each that there is not."""

    interval: Interval | None
    claim: Claim | None
    outcome: str | None

    @property
    def region(self) -> tuple[float, float] | None:
        """The values for which the claim is true."""
        return None if self.claim is None else self.claim.bounds

    @property
    def sign(self) -> str:
        return SIGNS.get(self.outcome or "", "")


@dataclass(frozen=True)
class Row:
    """A recipe on a testbed, which is the group. note: in place of the interval, such as "not measured yet"."""

    group: str
    label: str
    marks: dict[str, Mark]
    note: str = ""


def row(group: str, label: str, figures: dict[str, Figure], claims: Iterable[Claim], verdicts: Iterable[Verdict], note: str = "") -> Row:
    """The row of a pair with these figures, its claims and their verdicts."""
    outcomes = {(verdict.claim.measure, verdict.claim.question): verdict.outcome for verdict in verdicts}
    claimed = {claim.measure: claim for claim in claims}
    marks = {}
    for name, (key, scale, _) in PANELS.items():
        figure, claim = figures.get(key), claimed.get(name)
        interval = None if figure is None else figure.difference if scale == "difference" else figure.ratio
        if key == "tokens_per_second" and interval is not None:
            interval = interval.inverse()
        if figure is not None and figure.to_target is not None and figure.to_target.bound:
            interval = None  # runs that did not reach the target leave a bound only
        marks[name] = Mark(interval, claim, None if claim is None else outcomes.get((claim.measure, claim.question)))
    return Row(group, label, marks, note)


class Scale:
    """Places values of a panel between 0 and 1: logarithmic for ratios, and for differences beyond `LINEAR`."""

    def __init__(self, name: str, rows: Sequence[Row]):
        self.kind = PANELS[name][1]
        self.to: Callable[[float], float] = math.log if self.kind == "ratio" else lambda value: math.asinh(value / LINEAR)
        marks = [one.marks[name] for one in rows]
        values = [*IN_VIEW[self.kind]]
        for mark in marks:
            ends = () if mark.interval is None else (mark.interval.mean, mark.interval.low, mark.interval.high)
            values += [value for value in (*ends, *(mark.region or ())) if value is not None and self._is_drawable(value)]
        low, high = self.to(min(values)), self.to(max(values))
        margin = 0.06 * (high - low)
        self.low, self.high = low - margin, high + margin

    def _is_drawable(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or self.kind == "difference")

    def at(self, value: float) -> float:
        """The place of `value`, cut off at 0 and 1."""
        if not self._is_drawable(value):
            return 1.0 if value > 0 else 0.0
        return min(1.0, max(0.0, (self.to(value) - self.low) / (self.high - self.low)))

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels."""
        inside = [value for value in TICKS[self.kind] if self.low < self.to(value) < self.high]
        kept: list[tuple[float, str]] = []
        for value in sorted(inside, key=lambda value: (value != self.none, abs(self.to(value)))):  # the most important ones first
            label = f"{value:+g}" if self.kind == "difference" and value else f"{value:g}"
            if all(abs(self.at(value) - place) > 0.1 for place, _ in kept):
                kept.append((self.at(value), label.replace("-", "−")))
        return sorted(kept)

    @property
    def none(self) -> float:
        """The value of no difference."""
        return 1.0 if self.kind == "ratio" else 0.0


def drawn_panels(rows: Sequence[Row]) -> list[str]:
    """The panels in which any row has something."""
    return [name for name in PANELS if any(one.marks[name].interval or one.marks[name].claim for one in rows)]


def draw_forest(rows: Sequence[Row], file: Path) -> None:
    """Draw the rows, grouped, a column per panel. The shaded region is where the claim holds; it is only outlined without a measurement."""
    panels = drawn_panels(rows) or ["loss"]
    places: dict[int, float] = {}
    headings: list[tuple[float, str]] = []
    y = 0.0
    for group, members in groupby(rows, key=lambda one: one.group):
        headings.append((y, group))
        for one in members:
            y += 1
            places[id(one)] = y
        y += 1.4
    with rc_context({"text.parse_math": False, "font.size": 9}):
        picture = Picture(figsize=(3.4 + 3.2 * len(panels), 1.0 + 0.235 * y), dpi=120, layout="constrained")
        for place, (axes, name) in enumerate(zip(picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True)):
            _draw_panel(axes, name, rows, places)
            axes.set(ylim=(y - 0.6, -0.7), xlim=(0, 1))
            axes.set_title(PANELS[name][2], fontsize=9)
            axes.set_yticks(list(places.values()) if place == 0 else [], [one.label for one in rows] if place == 0 else [])
            axes.tick_params(left=False, labelsize=8.5)
            axes.spines[["left", "right", "top"]].set_visible(False)
            for at, group in headings if place == 0 else ():
                axes.text(0, at, group, fontweight="bold", va="center", ha="right", transform=axes.get_yaxis_transform())
        words = "dots: mean over seeds, lines: 95% interval, shaded: where the claim holds (outlined: not measured yet)"
        verdicts = "✓ ✗ ?: verdicts, corrected for the number of all claims, so an interval inside the region may still be inconclusive"
        picture.supxlabel(f"{words}; differences are logarithmic beyond ±{LINEAR}\n{verdicts}", fontsize=8.5)
        picture.savefig(file, metadata={"Software": None})


def _draw_panel(axes: Any, name: str, rows: Sequence[Row], places: dict[int, float]) -> None:
    scale = Scale(name, rows)
    for tick, _ in scale.ticks():
        axes.axvline(tick, color="#e4e7ea", linewidth=0.8, zorder=0)
    axes.axvline(scale.at(scale.none), color="#808890", linewidth=1.0, zorder=1)
    axes.set_xticks([place for place, _ in scale.ticks()], [label for _, label in scale.ticks()])
    for one in rows:
        mark, y = one.marks[name], places[id(one)]
        color = COLORS[mark.outcome]
        if mark.region is not None:
            low, high = map(scale.at, mark.region)
            region = {"color": "#2f80cf", "linewidth": 0} if mark.interval else {"color": "none", "edgecolor": "#2f80cf", "linewidth": 1.5}
            axes.barh(y, high - low, left=low, height=0.62, alpha=0.16, zorder=2, **region)
        if mark.interval is not None:
            middle = scale.at(mark.interval.mean)
            if mark.interval.low is not None and mark.interval.high is not None:
                axes.plot([scale.at(mark.interval.low), scale.at(mark.interval.high)], [y, y], color=color, linewidth=2, zorder=3)
            axes.plot([middle], [y], marker="o", markersize=4, color=color, zorder=4)
            value = f"{mark.interval.mean:.2f}" if scale.kind == "ratio" else f"{mark.interval.mean:+.3f}".replace("-", "−")
            axes.text(1.01, y, f"{value} {mark.sign}", color=color, va="center", fontsize=7.5)
        elif one.note and name == "loss":
            axes.text(1.01, y, one.note, color="#59626b", fontsize=7.5, va="center")


def forest_data(rows: Sequence[Row], shown: Callable[[str, Interval | None], str]) -> dict[str, Any]:
    """What `page.html` draws, with places in percent. `shown` writes an interval of a panel."""
    panels = {name: Scale(name, rows) for name in drawn_panels(rows)}

    def cell(name: str, mark: Mark) -> dict[str, Any]:
        scale, interval = panels[name], mark.interval
        values = {} if interval is None else {"mean": interval.mean, "low": interval.low, "high": interval.high}
        places = {key: round(100 * scale.at(value), 2) for key, value in values.items() if value is not None}
        region = mark.region and [round(100 * scale.at(end), 2) for end in mark.region]
        return {**places, "region": region, "outcome": mark.outcome, "sign": mark.sign, "text": shown(name, interval)}

    return {
        "panels": [
            {
                "title": PANELS[name][2],
                "none": round(100 * scale.at(scale.none), 2),
                "ticks": [(round(100 * place, 2), text) for place, text in scale.ticks()],
            }
            for name, scale in panels.items()
        ],
        "rows": [
            {"group": one.group, "label": one.label, "note": one.note, "cells": [cell(name, one.marks[name]) for name in panels]}
            for one in rows
        ],
    }
