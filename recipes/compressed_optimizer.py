"""What the optimizers share that exchange one bit an element: state in one buffer, rows without gradients, a variance that can stay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recipes.compressed_all_reduce import CompressedAllReduce, blocks

#: The least that an element of a variance that stays may be, as a share of the mean of its tensor.
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


class CompressedOptimizer(torch.optim.Optimizer):
    """Base of the optimizers whose ranks exchange their own momenta, compressed, in the place of gradients.

    `state_dict` has the state that all ranks share; what is a rank's own (`reduction`'s errors, and between exchanges more) is for the
    technique to save.

    Attributes:
        used_rows: by the place of a parameter among all, how many of its rows, from the first on, can have gradients in this step. What is
            exchanged of the others, and the errors, are 0.
        reduction: the exchanged tensors of all parameters, and the errors of their compressions.
    """

    #: The state that is exchanged, and whose memory is `reduction.buffer`; empty: what is exchanged is no state.
    exchanged = "exp_avg"
    #: Other states of a parameter's shape.
    kept: tuple[str, ...] = ("exp_avg_sq",)

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        lr: float,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
        bias_correction: bool = True,
        **defaults: Any,
    ):
        super().__init__(param_groups, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, **defaults})
        self._parameters: list[torch.Tensor] = []
        self.used_rows: dict[int, int] = {}
        self._bias_correction = bias_correction

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
        """What there is of the state, and zeros for the rest; what is exchanged of all parameters is one buffer."""
        for parameter, view in zip(self._parameters, self.reduction.views, strict=True):
            state = self.state[parameter]
            if self.exchanged:
                if self.exchanged in state:
                    view.copy_(state[self.exchanged].view(-1))
                state[self.exchanged] = view.view_as(parameter)
            for name in self.kept:
                state.setdefault(name, torch.zeros_like(parameter, requires_grad=False))
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
        for place, rows in self.used_rows.items():
            self.reduction.live[place] = rows * self._parameters[place].shape[1]
        self._update()

    @abstractmethod
    def _update(self) -> None:
        """The step itself; every parameter has a gradient."""

    def _count_step(self) -> None:
        self._steps += 1
        torch._foreach_add_([self.state[parameter]["step"] for parameter in self._parameters], 1.0)

    def _row_steps(self, place: int) -> torch.Tensor:
        """In how many steps each row of an embedding could have gradients: (rows,), a part of its state."""
        parameter = self._parameters[place]
        return self.state[parameter].setdefault("row_steps", torch.zeros(parameter.shape[0], device=parameter.device))

    def _count_rows(self) -> None:
        for place, rows in self.used_rows.items():
            self._row_steps(place)[:rows] += 1

    def _blocks(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Flat parts of tensors of one size, as many elements at a time as `reduction.scratch` has."""
        return blocks(self.reduction.scratch.numel(), *tensors)

    def _momenta(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Group, parameter and the flat view of what is exchanged of it, for every parameter."""
        views = iter(self.reduction.views)
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter, next(views)


class FreezingOptimizer(CompressedOptimizer):
    """Base of those with two phases: on whole gradients, then with a variance that stays, as `settle_variance` leaves it.

    Attributes:
        compressing: set before a step; not taken back once it has frozen the variance.
    """

    def __init__(self, param_groups: list[dict[str, Any]], *arguments: Any, **defaults: Any):
        # `variance_steps`: after how many steps the variance was frozen, 0: it is not; in the groups, which a checkpoint holds.
        super().__init__(param_groups, *arguments, variance_steps=0, **defaults)
        self.compressing = False

    @property
    def frozen(self) -> int:
        """After how many steps the variance was frozen; 0: it is not."""
        return int(self.param_groups[0]["variance_steps"])

    def _update(self) -> None:
        if self.compressing and not self.frozen:
            self._freeze()
        self._count_step()
        if self.frozen:
            self._step_compressed()
        else:
            self._count_rows()
            self._step_whole()

    @abstractmethod
    def _step_whole(self) -> None:
        """An update by gradients that are the means over all ranks."""

    @abstractmethod
    def _step_compressed(self) -> None:
        """An update by each rank's own gradients."""

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

    def _take_gradients(self) -> None:
        """Each rank's own gradient into the momentum."""
        for group, parameter, momentum in self._momenta():
            assert parameter.grad is not None
            self._put_into_momentum(parameter.grad, momentum, group["betas"][0])

    def _put_into_momentum(self, gradient: torch.Tensor, momentum: torch.Tensor, beta1: float) -> None:
        """The momentum of one tensor; from here on the memory of the gradient is free."""
        momentum.lerp_(gradient.view(-1), 1 - beta1)

    def _biases(self, group: dict[str, Any]) -> tuple[float, float]:
        """What the moments are divided by: that of the variance is of the steps that it has seen."""
        beta1, beta2 = group["betas"]
        variance_steps = group["variance_steps"] or self._steps
        return (1 - beta1**self._steps, 1 - beta2**variance_steps) if self._bias_correction else (1.0, 1.0)

    def _divisor(self, variance: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """What the momentum is divided by, of a block of the variance; in `reduction.scratch`."""
        root = torch.sqrt(variance, out=self.reduction.scratch[: variance.numel()])
        return root.mul_(self._biases(group)[1] ** -0.5).add_(group["eps"])
