"""A folder that appears at its place whole or not at all, and that an interrupted run can go on filling."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from data_pipeline.errors import DataError


@contextmanager
def staged_folder(out: Path, worth_keeping: Callable[[Path], bool], resume: bool) -> Iterator[Path]:
    """Yields a folder beside `out`; it is on the disk and renamed to `out` when the block ends well.

    Otherwise, by an error or a kill, `.NAME.partial` stays if it is `worth_keeping`, for a run with `resume`, which is given it as it is;
    there is never anything at `out`. The lock file `.NAME.lock` tells a dead process from a living one, which a process id in the name
    could not across hosts.

    Raises:
        DataError: the folder cannot be made; another process is at work on the same `out`; or an interrupted run left something worth
            keeping, and `resume` is not given.
    """
    created = [folder for folder in out.parents if not folder.exists()]  # innermost first
    partial = out.parent / f".{out.name}.partial"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(out.parent / f".{out.name}.lock", out)
    except OSError as error:
        raise DataError(f"--out {out}: cannot write to {out.parent} ({error.strerror}); choose a folder that you may write to") from None
    try:
        keep = partial.exists() and worth_keeping(partial)
        if keep and not resume:
            raise DataError(f"--out {out}: an interrupted run left its work in {partial}; go on with it by --resume, or remove that folder")
        if partial.exists() and not keep:
            shutil.rmtree(partial)
        try:
            partial.mkdir(exist_ok=True)
            yield partial
            for file in partial.iterdir():
                fsync(file)
            fsync(partial)
            try:
                os.rename(partial, out)
            except OSError:
                if out.exists():
                    raise DataError(f"--out {out}: appeared in the meantime, nothing was overwritten; choose another --out") from None
                raise
            fsync(out.parent)
        finally:
            if partial.exists() and not worth_keeping(partial):
                shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.unlink(lock.name)
        lock.close()
        if not out.exists() and not partial.exists():
            for folder in created:
                with suppress(OSError):  # someone else may have begun to use it
                    folder.rmdir()


def _lock(path: Path, out: Path) -> TextIO:
    """The open and locked file `path`. The lock dies with its process, however that ends."""
    while True:
        file = open(path, "w")  # noqa: SIM115 (the caller closes it: closing is what unlocks)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(f"--out {out}: another process is preparing it; wait for it, or choose another --out") from None
        # Its holder may have unlinked the file between our open and our lock; then nobody else would see this lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


def fsync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
