"""The time to a target loss: known ratios are found on simulated curves, and runs that do not reach the target are never dropped."""

from __future__ import annotations

import math

import numpy as np
import pytest

from launch.comparison.time_to_target import Reached, ratio_to_target, reached_at

EVALUATIONS = np.linspace(0, 1, 26)  # every 4% of the run, and at its start


def power_law(x):
    return 3.3 + 1.6 * (x + 0.03) ** -0.25


def with_cosine_decay(x):
    """A power law in the sum of the rates, and lower as the rate falls: 20% of a run warm-up, then a cosine to a tenth, and on."""
    grid = np.linspace(0, 2, 4001)
    rate = np.where(grid < 0.2, grid / 0.2, 0.1 + 0.45 * (1 + np.cos(np.pi * np.clip((grid - 0.2) / 0.8, 0, 1))))
    total = np.cumsum(rate) / rate[:2001].sum()
    return 3.6 + 1.3 * (np.interp(x, grid, total) + 0.02) ** -0.22 - 0.15 * (1 - np.interp(x, grid, rate)) * np.minimum(x / 0.2, 1)


def simulated(curve, at, noise, between_seeds, ratio=1.25, experiments=400, seeds=5):
    """The mean of the estimated ratios, and the share of 95% intervals that cover the true one.

    The recipe reaches the target at `at` of its run, and the control at `at` / `ratio`.
    """
    generator = np.random.default_rng([round(100 * at), round(1000 * noise)])
    target = float(curve(np.array(at / ratio)))

    def side(slower):
        losses = curve(EVALUATIONS / slower) + between_seeds * generator.normal(size=(experiments, seeds, 1))
        losses = losses + noise * generator.normal(size=(experiments, seeds, len(EVALUATIONS)))
        return [{seed: reached_at(EVALUATIONS, loss, target) for seed, loss in enumerate(one)} for one in losses]

    everything = [ratio_to_target(*sides) for sides in zip(side(1), side(ratio), strict=True)]
    found = [one for one in everything if one.bound == ""]
    assert len(found) >= 0.99 * experiments
    covered = np.mean([one.ratio.low <= ratio <= one.ratio.high for one in found])
    return math.exp(np.mean([math.log(one.ratio.mean) for one in found])), covered


@pytest.mark.parametrize("curve", [power_law, with_cosine_decay])
@pytest.mark.parametrize(("at", "noise", "between_seeds"), [(0.4, 0.01, 0.01), (0.6, 0.003, 0.01), (0.75, 0.03, 0.02)])
def test_a_known_ratio_is_found_and_covered(curve, at, noise, between_seeds):
    mean, covered = simulated(curve, at, noise, between_seeds)
    assert mean == pytest.approx(1.25, rel=0.03)
    assert covered >= 0.93


def test_the_target_is_reached_on_the_line_between_evaluations():
    x, loss = np.arange(6.0), np.array([math.nan, 6, 4, math.nan, 4, 2])
    assert reached_at(x, loss, 5.0) == Reached(2.0)  # 4 at 2 and at 4 is one block, with its centre at 3
    assert reached_at(x, loss, 3.0) == Reached(4.0)
    assert reached_at(x, loss, 7.0) == Reached(1.0)
    assert reached_at(x, loss, 2.0) == Reached(5.0)
    assert reached_at(x, loss, 1.0) == Reached(5.0, censored=True)
    assert reached_at(x, np.full(6, math.nan), 1.0) is None


def test_one_evaluation_out_of_order_is_not_the_first_crossing():
    loss = np.array([8.0, 7.0, 4.9, 6.1, 5.2, 4.6, 4.0])
    found = reached_at(np.arange(7.0), loss, 5.0)
    assert 4 < found.at < 5  # 4.9, 6.1 and 5.2 are one block


def test_censored_runs_give_a_bound():
    early, late, never = Reached(4.0), Reached(8.0), Reached(10.0, censored=True)
    all_reached = ratio_to_target({1: early, 2: early}, {1: late, 2: late})
    assert (all_reached.ratio.mean, all_reached.bound, all_reached.reached) == (pytest.approx(2.0), "", (2, 2))
    slow = ratio_to_target({1: early, 2: early}, {1: late, 2: never})
    assert (slow.ratio.mean, slow.ratio.low, slow.bound, slow.reached) == (pytest.approx(math.sqrt(5)), None, ">=", (2, 1))
    fast = ratio_to_target({1: never, 2: never, 3: never}, {1: early, 2: early})
    assert (fast.ratio.mean, fast.bound, fast.reached, fast.seeds) == (pytest.approx(0.4), "<=", (0, 2), 2)
    both = ratio_to_target({1: early, 2: never}, {1: never, 2: early})
    assert (both.ratio, both.reached) == (None, (1, 1))
    assert ratio_to_target({1: early}, {2: early}) is None
