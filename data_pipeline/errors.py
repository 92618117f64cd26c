"""What is meant for the user's eyes: the one exception, and text made fit for a line on a terminal."""

from typing import TextIO


class DataError(ValueError):
    """A user's mistake in one line: what and where, what is allowed, the fix. Commands print it and exit with 2."""


def one_line(reason: BaseException, length: int = 200) -> str:
    """What another library's exception says, in one line of at most `length` characters; its type where it says nothing."""
    return " ".join(str(reason).split())[:length] or type(reason).__name__


def print_line(line: str, stream: TextIO) -> None:
    """Print, whatever bytes the names of files are made of and whatever the stream can show."""
    encoding = stream.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
