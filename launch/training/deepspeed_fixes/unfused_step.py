"""The update at stage 0 in bf16 and fp16, with one kernel for many tensors.

DeepSpeed's own (`FP16_UnfusedOptimizer.step` in deepspeed/runtime/fp16/unfused_optimizer.py, 0.19.8) launches about ten kernels per tensor,
1,500 for the 148 tensors of `gpt2`: 14 of 134 ms of a step on an H200, most of it idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import get_global_norm, is_invalid_grad_norm

from launch.training.deepspeed_fixes.norms import weight_norm


def use_fused_step() -> None:
    """Replace the method for all engines of this process."""
    FP16_UnfusedOptimizer.step = _step


@torch.no_grad()
def _step(self: Any, closure: None = None) -> bool:
    """Clip and update. Returns whether the gradients overflowed; nothing is updated then. Same arithmetic as in the method it replaces."""
    self.overflow = self.overflow_checker.check()
    if self.overflow:
        return bool(self._skip_invalid_grad_norm())
    all_gradients, full_gradients = [], []
    for masters, halves in _groups(self):
        gradients = [torch.zeros_like(half) if half.grad is None else half.grad for half in halves]
        all_gradients.append(gradients)
        wide = [torch.empty_like(master) for master in masters]
        torch._foreach_copy_(wide, gradients)
        full_gradients += wide
        for master, gradient in zip(masters, wide, strict=True):
            master.grad = gradient
    self._global_grad_norm = get_global_norm([weight_norm(gradients) for gradients in all_gradients])
    if is_invalid_grad_norm(self._global_grad_norm):
        return bool(self._skip_invalid_grad_norm())
    self._update_scale(False)
    scale = self.unscale_and_clip_grads(self._global_grad_norm, apply_scale=False)
    if scale != 1.0:
        torch._foreach_mul_(full_gradients, 1.0 / scale)
    self.optimizer.step()
    for masters, halves in _groups(self):
        torch._foreach_copy_(halves, masters)
        for master in masters:
            master.grad = None
    return False


def _groups(wrapper: Any) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The fp32 weights of each group of parameters, and those that the model computes with."""
    yield from ((masters, halves) for masters, halves in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True) if masters)
