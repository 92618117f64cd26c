"""Batch-size warm-up on real ranks: sizes, tokens and learning rate of every step, every sample once, the same losses everywhere."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pytest

from launch.config.flags import as_words
from launch.config.run_config import resolve
from tests.helpers import losses, resumed_after

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 64}
BATCH, STEPS, LR, WARMUP = 16, 20, 5e-4, 2
SECTION = {"min_batch_size": 4, "increment": 4, "warmup_tokens": 10_240}
#: (steps, sequences): a third of 10,240 tokens each. 14 x 256 = 3,584 tokens; 7 x 512 more are 7,168; 4 x 768 more are 10,240.
TABLE = [(14, 4), (7, 8), (4, 12), (10, 16)]
SIZES = [size for steps, size in TABLE for _ in range(steps)]


def flags(corpus, tmp_path, stage: int, name: str, *more: str) -> list[str]:
    values = {**SHAPE, "data": corpus, "runs_dir": tmp_path, "run_name": name, "steps": STEPS, "global_batch_size": BATCH}
    values |= {"micro_batch_size": 4, "lr": LR, "warmup_steps": WARMUP, "eval_every": 0, "save_every": 0}
    run = ["--deepspeed_config", f"ds_configs/zero{stage}_fp32.json"]
    run += as_words(values)
    return [*run, "--set", f"batch_size_warmup={json.dumps(SECTION)}", *more]


def rate(tokens: int) -> float:
    """The learning rate by hand: linear over WARMUP whole batches, then a cosine to a tenth at the run's last token."""
    warmup, total = WARMUP * BATCH * 64, STEPS * BATCH * 64
    if tokens < warmup:
        return LR * tokens / warmup
    return 0.1 * LR + 0.9 * LR * (1 + math.cos(math.pi * (tokens - warmup) / (total - warmup))) / 2


@pytest.fixture(scope="module")
def first(one_rank, corpus, tmp_path_factory) -> list[dict]:
    """The lines of stage 0 on one rank, with which all others are compared."""
    return one_rank.train(flags(corpus, tmp_path_factory.mktemp("first"), 0, "r"))


def test_sizes_tokens_and_learning_rate_are_those_of_a_table(first, two_ranks, corpus, tmp_path):
    for lines in (first, two_ranks.train(flags(corpus, tmp_path, 1, "r"))):
        assert [line["batch_size"] for line in lines] == SIZES
        consumed = [0, *(line["tokens"] for line in lines)]
        assert [after - before for before, after in pairwise(consumed)] == [size * 64 for size in SIZES]
        assert consumed[-1] == STEPS * BATCH * 64, "the tokens that were asked for, in more steps"
        assert [line["lr"] for line in lines] == pytest.approx([rate(tokens) for tokens in consumed[1:]], rel=1e-9)
        assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    log = (tmp_path / "r" / "log.txt").read_text(encoding="utf-8")
    assert "1,024 tokens a full step, 35 steps, 20,480 tokens" in log
    assert "step    35/35  loss" in log


GRID = [(ranks, stage) for ranks in (1, 2) for stage in range(4) if (ranks, stage) != (1, 0)]


@pytest.mark.parametrize(("ranks", "stage"), [pytest.param(*at, marks=() if at == (2, 3) else pytest.mark.long) for at in GRID])
def test_stages_and_ranks_give_the_same_losses(ranks, stage, first, one_rank, two_ranks, corpus, tmp_path):
    lines = {1: one_rank, 2: two_ranks}[ranks].train(flags(corpus, tmp_path, stage, "r"))
    assert losses(lines) == pytest.approx(losses(first), abs=5e-6)


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 3))])
def test_a_resumed_run_has_the_sizes_and_losses_of_an_uninterrupted_one(stage, first, two_ranks, corpus, tmp_path):
    """From the middle of the second stage, and of the first with the full batch."""
    run = flags(corpus, tmp_path, stage, "r", "--save_every", "17")
    whole = two_ranks.train(run)
    for kept in (34, 17):
        for step in {34, 35} - set(range(kept + 1)):
            shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{step:08d}")
        lines = two_ranks.train([*run, "--resume"])
        assert [line["batch_size"] for line in lines] == SIZES
        assert losses(lines) == losses(whole), "bit for bit"
        assert resumed_after(tmp_path / "r") == kept
    assert losses(whole) == pytest.approx(losses(first), abs=5e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_is_seen_once_and_in_the_samplers_order(ranks, one_rank, two_ranks, corpus, tmp_path):
    run = flags(corpus, tmp_path, 1, "r")
    seen = {1: one_rank, 2: two_ranks}[ranks].run("tests.distributed.jobs:windows_seen", flags=run)
    loader = resolve(run, ranks=1)[0].training_loader(SimpleNamespace(rank=0, world_size=1, device="cpu"))
    (order,) = loader.micro_batches(0, sum(SIZES), 1)
    before = 0
    for step, size in enumerate(SIZES):
        assert sorted(window for rank in seen for window in rank[step]) == sorted(order[before : before + size].tolist())
        assert {len(rank[step]) for rank in seen} == {size // ranks}
        before += size


CURRICULUM = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [16, 64], "max_step": [20]}}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_it_works_with_the_curriculum_and_with_layers_dropped(mode, one_rank, two_ranks, corpus, tmp_path):
    """Stages count sequences at full length, so that the sizes of the first steps are the same."""
    sections = {"curriculum_learning": CURRICULUM | {"mode": mode}, "progressive_layer_drop": {"theta": 0.5, "gamma": 0.1}}
    more = [text for key, section in sections.items() for text in ("--set", f"{key}={json.dumps(section)}")]
    lines = two_ranks.train(flags(corpus, tmp_path, 3, "r", *more))
    assert [line["batch_size"] for line in lines[: len(SIZES)]] == SIZES
    assert {line["batch_size"] for line in lines[len(SIZES) :]} <= {BATCH}
    consumed = [0, *(line["tokens"] for line in lines)]
    lengths = [16 if step < 20 and mode == "truncate" else 64 for step in range(len(lines))]
    sizes = [line["batch_size"] for line in lines]
    assert [after - before for before, after in pairwise(consumed)] == [size * length for size, length in zip(sizes, lengths, strict=True)]
    assert {line["kept_blocks"] for line in lines} == {1, 2}
    log = (tmp_path / "r" / "log.txt").read_text(encoding="utf-8")
    assert f"step {len(lines):>5}/{len(lines)}  loss" in log
    other = one_rank.train(flags(corpus, tmp_path, 0, "other", *more))
    assert losses(other) == pytest.approx(losses(lines), abs=5e-6)
