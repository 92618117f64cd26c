"""What the ranks of a pool are asked to do about compressed communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from launch.training.deepspeed_fixes.mean_norm import MeanNorm
from launch.training.ranks.distributed import start_ranks
from model.gpt import GPT
from model.presets import GPTConfig
from recipes.blocks import BLOCK
from recipes.compressed_all_reduce import CompressedAllReduce


def values_of(rank: int, step: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Flat fp32 tensors, each of a magnitude of its own, 1e-5 to 0.1, as momenta are; others on every rank and in every round."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(size, generator=generator) * 10.0 ** (index % 5 - 5) for index, size in enumerate(sizes)]


def reduce_rounds(
    sizes: list[int], rounds: int, live: list[list[int]] | None = None, block: int = BLOCK["cpu"], constant: bool = False
) -> dict[str, Any]:
    """`rounds` compressed reductions, in the step `n` of which `live[n]` elements of each tensor take part.

    block: how many elements are worked on at a time. constant: the same values in every round.
    Returns of this rank: the tensors that came out of each round, both errors after the last, and the bytes that it sent in it.
    """
    collectives, usual, results = start_ranks(), BLOCK["cpu"], []
    BLOCK["cpu"] = block
    reduction = CompressedAllReduce(sizes, collectives, collectives.device)
    BLOCK["cpu"] = usual
    for step in range(rounds):
        reduction.live = list(live[step] if live else sizes)
        for view, value, n in zip(
            reduction.views, values_of(collectives.rank, 0 if constant else step, sizes), reduction.live, strict=True
        ):
            view[:n] = value[:n]
        before = collectives.bytes_sent
        reduction.reduce()
        results.append([view.clone() for view in reduction.views])
    worker, server = reduction.worker_error.clone(), reduction.server_error.clone()
    return {"results": results, "worker": worker, "server": server, "chunk": reduction.chunk, "bytes": collectives.bytes_sent - before}


def norms_of_mean(shapes: list[list[int]], draws: int) -> list[tuple[float, float]]:
    """(estimate, norm) of the mean over the ranks of gradients of low rank, `draws` times."""
    collectives = start_ranks()
    mean_norm, found = MeanNorm(collectives), []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(1000 * draw + collectives.rank)
        gradients = [torch.randn(rows, 1, generator=generator) * torch.randn(1, columns, generator=generator) for rows, columns in shapes]
        estimate = mean_norm.of(gradients)
        mean = collectives.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]).double()) / collectives.world_size
        found.append((estimate, float(mean.norm())))
    return found


def norms_of_first_gradients(width: int, seeds: int) -> list[float]:
    """Estimates of the norm of a GPT's first gradient as parts of that norm, with the signs of the seeds 0 (a run's own), 1, ..."""
    collectives = start_ranks()
    model = GPT(GPTConfig(n_layer=2, n_head=width // 16, d_model=width, seq_len=64, vocab_size=2048, init_seed=width))
    # Frequencies as 1 / rank, as those of words.
    frequencies, generator = 1 / torch.arange(1, 2049), torch.Generator().manual_seed(width)
    tokens = torch.multinomial(frequencies, 8 * 65, replacement=True, generator=generator).view(8, 65)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = float(torch.cat([gradient.flatten() for gradient in gradients]).double().norm())
    return [MeanNorm(collectives, seed).of(gradients) / norm for seed in range(seeds)]
