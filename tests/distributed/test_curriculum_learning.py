"""The curriculum on real ranks: lengths, tokens and learning rate of every step, no token twice, evaluation at full length."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from launch.config.flags import as_words
from tests.distributed.reference import reference_steps
from tests.distributed.test_engine_follows_plain_pytorch import largest_difference
from tests.helpers import resumed_after

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 64}
BATCH, STEPS, LR, WARMUP, SEED = 8, 50, 5e-4, 5, 3
SECTION = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear"}
SECTION |= {"schedule_config": {"total_curriculum_step": 40, "difficulty_step": 8}}
#: By hand: 8 + 56 s / 40 = 8 + 1.4 s reaches 16 at step 6 (16.4), 24 at 12 (24.8), 32 at 18 (33.2), 40 at 23 (40.2), 48 at 29 (48.6),
#: 56 at 35 (57) and 64 at 40. Steps of each length; the last goes on.
LENGTHS = [8] * 5 + [16] * 6 + [24] * 6 + [32] * 5 + [40] * 6 + [48] * 6 + [56] * 5 + [64] * 60
#: The run has 50 x 8 x 64 = 25,600 tokens. The first 39 steps hold 8 x (40 + 96 + 144 + 160 + 240 + 288 + 280) = 9,984 of them, and
#: 30.5 steps of 512 the rest: it ends in step 70, after 9,984 + 31 x 512 = 25,856.
LAST_STEP, LAST_TOKENS = 70, 25_856
TOLERANCE = 5e-6


def flags(corpus, tmp_path, stage: int, name: str, *more: str, precision: str = "fp32", section: dict | None = None) -> list[str]:
    values = {**SHAPE, "data": corpus, "runs_dir": tmp_path, "run_name": name, "steps": STEPS, "global_batch_size": BATCH}
    values |= {"micro_batch_size": 2, "lr": LR, "warmup_steps": WARMUP, "seed": SEED, "eval_every": 0, "save_every": 0}
    run = ["--deepspeed_config", f"ds_configs/zero{stage}_{precision}.json"]
    run += as_words(values)
    return [*run, "--set", f"curriculum_learning={json.dumps(section or SECTION)}", *more]


def check_table(lines: list[dict]) -> None:
    """Length, tokens and learning rate of every step: warm-up over 5 x 512 tokens, then a cosine down to a tenth at 25,600."""
    assert [line["seq_len"] for line in lines] == LENGTHS[:LAST_STEP]
    tokens = 0
    for line in lines:
        tokens += BATCH * LENGTHS[line["step"] - 1]
        assert line["tokens"] == tokens
        if tokens < 2560:
            rate = LR * tokens / 2560
        else:
            rate = 0.1 * LR + 0.9 * LR * (1 + math.cos(math.pi * min(1, (tokens - 2560) / 23_040))) / 2
        assert line["lr"] == pytest.approx(rate, rel=1e-9)
    assert (lines[-1]["step"], tokens) == (LAST_STEP, LAST_TOKENS)


def truncated(step: int, windows: torch.Tensor) -> torch.Tensor:
    return windows[:, : LENGTHS[step - 1] + 1]


def reshaped(step: int, windows: torch.Tensor) -> torch.Tensor:
    """Row by row, each beginning with the last token of the one before it."""
    length = LENGTHS[step - 1]
    return torch.stack([window[start : start + length + 1] for window in windows for start in range(0, 64 - length + 1, length)])


@pytest.fixture(scope="module")
def expected(corpus) -> list[float]:
    """The losses of a plain loop."""
    return [step.loss for step in reference_steps(corpus, SHAPE, STEPS, BATCH, LR, WARMUP, SEED, cut=truncated)]


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [(2, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, 1), (1, 2), (3, 2), (0, 2), (1, 1), (2, 1), (3, 1)))],
)
def test_every_step_is_that_of_a_table_and_of_a_plain_loop(stage, ranks, pools, corpus, expected, tmp_path):
    lines = pools.of(ranks).train(flags(corpus, tmp_path, stage, "r"))
    check_table(lines)
    assert largest_difference([line["loss"] for line in lines], expected) <= TOLERANCE
    assert expected[-1] < expected[0] - 0.5


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.long)])
def test_reshaped_it_trains_on_the_rows(stage, two_ranks, corpus, tmp_path):
    lines = two_ranks.train(flags(corpus, tmp_path, stage, "r", section={**SECTION, "mode": "reshape"}))
    steps = reference_steps(corpus, SHAPE, STEPS, BATCH, LR, WARMUP, SEED, cut=reshaped)
    assert largest_difference([line["loss"] for line in lines], [step.loss for step in steps]) <= TOLERANCE


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_it_goes_on_through_a_resume(stage, two_ranks, corpus, expected, tmp_path):
    run = flags(corpus, tmp_path, stage, "r", "--save_every", "20", "--keep", "9")
    two_ranks.train(run)
    for step in (40, 60, 70):
        shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{step:08d}")
    lines = two_ranks.train([*run, "--resume"])
    assert resumed_after(tmp_path / "r") == 20
    check_table(lines)
    assert largest_difference([line["loss"] for line in lines], expected) <= TOLERANCE


@pytest.mark.parametrize("mode", [pytest.param("truncate", marks=pytest.mark.long), "reshape"])
def test_training_is_at_the_steps_length_and_evaluation_at_full_length(mode, one_rank, corpus, tmp_path):
    run = flags(corpus, tmp_path, 0, mode, "--eval_every", "20", section={**SECTION, "mode": mode})
    lines = one_rank.run("tests.distributed.jobs:pretrain_with", technique="WatchedLengths", flags=run)[0]
    before = 0
    for line in lines[1:]:
        assert line["trained_length"] == line["seq_len"]
        rows = 64 // line["seq_len"] if mode == "reshape" else 1
        assert line["tokens"] - before == BATCH * rows * line["seq_len"]
        before = line["tokens"]
    assert lines[-1]["evaluated_length"] == 64


def test_positions_beyond_the_length_are_not_trained(one_rank, corpus, tmp_path):
    """Their embeddings only decay, until the length reaches them."""
    section = {**SECTION, "schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 64], "max_step": [1000]}}
    run = flags(corpus, tmp_path, 1, "r", section=section)
    run += ["--steps", "3", "--warmup_steps", "1"]
    lines = one_rank.run("tests.distributed.jobs:pretrain_with", technique="WatchedPositions", flags=run)[0]
    assert lines[-1]["moved_up_to"] == 8
