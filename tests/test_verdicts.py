"""Verdicts: figures as published or computed another way, each kind of case, and what is refused."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from launch.comparison.verdicts import Interval, decide, holm, judge, paired_interval, planned_power
from recipes.claims import Claim

# Hours of sleep that ten patients gained by two drugs, of Student, The probable error of a mean, Biometrika 6 (1908). R's `t.test(paired
# = TRUE)` of them is in its documentation of `sleep`: t = -4.0621, df = 9, p = 0.002833, 95% interval -2.4598858 to -0.7001142, mean -1.58.
SECOND_DRUG = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
FIRST_DRUG = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]


def equal(x):
    return Claim("loss", "equal", x)


def within(x, expected=0.0):
    return Claim("loss", "within", x, expected)


def lower_by(x, expected=-0.1):
    return Claim("loss", "lower_by", x, expected)


def ratio(x, expected=1.0, measure="step_time"):
    return Claim(measure, "ratio", x, expected)


def test_students_sleep_has_the_published_verdict():
    verdict = judge(within(0.0), SECOND_DRUG, FIRST_DRUG)
    assert (verdict.outcome, verdict.pairs) == ("holds", 10)
    assert verdict.estimate == pytest.approx(-1.58)
    assert verdict.interval == pytest.approx((-2.4598858, -0.7001142), abs=1e-7)
    assert verdict.p == verdict.adjusted == pytest.approx(0.002833, abs=5e-7)
    assert verdict.p_fails == pytest.approx(1 - 0.002833 / 2, abs=3e-7)
    assert verdict.reason == "mean -1.58, 95% interval -2.46 to -0.7 from 10 seeds; the claim says at most 0; p = 0.00283"
    assert astuple(paired_interval(SECOND_DRUG, FIRST_DRUG)) == pytest.approx((-1.58, -2.4598858, -0.7001142), abs=1e-7)


# --- a second implementation, by scipy's tests of pairs and a textbook's Holm ---------------------------------------------------------


def second_p(claim: Claim, control, other) -> tuple[float, float]:
    """p-values of "holds" and "fails"."""
    if claim.question == "equal":
        above_low = stats.ttest_rel(other, np.subtract(control, claim.number), alternative="greater").pvalue
        below_high = stats.ttest_rel(other, np.add(control, claim.number), alternative="less").pvalue
        nearest = claim.number * np.sign(np.mean(other) - np.mean(control))
        far = stats.ttest_rel(other, np.add(control, nearest))
        outside = abs(np.mean(other) - np.mean(control)) > claim.number
        return max(above_low, below_high), far.pvalue if outside else 1.0
    if claim.question == "ratio":
        other, control = np.log(other), np.log(np.multiply(control, claim.number))
    elif claim.question == "within":
        control = np.add(control, claim.number)
    else:
        control = np.subtract(control, claim.number)
    return stats.ttest_rel(other, control, alternative="less").pvalue, stats.ttest_rel(other, control, alternative="greater").pvalue


def second_holm(p: list[float]) -> list[float]:
    adjusted: dict[int, float] = {}
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=lambda place: p[place])):
        largest = max(largest, (len(p) - rank) * p[place])
        adjusted[place] = min(largest, 1.0)
    return [adjusted[place] for place in range(len(p))]


def test_a_second_implementation_agrees_on_three_verdicts():
    control = [4.512, 4.498, 4.505, 4.521, 4.493]
    cases = [
        (equal(0.01), [4.513, 4.4975, 4.506, 4.52, 4.4935], "holds"),
        (within(0.02), [4.58, 4.561, 4.571, 4.584, 4.56], "fails"),
        (lower_by(0.05), [4.44, 4.46, 4.43, 4.475, 4.455], "inconclusive"),
    ]
    decided = decide([judge(claim, control, other) for claim, other, _ in cases], unmeasured=7)
    pairs = [second_p(claim, control, other) for claim, other, _ in cases]
    adjusted = second_holm([min(1.0, 2 * min(pair)) for pair in pairs] + [1.0] * 7)
    for verdict, (holds, fails), p, (_, _, outcome) in zip(decided, pairs, adjusted, cases, strict=False):
        assert verdict.p_holds == pytest.approx(holds, rel=1e-9)
        assert verdict.p_fails == pytest.approx(fails, rel=1e-9)
        assert verdict.adjusted == pytest.approx(p, rel=1e-9)
        second = "inconclusive" if p >= 0.05 else "holds" if holds < fails else "fails"
        assert verdict.outcome == second == outcome


@given(st.integers(0, 2**32), st.integers(2, 12), st.floats(-2, 2))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_p_values_and_intervals_are_those_of_scipys_paired_tests(seed, pairs, shift):
    generator = np.random.default_rng(seed)
    control = np.exp(generator.normal(size=pairs))
    other = control * np.exp(0.05 * generator.normal(shift, 1, size=pairs))
    for claim in (equal(0.01), within(0.05), lower_by(0.5), ratio(0.9)):
        verdict = judge(claim, control, other)
        holds, fails = second_p(claim, control, other)
        assert verdict.p == pytest.approx(min(1.0, 2 * min(holds, fails)), rel=1e-8)
        if claim.question != "equal":
            sides = (np.log(other), np.log(control)) if claim.question == "ratio" else (other, control)
            interval = np.array(stats.ttest_rel(*sides).confidence_interval(0.95))
            assert verdict.interval == pytest.approx(tuple(np.exp(interval) if claim.question == "ratio" else interval), rel=1e-8)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(0, 20))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_holms_correction_is_the_textbooks(p, unmeasured):
    assert holm(p, len(p) + unmeasured) == pytest.approx(second_holm(p + [1.0] * unmeasured)[: len(p)])


# --- kinds of cases -------------------------------------------------------------------------------------------------------------------


# t tables, two-sided 5% (Fisher and Yates): 12.706, 4.303, 3.182, 2.776, 2.262 for 1, 2, 3, 4 and 9 degrees of freedom.
@pytest.mark.parametrize(("pairs", "critical"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262)])
@pytest.mark.parametrize("side", [-1, 1])
def test_a_verdict_on_its_own_turns_where_the_95_percent_interval_leaves_the_bound(pairs, critical, side):
    control = [4.0 + 0.1 * i for i in range(pairs)]
    noise = np.arange(pairs) - (pairs - 1) / 2
    noise /= noise.std(ddof=1)
    for claim, bound in ((within(0.02), 0.02), (lower_by(0.02), -0.02)):
        for t, outcome in ((critical - 0.002, "inconclusive"), (critical + 0.002, "holds" if side < 0 else "fails")):
            differences = bound + 0.01 * (noise + side * t / math.sqrt(pairs))
            verdict = judge(claim, control, np.add(control, differences))
            assert (verdict.outcome, verdict.interval[0] < bound < verdict.interval[1]) == (outcome, outcome == "inconclusive")
            assert verdict.p == pytest.approx(0.05, abs=2e-4)


def test_equal_holds_only_inside_both_bounds():
    control = [4.0, 4.1, 4.2, 4.05, 4.15]
    noise = 1e-3 * np.array([-1, 1, 0.5, -0.5, 0.0])
    outcomes = [judge(equal(0.01), control, control + noise + mean).outcome for mean in (-0.03, -0.01, 0.0, 0.01, 0.03)]
    assert outcomes == ["fails", "inconclusive", "holds", "inconclusive", "fails"]
    assert judge(within(0.01), control, control + noise - 0.03).outcome == "holds"


def test_a_verdict_may_be_lost_to_the_correction_and_its_reason_says_both():
    verdict = judge(within(0.02), [4.5, 4.52, 4.49, 4.51, 4.5], [4.505, 4.53, 4.491, 4.512, 4.508])
    assert verdict.outcome == "holds" and "adjusted" not in verdict.reason
    (decided,) = decide([verdict], unmeasured=99)
    assert decided.adjusted == pytest.approx(100 * verdict.p) and decided.outcome == "inconclusive"
    assert decided.reason.startswith("mean +0.0052, 95% interval ")
    assert decided.reason.endswith("; the claim says at most +0.02; p = 0.000991, adjusted p = 0.0991 (Holm, 100 claims)")
    assert decide([]) == []


def test_ratios_have_the_geometric_mean():
    """By hand: ratios 0.5, 1 and 2 have the logarithms -ln 2, 0, ln 2, of mean 0 and deviation ln 2; t(0.975, 2) = 4.3027."""
    mean, low, high = astuple(paired_interval([1.0, 10.0, 100.0], [0.5, 10.0, 200.0], "ratio"))
    assert (mean, low, high) == pytest.approx((1.0, 2 ** (-4.3027 / math.sqrt(3)), 2 ** (4.3027 / math.sqrt(3))), rel=1e-4)


@pytest.mark.parametrize(("pairs", "estimate", "begin"), [(0, None, "no seed was run on both sides"), (1, 0.25, "+0.25 from 1 seed")])
def test_fewer_than_two_pairs_are_inconclusive(pairs, estimate, begin):
    verdict = judge(within(0.05), [4.0][:pairs], [4.25][:pairs])
    assert verdict.reason == f"{begin}; the claim says at most +0.05; a test needs 2 seeds or more"
    assert (verdict.outcome, verdict.estimate, verdict.interval, verdict.p, verdict.pairs) == ("inconclusive", estimate, None, 1.0, pairs)
    assert paired_interval([4.0][:pairs], [4.25][:pairs]) == (Interval(0.25, None, None) if pairs else None)


@pytest.mark.parametrize(
    ("claim", "control", "other", "outcome"),
    [
        (ratio(0.26, measure="bytes"), [10_000_000] * 3, [2_600_000] * 3, "holds"),  # exactly at the number, which 0.26 in fp64 is not
        (ratio(0.26, measure="bytes"), [10_000_000] * 3, [2_600_001] * 3, "fails"),
        (ratio(0.7, measure="bytes"), [3, 30, 3e9], [2.1, 21, 2.1e9], "holds"),
        (within(0.05), [0.1, 0.2, 0.7], [0.15, 0.25, 0.75], "holds"),  # 0.75 - 0.7 is above 0.05
        (within(0.05), [0.1, 0.2, 0.7], [0.1501, 0.2501, 0.7501], "fails"),
        (within(0.0), [4.0, 5.0], [4.0, 5.0], "holds"),
        (equal(0.0), [4.0, 5.0], [4.0, 5.0], "holds"),
        (equal(0.01), [4.0, 5.0], [3.99, 4.99], "holds"),
        (equal(0.01), [4.0, 5.0], [3.9899, 4.9899], "fails"),
        (lower_by(0.05), [4.0, 5.0], [3.95, 4.95], "holds"),
        (lower_by(0.05), [4.0, 5.0], [4.0, 5.0], "fails"),
    ],
)
def test_without_noise_the_number_itself_decides(claim, control, other, outcome):
    verdict = judge(claim, control, other)
    assert (verdict.outcome, verdict.adjusted) == (outcome, 0.0)
    assert (verdict.p_holds, verdict.p_fails) == ((0.0, 1.0) if outcome == "holds" else (1.0, 0.0))
    assert f"with each of {len(control)} seeds, without noise; the claim says " in verdict.reason
    assert verdict.interval == pytest.approx((verdict.estimate, verdict.estimate), abs=1e-12)
    assert decide([verdict], unmeasured=1000)[0].outcome == outcome


def test_small_noise_is_noise():
    """A thousand times rounding is tested, and decides for as long as it is small beside the gap."""
    verdict = judge(within(0.05), [1.0, 1.0, 1.0], [1.05 + 1e-9, 1.05 + 2e-9, 1.05 - 3e-9])
    assert verdict.outcome == "inconclusive"
    assert verdict.p_holds == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("claim", [equal(0.01), within(0.05), lower_by(0.05)])
@pytest.mark.parametrize("other", [[math.inf], [3.9, math.inf, 4.0]])
def test_a_diverged_seed_fails_a_claim_about_the_loss(claim, other):
    verdict = judge(claim, [4.0] * len(other), other)
    assert (verdict.outcome, verdict.p_holds, verdict.p_fails, verdict.estimate, verdict.interval) == ("fails", 1.0, 0.0, None, None)
    seeds = "1 seed" if len(other) == 1 else "3 seeds"
    assert verdict.reason == f"1 of {seeds} diverged under the recipe but not under the control"


@pytest.mark.parametrize(("control", "other"), [([0.0, 0.0], [0.0, 0.0]), ([5.0], [0.0]), ([5.0, 5.0], [1.0, -1.0])])
def test_ratios_of_numbers_that_are_not_positive_are_inconclusive(control, other):
    verdict = judge(ratio(0.5, measure="bytes"), control, other)
    assert (verdict.outcome, verdict.estimate, verdict.interval, verdict.p_holds) == ("inconclusive", None, None, None)
    assert verdict.reason == f"bytes: a run has {min(control + other):g}, and a ratio needs numbers above 0"
    assert paired_interval(control, other, "ratio") is None


@pytest.mark.filterwarnings("error")
def test_the_unit_of_a_ratio_changes_no_verdict():
    control, other = np.array([4.0, 5.0, 6.0, 4.0]), np.array([4.5, 5.75, 6.625, 4.375])
    for number, expected in ((1.5, "holds"), (1.0, "fails"), (1.13, "inconclusive")):
        verdicts = [judge(ratio(number), control * scale, other * scale) for scale in (1e-300, 1e-20, 1.0, 1e20, 1e300)]
        assert {verdict.outcome for verdict in verdicts} == {expected}
        assert [verdict.p for verdict in verdicts] == pytest.approx([verdicts[2].p] * 5, rel=1e-6)


# --- planning -------------------------------------------------------------------------------------------------------------------------


def test_the_planned_power_is_as_published():
    """Two-sided tests at 5% of pairs with an effect of 0.5 deviations need 34, 44 and 54 for a power of 0.8, 0.9 and 0.95 (G*Power 3.1)."""
    for power, seeds in ((0.8, 34), (0.9, 44), (0.95, 54)):
        for claim, deviation in (
            (within(0.05), 0.1),
            (Claim("loss", "lower_by", 0.05, -0.1), 0.1),
            (Claim("step_time", "ratio", math.exp(0.5), 1.0), 1.0),
        ):
            assert planned_power(claim, seeds - 1, deviation, 1) < power <= planned_power(claim, seeds, deviation, 1)


@pytest.mark.parametrize("claims", [1, 35])
@pytest.mark.parametrize("seeds", [2, 5, 30])
def test_the_planned_power_is_that_of_the_noncentral_t(seeds, claims):
    """Of one bound; of two, it is at least 1 - the two risks of missing one, and at most the power of one."""
    for effect in (0.1, 0.5, 1.0, 3.0):
        of_one = stats.nct.sf(stats.t.isf(0.025 / claims, seeds - 1), seeds - 1, effect * math.sqrt(seeds))
        assert planned_power(within(0.01), seeds, 0.01 / effect, claims) == pytest.approx(of_one, abs=1e-3)
        both = planned_power(equal(0.01), seeds, 0.01 / effect, claims)
        assert max(0.0, 2 * of_one - 1) - 1e-3 <= both <= of_one + 1e-3


def test_planning_at_its_ends():
    assert planned_power(within(0.01, expected=0.01), 1000, 0.1, 35) < 0.05, "the truth is at the bound"
    assert planned_power(within(0.01, expected=0.02), 2, 0.0, 35) == 0
    assert planned_power(equal(0.01), 1000, 1.0, 35) < 0.05
    assert planned_power(equal(0.01), 2, 0.0, 35) == 1
    assert planned_power(equal(0.01), 2, 1e-9, 35) == pytest.approx(1)
    for seeds, deviation, claims in ((1, 1.0, 1), (5, math.nan, 1), (5, -1.0, 1), (5, 1.0, 0)):
        with pytest.raises(ValueError, match="must be finite"):
            planned_power(equal(0.01), seeds, deviation, claims)
