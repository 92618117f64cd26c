"""Muon in plain torch: momentum whose matrices are orthogonalized, beside AdamW for all other parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.adamw import adamw

#: Of the quintic iteration: a x + (b x x^T + c (x x^T)^2) x (Jordan et al., https://kellerjordan.github.io/posts/muon/).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: The factor of the learning rate for an update of (rows, columns).
#:
#: - `original` keeps the change of each output independent of the shape (Jordan et al.).
#: - `match_rms_adamw` gives the elements of the update the root mean square that AdamW's have, about 0.2, so that AdamW's learning rate and
#:   weight decay serve Muon too (Liu et al., arXiv 2502.16982, section 2.2).
RATE_SCALES = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def orthogonalized(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """`matrix` (rows, columns) with singular values near 1 (0.7 to 1.2 after five steps), in fp32, by Newton-Schulz steps in `dtype`."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    # An epsilon that is added to the norm, as is usual, would show in the small gradients of queries and keys.
    x = (wide / torch.linalg.vector_norm(wide).clamp_min(torch.finfo(wide.dtype).tiny)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT  # (rows, rows), the shorter side
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.to(matrix.dtype)
    return x if matrix.shape[0] <= matrix.shape[1] else x.mT


class Muon(torch.optim.Optimizer):
    """Jordan et al., https://kellerjordan.github.io/posts/muon/.

    Each group has a list `parts`, with an entry for each of its parameters: the numbers of rows of the matrices that the parameter consists
    of, which are orthogonalized one by one, or None if AdamW updates it. The groups keep their order, by which checkpoints are read. Weight
    decay is decoupled in both. A missing gradient counts as zero.

    Args:
        adam_rate: AdamW's learning rate over `lr`.
        momentum: of the average of the gradients.
        nesterov: whether the update looks one step ahead: the average of the gradient and the momentum, by the same weights.
        ns_steps, ns_dtype: of the Newton-Schulz iteration.
        rate_scale: a key of `RATE_SCALES`.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_rate: float = 1.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        rate_scale: str = "match_rms_adamw",
    ):
        super().__init__(param_groups, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._adam_rate, self._momentum, self._nesterov = adam_rate, momentum, nesterov
        self._ns_steps, self._ns_dtype, self._scale = ns_steps, ns_dtype, RATE_SCALES[rate_scale]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters with their gradients."""
        for group in self.param_groups:
            others = []
            for parameter, parts in zip(group["params"], group["parts"], strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if parts is None:
                    others.append(parameter)
                else:
                    self._muon(parameter, parts, group)
            self._adamw(others, group)

    def _muon(self, parameter: torch.Tensor, parts: tuple[int, ...], group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter, requires_grad=False)
        average = state["momentum"].lerp_(gradient, 1 - self._momentum)
        update = torch.lerp(gradient, average, self._momentum) if self._nesterov else average
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        for rows, change in zip(parameter.split(parts), update.split(parts), strict=True):
            rate = group["lr"] * self._scale(*rows.shape)
            rows.sub_(orthogonalized(change, self._ns_steps, self._ns_dtype), alpha=rate)

    def _adamw(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter, requires_grad=False) for _ in range(2))
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"] * self._adam_rate,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
