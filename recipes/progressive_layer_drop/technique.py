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
from recipes.technique import Declaration, RunForTechniques, StepWork, Technique, without_auto

#: The value in the paper and in DeepSpeed's documentation.
THETA = 0.5
#: "auto" is this divided by the steps of the run (section 4.2): at the end theta is within e^-100 of its limit.
GAMMA_TIMES_STEPS = 100


def theta_at(step: int, theta: float, gamma: float) -> float:
    """theta(t) = (1 - theta) exp(-gamma t) + theta, where t counts the updates before optimizer step `step` (from 1): theta(0) = 1."""
    return (1 - theta) * math.exp(-gamma * (step - 1)) + theta


def keep_probabilities(theta: float, n_layer: int) -> list[float]:
    """The probability that each block runs: 1 - i / n_layer (1 - theta), which is 1 for the first block."""
    return [1 - i / n_layer * (1 - theta) for i in range(n_layer)]


def draws(seed: int, step: int, n_layer: int) -> list[float]:
    """A number in [0, 1) for each block, a pure function of the arguments: the same on every rank, in a resumed run, and when a block is
    recomputed. A deeper model continues the list."""
    digest = hashlib.shake_256(f"{seed}/progressive_layer_drop/{step}/0".encode()).digest(8 * n_layer)
    return [(word >> 11) / 2**53 for word in struct.unpack(f">{n_layer}Q", digest)]  # 53 bits, exact in a float


class ProgressiveLayerDrop(Technique):
    """DeepSpeed's documented `"progressive_layer_drop": {"enabled": true, "theta": 0.5, "gamma": 0.001}`.

    theta: the limit of theta(t); "auto", or left out: 0.5 (left out, DeepSpeed took 1). At 1 nothing is dropped.
    gamma: how fast theta(t) approaches it; "auto", or left out: 100 divided by the steps of the run (left out, DeepSpeed took 0.001). At 0
        nothing is dropped.

    The blocks to drop are drawn once per optimizer step, the same on all ranks. The residual branches of a block that runs are divided by
    its keep probability. The parameters of a dropped block have no gradient, and Adam updates them as if it were zero. Evaluation runs all
    blocks, unscaled.
    """

    declaration = Declaration(
        section="progressive_layer_drop",
        keys={
            "theta": {"types": ["number"], "minimum": 0, "maximum": 1, "auto": "reported"},
            "gamma": {"types": ["number"], "minimum": 0, "auto": "reported"},
        },
        exclusive=("which blocks see which tokens",),
    )

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        values = {"theta": THETA, "gamma": GAMMA_TIMES_STEPS / run.steps} | without_auto(section)
        self.theta, self.gamma = values["theta"], values["gamma"]
        self.seed, self.n_layer = run.seed, run.shape.n_layer
        last = theta_at(run.steps, self.theta, self.gamma)
        self.notes = (f"progressive_layer_drop: theta falls to {last:.3g} in {run.steps:,} steps",)

    def on_step(self, step: int, work: StepWork) -> StepWork:
        self.current_theta = theta_at(step, self.theta, self.gamma)
        self.probabilities = keep_probabilities(self.current_theta, self.n_layer)
        numbers = draws(self.seed, step, self.n_layer)
        self.keeps = [number < p for number, p in zip(numbers, self.probabilities, strict=True)]
        self.kept_blocks = float(sum(self.keeps))
        return work._replace(equivalent_blocks=self.kept_blocks)

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
        """theta, and how many blocks run."""
        return {"theta": self.current_theta, "kept_blocks": self.kept_blocks}
