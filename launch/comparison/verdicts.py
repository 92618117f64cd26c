"""Decides whether a claim about a recipe holds, fails, or is inconclusive given the noise between seeds.

Recipe and control are run with the same seeds. The two runs of a seed are a pair, so the effect that the seed has on both cancels in their
difference or ratio. A claim says that the true mean over pairs is between two bounds ("equal"), or below one (all other questions). Ratios
are in logarithms, so their mean is geometric. One-sided t-tests (Student, 1908) decide:

    holds          if the mean is shown to be inside all bounds. For "equal" these are the two one-sided tests of Schuirmann (1987).
    fails          if the mean is shown to be outside a bound; with two bounds, the smaller p-value is doubled.
    inconclusive   otherwise

The p-value of a claim is 2 x the smaller of the two, so that the verdicts "holds" and "fails" share 5%. `decide` corrects it for all claims
of a table by Holm's method (1979): at most 5% of tables have any wrong verdict, also if the truth of each claim is exactly at its bound. A
claim that is not measured yet counts with p = 1. Adjusted p-values only fall when it is measured, so later results take no verdict away.

Assumptions:

- Pairs are independent and roughly normal. Noise with the same skew in recipe and control, such as that of step times, cancels to a
  symmetric distribution. Other skew does not: with 5 seeds and an exponential tail of 5% in the control's step times and of 15% in the
  recipe's, a claim that is exactly at its bound wrongly holds in 8% of experiments instead of 2.5%, and if only the recipe has the tail,
  in 11%. At the level of a table of 35 claims it is 0.5% and 1.4% instead of 0.07%. Uniform noise, which has no tails, stays below 3%.
- The number of seeds was fixed in advance, so no verdict says how many more would decide. After a look at 5 seeds and, if inconclusive,
  another at 10, a claim at its bound has a verdict in 9% of experiments instead of 5%, and in 19% with a look after each seed from 5 to 20.
- Verdicts with a direction are proven for Holm's method if the claims are independent (Shaffer, 1980); claims that share a control are
  not. Of 2,000 simulated tables of 35 claims with normal noise and 5 seeds, the truth at each bound and the noise of a run from 1e-4 to
  0.5 nats, 3.4% to 4.9% have a wrong verdict, and with one control for all claims 3.2% to 4.4%. If half of the claims are not measured,
  they are 1.6% to 2.7%.
- A run that diverges under the recipe but not under the control makes a claim about the loss fail, whatever the noise. This rule is not
  part of the 5%: testbeds are tuned so that no control diverges, and if one does, the claim is inconclusive.
- Values that agree to 12 digits over all pairs, such as byte counts, have no noise and are compared with the bounds directly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from recipes.claims import Claim

Array = npt.NDArray[np.float64]
Outcome = Literal["holds", "fails", "inconclusive"]

LEVEL = 0.05
SIGNS = {"holds": "✓", "fails": "✗", "inconclusive": "?"}
#: Differences below this fraction of the values (of 1 for logarithms of ratios) are rounding errors: 1e-16 in fp64, 1e-13 for logarithms.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim.

    Attributes:
        claim: what was judged.
        evidence: what was measured and what the claim says, in one line.
        estimate: the mean difference recipe - control or the geometric mean ratio recipe / control; None if there is no finite one.
        interval: the two-sided 95% confidence interval of `estimate`; None with fewer than two pairs. The upper end of a ratio may be +inf.
        p_holds: p-value of the null hypothesis whose rejection means "holds"; None if nothing could be tested.
        p_fails: p-value of the null hypothesis whose rejection means "fails".
        pairs: the number of pairs.
        adjusted: `p` after Holm's correction over `table` claims, by which the outcome is decided.
        table: 1 for a claim on its own.
    """

    claim: Claim
    evidence: str
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    p_holds: float | None = None
    p_fails: float | None = None
    pairs: int = 0
    adjusted: float = 1.0
    table: int = 1

    @property
    def p(self) -> float:
        """The p-value of the claim for both verdicts together; 1 if nothing could be tested."""
        return 1.0 if self.p_holds is None or self.p_fails is None else min(1.0, 2 * min(self.p_holds, self.p_fails))

    @property
    def outcome(self) -> Outcome:
        if self.p_holds is None or self.p_fails is None or self.adjusted >= LEVEL:
            return "inconclusive"
        return "holds" if self.p_holds < self.p_fails else "fails"

    @property
    def reason(self) -> str:
        """The outcome's reason in one line."""
        if self.p_holds is None or self.p == 0:  # nothing could be tested, or there is no noise
            return self.evidence
        holm = f", adjusted p {_p(self.adjusted)} (Holm, {self.table} claims)" if self.table > 1 else ""
        return f"{self.evidence}; p {_p(self.p)}{holm}"


