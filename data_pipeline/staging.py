"""Files and folders that get their final names only when they are complete. An interrupted folder can be resumed."""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from data_pipeline.errors import DataError


@contextmanager
def staged_folder(out: Path, worth_keeping: Callable[[Path], bool], resume: bool, flag: str = "--out") -> Iterator[Path]:
    """Yields the folder `.NAME.partial` beside `out`, and renames it to `out`, synchronized to disk, when the block succeeds.

    If the block fails or is killed, nothing is at `out`. The partial folder stays if it is `worth_keeping`, and a later run with `resume`
    gets it as it is. A lock on the file `.NAME.lock` excludes other processes; it ends with its process, on any host.

    Args:
        flag: the one that names `out`, for messages.

    Raises:
        DataError: the folder cannot be created; another process prepares the same `out`; or an interrupted run left a folder worth keeping
            and `resume` is false.
    """
    partial = partial_folder(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(out.parent / f".{out.name}.lock", out, flag)
    except OSError as error:
        raise DataError(f"{flag} {out}: cannot write to {out.parent} ({error.strerror}); choose another, with flock") from None
    try:
        keep = partial.exists() and worth_keeping(partial)
        if keep and not resume:
            raise DataError(f"{flag} {out}: an interrupted run left its work in {partial}; continue with --resume, or remove that folder")
        if partial.exists() and not keep:
            shutil.rmtree(partial)
        try:
            partial.mkdir(exist_ok=True)
            yield partial
            for file in partial.iterdir():
                fsync(file)
            fsync(partial)
            os.rename(partial, out)  # fails if a non-empty folder is there by now
            fsync(out.parent)
        finally:
            if partial.exists() and not worth_keeping(partial):
                shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.unlink(lock.name)
        lock.close()


def remove_abandoned(folder: Path, worth_keeping: Callable[[Path], bool]) -> None:
    """Remove every partial folder in `folder` that a killed process left and that is not `worth_keeping`."""
    for file in folder.glob(".*.lock"):
        with suppress(OSError), open(file) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not worth_keeping(partial := file.with_suffix(".partial")):
                shutil.rmtree(partial, ignore_errors=True)
                file.unlink()


def partial_folder(out: Path) -> Path:
    """The folder that holds the corpus `out` while it is incomplete."""
    return out.parent / f".{out.name}.partial"


def _lock(path: Path, out: Path, flag: str) -> TextIO:
    """The open and locked file `path`. The lock ends with the process."""
    while True:
        file = open(path, "w")  # noqa: SIM115 (the caller closes the file to unlock it)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(f"{flag} {out}: another process is preparing it; wait for it, or choose another {flag}") from None
        # The previous holder may have unlinked the file after it was opened here; then no other process would see this lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a small file so that a reader, or a kill, sees the old or the new content and nothing in between."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what `write_atomically` leaves in `folder` if its process is killed."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink()


def require_regular(file: Path) -> None:
    """OSError unless `file` is a regular file. Opening a pipe, a socket or a device may wait for ever."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(file))


def fsync(path: Path) -> None:
    """Synchronize a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
