"""Copies of a run's checkpoints in an object store: `--checkpoint_store s3://bucket/folder`.

    <URL>/<run_name>/run.json, metrics.jsonl      uploaded at the start, with each checkpoint, and at the end
    <URL>/<run_name>/step-00000300/engine/...     the files of a checkpoint
    <URL>/<run_name>/step-00000300/state.json     uploaded last: a checkpoint without it is incomplete

An object store cannot rename, so the last file makes a checkpoint complete. It lists the digests of all other files, so that damaged
objects are found after the download. Only global rank 0 uses the store. Uploads run in a separate thread, which takes part in no
collective, and no error in it ends the run.

The store is reached through fsspec, which reads credentials from the environment and the configuration files of the backend. `s3://` and
`file://` are tested.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

from data_pipeline.errors import one_line
from data_pipeline.staging import write_atomically
from launch.config.flags import MUST
from launch.config.run_config import RunConfig
from launch.errors import UsageError
from launch.formats.checkpoint_files import (
    STATE_FILE,
    TEMPORARY,
    DamagedCheckpoint,
    checkpoint_step,
    complete_checkpoints,
    is_checkpoint_name,
    outdated,
    read_state,
    verify,
)
from launch.training.run_folder.folder import nothing_to_resume
from launch.training.run_folder.metrics_writer import METRICS_FILE

#: The files of a run beside its checkpoints, without which it cannot be resumed on another host.
RUN_FILES = ("run.json", METRICS_FILE)
#: How long the store may take to answer at the start of a run.
ANSWER_SECONDS = 60.0
#: At the end of a run, the last upload is given up after this time.
LAST_UPLOAD_SECONDS = 1800.0
#: After a signal, the last upload is given up after this time, because schedulers soon kill the run.
STOPPED_SECONDS = 20.0


class StoreError(Exception):
    """The store did not do what it was asked: one line with the URL and the reason."""


class CheckpointStore:
    """The objects of one run in a store. Connects when it is first used.

    Args:
        url: of `--checkpoint_store`, checked by `launch.config.store_url`.

    All methods raise StoreError if the store cannot be reached or refuses.
    """

    def __init__(self, url: str, run_name: str):
        self._above, self._name = url.rstrip("/"), run_name
        self.url = f"{self._above}/{run_name}"
        self._connection: tuple[Any, str] | None = None

    @classmethod
    def of(cls, config: RunConfig) -> CheckpointStore | None:
        """The store of a run, None if it has none."""
        return cls(config.checkpoint_store, config.run_name) if config.checkpoint_store else None

    @contextlib.contextmanager
    def _connected(self) -> Iterator[tuple[Any, str]]:
        """fsspec's file system, and the path of the run in it."""
        try:
            if self._connection is None:
                import fsspec  # with the backend, it takes a second to import

                options = {"auto_mkdir": True} if self.url.startswith("file://") else {}
                files, above = fsspec.core.url_to_fs(self._above, **options)
                self._connection = files, f"{above}/{self._name}"  # a name is no part of a URL: there, "::" has a meaning
            yield self._connection
        except Exception as reason:  # each backend has its own errors
            raise StoreError(f"{self.url}: {type(reason).__name__}: {one_line(reason)}") from reason

    def checkpoints(self) -> list[str]:
        """The names of the run's checkpoints, complete ones and others, oldest first."""
        with self._connected() as (files, root):
            files.invalidate_cache()
            try:
                found = [Path(path).name for path in files.ls(root, detail=False)]
            except FileNotFoundError:  # nothing has been uploaded; or there is no such bucket
                if bucket := root.split("/")[0]:
                    files.info(bucket)
                return []
        return sorted(filter(is_checkpoint_name, found), key=checkpoint_step)

    def read(self, name: str) -> bytes | None:
        """The content of a small object, None if there is none."""
        with self._connected() as (files, root):
            try:
                return bytes(files.cat_file(f"{root}/{name}"))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small object. A reader sees the old or the new one."""
        with self._connected() as (files, root):
            if self.url.startswith("file://"):
                files.makedirs(root, exist_ok=True)
                write_atomically(Path(root, name), content)
            else:
                files.pipe_file(f"{root}/{name}", content)

    def upload(self, checkpoint: Path) -> None:
        """Upload a complete checkpoint, `state.json` last."""
        names = list(read_state(checkpoint)["files"])
        with self._connected() as (files, root):
            place = f"{root}/{checkpoint.name}"
            with contextlib.suppress(FileNotFoundError):  # of an earlier upload, which is not complete from now on
                files.rm_file(f"{place}/{STATE_FILE}")
            for name in (*names, STATE_FILE):
                files.put_file(str(checkpoint / name), f"{place}/{name}")

    def state(self, name: str) -> dict[str, Any] | None:
        """The `state.json` of a checkpoint, None if it is missing or damaged."""
        try:
            state = json.loads(self.read(f"{name}/{STATE_FILE}") or "null")
        except ValueError:
            return None
        return state if isinstance(state, dict) else None

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its `state.json` first."""
        with self._connected() as (files, root):
            with contextlib.suppress(FileNotFoundError):
                files.rm_file(f"{root}/{name}/{STATE_FILE}")
            if self.url.startswith("file://"):
                files.rm(f"{root}/{name}", recursive=True)
            else:  # elsewhere `rm` reads the * and [ of a path as a pattern, and would remove files of other runs
                for path in files.find(f"{root}/{name}"):
                    files.rm_file(path)

    def download(self, checkpoint: Path, run_id: str | None) -> Path:
        """Download and verify the checkpoint whose final path is `checkpoint`. Returns its current path.

        That is in a folder `.tmp-step-...`, which the next save removes; the caller must move the checkpoint.

        Raises:
            DamagedCheckpoint: it is incomplete or of another run, or an object is missing or differs from what the run wrote.
        """
        folder = checkpoint.with_name(f"{TEMPORARY}{checkpoint.name}") / checkpoint.name
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        if (content := self.read(f"{checkpoint.name}/{STATE_FILE}")) is None:
            raise DamagedCheckpoint(f"{self.url}/{checkpoint.name}: has no {STATE_FILE}, because its upload was not completed")
        (folder / STATE_FILE).write_bytes(content)
        try:
            for name in read_state(folder)["files"]:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with self._connected() as (files, root), contextlib.suppress(FileNotFoundError):  # `verify` misses it
                    files.get_file(f"{root}/{checkpoint.name}/{name}", str(folder / name))
            verify(folder, run_id)
        except DamagedCheckpoint as damage:
            raise DamagedCheckpoint(str(damage).replace(str(folder.parent), self.url)) from None
        return folder


