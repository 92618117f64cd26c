"""What the ranks of a pool are asked to do with ZeRO++."""

from __future__ import annotations

from typing import Any

import torch

from launch.training import engine
from tests.distributed.jobs import pretrain


class PlainQuantizer:
    """DeepSpeed's kernels for weights (csrc/quantization/quantize.cu, dequantize.cu) in torch: int8 by groups, fp16 in and out."""

    Symmetric = "symmetric"

    def quantize(self, values: torch.Tensor, groups: int, bits: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 of the shape of `values`, and fp32 scales, (groups,); the kernel's are (groups, 1), which gloo would not gather."""
        assert values.dtype == torch.float16 and bits == 8 and kind == self.Symmetric
        rows = values.float().view(groups, -1)
        scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 128
        return (rows / scales).round().clamp(-128, 127).to(torch.int8).view_as(values), scales.flatten()

    def dequantize(self, values: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: str) -> torch.Tensor:
        """fp16 of the shape of `values`."""
        return (values.view(groups, -1).float() * scales.view(groups, 1)).half().view_as(values)


def zeropp_run(flags: list[str]) -> list[dict[str, Any]]:
    """`pretrain`, with plain torch in the place of the CUDA kernels, and DeepSpeed's own code around them."""
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
    from deepspeed.utils import groups

    load = engine.load_extension
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # a process makes it once
    CUDAQuantizer.quantizer_cuda_module = PlainQuantizer()
    engine.load_extension = lambda name: None if name == "QuantizerBuilder" else load(name)
    try:
        return pretrain(flags)
    finally:
        engine.load_extension = load
        CUDAQuantizer.quantizer_cuda_module = None
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
