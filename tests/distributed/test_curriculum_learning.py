"""The curriculum on real ranks: lengths, tokens and learning rate of every step, no token twice, evaluation at full length."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from recipes.curriculum_learning.technique import length_at

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 64}
BATCH, STEPS, LR, WARMUP = 8, 50, 1e-3, 5
SECTION = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear"}
SECTION |= {"schedule_config": {"total_curriculum_step": 40, "difficulty_step": 8}}


def flags(corpus, tmp_path, stage: int, name: str, *more: str, precision: str = "fp32", section: dict | None = None) -> list[str]:
    values = {**SHAPE, "data": corpus, "runs_dir": tmp_path, "run_name": name, "steps": STEPS, "global_batch_size": BATCH}
    values |= {"micro_batch_size": 2, "lr": LR, "warmup_steps": WARMUP, "eval_every": 0, "save_every": 0}
    run = ["--deepspeed_config", f"ds_configs/zero{stage}_{precision}.json"]
    run += [text for key, value in values.items() for text in (f"--{key}", str(value))]
    return [*run, "--set", f"curriculum_learning={json.dumps(section or SECTION)}", *more]


def trained(pool, run: list[str]) -> list[dict]:
    return pool.run("tests.distributed.jobs:pretrain", flags=run)[0]


def expected(total: int) -> list[tuple[int, int, float]]:
    """By hand: (length, tokens so far, learning rate) of each step, until `total` tokens are seen."""
    found, tokens, warmup = [], 0, WARMUP * BATCH * 64
    while tokens < total:
        length = length_at(len(found) + 1, SECTION)
        tokens += BATCH * length
        rate = LR * tokens / warmup
        if tokens >= warmup:
            rate = 0.1 * LR + 0.9 * LR * (1 + math.cos(math.pi * min(1, (tokens - warmup) / (total - warmup)))) / 2
        found.append((length, tokens, rate))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lengths_tokens_and_learning_rate_are_those_of_a_table(stage, two_ranks, corpus, tmp_path):
    lines = trained(two_ranks, flags(corpus, tmp_path, stage, "r"))
    table = expected(STEPS * BATCH * 64)
    assert len(table) > STEPS
    assert [(line["seq_len"], line["tokens"]) for line in lines] == [row[:2] for row in table]
    assert [line["lr"] for line in lines] == pytest.approx([row[2] for row in table], rel=1e-9)
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


def test_stages_ranks_and_a_resume_give_the_same_losses(one_rank, two_ranks, corpus, tmp_path):
    first = trained(two_ranks, flags(corpus, tmp_path, 0, "s0"))
    for pool, stage in ((two_ranks, 1), (two_ranks, 2), (two_ranks, 3), (one_rank, 1)):
        lines = trained(pool, flags(corpus, tmp_path, stage, f"s{stage}of{1 if pool is one_rank else 2}"))
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in first], abs=1e-5)
    whole = flags(corpus, tmp_path, 2, "resumed", "--save_every", "20")
    trained(two_ranks, whole)
    for step in (len(first), 60):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    lines = trained(two_ranks, [*whole, "--resume"])
    assert [line["seq_len"] for line in lines] == [line["seq_len"] for line in first]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in first], abs=1e-5)


@pytest.mark.parametrize("mode", ["truncate", "reshape"])
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


def test_the_first_position_and_the_last_get_their_gradients_at_their_lengths(one_rank, corpus, tmp_path):
    """Positions beyond the length are not trained: their embeddings only decay, until the length reaches them."""
    section = {**SECTION, "schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 64], "max_step": [1000]}}
    run = flags(corpus, tmp_path, 1, "r", section=section)
    run += ["--steps", "3", "--warmup_steps", "1"]
    lines = one_rank.run("tests.distributed.jobs:pretrain_with", technique="WatchedPositions", flags=run)[0]
    assert lines[-1]["moved_up_to"] == 8
