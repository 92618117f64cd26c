"""Every ZeRO stage, on one and two ranks, with and without accumulation, trains what a plain PyTorch loop trains."""

from __future__ import annotations

import pytest

from tests.distributed.reference import reference_losses

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 384, "seq_len": 64}  # 4 M parameters: large enough for the fp32 norm to go wrong
STEPS, BATCH, LR, WARMUP, SEED = 30, 12, 1e-3, 3, 5
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference(corpus):
    return reference_losses(corpus, SHAPE, STEPS, BATCH, LR, WARMUP, SEED)


@pytest.fixture(scope="module")
def seen() -> dict[tuple, list[float]]:
    return {}


def flags(corpus, tmp_path, stage: int, ranks: int, accumulation: int) -> list[str]:
    shape = [text for key, value in SHAPE.items() for text in (f"--{key}", str(value))]
    return [
        "--deepspeed_config",
        f"ds_configs/zero{stage}_fp32.json",
        *shape,
        "--data",
        str(corpus),
        "--runs_dir",
        str(tmp_path),
        "--run_name",
        "r",
        "--steps",
        str(STEPS),
        "--global_batch_size",
        str(BATCH),
        "--micro_batch_size",
        str(BATCH // ranks // accumulation),
        "--lr",
        str(LR),
        "--warmup_steps",
        str(WARMUP),
        "--seed",
        str(SEED),
        "--eval_every",
        "0",
        "--save_every",
        "0",
    ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_plain_pytorch(stage, accumulation, ranks, corpus, reference, seen, tmp_path, request):
    pool = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[ranks])
    lines = pool.run("tests.distributed.jobs:pretrain", flags=flags(corpus, tmp_path, stage, ranks, accumulation))[0]
    losses = [line["loss"] for line in lines]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1.0, "a model that does not learn agrees with anything"
    assert any(line["grad_norm"] > 1.0 for line in lines), "clipping must have worked in some step"
    assert max(abs(a - b) for a, b in zip(losses, reference, strict=True)) <= TOLERANCE
    for other in seen.values():
        assert max(abs(a - b) for a, b in zip(losses, other, strict=True)) <= TOLERANCE
    seen[(stage, accumulation, ranks)] = losses
