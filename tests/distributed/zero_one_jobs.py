"""What the ranks of a pool are asked to do about 0/1 Adam."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from launch.config.run_config import resolve
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer
from tests.distributed.failure_jobs import loss_times, weights_digest
from tests.distributed.jobs import pretrain


class WatchedWeights(Observer):
    """After each step: digests of this rank's own weights and of those that the ranks share."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def start(self, engine: TrainingEngine) -> None:
        self.engine = engine

    def after_step(self, step: int) -> None:
        own = weights_digest(self.engine.ds_engine)
        with self.engine.techniques.common_weights():
            self.steps.append({"step": step, "own": own, "agreed": weights_digest(self.engine.ds_engine)})
        assert weights_digest(self.engine.ds_engine) == own, "they come back"


def weights_over_the_run(flags: list[str], saved_after: int = 0, overflows: Sequence[int] = ()) -> dict[str, Any]:
    """The metrics of a run, what `WatchedWeights` saw after each step, and a digest of the weights in the checkpoint of `saved_after`.

    overflows: steps at which the loss of the first micro-batch is infinite on rank 1.
    """
    watch = WatchedWeights()
    with loss_times(float("inf"), overflows, rank=1):
        lines = pretrain(flags, [watch])
    found = {"lines": lines, "steps": watch.steps}
    if saved_after:
        config, _ = resolve([*flags, "--quiet", "--resume"])
        folder = Path(config.runs_dir) / config.run_name / "checkpoints" / f"step-{saved_after:08d}"
        module = torch.load(folder / "engine/mp_rank_00_model_states.pt", weights_only=False)["module"]
        digest = hashlib.sha256()
        for name, tensor in module.items():
            if name != "lm_head.weight":  # tied
                digest.update(tensor.float().numpy().tobytes())
        found["saved"] = digest.hexdigest()
    return found
