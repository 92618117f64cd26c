"""Reads the records of one file of any format, each with its place in the file for error messages.

    .txt .md .py                    the file is one document
    .jsonl                          each line is an object; its text is in the text column
    .json                           consecutive objects, or one array of objects
    .csv                            a row is a record; the first row names the columns
    .parquet                        a row is a record

All but .parquet may be compressed: .gz or .zst follows. Only one record is in memory at a time, and of a .parquet file one page. The
size of a record is limited (`Problems.max_record`) and checked before the record is read whole, since a small compressed file can hold a
record of any size. Text files have no limit: one above LARGE becomes a `LargeText`, which is read in blocks.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import zstandard

from data_pipeline.errors import DataError, one_line

PLAIN = (".txt", ".md", ".py")
TABLES = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSED = (".gz", ".zst")
SUFFIXES = (*PLAIN, *(name + end for name in (*PLAIN, ".jsonl", ".json", ".csv") for end in COMPRESSED), *TABLES)
#: Text files up to this size, in bytes, are read at once.
LARGE = 4 * 2**20
BLOCK = 2**20
# Bytes of a .zst that are decompressed at once: four bytes can decompress to 128 KiB, so this is up to 32 MiB.
_COMPRESSED_BLOCK = 1024
#: Largest record, in MiB. Parsed JSON can take 24 times as much memory: `{},` becomes an object of 72 bytes.
MAX_RECORD_MIB = 16
#: Values that writers put on a page of a Parquet file, at most, if these are longer than 1 KiB on average.
PAGE_VALUES = 1024
#: Largest page of a Parquet file, in records of the largest size.
PAGE_RECORDS = 16
#: Rows of a Parquet file that are decoded at once, unless they are large.
PARQUET_ROWS = 64
#: How many bad records of a kind are named.
CASES = 3
REST_LOST = "; the rest of this file is lost"
_BLANK = re.compile(r"[ \t\r\n]*")


class RecordTooLarge(ValueError):
    """A record is larger than the limit; its end has not been read."""


class Problems:
    """What to do with bad records: stop at the first, or count all of them and describe the first few.

    `max_record` is the size of the largest good record, in bytes. `counts` and `cases` hold the number and the first few descriptions of
    each kind, since the last call of `start`.
    """

    def __init__(self, on_error: str, max_record: int = MAX_RECORD_MIB * 2**20):
        self.on_error, self.max_record = on_error, max_record
        self.start()

    def start(self) -> None:
        """Begin a new pass over the sources."""
        self.counts: Counter[str] = Counter()
        self.cases: dict[str, list[str]] = {}

    def __call__(self, kind: str, place: str, detail: str = "") -> None:
        """Report a bad record of `kind` at `place`.

        Raises:
            DataError: with `--on_error stop`.
        """
        line = f"{place}: {kind}" + (f" ({detail})" if detail else "")
        if self.on_error == "stop":
            raise DataError(f"{line}; fix it, or leave out such records with --on_error skip")
        self.count(kind, line)

    def count(self, kind: str, line: str) -> None:
        """Count something that is left out, for any --on_error; `line` describes what and where."""
        self.counts[kind] += 1
        if len(self.cases.setdefault(kind, [])) < CASES:
            self.cases[kind].append(line)

    def too_large(self, place: str, rest: str = "") -> None:
        """Report a record above `max_record`."""
        self("record too large", place, f"above the {self.max_record / 2**20:g} MiB of --max_record_mib{rest}")


class LargeText(NamedTuple):
    """A document of more than LARGE bytes: its size and hash, and its text in blocks."""

    file: Path
    n_bytes: int
    sha256: bytes

    def blocks(self) -> Iterator[str]:
        """The text, in parts of about BLOCK bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        with _opened(self.file) as stream:
            while data := stream.read(BLOCK):
                yield decoder.decode(data)


