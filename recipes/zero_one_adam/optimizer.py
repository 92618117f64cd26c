"""Adam that updates its variance in some steps only. Between exchanges of accumulated updates, the ranks make local steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from recipes.one_bit import LEAST_SHARE, CompressedOptimizer


class LocalStepAdam(CompressedOptimizer):
    """0/1 Adam: Lu et al., arXiv 2202.06009, algorithm 1, with a scale for each tensor.

    In a step that updates the variance, the gradients are averaged over the ranks, and nothing is compressed. In the other steps each rank
    has its own gradients. Each rank accumulates its updates: u <- u + lr m / (sqrt(v) + eps). An exchange replaces u with its compressed
    mean over the ranks and subtracts it from the weights of the last exchange. The momentum becomes u (sqrt(v) + eps), divided by the sum
    of the bias-corrected learning rates since the last exchange.

    The biases of both moments are corrected. The correction of the variance counts its updates. The stored variance is already corrected,
    so that each row of an embedding can have its own count. Weight decay is decoupled and is not exchanged. From the first step that does
    not update the variance, each of its elements counts as at least a tenth of its tensor's mean (see `settle_variance`).

    Attributes:
        updates_variance: whether the next step updates the variance; set before the step.
        exchanges: whether all ranks have the same weights after the next step; set before the step.
        local_steps: the number since the last exchange; their updates are in `reduction.buffer`. 0: all ranks have the same weights.
    """

    exchanged = ""
    kept = ("exp_avg", "variance")

    def __init__(self, param_groups: list[dict[str, Any]], *arguments: Any):
        # In the groups: the number of variance updates, the sum of the rates since the last exchange, and that sum at the last exchange.
        super().__init__(param_groups, *arguments, variance_updates=0, rates=0.0, exchanged_rates=0.0)
        self.updates_variance = self.exchanges = True
        self.local_steps = 0
        #: The weights of the last exchange, with the weight decay since then; allocated at the first local step.
        self._synced_weights: list[torch.Tensor] = []
        #: The smallest value that an element of each tensor's variance counts as.
        self._least: list[float] = []

    def _take_state(self) -> None:
        super()._take_state()
        self.local_steps = 0
        self._read_variance()

    def _update(self) -> None:
        if self.updates_variance:
            self._update_variance()
        else:
            self._give_new_rows_a_variance()
        for group in self.param_groups:
            group["rates"] = self._rate(group) + (group["rates"] if self.local_steps else 0.0)
        if not self.local_steps:
            self.reduction.buffer.zero_()
        for (group, parameter, moved), least in zip(self._momenta(), self._lower_limits(), strict=True):
            assert parameter.grad is not None
            for update, m, gradient, v in self._blocks(moved, *self._state_of(parameter, parameter.grad)):
                m.lerp_(gradient, 1 - group["betas"][0])
                update.addcdiv_(m, self._divisor(v, least, group["eps"]), value=self._rate(group))
        # At a rate of 0 there is no update to exchange: the rank keeps its momentum, as in a local step.
        moves = all(group["rates"] for group in self.param_groups)
        if (self.updates_variance and (moves or not self.local_steps)) or (self.exchanges and moves):
            self._exchange()
        else:
            self._step_locally()

    def _rate(self, group: dict[str, Any]) -> float:
        """The factor of the momentum in this step's update: lr / bias correction."""
        return float(group["lr"] / self._bias(group["betas"][0], self._steps))

    def _exchange(self) -> None:
        # After a variance update all ranks have the same update, unless there were local steps before (a resume may move the updates).
        if self.reduction.ranks > 1 and (self.local_steps or not self.updates_variance):
            self._exchange_updates()
        if self.local_steps:
            torch._foreach_copy_(self._parameters, self._synced_weights)
            self.local_steps = 0
        self._decay(self._parameters)
        self._move_from(self._parameters)

    def _exchange_updates(self) -> None:
        """Replace the accumulated updates with their mean over the ranks, and compute the momentum that gives this mean."""
        # The errors are updates too. If the summed rates have fallen since the last exchange, the errors are scaled down with them.
        shrink = min((group["rates"] / group["exchanged_rates"] for group in self.param_groups if group["exchanged_rates"]), default=1.0)
        if shrink < 1:
            self.reduction.worker_error.mul_(shrink)
            self.reduction.server_error.mul_(shrink)
        self.reduction.reduce()
        for (group, parameter, moved), least in zip(self._momenta(), self._lower_limits(), strict=True):
            for update, m, v in self._blocks(moved, *self._state_of(parameter)):
                torch.mul(update, self._divisor(v, least, group["eps"]), out=m).div_(group["rates"])
        for group in self.param_groups:
            group["exchanged_rates"] = group["rates"]

    def _step_locally(self) -> None:
        if not self._synced_weights:
            self._synced_weights = [torch.empty_like(parameter, requires_grad=False) for parameter in self._parameters]
        if not self.local_steps:
            torch._foreach_copy_(self._synced_weights, self._parameters)
        self.local_steps += 1
        self._decay(self._synced_weights)
        self._move_from(self._synced_weights)

    def _decay(self, weights: list[torch.Tensor]) -> None:
        for (group, _, _), weight in zip(self._momenta(), weights, strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"])

    def _move_from(self, places: list[torch.Tensor]) -> None:
        """Set the parameters to `places` minus the accumulated updates."""
        for (_, parameter, moved), place in zip(self._momenta(), places, strict=True):
            torch.sub(place, moved.view_as(place), out=parameter)

    def _state_of(self, parameter: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Momentum and variance, with `others` between them."""
        state = self.state[parameter]
        return state["exp_avg"], *others, state["variance"]

    def _divisor(self, variance: torch.Tensor, least: float, eps: float) -> torch.Tensor:
        return torch.clamp(variance, min=least, out=self.reduction.scratch[: variance.numel()]).sqrt_().add_(eps)

    def _lower_limits(self) -> list[float]:
        """The lower limit of each tensor's variance: 0 as long as every step has updated it."""
        return self._least if self._variance_updates < self._steps else [0.0] * len(self._least)

    # --- the variance ---------------------------------------------------------------------------------------------------------------

    def _update_variance(self) -> None:
        self._count_rows()
        for place, (group, parameter, _) in enumerate(self._momenta()):
            assert parameter.grad is not None
            group["variance_updates"] = variance_updates = self._variance_updates + 1
            beta2, variance, gradient = group["betas"][1], self.state[parameter]["variance"], parameter.grad
            # Stores v / (1 - beta2^n) instead of v: its n-th value is this share of the n-th square, plus the rest of the value before.
            if self._bias_correction and place in self.used_rows:
                steps = self._row_steps(place)[: self.used_rows[place], None]
                rows = variance[: self.used_rows[place]]
                share = (1 - beta2) / (1 - torch.pow(beta2, steps.double()))
                rows.lerp_(gradient[: self.used_rows[place]].square(), share.to(rows.dtype))
            else:
                share = (1 - beta2) / self._bias(beta2, variance_updates)
                variance.mul_(1 - share).addcmul_(gradient, gradient, value=share)
        self._variance_updates += 1
        self._read_variance()

    def _read_variance(self) -> None:
        """Read from the state the number of variance updates, the rows that have a variance, and the lower limit of each tensor."""
        self._variance_updates = int(self.param_groups[0]["variance_updates"])
        means, self._known = list[float](), dict[int, int]()
        for place, parameter in enumerate(self._parameters):
            state = self.state[parameter]
            known = int(state["row_steps"].count_nonzero()) if "row_steps" in state else None
            if known is not None:
                self._known[place] = known
            variance = state["variance"][:known]
            means.append(float(variance.mean(dtype=torch.float64)) if variance.numel() else 0.0)
        # A tensor without a variance, whose block was dropped in every variance update so far, gets the others' mean.
        others = sum(means) / max(1, sum(mean > 0 for mean in means))
        self._least = [LEAST_SHARE * mean or others for mean in means]

    def _give_new_rows_a_variance(self) -> None:
        """Give positions that a curriculum has reached since the last variance update the mean of the others, until the next update."""
        for place, rows in self.used_rows.items():
            variance, known = self.state[self._parameters[place]]["variance"], self._known.get(place, 0)
            if known < rows:
                variance[known:rows] = variance[:known].mean(0)

    # --- the state of one rank ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def synced_weights(self, changed: Callable[[], None]) -> Iterator[None]:
        """In the body, the parameters are the weights of the last exchange. `changed` is called after each change of the parameters."""
        if not self.local_steps:
            yield
            return
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._synced_weights)
        changed()
        try:
            yield
        finally:
            with torch.no_grad():
                self._move_from(self._synced_weights)
            changed()

    def own_state(self) -> dict[str, Any]:
        """This rank's local state since the last exchange, for a checkpoint that has the weights of that exchange."""
        if not self.local_steps:
            return {}
        momenta = [self.state[parameter]["exp_avg"] for parameter in self._parameters]
        return {"alone": self.local_steps, "moved": self.reduction.buffer, "momenta": momenta}

    @torch.no_grad()
    def load_own_state(self, state: dict[str, Any]) -> None:
        """Load what `own_state` returned, after the parameters and `state_dict`."""
        if "alone" not in state:
            return
        self.local_steps = state["alone"]
        self._synced_weights = [parameter.detach().clone() for parameter in self._parameters]
        self.reduction.buffer.copy_(state["moved"])
        for parameter, momentum in zip(self._parameters, state["momenta"], strict=True):
            self.state[parameter]["exp_avg"].copy_(momentum)
        self._move_from(self._synced_weights)
