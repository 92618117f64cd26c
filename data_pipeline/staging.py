"""A folder that appears at its place whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from data_pipeline.errors import DataError


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yields an empty folder beside `out`; it is on the disk and renamed to `out` when the block ends well, removed when not.

    A process that is killed leaves `.NAME.partial` behind, never anything at `out`, and the next run removes it. The lock
    file `.NAME.lock` tells a dead process from a living one, which a process id in the name could not across hosts.
    DataError when the folder cannot be made, or another process is at work on the same `out`.
    """
    created = [folder for folder in out.parents if not folder.exists()]  # innermost first
    partial = out.parent / f".{out.name}.partial"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(out.parent / f".{out.name}.lock", out)
    except OSError as error:
        raise DataError(f"--out {out}: cannot write to {out.parent} ({error.strerror}); choose a folder that you may write to") from None
    done = False
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            _fsync(file)
        _fsync(partial)
        try:
            os.rename(partial, out)
        except OSError:
            if out.exists():
                raise DataError(f"--out {out}: appeared in the meantime, nothing was overwritten; choose another --out") from None
            raise
        done = True
        _fsync(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.unlink(lock.name)
        lock.close()
        if not done:
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


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
