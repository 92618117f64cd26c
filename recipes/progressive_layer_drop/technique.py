"""Progressive Layer Dropping: blocks are skipped at random, more of them later in the run and deeper in the model.

    deepspeed launch/pretrain.py --recipe recipes/progressive_layer_drop

Zhang and He, Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping, arXiv 2010.13369, section 4 and
algorithm 1. DeepSpeed had it until 0.19.6; the section is the one it documented.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from model.gpt import GPT, Block
from recipes.technique import Declaration, Run, StepPlan, Technique

#: What the paper uses, and DeepSpeed's documentation.
THETA = 0.5
#: "auto" is this over the steps of the run (section 4.2): at its end theta has come to within e^-100 of its limit.
GAMMA_TIMES_STEPS = 100
#: Micro-batches over which the kept blocks of a step are averaged, at most: a step may have millions when a run is planned.
MOST_DRAWN = 64


def theta_at(step: int, theta: float, gamma: float) -> float:
    """theta(t) = (1 - theta) exp(-gamma t) + theta, where t counts the updates before optimizer step `step` (from 1): theta(0) = 1."""
    return (1 - theta) * math.exp(-gamma * (step - 1)) + theta


def mean_theta(steps: int, theta: float, gamma: float) -> float:
    """The mean of theta(t) over a run of `steps` steps, a geometric series."""
    if gamma == 0:
        return 1.0
    return theta + (1 - theta) * math.expm1(-gamma * steps) / math.expm1(-gamma) / steps


def keep_probabilities(theta: float, n_layer: int) -> list[float]:
    """The probability that each block runs: 1 - i / n_layer (1 - theta), which is 1 for the first block."""
    return [1 - i / n_layer * (1 - theta) for i in range(n_layer)]


def draws(seed: int, step: int, n_layer: int, micro_step: int = 0) -> list[float]:
    """A number in [0, 1) for each block, a pure function of the arguments: the same on every rank, in a resumed run, and when a block is
    recomputed. A deeper model continues the list."""
    digest = hashlib.shake_256(f"{seed}/progressive_layer_drop/{step}/{micro_step}".encode()).digest(8 * n_layer)
    return [(word >> 11) / 2**53 for word in struct.unpack(f">{n_layer}Q", digest)]  # 53 bits, exact in a float


class ProgressiveLayerDrop(Technique):
    """DeepSpeed's documented `"progressive_layer_drop": {"enabled": true, "theta": 0.5, "gamma": 0.001}`, and `"draw"`.

    theta: the limit of theta(t); "auto" is 0.5. At 1 nothing is dropped.
    gamma: how fast it gets there; "auto" is 100 over the steps of the run. At 0 nothing is dropped.
    draw: "step" (each block once an optimizer step) or "micro_batch" (anew for each of its micro-batches, the same on all ranks).

    A dropped block does not run. The residual branches of a block that runs are scaled by one over its probability. The parameters of a
    dropped block have no gradient, and Adam updates them as if the gradient were zero. Evaluation runs all blocks, unscaled.
    """

    declaration = Declaration(
        section="progressive_layer_drop",
        keys={
            "theta": {"types": ["number"], "minimum": 0, "maximum": 1, "auto": True},
            "gamma": {"types": ["number"], "minimum": 0, "auto": True},
            "draw": {"types": ["string"], "enum": ["step", "micro_batch"]},
        },
        exclusive=("which blocks see which tokens",),
    )

    def __init__(self, section: dict[str, Any], run: Run):
        auto = {"theta": THETA, "gamma": GAMMA_TIMES_STEPS / run.steps}
        self.theta, self.gamma = (value if (value := section.get(key, "auto")) != "auto" else default for key, default in auto.items())
        self.each_micro_batch = section.get("draw") == "micro_batch"
        self.seed, self.n_layer = run.seed, run.shape.n_layer
        last = theta_at(run.steps, self.theta, self.gamma)
        mean = mean_theta(run.steps, self.theta, self.gamma)
        share = sum(keep_probabilities(mean, self.n_layer)) / self.n_layer
        self.notes = (
            f"progressive_layer_drop: theta falls to {last:.3g} in {run.steps:,} steps; {100 * share:.0f}% of the blocks run on average",
        )

    def on_step(self, step: int, plan: StepPlan) -> StepPlan:
        self.step, self.micro_step = step, -1
        self.current_theta = theta_at(step, self.theta, self.gamma)
        self.probabilities = keep_probabilities(self.current_theta, self.n_layer)
        micro_steps = range(min(MOST_DRAWN, plan.accumulation) if self.each_micro_batch else 1)
        counts = [sum(self._draw(micro_step)) for micro_step in micro_steps]
        self.kept_blocks = sum(counts) / len(counts)
        self.keeps = self._draw(0)
        return plan._replace(kept_blocks=self.kept_blocks)

    def _draw(self, micro_step: int) -> list[bool]:
        numbers = draws(self.seed, self.step, self.n_layer, micro_step)
        return [number < p for number, p in zip(numbers, self.probabilities, strict=True)]

    def on_batch(self, tokens: torch.Tensor) -> torch.Tensor:
        self.micro_step += 1
        if self.each_micro_batch:
            self.keeps = self._draw(self.micro_step)
        return tokens

    def prepare(self, model: GPT) -> None:
        model.block_runner = self.run_kept_blocks

    def run_kept_blocks(self, blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) through the blocks that this step keeps; through all of them in evaluation."""
        for block in cast("Iterable[Block]", blocks):
            if not blocks.training:
                x = block(x)
            elif self.keeps[block.index]:
                x = block(x, 1 / self.probabilities[block.index])
        return x

    def metrics(self) -> dict[str, float]:
        """theta, and how many blocks run: a mean over the (first 64) micro-batches if each draws its own."""
        return {"theta": self.current_theta, "kept_blocks": self.kept_blocks}