def download_metrics(store: CheckpointStore, run: Path) -> None:
    """Replace the metrics of the run in the folder `run` by those in the store; `metrics.jsonl.cut` keeps the lines that were there.

    For a checkpoint from the store: another host wrote it, and its steps are missing in the folder.
    """
    content, file = store.read(METRICS_FILE), run / METRICS_FILE
    if content is None:
        return
    if file.exists():
        with open(file.with_name(f"{METRICS_FILE}.cut"), "ab") as cut:
            cut.write(file.read_bytes())
    write_atomically(file, content)


def check_store(store: CheckpointStore, run: Path, resume: bool | str) -> None:
    """Check at the start, on global rank 0, that the store can be used for the run in the folder `run`.

    On a resume without the run's folder, it downloads `run.json` into it.

    Raises:
        UsageError: the store cannot be listed, and there is no checkpoint in the folder of the run either; it has this new run already; or
            it has another run of this name.
    """
    here = complete_checkpoints(run / "checkpoints")
    try:
        names, content = within(ANSWER_SECONDS, store.url, lambda: (store.checkpoints(), store.read("run.json")))
        if resume == MUST and not here and not names:
            raise UsageError(nothing_to_resume(run))
        if not resume and (names or content):
            raise UsageError(f"{store.url}: this run exists; give another --run_name, or continue it with --resume")
        if content is None:
            return
        if (theirs := _run_id(content)) is None:
            raise UsageError(f"{store.url}/run.json: is damaged; copy the run.json of the run there, or leave --checkpoint_store out")
        if not (run / "run.json").exists():
            run.mkdir(parents=True, exist_ok=True)
            write_atomically(run / "run.json", content)
        elif theirs != (ours := _run_id((run / "run.json").read_bytes())):
            raise UsageError(f"{store.url}: is another run than {run}: run_id is {theirs}, not {ours}; give another --run_name")
    except StoreError as reason:
        if not here:
            fix = "correct the URL, set the backend's credentials (AWS_ACCESS_KEY_ID for s3), create the bucket, or leave the flag out"
            raise UsageError(f"--checkpoint_store {reason}; {fix}") from None


def _run_id(content: bytes) -> Any:
    try:
        return json.loads(content)["run_id"]
    except (ValueError, KeyError, TypeError):
        return None


def within(seconds: float, url: str, ask: Callable[[], Any]) -> Any:
    """Return the result of `ask`. Raises its error, or StoreError if it takes longer than `seconds`."""
    answer: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as reason:
            answer.set_exception(reason)

    threading.Thread(target=run, name="store", daemon=True).start()  # never keeps the process alive, as an executor's thread would
    try:
        return answer.result(seconds)
    except futures.TimeoutError:
        raise StoreError(f"{url}: has not answered for {seconds:.0f} s") from None


