"""Observers are called at fixed places of a training run: `train(config, folder, stop, observers=[...])`.

The heartbeat, the spike rule and `--profile` are observers; tests and benchmarks pass their own. The first two act on the run: the
heartbeat ends a run that hangs, and the spike rule may skip updates or rewind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # benchmarks are observers, and their --help imports no torch
    import torch

    from launch.training.engine import TrainingEngine


class Observer:
    """Base of every observer. Every method does nothing here. All ranks call all methods, at the same time."""

    def start(self, engine: TrainingEngine) -> None:
        """Called once, before the first step, when the model has its initial weights or those of the checkpoint."""

    def training(self) -> AbstractContextManager[None]:
        """The context of all steps."""
        return nullcontext()

    def on_step(self, step: int) -> None:
        """Called before the first micro-batch of optimizer step `step` (from 1), outside of the step's measured time."""

    def on_batch(self, tokens: torch.Tensor) -> None:
        """Called before the forward pass of each micro-batch, (rows, length + 1) token ids."""

    def on_phase(self, phase: str) -> None:
        """Called when this rank begins a `phase` that `launch/training/engine.py` names, e.g. "forward pass"."""

    def after_step(self, step: int) -> None:
        """Called after the update of `step`."""

    def metrics(self) -> dict[str, float]:
        """Values for the step's line in `metrics.jsonl`, after `after_step`."""
        return {}


class Observers(Observer):
    """Several observers behind the interface of one."""

    def __init__(self, members: Sequence[Observer]):
        self.members = tuple(members)

    def start(self, engine: TrainingEngine) -> None:
        for member in self.members:
            member.start(engine)

    @contextmanager
    def training(self) -> Iterator[None]:
        with ExitStack() as inside:
            for member in self.members:
                inside.enter_context(member.training())
            yield

    def on_step(self, step: int) -> None:
        for member in self.members:
            member.on_step(step)

    def on_batch(self, tokens: torch.Tensor) -> None:
        for member in self.members:
            member.on_batch(tokens)

    def on_phase(self, phase: str) -> None:
        for member in self.members:
            member.on_phase(phase)

    def after_step(self, step: int) -> None:
        for member in self.members:
            member.after_step(step)

    def metrics(self) -> dict[str, float]:
        return {key: value for member in self.members for key, value in member.metrics().items()}
