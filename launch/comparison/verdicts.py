"""Whether a claim about a recipe holds, fails, or cannot be told from the noise between seeds.

Recipe and control are run with the same seeds, and a seed's two runs are a pair: what the seed does to both cancels in their difference,
or in their ratio. Of these numbers, one a pair, the mean is held against the claim's number by two one-sided t-tests (Student, 1908;
ratios by their logarithms, so that their mean is the geometric one):

    the claim "at most b" holds   if the null hypothesis "the true mean is b or more" is rejected at 5%
                          fails   if the null hypothesis "the true mean is b or less" is rejected at 5%
                          cannot be told   otherwise

and mirrored for "at least b". So each of the two wrong verdicts comes in at most 5% of experiments, wherever the truth is. Too few
seeds make a verdict rarer, never easier: a claim does not hold because nothing speaks against it.

What this assumes:

- The numbers of the pairs are independent, and roughly normal. Noise that is skewed in recipe and control alike, as step times are,
  cancels to a symmetric one. What does not cancel counts: where step times have an exponential tail of 5% in the control and of 15% in
  the recipe, 3 seeds say wrongly "holds" of 11% of the claims that are exactly at their number, and of 16% with a tail of the recipe's
  alone. Noise without tails, uniform, makes 7% of the 5% for 2 or 3 seeds, 5.6% for 5.
- The number of seeds was fixed before. To look at 3 seeds, and where it cannot be told once more at as many as would tell, is to try
  twice: a claim at its number then gets a wrong "holds" in up to 11% of experiments, and in 14% with a look after each seed from 3 to 10.
- Each claim is judged by itself at 5%: of 20 claims that are exactly at their number, one is expected to get a wrong "holds".
- Values that agree to 12 digits over all pairs, such as bytes counted, have no noise, and the number itself decides.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from recipes.claims import CLAIMS, ClaimKind

Array = npt.NDArray[np.float64]
Outcome = Literal["holds", "fails", "cannot be told"]

LEVEL = 0.05
POWER = 0.8
#: More seeds than this are not searched for: nobody runs them.
MOST_SEEDS = 1_000
#: Differences below this part of the values (of 1, for logarithms of ratios) are rounding: fp64's is 1e-16, of logarithms up to 1e-13.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Verdict:
    """What is said of one claim.

    Attributes:
        claim: its kind, a key of `recipes.claims.CLAIMS`.
        threshold: its number, as the recipe writes it.
        outcome: "holds", "fails" or "cannot be told".
        reason: one line with the figures.
        null: the null hypothesis that was rejected, or the two that were not, in a sentence.
        estimate: the mean difference, or the geometric mean ratio, recipe to control; None where there is none that is finite.
        interval: the two-sided 95% interval of `estimate`, a ratio's upper end +inf where beyond fp64; None with fewer than two pairs, and
            where `estimate` is None. The tests are one-sided, so that a claim can be decided although its number lies just inside.
        p_holds: p-value of the null hypothesis whose rejection says "holds"; None where nothing could be tested.
        p_fails: the same of "fails".
        pairs: how many there were.
        seeds_needed: where it cannot be told: how many seeds in all would tell with 80% power, were the true mean and deviation those
            seen. None where that is more than 1,000, where nothing could be tested, and where it is told.
    """

    claim: str
    threshold: float
    outcome: Outcome
    reason: str
    null: str
    estimate: float | None
    interval: tuple[float, float] | None
    p_holds: float | None
    p_fails: float | None
    pairs: int
    seeds_needed: int | None


def judge(claim: str, threshold: float, control: Sequence[float], other: Sequence[float]) -> Verdict:
    """The verdict on `claim: threshold`, from the claim's measure in the runs of control and recipe; entry i of both has the same seed.

    +inf in `other` is a run that diverged where its control did not. That is no noise: with one such run a claim about the loss fails.
    Raises ValueError for an unknown claim, a threshold that is no number or, of a ratio, not positive, unequal lengths, and every other
    value that is not finite.
    """
    if claim not in CLAIMS:
        raise ValueError(f"unknown claim '{claim}'; the kinds are {', '.join(CLAIMS)}")
    kind = CLAIMS[claim]
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not math.isfinite(threshold):
        raise ValueError(f"claim '{claim}': {threshold!r} is not a finite number")
    if kind.scale == "ratio" and threshold <= 0:
        raise ValueError(f"claim '{claim}': {threshold:g} is not above 0, as a ratio must be")
    before, after = _aligned(control, other)
    diverged = np.isposinf(after) if kind.measure == "final_val_loss" else np.zeros(after.shape, bool)
    _refuse_not_finite(before, after[~diverged])

    pairs, bound = len(after), kind.bound(threshold)
    asked = f"the claim says {kind.direction} {_number(bound, kind.scale)}"

    def verdict(
        outcome: Outcome,
        reason: str,
        null: str,
        estimate: float | None = None,
        interval: tuple[float, float] | None = None,
        p_values: tuple[float | None, float | None] = (None, None),
        seeds: int | None = None,
    ) -> Verdict:
        return Verdict(claim, threshold, outcome, reason, null, estimate, interval, *p_values, pairs, seeds)

    if diverged.any():
        reason = f"{diverged.sum()} of {_seeds(pairs)} diverged under the recipe and not under the control, which is no noise"
        return verdict("fails", reason, _null(kind, bound, "fails"), p_values=(1.0, 0.0))
    if kind.scale == "ratio" and (lowest := min([*before, *after], default=1.0)) <= 0:
        reason = f"the {kind.quantity}: a run has {lowest:g}, and a ratio needs numbers above 0"
        return verdict("cannot be told", reason, _null(kind, bound, None))
    if pairs < 2:
        estimate = _back(float(_paired(before, after, kind.scale)[0]), kind.scale) if pairs else None
        seen = "no seed was run by both" if estimate is None else f"{_number(estimate, kind.scale, abs(estimate) / 100)} from 1 seed"
        reason = f"{seen}; {asked}; the noise shows with 2 seeds or more, so run {2 - pairs} more"
        return verdict("cannot be told", reason, _null(kind, bound, None), estimate)

    interval = paired_interval(before, after, kind.scale)
    assert interval is not None, "two pairs or more have one, and what goes into ratios is positive here"
    mean, *ends = interval
    excess, same = _excess(kind, bound, before[None], after[None])  # (1, pairs), (1,)
    p_holds, p_fails = (float(p[0]) for p in _p_values(excess, same))
    outcome: Outcome = "holds" if p_holds < LEVEL else "fails" if p_fails < LEVEL else "cannot be told"
    seeds = None
    if same[0]:
        shown = _number(mean, kind.scale, abs(mean) / 100)
        reason = f"{shown} with each of {_seeds(pairs)}, without noise; {asked}"
        null = f"None, as there is no noise to test against: {_mean_of(kind)} is {shown} with every seed."
    else:
        middle, low, high = (_number(value, kind.scale, ends[1] - ends[0]) for value in interval)
        called = "mean ratio" if kind.scale == "ratio" else "mean"
        reason = f"{called} {middle}, 95% interval {low} to {high} from {_seeds(pairs)}; {asked}"
        null = _null(kind, bound, outcome)
        if outcome == "cannot be told":
            unit = np.abs(excess).max()  # keeps the squares of huge and of tiny numbers in range
            seeds = seeds_needed(float((excess / unit).mean()), float((excess / unit).std(ddof=1)))
            reason += f"; about {_seeds(seeds)} would tell" if seeds else f"; to tell would take more than {_seeds(MOST_SEEDS)}"
        else:
            p = min(p_holds, p_fails)
            reason += f" (one-sided p = {p:.3g})" if p >= 1e-4 else " (one-sided p < 0.0001)"
    return verdict(outcome, reason, null, mean, (ends[0], ends[1]), (p_holds, p_fails), seeds)


def paired_interval(
    control: Sequence[float] | Array, other: Sequence[float] | Array, scale: str = "difference"
) -> tuple[float, float, float] | None:
    """(mean, low, high) of other - control, or the geometric mean and its ends of other / control, at 95%, two-sided.

    None with fewer than two pairs, and for ratios of numbers that are not all positive. Raises ValueError as `judge` does.
    """
    before, after = _aligned(control, other)
    _refuse_not_finite(before, after)
    if len(after) < 2 or (scale == "ratio" and min(before.min(), after.min()) <= 0):
        return None
    values = _paired(before, after, scale)
    unit = float(np.abs(values).max()) or 1.0  # keeps the squares of huge and of tiny numbers in range
    mean = float((values / unit).mean())
    half = float(stats.t.ppf(0.975, len(values) - 1) * (values / unit).std(ddof=1)) / math.sqrt(len(values))
    return _back(unit * mean, scale), _back(unit * (mean - half), scale), _back(unit * (mean + half), scale)


def seeds_needed(gap: float, deviation: float, alpha: float = LEVEL, power: float = POWER) -> int | None:
    """The fewest pairs with which a one-sided t-test at `alpha` says with probability `power` on which side of the bound the mean is.

    `gap` is the true mean less the bound, and `deviation` the true standard deviation, of the differences of pairs, or of the logarithms
    of their ratios. The power is that of the noncentral t distribution. None where more than 1,000 are needed, as for a gap of 0.
    Raises ValueError where `gap` or `deviation` is not finite, or `deviation` negative.
    """
    if not (math.isfinite(gap) and math.isfinite(deviation) and deviation >= 0):
        raise ValueError(f"a gap of {gap} and a deviation of {deviation}: both must be finite, the deviation 0 or more")
    # Above 1,000 deviations 2 pairs are certain enough, and scipy's distribution is nan far out.
    effect = min(abs(gap) / deviation, 1e3) if deviation else (1e3 if gap else 0.0)

    def power_of(pairs: int) -> float:
        return float(stats.nct.sf(stats.t.isf(alpha, pairs - 1), pairs - 1, effect * math.sqrt(pairs)))

    counts = range(2, MOST_SEEDS + 1)
    found = bisect_left(counts, power, key=power_of)  # the power grows with the pairs
    return counts[found] if found < len(counts) else None


def _aligned(control: Sequence[float] | Array, other: Sequence[float] | Array) -> tuple[Array, Array]:
    """Both as fp64, of one length."""
    if len(control) != len(other):
        raise ValueError(f"{len(control)} values of the control and {len(other)} of the other: entry i of both must be of the same seed")
    return np.asarray(control, np.float64), np.asarray(other, np.float64)


def _refuse_not_finite(*sides: Array) -> None:
    for side in sides:
        if not np.isfinite(side).all():
            raise ValueError(f"{side[~np.isfinite(side)][0]} is not finite; only a loss of the recipe may be, as +inf")


def _paired(control: Array, other: Array, scale: str) -> Array:
    """(..., pairs) -> (..., pairs): the differences, or the logarithms of the ratios."""
    return np.log(other) - np.log(control) if scale == "ratio" else other - control


def _back(value: float, scale: str) -> float:
    """What `_paired` made, or a mean of it, as a difference or a ratio; +inf where the ratio is beyond fp64."""
    if scale == "ratio":
        return math.exp(value) if value < math.log(sys.float_info.max) else math.inf
    return value


def _excess(kind: ClaimKind, bound: float, control: Array, other: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(experiments, pairs) -> how far each pair is on the claim's wrong side, of that shape, and which experiments have no noise.

    Without noise, and within rounding of the bound, it is at the bound, 0.
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
    """(experiments, pairs), (experiments,) -> p-values, (experiments,) each: of what "holds" rejects, and of what "fails" rejects.

    The first null hypothesis is that the true mean excess is 0 or more, the second that it is 0 or less. Without noise the p-values are
    0 and 1, and a claim that is met exactly holds.
    """
    p_holds = np.where(excess.mean(axis=1) <= 0, 0.0, 1.0)
    p_fails = 1 - p_holds
    noisy = excess[~same]
    noisy = noisy / np.abs(noisy).max(axis=1, keepdims=True)  # keeps the squares of huge and of tiny numbers in range
    p_holds[~same] = stats.ttest_1samp(noisy, 0, axis=1, alternative="less").pvalue
    p_fails[~same] = stats.ttest_1samp(noisy, 0, axis=1, alternative="greater").pvalue
    return p_holds, p_fails


def _mean_of(kind: ClaimKind) -> str:
    """What the null hypotheses are about."""
    if kind.scale == "ratio":
        return f"the geometric mean over seeds of the ratio of the {kind.quantity} (recipe / control)"
    return f"the mean over seeds of the difference of the {kind.quantity} (recipe - control)"


def _null(kind: ClaimKind, bound: float, outcome: Outcome | None) -> str:
    """The null hypotheses of a verdict in a sentence; of None: nothing could be tested."""
    shown = _number(bound, kind.scale)
    against, towards = ("more", "less") if kind.direction == "at most" else ("less", "more")
    if outcome in ("holds", "fails"):
        return f"Rejected at 5%: {_mean_of(kind)} is {shown} or {against if outcome == 'holds' else towards}."
    begin = "Neither is rejected at 5%" if outcome else "Neither can be tested"
    return f"{begin}: that {_mean_of(kind)} is {shown} or {against}, or that it is {shown} or {towards}."


def _seeds(count: int) -> str:
    return f"{count:,} seed{'' if count == 1 else 's'}"


def _number(value: float, scale: str, width: float = 0.0) -> str:
    """A difference with its sign, or a ratio; to three digits of `width`, the interval that it belongs to or a part of the value."""
    if 0 < width < math.inf and math.isfinite(value):
        value = round(value, 2 - math.floor(math.log10(width)))
    return f"{value:{'+' if scale == 'difference' else ''}.12g}" if value else "0"
