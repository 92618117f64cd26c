"""A mistake as an exception, the name that was meant, text that is safe to print on one line, and the standard streams."""

import difflib
import os
import sys
from collections.abc import Iterable
from typing import TextIO


class DataError(ValueError):
    """A user's mistake in one line: what and where, what is allowed, the fix. Commands print it and exit with code 2."""


def one_line(reason: BaseException, length: int = 200) -> str:
    """The message of another library's exception on one line of at most `length` characters, or its type if it has no message."""
    return " ".join(str(reason).split())[:length] or type(reason).__name__


def printable(text: str, allowed: str = "") -> str:
    """`text` with every non-printable character escaped, such as a terminal's control sequences, except those in `allowed`."""
    return "".join(c if c.isprintable() or c in allowed else c.encode("unicode_escape").decode() for c in text)


def nearest_name(name: str, allowed: Iterable[str]) -> str | None:
    """The closest of `allowed`, or None when nothing is close."""
    folded = {item.lower(): item for item in allowed}
    # With one wrong letter of two the similarity is 0.5.
    matches = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6 if len(name) > 3 else 0.5)
    return folded[matches[0]] if matches else None


def print_line(line: str, stream: TextIO) -> None:
    """Print a line; characters that the stream cannot encode, such as undecodable bytes of file names, are escaped."""
    encoding = stream.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def open_standard_streams() -> None:
    """Open standard input, output and error on /dev/null where they are closed (`>&-`), so that no other file gets their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - open as long as the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - open as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
