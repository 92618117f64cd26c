"""Histograms of the exponents of a step's gradients, layer by layer: which of them fp16 can represent, and which would become zero.

    deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --histogram_every 100

Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2 and figure 3: without a loss scale many elements of a
gradient are below fp16's smallest number. The gradients are counted as the backward pass computes them, in the run's precision and times
its loss scale, for all micro-batches and ranks of the step, before accumulation and reduction.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from launch.training.engine import TrainingEngine
from launch.training.exponents import BINS, KINDS, LOWEST, summary
from launch.training.observers import Observer
from launch.training.run_folder.folder import NoFolder, RunFolder

#: The two bins after those of the exponents: elements that are zero, and that are not finite.
ZERO, NOT_FINITE = BINS, BINS + 1


def count_exponents(values: torch.Tensor) -> torch.Tensor:
    """Count the `values` that have the exponent LOWEST, LOWEST + 1, ..., are zero, are not finite: int64 (BINS + 2,).

    The exponent of x is floor(log2 |x|); values below or above the bins are counted in the first or the last.
    """
    values = values.detach().float()
    # x = m 2^e with m in [0.5, 1): the exponent is e - 1.
    places = (torch.frexp(values).exponent.long() - 1 - LOWEST).clamp(0, BINS - 1)
    places = torch.where(values == 0, ZERO, torch.where(values.isfinite(), places, NOT_FINITE))
    return torch.bincount(places.flatten(), minlength=BINS + 2)


class GradientHistograms(Observer):
    """Counts the exponents of the gradients of every `every`-th step and writes them to the run's folder.

    A layer is the embedding, a block, or the final norm. Its activation gradient is that of its output, its weight gradients those of all
    its parameters; the head's weight, tied or not, counts with the embedding.
    """

    def __init__(self, folder: RunFolder | NoFolder, every: int):
        self.folder, self.every = folder, every
        self._hooks: list[Any] = []

    def start(self, engine: TrainingEngine) -> None:
        self.engine, self.collectives = engine, engine.collectives

    def on_step(self, step: int) -> None:
        if step % self.every:
            return
        layers = self._layers()
        self._counts = torch.zeros(len(KINDS), len(layers), BINS + 2, dtype=torch.int64, device=self.collectives.device)
        for index, (output, owner) in enumerate(layers.values()):
            self._hooks.append(output.register_forward_hook(partial(self._watch_output, index)))
            for parameter in owner:
                self._hooks.append(parameter.register_hook(partial(self._count, 1, index)))

    def after_step(self, step: int) -> None:
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        counts = self.collectives.all_reduce(self._counts).tolist()
        scale = self.engine.loss_scale if self.engine.config.precision == "fp16" else None
        self.folder.write_histograms(summary(step, self.engine.config.precision, scale, list(self._layers()), counts))

    def _layers(self) -> dict[str, tuple[nn.Module, list[nn.Parameter]]]:
        """By name: the module whose output is watched, and the parameters."""
        model = self.engine.ds_engine.module
        blocks = {f"block {block.index}": (block, list(block.parameters())) for block in model.h}
        return {
            "embedding": (model.drop, [*{model.wte.weight, model.lm_head.weight}, *model.wpe.parameters()]),
            **blocks,
            "final norm": (model.ln_f, [*model.ln_f.parameters()]),
        }

    def _watch_output(self, index: int, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self._count, 0, index))

    def _count(self, kind: int, index: int, gradient: torch.Tensor) -> None:
        self._counts[kind, index] += count_exponents(gradient)
