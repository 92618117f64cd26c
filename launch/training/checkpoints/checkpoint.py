"""Checkpoints: written under a temporary name while training continues, renamed when complete, verified before they are loaded.

    runs/<name>/checkpoints/step-00000300/
        engine/       DeepSpeed's files (with `latest` next to it, so that, at stages 1 to 3, its zero_to_fp32.py works on the folder)
        state.json    step, tokens, samples, validation loss, window of the spike rule, ranks, the run's id, size and digest of every file
        technique-00000.pt   per rank, only if a technique has state that cannot be computed from the step

Any folder named `step-` and at least eight digits is complete. The newest `keep` checkpoints are kept, and the best by validation loss.
Paths with other names, links and checkpoints of other runs are never removed. A resume loads the newest checkpoint that passes
verification. Newer ones are renamed to `step-00000300.unusable` just before the run completes its next checkpoint.

Training stops while the state is copied into host memory. A thread on each rank writes the copy. The threads communicate through their own
process group; when all ranks have written their copies, rank 0 completes the checkpoint. Only one write is in flight at a time: a save
waits for the one before it. The last checkpoint of a run, and one whose copy does not fit into memory, are written before training
continues.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError, one_line
from data_pipeline.staging import fsync, write_atomically
from launch.errors import DownloadFailed, NoCheckpoint, TrainingFailed, UsageError
from launch.formats.checkpoint_files import (
    ENGINE_TAG,
    STATE_FILE,
    TEMPORARY,
    DamagedCheckpoint,
    checkpoint_name,
    checkpoint_step,
    complete_checkpoints,
    file_entry,
    is_checkpoint_name,
    newest_good,
    outdated,
    read_state,
    state_text,
    verify,
    what_resume_does,
)
from launch.formats.tensor_files import UnreadableFile, load_tensors
from launch.training.checkpoints.move import move_of
from launch.training.checkpoints.snapshot import Snapshots
from launch.training.checkpoints.store import ANSWER_SECONDS, CheckpointStore, StoreError, Uploads, download_metrics, within
from launch.training.ranks.distributed import Collectives, thread_group
from launch.training.run_folder.folder import free_bytes
from recipes.technique import Techniques, ranks_in_words

#: Suffix of the name of a checkpoint that was passed over.
UNUSABLE = ".unusable"
#: A wait for the previous checkpoint is logged if it is longer than this.
LOGGED_WAIT_SECONDS = 1.0
#: After this time, every host sees a new file in a shared folder: NFS caches attributes for up to a minute.
SEEN_SECONDS = 60.0


def check_shared(run: Path, collectives: Collectives) -> None:
    """Check that every rank sees the run's folder, if global rank 0 has one.

    Raises:
        UsageError: the folder is on a disk of one host.
    """
    deadline = time.monotonic() + SEEN_SECONDS

    def lock() -> str:
        """What the lock holds, which differs between starts; a host may have the folder of an earlier run."""
        with contextlib.suppress(OSError):
            return (run / ".lock").read_text(encoding="utf-8")
        return ""

    if not (of_rank_0 := collectives.gather(lock())[0]):
        return
    while lock() != of_rank_0 and time.monotonic() < deadline:
        time.sleep(0.2)
    if not all(seen := collectives.gather(lock() == of_rank_0)):
        raise UsageError(f"{run}: rank {seen.index(False)} does not see this folder; all hosts must share --runs_dir")


class Checkpoints:
    """Writes, prunes and reads the checkpoints of one run. All ranks must call every method together.

    Use it as a context manager around training; on exit it waits for the write in flight.

    Args:
        folder: `runs/<name>/checkpoints`.
        keep: the number of newest checkpoints to keep.
        ds_engine: DeepSpeed's engine.
        techniques: their state is saved beside DeepSpeed's files.
        on_failure: called when a checkpoint could not be written in the background; should stop the run after the current step.
        log: writes one line to the log.
        run_id: the id in the run's `run.json`; only needed on rank 0.
        store: rank 0 uploads each complete checkpoint to it, and a resume reads from it.
        on_wait: called before a checkpoint is written, read or waited for, which may take long.
        check_data: raises DataError if the corpus has changed, so that no checkpoint holds what was trained on another one.

    Attributes:
        current: the checkpoint that was loaded or begun last, on every rank.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        ds_engine: Any,
        techniques: Techniques,
        collectives: Collectives,
        on_failure: Callable[[], None],
        log: Callable[[str], None],
        run_id: str | None = None,
        store: CheckpointStore | None = None,
        on_wait: Callable[[], None] = lambda: None,
        check_data: Callable[[], None] = lambda: None,
    ):
        self.folder, self.keep, self.ds_engine, self.techniques, self.collectives = folder, keep, ds_engine, techniques, collectives
        self._snapshots = Snapshots(ds_engine, techniques, collectives, log)
        self._on_failure, self._on_wait, self._log, self._run_id = on_failure, on_wait, log, run_id
        self._check_data = check_data
        self.current: Path | None = None
        self._passed_over: list[Path] = []  # by the resume, until the next checkpoint is complete
        self._failed = False
        self._thread_group = thread_group()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=collectives.enter_thread)
        self._in_flight: Future[None] | None = None
        self._store = store
        self._uploads = Uploads(store, folder.parent, keep, run_id, log) if store and collectives.rank == 0 else None

    def __enter__(self) -> Checkpoints:
        if self._uploads:
            self._uploads.start(self.current)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_flight:
            self._on_wait()
            wait([self._in_flight])

    # --- writing --------------------------------------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any], last: bool) -> Path:
        """Write the checkpoint of `state["step"]`. If the process is killed at any moment, the checkpoint is complete or absent.

        If `last`, the checkpoint is complete on return. Otherwise only the copy is complete, and a thread writes it while training
        continues. Waits first for the previous checkpoint to be written.

        Raises:
            SystemExit: this checkpoint or the previous one cannot be written (exit code 1, one line from each failed rank). Older ones are
                unchanged.
            TrainingFailed: a rank has found that the corpus has changed. All ranks raise it.
        """
        self._on_wait()
        fault = None
        try:
            self._check_data()
        except DataError as reason:
            fault = f"{reason}; {what_resume_does(self.folder)}"
        if fault := next(filter(None, self.collectives.gather(fault)), None):
            raise TrainingFailed(fault)
        start = time.monotonic()
        self._finish()
        if (waited := time.monotonic() - start) > LOGGED_WAIT_SECONDS:
            self._log(f"step {state['step']}: waited {waited:.1f} s for the previous checkpoint; a larger --save_every waits less")
        final = self.folder / checkpoint_name(state["step"])
        if final == self.current:
            return final
        temporary = self.folder / f"{TEMPORARY}{final.name}"
        with self._ending_on_failure(f"{final}: could not be written"):
            if self.collectives.rank == 0:
                _remove_leftovers(self.folder)
            self.collectives.barrier()
            self._snapshots.begin(copying=not last)
            with self.techniques.common_weights():
                self.ds_engine.save_checkpoint(str(temporary), tag=ENGINE_TAG)
            if of_technique := self.techniques.state_dict():
                self._snapshots.save(of_technique, str(temporary / self._technique_file(self.collectives.rank)))
        self.current = final
        self._in_flight = self._thread.submit(self._write, temporary, final, state)
        if last:
            self._finish()
        return final

    def _write(self, temporary: Path, final: Path, state: dict[str, Any]) -> None:
        """Write this rank's files, and complete the checkpoint when all ranks have written theirs. Runs in the writing thread."""
        entries = None
        with self._reporting_failure(f"{final}: could not be written"):
            entries = {str(path.relative_to(temporary)): entry for path, entry in self._snapshots.write_copies().items()}
        of_ranks = self.collectives.gather(entries, self._thread_group)
        failed = None in of_ranks
        if self.collectives.rank == 0:
            if not failed:
                with self._reporting_failure(f"{final}: could not be written"):
                    self._complete(temporary, final, state, {name: entry for of_rank in of_ranks for name, entry in of_rank.items()})
            if failed or self._failed:
                shutil.rmtree(temporary, ignore_errors=True)
        if any(self.collectives.gather(failed or self._failed, self._thread_group)):
            self._failed = True
            self._on_failure()

    def _complete(self, temporary: Path, final: Path, state: dict[str, Any], entries: dict[str, Any]) -> None:
        """Turn the folder `temporary`, which all ranks have written, into the checkpoint `final`. It is complete from the `os.rename` on.

        Rank 0 calls it. entries: file -> its size and digest; files that DeepSpeed wrote itself are added. Raises OSError if a file of
        `entries` is missing.
        """
        for path in filter(Path.is_file, temporary.rglob("*")):  # files that DeepSpeed writes itself: `latest`, its script, swapped tensors
            if (name := str(path.relative_to(temporary))) not in entries:
                fsync(path)
                entries[name] = file_entry(path)
        if missing := next((name for name in entries if not (temporary / name).is_file()), None):
            raise OSError(f"{missing} is not in this folder, although its rank wrote it; all hosts must share --runs_dir")
        write_atomically(temporary / STATE_FILE, state_text(state, self._run_id, self.collectives.world_size, entries))
        for folder in (*filter(Path.is_dir, temporary.rglob("*")), temporary):
            fsync(folder)
        for path in {*self._passed_over, final}:
            if os.path.lexists(path):
                _set_aside(path)
        self._passed_over.clear()
        os.rename(temporary, final)
        fsync(self.folder)
        if self._uploads:
            self._uploads.submit(final)
        try:
            self._prune()
        except OSError as reason:  # the new checkpoint is complete all the same
            self._log(f"warning: an older checkpoint could not be removed: {reason}")

    def _prune(self) -> None:
        """Remove this run's checkpoints except the newest `keep` and the best."""
        own: dict[str, float | None] = {}
        for path in complete_checkpoints(self.folder):
            with contextlib.suppress(DamagedCheckpoint):
                state = read_state(path)
                if state["run_id"] == self._run_id and not path.is_symlink():
                    own[path.name] = state["val_loss"]
        for name in outdated(own, self.keep):
            if not (self._uploads and self._uploads.uses(self.folder / name)):
                _remove(self.folder / name)

    def _finish(self) -> None:
        """Wait for the write in flight. Exits if it failed on any rank."""
        if self._in_flight:
            self._in_flight.result()
            self._in_flight = None
        if self._failed:
            raise SystemExit(1)

    def finish_uploads(self, poll: Callable[[], int]) -> bool:
        """Wait until rank 0 has uploaded the last checkpoint, or has given up (`launch/training/checkpoints/store.py`).

        Returns whether nothing was given up. The wait of rank 0 is bounded, more tightly once `poll` returns a signal. The others wait for
        it, because a launcher that sees a rank end with an error ends all.
        """
        done = not self._uploads or self._uploads.finish(poll)
        return all(self.collectives.gather(done, self._thread_group)) if self._store else done

    # --- reading --------------------------------------------------------------------------------------------------------------------

    def load_newest(self, before: int | None = None) -> dict[str, Any] | None:
        """Load the newest checkpoint that passes verification into the engine and the techniques, and return its state.

        before: consider only checkpoints of earlier steps. The store may have later ones, if it was unreachable when the run was resumed.

        Candidates are the checkpoints in the folder and in the store. One that is in both is downloaded only if the one in the folder is
        damaged.

        Returns None if there is no checkpoint. The ranks share the work of reading the files and agree on the checkpoint. Checkpoints that
        are passed over are logged with the reason. A checkpoint of another layout (ranks, stage, offload, precision) is moved into the
        engine (`launch/training/checkpoints/move.py`). With a different number of ranks, the per-rank state of techniques cannot be used: a
        technique continues without it, or refuses.

        Raises:
            NoCheckpoint: no checkpoint passes verification, or the store cannot be reached and there is none in the folder; on all ranks.
            UsageError: its state cannot be moved into this engine, or a technique cannot continue without its state.
            DownloadFailed: a checkpoint could not be downloaded. An older one is not used instead, because that would discard steps.
            SystemExit: it could not be loaded (exit code 1, one line from each failed rank).
        """
        self._on_wait()
        self._finish()
        # Only rank 0 opens the run's folder and the store, so its view holds for all ranks.
        checkpoints, (stored, unreachable), self._run_id = self.collectives.gather(
            (complete_checkpoints(self.folder), self._list_store(), self._run_id)
        )[0]
        if unreachable and not checkpoints:
            raise NoCheckpoint(f"--checkpoint_store {unreachable}; without it there is no checkpoint to resume from")
        if unreachable:
            self._log(f"warning: resuming from the checkpoints in {self.folder}: {unreachable}")
        found = {path for path in (*checkpoints, *stored) if before is None or checkpoint_step(path.name) < before}
        candidates = sorted(found, key=lambda path: checkpoint_step(path.name))
        if not candidates:
            return None
        newest, faults = newest_good(candidates, lambda one: self._check_or_download(one, one in checkpoints, one in stored))
        if newest is None:
            raise NoCheckpoint(f"{self.folder}: no checkpoint can be used; move them away to start at step 0", *faults)
        for fault in faults:
            self._log(f"warning: passed over a checkpoint: {fault}")
        newer = [path for path in checkpoints if path in candidates[candidates.index(newest) + 1 :]]
        self._passed_over = [path for path in {*self._passed_over, *newer} if path != newest]
        state = read_state(newest)
        other_ranks = state["ranks"] != self.collectives.world_size
        if other_ranks and any(newest.glob("technique-*.pt")):
            try:
                self.techniques.discard_state(
                    f"written by {ranks_in_words(state['ranks'])}, and this job has {self.collectives.world_size}"
                )
            except ValueError as reason:
                raise UsageError(f"{newest}: the per-rank state of a technique was {reason}; start {state['ranks']} ranks") from None
        move = move_of(newest, state["ranks"], self.ds_engine, self.collectives.world_size)
        with self._ending_on_failure(f"{newest}: could not be loaded", "move it away to resume from an older one"):
            if move is None:
                # The step number alone sets the rate of a schedule.
                path, _ = self.ds_engine.load_checkpoint(str(newest), tag=ENGINE_TAG, load_lr_scheduler_states=False)
                if path is None:
                    raise RuntimeError("DeepSpeed found nothing in it")
            else:
                move.fill()
                self._log(str(move))
            if (of_technique := self._technique_file(0 if other_ranks else self.collectives.rank)) in state["files"]:
                load = self.techniques.load_common_state if other_ranks else self.techniques.load_state_dict
                load(load_tensors(newest / of_technique))
        self.current = newest
        return state

    def _list_store(self) -> tuple[list[Path], str]:
        """On rank 0: the checkpoints in the store, as paths in the folder, and why the store cannot be reached.

        If the upload of every one was cut off, there is none.
        """
        if not self._uploads:
            return [], ""
        store = self._uploads.store

        def names() -> list[str]:
            found = store.checkpoints()
            return found if any(store.read(f"{name}/{STATE_FILE}") is not None for name in reversed(found)) else []

        try:
            return [self.folder / name for name in within(ANSWER_SECONDS, store.url, names)], ""
        except StoreError as reason:
            return [], str(reason)

    def _check_or_download(self, checkpoint: Path, in_folder: bool, in_store: bool) -> None:
        """`_check` a checkpoint that is `in_folder`. If it is not, or is damaged, download it if it is `in_store`."""
        if in_folder:
            try:
                return self._check(checkpoint)
            except DamagedCheckpoint as damage:
                if not in_store:
                    raise
                self._log(f"warning: {damage}; trying the store")
        fault: DamagedCheckpoint | DownloadFailed | None = None
        if self._uploads:
            self._log(f"downloading {self._uploads.store.url}/{checkpoint.name}")
            try:
                downloaded = self._uploads.store.download(checkpoint, self._run_id)
                if not in_folder:
                    download_metrics(self._uploads.store, self.folder.parent)
                if os.path.lexists(checkpoint):
                    _set_aside(checkpoint)
                os.rename(downloaded, checkpoint)
            except DamagedCheckpoint as damage:
                fault = damage
            except (StoreError, OSError) as reason:
                fault = DownloadFailed(f"{checkpoint.name} could not be downloaded: {reason}; --resume tries again")
            shutil.rmtree(checkpoint.with_name(f"{TEMPORARY}{checkpoint.name}"), ignore_errors=True)
        if fault := self.collectives.gather(fault, self._thread_group)[0]:  # the ranks of this group may wait long
            raise fault
        self._check(checkpoint)

    def _check(self, checkpoint: Path) -> None:
        """Verify `checkpoint`, all ranks together. All raise DamagedCheckpoint if any finds a fault."""
        share, fault = slice(self.collectives.rank, None, self.collectives.world_size), None
        try:
            state = verify(checkpoint, self._run_id, share)
            for name in [name for name in state["files"] if name.endswith(".pt")][share]:
                load_tensors(checkpoint / name, mapped=True)  # refuses everything but tensors; maps them without reading them
        except (DamagedCheckpoint, UnreadableFile, OSError) as reason:
            fault = str(reason)
        for found in filter(None, self.collectives.gather(fault)):
            raise DamagedCheckpoint(found)

    # --- both -----------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reporting_failure(self, failure: str, fix: str | None = None) -> Iterator[None]:
        """If the body raises, print one line, set `_failed`, and continue after the `with` statement."""
        try:
            yield
        except Exception as reason:
            free = free_bytes(self.folder) // 2**20  # torch does not say that a disk is full
            line = f"error: {failure} by rank {self.collectives.rank} ({type(reason).__name__}: {one_line(reason)}); {free} MiB are free"
            print(f"{line}; {fix or what_resume_does(self.folder)}", file=sys.stderr, flush=True)
            self._failed = True

    @contextlib.contextmanager
    def _ending_on_failure(self, failure: str, fix: str | None = None) -> Iterator[None]:
        """If the body raises, print one line and exit this rank; the launcher ends the other ranks.

        This rank cannot wait for the others, because they may be in a collective of the engine that it will not enter.
        """
        with self._reporting_failure(failure, fix):
            yield
        if self._failed:
            raise SystemExit(1)

    def _technique_file(self, rank: int) -> str:
        return f"technique-{rank:05d}.pt"


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint before removing it, so that a half-removed one does not look complete."""
    temporary = checkpoint.with_name(f"{TEMPORARY}{checkpoint.name}")
    os.rename(checkpoint, temporary)
    shutil.rmtree(temporary)


def _set_aside(path: Path) -> None:
    """Rename an unusable checkpoint: append the first of `.unusable`, `.unusable-2`, ... that is free."""
    names = (path.with_name(f"{path.name}{UNUSABLE}" + (f"-{number}" if number > 1 else "")) for number in itertools.count(1))
    os.rename(path, next(name for name in names if not os.path.lexists(name)))


def _remove_leftovers(folder: Path) -> None:
    """Remove half-written and half-removed checkpoints of a process that was killed."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if is_checkpoint_name(path.name.removeprefix(TEMPORARY)) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
