"""1-bit Adam's part of the JSON: what it accepts, what it refuses in one line, and what it says of a run before it starts."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from launch.config.explain import explain
from launch.config.run_config import resolve
from model.accounting import parameter_count
from model.gpt import GPT
from model.presets import GPTConfig
from recipes.one_bit import settle_variance
from recipes.one_bit_adam.optimizer import CompressedAdam
from recipes.registry import make_techniques
from recipes.technique import StepWork
from tests import helpers

# Without a corpus GPT-2's vocabulary is assumed: `nano` has 16.1 M parameters.
FLAGS = ("--recipe", "recipes/one_bit_adam", "--ranks", "2", "--data", "no/corpus")
explained, refusal = partial(helpers.explained, *FLAGS), partial(helpers.refusal, *FLAGS)
PARAMS = "optimizer.params"
NANO = 50_304 * 256 + 128 * 256 + 4 * (12 * 256**2 + 13 * 256) + 2 * 256


def test_a_fifth_of_the_run_is_adam():
    said = explained("--steps", "400")
    assert said["engine"][f"{PARAMS}.freeze_step"] == {"value": 80, "from": "0.2 of the run's steps, of whole batches"}
    assert [row["compressed"] for row in said["over_the_run"]] == [0, 1, 1, 1, 1]  # at steps 1, 100, 200, ...
    # 16.1 M parameters: 2 bytes each, then a bit.
    assert said["model"]["parameters"] == NANO
    assert any("80 steps of Adam, in each of which a rank sends 32.14 MB, then steps with about 2.01 MB" in note for note in said["notes"])


def test_the_errors_count_in_the_plan_of_memory():
    one_bit, adamw = (
        explained(*flags)["memory_per_rank"]["cpu"] for flags in ((), ("--set", f"optimizer={json.dumps({'type': 'AdamW'})}"))
    )
    assert one_bit["optimizer_states"] - adamw["optimizer_states"] == pytest.approx(4 * NANO * 1.5, rel=1e-3)


def test_what_is_sent_follows_the_type_that_gradients_are_reduced_in():
    said = explained("--steps", "400", "--set", 'communication_data_type="fp32"')
    assert any("a rank sends 64.28 MB" in note for note in said["notes"])


@pytest.mark.parametrize("recipe", ["one_bit_adam", "zero_one_adam"])
def test_the_planned_bytes_count_the_steps_that_a_batch_size_warmup_adds(recipe, corpus):
    """Of 1-bit Adam, the added steps are compressed ones, in which a rank sends 1 bit of each 16."""
    flags = ["--recipe", f"recipes/{recipe}", "--data", str(corpus), "--steps", "100", "--global_batch_size", "32", "--ranks", "2"]
    plain, warmed = (resolve([*flags, *more])[0] for more in ([], ["--set", 'batch_size_warmup={"enabled": true}']))
    assert (plain.steps_to_make, warmed.steps_to_make) == (100, 137)
    less, more = (explain(config)["bytes_sent_per_step"] * config.steps_to_make for config in (plain, warmed))
    assert less < more < 1.37 * less
    if recipe == "one_bit_adam":
        whole = 2 * parameter_count(plain.model_config)
        assert less == pytest.approx(20 * whole + 80 * whole / 16, rel=1e-4)
        assert more - less == pytest.approx(37 * whole / 16, rel=1e-3)


def test_a_variance_that_is_frozen_while_the_rate_rises_gets_a_word():
    said = explained("--steps", "400", "--warmup_steps", "100")
    assert any("frozen after step 80, while the learning rate rises until step 100" in note for note in said["notes"])


def test_a_curriculum_makes_the_run_long_enough():
    """Steps of fewer tokens are more steps; what counts is how many there will be."""
    section = {"min_difficulty": 8, "max_difficulty": 128, "schedule_type": "fixed_linear"}
    section["schedule_config"] = {"total_curriculum_step": 300, "difficulty_step": 8}
    flags = ("--steps", "400", "--set", f"{PARAMS}.freeze_step=450")
    assert "freeze_step" in refusal(*flags)
    explained(*flags, "--set", f"curriculum_learning={json.dumps(section)}")


# --- the variance that stays --------------------------------------------------------------------------------------------------------


def test_no_element_stays_below_a_tenth_of_the_mean():
    variance = torch.tensor([[1.0, 3.0], [0.0, 4.0]])
    settle_variance(variance, 100, 0.999)
    assert torch.equal(variance, torch.tensor([[1.0, 3.0], [0.2, 4.0]]))


def test_a_row_that_came_late_gets_the_mean_square_of_its_own_steps():
    """Of gradients of 1 and 2: 0.5 of the steps, and 3 of 4; a row that had none gets the mean of the columns."""
    steps, beta2 = 4, 0.9
    row_steps = torch.tensor([4.0, 2.0, 0.0])
    variance = torch.tensor([1.0, 2.0, 0.0])[:, None].pow(2) * (1 - beta2**row_steps)[:, None].repeat(1, 3)
    settle_variance(variance, steps, beta2, row_steps)
    corrected = variance / (1 - beta2**steps)
    torch.testing.assert_close(corrected, torch.tensor([1.0, 4.0, 2.5])[:, None].repeat(1, 3))


def test_padding_of_the_vocabulary_has_no_gradients():
    model = GPT(GPTConfig(n_layer=1, n_head=1, d_model=16, seq_len=12, vocab_size=200, init_seed=0))
    tokens = torch.arange(9)[None]
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    for parameter, rows in model.used_rows(8).items():
        assert bool(parameter.grad[:rows].any(dim=1).all())
        assert rows < parameter.shape[0] and not parameter.grad[rows:].any()


class OneRank:
    world_size, rank = 1, 0


def test_a_compressed_step_without_an_update_leaves_no_state_of_the_rank():
    """As an overflow in the step that would have frozen the variance: a resume from there is not told of a frozen variance."""
    config = resolve(["--recipe", "recipes/one_bit_adam", "--data", "no/corpus", "--explain", "--set", f"{PARAMS}.freeze_step=1"])[0]
    (technique,) = make_techniques(config).members
    model = GPT(GPTConfig(n_layer=1, n_head=1, d_model=16, seq_len=12, vocab_size=200, init_seed=0))
    technique.prepare(model)
    adam = technique.optimizer([{"params": list(model.parameters())}])
    technique.attach(SimpleNamespace(skipped_steps=0), OneRank())
    for step in (1, 2):
        technique.on_step(step, StepWork(1, 1, 8))
        assert technique.state_dict() == {}
        adam.step()
    assert technique.metrics() == {"compressed": 0} and adam.frozen == 1
    assert set(technique.state_dict()) == {"worker_error", "server_error"}


def test_a_tensor_that_had_no_gradient_yet_has_the_variance_of_the_others():
    """As a block's that progressive layer dropping has left out of every step so far: its first gradient must not throw it away."""
    seen, unseen = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    adam = CompressedAdam([{"params": [seen, unseen]}], 1e-3, (0.9, 0.999), 1e-8, 0.0)
    adam.step()  # before it is bound: nothing
    adam.bind(OneRank())
    for _ in range(3):
        seen.grad, unseen.grad = torch.full((4,), 1e-3), None
        adam.step()
    adam.compressing = True
    for _ in range(3):
        seen.grad, unseen.grad = (torch.full((4,), 1e-3) for _ in range(2))
        adam.step()
    assert float(unseen.detach().min()) > 0.99
    assert float(seen.detach().max()) < 0.996
