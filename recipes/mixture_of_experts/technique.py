"""The balance of a mixture of experts: a loss that keeps the router from choosing the same few experts for every token.

    deepspeed launch/pretrain.py --recipe recipes/mixture_of_experts

The loss is `model.experts.Balance`. Its frequencies are those of the whole global batch of the previous step, so it does not depend on how
a batch is divided among ranks and micro-batches.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any, NamedTuple

import torch

from model.accounting import block_tensors
from model.experts import Balance
from model.gpt import GPT
from recipes.technique import Declaration, RunForTechniques, Technique


def gathers_in_words(run: RunForTechniques) -> str:
    """What stage 3 sends for the weights of experts, and when less would be sent if tokens were exchanged.

    A micro-batch gathers them twice and reduces their gradients once. An exchange sends each choice of each token, d_model numbers, to its
    expert and back, forward and backward.
    """
    shape, width = run.shape, 4 if run.precision == "fp32" else 2
    weights = shape.n_layer * sum(math.prod(sides) for sides in block_tensors(shape).values() if len(sides) == 3)
    tokens = 3 * weights // (4 * shape.n_layer * shape.n_expert_active * shape.d_model)
    return (
        f"stage 3 sends {3 * weights * width / 1e9:,.1f} GB of experts' weights and gradients for each micro-batch of a rank; between"
        f" hosts, zero_hpz_partition_size saves a third. An exchange of tokens, which is not built, would send less below {tokens:,} tokens"
    )


class RoutingMeans(NamedTuple):
    """What the routers did. load, fp64 (n_layer, n_expert): the share of the choices; probabilities, the same shape, and entropy in nats,
    (n_layer,): means over tokens. All are NaN for a layer that saw no token."""

    load: torch.Tensor
    probabilities: torch.Tensor
    entropy: torch.Tensor

    def of_layers(self) -> dict[str, dict[int, float]]:
        """For each layer that saw tokens, the load of the busiest and the idlest expert relative to the mean, and the entropy."""
        relative = self.load * self.load.shape[1]
        values = {"expert_load_max": relative.amax(dim=1), "expert_load_min": relative.amin(dim=1), "router_entropy": self.entropy}
        ran = (~self.load[:, 0].isnan()).tolist()
        return {name: {layer: value for layer, value in enumerate(of.tolist()) if ran[layer]} for name, of in values.items()}


class ExpertBalance(Technique):
    """`"expert_balance": {"enabled": true, "coefficient": 0.03}`: a section of this project's own.

    coefficient: of the balance loss, whose weights are the experts' excesses in the last step, n_expert x frequency - 1; 0 measures only.

    The excesses are a part of every checkpoint. A step that fp16 skips counts as any other, and a layer that was dropped in all of a step's
    micro-batches keeps its own.
    """

    declaration = Declaration(
        section="expert_balance",
        keys={"coefficient": {"types": ["number"], "minimum": 0, "maximum": 100, "default": 0.03}},
    )
    state_is_common = True

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        if not run.shape.n_expert:
            raise ValueError(
                "'expert_balance' is for a mixture of experts, and this model has one MLP in each block; add --architecture qwen3_moe, or"
                " remove the section"
            )
        self.coefficient, self.run = section["coefficient"], run
        if run.zero_stage == 3 and run.ranks > 1:
            self.notes = (gathers_in_words(run),)
        self._seen: RoutingMeans | None = None

    def attach(self, ds_engine: Any, collectives: Any) -> None:
        layers, experts, device = self.run.shape.n_layer, self.run.shape.n_expert, ds_engine.device
        self._collectives, self._scale = collectives, torch.zeros((), device=device)
        self._excess, self._weight = torch.zeros(2, layers, experts, device=device)
        self._trained, self._evaluated = torch.zeros(2, layers, 2 * experts + 1, dtype=torch.float64, device=device)
        model = ds_engine.module
        for block, *of_layer in zip(model.h, self._weight, self._trained, self._evaluated, strict=True):
            block.mlp.balance = Balance(self._scale, *of_layer)
        model.register_forward_hook(self._before_backward)

    def _before_backward(self, model: GPT, batch: tuple[torch.Tensor, ...], loss: torch.Tensor) -> None:
        """Set the scale of the balance loss when the backward pass begins: that of the sum of losses which `GPT.forward` divides."""
        if loss.requires_grad:
            counted = (batch[1] != -100).sum() / model.row_part.parts

            def keep(gradient: torch.Tensor) -> None:
                self._scale.copy_(gradient / counted)

            loss.register_hook(keep)

    def on_gradients(self) -> None:
        self._seen = self._mean_of(self._trained)
        self._balance = ((1 + self._excess) * self._seen.probabilities).sum(dim=1).nanmean()
        excess = self.run.shape.n_expert * self._seen.load - 1
        self._set_excess(torch.where(excess.isnan(), self._excess, excess))

    def _set_excess(self, excess: torch.Tensor) -> None:
        self._excess.copy_(excess)
        self._weight.copy_(self.coefficient * self._excess)

    def metrics(self) -> dict[str, float]:
        """Of the busiest and the idlest expert of all layers, and means over the layers."""
        if self._seen is None:
            return {}
        of_layers = {name: values.values() for name, values in self._seen.of_layers().items()}
        return {
            "balance_loss": float(self._balance),
            "expert_load_max": max(of_layers["expert_load_max"]),
            "expert_load_min": min(of_layers["expert_load_min"]),
            "router_entropy": fmean(of_layers["router_entropy"]),
        }

    def evaluation_metrics(self) -> dict[str, float]:
        of_layers = self._mean_of(self._evaluated).of_layers()
        return {f"val_{name}/{layer}": value for name, values in of_layers.items() for layer, value in values.items()}

    def _mean_of(self, sums: torch.Tensor) -> RoutingMeans:
        """What all ranks have added to `sums`, (n_layer, 2 n_expert + 1), which is set to 0."""
        experts = self.run.shape.n_expert
        choices, probabilities, entropy = self._collectives.all_reduce(sums).split((experts, experts, 1), dim=1)
        tokens = choices.sum(dim=1, keepdim=True) / self.run.shape.n_expert_active
        seen = RoutingMeans(choices / tokens / self.run.shape.n_expert_active, probabilities / tokens, (entropy / tokens)[:, 0])
        sums.zero_()
        return seen

    def bytes_sent(self, base: int, steps: int) -> int:
        ranks, shape = self.run.ranks, self.run.shape
        return base + round(2 * (ranks - 1) / ranks * 8 * shape.n_layer * (2 * shape.n_expert + 1))

    def state_dict(self) -> dict[str, Any]:
        return {"excess": self._excess}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._set_excess(state["excess"])
