"""1-bit LAMB: after a warm-up LAMB's variance and trust ratios are frozen, and the ranks exchange one bit per parameter.

    deepspeed launch/pretrain.py --recipe recipes/one_bit_lamb

Li et al., 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed, arXiv 2104.06069. DeepSpeed
had it, at least until 0.19.6, for GPUs with cupy or MPI; here it is plain torch, on any backend.
"""

from __future__ import annotations

from typing import Any

from recipes.lamb.technique import LAMB_AUTO, LAMB_KEYS, limits
from recipes.one_bit import FREEZE_STEP, FreezingTechnique, declare
from recipes.one_bit_lamb.optimizer import CompressedLamb
from recipes.technique import RunForTechniques


class OneBitLamb(FreezingTechnique):
    """DeepSpeed's documented `"optimizer": {"type": "OneBitLamb", "params": {..., "freeze_step": 400}}`.

    freeze_step: the number of LAMB updates, without the steps that fp16 skips, after which the variance is frozen and the momentum
        compressed; "auto", or left out: 0.3 of the run's steps of whole batches.
    lr, betas, eps, weight_decay, bias_correction, max_coeff, min_coeff: as for Lamb; max_coeff and min_coeff apply in the first phase.
    coeff_beta: the decay rate of each tensor's mean trust ratio, an average over about 1 / (1 - coeff_beta) steps. The mean is frozen in
        the second phase.
    factor_max, factor_min: limits of the factor that adapts the frozen ratio to the variance of the reconstructed gradients.
    factor_threshold: the largest relative change of the factor in a step.
    cuda_aware, comm_backend_name: accepted without effect.
    """

    declaration = declare(
        "OneBitLamb",
        {
            **FREEZE_STEP,
            **LAMB_KEYS,
            "coeff_beta": {"types": ["number"], "minimum": 0, "maximum": 0.999999, "default": 0.9},
            **{
                key: {"types": ["number"], "minimum": 0, "maximum": 1_000_000, "default": default}
                for key, default in (("factor_max", 4.0), ("factor_min", 0.5), ("factor_threshold", 0.1))
            },
        },
        LAMB_AUTO,
    )
    uncompressed = "LAMB"
    optimizer_class = CompressedLamb
    #: At 0.2 the ratios are still changing; see README.md.
    auto_share = 0.3
    #: One more than 1-bit Adam: the variance of the reconstructed gradients.
    optimizer_tensors = 3
    _optimizer: CompressedLamb

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.coefficient_limits = limits(section, "min_coeff", "max_coeff")
        self.factor_limits = limits(section, "factor_min", "factor_max")
        super().__init__(section, run)

    def optimizer_options(self) -> dict[str, Any]:
        own = {key: self.params[key] for key in ("coeff_beta", "factor_threshold")}
        return {"limits": self.coefficient_limits, "factor_limits": self.factor_limits, **own}

    def metrics(self) -> dict[str, float]:
        ratio = self._optimizer.trust_ratio if self._ds_engine is not None else None
        return super().metrics() | ({} if ratio is None else {"trust_ratio": float(ratio)})
