"""Users' mistakes, and how every command ends: one line, printed by one process of a host, and an exit code.

Every command runs its `main` through `run_command`, which sets the exit code: 0 done, 1 failed, 2 the user's mistake, 75 to be requeued
(`REQUEUE`), 128 + n stopped by signal n (130 Ctrl-C, 143 SIGTERM).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from data_pipeline.errors import DataError, nearest_name, open_standard_streams, printable
from recipes.registry import RecipeError

#: The exit code of a run that SIGUSR1 or SIGUSR2 has stopped: the batch system should start it again. EX_TEMPFAIL of sysexits.h.
REQUEUE = os.EX_TEMPFAIL
#: Errors of the operating system about a path that the user gave.
_PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
#: What gloo says when the process at the other end has ended.
_PEER_HAS_ENDED = ("Connection closed by peer", "Connection reset by peer")
#: Names that other projects use -> ours.
OTHER_NAMES = {"learning_rate": ("lr",), "batch_size": ("micro_batch_size", "global_batch_size")}
#: The longest message, in characters, and what is kept of a longer one: its start (where and what) and its end (the fix).
MESSAGE_LENGTH, MESSAGE_START, MESSAGE_END = 850, 500, 250
#: How long the other ranks of a host wait for local rank 0 to print the error.
OTHER_RANKS_WAIT_SECONDS = 20.0


class UsageError(ValueError):
    """A user's mistake. Each fault is one line: what is wrong, where, what is allowed, and the fix."""

    def __init__(self, *faults: str):
        self.faults = tuple(printable_line(fault) for fault in faults)
        super().__init__("\n".join(self.faults))


def printable_line(text: str) -> str:
    """`text` on one line of bounded length: escapes what is not printable, and leaves out the middle of a long text."""
    text = printable(text)
    return text if len(text) <= MESSAGE_LENGTH else f"{text[:MESSAGE_START]} ... {text[-MESSAGE_END:]}"


class TrainingFailed(Exception):
    """The run cannot continue, though its configuration is valid: one line, exit code 1."""


class NoCheckpoint(UsageError):
    """No checkpoint can be used."""


class DownloadFailed(TrainingFailed):
    """A checkpoint could not be downloaded from the store; nothing was loaded."""


def nearest(name: object, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` for those of `allowed` that `OTHER_NAMES` has, or the closest; an empty string when nothing is close."""
    name, allowed = str(name), [*allowed]
    meant = "' or '".join(one for one in allowed if one.lstrip("-") in OTHER_NAMES.get(name.lstrip("-"), ())) or nearest_name(name, allowed)
    return f"; did you mean '{meant}'?" if meant else ""


def is_local_rank_0() -> bool:
    """Whether this process prints for its host: local rank 0, or a process without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def print_once(text: str, file: TextIO | None = None) -> None:
    """Print `text` on local rank 0 only, by default to standard output."""
    if is_local_rank_0():
        print(text, file=file or sys.stdout, flush=True)


def bar_options() -> dict[str, Any] | None:
    """The width of a progress bar on standard error, as arguments of tqdm; None if it is no terminal, or one of unknown width."""
    if not sys.stderr.isatty():
        return None
    with contextlib.suppress(OSError):
        if os.get_terminal_size(sys.stderr.fileno()).columns:
            return {"dynamic_ncols": True}
    columns = os.environ.get("COLUMNS", "")
    return {"ncols": int(columns)} if columns.isdecimal() and int(columns) else None


def _print_errors(*faults: str) -> None:
    """Print each fault as a line on standard error, from local rank 0.

    The launcher ends all ranks when the first one ends. So the other ranks wait for local rank 0 to find the same mistake and end the job;
    they print only a mistake that it does not find.
    """
    if not is_local_rank_0():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher ends this rank after local rank 0
        time.sleep(OTHER_RANKS_WAIT_SECONDS)
    with contextlib.suppress(OSError):  # nobody reads standard error
        for fault in faults:
            print(f"error: {printable_line(fault)}", file=sys.stderr, flush=True)


def ignore_output_errors() -> None:
    """Continue when standard output or error cannot be written: the terminal was closed, a pipe has no reader, the disk is full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        file = io.BufferedWriter(_ForgivingFile(stream.fileno(), "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True))


class _ForgivingFile(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def run_command(main: Callable[[], int | None], end: Callable[[int], object] = sys.exit) -> None:
    """Run `main` and exit with the code of its outcome. A user's mistake is printed without a traceback.

    end: exits; `os._exit` skips the interpreter's shutdown, in which the threads of a rank may abort it.
    """
    open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main() or 0
    except (UsageError, DataError, RecipeError) as mistake:
        _print_errors(*(getattr(mistake, "faults", None) or (str(mistake),)))
        code = 2
    except TrainingFailed as reason:
        _print_errors(str(reason))
        code = 1
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        code = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        code = 130
    except OSError as reason:  # other errors are bugs and keep their traceback
        if reason.errno in (errno.ENOSPC, errno.EDQUOT):
            _print_errors(f"{str(reason.filename or 'the output')[:200]}: {reason.strerror}; free some space, and repeat the command")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
            code = 1
        elif reason.errno in _PATH_ERRORS and reason.filename is not None:
            _print_errors(f"{str(reason.filename)[:200]}: {reason.strerror}; fix that, or give another path")
            code = 2
        else:
            raise
    except RuntimeError as reason:  # of gloo
        if not any(ending in str(reason) for ending in _PEER_HAS_ENDED):
            raise
        _print_errors("another rank has ended; its output has the reason")
        code = 1
    except SystemExit as done:  # its line is printed
        if not isinstance(done.code, int | None):
            raise
        code = done.code or 0
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    end(code)