def records(file: Path, text_column: str, problems: Problems, on_read: Callable[[int], None]) -> Iterator[tuple[str, str | LargeText]]:
    """Yields (place, text) of each good record.

    Args:
        on_read: is called with the number of bytes of the file that have been read.

    Raises:
        DataError: the file cannot be read; or, with `--on_error stop`, a record is bad.
    """
    kind = suffix_of(file)
    try:
        if kind == ".parquet":
            yield from _parquet(file, text_column, problems, on_read)
            return
        with _opened(file, on_read) as stream:
            if kind.startswith(PLAIN):
                yield from _plain(file, stream, problems)
            elif kind.startswith(".jsonl"):
                yield from _json_lines(file, stream, text_column, problems)
            elif kind.startswith(".json"):
                yield from _json(file, stream, text_column, problems)
            else:
                yield from _csv(file, stream, text_column, problems)
    except (EOFError, gzip.BadGzipFile, zlib.error) as reason:
        problems("compressed file damaged", str(file), one_line(reason))
    except OSError as reason:
        raise DataError(f"--source: {file} cannot be read ({reason.strerror or reason}); fix that, or move it away") from None


def suffix_of(file: Path) -> str:
    """The one of SUFFIXES that the file's name ends in, or ""."""
    return next((suffix for suffix in SUFFIXES if file.name.endswith(suffix)), "")  # no suffix is the end of another


class _Monitored(io.RawIOBase):
    """A file that reports after each read how many bytes have been read."""

    def __init__(self, file: BinaryIO, on_read: Callable[[int], None]):
        self.file, self.on_read, self.done = file, on_read, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self.file.readinto(buffer)  # type: ignore[attr-defined]
        self.done += n
        self.on_read(self.done)
        return int(n)

    def close(self) -> None:
        self.file.close()
        super().close()


@contextmanager
def _opened(file: Path, on_read: Callable[[int], None] = lambda done: None) -> Iterator[BinaryIO]:
    """The bytes of `file`, decompressed."""
    with io.BufferedReader(_Monitored(open(file, "rb", buffering=0), on_read), BLOCK) as raw:
        if file.name.endswith(".gz"):
            with gzip.open(raw) as stream:
                yield stream  # type: ignore[misc]
        elif file.name.endswith(".zst"):
            yield io.BufferedReader(_Frames(raw), BLOCK)
        else:
            yield raw


class _Frames(io.RawIOBase):
    """The decompressed frames of a .zst file. zstandard's own reader does not notice a file that ends within a frame."""

    def __init__(self, raw: BinaryIO):
        self._raw, self._decompressor = raw, zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._compressed = self._text = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            self._compressed = self._compressed or self._raw.read(_COMPRESSED_BLOCK)
            if not self._compressed and self._frame is None:
                return 0
            if not self._compressed:
                raise EOFError("the file ends within a frame")
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                self._text = self._frame.decompress(self._compressed)
            except zstandard.ZstdError as reason:
                raise zlib.error(one_line(reason)) from None
            self._compressed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        n = min(len(buffer), len(self._text))
        buffer[:n], self._text = self._text[:n], self._text[n:]
        return n


def _plain(file: Path, stream: BinaryIO, problems: Problems) -> Iterator[tuple[str, str | LargeText]]:
    data = stream.read(LARGE + 1)
    try:
        if len(data) <= LARGE:
            yield str(file), data.decode("utf-8")  # not read_text: line ends stay as they are
            return
    except UnicodeDecodeError as reason:
        _not_utf8(file, 1, reason, problems)
        return
    decoder, sha256, n_bytes, line = codecs.getincrementaldecoder("utf-8")(), hashlib.sha256(), 0, 1
    while data:
        try:
            decoder.decode(data)
        except UnicodeDecodeError as reason:
            _not_utf8(file, line, reason, problems)
            return
        sha256.update(data)
        n_bytes, line = n_bytes + len(data), line + data.count(b"\n")
        data = stream.read(BLOCK)
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        problems("not UTF-8", f"{file}:{line}", "the last character is cut")
        return
    yield str(file), LargeText(file, n_bytes, sha256.digest())


def _not_utf8(file: Path, line: int, reason: UnicodeDecodeError, problems: Problems) -> None:
    """Report an invalid byte in data that begins at `line`."""
    line += reason.object.count(b"\n", 0, reason.start)
    problems("not UTF-8", f"{file}:{line}", f"byte 0x{reason.object[reason.start]:02x}")


def _json_lines(file: Path, stream: BinaryIO, text_column: str, problems: Problems) -> Iterator[tuple[str, str]]:
    limit = problems.max_record
    for number in count(1):
        line = stream.readline(limit + 1)
        if not line:
            return
        place = f"{file}:{number}"
        if len(line) > limit:
            problems.too_large(place)
            while line and not line.endswith(b"\n"):
                line = stream.readline(BLOCK)
            continue
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as reason:
            problems("not UTF-8", place, f"byte 0x{line[reason.start]:02x}")
        except (ValueError, RecursionError) as reason:
            problems("broken JSON line", place, one_line(reason))
        else:
            yield from text_of(record, text_column, place, problems)


