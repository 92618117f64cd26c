"""Loss spikes: `--spike_rule log` reports them, `--spike_rule skip` also leaves out their updates.

A step is a spike if its loss or its gradient norm is more than `DEVIATIONS` standard deviations above the mean of the last `WINDOW` steps.
This is the rule of OLMo-core's `SkipStepOptimizer` (olmo_core/optim/skip_step_optimizer.py). There, spikes enter the window, and after four
of them no more are found: k equal outliers among 128 values are at most sqrt(128 / k - 1) standard deviations above the mean. Here they do
not, and after `LIMIT` in succession the window starts anew, because the loss has another level then.

The decision is made between the backward pass and the update, where the gradient norm is known at every ZeRO stage: DeepSpeed computes it
just before it calls the optimizer that it wraps. Without the call, the weights, the moments and their step count stay as they are, and
DeepSpeed clears the gradients as after any step. Learning rate and data position advance.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launch.formats.metrics import read_metrics
from launch.training.distributed import Collectives
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer

WINDOW = 128
#: Nothing is a spike before the window has so many steps.
LEAST = WINDOW // 2
DEVIATIONS = 6.0
LIMIT = 16


class Window:
    """The losses and gradient norms of the last `WINDOW` steps that were not spikes."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = {"loss": deque(maxlen=WINDOW), "grad_norm": deque(maxlen=WINDOW)}
        self._in_succession = 0

    def reason(self, step: dict[str, float | None]) -> str:
        """Why a step with these values of `loss` and `grad_norm` is a spike; empty if it is none."""
        for name, values in self._values.items():
            value = step.get(name)
            if value is None or len(values) < LEAST:
                continue
            if (found := deviations(value, list(values))) > DEVIATIONS:
                return f"{name} {value:.4f} is {found:.1f} standard deviations above the mean of {len(values)} steps"
        return ""

    def add(self, step: dict[str, float | None], spike: bool) -> bool:
        """Add a step. Returns whether the window starts anew."""
        self._in_succession = self._in_succession + 1 if spike else 0
        if anew := self._in_succession == LIMIT:
            self.__init__()  # type: ignore[misc]
        elif not spike:
            for name, values in self._values.items():
                if (value := step.get(name)) is not None:
                    values.append(value)
        return anew


def deviations(value: float, values: list[float]) -> float:
    """How many standard deviations `value` is above the mean of `values`; 0 if these are all the same."""
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in values) / (len(values) - 1))
    return (value - mean) / deviation if deviation else 0.0


class SpikeRule(Observer):
    """Applies the rule to a run. All ranks make it together, after rank 0 has opened the metrics.

    Args:
        skips: leave out the update of a spike.
        run: the folder of the run; the window of a resumed run is computed from its `metrics.jsonl`.
        log: writes a line to the log.
    """

    def __init__(self, skips: bool, run: Path, collectives: Collectives, log: Callable[[str], None]):
        self.skips, self.collectives, self._log = skips, collectives, log
        self._window = Window()
        self._seen: dict[str, float | None] | None = None  # of this step, once its update has come
        self._reason = ""
        keys = ("loss", "grad_norm", "spike")
        lines = [{key: line.get(key) for key in keys} for line in read_metrics(run / "metrics.jsonl")] if collectives.rank == 0 else []
        for line in collectives.gather(lines)[0]:
            if line["loss"] is not None and line["spike"] is not None:
                self._window.add(line, bool(line["spike"]))

    def start(self, engine: TrainingEngine) -> None:
        self._engine = engine
        wrapper = engine.deepspeed.optimizer
        for optimizer in filter(None, (getattr(wrapper, "optimizer", wrapper), getattr(wrapper, "backup_optimizer", None))):
            optimizer.step = self._unless_skipped(optimizer.step)

    def _unless_skipped(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            if self._seen is None:  # stages 1 to 3 call it for each group
                self._look()
            return None if self._reason and self.skips else update(*args, **options)

        return step

    def _look(self) -> None:
        """Decide whether this step is a spike. The mean loss and the norm are the same on all ranks."""
        loss = torch.tensor([float(self._engine.step_loss)], dtype=torch.float64, device=self.collectives.device)
        mean = float(self.collectives.all_reduce(loss)) / self.collectives.world_size
        self._seen = {"loss": mean, "grad_norm": self._engine.norm_before_update()}
        self._reason = self._window.reason(self._seen)

    def on_step(self, step: int) -> None:
        self._seen, self._reason = None, ""

    def after_step(self, step: int) -> None:
        if self._seen is None:  # fp16 overflow
            return
        anew = self._window.add(self._seen, bool(self._reason))
        if self._reason:
            skipped = "; its update was skipped" if self.skips else ""
            self._log(f"step {step}: spike: {self._reason}{skipped}")
        if anew:
            self._log(f"step {step}: {LIMIT} spikes in succession: the window of the spike rule starts anew")

    def metrics(self) -> dict[str, float]:
        return {} if self._seen is None else {"spike": int(bool(self._reason))}
