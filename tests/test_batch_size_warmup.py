"""Batch-size warm-up: its stages by hand and by plain counting, its own choices for any batch, and what its section may say."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.batch_size_warmup.technique import BatchSizeWarmup, stages
from recipes.technique import StepWork
from tests import helpers

explain = partial(helpers.explain, "--recipe", "recipes/batch_size_warmup")


def made(section: dict[str, Any], ranks: int, per_rank: int, micro_batch_size: int = 1, steps: int = 40) -> BatchSizeWarmup:
    """The technique for a run of `steps` whole batches of `per_rank` sequences of 16 tokens a rank."""
    run = SimpleNamespace(data_ranks=ranks, micro_batch_size=micro_batch_size, gradient_accumulation_steps=per_rank // micro_batch_size)
    run.ranks_in_words = f"{ranks} ranks"
    run.global_batch_size, run.shape, run.steps = ranks * per_rank, SimpleNamespace(seq_len=16), steps
    run.total_tokens, run.scheduler = run.global_batch_size * 16 * steps, {"type": "WarmupCosineTokens"}
    return BatchSizeWarmup(section, run)


def test_the_stages_are_those_of_a_table():
    # A third of 128,000 tokens each: 42 steps of 1,024 are 43,008; 21 of 2,048 more are 86,016; 14 of 3,072 more are 129,024.
    assert stages(8, 8, 32, 128_000, 128) == [(1, 8), (43, 16), (64, 24), (78, 32)]


def test_a_stage_that_ends_with_a_step_has_no_step_more():
    # A half of 320 tokens: 10 steps of 16, then 5 of 32.
    assert stages(1, 1, 3, 320, 16) == [(1, 1), (11, 2), (16, 3)]


def test_stages_shorter_than_a_step_are_passed_over():
    assert stages(1, 1, 100, 50, 64) == [(1, 1), (2, 100)]
    # Eighths of 128 tokens, 16 each: after step 1 (16 tokens) size 2, after step 2 (48) size 4, after step 3 (112) size 8.
    assert stages(1, 1, 9, 128, 16) == [(1, 1), (2, 2), (3, 4), (4, 8), (5, 9)]


def test_a_full_batch_from_the_start_has_one_stage():
    assert stages(8, 8, 8, 1000, 16) == [(1, 8)]


@pytest.mark.parametrize("warmup_tokens", [1, 7, 500, 12_345])
@pytest.mark.parametrize(("start", "increment", "full"), [(1, 1, 8), (2, 3, 32), (4, 28, 32), (6, 2, 64), (5, 5, 5)])
def test_every_step_has_the_size_of_the_stage_in_which_it_begins(start, increment, full, warmup_tokens):
    found, sizes = stages(start, increment, full, warmup_tokens, 16), (full - start) // increment
    tokens = 0
    for step in range(1, 400):
        expected = start + increment * next(
            (stage for stage in range(sizes) if tokens * sizes < (stage + 1) * warmup_tokens), sizes
        )  # the first stage whose end has not been reached
        assert [size for first, size in found if first <= step][-1] == expected
        tokens += expected * 16
    assert tokens > warmup_tokens


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("given", [{}, {"min_batch_size": 1}, {"increment": 1}, {"increment": 5}, {"min_batch_size": 3}], ids=json.dumps)
def test_what_is_left_auto_is_valid_for_any_batch(given, ranks):
    for per_rank in range(1, 50):
        section = {key: min(size, per_rank) * ranks for key, size in given.items()}
        technique = made(section, ranks, per_rank, max(size for size in (1, 2, 3) if per_rank % size == 0))
        sizes = [technique.batch_size_at(step) for step in range(1, 2000)]
        assert sizes == sorted(sizes)
        assert sizes[-1] == ranks * per_rank
        assert sizes[0] == section.get("min_batch_size", sizes[0])
        if not given:
            assert sizes[0] == ranks if per_rank < 4 else sizes[0] <= ranks * per_rank / 4
        for step in (1, 10, 100, 1999):
            work = technique.on_step(step, StepWork(0, 0, 64))
            assert work.sequences * ranks == sizes[step - 1]
            assert work.micro_batch_size <= technique.micro_batch_size


def test_the_micro_batch_is_the_largest_divisor_up_to_the_runs():
    technique = made({"min_batch_size": 2, "increment": 2}, 2, 8, micro_batch_size=4)
    plans = dict.fromkeys(technique.on_step(step, StepWork(0, 0, 64)) for step in range(1, 1000))
    assert [work[:2] for work in plans] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
        (1, 5),
        (3, 2),
        (1, 7),
        (4, 2),
    ]


def test_explain_counts_the_steps_and_says_what_grows():
    done = explain("--ranks", "2")
    page = json.loads(done.stdout)
    # 77 steps hold 129,024 of 512,000 tokens; the other 382,976 are 93.5 whole batches of 4,096.
    assert page["length"]["steps"] == 171
    assert [row["batch_size"] for row in page["over_the_run"]] == [8, 24, 32, 32, 32]
    assert page["over_the_run"][-1]["tokens"] == 129_024 + 94 * 4096
    assert page["flops"]["run"] == page["flops"]["per_token"] * (129_024 + 94 * 4096)
    assert any("8 sequences per step at first, growing by 8, all 32 from step 78 on" in note for note in page["notes"])
    done = explain("--ranks", "32")
    assert any("does not grow" in note for note in json.loads(done.stdout)["notes"])
