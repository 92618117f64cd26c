"""How often a verdict is wrong, and how often there is one, over thousands of simulated experiments whose truth is known.

`judge` decides one experiment by `_excess` and `_p_values`; here the two decide thousands at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from launch.comparison.verdicts import _excess, _p_values, judge, seeds_needed
from recipes.claims import CLAIMS

Noise = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]

#: 5%, and three of the deviations that a share of 10,000 experiments has: sqrt(0.05 x 0.95 / 10,000) = 0.218%. The experiments are
#: 20,000, so that chance alone, 0.154%, is four deviations away from it.
EXPERIMENTS = 20_000
MOST_WRONG = 0.05 + 3 * 0.00218
THRESHOLDS = {"loss_within": 0.02, "loss_lower_by": 0.05, "throughput_ratio": 1.2}


def normal(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.normal(size=shape)


def exponential(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A long tail upwards, as waiting for others has; skewness 2."""
    return generator.exponential(size=shape)


def lognormal(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Skewness 6: now and then a run that takes several times the others'."""
    return generator.lognormal(size=shape)


def simulated(
    claim: str, pairs: int, deviation: float, common: float, noise: Noise, gap: float = 0.0
) -> tuple[float, np.ndarray, np.ndarray]:
    """The claim's number, and control and recipe, (experiments, pairs) each, whose truth is `gap` above that number.

    `noise` x `deviation` comes to each run, `common` x a normal number to both runs of a seed; of ratios all are in logarithms.
    """
    kind, threshold = CLAIMS[claim], THRESHOLDS.get(claim, 0.85)
    # One stream of numbers a case, so that a case does not depend on which others run.
    generator = np.random.default_rng([*claim.encode(), pairs, round(1e6 * deviation), round(1e6 * common), *noise.__name__.encode()])
    shape = (EXPERIMENTS, pairs)
    seeds = common * generator.normal(size=shape)
    control, other = (seeds + deviation * noise(generator, shape) for _ in range(2))
    bound = kind.bound(threshold)
    if kind.scale == "ratio":
        return threshold, np.exp(7 + control), np.exp(7 + math.log(bound) + gap + other)
    return threshold, 4 + control, 4 + bound + gap + other


def told(claim: str, threshold: float, control: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(experiments,) each: which are told that the claim holds, and which that it fails."""
    kind = CLAIMS[claim]
    p_holds, p_fails = _p_values(*_excess(kind, kind.bound(threshold), control, other))
    return p_holds < 0.05, p_fails < 0.05


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("pairs", [2, 3, 5, 10])
def test_a_wrong_verdict_comes_in_one_of_twenty_experiments(claim, pairs):
    """With normal noise exactly so, for any deviation and however much the two runs of a seed have in common."""
    for deviation in (1e-4, 0.01, 0.2):
        for common in (0.0, 5 * deviation):
            holds, fails = told(claim, *simulated(claim, pairs, deviation, common, normal))
            assert not (holds & fails).any()
            assert abs(holds.mean() - 0.05) <= MOST_WRONG - 0.05, (deviation, common)
            assert abs(fails.mean() - 0.05) <= MOST_WRONG - 0.05, (deviation, common)


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("noise", [exponential, lognormal])
def test_skewed_noise_of_both_sides_makes_wrong_verdicts_no_commoner(claim, noise):
    for pairs in (2, 3, 5, 10):
        for deviation, common in ((0.01, 0.0), (0.2, 1.0)):
            holds, fails = told(claim, *simulated(claim, pairs, deviation, common, noise))
            assert max(holds.mean(), fails.mean()) <= MOST_WRONG, (pairs, deviation)


def test_slow_steps_of_a_run_do_not_decide():
    """Times of 60 steps, of which one in ten waits for twice as long on average: their median is taken of each run, as in a report."""
    generator = np.random.default_rng(0)
    steps = generator.lognormal(0, 0.05, (2, EXPERIMENTS // 4, 3, 60))
    steps *= np.where(generator.random(steps.shape) < 0.1, 1 + generator.exponential(size=steps.shape), 1)
    control, other = np.median(steps, axis=-1)
    holds, fails = told("step_time_ratio", 0.85, control, 0.85 * other)
    assert max(holds.mean(), fails.mean()) <= 0.05 + 3 * 0.00308  # of 5,000


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("effect", [0.3, 0.6, 1.2, 2.5, -0.6, -1.2])
def test_the_seeds_that_are_said_to_be_needed_give_a_verdict_in_four_of_five(claim, effect):
    """The gap of the truth is `effect` deviations of a pair's difference, which is sqrt(2) x that of a run; one seed fewer is too few."""
    deviation = 0.02
    gap = effect * math.sqrt(2) * deviation
    pairs = seeds_needed(gap, math.sqrt(2) * deviation)
    wrong_side = (gap > 0) == (CLAIMS[claim].direction == "at most")
    tolerance = 4 * math.sqrt(0.8 * 0.2 / EXPERIMENTS)

    def right(count: int) -> float:
        holds, fails = told(claim, *simulated(claim, count, deviation, 0.1, normal, gap))
        return float((fails if wrong_side else holds).mean())

    assert right(pairs) >= 0.8 - tolerance
    assert right(pairs - 1) < 0.8 + tolerance


@pytest.mark.parametrize("claim", CLAIMS)
def test_one_experiment_is_told_what_it_is_told_among_thousands(claim):
    outcomes = set()
    for gap in (-0.05, 0.0, 0.05):
        threshold, control, other = simulated(claim, 3, 0.02, 0.1, normal, gap)
        holds, fails = told(claim, threshold, control[:60], other[:60])
        for row in range(60):
            outcome = judge(claim, threshold, list(control[row]), list(other[row])).outcome
            assert outcome == ("holds" if holds[row] else "fails" if fails[row] else "inconclusive")
            outcomes.add(outcome)
    assert len(outcomes) == 3
