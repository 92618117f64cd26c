"""Records of one file, whatever its format, each with the place that a message names.

    .txt .md .py                    the file is one document
    .jsonl                          a line is an object; its text is in the text column
    .json                           objects one after the other, or one array of them
    .csv                            a line is a row under the names of the first
    .parquet                        a row of a column file

All but .parquet may be compressed: .gz or .zst follows. Only the record at hand is in memory, and of a .parquet one page. A record is
limited (`Problems.max_record`) and a page to PAGE_RECORDS times as much: both are checked before they are read, since a small
compressed file can hold a record of any size. A plain file has no limit: above LARGE it is handed out as a `LargeText`, which is read
again in blocks.
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

from data_pipeline.errors import DataError, one_line
from data_pipeline.parquet_pages import largest_page

PLAIN = (".txt", ".md", ".py")
TABLES = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSED = (".gz", ".zst")
SUFFIXES = (*PLAIN, *(name + end for name in (*PLAIN, ".jsonl", ".json", ".csv") for end in COMPRESSED), *TABLES)
#: Bytes of a plain file that are still read at once.
LARGE = 4 * 2**20
BLOCK = 2**20
# Bytes of a .zst that are decompressed at once: four of them can stand for 128 KiB of one repeated byte, so this is up to 32 MiB.
_COMPRESSED_BLOCK = 1024
#: Largest record, in MiB. Parsed JSON can take 24 times as much memory: `{},` becomes an object of 72 bytes.
MAX_RECORD_MIB = 16
#: Largest page of a Parquet file, in records of the largest size. Writers put up to 1,024 values on a page, however long they are.
PAGE_RECORDS = 16
#: Rows of a Parquet file that are decoded at once, where they are not large.
PARQUET_ROWS = 64
#: How many bad records of a kind are named.
CASES = 3
REST_LOST = "; what follows in this file is lost"
_BLANK = re.compile(r"[ \t\r\n]*")


class RecordTooLarge(ValueError):
    """A record is larger than the limit; it has not been read to its end."""


class Problems:
    """What is done with a record that cannot be used: the first ends everything, or all are counted and the first few named.

    `max_record` is the largest record that can be used, in bytes. `counts` and `cases` are by kind, of the latest pass; `start` begins
    a pass.
    """

    def __init__(self, on_error: str, max_record: int = MAX_RECORD_MIB * 2**20):
        self.on_error, self.max_record = on_error, max_record
        self.start()

    def start(self) -> None:
        self.counts: Counter[str] = Counter()
        self.cases: dict[str, list[str]] = {}

    def __call__(self, kind: str, place: str, detail: str = "") -> None:
        """A bad record of `kind` at `place`.

        Raises:
            DataError: under `--on_error stop`.
        """
        line = f"{place}: {kind}" + (f" ({detail})" if detail else "")
        if self.on_error == "stop":
            raise DataError(f"{line}; mend it, or leave such records out with --on_error skip")
        self.count(kind, line)

    def count(self, kind: str, line: str) -> None:
        """Count something that is left out, whatever --on_error is; `line` says what and where."""
        self.counts[kind] += 1
        if len(self.cases.setdefault(kind, [])) < CASES:
            self.cases[kind].append(line)

    def too_large(self, place: str, rest: str = "") -> None:
        """A record above `max_record`. Raises as a call does."""
        self("record too large", place, f"above the {self.max_record / 2**20:g} MiB of --max_record_mib{rest}")


class LargeText(NamedTuple):
    """A document of more than LARGE bytes of UTF-8: its bytes are counted and hashed, its text is read in blocks."""

    file: Path
    n_bytes: int
    sha256: bytes

    def blocks(self) -> Iterator[str]:
        """The text, in parts of about BLOCK bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        with _opened(self.file) as stream:
            while data := stream.read(BLOCK):
                yield decoder.decode(data)


def records(file: Path, text_column: str, problems: Problems, watch: Callable[[int], None]) -> Iterator[tuple[str, str | LargeText]]:
    """(place, text) of each record that can be used; `watch` is told how many bytes of the file are behind.

    Raises:
        DataError: the file cannot be read; or a bad record, or no `text_column` at all, where `problems` says so.
    """
    kind = suffix_of(file)
    try:
        if kind == ".parquet":
            yield from _parquet(file, text_column, problems, watch)
            return
        with _opened(file, watch) as stream:
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
        raise DataError(f"--source: {file} cannot be read ({reason.strerror or reason}); mend that, or move it away") from None


def suffix_of(file: Path) -> str:
    """Which of SUFFIXES the file's name ends in, or ""."""
    return next((suffix for suffix in SUFFIXES if file.name.endswith(suffix)), "")  # none is the end of another


class _Watched(io.RawIOBase):
    """A file that says after each read how far it has been read."""

    def __init__(self, file: BinaryIO, watch: Callable[[int], None]):
        self.file, self.watch, self.done = file, watch, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self.file.readinto(buffer)  # type: ignore[attr-defined]
        self.done += n
        self.watch(self.done)
        return int(n)

    def close(self) -> None:
        self.file.close()
        super().close()


@contextmanager
def _opened(file: Path, watch: Callable[[int], None] = lambda done: None) -> Iterator[BinaryIO]:
    """The bytes of `file`, decompressed."""
    with io.BufferedReader(_Watched(open(file, "rb", buffering=0), watch), BLOCK) as raw:
        if file.name.endswith(".gz"):
            with gzip.open(raw) as stream:
                yield stream  # type: ignore[misc]
        elif file.name.endswith(".zst"):
            yield io.BufferedReader(_Frames(raw), BLOCK)
        else:
            yield raw


