"""Decides whether a claim about a recipe holds, fails, or is inconclusive given the noise between seeds.

Recipe and control are run with the same seeds. The two runs of a seed are a pair, so the effect that the seed has on both cancels in their
difference or ratio. The mean over pairs is tested against the claim's bound by two one-sided t-tests (Student, 1908; ratios in logarithms,
so that their mean is the geometric one):

    "at most b" holds          if the null hypothesis "the true mean is b or more" is rejected at 5%
                fails          if the null hypothesis "the true mean is b or less" is rejected at 5%
                inconclusive   otherwise

and mirrored for "at least b". Each of the two wrong verdicts therefore occurs in at most 5% of experiments, wherever the true mean is. With
too few seeds a verdict is inconclusive; a claim never holds for lack of evidence against it.

Assumptions:

- Pairs are independent and roughly normal. Noise with the same skew in recipe and control, such as that of step times, cancels to a
  symmetric distribution. Other skew does not: with an exponential tail of 5% in the control's step times and of 15% in the recipe's, 11% of
  claims that are exactly at their bound wrongly hold at 3 seeds, and 16% if only the recipe has a tail. Uniform noise, which has no tails,
  turns the 5% into 7% at 2 or 3 seeds and 5.6% at 5.
- The number of seeds was fixed in advance. Looking at 3 seeds and then, if inconclusive, adding as many as would decide is a second try: a
  claim at its bound then wrongly holds in up to 11% of experiments, and in 14% with a look after each seed from 3 to 10.
- Each claim is tested at 5% on its own: of 20 claims exactly at their bound, one is expected to hold wrongly.
- Values that agree to 12 digits over all pairs, such as byte counts, have no noise and are compared with the bound directly.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from recipes.claims import CLAIMS, ClaimKind

Array = npt.NDArray[np.float64]
Outcome = Literal["holds", "fails", "inconclusive"]

LEVEL = 0.05
POWER = 0.8
#: The largest number of seeds that `seeds_needed` considers.
MOST_SEEDS = 1_000
#: Differences below this fraction of the values (of 1 for logarithms of ratios) are rounding errors: 1e-16 in fp64, 1e-13 for logarithms.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim.

    Attributes:
        claim: its kind, a key of `recipes.claims.CLAIMS`.
        threshold: its number in `recipe.json`.
        outcome: "holds", "fails" or "inconclusive".
        reason: one line with the evidence.
        estimate: the mean difference recipe - control or the geometric mean ratio recipe / control; None if there is no finite one.
        interval: the two-sided 95% confidence interval of `estimate`; None with fewer than two pairs. The upper end of a ratio may be +inf.
            The tests are one-sided, so a claim can be decided although its bound is just inside the interval.
        p_holds: p-value of the null hypothesis whose rejection means "holds"; None if nothing could be tested.
        p_fails: p-value of the null hypothesis whose rejection means "fails".
        pairs: the number of pairs.
        seeds_needed: if inconclusive, the total number of seeds that would decide with 80% power if the true mean and deviation are those
            measured. None if it exceeds 1,000, if nothing could be tested, or if the claim is decided.
    """

    claim: str
    threshold: float
    outcome: Outcome
    reason: str
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    p_holds: float | None = None
    p_fails: float | None = None
    pairs: int = 0
    seeds_needed: int | None = None


@dataclass(frozen=True)
class Interval:
    """A mean over pairs, and its two-sided 95% confidence interval, whose ends are None for a single pair."""

    mean: float
    low: float | None
    high: float | None


