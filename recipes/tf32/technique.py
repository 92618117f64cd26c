"""TF32: the matmuls of an fp32 run, on tensor cores that round the factors to 11 significant bits.

    deepspeed launch/pretrain.py --recipe recipes/tf32

NVIDIA A100 Tensor Core GPU Architecture (white paper, 2020). Factors keep fp32's range and lose 13 bits of its precision; products and sums
are fp32, and so is everything else: weights, activations, gradients, the optimizer.
"""

from __future__ import annotations

from typing import Any

import torch

from model.gpt import GPT
from recipes.technique import Declaration, RunForTechniques, Technique

#: Ampere, the first GPUs with TF32.
CAPABILITY = (8, 0)


def use_tf32() -> None:
    """Compute products of fp32 matrices on CUDA in TF32, for the rest of this process.

    This is torch's one documented switch (2.11 to 2.13). It sets both the older setting (`allow_tf32`) and the newer (`fp32_precision`).
    torch.compile reads one of them, and torch raises an error if they differ. No product of this model uses cuDNN.
    """
    torch.set_float32_matmul_precision("high")


class Tf32(Technique):
    """`"tf32": {"enabled": true}`: a section of this project's own, for fp32 runs only."""

    declaration = Declaration(section="tf32", exclusive=("the arithmetic of matrix products",), same_algorithm=True)
    needs_cuda = {"tf32": CAPABILITY}
    matmul_dtype = "tf32"

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        if run.precision != "fp32":
            raise ValueError(f"'tf32' is for fp32 runs, and this run is in {run.precision}; leave it out, or switch {run.precision} off")

    def prepare(self, model: GPT) -> None:
        use_tf32()
