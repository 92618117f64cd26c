"""LAMB in plain torch, and its step for one tensor, which 1-bit LAMB uses in its first phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recipes.blocks import BLOCK, block_norm, blocks, norm_of


def lamb_step(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    moments: Sequence[torch.Tensor],
    group: dict[str, Any],
    biases: tuple[float, float],
    limits: tuple[float, float],
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Algorithm 2 of arXiv 1904.00962 for one tensor. Overwrites `gradient` with the update.

    Args:
        moments: exp_avg and exp_avg_sq, before the step.
        biases: the bias corrections by which the updated moments are divided.
        limits: the lower and upper limit of the trust ratio.
        scratch: working memory; its size is the number of elements processed at a time.

    Returns the trust ratio in fp32, or 0 if a norm is 0 and there is no ratio; the update is then not rescaled.
    """
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    weight_norms, update_norms = [], []
    for weights, g, m, v in blocks(scratch.numel(), parameter, gradient, *moments):
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        divisor = torch.sqrt(v, out=scratch[: v.numel()]).mul_(biases[1] ** -0.5).add_(group["eps"])
        update = torch.div(m, divisor, out=g).mul_(1 / biases[0]).add_(weights, alpha=decay)
        weight_norms.append(block_norm(weights))
        update_norms.append(block_norm(update))
    weight_norm, update_norm = norm_of(weight_norms), norm_of(update_norms)
    has_ratio = (weight_norm > 0) & (update_norm > 0)
    ratio = torch.where(has_ratio, (weight_norm / update_norm).clamp(*limits), 0.0).float()
    parameter.addcmul_(gradient, torch.where(has_ratio, ratio, 1.0), value=-group["lr"])
    return ratio


def of_each_expert(parameter: torch.Tensor, *others: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """A parameter and tensors of its size, or of a parameter (n_expert, out, in) the parts of each expert."""
    tensors = parameter, *(other.view_as(parameter) for other in others)
    return list(zip(*tensors, strict=True)) if parameter.dim() == 3 else [tensors]


class Lamb(torch.optim.Optimizer):
    """AdamW's update, times the norm of the tensor divided by the norm of the update: You et al., arXiv 1904.00962, algorithm 2.

    Each expert of a tensor (n_expert, out, in) has a ratio of its own. A missing gradient counts as zero. The state has the names and
    shapes of torch's Adam.

    Attributes:
        trust_ratio: the mean over the tensors in the last step, with 1 for a tensor without a ratio; None before the first step.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        lr: float,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
        bias_correction: bool = True,
        limits: tuple[float, float] = (0.01, 10.0),
    ):
        super().__init__(param_groups, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._bias_correction, self._limits = bias_correction, limits
        self._scratch = torch.empty(0)
        self.trust_ratio: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters with their gradients. Overwrites the gradients."""
        ratios = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                ratios += self._step_of(parameter, group)
        self.trust_ratio = mean_ratio(ratios)

    def _step_of(self, parameter: torch.Tensor, group: dict[str, Any]) -> list[torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter, requires_grad=False) for _ in range(2))
        state["step"] += 1
        steps = int(state["step"])
        biases = tuple(1 - beta**steps for beta in group["betas"]) if self._bias_correction else (1.0, 1.0)
        if self._scratch.device != parameter.device or not self._scratch.numel():
            self._scratch = torch.empty(BLOCK.get(parameter.device.type, BLOCK["cuda"]), device=parameter.device)
        assert parameter.grad is not None
        each = of_each_expert(parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        return [lamb_step(weights, gradient, moments, group, biases, self._limits, self._scratch) for weights, gradient, *moments in each]


def mean_ratio(ratios: list[torch.Tensor]) -> torch.Tensor:
    """The mean of trust ratios. A ratio of 0 means that there is none, and counts as 1."""
    found = torch.stack(ratios)
    return torch.where(found > 0, found, 1.0).mean()
