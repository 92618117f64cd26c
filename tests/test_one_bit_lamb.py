"""1-bit LAMB's part of the JSON, beside what is 1-bit Adam's (test_one_bit_adam.py) and LAMB's (test_lamb.py); its mean trust ratio."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from recipes.one_bit_lamb.optimizer import CompressedLamb
from tests import helpers
from tests.test_one_bit_adam import NANO, PARAMS, OneRank

explained = partial(helpers.explained, "--steps", "400", "--ranks", "2", "--data", "no/corpus", "--recipe")


def test_three_tenths_of_the_run_are_lamb():
    said = explained("recipes/one_bit_lamb")
    assert said["engine"][f"{PARAMS}.freeze_step"] == {"value": 120, "from": "0.3 of the run's steps, of whole batches"}
    assert any("120 steps of LAMB, in each of which a rank sends 32.14 MB, then steps with about 2.01 MB" in note for note in said["notes"])


def test_the_errors_and_the_fresh_variance_count_in_the_plan_of_memory():
    one_bit, lamb = (explained(f"recipes/{name}")["memory_per_rank"]["cpu"]["optimizer_states"] for name in ("one_bit_lamb", "lamb"))
    assert one_bit - lamb == pytest.approx(4 * NANO * 2.5, rel=1e-3)


def steps_of(lamb: CompressedLamb, gradients: list[torch.Tensor | None]) -> list[float]:
    """A step by each of the gradients; the mean trust ratio of the first parameter after it."""
    parameter = lamb.param_groups[0]["params"][0]
    ratios = []
    for gradient in gradients:
        parameter.grad = None if gradient is None else gradient.clone()
        lamb.step()
        ratios.append(float(lamb.state[parameter]["trust_ratio"]))
    return ratios


def test_the_mean_ratio_starts_from_the_first_that_there_is():
    """A bias starts at 0 and has none in its first step."""
    bias = torch.nn.Parameter(torch.zeros(4))
    lamb = CompressedLamb([{"params": [bias]}], 1e-3, (0.9, 0.999), 1e-8, 0.0, limits=(1e-6, 10.0))
    lamb.bind(OneRank())
    # Adam's step by a gradient that does not change is 1 in each element; the bias is 1e-3 in each after the first.
    first, second, third = steps_of(lamb, [torch.ones(4)] * 3)
    assert first == 0.0
    assert second == pytest.approx(1e-3, rel=1e-4)
    assert third == pytest.approx(0.9 * 1e-3 + 0.1 * (1e-3 + 1e-6), rel=1e-5)


@pytest.mark.parametrize("change", [lambda group: group.update(betas=(0.9, 0.5)), lambda group: group.pop("variance_bias")])
def test_the_correction_of_a_frozen_variance_stays(change):
    """After a resume with another beta2, and from a checkpoint of an earlier version, which lacks the correction.

    A gradient that does not change moves the weight by the rate in each step.
    """
    weight = torch.nn.Parameter(torch.ones(4))
    lamb = CompressedLamb([{"params": [weight]}], 1e-3, (0.9, 0.999), 1e-8, 0.0)
    lamb.bind(OneRank())
    steps_of(lamb, [torch.ones(4)] * 10)
    lamb.compressing = True
    steps_of(lamb, [torch.ones(4)])
    before = weight.detach().clone()
    change(lamb.param_groups[0])
    steps_of(lamb, [torch.ones(4)])
    torch.testing.assert_close(before - weight.detach(), torch.full((4,), 1e-3), rtol=0.01, atol=0.0)


def test_the_factor_follows_the_gradients_within_its_limits():
    """A tenth of the gradient: the variance falls, and the step grows by at most a tenth of itself each time, to four times."""
    weight = torch.nn.Parameter(torch.ones(4))
    lamb = CompressedLamb([{"params": [weight]}], 1e-6, (0.9, 0.5), 1e-8, 0.0)
    lamb.bind(OneRank())
    steps_of(lamb, [torch.ones(4)] * 20)
    lamb.compressing = True
    factors = []
    for _ in range(60):
        steps_of(lamb, [torch.full((4,), 0.1)])
        factors.append(float(lamb.state[weight]["factor"]))
    rises = [b / a for a, b in itertools.pairwise(factors)]
    assert max(rises) == pytest.approx(1.1, rel=1e-5)
    assert min(rises) >= 1.0 - 1e-6
    assert factors[-1] == 4.0
    steps_of(lamb, [torch.full((4,), 10.0)] * 60)
    assert float(lamb.state[weight]["factor"]) == 0.5
