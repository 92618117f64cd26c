"""Random layerwise token dropping: lengths by hand and by DeepSpeed's own scheduler, the draws, and what its section may say."""

from __future__ import annotations

import json

import pytest

from launch.config.run_config import resolve
from model.accounting import flops_per_token
from model.presets import ARCHITECTURES, GPTConfig
from recipes.random_ltd.technique import RandomLTD, draw_positions, reserved_length, run_on
from recipes.registry import make_techniques
from recipes.technique import StepWork, step_without_techniques
from tests.helpers import config_of


def schedule(least: int, most: int, steps: int, multiple: int) -> dict:
    config = {"require_steps": steps, "seq_per_step": multiple}
    return {"min_value": least, "max_value": most, "schedule_type": "fixed_linear", "schedule_config": config}


def test_the_length_grows_in_multiples_by_the_formula():
    # 16 + 4.8 for each step that is done, rounded down to multiples of 8.
    assert [reserved_length(step, schedule(16, 64, 10, 8)) for step in range(1, 13)] == [16, 16, 24, 24, 32, 40, 40, 48, 48, 56, 64, 64]


SCHEDULES = [
    schedule(least, most, steps, multiple)
    for least, most in ((128, 2048), (16, 64), (64, 64), (48, 100), (20, 197), (7, 7))
    for steps, multiple in ((1, 1), (37, 8), (100, 16), (140, 3))
]


@pytest.mark.parametrize("values", SCHEDULES, ids=json.dumps)
def test_every_length_is_that_of_deepspeeds_own_scheduler(values):
    """As the engine asks it, before the forward pass of every step; of lengths too that the section is refused for."""
    from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler

    counts = {"total_layer_num": 4, "random_ltd_layer_num": 2, "global_batch_size": 1, "layer_token_lr_schedule": {"enabled": False}}
    scheduler = RandomLTDScheduler({**counts, "random_ltd_schedule": values})
    expected = []
    for global_steps in range(160):
        scheduler.update_seq(global_steps)
        expected.append(scheduler.get_current_seq())
    assert [reserved_length(step, values) for step in range(1, 161)] == expected


def test_draws_are_sorted_and_even_and_depend_on_seed_step_and_layer():
    draws = [draw_positions(1, step, layer, 12, 32).tolist() for step in range(1, 251) for layer in range(4)]
    assert all(positions == sorted(set(positions)) and len(positions) == 12 for positions in draws)
    assert len({tuple(positions) for positions in draws}) == len(draws)
    counts = [sum(position in positions for positions in draws) for position in range(32)]
    deviation = (1000 * (12 / 32) * (20 / 32)) ** 0.5
    assert all(abs(count - 1000 * 12 / 32) < 4 * deviation for count in counts)
    assert draw_positions(1, 2, 3, 12, 32).tolist() == draw_positions(1, 2, 3, 12, 32).tolist()
    assert draw_positions(2, 2, 3, 12, 32).tolist() != draw_positions(1, 2, 3, 12, 32).tolist()


def test_a_draw_leaves_the_global_generator_alone():
    import torch

    before = torch.random.get_rng_state()
    draw_positions(1, 2, 3, 12, 32)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("document_end", "dense"), [(None, True), (5, True), (5, False)])
