"""What the ranks of a pool are asked to do about 0/1 Adam."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from launch.run.config import resolve
from recipes import registry
from recipes.technique import Run, Technique, Techniques
from tests.distributed.failure_jobs import weights_digest
from tests.distributed.jobs import pretrain


class WatchedWeights(Technique):
    """After each step: digests of this rank's own weights and of those that the ranks agree on."""

    def __init__(self, section: dict[str, Any], run: Run):
        self.steps: list[dict[str, Any]] = []
        self.step, self.engine = 0, None

    def attach(self, engine: Any, collectives: Any) -> None:
        self.engine = engine

    def on_step(self, step: int) -> None:
        self.step = step

    def metrics(self) -> dict[str, float]:
        if self.engine is not None:
            own = weights_digest(self.engine)
            with self.beside.agreed_weights():
                self.steps.append({"step": self.step, "own": own, "agreed": weights_digest(self.engine)})
            assert weights_digest(self.engine) == own, "they come back"
        return {}


def weights_over_the_run(flags: list[str]) -> dict[str, Any]:
    """The metrics, what `WatchedWeights` saw after each step, and a digest of the weights in the checkpoint of step 25."""
    make, watches = registry.make_techniques, list[WatchedWeights]()

    def with_watch(run: Run) -> Techniques:
        watch = WatchedWeights({}, run)
        watch.beside = make(run)
        watches.append(watch)
        return Techniques([*watch.beside.members, watch])

    registry.make_techniques = with_watch
    try:
        lines = pretrain(flags)
    finally:
        registry.make_techniques = make
    config, _ = resolve([*flags, "--quiet", "--resume"])
    path = Path(config.runs_dir) / config.run_name / "checkpoints/step-00000025/engine/mp_rank_00_model_states.pt"
    module = torch.load(path, weights_only=False)["module"]
    digest = hashlib.sha256()
    for name, tensor in module.items():
        if name != "lm_head.weight":
            digest.update(tensor.float().numpy().tobytes())
    return {"lines": lines, "steps": watches[-1].steps, "saved": digest.hexdigest()}