@dataclass(frozen=True)
class Interval:
    """A mean over pairs, and its two-sided 95% confidence interval, whose ends are None for a single pair."""

    mean: float
    low: float | None
    high: float | None

    def inverse(self) -> Interval:
        """For a ratio recipe / control: the interval of control / recipe."""
        return Interval(1 / self.mean, self.high and 1 / self.high, self.low and 1 / self.low)


def judge(claim: Claim, control: Sequence[float], other: Sequence[float]) -> Verdict:
    """The verdict on one claim on its own, from its measure in the runs of control and recipe; entry i of both has the same seed.

    +inf in `other` is a run that diverged although its control did not. One such run makes a claim about the loss fail. All other values
    must be finite.
    """
    before, after = _aligned(control, other)
    pairs, scale = len(after), claim.scale
    low, high = (_number(bound, scale) for bound in claim.bounds)
    claimed = f"the claim says {f'{low} to ' if claim.question == 'equal' else 'at most '}{high}"
    if claim.measure == "loss" and (diverged := np.isposinf(after)).any():
        evidence = f"{diverged.sum()} of {_seeds(pairs)} diverged under the recipe but not under the control"
        return Verdict(claim, evidence, p_holds=1.0, p_fails=0.0, pairs=pairs, adjusted=0.0)
    if scale == "ratio" and (lowest := min([*before, *after], default=1.0)) <= 0:
        return Verdict(claim, f"{claim.measure}: a run has {lowest:g}, and a ratio needs numbers above 0", pairs=pairs)
    found = paired_interval(before, after, scale)
    if found is None or found.low is None or found.high is None:
        estimate = None if found is None else found.mean
        seen = "no seed was run on both sides" if estimate is None else f"{_number(estimate, scale, abs(estimate) / 100)} from 1 seed"
        return Verdict(claim, f"{seen}; {claimed}; a test needs 2 seeds or more", estimate, pairs=pairs)

    p_holds, p_fails, same = (float(one[0]) for one in _p_values(claim, before[None], after[None]))
    if same:
        seen = f"{_number(found.mean, scale, abs(found.mean) / 100)} with each of {_seeds(pairs)}, without noise"
    else:
        mean, *ends = (_number(value, scale, found.high - found.low) for value in (found.mean, found.low, found.high))
        called = "mean ratio" if scale == "ratio" else "mean"
        seen = f"{called} {mean}, 95% interval {ends[0]} to {ends[1]} from {_seeds(pairs)}"
    verdict = Verdict(claim, f"{seen}; {claimed}", found.mean, (found.low, found.high), p_holds, p_fails, pairs)
    return replace(verdict, adjusted=verdict.p)


def decide(verdicts: Sequence[Verdict], unmeasured: int = 0) -> list[Verdict]:
    """The same verdicts after Holm's correction over them and over `unmeasured` further claims of the table, which have p = 1."""
    table = len(verdicts) + unmeasured
    adjusted = holm([verdict.p for verdict in verdicts], table)
    return [replace(verdict, adjusted=float(p), table=table) for verdict, p in zip(verdicts, adjusted, strict=True)]


