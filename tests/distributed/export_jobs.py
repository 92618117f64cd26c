"""Runs whose weights are kept as the live engine has them, for the tests of what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.utils import safe_get_full_fp32_param

from launch.errors import UsageError
from launch.training.checkpoints.checkpoint import Checkpoints
from model import accounting
from model.layout import DocumentBounds
from tests.distributed.jobs import pretrain

#: Beside the checkpoints, in the run's folder.
LIVE = "live.pt"


def pretrain_and_keep(runs: list[list[str]]) -> list[str]:
    """`pretrain` for the flags of each run; the weights that all ranks agree on in the end are in `LIVE`, fp32.

    Returns why each was refused, empty where it was not.
    """
    save = Checkpoints.save

    def save_and_keep(self: Any, state: dict[str, Any], last: bool) -> Path:
        final = save(self, state, last)
        if last:
            with self.techniques.common_weights():
                weights = live_weights(self.ds_engine)
            if self.collectives.rank == 0:
                torch.save(weights, self.folder.parent / LIVE)
        return final

    Checkpoints.save = save_and_keep  # type: ignore[method-assign]
    try:
        return [_refusal(flags) for flags in runs]
    finally:
        Checkpoints.save = save  # type: ignore[method-assign]


def pretrain_and_keep_without_mask(runs: list[list[str]]) -> list[str]:
    """`pretrain_and_keep` as if every row were too long for a dense mask of documents."""
    boundaries = mock.patch.object(DocumentBounds, "beginning_at", wraps=DocumentBounds.beginning_at)
    with mock.patch.object(accounting, "DENSE_LENGTH", 0), boundaries as made:
        refused = pretrain_and_keep(runs)
    assert made.call_count > 0
    return refused


def _refusal(flags: list[str]) -> str:
    try:
        pretrain(flags)
    except UsageError as refused:
        return str(refused)
    return ""


def live_weights(ds_engine: Any) -> dict[str, torch.Tensor]:
    """The fp32 weights of a live engine, whole, by DeepSpeed's own means; called by all ranks."""
    masters = {}
    if hasattr(ds_engine.optimizer, "fp32_groups"):  # stage 0 in bf16 and fp16, for which DeepSpeed has no such means
        for halves, fulls in zip(ds_engine.optimizer.fp16_groups, ds_engine.optimizer.fp32_groups, strict=True):
            masters |= {id(half): full for half, full in zip(halves, fulls, strict=True)}
    found = {}
    for name, parameter in ds_engine.module.named_parameters():
        if ds_engine.zero_optimization_stage():
            whole = safe_get_full_fp32_param(parameter)
        else:
            whole = masters.get(id(parameter), parameter)
        found[name] = whole.detach().float().cpu().clone().view(getattr(parameter, "ds_shape", parameter.shape))
    return found
