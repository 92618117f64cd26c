"""A user's mistake, and how a command ends on it: one line, exit code 2, printed by one process of a host.

Every command's `main` is run through `run_command`, which maps what can happen to the exit codes that all commands share:
0 done, 1 failed, 2 the user's mistake, 128 + n stopped by signal n (130 Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from data_pipeline.errors import DataError

#: Errors of the operating system about a path that somebody gave.
_OF_A_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)


class UsageError(ValueError):
    """A user's mistake: one line for each fault, which says what is wrong, where, what is allowed, and the fix."""

    def __init__(self, *faults: str):
        self.faults = tuple(one_line(fault) for fault in faults)
        super().__init__("\n".join(self.faults))


def one_line(text: str) -> str:
    """`text` with everything escaped that does not print: a file's name or a key may hold a line break."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


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
        encoding = stream.encoding or "utf-8"
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def run_command(main: Callable[[], int | None]) -> None:
    """Run `main` and leave the process with the exit code that its outcome has; a user's mistake leaves no traceback."""
    try:
        code = main() or 0
    except (UsageError, DataError) as mistake:
        for fault in getattr(mistake, "faults", None) or (one_line(str(mistake)),):
            say(f"error: {fault}", sys.stderr)
        code = 2
    except TrainingFailed as reason:
        say(f"error: {one_line(str(reason))}", sys.stderr)
        code = 1
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush goes nowhere
        code = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        code = 130
    except OSError as reason:  # a path of the user's that cannot be gone into; whatever else fails is a fault of ours, with its traceback
        if reason.errno not in _OF_A_PATH or reason.filename is None:
            raise
        say(f"error: {one_line(str(reason.filename))[:200]}: {reason.strerror}; give another path, or mend that", sys.stderr)
        code = 2
    sys.exit(code)
