"""Shared by the techniques that bring an optimizer: Adam's keys and arguments, and the refusal of ZeRO."""

from __future__ import annotations

from typing import Any

from recipes.technique import RunSettings

#: A step count so large that beta^step is 0 for every beta in use, and that fp32 cannot increase by 1: Adam then corrects no bias.
LATE_STEP = 1e9

#: Keys of all optimizers of recipes, beside lr, betas, eps and weight_decay. DeepSpeed refused amsgrad and ignored eps_inside_sqrt.
ADAM_KEYS: dict[str, dict[str, Any]] = {
    "bias_correction": {"types": ["boolean"], "default": True},
    "amsgrad": {"enum": [False]},
    "eps_inside_sqrt": {"enum": [False]},
}


def adam_arguments(params: dict[str, Any]) -> tuple[float, list[float], float, float, bool]:
    """The arguments that the optimizers of all recipes take after the groups of parameters, in order, from the JSON's `params`."""
    return params["lr"], params["betas"], params["eps"], params["weight_decay"], params["bias_correction"]


def require_stage_0(run: RunSettings, reason: str) -> None:
    """Refuse ZeRO for an optimizer that needs whole tensors on every rank, for `reason`.

    Raises:
        ValueError: the ZeRO stage is not 0.
    """
    if run.zero_stage:
        raise ValueError(f"'zero_optimization.stage' is {run.zero_stage}, but {reason}; write 0, or use AdamW")
