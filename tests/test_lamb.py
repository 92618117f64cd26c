"""LAMB's part of the JSON: what it accepts, what it refuses in one line; and what a step of a tensor without a norm is."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from recipes.lamb.optimizer import Lamb
from tests import helpers

FLAGS = ("--ranks", "2", "--data", "no/corpus", "--recipe")
explained, refusal = partial(helpers.explained, *FLAGS), partial(helpers.refusal, *FLAGS)
PARAMS = "optimizer.params"


@pytest.mark.parametrize("recipe", ["lamb", "one_bit_lamb"])
def test_an_auto_rate_is_lambs_in_every_preset(recipe):
    for flags, value, origin in (
        (["--preset", "nano"], 0.016, "the default of"),
        (["--preset", "gpt2"], 0.016, "the default of"),
        (["--lr", "0.5"], 0.5, "--lr"),
    ):
        said = explained(f"recipes/{recipe}", *flags)["engine"]
        assert said[f"{PARAMS}.lr"]["value"] == value
        assert said[f"{PARAMS}.lr"]["from"].startswith(origin)
        assert said["scheduler.params.min_lr"]["value"] == pytest.approx(value / 10)


def test_explain_shows_the_defaults_of_keys_that_the_json_omits():
    limits = {"bias_correction": True, "max_coeff": 10, "min_coeff": 0.01}
    factors = {"coeff_beta": 0.9, "factor_max": 4, "factor_min": 0.5, "factor_threshold": 0.1}
    for recipe, kind, defaults in (("lamb", "Lamb", limits), ("one_bit_lamb", "OneBitLamb", limits | factors)):
        said = explained(f"recipes/{recipe}", "--set", f"optimizer={json.dumps({'type': kind, 'params': {'lr': 'auto'}})}")["engine"]
        for key, value in defaults.items():
            assert said[f"{PARAMS}.{key}"] == {"value": value, "from": f"the default of {kind}"}


def test_a_tensor_without_a_norm_moves_by_adams_step():
    """A bias starts at 0; and a tensor whose gradients and weight decay are 0 stays."""
    bias, still = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4))
    lamb = Lamb([{"params": [bias, still]}], 1e-3, (0.9, 0.999), 1e-8, 0.0)
    bias.grad = torch.tensor([1.0, -2.0, 3.0, -4.0])
    lamb.step()
    torch.testing.assert_close(bias.detach(), torch.tensor([-1e-3, 1e-3, -1e-3, 1e-3]))
    assert torch.equal(still.detach(), torch.ones(4))
    assert float(lamb.trust_ratio) == 1.0
