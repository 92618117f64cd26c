"""Checkpoints: written beside training under a temporary name, renamed when complete, so that what has a checkpoint's name is one.

    runs/<name>/checkpoints/step-00000300/
        engine/       what DeepSpeed wrote (`latest` beside it, so that its own zero_to_fp32.py works on the folder)
        state.json    step, tokens, samples, validation loss, ranks, and the size of every file
        technique-00000.pt   per rank, only where a technique has state that cannot be derived

The newest `keep` stay, and the best by validation loss.

The loop stands still for a copy of everything into the host's memory; a thread of each rank writes the copy. These threads make no
collectives, which would come between the loop's: a rank marks in the temporary folder that its files are on the disk, and rank 0,
when all have, makes the checkpoint complete. Before the next one the loops meet, where a rank that died is missed. The last one of a
run needs no copy, since nothing goes on beside it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.run.errors import TrainingFailed, UsageError
from launch.run.folder import write_atomically

if TYPE_CHECKING:
    from launch.engine.distributed import Collectives
    from launch.engine.snapshot import Snapshots
    from recipes.technique import Technique

PREFIX = "step-"
ENGINE_TAG = "engine"
#: Of an optimizer's groups of parameters: what the JSON sets and no state depends on (amsgrad and momentum have some), beside the learning
#: rate, which follows the schedule.
SETTINGS = ("betas", "eps", "weight_decay", "dampening", "alpha", "lr_decay")
#: What a rank leaves in the temporary folder, with its number behind, for rank 0.
WRITTEN, FAILED = ".written-", ".failed-"
POLL_SECONDS = 0.02
#: How long rank 0, which ends on an error, waits for the files of ranks that may have ended already.
LAST_PATIENCE_SECONDS = 10.0
#: Of waiting for a checkpoint before the next one, from which on it is worth a line in the log.
NOTED_WAIT_SECONDS = 1.0


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(path.parent for path in folder.glob(f"{PREFIX}*/state.json"))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint.

    Raises:
        UsageError: somebody has damaged it since.
    """
    try:
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as reason:
        raise UsageError(f"{checkpoint}: state.json cannot be read ({reason}); {_REMEDY}") from None
    if not isinstance(state, dict):
        raise UsageError(f"{checkpoint}: state.json holds a {type(state).__name__}, must be an object; {_REMEDY}")
    for key, is_right in _STATE.items():
        if not is_right(state.get(key)):
            raise UsageError(f"{checkpoint}: state.json says {key} = {json.dumps(state.get(key))[:60]}, which no run wrote; {_REMEDY}")
    return state


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # bool is an int, so not isinstance


#: What a state must say.
_STATE: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "tokens", "samples"), _is_count),
    "ranks": lambda value: _is_count(value) and value > 0,
    "val_loss": lambda value: value is None or isinstance(value, (int, float)),
    "files": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
}


#: What to do about a checkpoint that cannot be loaded.
_REMEDY = "remove this checkpoint to resume from the one before"


def check_files(checkpoint: Path) -> None:
    """Compare the files of a complete checkpoint with the sizes noted when it was written.

    Raises:
        UsageError: one is missing, or has another size.
    """
    for name, size in read_state(checkpoint)["files"].items():
        file = checkpoint / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            fault = "is missing" if found is None else f"has {found:,} bytes, {size:,} were written"
            raise UsageError(f"{checkpoint}: {name} {fault}; {_REMEDY}")


