"""A user's mistake, and how a command ends on it: one line, exit code 2, printed by one process of a host.

Every command's `main` is run through `run_command`, which maps what can happen to the exit codes that all commands share:
0 done, 1 failed, 2 the user's mistake, 128 + n stopped by signal n (130 Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from data_pipeline.errors import DataError

#: Errors of the operating system about a path that somebody gave.
_OF_A_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
#: The longest message, and how much stays of the beginning (where and what) and of the end (the fix) of a longer one, in characters.
MESSAGE_LENGTH, MESSAGE_START, MESSAGE_END = 850, 500, 250
#: How long a rank that may not speak leaves the word to local rank 0 of its host.
SPEAKER_PATIENCE_SECONDS = 20.0


class UsageError(ValueError):
    """A user's mistake: one line for each fault, which says what is wrong, where, what is allowed, and the fix."""

    def __init__(self, *faults: str):
        self.faults = tuple(one_line(fault) for fault in faults)
        super().__init__("\n".join(self.faults))


def one_line(text: str) -> str:
    """`text` as one line of bounded length: what does not print is escaped, and the middle of a long text is left out.

    A key, a value or a file's name in it may hold line breaks, or a megabyte.
    """
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    if len(text) <= MESSAGE_LENGTH:
        return text
    left_out = len(text) - MESSAGE_START - MESSAGE_END
    return f"{text[:MESSAGE_START]}... ({left_out:,} characters left out) ...{text[-MESSAGE_END:]}"


class TrainingFailed(Exception):
    """The run cannot go on, by no fault of its command line: one line, exit code 1."""


def nearest(name: object, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest of `allowed`, or an empty string when nothing is close."""
    meant = nearest_name(str(name), allowed)
    return f"; did you mean '{meant}'?" if meant else ""


def nearest_name(name: str, allowed: Iterable[str]) -> str | None:
    """The closest of `allowed`, or None when nothing is close."""
    folded = {item.lower(): item for item in allowed}
    # One wrong letter of two leaves a similarity of a half.
    matches = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6 if len(name) > 3 else 0.5)
    return folded[matches[0]] if matches else None


def is_speaker() -> bool:
    """Whether this process speaks for its host: local rank 0, or a process that no launcher started."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def say(line: str, file: TextIO | None = None) -> None:
    """Print one line from local rank 0 only."""
    if is_speaker():
        stream = file or sys.stdout
        print(_encodable(line, stream), file=stream, flush=True)


def _encodable(line: str, stream: TextIO) -> str:
    encoding = stream.encoding or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)


def _complain(*faults: str) -> None:
    """Print each fault as a line on standard error. A standard error that nobody reads changes no exit code.

    A launcher ends all ranks when the first one ends, so a rank that may not speak first leaves the word to local rank 0, which comes to
    the same mistake and ends the job. When that takes too long, or the mistake is this rank's alone, it speaks itself.
    """
    if not is_speaker():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's, when local rank 0 has spoken
        time.sleep(SPEAKER_PATIENCE_SECONDS)
    with contextlib.suppress(OSError):
        for fault in faults:
            print(_encodable(f"error: {one_line(fault)}", sys.stderr), file=sys.stderr, flush=True)


def open_standard_streams() -> None:
    """Open standard input, output and error that are closed (`>&-`) as /dev/null; else the next file that is opened takes their place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def outlast_readers() -> None:
    """From now on drop what standard output and error cannot take: their reader has gone (`| head`), or their disk is full."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False)), stream.encoding, stream.errors, line_buffering=True
        )
        for stream in (sys.stdout, sys.stderr)
    )


class _Lasting(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def run_command(main: Callable[[], int | None]) -> None:
    """Run `main` and leave the process with the exit code that its outcome has; a user's mistake leaves no traceback."""
    open_standard_streams()
    try:
        code = main() or 0
    except (UsageError, DataError) as mistake:
        _complain(*(getattr(mistake, "faults", None) or (str(mistake),)))
        code = 2
    except TrainingFailed as reason:
        _complain(str(reason))
        code = 1
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush goes nowhere
        code = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        code = 130
    except OSError as reason:  # a path of the user's that cannot be gone into; whatever else fails is a fault of ours, with its traceback
        if reason.errno not in _OF_A_PATH or reason.filename is None:
            raise
        _complain(f"{str(reason.filename)[:200]}: {reason.strerror}; give another path, or mend that")
        code = 2
    sys.exit(code)
