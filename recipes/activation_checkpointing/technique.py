"""Activation checkpointing: keep the inputs of blocks, or of a few segments of blocks, and recompute the rest in the backward pass.

    deepspeed launch/pretrain.py --recipe recipes/activation_checkpointing

Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174. The recomputation is torch.utils.checkpoint's (without
reentrant autograd), which draws the same dropout masks again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from model.gpt import BlockRunner
from model.presets import GPTConfig
from recipes.technique import Declaration, RunForTechniques, Technique, segment_bounds


class ActivationCheckpointing(Technique):
    """DeepSpeed's documented `"activation_checkpointing": {"number_checkpoints": null, "cpu_checkpointing": false, ...}`, and `"enabled"`.

    number_checkpoints: number of segments of blocks; only the inputs of segments are kept. null, or left out: one segment per block.
    cpu_checkpointing: keep these inputs in the host's memory (page-locked, on a GPU).
    enabled: if left out, the technique is on if one of the other keys is on; DeepSpeed's section with only false values is off.
    """

    declaration = Declaration(
        section="activation_checkpointing",
        keys={
            "number_checkpoints": {"types": ["integer", "null"], "minimum": 1},
            "cpu_checkpointing": {"types": ["boolean"]},
            "partition_activations": {"types": ["boolean"]},
            "contiguous_memory_optimization": {"types": ["boolean"]},
            "synchronize_checkpoint_boundary": {"types": ["boolean"]},
            "profile": {"types": ["boolean"]},
        },
        ignored={
            "partition_activations": "the ranks share the data, not the model, so that no activation is on two of them",
            "contiguous_memory_optimization": "it is for the parts of partitioned activations",
            "synchronize_checkpoint_boundary": "it is for debugging DeepSpeed's own checkpointing function, and torch's is used",
            "profile": "it times DeepSpeed's own checkpointing function, and torch's is used",
        },
        same_algorithm=True,
        off_without_values=True,
    )

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        layers = run.shape.n_layer
        self.checkpointed_segments = section.get("number_checkpoints") or layers
        if self.checkpointed_segments > layers:
            raise ValueError(
                f"'activation_checkpointing.number_checkpoints' is {self.checkpointed_segments}, but the model has {layers} blocks; "
                f"write at most {layers}, or null for one each"
            )
        self.on_host = bool(section.get("cpu_checkpointing"))
        self.has_dropout = run.shape.dropout > 0

    def memory_terms(self, model: GPTConfig, device: str) -> dict[str, int]:
        return {"checkpoints": 0} if self.on_host and device == "cuda" else {}

    def attach(self, ds_engine: Any, collectives: Any) -> None:
        """Wrap the block runner that other techniques have set in `prepare`: blocks that they drop are not recomputed either."""
        model = ds_engine.module
        model.block_runner = self._recomputing(model.block_runner, model.h)

    def _recomputing(self, run_blocks: BlockRunner, blocks: nn.ModuleList) -> BlockRunner:
        segments = [blocks[start:end] for start, end in segment_bounds(len(blocks), self.checkpointed_segments)]
        keep: Callable[[], Any] = (lambda: save_on_cpu(pin_memory=torch.cuda.is_available())) if self.on_host else nullcontext

        def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
            if not blocks.training:  # evaluation keeps no activations anyway
                return run_blocks(blocks, x)
            for segment in segments:
                with keep():
                    x = checkpoint(run_blocks, segment, x, use_reentrant=False, preserve_rng_state=self.has_dropout)
            return x

        return run
