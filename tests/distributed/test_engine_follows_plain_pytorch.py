"""Every ZeRO stage and offload, on one and two ranks, with and without accumulation, trains what a plain PyTorch loop trains.

In fp32 within what the order of sums does; in TF32, bf16 and fp16 within what their rounding does. On the CPU, or with --device cuda on
GPUs (a rank needs one of its own).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from launch.config.flags import as_words
from model.gpt import BlockRunner, run_all_blocks
from tests.distributed.jobs import drops_block_1
from tests.distributed.reference import Step, UncorrectedAdam, reference_steps, run_all_but

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 384, "seq_len": 64}  # 4 M parameters: large enough for the fp32 norm to go wrong
STEPS, BATCH, LR, WARMUP, SEED = 30, 12, 5e-4, 3, 5
SMALL = {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 32}
#: fp32: above what the order of sums does (1e-6), below the smallest fault that was found (3.7e-5, a norm summed in fp32).
TOLERANCE = 5e-6
#: bf16 keeps 8 bits: the order of sums moves the loss by up to 1.3e-3, rounding by 4e-3, an uncorrected fault by 4.8e-2.
BF16_STAGES, BF16_FP32 = 3e-3, 1e-2
#: fp16 keeps 11 bits.
FP16_FP32 = 1e-2
ON_DRIVE = {"device": "nvme", "nvme_path": "auto"}
#: Name -> (stage, what is changed in its JSON).
FORMS = {
    **{f"stage {stage}": (stage, {}) for stage in (0, 1, 2, 3)},
    **{f"stage {stage}, optimizer offloaded": (stage, {"offload_optimizer": {"device": "cpu"}}) for stage in (1, 2, 3)},
    "stage 3, all offloaded": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "stage 3, all off on a drive": (3, {"offload_optimizer": ON_DRIVE, "offload_param": {**ON_DRIVE, "buffer_size": 1_000_000}}),
}


def grid(is_quick: Callable[[str, int, int], bool] = lambda *case: False) -> pytest.MarkDecorator:
    """Every form, plain and with accumulation on two ranks: (form, accumulation, ranks); what is not quick is left to `make test_all`."""
    every = [(form, *at) for form in FORMS for at in ((1, 1), (3, 2))]
    marked = [pytest.param(*case, marks=[] if is_quick(*case) else pytest.mark.long) for case in every]
    return pytest.mark.parametrize(("form", "accumulation", "ranks"), marked)


def is_plain(form: str, accumulation: int, ranks: int) -> bool:
    """Without offload, at the stage that partitions everything."""
    return (accumulation, ranks) == (3, 2) and form == "stage 3"


@pytest.fixture(scope="module")
def reference(corpus) -> list[Step]:
    return reference_steps(corpus, SHAPE, STEPS, BATCH, LR, WARMUP, SEED)


@pytest.fixture(scope="module")
def small_reference(corpus) -> Callable[..., list[Step]]:
    """The reference of a small model, by its options; each is computed once."""

    @cache
    def steps(accumulation: int = 1, drops: bool = False, skips: tuple[int, ...] = ()) -> list[Step]:
        """drops: whether block 1 is left out of some steps, and of the last micro-batch of others, whose gradient the others bring."""

        def runner_of(step: int, micro_step: int) -> BlockRunner:
            return run_all_but(1) if drops and drops_block_1(step, micro_step, accumulation) else run_all_blocks

        options = {"accumulation": accumulation, "runner_of": runner_of, "skips": skips}
        return reference_steps(corpus, SMALL, STEPS, BATCH, LR, WARMUP, SEED, **options)

    return steps


def fixture_at_stage_0(train: Callable[..., list[float]]) -> Any:
    """A fixture: the losses of stage 0 on one rank, by precision, with which the other stages must agree; each is computed once.

    train: (pool, corpus, folder, precision) -> losses.
    """

    @pytest.fixture(scope="module")
    def losses(one_rank, corpus, tmp_path_factory) -> Callable[[str], list[float]]:
        return cache(lambda precision: train(one_rank, corpus, tmp_path_factory.mktemp("stage_0"), precision))

    return losses


at_stage_0 = fixture_at_stage_0(
    lambda pool, corpus, folder, precision: trained(pool, flags=flags(corpus, folder, SHAPE, "stage 0", 1, 1, precision))
)


def flags(corpus, tmp_path, shape: dict, form: str, ranks: int, accumulation: int, precision: str = "fp32") -> list[str]:
    stage, changes = FORMS[form]
    values = {
        "deepspeed_config": f"ds_configs/zero{stage}_{precision}.json",
        **shape,
        "data": corpus,
        "runs_dir": tmp_path,
        "run_name": "r",
        "steps": STEPS,
        "global_batch_size": BATCH,
        "micro_batch_size": BATCH // ranks // accumulation,
        "lr": LR,
        "warmup_steps": WARMUP,
        "seed": SEED,
        "eval_every": 0,
        "save_every": 0,
    }
    sections = [part for key, value in changes.items() for part in ("--set", f"zero_optimization.{key}={json.dumps(value)}")]
    return as_words(values) + sections


@pytest.fixture
def pool(request, pools, form, ranks):
    """The ranks that train `form`; skips where this machine cannot."""
    if "drive" in form:
        request.getfixturevalue("drive")
    return pools.of(ranks)


def largest_difference(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def losses_of(steps: list[Step]) -> list[float]:
    return [step.loss for step in steps]


def trained(pool, **arguments) -> list[float]:
    """Losses of a run that learns and clips; a model that does neither agrees with anything."""
    lines = pool.run("tests.distributed.jobs:pretrain", **arguments)[0]
    losses = [line["loss"] for line in lines]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1.0
    assert any(line["grad_norm"] > 1.0 for line in lines)
    return losses


@grid(is_plain)
def test_losses_are_those_of_plain_pytorch(form, accumulation, ranks, pool, corpus, reference, at_stage_0, tmp_path):
    losses = trained(pool, flags=flags(corpus, tmp_path, SHAPE, form, ranks, accumulation))
    assert largest_difference(losses, losses_of(reference)) <= TOLERANCE
    assert largest_difference(losses, at_stage_0("fp32")) <= TOLERANCE


@grid()
def test_a_layer_without_a_gradient_is_stepped_with_zero(form, accumulation, ranks, pool, corpus, small_reference, tmp_path):
    """Block 1 is left out of every third step, and of the last micro-batch of every fourth."""
    job = {"technique": "DroppedBlock", "flags": flags(corpus, tmp_path, SMALL, form, ranks, accumulation)}
    losses = [line["loss"] for line in pool.run("tests.distributed.jobs:pretrain_with", **job)[0]]
    expected = losses_of(small_reference(accumulation, drops=True))
    assert largest_difference(expected, losses_of(small_reference())) > 1e-2, "a block that may be left out without a trace shows nothing"
    assert largest_difference(losses, expected) <= TOLERANCE


@pytest.mark.usefixtures("measured_text")
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("form", [pytest.param(form, marks=[] if form == "stage 3" else pytest.mark.long) for form in FORMS])
def test_adam_without_bias_correction(form, ranks, pool, corpus, small_reference, tmp_path):
    run = [*flags(corpus, tmp_path, SMALL, form, ranks, 1), "--set", "optimizer.params.bias_correction=false"]
    losses = [line["loss"] for line in pool.train(run)]
    expected = losses_of(reference_steps(corpus, SMALL, STEPS, BATCH, LR, WARMUP, SEED, adam=UncorrectedAdam))
    assert largest_difference(losses, expected) <= TOLERANCE
    assert largest_difference(losses_of(small_reference()), expected) > 0.03


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", [1])
@pytest.mark.parametrize("form", ["stage 0", "stage 3"])
def test_in_tf32_the_losses_follow_fp32(form, ranks, pools, corpus, tmp_path):
    """TF32 keeps 11 bits of what is multiplied."""
    steps = reference_steps(corpus, SHAPE, STEPS, BATCH, LR, WARMUP, SEED)
    run = [*flags(corpus, tmp_path, SHAPE, form, ranks, 1), "--set", "tf32.enabled=true"]
    losses = trained(pools.of(ranks), flags=run)
    assert 1e-6 < largest_difference(losses, losses_of(steps)) <= FP16_FP32


@grid()
def test_in_bf16_the_stages_agree_and_follow_fp32(form, accumulation, ranks, pool, corpus, reference, at_stage_0, tmp_path):
    run = flags(corpus, tmp_path, SHAPE, form, ranks, accumulation, "bf16")
    losses = trained(pool, flags=run)
    assert largest_difference(losses, losses_of(reference)) <= BF16_FP32
    assert largest_difference(losses, at_stage_0("bf16")) <= BF16_STAGES


@grid(is_plain)
def test_in_fp16_an_overflow_on_one_rank_is_skipped_by_all(form, accumulation, ranks, pool, corpus, small_reference, tmp_path):
    """From a scale of 2^16; the last rank's first micro-batch of step 4 overflows, and of steps 9 and 10."""
    overflows = (4, 9, 10)
    job = {"overflows": overflows, "rank": ranks - 1, "micro_step": 0}
    results = pool.run(
        "tests.distributed.failure_jobs:fp16_run", flags=flags(corpus, tmp_path, SMALL, form, ranks, accumulation, "fp16"), **job
    )
    lines = results[0]["lines"]
    assert [line["step"] for line in lines if line["overflow"]] == list(overflows)
    assert [line["loss_scale"] for line in lines] == [2.0 ** (16 - sum(step < line["step"] for step in overflows)) for line in lines]
    assert [line["skipped_steps"] for line in lines] == [sum(step <= line["step"] for step in overflows) for line in lines]
    assert len({result["digest"] for result in results}) == 1, "the weights are the same on all ranks"
    expected = small_reference(skips=overflows)
    clean = [(line, step) for line, step in zip(lines, expected, strict=True) if not line["overflow"]]
    assert max(abs(line["loss"] - step.loss) for line, step in clean) <= FP16_FP32
    # Clipping acts at the right norm: the norm before it is that of fp32, and above the limit of 1 for some steps.
    assert [line["grad_norm"] for line, _ in clean] == pytest.approx([step.norm for _, step in clean], rel=2e-2)
    assert any(step.norm > 1.0 for _, step in clean)
    assert largest_difference(losses_of(expected), losses_of(small_reference())) > FP16_FP32, "skipped steps must show"