def test_gradients_are_those_of_a_block_that_sees_each_token_by_itself(document_end, dense, architecture):
    """In fp64, against attention written out over all tokens of which the dropped ones are hidden, with and without a documents' mask.

    Rotary positions are those in the row, or in the document.
    """
    import torch

    from model.gpt import GPT
    from model.layout import DocumentBounds, Layout, document_mask, document_starts

    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "d_model": 8, "seq_len": 12}
    model = GPT(config_of(architecture, sizes, vocab_size=16, init_seed=1)).double()
    block, kept_tokens = model.h[0], draw_positions(1, 1, 0, 7, 12)
    with torch.no_grad():
        block.attn.c_attn.weight.mul_(30)  # attention that is not uniform: positions matter
    tokens = torch.randint(0, 16, (3, 12))
    tokens[:, 4] = 5
    starts = torch.zeros_like(tokens) if document_end is None else document_starts(tokens, document_end)
    mask = document_mask(starts, torch.float64)
    rotation = model.wpe.rotation(torch.arange(12) - starts, torch.float64)
    x = torch.randn(3, 12, 8, dtype=torch.float64)
    wanted = torch.randn_like(x)

    def gradients(run) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        return [out.detach(), *torch.autograd.grad((out * wanted).sum(), [leaf, *block.parameters()])]

    def written_out(x: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros(12, dtype=torch.bool).index_fill(0, kept_tokens, True)
        hidden = mask.masked_fill(~(kept | torch.eye(12, dtype=torch.bool)), -torch.inf)  # a dropped token sees itself
        block.attn.layout = Layout(hidden, rotation)
        out = torch.where(kept[:, None], block(x), x)
        block.attn.layout = Layout()
        return out

    def dropping(x: torch.Tensor) -> torch.Tensor:
        documents = mask if dense else DocumentBounds.beginning_at(starts)
        block.attn.layout = layout = Layout(None if document_end is None else documents, rotation)
        out = run_on(block, x, kept_tokens)
        assert block.attn.layout is layout, "the layout is there for the next block"
        block.attn.layout = Layout()
        return out

    for ours, expected in zip(gradients(dropping), gradients(written_out), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def flags(*settings: str, shape: tuple[str, ...] = ()) -> list[str]:
    run = ["--recipe", "recipes/random_ltd", "--explain", "--seq_len", "128", *shape]
    return [*run, *(text for setting in settings for text in ("--set", f"random_ltd.{setting}"))]


def technique(*settings: str, shape: tuple[str, ...] = ()) -> RandomLTD:
    (member,) = make_techniques(resolve(flags(*settings, shape=shape))[0]).members
    assert isinstance(member, RandomLTD)
    return member


@pytest.mark.parametrize(
    ("seq_len", "least", "multiple"),
    [(2048, 128, 16), (256, 128, 16), (128, 64, 16), (64, 32, 16), (48, 16, 16), (40, 16, 8), (37, 18, 1), (16, 16, 16), (1, 1, 1)],
)
def test_auto_is_the_papers_start_and_share_and_all_blocks_but_the_first_and_last(seq_len, least, multiple):
    run = technique(shape=("--seq_len", str(seq_len), "--steps", "1000", "--n_layer", "6"))
    assert run.layers == {1, 2, 3, 4}
    assert run.schedule == schedule(least, seq_len, 700, multiple)


def test_a_model_of_two_blocks_drops_nothing_and_says_so():
    config, _ = resolve(flags(shape=("--n_layer", "2")))
    assert "random_ltd: no token is dropped" in config.notes[-1]
    (member,) = make_techniques(config).members
    assert member.on_step(1, step_without_techniques(config)).equivalent_blocks == 2
    assert member.metrics() == {"reserved_length": 64, "kept_blocks": 2}


def test_the_log_says_what_will_be_dropped():
    (note,) = technique("random_ltd_layer_id=[0,3]", shape=("--steps", "100")).notes
    assert "2 of 4 blocks see 64 of 128 tokens at first, 128 from step 71 on; up to 5 lengths" in note
    assert technique("random_ltd_schedule.schedule_config.require_steps=1e3").stages[-1] == 1001


def test_kept_blocks_are_the_flops_that_were_done():
    """By the arithmetic of model.accounting: blocks that run on a row of 64 tokens beside blocks that run on 128."""
    run = technique(shape=("--n_layer", "6"))
    config = GPTConfig(6, 4, 256, 128, vocab_size=8192)
    kept_blocks = run.on_step(1, StepWork(8, 1, 128)).equivalent_blocks
    metrics = run.metrics()
    assert metrics["reserved_length"] == 64

    def of_blocks(row: int, blocks: int) -> float:
        return row * (flops_per_token(config, row, blocks) - flops_per_token(config, row, 0))

    rest = 128 * flops_per_token(config, 128, 0)
    expected = rest + of_blocks(128, 2) + of_blocks(64, 4)
    assert 128 * flops_per_token(config, kept_blocks=kept_blocks) == pytest.approx(expected, rel=1e-12)
    run.on_step(10**6, StepWork(8, 1, 128))
    assert run.metrics() == {"reserved_length": 128, "kept_blocks": 6}


def test_metrics_follow_rows_that_a_curriculum_cuts():
    run = technique()
    run.on_step(1, StepWork(8, 1, 32))
    assert run.metrics() == {"reserved_length": 32, "kept_blocks": 4}
    run.on_step(2, StepWork(8, 1, 128))
    assert run.metrics()["reserved_length"] == 64
