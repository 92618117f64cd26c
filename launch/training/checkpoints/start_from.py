"""Start a run from the weights of a Hugging Face folder (`--init_from`)."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

from launch.errors import UsageError
from launch.formats.hf_folder import HFFolder
from launch.training.ranks.distributed import Collectives
from model.gpt import GPT
from recipes.masters import master_weights


def fill_model(model: GPT, folder: HFFolder, zero_stage: int, collectives: Collectives) -> None:
    """Write the folder's weights into `model`, one tensor at a time, before the engine is built. All ranks call this together.

    Raises:
        UsageError: the files have changed since they were checked, their head is not the embedding, or a weight is not finite.
    """
    if zero_stage < 3:
        folder.fill(model)
        return
    folder.check_head()  # by every rank: the others would wait for a rank that raised below
    fault: UsageError | None = None
    for name, parameter in model.named_parameters():
        # Inside, the parameter is whole on every rank; on leaving, rank 0's values are broadcast and partitioned again.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if collectives.rank == 0 and fault is None:
                try:
                    with torch.no_grad():
                        folder.read_into(name, parameter.data)
                except UsageError as reason:  # the others wait for rank 0 at this parameter and at the next ones
                    fault = reason
    if collectives.any(fault is not None):
        raise fault or UsageError(f"{folder.folder}: rank 0 could not read its weights")


def fill_masters(ds_engine: Any, folder: HFFolder, collectives: Collectives) -> None:
    """In bf16 and fp16: set the fp32 master weights to the folder's values.

    DeepSpeed copies them from the rounded weights of the model, which have 8 of 24 bits. With this, an export after zero steps writes the
    values that were read.
    """
    if ds_engine.zero_optimization_stage() == 0:
        for master in master_weights(ds_engine):
            folder.read_into(master.fragments[0].name, master.tensor.data)
        return
    for name, parameter in ds_engine.module.named_parameters():
        weight = torch.empty(getattr(parameter, "ds_shape", parameter.shape), dtype=torch.float32)
        folder.read_into(name, weight)
        if hasattr(parameter, "ds_id"):  # stage 3: a part of each parameter on each rank, the last one padded
            each = -(-weight.numel() // collectives.world_size)
            part = torch.zeros(each)
            mine = weight.view(-1)[collectives.rank * each :][:each]
            part[: len(mine)] = mine
            safe_set_local_fp32_param(parameter, part)
        else:
            safe_set_full_fp32_param(parameter, weight)
