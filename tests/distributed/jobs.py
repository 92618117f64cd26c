"""What the ranks of a pool are asked to do. Every function runs on all ranks at once."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from launch.pretrain import train
from launch.run.config import resolve
from launch.run.folder import NoFolder, RunFolder
from launch.run.metrics import read_metrics
from launch.run.provenance import describe_run
from launch.run.signals import StopRequest
from recipes import registry
from recipes.technique import BatchPlan, Technique, Techniques


def pretrain(flags: list[str]) -> list[dict[str, Any]]:
    """`launch/pretrain.py` with `flags`, in this process group; the lines of its metrics."""
    config, _ = resolve([*flags, "--quiet"])
    path = Path(config.runs_dir) / config.run_name
    folder = RunFolder(path, describe_run(config), quiet=True) if os.environ["RANK"] == "0" else NoFolder()
    try:
        assert train(config, folder, StopRequest()) == 0
    finally:
        folder.close()
        gc.collect()
    return read_metrics(path / "metrics.jsonl")


class ChangingPlan(Technique):
    """Cuts the same sequences of a step into other micro-batches, in turns."""

    def batch_plan(self, step: int) -> BatchPlan | None:
        return BatchPlan(1, 8) if step % 2 else BatchPlan(8, 1) if step % 3 == 0 else None


def pretrain_with_changing_plan(flags: list[str]) -> list[dict[str, Any]]:
    """`pretrain` with a technique that plans each step's micro-batches."""
    make, registry.make_techniques = registry.make_techniques, lambda run: Techniques([ChangingPlan({}, run)])
    try:
        return pretrain(flags)
    finally:
        registry.make_techniques = make
