"""The exception for a user's mistake, and text made safe to print on one line of a terminal."""

from typing import TextIO


class DataError(ValueError):
    """A user's mistake in one line: what and where, what is allowed, the fix. Commands print it and exit with code 2."""


def one_line(reason: BaseException, length: int = 200) -> str:
    """The message of another library's exception on one line of at most `length` characters, or its type if it has no message."""
    return " ".join(str(reason).split())[:length] or type(reason).__name__


def printable(text: str, allowed: str = "") -> str:
    """`text` with every non-printable character escaped, such as a terminal's control sequences, except those in `allowed`."""
    return "".join(c if c.isprintable() or c in allowed else c.encode("unicode_escape").decode() for c in text)


def print_line(line: str, stream: TextIO) -> None:
    """Print a line; characters that the stream cannot encode, such as undecodable bytes of file names, are escaped."""
    encoding = stream.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
