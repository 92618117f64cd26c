"""Gradient norms in fp64, and clipping by them, in place of DeepSpeed's fp32 sums at stage 0."""

from __future__ import annotations

from typing import Any

import torch

#: Number of squares that are summed in fp32. Each such sum has an error of at most 1e-7, of either sign, and a norm of many sums 1e-8.
NORM_ROW = 384


class NormNotFinite(ArithmeticError):
    """The gradient norm of the step is not finite, and the update was not made. Raised on all ranks."""


def norm_in_fp64(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all tensors together as an fp64 scalar; on a CPU with a relative error of 1e-7.

    `NORM_ROW` squares at a time are summed in fp32, and these sums in fp64, because converting every element to fp64 takes three times as
    long on a CPU. A GPU sums each tensor in fp32 as a tree, in one kernel for many tensors. If squares overflow in fp32, everything is
    summed in fp64.
    """
    if tensors[0].is_cuda:
        norm = torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).double().norm()
    else:
        norms = [torch.linalg.vector_norm(row, dim=-1, dtype=torch.float32) for tensor in tensors for row in _in_rows(tensor)]
        norm = torch.cat([one.double().view(-1) for one in norms]).norm()
    if torch.isfinite(norm):
        return norm
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]).norm()


def _in_rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The elements of `tensor` as (n, NORM_ROW), and the remaining ones; views if the tensor is contiguous."""
    flat = tensor.reshape(-1)
    whole = len(flat) // NORM_ROW * NORM_ROW
    return [part for part in (flat[:whole].view(-1, NORM_ROW), flat[whole:]) if part.numel()]


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """Replaces `deepspeed.runtime.utils.clip_grad_norm_` at stage 0, where all ranks have the same gradients.

    Scales the gradients in place so that their norm is at most `max_norm`; returns the norm before that, in fp64.
    """
    assert norm_type == 2 and mpu is None, "this project clips by the 2-norm, without model parallelism"
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = norm_in_fp64(gradients)
    clip_gradients(gradients, float(norm), max_norm)
    return norm


def clip_gradients(gradients: list[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients whose norm is `norm` in place, so that it is at most `max_norm`."""
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        torch._foreach_mul_(gradients, scale)


def weight_norm(parameters: list[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Replaces `deepspeed.runtime.utils.get_weight_norm`: the 2-norm, or -1 if it is not finite, as the engine expects."""
    assert norm_type == 2 and mpu is None, "this project clips by the 2-norm, without model parallelism"
    norm = float(norm_in_fp64([parameter.data for parameter in parameters]))
    return norm if norm < float("inf") else -1.0  # NaN compares false
