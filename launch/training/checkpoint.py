"""Checkpoints: written beside training under a temporary name, renamed when complete, verified before they are loaded.

    runs/<name>/checkpoints/step-00000300/
        engine/       what DeepSpeed wrote (`latest` beside it, so that its own zero_to_fp32.py works on the folder)
        state.json    step, tokens, samples, validation loss, ranks, the run's id, size and digest of every file
        technique-00000.pt   per rank, only where a technique has state that cannot be derived

The newest `keep` stay, and the best by validation loss. What has another name is never touched, and a link or a checkpoint of another run
is never removed. A resume takes the newest checkpoint that verifies (launch/formats/checkpoint_files.py). When the run has written its next
one, those that were passed over are renamed `step-00000300.unusable`.

The loop stands still for a copy of everything into the host's memory; a thread of each rank writes the copy. These threads make no
collectives, which would come between the loop's: a rank marks in the temporary folder that its files are on the disk, and rank 0,
when all have, makes the checkpoint complete. Before the next one the loops meet, where a rank that died is missed. The last one of a
run needs no copy, since nothing goes on beside it.
"""

from __future__ import annotations

import contextlib
import itertools
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

from launch.errors import TrainingFailed, UsageError
from launch.formats.checkpoint_files import (
    NO_DIGESTS,
    STATE_FILE,
    DamagedCheckpoint,
    checkpoint_name,
    complete_checkpoints,
    file_entry,
    has_digests,
    is_checkpoint_name,
    newest_good,
    read_state,
    state_text,
    verify,
)
from launch.training.folder import free_bytes, write_atomically

if TYPE_CHECKING:
    from launch.training.distributed import Collectives
    from launch.training.snapshot import Snapshots
    from recipes.technique import Technique

