"""Adam that freezes its variance after a number of steps, so that the momentum can be exchanged as one bit per element."""

from __future__ import annotations

import torch

from recipes.one_bit import FreezingOptimizer
from recipes.optimizers import LATE_STEP, fused_adamw


class CompressedAdam(FreezingOptimizer):
    """1-bit Adam: Tang et al., arXiv 2102.02888, algorithm 1, with a scale for each tensor and `settle_variance`.

    While `compressing` is false, it is Adam with gradients averaged over all ranks. Then each rank has its own gradients g, the momentum is
    m <- mean over the ranks of compressed(beta1 m + (1 - beta1) g), and the variance is frozen.
    The bias of both moments is corrected in both phases, that of the variance by the number of its updates. Weight decay is decoupled.
    `state_dict` has the moments under the names and in the shapes of torch's Adam.
    """

    def _step_whole(self) -> None:
        for group in self.param_groups:
            parameters = group["params"]
            before = float(self._steps - 1) if self._bias_correction else LATE_STEP
            steps = [torch.full((), before, device=parameter.device) for parameter in parameters]
            fused_adamw(parameters, [self.state[parameter] for parameter in parameters], steps, group, group["lr"])

    def _step_compressed(self) -> None:
        for group, parameter, momentum in self._momenta():
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad.view(-1), 1 - group["betas"][0])
        self.reduction.reduce()
        for group, parameter, momentum in self._momenta():
            lr, bias1 = group["lr"], self._biases(group)[0]
            for weights, m, variance in self._blocks(parameter, momentum, self.state[parameter]["exp_avg_sq"]):
                weights.mul_(1 - lr * group["weight_decay"]).addcdiv_(m, self._divisor(variance, group), value=-lr / bias1)
