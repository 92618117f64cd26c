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


def test_deepspeeds_documented_form_is_accepted():
    params = {"lr": 2e-3, "weight_decay": 0.01, "bias_correction": True, "max_coeff": 0.3, "min_coeff": 0.01, "amsgrad": False}
    said = explained("recipes/lamb", "--set", f"optimizer={json.dumps({'type': 'lamb', 'params': params})}")
    assert said["engine"][f"{PARAMS}.betas"] == {"value": [0.9, 0.999], "from": "the default of Lamb"}


def test_explain_shows_the_defaults_of_keys_that_the_json_omits():
    limits = {"bias_correction": True, "max_coeff": 10, "min_coeff": 0.01}
    factors = {"coeff_beta": 0.9, "factor_max": 4, "factor_min": 0.5, "factor_threshold": 0.1}
    for recipe, kind, defaults in (("lamb", "Lamb", limits), ("one_bit_lamb", "OneBitLamb", limits | factors)):
        said = explained(f"recipes/{recipe}", "--set", f"optimizer={json.dumps({'type': kind, 'params': {'lr': 'auto'}})}")["engine"]
        for key, value in defaults.items():
            assert said[f"{PARAMS}.{key}"] == {"value": value, "from": f"the default of {kind}"}


NO_NUMBER = "must be finite and below 2^63"
#: Of both; what follows is refused by either in the same words.
LIMITS = [
    ("max_coeff=0", "is 0; max_coeff must be above 0"),
    ("max_coeff=-1", "is -1; write 0 or more"),
    ("min_coeff=11", "is 11; max_coeff must be above 0 and at least min_coeff"),
    ("min_coeff=1e7", "write 1000000 or less"),
    ("max_coeff=1e308", NO_NUMBER),
    ("max_coeff=Infinity", NO_NUMBER),
    ("min_coeff=NaN", NO_NUMBER),
    ('max_coeff="auto"', '"auto" has no meaning here'),
    ("max_coeff=true", "is true; write a number"),
    ("maxcoeff=1", "did you mean 'max_coeff'?"),
    ("amsgrad=true", "is true; write false"),
    ("eps_inside_sqrt=true", "is true; write false"),
    ("lr=0", "is 0"),
]
REFUSED = [
    *(("lamb", setting, message) for setting, message in LIMITS),
    *(("one_bit_lamb", setting, message) for setting, message in LIMITS[:2]),
    ("one_bit_lamb", "factor_max=0", "is 0; factor_max must be above 0"),
    ("one_bit_lamb", "factor_min=5", "is 5; factor_max must be above 0 and at least factor_min"),
    ("one_bit_lamb", "factor_max=-4", "is -4; write 0 or more"),
    ("one_bit_lamb", "factor_max=NaN", NO_NUMBER),
    ("one_bit_lamb", "factor_threshold=-0.1", "is -0.1; write 0 or more"),
    ("one_bit_lamb", "factor_threshold=Infinity", NO_NUMBER),
    ("one_bit_lamb", "factor_threshold=1e7", "write 1000000 or less"),
    ("one_bit_lamb", "coeff_beta=1", "is 1; write 0.999999 or less"),
    ("one_bit_lamb", "coeff_beta=1.5", "is 1.5; write 0.999999 or less"),
    ("one_bit_lamb", "coeff_beta=-0.5", "is -0.5; write 0 or more"),
    ("one_bit_lamb", "freeze_step=400", "acts from step 401 on, but the run ends at step 400; lower it"),
    ("one_bit_lamb", "max_grad_norm=1", "it belongs to 'gradient_clipping'"),
]


@pytest.mark.parametrize(("recipe", "setting", "message"), REFUSED)
def test_what_cannot_be_is_one_line_and_exit_code_2(recipe, setting, message):
    line = refusal(f"recipes/{recipe}", "--steps", "400", "--set", f"{PARAMS}.{setting}")
    assert line.startswith(f"error: --set {PARAMS}.{setting.partition('=')[0]}")
    assert message in line


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_refused(stage):
    line = refusal("recipes/lamb", "--set", f"zero_optimization.stage={stage}")
    assert f"is {stage}, but Lamb takes the norms of whole tensors; write 0, or use AdamW" in line


def test_a_tensor_without_a_norm_moves_by_adams_step():
    """A bias starts at 0; and a tensor whose gradients and weight decay are 0 stays."""
    bias, still = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4))
    lamb = Lamb([{"params": [bias, still]}], 1e-3, (0.9, 0.999), 1e-8, 0.0)
    bias.grad = torch.tensor([1.0, -2.0, 3.0, -4.0])
    lamb.step()
    torch.testing.assert_close(bias.detach(), torch.tensor([-1e-3, 1e-3, -1e-3, 1e-3]))
    assert torch.equal(still.detach(), torch.ones(4))
    assert float(lamb.trust_ratio) == 1.0
