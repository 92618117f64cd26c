"""`--profile`: where the time of a step goes, or the memory of a GPU. The observers here exist with the flag only.

--profile 10:3          steps 10 to 12: profile/from-step-10-rank-0.json.gz, for https://ui.perfetto.dev, and a table in the log
--profile memory        profile/memory-rank-0.pickle, for https://pytorch.org/memory_viz
--profile 10:3:all      all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from launch.config.hardware import device_type
from launch.config.run_config import RunConfig
from launch.errors import UsageError
from launch.training.observers import Observer
from launch.training.ranks.distributed import Collectives

#: The rows of a table.
SHOWN_ENTRIES = 10
#: The steps of a memory profile: the first allocates the optimizer's state.
MEMORY_STEPS = 3
#: The allocations and frees of a memory profile that are kept.
MEMORY_EVENTS = 1_000_000


def profilers(config: RunConfig, done: int, collectives: Collectives, log: Callable[[str], None]) -> list[Observer]:
    """The observer of `--profile` on this rank, if any. done: completed steps of the run.

    Raises:
        UsageError: the steps are over.
    """
    what, *rest = (config.profile or "").split(":")
    if not what or (collectives.rank and rest[-1:] != ["all"]):
        return []
    folder = Path(config.runs_dir) / config.run_name / "profile"
    if what == "memory":
        return [MemoryProfile(range(done + 1, done + 1 + MEMORY_STEPS), folder / f"memory-rank-{collectives.rank}.pickle", log)]
    steps = range(int(what), min(int(what) + int(rest[0]), config.steps_to_make + 1))
    if steps.start <= done:
        raise UsageError(f"--profile {config.profile}: this start begins after step {done:,}; give a later step")
    return [StepProfile(steps, folder / f"from-step-{steps.start}-rank-{collectives.rank}.json.gz", log)]


class Profile(Observer):
    """Base: observes `steps`, or those of them that the run makes before it ends or fails, and writes `file`."""

    def __init__(self, steps: range, file: Path, log: Callable[[str], None]):
        self.steps, self.file, self.log = steps, file, log
        self.last, self.has_ended = 0, False
        self._step, self._phase = ExitStack(), ExitStack()  # spans of the trace

    @contextmanager
    def training(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.end()

    def on_step(self, step: int) -> None:
        if step in self.steps and not self.has_ended:
            if not self.last:
                self.begin()
            self.last = step
            self._phase.close()  # of an evaluation
            self._step.enter_context(record_function(f"step {step}"))

    def on_phase(self, phase: str) -> None:
        if self.last and not self.has_ended:
            self._phase.close()
            self._phase.enter_context(record_function(phase))

    def after_step(self, step: int) -> None:
        self._phase.close()
        self._step.close()
        if step == self.steps[-1]:
            self.end()

    def end(self) -> None:
        if self.last and not self.has_ended:
            self.has_ended = True
            self._phase.close()
            self._step.close()
            self.file.parent.mkdir(exist_ok=True)
            self.write()

    def begin(self) -> None:
        """Called before the first step."""

    def write(self) -> None:
        """Stop, and write the file."""


class StepProfile(Profile):
    """A trace by torch.profiler, with a span for each step and for each phase."""

    def begin(self) -> None:
        on_cuda = device_type() == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda])
        self._profile.start()

    def write(self) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self.file))
        self.log(f"profile of steps {self.steps.start} to {self.last}: {self.file}, for https://ui.perfetto.dev")
        for line in table(list(self._profile.key_averages())):
            self.log(line)


class MemoryProfile(Profile):
    """The allocations of the steps, with their call stacks."""

    def begin(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)

    def write(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self.file))
        torch.cuda.memory._record_memory_history(enabled=None)
        self.log(f"memory of steps {self.steps.start} to {self.last}: {self.file}, for https://pytorch.org/memory_viz")


def table(events: list[Any]) -> Iterator[str]:
    """The operations that took the longest on the CPU, and the kernels on the GPU, without what they call and without spans, as lines."""
    for where, time in (("CPU", "self_cpu_time_total"), ("GPU", "self_device_time_total")):
        entries = [event for event in events if (event.device_type == DeviceType.CPU) == (where == "CPU") and not event.is_user_annotation]
        if total := sum(getattr(entry, time) for entry in entries):
            yield f"  {where} time         share     calls"
            for entry in sorted(entries, key=lambda entry: -getattr(entry, time))[:SHOWN_ENTRIES]:
                spent = getattr(entry, time)  # microseconds
                yield f"  {spent / 1000:9,.2f} ms  {spent / total:6.1%}  {entry.count:8,}  {entry.key[:80]}"
