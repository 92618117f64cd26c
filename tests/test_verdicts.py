"""Verdicts: figures as published or computed another way, each kind of case, and what is refused."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from launch.comparison.verdicts import Interval, judge, paired_interval, seeds_needed

# Hours of sleep that ten patients gained by two drugs, of Student, The probable error of a mean, Biometrika 6 (1908). R's `t.test(paired
# = TRUE)` of them is in its documentation of `sleep`: t = -4.0621, df = 9, p = 0.002833, 95% interval -2.4598858 to -0.7001142, mean -1.58.
SECOND_DRUG = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
FIRST_DRUG = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]


def test_students_sleep_has_the_published_verdict():
    verdict = judge("loss_within", 0.0, SECOND_DRUG, FIRST_DRUG)
    assert (verdict.outcome, verdict.pairs, verdict.seeds_needed) == ("holds", 10, None)
    assert verdict.estimate == pytest.approx(-1.58)
    assert verdict.interval == pytest.approx((-2.4598858, -0.7001142), abs=1e-7)
    assert verdict.p_holds == pytest.approx(0.002833 / 2, abs=3e-7)  # one-sided; published to 6 decimals
    assert verdict.p_fails == pytest.approx(1 - 0.002833 / 2, abs=3e-7)
    assert verdict.reason == "mean -1.58, 95% interval -2.46 to -0.7 from 10 seeds; the claim says at most 0 (one-sided p = 0.00142)"
    assert astuple(paired_interval(SECOND_DRUG, FIRST_DRUG)) == pytest.approx((-1.58, -2.4598858, -0.7001142), abs=1e-7)


# t tables, one-sided 5% (Fisher and Yates): 6.314, 2.920, 2.353, 2.132, 1.833 for 1, 2, 3, 4 and 9 degrees of freedom.
@pytest.mark.parametrize(("pairs", "critical"), [(2, 6.314), (3, 2.920), (4, 2.353), (5, 2.132), (10, 1.833)])
@pytest.mark.parametrize("side", [-1, 1])
def test_the_verdict_turns_where_the_t_table_says(pairs, critical, side):
    control = [4.0 + 0.1 * i for i in range(pairs)]
    noise = np.arange(pairs) - (pairs - 1) / 2
    noise /= noise.std(ddof=1)
    for claim, bound in (("loss_within", 0.02), ("loss_lower_by", -0.02)):
        for t, outcome in ((critical - 0.002, "inconclusive"), (critical + 0.002, "holds" if side < 0 else "fails")):
            differences = bound + 0.01 * (noise + side * t / math.sqrt(pairs))
            verdict = judge(claim, 0.02, control, np.add(control, differences))
            assert verdict.outcome == outcome
            assert min(verdict.p_holds, verdict.p_fails) == pytest.approx(0.05, abs=2e-4)


@given(st.integers(0, 2**32), st.integers(2, 12), st.floats(-2, 2))
@settings(max_examples=50, deadline=None)
def test_p_values_and_intervals_are_those_of_scipys_paired_tests(seed, pairs, shift):
    generator = np.random.default_rng(seed)
    control = np.exp(generator.normal(size=pairs))
    other = control * np.exp(generator.normal(shift, 1, size=pairs))
    for claim, bound, before, after in (
        ("loss_within", 0.5, control, other),
        ("loss_lower_by", -0.5, control, other),
        ("step_time_ratio", math.log(0.5), np.log(control), np.log(other)),
        ("throughput_ratio", math.log(0.5), np.log(control), np.log(other)),
    ):
        verdict = judge(claim, 0.5, control, other)
        holds, fails = ("greater", "less") if claim == "throughput_ratio" else ("less", "greater")
        assert verdict.p_holds == pytest.approx(stats.ttest_rel(after, before + bound, alternative=holds).pvalue, rel=1e-9)
        assert verdict.p_fails == pytest.approx(stats.ttest_rel(after, before + bound, alternative=fails).pvalue, rel=1e-9)
        interval = np.array(stats.ttest_rel(after, before).confidence_interval(0.95))
        assert verdict.interval == pytest.approx(tuple(np.exp(interval) if "ratio" in claim else interval), rel=1e-9)
        if verdict.outcome == "inconclusive":
            assert verdict.seeds_needed is None or verdict.seeds_needed > pairs


def test_ratios_have_the_geometric_mean():
    """By hand: ratios 0.5, 1 and 2 have the logarithms -ln 2, 0, ln 2, of mean 0 and deviation ln 2; t(0.975, 2) = 4.3027."""
    mean, low, high = astuple(paired_interval([1.0, 10.0, 100.0], [0.5, 10.0, 200.0], "ratio"))
    assert (mean, low, high) == pytest.approx((1.0, 2 ** (-4.3027 / math.sqrt(3)), 2 ** (4.3027 / math.sqrt(3))), rel=1e-4)


def test_at_least_is_at_most_mirrored():
    slow, fast = [1000.0, 1100.0, 1050.0], [1200.0, 1290.0, 1275.0]
    speed = judge("throughput_ratio", 1.1, slow, fast)
    time = judge("step_time_ratio", 1 / 1.1, [1 / value for value in slow], [1 / value for value in fast])
    assert (speed.outcome, speed.p_holds, speed.p_fails) == ("holds", pytest.approx(time.p_holds), pytest.approx(time.p_fails))
    assert judge("throughput_ratio", 1.3, slow, fast).outcome == "fails"


def test_an_inconclusive_verdict_says_how_many_seeds_would_decide():
    verdict = judge("loss_within", 0.02, [4.50, 4.52, 4.49], [4.515, 4.55, 4.491])
    assert verdict.outcome == "inconclusive"
    assert verdict.seeds_needed == seeds_needed(0.0153333 - 0.02, np.std([0.015, 0.03, 0.001], ddof=1))
    assert (
        verdict.reason
        == "mean +0.0153, 95% interval -0.0207 to +0.0514 from 3 seeds; the claim says at most +0.02; about 62 seeds would decide"
    )


def test_more_seeds_than_anybody_runs_are_said_to_be():
    verdict = judge("loss_within", 0.0, [1.0, 2.0], [1.125, 1.875])
    assert (verdict.outcome, verdict.seeds_needed, verdict.p_holds) == ("inconclusive", None, 0.5)
    assert verdict.reason.endswith("; more than 1,000 seeds would decide")


@pytest.mark.parametrize(("pairs", "estimate", "begin"), [(0, None, "no seed was run on both sides"), (1, 0.25, "+0.25 from 1 seed")])
def test_fewer_than_two_pairs_are_inconclusive(pairs, estimate, begin):
    verdict = judge("loss_within", 0.5, [4.0][:pairs], [4.25][:pairs])
    assert verdict.outcome == "inconclusive"
    assert verdict.reason == f"{begin}; the claim says at most +0.5; a test needs 2 seeds or more, so run {2 - pairs} more"
    assert (verdict.estimate, verdict.interval, verdict.p_holds, verdict.p_fails, verdict.seeds_needed) == (
        estimate,
        None,
        None,
        None,
        None,
    )
    assert verdict.pairs == pairs
    assert paired_interval([4.0][:pairs], [4.25][:pairs]) == (Interval(0.25, None, None) if pairs else None)


@pytest.mark.parametrize(
    ("claim", "threshold", "control", "other", "outcome"),
    [
        ("bytes_ratio", 0.26, [10_000_000] * 3, [2_600_000] * 3, "holds"),  # exactly at the number, which 0.26 in fp64 is not
        ("bytes_ratio", 0.26, [10_000_000] * 3, [2_600_001] * 3, "fails"),
        ("bytes_ratio", 0.7, [3, 30, 3e9], [2.1, 21, 2.1e9], "holds"),
        ("loss_within", 0.1, [0.1, 0.2, 0.7], [0.2, 0.3, 0.8], "holds"),  # 0.3 - 0.2 is 0.09999999999999998, and 0.8 - 0.7 above 0.1
        ("loss_within", 0.1, [0.1, 0.2, 0.7], [0.2001, 0.3001, 0.8001], "fails"),
        ("loss_within", 0.0, [4.0, 5.0], [4.0, 5.0], "holds"),
        ("loss_lower_by", 0.05, [4.0, 5.0], [3.95, 4.95], "holds"),
        ("loss_lower_by", 0.05, [4.0, 5.0], [4.0, 5.0], "fails"),
        ("throughput_ratio", 1.1, [10.0, 20.0], [11.0, 22.0], "holds"),
        ("throughput_ratio", 1.1, [10.0, 20.0], [10.9, 21.8], "fails"),
    ],
)
def test_without_noise_the_number_itself_decides(claim, threshold, control, other, outcome):
    verdict = judge(claim, threshold, control, other)
    assert (verdict.outcome, verdict.seeds_needed) == (outcome, None)
    assert (verdict.p_holds, verdict.p_fails) == ((0.0, 1.0) if outcome == "holds" else (1.0, 0.0))
    assert f"with each of {len(control)} seeds, without noise; the claim says at" in verdict.reason
    assert verdict.interval == pytest.approx((verdict.estimate, verdict.estimate), abs=1e-12)


def test_small_noise_is_noise():
    """A thousand times rounding is tested, and decides for as long as it is small beside the gap."""
    verdict = judge("loss_within", 0.1, [1.0, 1.0, 1.0], [1.1 + 1e-9, 1.1 + 2e-9, 1.1 - 3e-9])
    assert verdict.outcome == "inconclusive"
    assert verdict.p_holds == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("claim", ["loss_within", "loss_lower_by"])
@pytest.mark.parametrize("other", [[math.inf], [3.9, math.inf, 4.0]])
def test_a_diverged_seed_fails_a_claim_about_the_loss(claim, other):
    verdict = judge(claim, 0.5, [4.0] * len(other), other)
    assert (verdict.outcome, verdict.p_holds, verdict.p_fails, verdict.estimate, verdict.interval) == ("fails", 1.0, 0.0, None, None)
    seeds = "1 seed" if len(other) == 1 else "3 seeds"
    assert verdict.reason == f"1 of {seeds} diverged under the recipe but not under the control"


@pytest.mark.parametrize(("control", "other"), [([0.0, 0.0], [0.0, 0.0]), ([5.0], [0.0]), ([5.0, 5.0], [1.0, -1.0])])
def test_ratios_of_numbers_that_are_not_positive_are_inconclusive(control, other):
    verdict = judge("bytes_ratio", 0.5, control, other)
    assert (verdict.outcome, verdict.estimate, verdict.interval, verdict.p_holds) == ("inconclusive", None, None, None)
    assert verdict.reason == f"the bytes that a rank sends: a run has {min(control + other):g}, and a ratio needs numbers above 0"
    assert paired_interval(control, other, "ratio") is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-300, 1e-20, 1.0, 1e20, 1e300])
def test_neither_huge_nor_tiny_numbers_change_a_verdict(scale):
    control, other = np.array([4.0, 5.0, 6.0]) * scale, np.array([4.5, 5.75, 6.625]) * scale  # differences 0.5, 0.75, 0.625
    for claim, threshold, outcome in (
        ("loss_within", 0.9 * scale, "holds"),
        ("loss_within", 0.3 * scale, "fails"),
        ("loss_within", 0.65 * scale, "inconclusive"),
        ("step_time_ratio", 1.25, "holds"),
    ):
        plain = judge(claim, threshold / (scale if claim == "loss_within" else 1), control / scale, other / scale)
        scaled = judge(claim, threshold, control, other)
        assert (scaled.outcome, plain.outcome) == (outcome, outcome)
        assert scaled.p_holds == pytest.approx(plain.p_holds, rel=1e-6)
        assert scaled.seeds_needed == plain.seeds_needed
        assert len(scaled.reason) < 200
    wide = judge("step_time_ratio", 1, [1e-300, 1e300, 1.0], [1e300, 1e-300, 1.1])
    assert (wide.outcome, wide.interval) == ("inconclusive", (0.0, math.inf))


def test_seeds_needed_is_as_published():
    """The manual of G*Power 3.1, section "Difference from constant": d = 0.625, one tail, power 0.95 -> 30; the tables of Cohen (1988)
    and G*Power have 27 for d = 0.5 at 0.80. Machin's formula (z_alpha + z_beta)^2 / d^2 + z_alpha^2 / 2 approximates many.
    """
    assert seeds_needed(0.625, 1, power=0.95) == 30
    assert seeds_needed(0.5, 1) == seeds_needed(-5e-9, 1e-8) == seeds_needed(5e9, 1e10) == 27
    for effect in (0.1, 0.15, 0.2, 0.3):
        z_alpha, z_beta = stats.norm.ppf([0.95, 0.8])
        assert seeds_needed(effect, 1) == pytest.approx(((z_alpha + z_beta) / effect) ** 2 + z_alpha**2 / 2, abs=1)


def test_seeds_needed_have_the_power_and_one_fewer_has_not():
    """The power by its definition, the integral over the sample's deviation s of P(z > t s - effect sqrt(n)), without a noncentral t."""

    def power(effect: float, pairs: int) -> float:
        critical = stats.t.isf(0.05, pairs - 1)

        def density(s: float) -> float:
            variance = s * s * (pairs - 1)  # of chi squared; dx = 2 s (n - 1) ds
            return stats.chi2.pdf(variance, pairs - 1) * 2 * s * (pairs - 1) * stats.norm.sf(critical * s - effect * math.sqrt(pairs))

        return integrate.quad(density, 0, 1 + 12 / math.sqrt(2 * (pairs - 1)), limit=200)[0]

    for effect in (0.2, 0.5, 1.0, 1.5, 2.0, 3.0):
        pairs = seeds_needed(effect, 1)
        assert power(effect, pairs) >= 0.8
        assert pairs == 2 or power(effect, pairs - 1) < 0.8


def test_seeds_needed_at_its_ends():
    assert seeds_needed(0, 1) is None
    assert seeds_needed(0, 0) is None
    assert seeds_needed(0.078, 1) is None  # 1,018
    assert seeds_needed(0.079, 1) <= 1000
    assert seeds_needed(1e-9, 0) == seeds_needed(1e300, 1e-300) == seeds_needed(-50, 1) == 2
    for gap, deviation in ((math.nan, 1), (math.inf, 1), (1, math.nan), (1, -1)):
        with pytest.raises(ValueError, match="must be finite"):
            seeds_needed(gap, deviation)
