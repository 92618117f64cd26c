"""Measures how much each block changes its input on the validation set, which tells whether it can be dropped late in a run.

    deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --block_similarity

Zhang and He, arXiv 2010.13369, section 3: a block whose output has nearly the norm and the direction of its input does little.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from launch.training.engine import TrainingEngine
from launch.training.observers import Observer
from launch.training.run_folder.folder import NoFolder, RunFolder


class BlockSimilarity(Observer):
    """Writes ||out|| / ||in|| and cos(in, out) of each block to the run's folder, means over the tokens of an evaluation."""

    def __init__(self, folder: RunFolder | NoFolder):
        self.folder = folder

    def start(self, engine: TrainingEngine) -> None:
        self.blocks, self.collectives = engine.ds_engine.module.h, engine.collectives

    @contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        blocks = self.blocks
        # (blocks, (sum of norm ratios, sum of cosines, tokens)), of the batch and of all batches that count
        self._batch = torch.zeros(len(blocks), 3, dtype=torch.float64, device=self.collectives.device)
        self._total = torch.zeros_like(self._batch)
        hooks = [block.register_forward_hook(partial(self._watch, index)) for index, block in enumerate(blocks)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        ratios, cosines, tokens = self.collectives.all_reduce(self._total).T.tolist()
        line = {"norm_ratio": ratios, "cosine_similarity": cosines}
        means = {key: [value / count for value, count in zip(sums, tokens, strict=True)] for key, sums in line.items()}
        self.folder.write_similarity({"step": step, **means})

    def after_evaluated_batch(self) -> None:
        self._total += self._batch

    def _watch(self, index: int, block: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        before, after = inputs[0].float(), output.float()  # (B, T, C)
        before_norm, after_norm = (x.norm(dim=-1) for x in (before, after))
        cosine = (before * after).sum(-1) / (before_norm * after_norm).clamp_min(1e-20)
        sums = [(after_norm / before_norm.clamp_min(1e-20)).double().sum(), cosine.double().sum()]
        self._batch[index] = torch.stack([*sums, torch.full_like(sums[0], cosine.numel())])
