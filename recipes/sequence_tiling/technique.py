"""Sequence tiling: the MLP of each block and the head's loss run on tiles of the tokens, and each tile is recomputed in the backward pass.

    deepspeed launch/pretrain.py --recipe recipes/sequence_tiling

Bekman et al., Arctic Long Sequence Training, arXiv 2506.13996, section 3.1. Neither the MLP's activations (B, T, d_ff) nor the logits
(B, T, V) are in memory whole. A tile is a torch.utils.checkpoint inside the modules that ZeRO-3 gathers, and autograd sums the gradients
that the tiles have for a weight before DeepSpeed's hooks see them: stages, accumulation and loss scales need nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from model.gpt import GPT, Block
from model.presets import GPTConfig
from recipes.technique import Declaration, RunForTechniques, Technique, without_auto

#: "auto", tokens by device: measured on a CPU (README.md), not on a GPU.
TILE = {"cpu": 512, "cuda": 2048}


def tiled_mlp(forward: Callable[[torch.Tensor], torch.Tensor], tile: int, has_dropout: bool, x: torch.Tensor) -> torch.Tensor:
    """`forward`, which treats every token alike, on `tile` tokens at a time: (..., C) -> (..., C)."""
    tiles = x.flatten(0, -2).split(tile)  # (B, T, C) -> (tile, C) each
    return torch.cat([checkpoint(forward, one, use_reentrant=False, preserve_rng_state=has_dropout) for one in tiles]).view_as(x)


def tiled_loss(
    forward: Callable[..., torch.Tensor],
    tile: int,
    x: torch.Tensor,
    targets: torch.Tensor | None = None,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """`model.gpt.Head.forward`, whose loss is a sum over tokens divided by `counted`, on `tile` tokens at a time."""
    if targets is None:
        return forward(x)
    counted = (targets != -100).sum() if counted is None else counted
    tiles = zip(x.flatten(0, 1).split(tile), targets.flatten().split(tile), strict=True)  # (tile, C), (tile,)
    losses = [checkpoint(forward, one[None], its[None], counted, use_reentrant=False, preserve_rng_state=False) for one, its in tiles]
    return torch.stack(losses).sum()


class SequenceTiling(Technique):
    """`"sequence_tiling": {"enabled": true, "tile": "auto"}`: a section of this project's own.

    tile: the tokens of a micro-batch that an MLP or the head has in memory at a time; "auto": 512 on a CPU, 2,048 on a GPU.

    Where `fused_kernels.cross_entropy` is on, the loss is that kernel's, which computes the logits once, in parts of its own.
    """

    declaration = Declaration(
        section="sequence_tiling", keys={"tile": {"types": ["integer"], "minimum": 1, "auto": True}}, same_algorithm=True
    )

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.tile = without_auto(section).get("tile")
        self.has_dropout = run.shape.dropout > 0
        self.has_fused_loss = bool(run.techniques.get("fused_kernels", {}).get("cross_entropy"))
        if self.has_fused_loss:
            self.notes = ("sequence_tiling: the MLPs only; the loss is that of fused_kernels.cross_entropy, in parts of its own",)

    def memory_terms(self, model: GPTConfig, device: str) -> dict[str, int]:
        return {"tile": self.tile or TILE[device]}

    def prepare(self, model: GPT) -> None:
        from deepspeed.accelerator import get_accelerator  # a second to import, for which --help should not wait

        tile = self.tile or TILE[get_accelerator().device_name()]
        for block in cast("Iterable[Block]", model.h):
            block.mlp.forward = partial(tiled_mlp, block.mlp.forward, tile, self.has_dropout)  # type: ignore[method-assign]
        if not self.has_fused_loss:
            model.lm_head.forward = partial(tiled_loss, model.lm_head.forward, tile)  # type: ignore[method-assign]