def judge(claim: str, threshold: float, control: Sequence[float], other: Sequence[float]) -> Verdict:
    """The verdict on `claim: threshold`, from the claim's measure in the runs of control and recipe; entry i of both has the same seed.

    +inf in `other` is a run that diverged although its control did not. One such run makes a claim about the loss fail. All other values
    must be finite.
    """
    kind = CLAIMS[claim]
    before, after = _aligned(control, other)
    diverged = np.isposinf(after) if kind.measure == "final_val_loss" else np.zeros(after.shape, bool)

    pairs, bound = len(after), kind.bound(threshold)
    claimed = f"the claim says {kind.direction} {_number(bound, kind.scale)}"

    def verdict(outcome: Outcome, reason: str, **found: Any) -> Verdict:
        return Verdict(claim, threshold, outcome, reason, pairs=pairs, **found)

    if diverged.any():
        reason = f"{diverged.sum()} of {_seeds(pairs)} diverged under the recipe but not under the control"
        return verdict("fails", reason, p_holds=1.0, p_fails=0.0)
    if kind.scale == "ratio" and (lowest := min([*before, *after], default=1.0)) <= 0:
        return verdict("inconclusive", f"the {kind.quantity}: a run has {lowest:g}, and a ratio needs numbers above 0")
    found = paired_interval(before, after, kind.scale)
    if found is None or found.low is None or found.high is None:
        estimate = None if found is None else found.mean
        seen = "no seed was run on both sides" if estimate is None else f"{_number(estimate, kind.scale, abs(estimate) / 100)} from 1 seed"
        reason = f"{seen}; {claimed}; a test needs 2 seeds or more, so run {2 - pairs} more"
        return verdict("inconclusive", reason, estimate=estimate)

    mean, ends = found.mean, (found.low, found.high)
    excess, same = _excess(kind, bound, before[None], after[None])  # (1, pairs), (1,)
    p_holds, p_fails = (float(p[0]) for p in _p_values(excess, same))
    outcome: Outcome = "holds" if p_holds < LEVEL else "fails" if p_fails < LEVEL else "inconclusive"
    seeds = None
    if same[0]:
        shown = _number(mean, kind.scale, abs(mean) / 100)
        reason = f"{shown} with each of {_seeds(pairs)}, without noise; {claimed}"
    else:
        middle, low, high = (_number(value, kind.scale, ends[1] - ends[0]) for value in (mean, *ends))
        called = "mean ratio" if kind.scale == "ratio" else "mean"
        reason = f"{called} {middle}, 95% interval {low} to {high} from {_seeds(pairs)}; {claimed}"
        if outcome == "inconclusive":
            unit = np.abs(excess).max()  # scaled, so that squares do not overflow or underflow
            seeds = seeds_needed(float((excess / unit).mean()), float((excess / unit).std(ddof=1)))
            reason += f"; about {_seeds(seeds)} would decide" if seeds else f"; more than {_seeds(MOST_SEEDS)} would decide"
        else:
            p = min(p_holds, p_fails)
            reason += f" (one-sided p = {p:.3g})" if p >= 1e-4 else " (one-sided p < 0.0001)"
    return verdict(outcome, reason, estimate=mean, interval=ends, p_holds=p_holds, p_fails=p_fails, seeds_needed=seeds)


def paired_interval(control: Sequence[float] | Array, other: Sequence[float] | Array, scale: str = "difference") -> Interval | None:
    """The mean of other - control, or the geometric mean of other / control, with its interval.

    None without pairs, and for ratios of numbers that are not all positive.
    """
    before, after = _aligned(control, other)
    if not len(after) or (scale == "ratio" and min(before.min(), after.min()) <= 0):
        return None
    values = _paired(before, after, scale)
    unit = float(np.abs(values).max()) or 1.0  # scaled, so that squares do not overflow or underflow
    mean = float((values / unit).mean())
    if len(values) < 2:
        return Interval(_back(unit * mean, scale), None, None)
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values / unit))
    return Interval(*(_back(unit * end, scale) for end in (mean, mean - half, mean + half)))


