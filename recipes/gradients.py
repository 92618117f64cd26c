"""Part of the interface of techniques: writes gradients in `Technique.on_gradients` at every stage, which DeepSpeed's function does not."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from deepspeed.utils import safe_set_full_grad
from torch import Tensor


def set_gradient(parameter: Any, value: Tensor) -> None:
    """Replace the mean gradient of a parameter of the engine by `value`, of its shape. All ranks call this with the same value.

    `safe_set_full_grad` of DeepSpeed 0.19.8 writes `parameter.grad`, which its BF16_Optimizer (stage 1 in bf16 with gradients accumulated
    in fp32) does not read, and fails at stage 3 if the number of ranks does not divide the parameter's elements.
    """
    accumulated = getattr(parameter, "_hp_grad", None)
    if accumulated is not None:  # in BF16_Optimizer: of the whole parameter, on every rank
        accumulated.copy_(value.view_as(accumulated))
        return
    if hasattr(parameter, "ds_id"):  # at stage 3, all parts have the same size, and the last ones are padded
        value = F.pad(value.flatten(), (0, parameter.aligned_size() - value.numel()))
    safe_set_full_grad(parameter, value)
