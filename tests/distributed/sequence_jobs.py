"""What ranks that share rows are asked to do."""

from __future__ import annotations

from typing import Any

import torch

from launch.training.engine import TrainingEngine
from launch.training.observers import Observer
from tests.distributed.export_jobs import live_weights
from tests.distributed.jobs import pretrain


class _Weights(Observer):
    def start(self, engine: TrainingEngine) -> None:
        self.engine = engine

    def after_step(self, step: int) -> None:
        self.found = live_weights(self.engine.ds_engine)


def trained(flags: list[str]) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The lines of the metrics, and the fp32 weights that this rank has in the end."""
    weights = _Weights()
    return pretrain(flags, [weights]), weights.found
