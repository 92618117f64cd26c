"""Decides whether a claim about a recipe holds, fails, or is inconclusive, from the runs of its own experiment.

`launch.comparison.comparison` asks for no verdict before all planned seeds have ended, and for none on times that were not interleaved.

Recipe and control are run with the same seeds. The two runs of a seed are a pair, so the effect that the seed has on both cancels in their
difference or ratio. A claim says that the true mean over pairs is between two bounds ("equal"), or below one (all other questions). The
two-sided 95% confidence interval of the mean (Student, 1908; of ratios in logarithms, so their mean is geometric) decides:

    holds          if the whole interval is inside the bounds; for "equal", the two one-sided tests of Schuirmann (1987) at 2.5% each
    fails          if the whole interval is outside
    inconclusive   otherwise

So a claim whose truth is exactly at its bound wrongly holds in 2.5% of experiments, if pairs are independent and roughly normal and the
number of seeds was fixed in advance. Claims of several experiments are not corrected for each other.

- A run that diverges under the recipe but not under the control makes a claim about the loss fail.
- Values that agree to 12 digits over all pairs, such as byte counts, have no noise and are compared with the bounds directly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from recipes.claims import Claim

Array = npt.NDArray[np.float64]
Outcome = Literal["holds", "fails", "inconclusive"]

SIGNS = {"holds": "✓", "fails": "✗", "inconclusive": "?"}
#: Differences below this fraction of the values (of 1 for logarithms of ratios) are rounding errors: 1e-16 in fp64, 1e-13 for logarithms.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Interval:
    """A mean over pairs, and its two-sided 95% confidence interval, whose ends are None for a single pair."""

    mean: float
    low: float | None
    high: float | None

    def inverse(self) -> Interval:
        """For a ratio recipe / control: the interval of control / recipe."""
        return Interval(1 / self.mean, self.high and 1 / self.high, self.low and 1 / self.low)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim.

    Attributes:
        claim: what was judged.
        reason: what was measured and what the claim says, in one line.
        outcome: of the claim.
        found: the mean difference recipe - control, or the geometric mean ratio recipe / control; None if there is no finite one.
    """

    claim: Claim
    reason: str
    outcome: Outcome = "inconclusive"
    found: Interval | None = None


def judge(claim: Claim, control: Sequence[float], other: Sequence[float]) -> Verdict:
    """The verdict on a claim, from its measure in the runs of control and recipe; entry i of both has the same seed.

    +inf in `other` is a run that diverged although its control did not. One such run makes a claim about the loss fail. All other values
    must be finite.
    """
    before, after = _aligned(control, other)
    pairs, scale = len(after), claim.scale
    low, high = (_number(bound, scale) for bound in claim.bounds)
    claimed = f"the claim says {f'{low} to ' if claim.question == 'equal' else 'at most '}{high}"
    if claim.measure == "loss" and (diverged := np.isposinf(after)).any():
        return Verdict(claim, f"{diverged.sum()} of {_seeds(pairs)} diverged under the recipe but not under the control", "fails")
    if scale == "ratio" and (lowest := min([*before, *after], default=1.0)) <= 0:
        return Verdict(claim, f"{claim.measure}: a run has {lowest:g}, and a ratio needs numbers above 0")
    found = paired_interval(before, after, scale)
    if found is None or found.low is None or found.high is None:
        seen = "no seed was run on both sides" if found is None else f"{_number(found.mean, scale, abs(found.mean) / 100)} from 1 seed"
        return Verdict(claim, f"{seen}; {claimed}; a test needs 2 seeds or more", found=found)
    values, ends = _paired(before, after, scale), (found.low, found.high)
    size = 1.0 if scale == "ratio" else float(np.maximum(np.abs(before), np.abs(after)).max(initial=claim.number))
    if np.ptp(values) <= ROUNDING * size:
        seen = f"{_number(found.mean, scale, abs(found.mean) / 100)} with each of {_seeds(pairs)}, without noise"
        return Verdict(claim, f"{seen}; {claimed}", _outcome((found.mean, found.mean), claim.bounds, ROUNDING * size), found)
    mean, *shown = (_number(value, scale, ends[1] - ends[0]) for value in (found.mean, *ends))
    seen = f"{'mean ratio' if scale == 'ratio' else 'mean'} {mean}, 95% interval {shown[0]} to {shown[1]} from {_seeds(pairs)}"
    return Verdict(claim, f"{seen}; {claimed}", _outcome(ends, claim.bounds), found)


def _outcome(interval: tuple[float, float], bounds: tuple[float, float], rounding: float = 0.0) -> Outcome:
    low, high = bounds[0] - rounding, bounds[1] + rounding
    if low <= interval[0] and interval[1] <= high:
        return "holds"
    return "fails" if interval[0] > high or interval[1] < low else "inconclusive"


def paired_interval(control: Sequence[float] | Array, other: Sequence[float] | Array, scale: str = "difference") -> Interval | None:
    """The mean of other - control, or the geometric mean of other / control, with its interval.

    None without pairs, and for ratios of numbers that are not all positive.
    """
    before, after = _aligned(control, other)
    if not len(after) or (scale == "ratio" and min(before.min(), after.min()) <= 0):
        return None
    values = _paired(before, after, scale)
    mean = float(values.mean())
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)) if len(values) > 1 else 0.0
    with np.errstate(over="ignore"):
        mean, low, high = (float(np.exp(end)) if scale == "ratio" else end for end in (mean, mean - half, mean + half))
    return Interval(mean, low, high) if len(values) > 1 else Interval(mean, None, None)


def _aligned(control: Sequence[float] | Array, other: Sequence[float] | Array) -> tuple[Array, Array]:
    """Both as fp64, of one length."""
    assert len(control) == len(other), "entry i of both is of the same seed"
    return np.asarray(control, np.float64), np.asarray(other, np.float64)


def _paired(control: Array, other: Array, scale: str) -> Array:
    """(pairs,) -> (pairs,): the differences, or the logarithms of the ratios."""
    return np.log(other) - np.log(control) if scale == "ratio" else other - control


def _seeds(count: int) -> str:
    return f"{count:,} seed{'' if count == 1 else 's'}"


def _number(value: float, scale: str, width: float = 0.0) -> str:
    """A difference with its sign, or a ratio, rounded to three digits of `width`."""
    if 0 < width < math.inf and math.isfinite(value):
        value = round(value, 2 - math.floor(math.log10(width)))
    return f"{value:{'+' if scale == 'difference' else ''}.12g}" if value else "0"
