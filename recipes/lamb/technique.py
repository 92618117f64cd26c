"""LAMB: every tensor of the model moves by a fraction of its own norm, in the direction of AdamW's update.

    deepspeed launch/pretrain.py --recipe recipes/lamb

You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, arXiv 1904.00962, algorithm 2. DeepSpeed's own is a
CUDA kernel; this one is plain torch, on any device.
"""

from __future__ import annotations

from typing import Any

from recipes.lamb.optimizer import Lamb
from recipes.optimizers import ADAM_KEYS, adam_arguments, require_stage_0
from recipes.technique import Declaration, RunForTechniques, Technique

#: The keys of LAMB besides lr, betas, eps and weight_decay, in both recipes. The limits of the trust ratio are DeepSpeed's defaults.
LAMB_KEYS: dict[str, dict[str, Any]] = {
    "max_coeff": {"types": ["number"], "minimum": 0, "maximum": 1_000_000, "default": 10.0},
    "min_coeff": {"types": ["number"], "minimum": 0, "maximum": 1_000_000, "default": 0.01},
    **ADAM_KEYS,
}
#: The learning rate is relative to a tensor's norm, so the preset's rate, which is for AdamW, does not fit.
LAMB_AUTO: dict[str, Any] = {"lr": 0.016, "betas": [0.9, 0.999]}


def limits(section: dict[str, Any], least: str, most: str) -> tuple[float, float]:
    """The lower and the upper limit of a factor: the values of keys `least` and `most`.

    Raises:
        ValueError: the upper limit is 0 or below the lower limit; see `Technique.__init__`.
    """
    low, high = float(section[least]), float(section[most])
    if not low <= high > 0:
        raise ValueError(f"'optimizer.params.{most}' is {high:g}; {most} must be above 0 and at least {least}, {low:g}")
    return low, high


class LambTechnique(Technique):
    """DeepSpeed's documented `"optimizer": {"type": "Lamb", "params": {..., "max_coeff": 10.0, "min_coeff": 0.01}}`.

    lr, betas, eps, weight_decay: as for AdamW, but "auto" is `LAMB_AUTO`'s for the first two.
    max_coeff, min_coeff: limits of the trust ratio, the norm of a tensor divided by the norm of its AdamW update.
    bias_correction: as for Adam.
    """

    declaration = Declaration(optimizer_type="Lamb", keys=LAMB_KEYS, auto_params=LAMB_AUTO)
    optimizer_tensors = 2

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.params = section
        self.limits = limits(section, "min_coeff", "max_coeff")
        require_stage_0(run, "Lamb takes the norms of whole tensors")
        self._optimizer: Lamb | None = None

    def optimizer(self, param_groups: list[dict[str, Any]]) -> Lamb:
        self._optimizer = Lamb(param_groups, *adam_arguments(self.params), self.limits)
        return self._optimizer

    def metrics(self) -> dict[str, float]:
        ratio = self._optimizer.trust_ratio if self._optimizer is not None else None
        return {} if ratio is None else {"trust_ratio": float(ratio)}
