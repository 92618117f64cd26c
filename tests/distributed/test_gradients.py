"""A technique changes the gradients before the update, at every stage."""

from __future__ import annotations

import pytest

from tests.distributed.test_engine_follows_plain_pytorch import SMALL, flags

SGD = [
    "--set",
    'optimizer={"type":"SGD","params":{"lr":"auto","weight_decay":0}}',
    "--set",
    "zero_allow_untested_optimizer=true",
    "--set",
    "gradient_clipping=0",
]
FP32_SUMS = ["--set", "data_types.grad_accum_dtype=fp32"]
LR = 0.25


@pytest.mark.parametrize(
    ("stage", "precision", "ranks", "more"),
    [
        (0, "fp32", 2, []),
        pytest.param(0, "bf16", 2, [], marks=pytest.mark.long),
        pytest.param(1, "fp32", 2, [], marks=pytest.mark.long),
        pytest.param(1, "bf16", 2, [], marks=pytest.mark.long),
        (1, "bf16", 2, FP32_SUMS),  # DeepSpeed's BF16_Optimizer
        (2, "bf16", 2, []),
        pytest.param(2, "bf16", 2, FP32_SUMS, marks=pytest.mark.long),
        pytest.param(2, "fp32", 2, [], marks=pytest.mark.long),
        pytest.param(3, "fp32", 2, [], marks=pytest.mark.long),
        pytest.param(3, "bf16", 3, [], marks=pytest.mark.long),
        (3, "fp32", 3, []),  # a bias has 64 elements, and parts of 22
        pytest.param(3, "bf16", 3, FP32_SUMS, marks=pytest.mark.long),
    ],
)
def test_twice_the_gradients_at_half_the_rate_are_the_same_run(stage, precision, ranks, more, pools, corpus, tmp_path):
    """Bit for bit, because SGD's update is the rate times the gradient, and a power of two is exact."""

    def trained(job: str, lr: float, **technique: str) -> list[tuple[float, float]]:
        run = flags(corpus, tmp_path / job, SMALL, f"stage {stage}", ranks, 2, precision)
        run += [*SGD, *more, "--lr", str(lr), "--steps", "8"]
        lines = pools.of(ranks).run(f"tests.distributed.jobs:{job}", flags=run, **technique)[0]
        return [(line["loss"], line["grad_norm"]) for line in lines]

    plain = trained("pretrain", LR)
    doubled = trained("pretrain_with", LR / 2, technique="DoubledGradients")
    assert doubled == [(loss, 2 * norm) for loss, norm in plain]
    assert plain[-1][0] < plain[0][0] - 0.1
