"""1-bit Adam: after a warm-up the variance of Adam is frozen, and the ranks exchange one bit per parameter instead of gradients.

    deepspeed launch/pretrain.py --recipe recipes/one_bit_adam

Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, arXiv 2102.02888. DeepSpeed had it, at
least until 0.19.6, for GPUs with cupy or MPI; here it is plain torch, on any backend.
"""

from __future__ import annotations

from recipes.one_bit import FREEZE_STEP, FreezingTechnique, declare
from recipes.one_bit_adam.optimizer import CompressedAdam


class OneBitAdam(FreezingTechnique):
    """DeepSpeed's documented `"optimizer": {"type": "OneBitAdam", "params": {..., "freeze_step": 400}}`.

    freeze_step: optimizer steps (updates that fp16 did not skip) of plain Adam, after which the variance is frozen and the momentum
        compressed; "auto", or left out: 0.2 of the run's steps of whole batches.
    lr, betas, eps, weight_decay: as for AdamW, but "auto" for the second beta is 0.999, because the frozen variance must last.
    bias_correction: as for Adam; in DeepSpeed it had no effect.
    cuda_aware, comm_backend_name: accepted without effect.
    """

    declaration = declare("OneBitAdam", FREEZE_STEP)
    uncompressed = "Adam"
    optimizer_class = CompressedAdam