class Checkpoints:
    """Writes, prunes and reads the checkpoints of one run; every method is called by all ranks together.

    As a context manager it surrounds the training: whoever leaves it has no write in flight.

    Args:
        folder: `runs/<name>/checkpoints`.
        keep: how many of the newest stay.
        engine: DeepSpeed's.
        collectives: for barriers; global rank 0 renames and prunes.
        beside_training: whether any checkpoint comes before the run's last one, and needs a copy in the host's memory.
        on_failure: called in the writing thread when it could not write, for a stop at the next step boundary.
        log: takes a line for the log.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        engine: Any,
        technique: Technique,
        collectives: Collectives,
        beside_training: bool,
        on_failure: Callable[[], None],
        log: Callable[[str], None],
    ):
        from launch.engine.snapshot import Snapshots

        self.folder, self.keep, self.engine, self.technique, self.collectives = folder, keep, engine, technique, collectives
        self._snapshots: Snapshots = Snapshots(engine, collectives)
        self._beside_training, self._on_failure, self._log = beside_training, on_failure, log
        self._asked_for_room = self._told_of_waiting = self._failed = False
        self._leaving, self._own_part_done = threading.Event(), threading.Event()
        self._own_part_done.set()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=collectives.enter_thread)
        self._in_flight: Future[None] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, TrainingFailed):  # other ranks may be gone
            self._leaving.set()
        if self._in_flight:
            self._in_flight.result()

    def save(self, state: dict[str, Any], last: bool) -> Path:
        """Write the checkpoint of `state["step"]`. A kill at any moment leaves it complete or absent.

        It is complete on return when it is the `last`. Else it is copied here and written while training goes on, after the one before,
        which is waited for.

        Raises:
            SystemExit: it, or the one before, cannot be written (exit code 1, one line from each rank that could not); the older ones
                are as they were.
        """
        start = time.monotonic()
        self._finish()
        if (waited := time.monotonic() - start) > NOTED_WAIT_SECONDS and not self._told_of_waiting:
            self._told_of_waiting = True
            self._log(f"step {state['step']}: waited {waited:.1f} s for the checkpoint before this one; a larger --save_every waits less")
        final = self.folder / f"{PREFIX}{state['step']:08d}"
        temporary = self.folder / f".tmp-{final.name}"
        complete = final in complete_checkpoints(self.folder)
        self.collectives.barrier()  # all ranks have looked before anything changes
        if complete:
            return final
        with self._ending_on_failure(*self._cannot_write(final)):
            if self.collectives.rank == 0:
                _remove_leftovers(self.folder)
                if final.exists():  # without a state.json: somebody took files away
                    _remove(final)
            self.collectives.barrier()
            self._snapshots.take(later=not last and self._has_room())
            with self.technique.agreed_weights():
                self.engine.save_checkpoint(str(temporary), tag=ENGINE_TAG)
            if of_technique := self.technique.state_dict():
                self._snapshots.save(of_technique, str(temporary / self._technique_file()))
        self._own_part_done.clear()
        self._in_flight = self._thread.submit(self._write, temporary, final, state)
        if last:
            self._finish()
        return final

    def make_room(self) -> None:
        """After the first step: have the copy's memory ready before it is needed, in the writing thread. Later: nothing."""
        if not self._asked_for_room and self._has_room():
            self._in_flight = self._thread.submit(self._snapshots.rehearsal(self.technique.state_dict()))

    def _has_room(self) -> bool:
        """Whether the host's memory has room for the copies of its ranks; asked once, when there is something to be copied."""
        if self._beside_training and not self._asked_for_room:
            self._asked_for_room = True
            from launch.engine.distributed import ranks_of_host
            from launch.engine.snapshot import room_for_snapshots

            needed, room = self._snapshots.bytes(self.technique.state_dict()), room_for_snapshots(ranks_of_host())
            if needed > room:
                self._beside_training = False
                self._log(
                    f"training will wait while checkpoints are written: to write them beside it takes a copy of {needed / 2**30:,.2f} GiB "
                    f"a rank in the host's memory, which has room for {max(0, room) / 2**30:,.2f}"
                )
        return self._beside_training

    # --- in the writing thread ---------------------------------------------------------------------------------------------------------

    def _write(self, temporary: Path, final: Path, state: dict[str, Any]) -> None:
        rank = self.collectives.rank
        try:
            self._snapshots.write()
            for path in self._snapshots.written:
                _sync(path)
            if self.collectives.local_rank == 0:  # what DeepSpeed copies itself, by any rank of this host
                for path in temporary.rglob("*"):
                    with contextlib.suppress(FileNotFoundError):  # a rank that fails takes its files away
                        _sync(path)
            if rank:
                (temporary / f"{WRITTEN}{rank:05d}").touch()
            self._own_part_done.set()
            if rank == 0:
                if self._all_have_written(temporary):
                    self._complete(temporary, final, state)
                else:
                    self._fail()
        except Exception as reason:
            self._say(*self._cannot_write(final), reason)
            with contextlib.suppress(OSError):
                for path in self._snapshots.written:  # room for the mark on a full disk
                    path.unlink(missing_ok=True)
                (temporary / f"{FAILED}{rank:05d}").touch()
            self._fail()
        finally:
            self._own_part_done.set()

    def _fail(self) -> None:
        self._failed = True
        self._on_failure()

    def _all_have_written(self, temporary: Path) -> bool:
        """Wait for the other ranks' marks and take them away; False if one has failed, or is not heard of when this one ends."""
        deadline = math.inf
        while True:
            marks = [name for name in os.listdir(temporary) if name.startswith((WRITTEN, FAILED))]
            if any(name.startswith(FAILED) for name in marks) or time.monotonic() > deadline:
                return False
            if len(marks) == self.collectives.world_size - 1:
                for name in marks:
                    (temporary / name).unlink()
                return True
            if self._leaving.is_set() and deadline == math.inf:
                deadline = time.monotonic() + LAST_PATIENCE_SECONDS
            time.sleep(POLL_SECONDS)

    def _complete(self, temporary: Path, final: Path, state: dict[str, Any]) -> None:
        files = {str(path.relative_to(temporary)): path.stat().st_size for path in temporary.rglob("*") if path.is_file()}
        complete_state = {**state, "ranks": self.collectives.world_size, "files": dict(sorted(files.items()))}
        write_atomically(temporary / "state.json", json.dumps(complete_state, indent=2) + "\n")
        for folder in (*filter(Path.is_dir, temporary.rglob("*")), temporary):
            _sync(folder)
        os.rename(temporary, final)
        _sync(self.folder)
        self._prune()

    # --- in the loop's thread ----------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Wait for the write in flight, of all ranks; end them together when one of them could not write."""
        self._own_part_done.wait()
        self.collectives.barrier()  # a rank that is gone is missed here; rank 0 would wait for its mark for ever
        if self._in_flight:
            self._in_flight.result()
        self._in_flight = None
        if self.collectives.any(self._failed):
            raise SystemExit(1)

    def newest(self) -> Path | None:
        """The newest complete checkpoint, None where there is none."""
        return next(reversed(complete_checkpoints(self.folder)), None)

    def load_newest(self) -> dict[str, Any] | None:
        """Load the newest complete checkpoint into the engine and the techniques; its state, or None where there is none.

        Another number of ranks cannot use the ranks' own states: the techniques that have some go on without.

        Raises:
            UsageError: a file of it is missing or has lost bytes, or a technique cannot go on without what other ranks have saved.
            SystemExit: its bytes are not what was written (exit code 1, one line from each rank that saw it).
        """
        newest = self.newest()
        if newest is None:
            return None
        check_files(newest)  # by every rank, so that all of them end on what any of them would
        state = read_state(newest)
        others = state["ranks"] != self.collectives.world_size
        if others and any(newest.glob("technique-*.pt")):
            try:
                self.technique.forget_state(f"written by {state['ranks']} rank(s), and this job has {self.collectives.world_size}")
            except ValueError as reason:
                raise UsageError(f"{newest}: a technique's state belongs to its rank, {reason}; start {state['ranks']} ranks") from None
        with self._ending_on_failure(f"{newest}: could not be loaded", _REMEDY):
            with _own_settings(self.engine):
                path, _ = self.engine.load_checkpoint(str(newest), tag=ENGINE_TAG)
            if path is None:
                raise RuntimeError("DeepSpeed found nothing in it")
            if not others and (file := newest / self._technique_file()).exists():
                import torch

                self.technique.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
        return state

    @contextlib.contextmanager
    def _ending_on_failure(self, failure: str, remedy: str) -> Iterator[None]:
        """Say in one line why this rank could not go on, and end it; the launcher ends the others.

        Nobody can wait for them here: they may stand in a collective of the engine that this rank will never enter.
        """
        try:
            yield
        except Exception as reason:
            self._say(failure, remedy, reason)
            raise SystemExit(1) from None

    def _cannot_write(self, checkpoint: Path) -> tuple[str, str]:
        return (
            f"{checkpoint}: could not be written",
            "{free} MiB are free; the older checkpoints are intact: --resume goes on from them",
        )

    def _say(self, failure: str, remedy: str, reason: Exception) -> None:
        text = " ".join(str(reason).split())
        free = shutil.disk_usage(self.folder).free // 2**20  # torch does not say that a disk is full
        line = f"error: {failure} by rank {self.collectives.rank} ({type(reason).__name__}: {text[:200]}); {remedy.format(free=free)}"
        print(line, file=sys.stderr, flush=True)

    def _technique_file(self) -> str:
        return f"technique-{self.collectives.rank:05d}.pt"

    def _prune(self) -> None:
        checkpoints = complete_checkpoints(self.folder)
        try:
            losses = {path: loss for path in checkpoints if (loss := read_state(path).get("val_loss")) is not None and math.isfinite(loss)}
        except UsageError as reason:  # somebody's file; which one is the best cannot be said
            self._log(f"the older checkpoints stay: {reason}")
            return
        best = min(losses, key=losses.__getitem__) if losses else None
        for path in checkpoints[: -self.keep]:
            if path != best:
                _remove(path)


@contextlib.contextmanager
def _own_settings(engine: Any) -> Iterator[None]:
    """Keep the optimizer's settings, which torch takes from the checkpoint together with its state, those of this run's configuration."""
    asked = [{key: group[key] for key in SETTINGS if key in group} for group in engine.optimizer.param_groups]
    yield
    for group, settings in zip(engine.optimizer.param_groups, asked, strict=True):
        group.update(settings)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. Renamed first: half of a removal must not look like one."""
    trash = checkpoint.with_name(f".trash-{checkpoint.name}")
    os.rename(checkpoint, trash)
    shutil.rmtree(trash)


def _remove_leftovers(folder: Path) -> None:
    """What a kill left half-written or half-removed."""
    for path in (*folder.glob(".tmp-*"), *folder.glob(".trash-*")):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
