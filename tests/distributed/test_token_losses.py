"""A technique trains a loss in addition to the cross-entropy, and looks at the gradients, at every stage."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from model.gpt import GPT
from tests.distributed.reference import reference_steps
from tests.distributed.test_engine_follows_plain_pytorch import (
    BATCH,
    FORMS,
    LR,
    SEED,
    SMALL,
    STEPS,
    TOLERANCE,
    WARMUP,
    flags,
    largest_difference,
    losses_of,
    pool,  # noqa: F401
)

JOB = "tests.distributed.jobs:pretrain_with"
KERNEL = ["--set", 'fused_kernels={"cross_entropy": true}']


def with_z_loss(model: GPT, windows: torch.Tensor, document_end: int) -> torch.Tensor:
    """The cross-entropy of windows (B, T + 1), with the gradients of the other loss added."""
    logits = model(windows[:, :-1]).float()
    added = (0.01 * logits.logsumexp(-1) ** 2).mean()
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) + added - added.detach()


@pytest.mark.parametrize("more", [[], KERNEL], ids=["plain", "fused"])
@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("form", [pytest.param(form, marks=[] if form in ("stage 0", "stage 3") else pytest.mark.long) for form in FORMS])
def test_it_trains_both_and_logs_the_cross_entropy(form, ranks, more, pool, corpus, tmp_path):  # noqa: F811
    run = flags(corpus, tmp_path, SMALL, form, ranks, 3) + more
    lines = pool.run(JOB, technique="AuxiliaryLoss", flags=run)[0]
    expected = reference_steps(corpus, SMALL, STEPS, BATCH, LR, WARMUP, SEED, loss_of=with_z_loss)
    plain = reference_steps(corpus, SMALL, STEPS, BATCH, LR, WARMUP, SEED)
    losses = [line["loss"] for line in lines]
    assert largest_difference(losses, losses_of(expected)) <= TOLERANCE
    assert losses[0] == pytest.approx(plain[0].loss, abs=TOLERANCE), "the cross-entropy of the same weights"
    assert largest_difference(losses_of(expected), losses_of(plain)) > 100 * TOLERANCE
    assert [line["norm"] for line in lines] == pytest.approx([step.norm for step in expected], rel=1e-4), "before clipping"
