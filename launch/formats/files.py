"""Small files: read with a limit, written atomically."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_TEXT_BYTES = 2**26


def read_text(file: Path) -> str:
    """Return the text of a small file, such as a `run.json`.

    Raises:
        OSError: it is missing, not a regular file (reading a pipe may block forever), or larger than `MAX_TEXT_BYTES`.
        UnicodeDecodeError: it is not UTF-8.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    with open(file, "rb") as stream:
        content = stream.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
    return content.decode()


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a small file so that a reader, or a kill, sees the old or the new content and nothing in between."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
