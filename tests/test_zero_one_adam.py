"""0/1 Adam's part of the JSON, its schedule against the paper's rule, and what it says of a run before it starts."""

from __future__ import annotations

import json
from functools import partial

import pytest

from recipes.zero_one_adam.technique import Schedule
from tests import helpers

# Without a corpus GPT-2's vocabulary is assumed: `nano` has 16.1 M parameters.
explain = partial(helpers.explain, "--recipe", "recipes/zero_one_adam", "--ranks", "2", "--data", "no/corpus")
PARAMS = "optimizer.params"
KEYS = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")


def explained(*flags: str) -> dict:
    done = explain(*flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def by_the_papers_rule(freeze: int, kappa: int, scaler: int, clipper: int, steps: int) -> tuple[set[int], set[int]]:
    """T_v and T_u of arXiv 2202.06009, section 4, one element after the other; step 0 is the start of the run."""
    renewed, exchanged, j = [0], [0], 0
    while renewed[-1] <= freeze:
        renewed.append(renewed[-1] + 2 ** (j // kappa))
        j += 1
    while exchanged[-1] <= steps:
        t = exchanged[-1]
        exchanged.append(t + (1 if t < freeze else min(clipper, 2 ** ((t - freeze) // scaler))))
    return {step for step in renewed if 0 < step <= min(freeze, steps)}, {step for step in exchanged if 0 < step <= steps}


SCHEDULES = [(80, 8, 80, 16), (400, 16, 1, 16), (1, 1, 1, 1), (50, 16, 32, 4), (37, 3, 5, 12), (10, 16, 7, 1000), (399, 1, 100, 16)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_steps_are_those_of_the_papers_rule(schedule):
    ours, (renewed, exchanged) = Schedule(*schedule), by_the_papers_rule(*schedule, steps=2000)
    assert {step for step in range(1, 2001) if ours.updates_variance(step)} == renewed
    assert {step for step in range(1, 2001) if ours.exchanges(step)} == exchanged


def test_the_rule_by_hand():
    """With kappa 2: two renewals one step apart, two 2 apart, two 4 apart, ... ; local steps after 20, longer every 4 steps."""
    schedule = Schedule(20, 2, 4, 8)
    assert [step for step in range(1, 60) if schedule.updates_variance(step)] == [1, 2, 4, 6, 10, 14]
    exchanges = [*range(1, 25), 26, 28, 32, 40, 48, 56]
    assert [step for step in range(1, 60) if schedule.exchanges(step)] == exchanges


def test_a_late_step_takes_no_time():
    schedule = Schedule(10**6, 16, 32_678, 16)
    assert schedule.exchanges(10**12) in (True, False)
    assert sum(schedule.exchanges(step) for step in range(10**9, 10**9 + 1600)) == 100