def holm(p: Sequence[float] | Array, table: int) -> Array:
    """(..., claims) -> same shape: p-values adjusted by Holm's method over `table` claims, of which those not given have p = 1."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, axis=-1)
    scaled = np.take_along_axis(values, order, -1) * (table - np.arange(values.shape[-1]))
    found = np.empty_like(values)
    np.put_along_axis(found, order, np.minimum(1.0, np.maximum.accumulate(scaled, axis=-1)), -1)
    return found


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


# --- planning -------------------------------------------------------------------------------------------------------------------------


def planned_power(claim: Claim, seeds: int, deviation: float, claims_in_table: int) -> float:
    """The probability of "holds" if the true mean is `claim.expected`, at the level that Holm's method grants at least (Bonferroni's).

    Exact up to 1e-3: the power given the sample's deviation, averaged over 4,000 quantiles of the latter.

    Args:
        deviation: the true standard deviation of the differences of pairs, or of the logarithms of their ratios.

    Raises:
        ValueError: `deviation` is negative or not finite, or there are fewer than 2 seeds or no claim.
    """
    if not (math.isfinite(deviation) and deviation >= 0 and seeds >= 2 and claims_in_table >= 1):
        raise ValueError(f"{seeds} seeds, {claims_in_table} claims, a deviation of {deviation}: it must be finite and at least 0")
    low, high = _bounds(claim)
    expected = math.log(claim.expected) if claim.scale == "ratio" else claim.expected
    if deviation == 0:
        return float(low <= expected <= high)
    error = deviation / math.sqrt(seeds)
    quantiles = (np.arange(4_000) + 0.5) / 4_000
    critical = stats.t.isf(LEVEL / 2 / claims_in_table, seeds - 1) * np.sqrt(stats.chi2.ppf(quantiles, seeds - 1) / (seeds - 1))
    inside = stats.norm.cdf((high - expected) / error - critical) - stats.norm.cdf((low - expected) / error + critical)
    return float(np.maximum(inside, 0.0).mean())


# --- tests ----------------------------------------------------------------------------------------------------------------------------


def _bounds(claim: Claim) -> tuple[float, float]:
    """The bounds of the claim, of a ratio in logarithms."""
    low, high = claim.bounds
    return (-math.inf, math.log(high)) if claim.scale == "ratio" else (low, high)


def _p_values(claim: Claim, control: Array, other: Array) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """(experiments, pairs) -> p-values of the nulls that "holds" and "fails" reject, and whether there is no noise; (experiments,) each.

    Without noise the p-values are 0 and 1, and a claim that is met exactly, up to rounding, holds.
    """
    values = _paired(control, other, claim.scale)
    low, high = _bounds(claim)
    size = np.ones(len(values)) if claim.scale == "ratio" else np.maximum(np.abs(control), np.abs(other)).max(axis=1, initial=claim.number)
    same = np.ptp(values, axis=1) <= ROUNDING * size
    outside = [low - values, values - high]  # positive values contradict the claim
    outside = [one for one in outside if np.isfinite(one).all()]
    met = np.all([one.max(axis=1) <= ROUNDING * size for one in outside], axis=0)
    p_holds, p_fails = np.where(met, 0.0, 1.0), np.where(met, 1.0, 0.0)
    tests = [stats.ttest_1samp(one[~same], 0, axis=1, alternative="less") for one in outside]
    p_holds[~same] = np.max([test.pvalue for test in tests], axis=0)
    above = [stats.t.sf(test.statistic, control.shape[1] - 1) for test in tests]
    p_fails[~same] = np.minimum(1.0, len(tests) * np.min(above, axis=0))
    return p_holds, p_fails, same


def _aligned(control: Sequence[float] | Array, other: Sequence[float] | Array) -> tuple[Array, Array]:
    """Both as fp64, of one length."""
    assert len(control) == len(other), "entry i of both is of the same seed"
    return np.asarray(control, np.float64), np.asarray(other, np.float64)


def _paired(control: Array, other: Array, scale: str) -> Array:
    """(..., pairs) -> (..., pairs): the differences, or the logarithms of the ratios."""
    return np.log(other) - np.log(control) if scale == "ratio" else other - control


def _seeds(count: int) -> str:
    return f"{count:,} seed{'' if count == 1 else 's'}"


def _p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"= {p:.3g}"


def _number(value: float, scale: str, width: float = 0.0) -> str:
    """A difference with its sign, or a ratio, rounded to three digits of `width`."""
    if 0 < width < math.inf and math.isfinite(value):
        value = round(value, 2 - math.floor(math.log10(width)))
    return f"{value:{'+' if scale == 'difference' else ''}.12g}" if value else "0"
