"""Every ZeRO stage and offload, on one and two ranks, with and without accumulation, trains what a plain PyTorch loop trains."""

from __future__ import annotations

import json

import pytest

from tests.distributed.jobs import drops_block_1
from tests.distributed.reference import reference_losses

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 384, "seq_len": 64}  # 4 M parameters: large enough for the fp32 norm to go wrong
STEPS, BATCH, LR, WARMUP, SEED = 30, 12, 1e-3, 3, 5
SMALL = {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 32}
TOLERANCE = 1e-5
#: Name -> (stage, what is changed in its JSON).
FORMS = {
    **{f"stage {stage}": (stage, {}) for stage in (0, 1, 2, 3)},
    **{f"stage {stage}, optimizer offloaded": (stage, {"offload_optimizer": {"device": "cpu"}}) for stage in (1, 2, 3)},
    "stage 3, all offloaded": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
}
#: (form, accumulation, ranks); with the optimizer offloaded all but the hardest is left to `make test_all`.
CASES = [
    pytest.param(form, accumulation, ranks, marks=[pytest.mark.long] if "off" in form and (accumulation, ranks) != (3, 2) else [])
    for form in FORMS
    for accumulation in (1, 3)
    for ranks in (1, 2)
]


@pytest.fixture(scope="module")
def reference(corpus):
    return reference_losses(corpus, SHAPE, STEPS, BATCH, LR, WARMUP, SEED)


@pytest.fixture(scope="module")
def small_references(corpus):
    """By accumulation: a block that is left out of the last micro-batch only has a gradient from the others. None: nothing left out."""

    def losses(accumulation: int) -> list[float]:
        dropped = lambda step, micro_step: drops_block_1(step, micro_step, accumulation)  # noqa: E731
        return reference_losses(corpus, SMALL, STEPS, BATCH, LR, WARMUP, SEED, accumulation=accumulation, drops_block_1=dropped)

    return {None: reference_losses(corpus, SMALL, STEPS, BATCH, LR, WARMUP, SEED), **{number: losses(number) for number in (1, 3)}}


@pytest.fixture(scope="module")
def seen() -> dict[tuple, list[float]]:
    return {}


def flags(corpus, tmp_path, shape: dict, form: str, ranks: int, accumulation: int) -> list[str]:
    stage, changes = FORMS[form]
    values = {
        "deepspeed_config": f"ds_configs/zero{stage}_fp32.json",
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
    return [text for key, value in values.items() for text in (f"--{key}", str(value))] + sections


def largest_difference(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


@pytest.mark.parametrize(("form", "accumulation", "ranks"), CASES)
def test_losses_are_those_of_plain_pytorch(form, accumulation, ranks, corpus, reference, seen, tmp_path, request):
    pool = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[ranks])
    lines = pool.run("tests.distributed.jobs:pretrain", flags=flags(corpus, tmp_path, SHAPE, form, ranks, accumulation))[0]
    losses = [line["loss"] for line in lines]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1.0, "a model that does not learn agrees with anything"
    assert any(line["grad_norm"] > 1.0 for line in lines), "clipping must have worked in some step"
    assert largest_difference(losses, reference) <= TOLERANCE
    for other in seen.values():
        assert largest_difference(losses, other) <= TOLERANCE
    seen[(form, accumulation, ranks)] = losses


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_without_a_gradient_is_stepped_with_zero(form, accumulation, ranks, corpus, small_references, tmp_path, request):
    """Block 1 is left out of every third step, and of the last micro-batch of every fourth."""
    pool = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[ranks])
    job = {"technique": "DroppedBlock", "flags": flags(corpus, tmp_path, SMALL, form, ranks, accumulation)}
    losses = [line["loss"] for line in pool.run("tests.distributed.jobs:pretrain_with", **job)[0]]
    expected = small_references[accumulation]
    assert largest_difference(expected, small_references[None]) > 1e-2, "a block that may be left out without a trace shows nothing"
    assert largest_difference(losses, expected) <= TOLERANCE
