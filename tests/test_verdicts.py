"""Verdicts: figures as published or computed another way, each kind of case, and what is refused."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest

from launch.comparison.verdicts import Interval, judge, paired_interval
from recipes.claims import Claim

# Hours of sleep that ten patients gained by two drugs, of Student, The probable error of a mean, Biometrika 6 (1908). R's `t.test(paired
# = TRUE)` of them is in its documentation of `sleep`: t = -4.0621, df = 9, p = 0.002833, 95% interval -2.4598858 to -0.7001142, mean -1.58.
SECOND_DRUG = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
FIRST_DRUG = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]


def equal(x):
    return Claim("loss", "equal", x)


def within(x):
    return Claim("loss", "within", x)


def lower_by(x):
    return Claim("loss", "lower_by", x)


def ratio(x, measure="step_time"):
    return Claim(measure, "ratio", x)


def test_students_sleep_has_the_published_verdict():
    verdict = judge(within(0.0), SECOND_DRUG, FIRST_DRUG)
    assert verdict.outcome == "holds"
    assert verdict.reason == "mean -1.58, 95% interval -2.46 to -0.7 from 10 seeds; the claim says at most 0"
    assert astuple(verdict.found) == pytest.approx((-1.58, -2.4598858, -0.7001142), abs=1e-7)


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
            assert (verdict.outcome, verdict.found.low < bound < verdict.found.high) == (outcome, outcome == "inconclusive")


def test_ratios_have_the_geometric_mean():
    """By hand: ratios 0.5, 1 and 2 have the logarithms -ln 2, 0, ln 2, of mean 0 and deviation ln 2; t(0.975, 2) = 4.3027."""
    mean, low, high = astuple(paired_interval([1.0, 10.0, 100.0], [0.5, 10.0, 200.0], "ratio"))
    assert (mean, low, high) == pytest.approx((1.0, 2 ** (-4.3027 / math.sqrt(3)), 2 ** (4.3027 / math.sqrt(3))), rel=1e-4)


@pytest.mark.parametrize(("pairs", "estimate", "begin"), [(0, None, "no seed was run on both sides"), (1, 0.25, "+0.25 from 1 seed")])
def test_fewer_than_two_pairs_are_inconclusive(pairs, estimate, begin):
    verdict = judge(within(0.05), [4.0][:pairs], [4.25][:pairs])
    assert verdict.reason == f"{begin}; the claim says at most +0.05; a test needs 2 seeds or more"
    assert (verdict.outcome, verdict.found) == ("inconclusive", estimate and Interval(estimate, None, None))


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
    assert verdict.outcome == outcome
    assert f"with each of {len(control)} seeds, without noise; the claim says " in verdict.reason
    assert verdict.found.low == pytest.approx(verdict.found.high, abs=1e-12)


@pytest.mark.parametrize("claim", [equal(0.01), within(0.05), lower_by(0.05)])
@pytest.mark.parametrize("other", [[math.inf], [3.9, math.inf, 4.0]])
def test_a_diverged_seed_fails_a_claim_about_the_loss(claim, other):
    verdict = judge(claim, [4.0] * len(other), other)
    assert (verdict.outcome, verdict.found) == ("fails", None)
    seeds = "1 seed" if len(other) == 1 else "3 seeds"
    assert verdict.reason == f"1 of {seeds} diverged under the recipe but not under the control"


@pytest.mark.parametrize(("control", "other"), [([0.0, 0.0], [0.0, 0.0]), ([5.0], [0.0]), ([5.0, 5.0], [1.0, -1.0])])
def test_ratios_of_numbers_that_are_not_positive_are_inconclusive(control, other):
    verdict = judge(ratio(0.5, measure="bytes"), control, other)
    assert (verdict.outcome, verdict.found) == ("inconclusive", None)
    assert verdict.reason == f"bytes: a run has {min(control + other):g}, and a ratio needs numbers above 0"
    assert paired_interval(control, other, "ratio") is None


def test_equal_holds_only_inside_both_bounds():
    control = [4.0, 4.1, 4.2, 4.05, 4.15]
    noise = 1e-3 * np.array([-1, 1, 0.5, -0.5, 0.0])
    outcomes = [judge(equal(0.01), control, control + noise + mean).outcome for mean in (-0.03, -0.01, 0.0, 0.01, 0.03)]
    assert outcomes == ["fails", "inconclusive", "holds", "inconclusive", "fails"]
    assert judge(within(0.01), control, control + noise - 0.03).outcome == "holds"
    tiny = judge(within(0.05), [1.0, 1.0, 1.0], [1.05 + 1e-9, 1.05 + 2e-9, 1.05 - 3e-9])
    assert tiny.outcome == "inconclusive", "noise above the rounding of fp64 is noise"
