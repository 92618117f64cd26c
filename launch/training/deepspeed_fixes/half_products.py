"""Matmuls in bf16 and fp16 on processors for which oneDNN has none: x86-64, in bf16 without AVX512 and in fp16 without AVX512-FP16.

PyTorch computes them there in a scalar loop, 13 to 85 times as slow as in fp32. Here the operands are converted to fp32 and multiplied, and
the result is rounded once. The loop accumulates in fp32 too, so only the order of the sums differs.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

#: Linear layers, forward and backward.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
#: The backward pass of attention. Its forward pass is as fast in bf16 as in fp32.
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"
#: Holds the replacements; torch restores its own kernels when this object is collected.
_LIBRARY = torch.library.Library("aten", "IMPL")


def train_on_cpu_in(precision: str) -> None:
    """Let this process train in `precision` on any processor. DeepSpeed refuses fp16 where oneDNN does not support it."""
    _widen_products()
    accelerator = get_accelerator()
    if precision == "fp16":
        accelerator.is_fp16_supported = lambda: True
    else:
        vars(accelerator).pop("is_fp16_supported", None)


@functools.cache
def _widen_products() -> None:
    """Replace PyTorch's kernels of `PRODUCTS` in this process, for those of bf16 and fp16 that oneDNN does not support."""
    if not torch.backends.mkldnn.is_available():
        return
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported(), torch.ops.mkldnn._is_mkldnn_fp16_supported()
    slow = {dtype for dtype, fast in zip((torch.bfloat16, torch.float16), supported, strict=True) if not fast}
    if not slow:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that a kernel is replaced
        for name in PRODUCTS:
            widened = _widened(name, slow)
            for overload in (name, f"{name}.out"):
                _LIBRARY.impl(overload, widened, "CPU", with_keyset=True)
        _LIBRARY.impl(ATTENTION, _widened_attention(slow), "CPU", with_keyset=True)


def _widened(name: str, slow: set[torch.dtype]) -> Any:
    kernel, kernel_into = (torch.library.get_kernel(f"aten::{overload}", "CPU") for overload in (name, f"{name}.out"))

    def product(keys: torch.DispatchKeySet, *operands: Any, out: torch.Tensor | None = None, **scales: float) -> torch.Tensor:
        if operands[0].dtype not in slow:
            usual, into = (kernel, {}) if out is None else (kernel_into, {"out": out})
            return usual.call_boxed(keys, *operands, **scales, **into)
        wide: torch.Tensor = kernel.call_boxed(keys, *(operand.float() for operand in operands), **scales)
        return wide.to(operands[0].dtype) if out is None else out.resize_(wide.shape).copy_(wide)

    return product


def _widened_attention(slow: set[torch.dtype]) -> Any:
    kernel = torch.library.get_kernel(f"aten::{ATTENTION}", "CPU")

    def wide(operand: Any) -> Any:
        return operand.float() if isinstance(operand, torch.Tensor) and operand.dtype in slow else operand

    def backward(keys: torch.DispatchKeySet, *operands: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        gradients = kernel.call_boxed(keys, *map(wide, operands), **{name: wide(option) for name, option in options.items()})
        return tuple(gradient.to(operands[0].dtype) for gradient in gradients)

    return backward
