"""Activation checkpointing: keep the input of every block, or of a few segments of blocks, and compute the rest again when it is needed.

    deepspeed launch/pretrain.py --recipe recipes/activation_checkpointing

Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174. The recomputation is torch.utils.checkpoint's (without
reentrant autograd), which draws the same dropout masks again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from recipes.technique import Run, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

    from model.gpt import BlockRunner


def segment_bounds(n_layer: int, segments: int) -> list[tuple[int, int]]:
    """Where each of `segments` consecutive runs of `n_layer` blocks begins and ends; their lengths differ by one at most, longer first.

    12 blocks in 5: (0, 3), (3, 6), (6, 8), (8, 10), (10, 12).
    """
    length, longer = divmod(n_layer, segments)
    starts = [index * length + min(index, longer) for index in range(segments + 1)]
    return list(itertools.pairwise(starts))


class ActivationCheckpointing(Technique):
    """DeepSpeed's documented `"activation_checkpointing": {"number_checkpoints": null, "cpu_checkpointing": false, ...}`, and `"enabled"`.

    number_checkpoints: into how many segments the blocks are cut, whose inputs are kept; null (or left out): every block is one.
    cpu_checkpointing: keep these inputs in the host's memory (page-locked, on a GPU).
    enabled: left out, it is on where one of the other keys asks for something, as DeepSpeed's own section with nothing but false in it
    switches nothing on.
    """

    sections = ("activation_checkpointing",)
    keys = {
        "number_checkpoints": {"types": ["integer", "null"], "minimum": 1},
        "cpu_checkpointing": {"types": ["boolean"]},
        "partition_activations": {"types": ["boolean"]},
        "contiguous_memory_optimization": {"types": ["boolean"]},
        "synchronize_checkpoint_boundary": {"types": ["boolean"]},
        "profile": {"types": ["boolean"]},
    }
    without_effect = {
        "partition_activations": "the ranks share the data, not the model, so that no activation is on two of them",
        "contiguous_memory_optimization": "it is for the parts of partitioned activations",
        "synchronize_checkpoint_boundary": "it is for finding faults in DeepSpeed's own checkpointing function, and torch's is used",
        "profile": "it times DeepSpeed's own checkpointing function, and torch's is used",
    }

    @classmethod
    def is_on(cls, section: dict[str, Any]) -> bool:
        return bool(section.get("enabled", any(section.values())))

    def __init__(self, section: dict[str, Any], run: Run):
        layers = run.shape.n_layer
        self.checkpoints = section.get("number_checkpoints") or layers
        if self.checkpoints > layers:
            raise ValueError(
                f"'activation_checkpointing.number_checkpoints' is {self.checkpoints}, but the model has {layers} blocks; "
                f"write at most {layers}, or null for one each"
            )
        self.on_host = bool(section.get("cpu_checkpointing"))
        self.draws = run.shape.dropout > 0

    def attach(self, engine: Any, collectives: Any) -> None:
        """Wrap the block runner that is there by now, so that blocks which another technique drops are not computed again either."""
        model = engine.module
        model.block_runner = self._recomputing(model.block_runner, model.h)

    def _recomputing(self, run_blocks: BlockRunner, blocks: nn.ModuleList) -> BlockRunner:
        import torch
        from torch.autograd.graph import save_on_cpu
        from torch.utils.checkpoint import checkpoint

        segments = [blocks[start:end] for start, end in segment_bounds(len(blocks), self.checkpoints)]
        keep: Callable[[], Any] = (lambda: save_on_cpu(pin_memory=torch.cuda.is_available())) if self.on_host else nullcontext

        def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
            if not blocks.training:  # evaluation keeps nothing anyway
                return run_blocks(blocks, x)
            for segment in segments:
                with keep():
                    x = checkpoint(run_blocks, segment, x, use_reentrant=False, preserve_rng_state=self.draws)
            return x

        return run
