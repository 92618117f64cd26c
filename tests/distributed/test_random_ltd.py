"""Random layerwise token dropping trains what a plain PyTorch loop with the same draws trains, at every stage, offload and precision."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from model.gpt import BlockRunner, run_all_blocks
from recipes.random_ltd.technique import reserved_length
from tests.distributed.reference import document_by_document, random_ltd, reference_steps, whole_windows
from tests.distributed.test_engine_follows_plain_pytorch import (  # noqa: F401 (a fixture)
    BATCH,
    FORMS,
    LR,
    SEED,
    STEPS,
    WARMUP,
    fixture_at_stage_0,
    grid,
    is_plain,
    largest_difference,
    pool,
)
from tests.distributed.test_engine_follows_plain_pytorch import flags as engine_flags
from tests.distributed.test_no_cross_document import short_documents  # noqa: F401 (a fixture)
from tests.helpers import resumed_after

SHAPE = {"n_layer": 4, "n_head": 2, "d_model": 64, "seq_len": 32}
#: Not all of the middle blocks; 8 to 24 tokens in the first 20 steps, then all 32.
LAYERS = [1, 3]
SCHEDULE = {"min_value": 8, "max_value": 32, "schedule_config": {"require_steps": 20, "seq_per_step": 8}}
SECTION = {"random_ltd_layer_id": LAYERS, "random_ltd_schedule": SCHEDULE}
TOLERANCE, BF16_STAGES, BF16_FP32, FP16_FP32 = 5e-6, 2e-3, 3e-3, 1e-3
CHECKPOINTED = ["--set", "activation_checkpointing.number_checkpoints=2"]
JOB = "tests.distributed.jobs:pretrain"
length_of = partial(reserved_length, schedule=SCHEDULE)


def runner_of(drops: bool) -> Callable[[int, int], BlockRunner]:
    return random_ltd(SEED, SHAPE["seq_len"], LAYERS, length_of) if drops else lambda step, micro_step: run_all_blocks


@pytest.fixture(scope="module")
def expected(corpus) -> Callable[..., list[float]]:
    """The losses of the reference, with and without dropping; each is computed once."""

    @cache
    def losses(drops: bool = True) -> list[float]:
        steps = reference_steps(corpus, SHAPE, STEPS, BATCH, LR, WARMUP, SEED, runner_of=runner_of(drops))
        return [step.loss for step in steps]

    return losses


at_stage_0 = fixture_at_stage_0(
    lambda ranks, corpus, folder, precision: losses_of(trained(ranks, flags(corpus, folder, "stage 0", 1, 1, precision=precision)))
)


def flags(corpus, tmp_path, form: str, ranks: int, accumulation: int, *more: str, precision: str = "fp32") -> list[str]:
    run = engine_flags(corpus, tmp_path, SHAPE, form, ranks, accumulation, precision)
    return [*run, "--set", f"random_ltd={json.dumps(SECTION)}", *more]


def trained(ranks, run: list[str], job: str = JOB, **more) -> list[dict]:
    return ranks.run(job, flags=run, **more)[0]


def losses_of(lines: list[dict]) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


def by_quickness(is_quick: Callable[[str, bool], bool]) -> pytest.MarkDecorator:
    """All of (stage, checkpointed); what is not quick is left to `make test_all`."""
    every = [(f"stage {stage}", checkpointed) for stage in range(4) for checkpointed in (False, True)]
    marked = [pytest.param(*case, marks=[] if is_quick(*case) else pytest.mark.long) for case in every]
    return pytest.mark.parametrize(("form", "checkpointed"), marked)


@grid(is_plain)
def test_losses_are_those_of_plain_pytorch(form, accumulation, ranks, pool, corpus, expected, tmp_path):  # noqa: F811
    lines = trained(pool, flags(corpus, tmp_path, form, ranks, accumulation))
    assert [line["reserved_length"] for line in lines] == [length_of(line["step"]) for line in lines]
    assert largest_difference(losses_of(lines), expected()) <= TOLERANCE
    assert largest_difference(expected(), expected(drops=False)) > 0.02, "what is dropped must show"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
@by_quickness(lambda form, checkpointed: checkpointed and form == "stage 3")
def test_a_block_that_is_computed_again_sees_the_same_tokens(form, checkpointed, ranks, pool, corpus, expected, tmp_path):  # noqa: F811
    lines = trained(pool, flags(corpus, tmp_path, form, ranks, 1, *(CHECKPOINTED if checkpointed else [])))
    assert largest_difference(losses_of(lines), expected()) <= TOLERANCE


@grid()
def test_in_bf16_the_stages_agree_and_follow_fp32(form, accumulation, ranks, pool, corpus, expected, at_stage_0, tmp_path):  # noqa: F811
    losses = losses_of(trained(pool, flags(corpus, tmp_path, form, ranks, accumulation, precision="bf16")))
    assert largest_difference(losses, expected()) <= BF16_FP32
    assert largest_difference(losses, at_stage_0("bf16")) <= BF16_STAGES


@pytest.mark.long
@pytest.mark.parametrize(("form", "accumulation", "ranks"), [(form, 3, 2) for form in FORMS])
def test_in_fp16_the_losses_follow_fp32(form, accumulation, ranks, pool, corpus, expected, tmp_path):  # noqa: F811
    losses = losses_of(trained(pool, flags(corpus, tmp_path, form, ranks, accumulation, precision="fp16")))
    assert largest_difference(losses, expected()) <= FP16_FP32


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=[] if stage == 1 else pytest.mark.long) for stage in range(4)])
def test_a_resumed_run_is_the_uninterrupted_one(stage, two_ranks, corpus, tmp_path):
    run = flags(corpus, tmp_path, f"stage {stage}", 2, 1, "--save_every", "10", *CHECKPOINTED)
    whole = trained(two_ranks, run)
    for step in (20, 30):
        shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{step:08d}")
    resumed = trained(two_ranks, [*run, "--resume"])
    for key in ("reserved_length", "kept_blocks", "loss"):
        assert [line[key] for line in resumed] == [line[key] for line in whole]
    assert resumed_after(tmp_path / "r") == 10


def test_only_the_named_blocks_drop_tokens_and_evaluation_sees_them_all(one_rank, corpus, tmp_path):
    run = flags(corpus, tmp_path, "stage 0", 1, 3, "--eval_every", "5", "--eval_batches", "1", "--steps", "10")
    lines = trained(one_rank, run, "tests.distributed.jobs:pretrain_with", technique="WatchedTokens")
    for line in lines[1:]:
        assert (line["min_training"], line["max_training"]) == (length_of(line["step"]), 32)
    assert lines[-1]["min_training"] < 32
    assert (lines[-1]["min_evaluation"], lines[-1]["max_evaluation"]) == (32, 32)


def test_rows_that_a_curriculum_cuts_lose_no_more_than_they_have(one_rank, corpus, tmp_path):
    schedule = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 16, 32], "max_step": [3, 6]}}
    run = flags(corpus, tmp_path, "stage 1", 1, 1, "--set", f"curriculum_learning={json.dumps(schedule)}", "--steps", "10")
    run += ["--set", "random_ltd.random_ltd_schedule.min_value=16"]
    lines = trained(one_rank, run, "tests.distributed.jobs:pretrain_with", technique="WatchedTokens")
    assert [line["min_training"] for line in lines[:8]] == [8] * 3 + [16] * 5
    assert [line["reserved_length"] for line in lines[:8]] == [8] * 3 + [16] * 5
    assert [line["kept_blocks"] == 4 for line in lines[:8]] == [True] * 6 + [False] * 2


@pytest.fixture(scope="module")
def documents(short_documents) -> list[float]:  # noqa: F811
    """The losses of the reference over windows whose documents are run one by one; they differ from those of whole windows."""
    options = {"runner_of": runner_of(True)}
    apart, whole = (
        losses_of(
            [step._asdict() for step in reference_steps(short_documents, SHAPE, 12, BATCH, LR, WARMUP, SEED, loss_of=loss, **options)]
        )
        for loss in (document_by_document, whole_windows)
    )
    assert largest_difference(apart, whole) > 1e-2
    return apart


@by_quickness(lambda form, checkpointed: (form, checkpointed) == ("stage 0", False))
def test_kept_tokens_see_their_own_document_alone(form, checkpointed, two_ranks, short_documents: Path, documents, tmp_path):  # noqa: F811
    more = ["--no_cross_document", "--steps", "12", *(CHECKPOINTED if checkpointed else [])]
    lines = trained(two_ranks, flags(short_documents, tmp_path, form, 2, 3, *more))
    assert largest_difference(losses_of(lines), documents) <= TOLERANCE
