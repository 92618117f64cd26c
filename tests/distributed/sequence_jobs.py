"""What ranks that share rows are asked to do."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.utils import groups

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


def norms_of_deepspeeds_own_way(stages: list[int]) -> dict[str, float]:
    """The norm of one gradient: "exact", and by stage where DeepSpeed is told of the groups.

    Every rank has an equal part of the rows, and a loss that is its part of the mean.
    """
    rank, ranks = comm.get_rank(), comm.get_world_size()
    x, y = torch.randn(2, 4 * ranks, 16, generator=torch.Generator().manual_seed(0))

    def loss_of(model: Any, rows: slice) -> torch.Tensor:
        return ((model(x[rows]) - y[rows]) ** 2).sum() / y.numel()

    def new() -> torch.nn.Linear:
        torch.manual_seed(1)
        return torch.nn.Linear(16, 16)

    exact = new()
    loss_of(exact, slice(None)).backward()
    found = {"exact": float(torch.cat([parameter.grad.flatten() for parameter in exact.parameters()]).norm())}
    for stage in stages:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "gradient_clipping": 1.0}
        model = new()
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            ds_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mesh_param=(1, ranks))
            ds_engine.backward(loss_of(ds_engine, slice(4 * rank, 4 * rank + 4)))
            ds_engine.step()
            found[str(stage)] = float(ds_engine.get_global_grad_norm())
        finally:
            groups.mesh_device = None
    return found
