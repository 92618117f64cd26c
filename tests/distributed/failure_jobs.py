"""Jobs that disturb a run (losses, signals, slow or failing writes), or look at its engine after the last step."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.loader import Loader
from launch.errors import TrainingFailed
from launch.training import engine
from launch.training.checkpoints import checkpoint, snapshot, store
from launch.training.checkpoints.snapshot import Snapshots
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer
from launch.training.ranks.signals import StopRequest
from tests.distributed.jobs import pretrain


@contextlib.contextmanager
def loss_times(factor: float, steps: Sequence[int], rank: int, micro_step: int = 0, gradient_only: bool = False) -> Iterator[None]:
    """Multiply the loss, or only its gradient, of one micro-batch of `steps` by `factor`, on one rank, after the forward pass."""
    usual = TrainingEngine.loss

    def loss(self: TrainingEngine, tokens: Any) -> Any:
        computed = usual(self, tokens)
        here = self.ds_engine.module.training and self._micro_step == micro_step and int(os.environ["RANK"]) == rank
        if not here or self.ds_engine.global_steps + 1 not in steps:
            return computed
        if gradient_only:
            computed.register_hook(lambda gradient: gradient * factor)
        return computed if gradient_only else computed * factor

    TrainingEngine.loss = loss
    try:
        yield
    finally:
        TrainingEngine.loss = usual


def pretrain_until_it_fails(flags: list[str], **disturbed: Any) -> str:
    """Train in this process group, `disturbed` as `loss_times` says, and return the line on which the run ended."""
    with loss_times(**disturbed):
        try:
            pretrain(flags)
        except TrainingFailed as reason:
            return str(reason)
    return ""


@contextlib.contextmanager
def started_engines() -> Iterator[list[TrainingEngine]]:
    """The engines that runs start inside, in their order."""
    start, started = engine.start_engine, list[TrainingEngine]()

    def recorded(*arguments: Any) -> TrainingEngine:
        started.append(start(*arguments))
        return started[-1]

    engine.start_engine = recorded
    try:
        yield started
    finally:
        engine.start_engine = start


def weights_digest(deepspeed_engine: Any) -> str:
    """A digest of all weights of this rank's module, gathered where they are partitioned."""
    import deepspeed

    digest = hashlib.sha256()
    for parameter in deepspeed_engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def pretrain_with_digest(flags: list[str]) -> dict[str, Any]:
    """The lines of the metrics of a run, and this rank's digest of the weights after the last step."""
    with started_engines() as started:
        lines = pretrain(flags)
        return {"lines": lines, "digest": weights_digest(started[0].ds_engine)}


def settings_after(flags: list[str]) -> tuple[list[dict[str, Any]], float]:
    """Of each group of parameters after a run: the settings of its optimizer. And the norm to which gradients are clipped."""
    with started_engines() as started:
        pretrain(flags)
        engine = started[0].ds_engine
        clipping = getattr(engine.optimizer, "clip_grad", engine.gradient_clipping())
        settings = ("betas", "eps", "weight_decay", "momentum")
        return [{key: group[key] for key in settings if key in group} for group in engine.optimizer.param_groups], clipping


def pretrain_stopped_in(step: int, flags: list[str]) -> list[dict[str, Any]]:
    """`pretrain` that gets SIGTERM in a step of this start."""
    usual, polls = StopRequest.poll, iter(range(1, 1_000_000))
    StopRequest.poll = lambda stop: signal.SIGTERM if next(polls) >= step else usual(stop)
    try:
        return pretrain(flags, code=143)
    finally:
        StopRequest.poll = usual


