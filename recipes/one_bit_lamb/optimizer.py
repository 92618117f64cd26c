"""LAMB that freezes its variance and trust ratios after a number of steps, so that the momentum can be exchanged as one bit per element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recipes.blocks import block_norm, norm_of
from recipes.lamb.optimizer import lamb_step, mean_ratio, of_each_expert
from recipes.one_bit import FreezingOptimizer


class CompressedLamb(FreezingOptimizer):
    """1-bit LAMB: Li et al., arXiv 2104.06069, algorithm 1, with a scale for each tensor and `settle_variance`.

    In the first phase, while `compressing` is false, it is LAMB with gradients averaged over all ranks, and each tensor keeps the running
    mean of its trust ratio. In the second phase, each rank has its own gradients g, and the variance v and the mean ratio are frozen. With
    d = sqrt(v) + eps, the momentum becomes m <- d x mean over the ranks of compressed((beta1 m + (1 - beta1) g) / d). The gradient
    reconstructed from it, (m_t - beta1 m_(t-1)) / (1 - beta1), updates a second variance w, which starts from v. The mean ratio is
    multiplied by a factor: the largest d / (sqrt(w) + eps) in the tensor. Limits bound the factor and its change per step.

    State of each parameter in addition to Adam's: `trust_ratio`, the mean ratio, and `factor`, both fp32 scalars; in the second phase also
    `exp_avg_sq_fresh`, which is w after bias correction. Of a tensor (n_expert, out, in) each expert has both, (n_expert,).

    Attributes:
        trust_ratio: the mean over the tensors of the ratio by which the last step multiplied the update; None before the first step.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *arguments: Any,
        limits: tuple[float, float] = (0.01, 10.0),
        coeff_beta: float = 0.9,
        factor_limits: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
    ):
        super().__init__(param_groups, *arguments)
        self._limits, self._coeff_beta = limits, coeff_beta
        self._factor_limits, self._threshold = factor_limits, factor_threshold
        self.trust_ratio: torch.Tensor | None = None

    def _take_state(self) -> None:
        super()._take_state()
        for parameter in self._parameters:
            for name, start in (("trust_ratio", 0.0), ("factor", 1.0)):
                self.state[parameter].setdefault(name, torch.full(parameter.shape[:-2], start, device=parameter.device))

    def _step_whole(self) -> None:
        ratios = []
        for group, parameter, momentum in self._momenta():
            state, biases = self.state[parameter], self._biases(group)
            assert parameter.grad is not None
            each = of_each_expert(parameter, parameter.grad, momentum, state["exp_avg_sq"])
            found = [lamb_step(p, g, moments, group, biases, self._limits, self.reduction.scratch) for p, g, *moments in each]
            ratio = torch.stack(found).view_as(state["trust_ratio"])
            mean = torch.where(state["trust_ratio"] > 0, state["trust_ratio"].lerp(ratio, 1 - self._coeff_beta), ratio)
            state["trust_ratio"].copy_(torch.where(ratio > 0, mean, state["trust_ratio"]))  # a step without a ratio does not count
            ratios += found
        self.trust_ratio = mean_ratio(ratios)

    def _freeze(self, steps: int) -> None:
        super()._freeze(steps)
        for group, parameter, _ in self._momenta():
            state = self.state[parameter]
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"] / self._biases(group)[1]

    def _settled_apart(self, variance: torch.Tensor) -> list[torch.Tensor]:
        # The momentum is sent divided by the deviations, so an expert with few tokens need not have the others' least variance.
        return [part for (part,) in of_each_expert(variance)]

    def _step_compressed(self) -> None:
        # The momentum is exchanged divided by the deviations, which are the same on all ranks. `parameter.grad` then holds the last
        # momentum, from which the mean gradient is reconstructed.
        for group, parameter, momentum in self._momenta():
            assert parameter.grad is not None
            for m, gradient, variance in self._blocks(momentum, parameter.grad, self.state[parameter]["exp_avg_sq"]):
                last = self.reduction.scratch[: m.numel()].copy_(m)
                m.lerp_(gradient, 1 - group["betas"][0])
                gradient.copy_(last)
                m.div_(self._divisor(variance, group))
        self.reduction.reduce()
        for group, parameter, momentum in self._momenta():
            for m, variance in self._blocks(momentum, self.state[parameter]["exp_avg_sq"]):
                m.mul_(self._divisor(variance, group))
        ratios = []
        for place, (group, parameter, momentum) in enumerate(self._momenta()):
            assert parameter.grad is not None
            state, live = self.state[parameter], self.reduction.live[place]
            own = (state[name].view(-1) for name in ("trust_ratio", "factor"))
            each = of_each_expert(parameter, momentum, parameter.grad, state["exp_avg_sq"], state["exp_avg_sq_fresh"])
            ratios += [self._step_of(group, live, tensors, *scalars) for tensors, *scalars in zip(each, *own, strict=True)]
        self.trust_ratio = mean_ratio(ratios)

    def _step_of(
        self, group: dict[str, Any], live: int, tensors: Sequence[torch.Tensor], mean: torch.Tensor, last_factor: torch.Tensor
    ) -> torch.Tensor:
        """Update one tensor. Returns the ratio by which the update was multiplied.

        Args:
            live: its first elements that can have a gradient.
            tensors: weights, momentum, last momentum, which becomes the update, variance, and the variance of the reconstructed gradients.
            mean, last_factor: its mean ratio, and the factor, which is changed.
        """
        (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        bias1 = self._biases(group)[0]
        # The bias-corrected running mean moves by this share towards the new value.
        share = (1 - beta2) / self._bias(beta2, self._steps)
        quotients, adam_norms, update_norms = [], [], []
        for weights, m, last, variance, fresh in self._blocks(*tensors):
            divisor = self._divisor(variance, group)
            if live > 0:
                # Rows that cannot have a gradient keep their variance.
                gradient = last[:live].mul_(-beta1).add_(m[:live])  # times 1 - beta1
                fresh[:live].mul_(1 - share).addcmul_(gradient, gradient, value=share / (1 - beta1) ** 2)
                quotients.append(torch.div(divisor[:live], torch.sqrt(fresh[:live], out=gradient).add_(eps), out=gradient).amax())
            live -= m.numel()
            update = torch.div(m, divisor, out=last).mul_(1 / bias1)
            adam_norms.append(block_norm(update))
            if decay:
                update.add_(weights, alpha=decay)
                update_norms.append(block_norm(update))
        factor = torch.stack(quotients).amax()
        if decay:
            # Only Adam's part of the update depends on the variance; weight decay does not.
            part = (norm_of(adam_norms) / norm_of(update_norms)).nan_to_num(nan=1.0).clamp(max=1.0).float()
            factor = factor * part + 1 - part
        factor = factor.clamp(*self._factor_limits)
        factor = factor.minimum(last_factor * (1 + self._threshold)).maximum(last_factor * (1 - self._threshold))
        last_factor.copy_(factor)
        ratio = torch.where(mean > 0, mean, 1.0) * factor
        weights, _, update, *_ = tensors
        weights.addcmul_(update, ratio, value=-group["lr"])
        return ratio