ENGINE_TAG = "engine"
#: Before a checkpoint's name, while it is written or removed.
TEMPORARY, TRASH = ".tmp-", ".trash-"
#: Behind the name of a checkpoint that a resume passed over.
UNUSABLE = ".unusable"
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
        run_id: of the run's `run.json`, on rank 0.
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
        run_id: str | None = None,
    ):
        from launch.training.snapshot import Snapshots

        self.folder, self.keep, self.engine, self.technique, self.collectives = folder, keep, engine, technique, collectives
        self._snapshots: Snapshots = Snapshots(engine, collectives)
        self._beside_training, self._on_failure, self._log, self._run_id = beside_training, on_failure, log, run_id
        self._current: Path | None = None  # the one that was loaded, or written last
        self._good: set[Path] = set()  # that were loaded, written or verified by this process
        self._passed_over: list[Path] = []  # by the resume, until the next one is complete
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
        final = self.folder / checkpoint_name(state["step"])
        temporary = self.folder / f"{TEMPORARY}{final.name}"
        if final == self._current:
            return final
        with self._ending_on_failure(*self._cannot_write(final)):
            if self.collectives.rank == 0:
                _remove_leftovers(self.folder)
                if os.path.lexists(temporary):  # a file of somebody's
                    _set_aside(temporary)
            self.collectives.barrier()
            self._snapshots.take(later=not last and self._has_room())
            with self.technique.evaluation_weights():
                self.engine.save_checkpoint(str(temporary), tag=ENGINE_TAG)
            if of_technique := self.technique.state_dict():
                self._snapshots.save(of_technique, str(temporary / self._technique_file()))
        self._own_part_done.clear()
        self._current = final
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
            from launch.training.distributed import ranks_of_host
            from launch.training.snapshot import room_for_snapshots

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
            entries = {str(path.relative_to(temporary)): entry for path, entry in self._snapshots.written.items()}
            for path in (temporary / ENGINE_TAG / "offloaded_tensors" / f"rank{rank:02d}").glob("*"):  # copied by DeepSpeed
                entries[str(path.relative_to(temporary))] = file_entry(path)
            if rank:
                write_atomically(temporary / f"{WRITTEN}{rank:05d}", json.dumps(entries))
            self._own_part_done.set()
            if rank == 0:
                if (of_others := self._entries_of_others(temporary)) is None:
                    self._fail()
                else:
                    self._complete(temporary, final, state, entries | of_others)
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

    def _entries_of_others(self, temporary: Path) -> dict[str, Any] | None:
        """Wait for the other ranks' marks, remove them, and return the files that they list.

        None if a rank has failed, or is not heard of when this one ends.
        """
        deadline = math.inf
        while True:
            marks = [name for name in os.listdir(temporary) if name.startswith((WRITTEN, FAILED))]
            if any(name.startswith(FAILED) for name in marks) or time.monotonic() > deadline:
                return None
            if len(marks) == self.collectives.world_size - 1:
                entries: dict[str, Any] = {}
                for name in marks:
                    entries |= json.loads((temporary / name).read_text(encoding="utf-8"))
                    (temporary / name).unlink()
                return entries
            if self._leaving.is_set() and deadline == math.inf:
                deadline = time.monotonic() + LAST_PATIENCE_SECONDS
            time.sleep(POLL_SECONDS)

    def _complete(self, temporary: Path, final: Path, state: dict[str, Any], entries: dict[str, Any]) -> None:
        for path in filter(Path.is_file, temporary.rglob("*")):  # and what DeepSpeed wrote beside the ranks' files: `latest`, its script
            if (name := str(path.relative_to(temporary))) not in entries:
                entries[name] = file_entry(path)
        write_atomically(temporary / STATE_FILE, state_text(state, self._run_id, self.collectives.world_size, entries))
        for folder in (*filter(Path.is_dir, temporary.rglob("*")), temporary):
            _sync(folder)
        for path in {*self._passed_over, final}:
            if os.path.lexists(path):
                _set_aside(path)
        self._passed_over.clear()
        os.rename(temporary, final)
        _sync(self.folder)
        self._good.add(final)
        try:
            self._prune()
        except OSError as reason:  # the new checkpoint is complete all the same
            self._log(f"an older checkpoint could not be removed: {reason}")

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
        """Load the newest checkpoint that verifies into the engine and the techniques; its state, or None where there is no checkpoint.

        Each rank reads its share of the files; all agree on the checkpoint. Those that are passed over are logged with the reason and stay.
        Another number of ranks cannot use the ranks' own states: the techniques that have some go on without.

        Raises:
            UsageError: there are checkpoints and none verifies, or a technique cannot go on without what other ranks have saved.
            SystemExit: it could not be loaded (exit code 1, one line from each rank that saw it).
        """
        # As rank 0 sees them: only it has the run's folder.
        checkpoints, self._run_id = self.collectives.gather((complete_checkpoints(self.folder), self._run_id))[0]
        if not checkpoints:
            return None
        newest, faults = newest_good(checkpoints, self._agreed_fault)
        if newest is None:
            raise UsageError(f"{self.folder}: no checkpoint can be used; move them away to start at step 0", *faults)
        for fault in faults:
            self._log(f"warning: passed over a checkpoint: {fault}")
        self._passed_over = checkpoints[checkpoints.index(newest) + 1 :]
        state = read_state(newest)
        if not has_digests(state):
            self._log(f"warning: {newest}: {NO_DIGESTS}")
        others = state["ranks"] != self.collectives.world_size
        if others and any(newest.glob("technique-*.pt")):
            try:
                self.technique.discard_state(f"written by {state['ranks']} rank(s), and this job has {self.collectives.world_size}")
            except ValueError as reason:
                raise UsageError(f"{newest}: a technique's state belongs to its rank, {reason}; start {state['ranks']} ranks") from None
        with self._ending_on_failure(f"{newest}: could not be loaded", "move it away to resume from the one before"):
            with _own_settings(self.engine):
                path, _ = self.engine.load_checkpoint(str(newest), tag=ENGINE_TAG)
            if path is None:
                raise RuntimeError("DeepSpeed found nothing in it")
            if not others and self._technique_file() in state["files"]:
                from launch.formats.tensor_files import load_tensors

                self.technique.load_state_dict(load_tensors(newest / self._technique_file()))
        self._current = newest
        self._good.add(newest)
        return state

    def _agreed_fault(self, checkpoint: Path) -> str | None:
        """What any rank found wrong with `checkpoint`."""
        share, fault = slice(self.collectives.rank, None, self.collectives.world_size), None
        try:
            self._check_loads(checkpoint, verify(checkpoint, self._run_id, share), share)
        except (DamagedCheckpoint, OSError) as reason:
            fault = str(reason)
        return next(filter(None, self.collectives.gather(fault)), None)

    def _check_loads(self, checkpoint: Path, state: dict[str, Any], share: slice) -> None:
        """Raises DamagedCheckpoint where a file holds more than tensors. Its tensors are not read."""
        from launch.formats.tensor_files import UnreadableFile, load_tensors

        for name in [name for name in state["files"] if name.endswith(".pt")][share]:
            try:
                load_tensors(checkpoint / name, mapped=True)
            except UnreadableFile as reason:
                raise DamagedCheckpoint(str(reason)) from None

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
        left = "--resume goes on from the checkpoint before it" if self.newest() else "there is no checkpoint before it"
        return f"{checkpoint}: could not be written", f"{{free}} MiB are free; {left}"

    def _say(self, failure: str, remedy: str, reason: Exception) -> None:
        text = " ".join(str(reason).split())
        free = free_bytes(self.folder) // 2**20  # torch does not say that a disk is full
        line = f"error: {failure} by rank {self.collectives.rank} ({type(reason).__name__}: {text[:200]}); {remedy.format(free=free)}"
        print(line, file=sys.stderr, flush=True)

    def _technique_file(self) -> str:
        return f"technique-{self.collectives.rank:05d}.pt"

    def _prune(self) -> None:
        """Remove this run's checkpoints but the newest `keep` and the best."""
        own: dict[Path, float | None] = {}
        for path in complete_checkpoints(self.folder):
            with contextlib.suppress(DamagedCheckpoint):  # it stays, like a link and a checkpoint of another run
                state = read_state(path)
                if state.get("run_id") == self._run_id and not path.is_symlink():
                    own[path] = state["val_loss"]
        losses = {path: loss for path, loss in own.items() if loss is not None and math.isfinite(loss)}
        while (best := min(losses, key=losses.__getitem__, default=None)) and best not in self._good and len(own) > self.keep:
            try:  # of an earlier process: it must not be kept in place of a good one
                verify(best, self._run_id)
                self._good.add(best)
            except DamagedCheckpoint as reason:
                self._log(f"warning: the best checkpoint is damaged, and stays: {reason}")
                del own[best], losses[best]
        for path in list(own)[: -self.keep]:
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
    trash = checkpoint.with_name(f"{TRASH}{checkpoint.name}")
    os.rename(checkpoint, trash)
    shutil.rmtree(trash)


def _set_aside(path: Path) -> None:
    """Rename what has the name of a checkpoint that it cannot be, to the first of `.unusable`, `.unusable-2`, ... that is free."""
    names = (path.with_name(f"{path.name}{UNUSABLE}" + (f"-{number}" if number > 1 else "")) for number in itertools.count(1))
    os.rename(path, next(name for name in names if not os.path.lexists(name)))


def _remove_leftovers(folder: Path) -> None:
    """Remove what a kill left half-written or half-removed."""
    for prefix in (TEMPORARY, TRASH):
        for path in folder.glob(f"{prefix}*"):
            if is_checkpoint_name(path.name.removeprefix(prefix)) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
