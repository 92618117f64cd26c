"""Adam whose variance stays as it is after a number of steps, so that its momentum can be exchanged as one bit an element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.adam import adam

from recipes.compressed_all_reduce import CompressedAllReduce
from recipes.technique import LATE_STEP

#: The least that an element of a frozen variance may be, as a share of the mean of its tensor.
LEAST_SHARE = 0.1


def settle_variance(variance: torch.Tensor, steps: int, beta2: float, row_steps: torch.Tensor | None = None) -> None:
    """Make the variance of one tensor, after `steps` steps, one that can stay, in place.

    No element stays below a tenth of the mean. Its momentum is sent as plus or minus the root mean square of the tensor: divided by a
    deviation that is a thousandth of the others', as keys' biases have, whose gradient is 0 but for rounding, it would throw the weight
    about. Nor would a frozen variance rise, as Adam's does, with the first large gradient of a token that has been rare so far.

    row_steps: of an embedding, in how many of the steps each row could have gradients, (rows,). In k steps it got 1 - beta2^k of their mean
    square, and is given the 1 - beta2^steps that is corrected; without any (positions that a curriculum of lengths has yet to reach) it
    gets the mean of the other rows.
    """
    if row_steps is not None:
        seen = row_steps > 0
        powers = torch.pow(beta2, row_steps[seen].double())
        variance[seen] *= ((1 - beta2**steps) / (1 - powers)).to(variance.dtype)[:, None]
        if seen.any():
            variance[~seen] = variance[seen].mean(0)
    variance.clamp_(min=LEAST_SHARE * float(variance.mean(dtype=torch.float64)))


class CompressedAdam(torch.optim.Optimizer):
    """1-bit Adam: Tang et al., arXiv 2102.02888, algorithm 1, with a scale for each tensor and `settle_variance`.

    While `compressing` is false it is Adam on the gradients it finds, the means over all ranks. From then on it finds each rank's own,
    m <- mean over the ranks of compressed(beta1 m + (1 - beta1) g), and the variance stays, as `settle_variance` leaves it.
    The bias of both moments is corrected in both phases, that of the variance by the number of its own steps. Weight decay is decoupled.
    `state_dict` has the moments under the names and in the shapes of torch's Adam.

    Attributes:
        compressing: set before a step; not taken back once it has frozen the variance.
        used_rows: by the place of a parameter among all, how many of its rows, from the first on, can have gradients in this step. The
            momentum and the errors of the others are 0.
        reduction: the momentum of all parameters, and the errors of its compressions.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        lr: float,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
        bias_correction: bool = True,
    ):
        # `variance_steps`: after how many steps the variance was frozen, 0: it is not; in the groups, which a checkpoint holds.
        super().__init__(param_groups, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "variance_steps": 0})
        self.compressing = False
        self._parameters: list[torch.Tensor] = []
        self.used_rows: dict[int, int] = {}
        self._bias_correction = bias_correction

    @property
    def frozen(self) -> int:
        """After how many steps the variance was frozen; 0: it is not."""
        return int(self.param_groups[0]["variance_steps"])

    def bind(self, collectives: Any) -> None:
        """Make the state, for the parameters as they are now: in bf16 and fp16 the engine has put fp32 copies in the model's place."""
        self._parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.reduction = CompressedAllReduce([p.numel() for p in self._parameters], collectives, self._parameters[0].device)
        self._take_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._take_state()

    def _take_state(self) -> None:
        """What there is of the state, and zeros for the rest; the momentum of all parameters is one buffer."""
        for parameter, view in zip(self._parameters, self.reduction.views, strict=True):
            state = self.state[parameter]
            if "exp_avg" in state:
                view.copy_(state["exp_avg"].view(-1))
            state["exp_avg"] = view.view_as(parameter)
            state.setdefault("exp_avg_sq", torch.zeros_like(parameter, requires_grad=False))
            state.setdefault("step", torch.zeros((), device=parameter.device))
        self._steps = int(self.state[self._parameters[0]]["step"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of the parameters by their gradients; a gradient that is not there is zero. All ranks call this together.

        Nothing before `bind`: an engine has been seen to step when it is built.
        """
        if not self._parameters:
            return
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.compressing and not self.frozen:
            self._freeze()
        self._steps += 1
        torch._foreach_add_([self.state[parameter]["step"] for parameter in self._parameters], 1.0)
        if self.frozen:
            self._step_compressed()
        else:
            self._step_adam()

    def _step_adam(self) -> None:
        """torch's fused Adam, which the runs have that this one is compared with."""
        for place, rows in self.used_rows.items():
            self._row_steps(place)[:rows] += 1
        for group in self.param_groups:
            parameters = group["params"]
            # The kernel counts on from it.
            before = float(self._steps - 1) if self._bias_correction else LATE_STEP
            adam(
                parameters,
                [parameter.grad for parameter in parameters],
                [self.state[parameter]["exp_avg"] for parameter in parameters],
                [self.state[parameter]["exp_avg_sq"] for parameter in parameters],
                [],
                [torch.full((), before, device=parameter.device) for parameter in parameters],
                fused=True,
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _row_steps(self, place: int) -> torch.Tensor:
        """In how many steps each row of an embedding could have gradients: (rows,), a part of its state."""
        parameter = self._parameters[place]
        return self.state[parameter].setdefault("row_steps", torch.zeros(parameter.shape[0], device=parameter.device))

    def _freeze(self) -> None:
        """The variance stays from here on. A tensor without any, whose block was dropped in every step so far, gets the others' mean."""
        some: list[torch.Tensor] = []
        none: list[torch.Tensor] = []
        for place, (group, parameter, _) in enumerate(self._momenta()):
            group["variance_steps"] = self._steps
            variance = self.state[parameter]["exp_avg_sq"]
            settle_variance(variance, self._steps, group["betas"][1], self._row_steps(place) if place in self.used_rows else None)
            (some if variance.any() else none).append(variance)
        mean = sum(float(variance.sum(dtype=torch.float64)) for variance in some) / max(1, sum(variance.numel() for variance in some))
        for variance in none:
            variance.fill_(mean)

    def _step_compressed(self) -> None:
        reduction, scratch = self.reduction, self.reduction.scratch
        for place, rows in self.used_rows.items():
            reduction.live[place] = rows * self._parameters[place].shape[1]
        for group, parameter, momentum in self._momenta():
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad.view(-1), 1 - group["betas"][0])
        reduction.reduce()
        for group, parameter, momentum in self._momenta():
            (beta1, beta2), lr = group["betas"], group["lr"]
            bias1, bias2 = (1 - beta1**self._steps, 1 - beta2 ** group["variance_steps"]) if self._bias_correction else (1.0, 1.0)
            weights, variance = parameter.view(-1), self.state[parameter]["exp_avg_sq"].view(-1)
            parts = (tensor.split(scratch.numel()) for tensor in (weights, momentum, variance))
            for part, part_momentum, part_variance in zip(*parts, strict=True):
                divisor = torch.sqrt(part_variance, out=scratch[: part.numel()]).mul_(bias2**-0.5).add_(group["eps"])
                part.mul_(1 - lr * group["weight_decay"]).addcdiv_(part_momentum, divisor, value=-lr / bias1)

    def _momenta(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Group, parameter and the flat view of its momentum, for every parameter."""
        views = iter(self.reduction.views)
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter, next(views)
