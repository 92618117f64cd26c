"""What the ranks of a pool are asked to do about 0/1 Adam."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from launch.config.run_config import resolve
from recipes import registry
from recipes.technique import Run, Technique, Techniques
from tests.distributed.correction_jobs import fp16_allowed
from tests.distributed.failure_jobs import loss_times, weights_digest
from tests.distributed.jobs import pretrain


class WatchedWeights(Technique):
    """After each step: digests of this rank's own weights and of those that the ranks agree on, by the techniques `beside` it."""

    beside: Techniques

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


def weights_over_the_run(flags: list[str], saved_after: int = 0, overflows: Sequence[int] = ()) -> dict[str, Any]:
    """The metrics of a run, what `WatchedWeights` saw after each step, and a digest of the weights in the checkpoint of `saved_after`.

    overflows: steps at which the loss of the first micro-batch is infinite on rank 1.
    """
    make, watches = registry.make_techniques, list[WatchedWeights]()

    def with_watch(run: Run) -> Techniques:
        watches.append(WatchedWeights({}, run))
        watches[-1].beside = make(run)
        return Techniques([*watches[-1].beside.members, watches[-1]])

    registry.make_techniques = with_watch
    try:
        with fp16_allowed(), loss_times(float("inf"), overflows, rank=1):
            lines = pretrain(flags)
    finally:
        registry.make_techniques = make
    found = {"lines": lines, "steps": watches[-1].steps}
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
