"""What the ranks of a pool are asked to do about compressed communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from launch.engine.distributed import start_ranks
from launch.engine.mean_norm import MeanNorm
from recipes.compressed_all_reduce import BLOCK, CompressedAllReduce
from recipes.technique import Run, Technique
from tests.distributed.failure_jobs import started_engines, weights_digest
from tests.distributed.jobs import pretrain, pretrain_with


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


class WatchedErrors(Technique):
    """The largest momentum and error among rows of embeddings that cannot have a gradient, and among all; which positions have moved."""

    def __init__(self, section: dict[str, Any], run: Run):
        self.length, self.engine = run.shape.seq_len, None

    def prepare(self, model: Any) -> None:
        self.model = model

    def attach(self, engine: Any, collectives: Any) -> None:
        self.engine = engine

    def on_length(self, length: int) -> None:
        self.length = length

    def metrics(self) -> dict[str, float]:
        if self.engine is None:
            return {}
        adam = getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
        reduction, config = adam.reduction, self.model.config
        dead = {0: config.vocab_size * config.d_model, 1: self.length * config.d_model}
        found = {"dead_values": 0.0, "dead_errors": 0.0}
        for place, first in dead.items():
            segment = reduction._tensors[place]
            found["dead_values"] = max(found["dead_values"], _largest(reduction.buffer[segment.start + first : segment.stop]))
            found["dead_errors"] = max(found["dead_errors"], _largest(reduction.worker_error[segment.start + first : segment.stop]))
        return {**found, "errors": _largest(reduction.worker_error), "largest_weight": max(map(_largest, self.model.parameters()))}


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def watched(flags: list[str]) -> list[dict[str, Any]]:
    """The lines of a run with what `WatchedErrors` sees."""
    from tests.distributed import jobs

    jobs.WatchedErrors = WatchedErrors  # where `pretrain_with` looks
    return pretrain_with("WatchedErrors", flags)


def trained(flags: list[str]) -> dict[str, Any]:
    """The lines of a run, and this rank's digest of the weights after it."""
    with started_engines() as started:
        lines = pretrain(flags)
        return {"lines": lines, "digest": weights_digest(started[0].deepspeed)}
