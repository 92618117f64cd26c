"""Progressive Layer Dropping trains what a plain PyTorch loop with the paper's algorithm trains, at every stage, offload and precision."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache

import pytest

from recipes.progressive_layer_drop.technique import draws, keep_probabilities, theta_at
from tests.distributed.reference import progressive_layer_drop, reference_steps
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
from tests.helpers import resumed_after

SHAPE = {"n_layer": 4, "n_head": 2, "d_model": 64, "seq_len": 32}
THETA, GAMMA = 0.4, 0.5
TOLERANCE, STAGES, BF16_FP32, FP16_FP32 = 5e-6, 2e-3, 3e-3, 1e-3


@pytest.fixture(scope="module")
def expected(corpus) -> Callable[..., list[float]]:
    """The losses of the reference, by its options; each is computed once."""

    @cache
    def losses(drops: bool = True, accumulation: int = 1) -> list[float]:
        runner_of = progressive_layer_drop(SEED, SHAPE["n_layer"], THETA if drops else 1.0, GAMMA)
        steps = reference_steps(corpus, SHAPE, STEPS, BATCH, LR, WARMUP, SEED, accumulation=accumulation, runner_of=runner_of)
        return [step.loss for step in steps]

    return losses


at_stage_0 = fixture_at_stage_0(lambda ranks, corpus, folder, precision: trained(ranks, flags(corpus, folder, "stage 0", 1, 1, precision)))


def flags(corpus, tmp_path, form: str, ranks: int, accumulation: int, precision: str = "fp32", **more) -> list[str]:
    section = {"theta": THETA, "gamma": GAMMA, **more}
    run = engine_flags(corpus, tmp_path, SHAPE, form, ranks, accumulation, precision)
    return [*run, "--set", f"progressive_layer_drop={json.dumps(section)}"]


def trained(pool, run: list[str], job: str = "tests.distributed.jobs:pretrain") -> list[float]:  # noqa: F811
    return [line["loss"] for line in pool.run(job, flags=run)[0]]


CHECKPOINTED = ["--set", "activation_checkpointing.number_checkpoints=2"]


@grid(is_plain)
def test_losses_are_those_of_the_papers_algorithm(form, accumulation, ranks, pool, corpus, expected, tmp_path):  # noqa: F811
    losses = trained(pool, flags(corpus, tmp_path, form, ranks, accumulation))
    assert largest_difference(losses, expected()) <= TOLERANCE
    assert largest_difference(expected(), expected(drops=False)) > 0.02, "what is dropped must show"


@pytest.mark.long
@pytest.mark.parametrize(("form", "accumulation", "ranks"), [(form, 3, 2) for form in FORMS])
def test_under_activation_checkpointing_too(form, accumulation, ranks, pool, corpus, expected, tmp_path):  # noqa: F811
    losses = trained(pool, flags(corpus, tmp_path, form, ranks, accumulation) + CHECKPOINTED)
    assert largest_difference(losses, expected()) <= TOLERANCE


@grid(is_plain)
def test_in_bf16_the_stages_agree_and_follow_fp32(form, accumulation, ranks, pool, corpus, expected, at_stage_0, tmp_path):  # noqa: F811
    losses = trained(pool, flags(corpus, tmp_path, form, ranks, accumulation, "bf16"))
    assert largest_difference(losses, expected()) <= BF16_FP32
    assert largest_difference(expected(drops=False), expected()) > BF16_FP32, "what is dropped must show"
    assert largest_difference(losses, at_stage_0("bf16")) <= STAGES


@pytest.mark.long
@pytest.mark.parametrize(("form", "accumulation", "ranks"), [(form, 3, 2) for form in FORMS])
def test_in_fp16_the_stages_agree_and_follow_fp32(form, accumulation, ranks, pool, corpus, expected, at_stage_0, tmp_path):  # noqa: F811
    run = flags(corpus, tmp_path, form, ranks, accumulation, "fp16")
    losses = trained(pool, run, "tests.distributed.jobs:pretrain")
    assert largest_difference(losses, expected()) <= FP16_FP32
    assert largest_difference(losses, at_stage_0("fp16")) <= STAGES


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=[] if stage == 1 else pytest.mark.long) for stage in range(4)])
def test_theta_and_gates_go_on_through_a_resume_on_all_ranks(stage, one_rank, two_ranks, corpus, tmp_path):
    def lines(ranks, name: str, *more: str) -> list[dict]:
        run = flags(corpus, tmp_path, f"stage {stage}", 1 if ranks is one_rank else 2, 1)
        return ranks.train([*run, "--run_name", name, "--save_every", "10", *more])

    whole = lines(two_ranks, "whole")
    for line in whole:
        theta = theta_at(line["step"], THETA, GAMMA)
        assert line["theta"] == theta
        numbers = draws(SEED, line["step"], SHAPE["n_layer"])
        kept = [number < p for number, p in zip(numbers, keep_probabilities(theta, SHAPE["n_layer"]), strict=True)]
        assert line["kept_blocks"] == sum(kept)
    assert {line["kept_blocks"] for line in whole} >= {2, 3, 4}
    other = lines(one_rank, "other")
    assert [line["kept_blocks"] for line in other] == [line["kept_blocks"] for line in whole]
    for step in (20, 30):
        shutil.rmtree(tmp_path / "whole" / "checkpoints" / f"step-{step:08d}")
    resumed = lines(two_ranks, "whole", "--resume")
    assert resumed_after(tmp_path / "whole") == 10
    for key in ("theta", "kept_blocks", "loss"):
        assert [line[key] for line in resumed] == [line[key] for line in whole]


@pytest.mark.long
def test_a_compiled_block_is_dropped_and_scaled_alike(one_rank, corpus, expected, tmp_path):
    run = flags(corpus, tmp_path, "stage 1", 1, 1)
    lines = one_rank.run("tests.distributed.jobs:pretrain_with", technique="CompiledBlocks", flags=run)[0]
    assert largest_difference([line["loss"] for line in lines], expected()) <= TOLERANCE
    # One without a scale and one with, of all blocks together. A graph for each probability would be eight, dynamo's limit, and then none.
    assert lines[4]["compiled_graphs"] == lines[-1]["compiled_graphs"] <= 3


def test_a_dropped_block_does_not_run_and_evaluation_runs_them_all(one_rank, corpus, tmp_path):
    run = [*flags(corpus, tmp_path, "stage 0", 1, 3), "--eval_every", "10"]
    lines = one_rank.run("tests.distributed.jobs:pretrain_with", technique="CountedBlocks", flags=run)[0]
    for line in lines[1:]:
        assert line["training_calls"] == 3 * line["kept_blocks"]
    assert lines[-1]["evaluation_calls"] == SHAPE["n_layer"] * lines[-1]["evaluation_passes"] > 0