class Uploads:
    """Uploads the checkpoints of a run in a thread beside training, one at a time. Only for global rank 0.

    A checkpoint that is completed during another's upload waits, until a newer one replaces it. A failure is one line in the log.

    Args:
        run: the folder of the run.
        keep: how many of the newest checkpoints to keep in the store, in addition to the best by validation loss.
        run_id: the id in `run.json`.
        log: writes one line to the log.
    """

    def __init__(self, store: CheckpointStore, run: Path, keep: int, run_id: str | None, log: Callable[[str], None]):
        self.store, self.run, self.keep, self.run_id, self._log = store, run, keep, run_id, log
        self._waiting: Path | None = None
        self._current: Path | None = None
        self._loaded: Path | None = None
        self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)  # never keeps the process alive

    def start(self, loaded: Path | None = None) -> None:
        """Upload the run's files, which shows at the start whether the store can be written, then wait for checkpoints.

        loaded: the checkpoint from which the run continues. It is uploaded if the store lacks it, because an earlier upload failed.
        """
        self._waiting = self._loaded = loaded
        self._thread.start()

    def submit(self, checkpoint: Path) -> None:
        """Upload `checkpoint` when the current upload has ended. Does not wait."""
        with self._changed:
            replaced, self._waiting = self._waiting, checkpoint
            self._changed.notify_all()
        if replaced:
            self._log(f"the upload of {replaced.name} is left out: {checkpoint.name} is newer, and the upload before it has not ended yet")

    def uses(self, checkpoint: Path) -> bool:
        """Whether `checkpoint` is being uploaded, so that it must stay."""
        return checkpoint == self._current

    def finish(self, poll: Callable[[], int]) -> bool:
        """Wait until everything is uploaded, for `STOPPED_SECONDS` at most once `poll` returns a signal. A line says what is given up.

        Returns whether nothing was given up.
        """
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        start = time.monotonic()
        deadline = start + LAST_UPLOAD_SECONDS
        while self._thread.is_alive():
            self._thread.join(0.1)
            if poll():
                deadline, poll = min(deadline, time.monotonic() + STOPPED_SECONDS), lambda: 0
            if time.monotonic() > deadline:
                what = f"the upload of {pending.name}" if (pending := self._waiting or self._current) else "the last upload"
                waited = time.monotonic() - start
                self._log(f"warning: {what} to {self.store.url} was given up after {waited:.0f} s; it is in {self.run}")
                return False
        return True

    # --- in the thread --------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        works = self._attempt("run.json", self._upload_run_files)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                self._current, self._waiting = self._waiting, None
            if not (checkpoint := self._current):
                break
            works = self._attempt(checkpoint.name, functools.partial(self._upload, checkpoint))
            self._current = None
        if works:
            self._attempt("run.json", self._upload_run_files)

    def _attempt(self, name: str, upload: Callable[[], None]) -> bool:
        try:
            upload()
            return True
        except Exception as reason:
            with contextlib.suppress(BaseException):  # of a full disk, on which training ends by itself, or of a log that is closed
                self._log(f"warning: {name} was not uploaded, training continues: {one_line(reason, 400)}")
            return False

    def _upload_run_files(self) -> None:
        if (theirs := _run_id(self.store.read("run.json") or b"")) not in (None, self.run_id):  # both were started at the same time
            fix = "give another --run_name, or another --checkpoint_store"
            raise StoreError(f"{self.store.url}: is another run's: run_id is {theirs}, not {self.run_id}; {fix}")
        for name in RUN_FILES:
            if (file := self.run / name).exists():
                self.store.write(name, file.read_bytes())

    def _upload(self, checkpoint: Path) -> None:
        start = time.monotonic()
        loaded, self._loaded = self._loaded, None
        if checkpoint == loaded and self.store.read(f"{checkpoint.name}/{STATE_FILE}") == (checkpoint / STATE_FILE).read_bytes():
            return
        self._upload_run_files()
        try:
            self.store.upload(checkpoint)
        except StoreError:  # the store may be full: make room for the next one
            with contextlib.suppress(StoreError):
                self.store.remove(checkpoint.name)
            raise
        self._log(f"{checkpoint.name} was uploaded to {self.store.url} in {time.monotonic() - start:.1f} s")
        try:
            self._prune(checkpoint)
        except StoreError as reason:  # the new checkpoint is complete all the same
            self._log(f"warning: older checkpoints could not be removed from the store: {reason}")

    def _prune(self, newest: Path) -> None:
        """Remove this run's checkpoints except the newest `keep`, the best, and what is newer than `newest`; and incomplete ones."""
        names = [name for name in self.store.checkpoints() if checkpoint_step(name) <= checkpoint_step(newest.name)]
        states = {name: self.store.state(name) for name in names}
        own = {name: state.get("val_loss") for name, state in states.items() if state and state.get("run_id") == self.run_id}
        for name in (*(name for name in names if states[name] is None), *outdated(own, self.keep)):
            self.store.remove(name)