def pretrain_signalled_in_the_last_upload(flags: list[str]) -> list[dict[str, Any]]:
    """`pretrain` that gets SIGTERM while its only checkpoint is uploaded to a store that hangs."""
    released, patience = threading.Event(), store.STOPPED_SECONDS

    def hanging(self: store.CheckpointStore, checkpoint: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        released.wait(60)

    usual, store.CheckpointStore.upload, store.STOPPED_SECONDS = store.CheckpointStore.upload, hanging, 0.5
    try:
        return pretrain(flags, code=143)
    finally:
        released.set()
        store.CheckpointStore.upload, store.STOPPED_SECONDS = usual, patience


def loss_scaler_after(flags: list[str]) -> dict[str, Any]:
    """The state and the rule of the loss scale after a run."""
    with started_engines() as started:
        pretrain(flags)
        optimizer = started[0].ds_engine.optimizer
        return dict(vars(optimizer.loss_scaler if hasattr(optimizer, "loss_scaler") else optimizer.loss_scale_config))


def fp16_run(flags: list[str], overflows: Sequence[int], rank: int, micro_step: int) -> dict[str, Any]:
    """`pretrain_with_digest` in fp16 while the loss of one micro-batch of the steps `overflows` is infinite on one rank."""
    with loss_times(float("inf"), overflows, rank, micro_step):
        return pretrain_with_digest(flags)


def pretrain_signalled_in_the_whole_evaluation(flags: list[str], rank: int, number: int, code: int) -> list[dict[str, Any]]:
    """`pretrain` with `--whole_eval` and no other evaluation; `rank` gets the signal in its third batch."""
    read = Loader.validation_batches

    def signalled(self: Loader, *arguments: Any) -> Iterator[Any]:
        for place, batch in enumerate(read(self, *arguments)):
            if place == 2 and os.environ["RANK"] == str(rank):
                os.kill(os.getpid(), number)
                time.sleep(0.5)  # a thread handles it
            yield batch

    Loader.validation_batches = signalled  # type: ignore[method-assign]
    try:
        return pretrain(flags, code=code)
    finally:
        Loader.validation_batches = read  # type: ignore[method-assign]


# --- checkpoints that are written beside training --------------------------------------------------------------------------------------


@contextlib.contextmanager
def writes_after(wait: Callable[[Snapshots], None], **constants: float) -> Iterator[None]:
    """Each thread that writes beside training waits before it begins; `constants` of the checkpoints' module."""
    usual, former = Snapshots.write_copies, {name: getattr(checkpoint, name) for name in constants}

    def write(self: Snapshots) -> Any:
        if self._copies:
            wait(self)
        return usual(self)

    Snapshots.write_copies = write
    vars(checkpoint).update(constants)
    try:
        yield
    finally:
        Snapshots.write_copies = usual
        vars(checkpoint).update(former)


def two_updates(snapshots: Snapshots) -> None:
    """Until the loop has made two more: what is written has changed in the engine."""
    step, deadline = snapshots._ds_engine.global_steps, time.monotonic() + 30.0
    while snapshots._ds_engine.global_steps < step + 2:
        assert time.monotonic() < deadline, "the loop stands still"
        time.sleep(0.002)


def pretrain_with_held_writes(flags: list[str]) -> list[dict[str, Any]]:
    """`pretrain` whose checkpoints are written two steps after they are taken."""
    with writes_after(two_updates):
        return pretrain(flags)


def pretrain_with_slow_writes(flags: list[str], seconds: float) -> list[dict[str, Any]]:
    """`pretrain` on a disk that takes `seconds` for a checkpoint, where waiting for half of that is worth a line."""
    with writes_after(lambda _: time.sleep(seconds), LOGGED_WAIT_SECONDS=seconds / 2):
        return pretrain(flags)


def pretrain_until_a_write_fails(flags: list[str], rank: int, step: int) -> Any:
    """`pretrain` where the disk of one rank is full when the checkpoint of `step` is written; the exit code it ends with."""
    usual = Snapshots._write_file

    def write(self: Snapshots, state: Any, path: str) -> None:
        if int(os.environ["RANK"]) == rank and f"{step:08d}" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        usual(self, state, path)

    Snapshots._write_file = write
    try:
        pretrain(flags)
    except SystemExit as end:
        return end.code
    finally:
        Snapshots._write_file = usual
    return 0


class Phases(Observer):
    """Records the phases of a run in their order."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def on_phase(self, phase: str) -> None:
        self.phases.append(phase)


def phases(flags: list[str]) -> list[str]:
    """The phases of `pretrain` on this rank."""
    seen = Phases()
    pretrain(flags, [seen])
    return seen.phases


class EndsAtStepSix(Observer):
    """Ends the run when its sixth step begins, on all ranks."""

    how = ""

    def on_step(self, step: int) -> None:
        if step == 6 and self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # a thread notes it
        elif step == 6:
            raise RuntimeError("a fault of ours")


def end_in_the_middle_of_a_write(flags: list[str], how: str, seconds: float = 0.5) -> str:
    """`pretrain` that ends at step 6 by a "signal", or on an "error", and whose writes take `seconds`."""
    EndsAtStepSix.how = how
    try:
        with writes_after(lambda _: time.sleep(seconds)):
            pretrain(flags, [EndsAtStepSix()])
    except AssertionError:
        return "stopped"
    except RuntimeError as reason:
        return str(reason)
    return ""


def lose_rank_1_in_a_write(flags: list[str]) -> str:
    """`pretrain` whose rank 1 is killed in its first write, which the loops of both ranks wait for by then; what rank 0 ends on."""

    def wait(_: Snapshots) -> None:
        time.sleep(1.0)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    with writes_after(wait):
        try:
            pretrain(flags)
        except RuntimeError as reason:
            return str(reason)
    return ""


def pretrain_without_room(flags: list[str]) -> list[dict[str, Any]]:
    """`pretrain` on a host whose memory is taken."""
    usual = snapshot.free_host_memory
    snapshot.free_host_memory = lambda: 0
    try:
        return pretrain(flags)
    finally:
        snapshot.free_host_memory = usual
