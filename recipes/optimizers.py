"""Shared by the techniques that bring an optimizer: Adam's keys and arguments, and the refusal of ZeRO."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw

from recipes.technique import RunForTechniques

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


def fused_adamw(
    parameters: list[torch.Tensor], states: list[dict[str, Any]], steps: list[torch.Tensor], group: dict[str, Any], lr: float
) -> None:
    """torch's fused AdamW, as in the control's runs, with `exp_avg` and `exp_avg_sq` of `states`. The kernel increments `steps`."""
    adamw(
        parameters,
        [parameter.grad for parameter in parameters if parameter.grad is not None],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=lr,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def require_stage_0(run: RunForTechniques, reason: str) -> None:
    """Refuse ZeRO for an optimizer that needs whole tensors on every rank, for `reason`.

    Raises:
        ValueError: the ZeRO stage is not 0.
    """
    if run.zero_stage:
        raise ValueError(f"'zero_optimization.stage' is {run.zero_stage}, but {reason}; write 0, or use AdamW")
