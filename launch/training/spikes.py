"""Loss spikes: `--spike_rule log` reports them, `skip` leaves out their updates, and `rewind` goes back to a checkpoint before them.

A step is a spike if its loss is more than `DEVIATIONS` standard deviations above the mean of the last `WINDOW` steps. This is the rule of
OLMo-core's `SkipStepOptimizer` (olmo_core/optim/skip_step_optimizer.py), with two changes.

- OLMo-core applies the rule to the gradient norm too. Here, in 3,282 steps of six stable runs, the norm was beyond 6 standard deviations
  twice (6.3 and 9.7), and the loss never; and clipping bounds the update of such a step.
- OLMo-core's window holds spikes too, so that after four of them no more are found: k equal outliers among 128 values are at most
  sqrt(128 / k - 1) standard deviations above the mean. Here spikes are left out. After `LIMIT` in succession the window is cleared, because
  the loss then has another level.

The rule acts just before the update. Without the update, the weights, the moments and their step count stay unchanged. Learning rate and
data position advance.

A rewind loads the newest checkpoint that passes verification, and continues with the data after the spike, so that the batches from the
checkpoint up to and including the spike are left out (PaLM, https://arxiv.org/abs/2204.02311, section 5.1).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch

from launch.errors import DownloadFailed, NoCheckpoint, TrainingFailed
from launch.training.checkpoints.checkpoint import Checkpoints
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer
from launch.training.ranks.distributed import Collectives
from launch.training.run_folder.folder import NoFolder, RunFolder

WINDOW = 128
#: Steps in the window before a step can be a spike.
MIN_STEPS = WINDOW // 2
DEVIATIONS = 6.0
#: Spikes in succession that clear the window; also rewinds to one checkpoint after which the run fails.
LIMIT = 16


class Window:
    """The losses of the last `WINDOW` steps that were not spikes. saved: what `as_json` returned."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {}
        self._losses: deque[float] = deque(saved.get("losses", ()), maxlen=WINDOW)
        self._in_succession: int = saved.get("in_succession", 0)

    def as_json(self) -> dict[str, Any]:
        """The window for `state.json`."""
        return {"losses": list(self._losses), "in_succession": self._in_succession}

    def deviations(self, loss: float) -> float:
        """How many standard deviations `loss` is above the mean; 0 before there are `MIN_STEPS` steps, and if all losses are the same."""
        if len(self._losses) < MIN_STEPS:
            return 0.0
        deviation = statistics.stdev(self._losses)
        return (loss - statistics.fmean(self._losses)) / deviation if deviation else 0.0

    def add(self, loss: float, spike: bool) -> bool:
        """Add a step. Returns whether the window was cleared."""
        self._in_succession = self._in_succession + 1 if spike else 0
        cleared = self._in_succession == LIMIT
        if cleared:
            self._losses.clear()
            self._in_succession = 0
        elif not spike:
            self._losses.append(loss)
        return cleared


class SpikeRule(Observer):
    """Applies the rule to a run. All ranks construct it together, after rank 0 has opened the metrics.

    Args:
        rule: "off", "log", "skip" or "rewind".
        folder: the run's folder.
        state: that of the checkpoint that was loaded, with the window.
    """

    def __init__(self, rule: str, folder: RunFolder | NoFolder, collectives: Collectives, state: dict[str, Any]):
        self.rule, self.folder, self.collectives = rule, folder, collectives
        self._loss: float | None = None  # of this step, once its update has come
        self._deviations = 0.0
        self._rewinds: Counter[Path] = Counter()  # by checkpoint
        self._window = Window(state["spike_window"])
        if rule != "off" and state["step"] and not state["spike_window"]:
            folder.log(
                f"warning: --spike_rule {rule}: the checkpoint has no losses of earlier steps, so none is a spike for {MIN_STEPS} steps"
            )

    def window(self) -> dict[str, Any] | None:
        """The window after the last step, for its checkpoint; None without the rule."""
        return None if self.rule == "off" else self._window.as_json()

    @property
    def _is_spike(self) -> bool:
        return self._deviations > DEVIATIONS

    def start(self, engine: TrainingEngine) -> None:
        if self.rule == "off":
            return
        self._engine = engine
        engine.skip_updates_if(self._skips)

    def _skips(self) -> bool:
        """Whether to skip the update of this step. All ranks call this together."""
        if self._loss is None:  # stages 1 to 3 ask for each group
            own = torch.tensor([float(self._engine.loss_so_far)], dtype=torch.float64, device=self.collectives.device)
            self._loss = float(self.collectives.all_reduce(own)) / self.collectives.world_size
            self._deviations = self._window.deviations(self._loss)
        return self._is_spike and self.rule != "log"

    def on_step(self, step: int) -> None:
        self._loss, self._deviations = None, 0.0

    def after_step(self, step: int) -> None:
        if self._loss is None or not math.isfinite(self._loss):  # an overflow in fp16 has no update; training ends by itself in the others
            return
        cleared = self._window.add(self._loss, self._is_spike)
        if self._is_spike:
            what = f"spike: the loss {self._loss:.4f} is {self._deviations:.1f} standard deviations above its mean"
            self.folder.log(f"step {step}: {what}{'' if self.rule == 'log' else '; the update was skipped'}")
        if cleared:
            self.folder.log(f"step {step}: {LIMIT} spikes in succession: the window of the spike rule is cleared")

    def metrics(self) -> dict[str, float]:
        return {} if self._loss is None else {"spike": int(self._is_spike)}

    def rewind(self, state: dict[str, Any], checkpoints: Checkpoints) -> dict[str, Any] | None:
        """After a spike, with the rule "rewind": load the newest checkpoint, and return its state at the data position of `state`.

        Returns None if nothing was loaded: the step was no spike, or there is no checkpoint before it.

        Raises:
            TrainingFailed: the run was at this checkpoint `LIMIT` times.
        """
        if self.rule != "rewind" or not self._is_spike:
            return None
        current = checkpoints.current
        if current and self._rewinds[current] == LIMIT:  # before it is loaded: the run ends with a checkpoint of `state`
            what = f"a spike after each of {LIMIT} rewinds to {current.name}"
            raise TrainingFailed(f"step {state['step']}: {what}; lower --lr, or look at the data")
        try:
            found = checkpoints.load_newest(before=state["step"])
        except (NoCheckpoint, DownloadFailed) as reason:  # nothing was loaded, so all ranks continue
            self.folder.log(f"warning: there is no checkpoint to rewind to: {'; '.join(str(reason).splitlines())}")
            return None
        if found is None:
            self.folder.log("there is no checkpoint to rewind to")
            return None
        assert checkpoints.current is not None
        self._rewinds[checkpoints.current] += 1
        step = found["step"]
        self.folder.begin(step)
        self.folder.log(f"rewound to step {step}; samples {found['samples']:,} to {state['samples']:,} of the run are left out")
        self._window = Window(found.get("spike_window"))
        return {**state, **{key: found[key] for key in ("step", "tokens")}, "val_loss": None, "spike_window": self.window()}