def _json(file: Path, stream: BinaryIO, text_column: str, problems: Problems) -> Iterator[tuple[str, str]]:
    start = stream.peek(BLOCK)  # type: ignore[attr-defined]
    array = start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not array and _is_json_lines(start):
        yield from _json_lines(file, stream, text_column, problems)
        return
    values = _JsonValues(stream, problems.max_record).values(array)
    for number in count(1):
        place = f"{file}: record {number}"
        try:
            record = next(values)
        except StopIteration:
            return
        except RecordTooLarge:
            problems.too_large(place, REST_LOST)
            return
        except (ValueError, RecursionError) as reason:
            problems("broken JSON", place, f"{one_line(reason)}{REST_LOST}")
            return
        yield from text_of(record, text_column, place, problems)


class _JsonValues:
    """Reads JSON values of at most `limit` characters from a stream, which is never in memory as a whole."""

    def __init__(self, stream: BinaryIO, limit: int):
        self._limit = limit
        # Invalid UTF-8 becomes lone surrogates, which `text_of` reports for the one record; a strict decoder would fail for the whole file.
        self._characters = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._position = "", 0

    def values(self, array: bool) -> Iterator[Any]:
        """Yields the elements of one array, or consecutive values.

        Raises:
            RecordTooLarge: the next value has more characters than the limit.
            ValueError, RecursionError: the JSON is invalid.
        """
        if not array:
            while self._next():
                yield self._value()
            return
        self._next()
        self._position += 1  # the bracket
        first = True
        while (mark := self._next()) != "]":
            if not first and mark != ",":
                raise ValueError(f"{mark!r} instead of a comma or the end of the array")
            self._position += not first
            first = False
            yield self._value()
        self._position += 1
        if mark := self._next():
            raise ValueError(f"{mark!r} after the end of the array")

    def _next(self) -> str:
        """The next non-blank character, or "" at the end."""
        while True:
            self._position = _BLANK.match(self._text, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._text) or not self._more():
                return self._text[self._position : self._position + 1]

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._decode(self._text, self._position)
            except json.JSONDecodeError as reason:
                # Invalid; or incomplete, which is reported near the end of the text read so far, or at an opening quote.
                incomplete = reason.pos > len(self._text) - 16 or reason.msg.startswith("Unterminated string")
                if not (incomplete and self._more()):
                    raise ValueError(reason.msg) from None
            else:
                if end < len(self._text) or not self._more():  # 12 may be the beginning of 123
                    self._position = end
                    return value

    def _more(self) -> bool:
        """Double the text in memory, up to the limit; False at the end of the stream."""
        held = len(self._text) - self._position
        if held > self._limit:
            raise RecordTooLarge
        more = self._characters.read(min(max(BLOCK, held), self._limit + 1 - held))
        if more:
            self._text, self._position = self._text[self._position :] + more, 0
        return bool(more)