class _Frames(io.RawIOBase):
    """The frames of a .zst file in a row. zstandard's own reader takes a file that is torn within a frame for a whole one."""

    def __init__(self, raw: BinaryIO):
        import zstandard

        self._raw, self._new_frame, self._error = raw, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
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
            self._frame = self._frame or self._new_frame()
            try:
                self._text = self._frame.decompress(self._compressed)
            except self._error as reason:
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
    """Tell of a byte in data that begins at `line`."""
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
    """JSON values in a stream, of `limit` characters at most: each is read as json.loads does when enough of it is there."""

    def __init__(self, stream: BinaryIO, limit: int):
        self._limit = limit
        # What is not UTF-8 becomes a half of a surrogate pair, which `text_of` finds: a strict decoder would end the whole file.
        self._characters = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._position = "", 0

    def values(self, array: bool) -> Iterator[Any]:
        """The elements of one array, or values one after the other.

        Raises:
            RecordTooLarge: the next value has more characters than the limit.
            ValueError, RecursionError: what follows is broken.
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
                raise ValueError(f"{mark!r} where a comma or the end of the array belongs")
            self._position += not first
            first = False
            yield self._value()
        self._position += 1
        if mark := self._next():
            raise ValueError(f"{mark!r} behind the end of the array")

    def _next(self) -> str:
        """The next character that is no space, "" at the end."""
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
                # Broken; or cut off by the end of what has been read, which is noticed there, a dozen characters before, or at a quote.
                cut_off = reason.pos > len(self._text) - 16 or reason.msg.startswith("Unterminated string")
                if not (cut_off and self._more()):
                    raise ValueError(reason.msg) from None
            else:
                if end < len(self._text) or not self._more():  # else 12 may be the beginning of 123
                    self._position = end
                    return value

    def _more(self) -> bool:
        """Read on, as much again as is there, up to the limit; whether there was anything."""
        held = len(self._text) - self._position
        if held > self._limit:
            raise RecordTooLarge
        more = self._characters.read(min(max(BLOCK, held), self._limit + 1 - held))
        if more:
            self._text, self._position = self._text[self._position :] + more, 0
        return bool(more)


def _is_json_lines(start: bytes) -> bool:
    """Whether a file that begins like this has an object a line: what many call .json is that."""
    try:
        return isinstance(json.loads(start.lstrip().partition(b"\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


class _CsvLines:
    """The lines of a .csv, for `csv.reader`; `left` is how many characters the row at hand may still have."""

    def __init__(self, stream: BinaryIO):
        # What is not UTF-8 becomes a half of a surrogate pair, which `text_of` finds: a strict decoder would end the whole file.
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
    # Strict: without, a quote that is never closed silently makes one text of the rest of the file.
    rows = csv.reader(lines, strict=True)
    columns: list[str] | None = None
    while True:
        line = rows.line_num + 1
        lines.left = problems.max_record
        try:
            row = next(rows)
        except StopIteration:
            return
        except RecordTooLarge:  # within quotes or not: where the next row begins is not known
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


def _parquet(file: Path, text_column: str, problems: Problems, watch: Callable[[int], None]) -> Iterator[tuple[str, str]]:
    import pyarrow
    from pyarrow import parquet

    size, number = file.stat().st_size, 0
    try:
        with parquet.ParquetFile(file, memory_map=False, pre_buffer=False, buffer_size=BLOCK) as table:
            if not _has_column(file, table.schema_arrow.names, text_column, problems):
                return
            if pyarrow.types.is_nested(kind := table.schema_arrow.field(text_column).type):
                problems(f"text column {text_column!r} is no text", str(file), f"it is a {kind}; none of its records is taken")
                return
            rows, page = table.metadata.num_rows, largest_page(file, table.metadata, text_column)
            if page > PAGE_RECORDS * problems.max_record:
                limit = f"{PAGE_RECORDS} times the {problems.max_record / 2**20:g} MiB of --max_record_mib"
                problems("record too large", str(file), f"a page of {page / 2**20:,.0f} MiB, above {limit}; none of its records is taken")
                return
            # A batch of large values, which a dictionary may repeat, has no more bytes than a record may have.
            n = min(PARQUET_ROWS, max(1, problems.max_record // max(1, page)))
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
                watch(size * number // rows)
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, ArithmeticError, MemoryError) as reason:  # it raises them all
        if isinstance(reason, OSError) and reason.errno:
            raise
        problems("broken Parquet file", f"{file}: row {number + 1}", f"{one_line(reason)}{REST_LOST}")


def _has_column(file: Path, columns: list[str], text_column: str, problems: Problems) -> bool:
    if text_column not in columns:
        has = f"it has {', '.join(map(repr, columns[:20]))}: name one with --text_column"
        problems(f"no text column {text_column!r}", str(file), f"{has}; none of its records is taken")
    return text_column in columns


def text_of(record: object, text_column: str, place: str, problems: Problems) -> Iterator[tuple[str, str]]:
    """(place, text) of a record that has a text of whole characters; else the problem is told."""
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
        problems(f"text column {text_column!r} is no text", place, f"it is a {type(text).__name__}")
        return
    try:
        n_bytes = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        problems("not UTF-8", place, "a byte that is none, or half of a surrogate pair")
        return
    if n_bytes > problems.max_record:
        problems.too_large(place)
        return
    yield place, text