def seeds_needed(gap: float, deviation: float, alpha: float = LEVEL, power: float = POWER) -> int | None:
    """The smallest number of pairs for a one-sided t-test with level `alpha` and power `power`, by the noncentral t distribution.

    Args:
        gap: the true mean minus the bound, of the differences of pairs or of the logarithms of their ratios.
        deviation: their true standard deviation.

    Returns:
        None if more than 1,000 pairs are needed, as for a gap of 0.

    Raises:
        ValueError: `gap` or `deviation` is not finite, or `deviation` is negative.
    """
    if not (math.isfinite(gap) and math.isfinite(deviation) and deviation >= 0):
        raise ValueError(f"a gap of {gap} and a deviation of {deviation}: both must be finite, the deviation 0 or more")
    # Above 1,000 deviations 2 pairs are always enough, and scipy returns nan.
    effect = min(abs(gap) / deviation, 1e3) if deviation else (1e3 if gap else 0.0)

    def power_of(pairs: int) -> float:
        return float(stats.nct.sf(stats.t.isf(alpha, pairs - 1), pairs - 1, effect * math.sqrt(pairs)))

    counts = range(2, MOST_SEEDS + 1)
    found = bisect_left(counts, power, key=power_of)  # the power grows with the pairs
    return counts[found] if found < len(counts) else None


def _aligned(control: Sequence[float] | Array, other: Sequence[float] | Array) -> tuple[Array, Array]:
    """Both as fp64, of one length."""
    assert len(control) == len(other), "entry i of both is of the same seed"
    return np.asarray(control, np.float64), np.asarray(other, np.float64)


def _paired(control: Array, other: Array, scale: str) -> Array:
    """(..., pairs) -> (..., pairs): the differences, or the logarithms of the ratios."""
    return np.log(other) - np.log(control) if scale == "ratio" else other - control


def _back(value: float, scale: str) -> float:
    """Convert a mean of `_paired` back to a difference or a ratio; +inf if the ratio overflows fp64."""
    if scale == "ratio":
        return math.exp(value) if value < math.log(sys.float_info.max) else math.inf
    return value


def _excess(kind: ClaimKind, bound: float, control: Array, other: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(experiments, pairs) -> how far each pair is beyond the claim's bound, same shape, and which experiments have no noise.

    Positive values contradict the claim. Without noise, a value within rounding of the bound is 0.
    """
    values = _paired(control, other, kind.scale)
    if kind.scale == "ratio":
        bound, size = math.log(bound), np.ones(len(values))
    else:
        size = np.maximum(np.abs(control), np.abs(other)).max(axis=1, initial=abs(bound))
    excess = values - bound if kind.direction == "at most" else bound - values
    same = np.ptp(excess, axis=1) <= ROUNDING * size
    at_the_bound = same & (np.abs(excess).max(axis=1) <= ROUNDING * size)
    return np.where(at_the_bound[:, None], 0.0, excess), same


def _p_values(excess: Array, same: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """(experiments, pairs), (experiments,) -> p-values, (experiments,) each, of the null hypotheses that "holds" and "fails" reject.

    They are that the true mean excess is 0 or more, and that it is 0 or less. Without noise the p-values are 0 and 1, and a claim that is
    met exactly holds.
    """
    p_holds = np.where(excess.mean(axis=1) <= 0, 0.0, 1.0)
    p_fails = 1 - p_holds
    noisy = excess[~same]
    noisy = noisy / np.abs(noisy).max(axis=1, keepdims=True)  # scaled, so that squares do not overflow or underflow
    p_holds[~same] = stats.ttest_1samp(noisy, 0, axis=1, alternative="less").pvalue
    p_fails[~same] = stats.ttest_1samp(noisy, 0, axis=1, alternative="greater").pvalue
    return p_holds, p_fails


def _seeds(count: int) -> str:
    return f"{count:,} seed{'' if count == 1 else 's'}"


def _number(value: float, scale: str, width: float = 0.0) -> str:
    """A difference with its sign, or a ratio, rounded to three digits of `width`."""
    if 0 < width < math.inf and math.isfinite(value):
        value = round(value, 2 - math.floor(math.log10(width)))
    return f"{value:{'+' if scale == 'difference' else ''}.12g}" if value else "0"
