"""Runs whose data holds a stretch of garbage: rows of random token ids in place of the samples of some positions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data_pipeline.loader import Loader
from launch.errors import TrainingFailed
from launch.training.checkpoints.checkpoint import Checkpoints
from launch.training.spikes import SpikeRule
from tests.distributed.jobs import pretrain


def pretrain_with_garbage(flags: list[str], first: int, last: int, left_out: tuple[int, int] = (0, 0)) -> list[dict[str, Any]]:
    """`pretrain` where the global batches that begin at the samples `first` to `last` hold random ids; `last` is not one of them.

    The samples from `left_out[0]` to `left_out[1]` do not exist: the later ones take their place.
    """
    read = Loader.micro_batches

    @functools.wraps(read)
    def micro_batches(self: Loader, first_sample: int, micro_batch_size: int, accumulation: int) -> Iterator[torch.Tensor]:
        if first_sample >= left_out[0]:
            first_sample += left_out[1] - left_out[0]
        for number, tokens in enumerate(read(self, first_sample, micro_batch_size, accumulation)):
            if first <= first_sample < last:
                drawn = torch.Generator().manual_seed(first_sample * 1000 + number * 10 + self.rank)
                tokens = torch.randint(self.vocab_size, tokens.shape, generator=drawn).to(tokens.device)
            yield tokens

    Loader.micro_batches = micro_batches  # type: ignore[method-assign]
    try:
        return pretrain(flags)
    finally:
        Loader.micro_batches = read  # type: ignore[method-assign]


def ended_with_garbage(flags: list[str], first: int, last: int) -> str:
    """The reason for which `pretrain_with_garbage` fails."""
    try:
        pretrain_with_garbage(flags, first, last)
    except TrainingFailed as reason:
        return str(reason)
    raise AssertionError("it did not fail")


def pretrain_and_lose_checkpoints(flags: list[str], first: int, last: int, folder: str) -> list[dict[str, Any]]:
    """`pretrain_with_garbage`, where all checkpoints in `folder` are damaged before the first spike is looked at."""
    rewind = SpikeRule.rewind

    def lose_and_rewind(self: SpikeRule, state: dict[str, Any], checkpoints: Checkpoints) -> Any:
        if self._is_spike:
            checkpoints._finish()  # the newest one may still be written in the background
            for file in Path(folder).glob("*/state.json"):
                file.write_text("")
        self.collectives.barrier()
        return rewind(self, state, checkpoints)

    SpikeRule.rewind = lose_and_rewind  # type: ignore[method-assign]
    try:
        return pretrain_with_garbage(flags, first, last)
    finally:
        SpikeRule.rewind = rewind  # type: ignore[method-assign]
