"""0/1 Adam's part of the JSON, its schedule against the paper's rule, and what it says of a run before it starts."""

from __future__ import annotations

import json
from functools import partial

import pytest

from recipes.zero_one_adam.technique import Schedule
from tests import helpers
from tests.test_one_bit_adam import NANO

# Without a corpus GPT-2's vocabulary is assumed: `nano` has 16.1 M parameters.
FLAGS = ("--recipe", "recipes/zero_one_adam", "--ranks", "2", "--data", "no/corpus")
explained, refusal = partial(helpers.explained, *FLAGS), partial(helpers.refusal, *FLAGS)
PARAMS = "optimizer.params"


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


def test_they_are_counted_as_far_as_any_step():
    schedule = Schedule(37, 3, 5, 12)
    renewed, exchanged = by_the_papers_rule(*schedule, steps=200)
    for step in range(200):
        assert schedule.variance_updates(step) == sum(other <= step for other in renewed)
        so_far = [other for other in exchanged if other <= step]
        assert schedule.last_exchange(step) == (max(so_far, default=0), len(so_far))


def test_a_late_step_takes_no_time():
    schedule = Schedule(10**12, 16, 32_678, 16)
    assert schedule.variance_updates(10**12) < 16 * 40
    assert sum(schedule.exchanges(step) for step in range(10**15, 10**15 + 1600)) == 100


def test_the_run_is_told_what_it_sends():
    """16.1 M parameters: of 80 steps 8 + 8 + 8 + 3 renew the variance; of 320 others 80 + 40 + 20 + 10 exchange."""
    said = explained("--steps", "400")
    for key, (value, origin) in {
        "var_freeze_step": (80, "0.2 of the run's steps, of whole batches"),
        "var_update_scaler": (8, "a fiftieth of the run's steps, 4 to 16"),
        "local_step_scaler": (80, "a fourth of the run's steps after var_freeze_step"),
        "local_step_clipper": (16, "the paper's"),
    }.items():
        assert said["engine"][f"{PARAMS}.{key}"] == {"value": value, "from": origin}
    expected = (
        "of 400 steps of whole batches, 27 update the variance, for which a rank sends 32.14 MB, 203 send about 2.01 MB, and 170 a few KB"
    )
    assert any(expected in note for note in said["notes"])
    assert [row["variance_updated"] for row in said["over_the_run"]] == [1, 0, 0, 0, 0]
    assert [row["exchanged"] for row in said["over_the_run"]] == [1, 1, 1, 1, 1]  # at steps 1, 100, 200, ...


def test_a_run_that_ends_between_exchanges_is_told():
    said = explained("--steps", "403")
    expected = "of 403 steps of whole batches, the last exchange is in step 401"  # a curriculum makes more steps
    assert any(expected in note for note in said["notes"]), said["notes"]


@pytest.mark.parametrize(("flags", "tensors"), [((), 3.5), (("--set", f"{PARAMS}.local_step_clipper=1"), 2.5), (("--ranks", "1"), 1)])
def test_what_is_kept_counts_in_the_plan_of_memory(flags, tensors):
    """The way since the last exchange, where that was if ranks go alone, and the errors, beside Adam's moments."""
    adamw = explained("--set", f"optimizer={json.dumps({'type': 'AdamW'})}")
    states = [said["memory_per_rank"]["cpu"]["optimizer_states"] for said in (explained(*flags), adamw)]
    assert states[0] - states[1] == pytest.approx(4 * NANO * tensors, rel=1e-3)
