"""Progressive Layer Dropping: the paper's formulas by values computed by hand, and what its section may say."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest

from recipes.progressive_layer_drop.technique import draws, keep_probabilities, theta_at
from tests import helpers

explain = partial(helpers.explain, "--recipe", "recipes/progressive_layer_drop")


def test_theta_falls_from_1_to_its_limit():
    assert theta_at(1, 0.5, 0.001) == 1
    assert theta_at(1001, 0.5, 0.001) == 0.5 + 0.5 * math.exp(-1)
    assert theta_at(10**6, 0.5, 0.001) == 0.5
    assert theta_at(77, 1.0, 0.3) == theta_at(77, 0.2, 0.0) == 1


def test_the_first_block_always_runs_and_the_last_runs_least():
    assert keep_probabilities(0.5, 4) == [1, 0.875, 0.75, 0.625]
    assert keep_probabilities(1.0, 3) == [1, 1, 1]
    # The expected share of blocks: 1 - (1 - theta)(L - 1) / (2 L).
    assert sum(keep_probabilities(0.5, 12)) / 12 == pytest.approx(1 - 0.5 * 11 / 24)


def test_draws_are_even_and_depend_on_all_of_their_arguments():
    numbers = [number for step in range(1, 501) for number in draws(1, step, 12)]
    assert len(set(numbers)) == len(numbers) == 6000
    assert all(0 <= number < 1 for number in numbers)
    for share in (0.1, 0.5, 0.9):  # 6,000 draws: four standard deviations
        assert abs(sum(number < share for number in numbers) / 6000 - share) < 4 * math.sqrt(share * (1 - share) / 6000)
    assert draws(1, 2, 3) == draws(1, 2, 5)[:3]
    others = [draws(1, 2, 3), draws(2, 2, 3), draws(1, 3, 3)]
    assert len({number for numbers in others for number in numbers}) == 9


def test_upstreams_example_is_accepted_whole(tmp_path):
    """The keys and values of DeepSpeedExamples' training/bing_bert/deepspeed_bsz4k_progressive_layer_drop_config_seq128.json."""
    adam = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.01, "bias_correction": False}}
    values = {
        "train_batch_size": 4096,
        "train_micro_batch_size_per_gpu": 16,
        "steps_per_print": 1000,
        "prescale_gradients": True,
        "gradient_predivide_factor": 8,
        "optimizer": adam,
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": True, "loss_scale": 0},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    done = helpers.explain("--deepspeed_config", str(file), "--preset", "gpt2")
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    assert page["techniques"] == ["progressive_layer_drop"]
    assert page["over_the_run"][-1]["theta"] == pytest.approx(theta_at(page["length"]["steps"], 0.5, 0.001))