def _is_json_lines(start: bytes) -> bool:
    """Whether a file with this beginning is JSON lines, which are often named .json."""
    try:
        return isinstance(json.loads(start.lstrip().partition(b"\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


class _CsvLines:
    """The lines of a .csv for `csv.reader`; `left` is the number of characters that the current row may still have."""

    def __init__(self, stream: BinaryIO):
        # Invalid UTF-8 becomes lone surrogates, which `text_of` reports for the one record; a strict decoder would fail for the whole file.
        self._characters = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        self.left = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._characters.readline(self.left + 1)
        if not line:
            raise StopIteration
        if len(line) > self.left:
            raise RecordTooLarge
        self.left -= len(line)
        return line


def _csv(file: Path, stream: BinaryIO, text_column: str, problems: Problems) -> Iterator[tuple[str, str]]:
    csv.field_size_limit(sys.maxsize)
    lines = _CsvLines(stream)
    # Strict: otherwise, an unclosed quote silently turns the rest of the file into one text.
    rows = csv.reader(lines, strict=True)
    columns: list[str] | None = None
    while True:
        line = rows.line_num + 1
        lines.left = problems.max_record
        try:
            row = next(rows)
        except StopIteration:
            return
        except RecordTooLarge:  # possibly within quotes, so the start of the next row is unknown
            problems.too_large(f"{file}:{line}", REST_LOST)
            return
        except csv.Error as reason:
            problems("broken CSV", f"{file}:{rows.line_num}", one_line(reason))
            continue
        if columns is None:
            columns = row
            if not _has_column(file, columns, text_column, problems):
                return
        elif row:
            yield from text_of(dict(zip(columns, row, strict=False)), text_column, f"{file}:{line}", problems)


def _parquet(file: Path, text_column: str, problems: Problems, on_read: Callable[[int], None]) -> Iterator[tuple[str, str]]:
    # Imported here: it takes a quarter of a second, and only .parquet files need it.
    import pyarrow
    from pyarrow import parquet

    size, number = file.stat().st_size, 0
    try:
        with parquet.ParquetFile(file, memory_map=False, pre_buffer=False, buffer_size=BLOCK) as table:
            if not _has_column(file, table.schema_arrow.names, text_column, problems):
                return
            if pyarrow.types.is_nested(kind := table.schema_arrow.field(text_column).type):
                problems(f"text column {text_column!r} is not text", str(file), f"it is a {kind}; none of its records is used")
                return
            rows, (page, mean) = table.metadata.num_rows, _largest_page(table.metadata, text_column)
            if page > PAGE_RECORDS * problems.max_record:
                limit = f"{PAGE_RECORDS} times the {problems.max_record / 2**20:g} MiB of --max_record_mib"
                detail = f"a row group has pages of about {page / 2**20:,.0f} MiB, above {limit}; none of its records is used"
                problems("record too large", str(file), detail)
                return
            n = min(PARQUET_ROWS, max(1, problems.max_record // max(1, mean)))
            for batch in table.iter_batches(batch_size=n, columns=[text_column], use_threads=False):
                column = batch.column(0)
                for place in range(len(column)):
                    number += 1
                    try:
                        record = {text_column: column[place].as_py()}
                    except UnicodeDecodeError:
                        problems("not UTF-8", f"{file}: row {number}")
                        continue
                    yield from text_of(record, text_column, f"{file}: row {number}", problems)
                on_read(size * number // rows)
    except DataError:
        raise
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        LookupError,
        ArithmeticError,
        MemoryError,
    ) as reason:  # pyarrow raises all of these
        if isinstance(reason, OSError) and reason.errno:
            raise
        problems("broken Parquet file", f"{file}: row {number + 1}", f"{one_line(reason)}{REST_LOST}")


def _largest_page(metadata: Any, column: str) -> tuple[int, int]:
    """The sizes of the largest page and of the largest mean record of a column, in bytes, estimated from the sizes of its row groups.

    pyarrow decompresses one page at a time, but does not show its size. A row group has at least one page, and a page at most about
    PAGE_VALUES long values.
    """
    page = mean = 0
    number = next(number for number in range(metadata.num_columns) if metadata.schema.column(number).path == column)
    for group in range(metadata.num_row_groups):
        chunk = metadata.row_group(group).column(number)
        of_group = chunk.total_uncompressed_size // max(1, chunk.num_values)
        page, mean = max(page, min(chunk.total_uncompressed_size, PAGE_VALUES * of_group)), max(mean, of_group)
    return page, mean


def _has_column(file: Path, columns: list[str], text_column: str, problems: Problems) -> bool:
    if text_column not in columns:
        has = f"it has {', '.join(map(repr, columns[:20]))}: name one with --text_column"
        problems(f"no text column {text_column!r}", str(file), f"{has}; none of its records is used")
    return text_column in columns


def text_of(record: object, text_column: str, place: str, problems: Problems) -> Iterator[tuple[str, str]]:
    """Yields (place, text) of a good record, and reports a bad one."""
    if not isinstance(record, dict) or record.get(text_column) is None:
        has = f"it has {', '.join(map(repr, list(record)[:8]))}" if isinstance(record, dict) else f"it is a {type(record).__name__}"
        problems(f"no text column {text_column!r}", place, has)
        return
    text = record[text_column]
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as reason:
            problems("not UTF-8", place, f"byte 0x{reason.object[reason.start]:02x}")
            return
    if not isinstance(text, str):
        problems(f"text column {text_column!r} is not text", place, f"it is a {type(text).__name__}")
        return
    try:
        n_bytes = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        problems("not UTF-8", place, "an invalid byte, or half of a surrogate pair")
        return
    if n_bytes > problems.max_record:
        problems.too_large(place)
        return
    yield place, text
