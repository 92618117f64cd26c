"""How often a table of claims has a wrong verdict, over thousands of simulated tables whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from launch.comparison.verdicts import _bounds, _p_values, decide, holm, judge, planned_power
from recipes.claims import Claim

TABLES = 2_000
SEEDS = 5
#: 5%, and two of the deviations that a share of 2,000 tables has: sqrt(0.05 x 0.95 / 2,000) = 0.49%.
MOST_WRONG = 0.06
EQUAL, WITHIN, LOWER = Claim("loss", "equal", 0.01), Claim("loss", "within", 0.03), Claim("loss", "lower_by", 0.05, -0.1)
RATIO = Claim("step_time", "ratio", 0.85, 0.7)
TABLE = [*[EQUAL] * 14, *[WITHIN] * 8, *[LOWER] * 7, *[RATIO] * 6]
#: Of the noise of a run, in nats or logarithms. The largest is 50 times the margin of `EQUAL`.
DEVIATIONS = (1e-4, 0.002, 0.01, 0.1, 0.5)


def simulated(claim, generator, deviation, gap=0.0, count=TABLES, seeds=SEEDS, control=None):
    """Control and recipe, (count, seeds) each, whose truth is `gap` above the claim's upper bound.

    The deviation of the control, or of the pairs if `control` is given, is `deviation`.
    """
    level = 7.0 if claim.scale == "ratio" else 4.0
    before = generator.normal(level, deviation, (count, seeds)) if control is None else control
    after = generator.normal(level, deviation, (count, seeds)) + _bounds(claim)[1] + gap
    return (np.exp(before), np.exp(after)) if claim.scale == "ratio" else (before, after)


def p_of(claim, control, other):
    """(count,): the p-values as `Verdict.p` has them."""
    p_holds, p_fails, _ = _p_values(claim, control, other)
    return np.minimum(1.0, 2 * np.minimum(p_holds, p_fails))


def share_wrong(p):
    """The share of tables in which any claim has a verdict; with the truth at its bound, each is wrong."""
    return float((holm(p, len(TABLE)) < 0.05).any(axis=-1).mean())


@pytest.mark.parametrize("deviation", [*DEVIATIONS, "each another"])
@pytest.mark.parametrize("shared", [False, True])
def test_few_tables_have_a_wrong_verdict(deviation, shared):
    """The truth of each claim is at its bound. With `shared`, one control is compared with all recipes."""
    generator = np.random.default_rng([len(str(deviation)), shared])
    deviations = DEVIATIONS if deviation == "each another" else (deviation,)
    common = generator.normal(4, deviations[0], (TABLES, SEEDS))
    columns = []
    for place, claim in enumerate(TABLE):
        own = deviations[place % len(deviations)]
        control = (common - 4) * own / deviations[0] + (7 if claim is RATIO else 4) if shared else None
        columns.append(p_of(claim, *simulated(claim, generator, own, control=control)))
    p = np.stack(columns, axis=1)
    assert share_wrong(p) <= MOST_WRONG
    assert share_wrong(p[:, ::2]) <= MOST_WRONG  # the other half of the claims is not measured
    later = holm(p, len(TABLE))[:, ::2]
    assert (later <= holm(p[:, ::2], len(TABLE)) + 1e-15).all()  # no later result takes a verdict away


def test_claims_that_are_decided_leave_the_others_their_error_rate():
    """Of half of the claims the truth is clear, so that Holm's method corrects the others for fewer claims."""
    generator = np.random.default_rng(1)
    clear = [p_of(claim, *simulated(claim, generator, 0.002, gap=0.2)) for claim in TABLE[::2]]
    at_bound = [p_of(claim, *simulated(claim, generator, 0.01)) for claim in TABLE[1::2]]
    found = holm(np.stack([*clear, *at_bound], axis=1), len(TABLE)) < 0.05
    assert found[:, : len(clear)].mean() > 0.99
    assert found[:, len(clear) :].any(axis=1).mean() <= MOST_WRONG


@pytest.mark.parametrize("claim", [EQUAL, WITHIN, LOWER, RATIO], ids=lambda claim: claim.question)
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_a_claim_at_its_bound_is_decided_in_one_of_twenty_experiments(claim, deviation):
    control, other = simulated(claim, np.random.default_rng(2), deviation, count=20_000)
    assert (p_of(claim, control, other) < 0.05).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 20_000)


def test_equality_fails_rarely_wherever_the_truth_is_inside():
    """The null hypothesis of "fails" is composite: at 5% for each true mean in it, and for any noise."""
    for mean in (0.0, 0.005, 0.01, -0.01):
        for deviation in DEVIATIONS:
            control, other = simulated(EQUAL, np.random.default_rng(3), deviation, gap=mean - 0.01, count=20_000)
            assert (_p_values(EQUAL, control, other)[1] < 0.05).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 20_000)


@pytest.mark.parametrize("claim", [EQUAL, WITHIN, LOWER, RATIO], ids=lambda claim: claim.question)
@pytest.mark.parametrize("deviation", [0.003, 0.01, 0.03])
def test_the_planned_power_is_that_of_simulated_experiments(claim, deviation):
    """The noise of a pair is sqrt(2) x that of a run; a table of 20 claims, without the gain of Holm's method over Bonferroni's."""
    expected = math.log(claim.expected) if claim.scale == "ratio" else claim.expected
    for count in (3, 5, 20):
        sides = simulated(claim, np.random.default_rng(4), deviation, gap=expected - _bounds(claim)[1], count=10_000, seeds=count)
        p_holds, _, _ = _p_values(claim, *sides)
        found = float((2 * p_holds < 0.05 / 20).mean())
        assert planned_power(claim, count, math.sqrt(2) * deviation, 20) == pytest.approx(found, abs=4 * math.sqrt(0.25 / 10_000))


def test_one_table_is_decided_as_among_thousands():
    generator = np.random.default_rng(5)
    sides = [simulated(claim, generator, 0.01, gap=gap, count=8) for claim, gap in zip(TABLE, np.linspace(-0.2, 0.2, 35), strict=True)]
    p = np.stack([p_of(claim, *one) for claim, one in zip(TABLE, sides, strict=True)], axis=1)
    outcomes = set()
    for row in range(8):
        verdicts = [judge(claim, *(side[row] for side in one)) for claim, one in zip(TABLE, sides, strict=True)]
        decided = decide(verdicts, unmeasured=5)
        assert [one.adjusted for one in decided] == pytest.approx(holm(p[row], 40), rel=1e-9)
        outcomes |= {one.outcome for one in decided}
    assert outcomes == {"holds", "fails", "inconclusive"}
