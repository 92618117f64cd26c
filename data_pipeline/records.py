"""Reads the records of one file of any format, each with its place in the file for error messages.

    .txt .md .py                    the file is one document; with `--separator`, each piece between two separators is a record
    .jsonl                          each line is an object; its text is in the text column
    .json                           consecutive objects, or one array of objects
    .csv                            a row is a record; the first row names the columns
    .parquet .arrow                 a row is a record

All but the last line may be compressed: .gz, .zst, .xz or .bz2 follows. The case of a name does not matter, and it may have a synonym.
Only one record is in memory at a time, of a .parquet file one page, and of an .arrow file one batch. The size of a record is limited
(`Problems.max_record`). It is checked before a line is read whole, since a small compressed file can hold a record of any size. Text
files have no limit: one above LARGE is read in blocks, several times.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import json
import lzma
import mmap
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data_pipeline.errors import DataError, one_line

PLAIN = (".txt", ".md", ".py")
STREAMED = (*PLAIN, ".jsonl", ".json", ".csv")
TABLES = (".parquet", ".arrow")
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
ALLOWED_FILES = f"{' '.join(STREAMED)} (each also {' '.join(COMPRESSED)}) {' '.join(TABLES)}"
_SYNONYMS = {".text": ".txt", ".markdown": ".md", ".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".pq": ".parquet", ".zstd": ".zst"}
#: Text files up to this size, in bytes, are read at once.
LARGE = 4 * 2**20
BLOCK = 2**20
#: Largest record, in MiB. Parsed JSON can take 24 times as much memory: `{},` becomes an object of 72 bytes.
MAX_RECORD_MIB = 16
#: Rows of a Parquet file that are decoded at once.
PARQUET_ROWS = 16
#: Bad records of each kind that are described.
CASES = 3
REST_LOST = "; the rest of this file is lost"
_BLANK = re.compile(r"[ \t\r\n]*")


class RecordTooLarge(ValueError):
    """A record is larger than the limit; its end has not been read."""


class BadRecord(DataError):
    """The first bad record, with `--on_error stop`."""


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
        self.uncut = 0  # text files in which the separator does not occur

    def __call__(self, kind: str, place: str, detail: str = "") -> None:
        """Report a bad record of `kind` at `place`.

        Raises:
            BadRecord: with `--on_error stop`.
        """
        line = f"{place}: {kind}" + (f" ({detail})" if detail else "")
        if self.on_error == "stop":
            raise BadRecord(f"{line}; fix it, or leave out such records with --on_error skip")
        self.counts[kind] += 1
        if len(self.cases.setdefault(kind, [])) < CASES:
            self.cases[kind].append(line)

    def too_large(self, place: str, rest: str = "") -> None:
        """Report a record above `max_record`."""
        self("record too large", place, f"above the {self.max_record / 2**20:g} MiB of --max_record_mib{rest}")


class Text(NamedTuple):
    """The text of a document. `blocks` yields it from the beginning at every call; `n_bytes` and `sha256` are those of its UTF-8."""

    blocks: Callable[[], Iterable[str]]
    n_bytes: int
    sha256: bytes


def records(
    file: Path, text_column: str, problems: Problems, on_read: Callable[[int], None], separator: str | None = None
) -> Iterator[Text]:
    """Yields the text of each good record.

    Args:
        separator: stands between the documents of a text file.
        on_read: is called with the number of bytes of the file that have been read.

    Raises:
        DataError: the file cannot be read; or, with `--on_error stop`, a record is bad.
    """
    kind, _ = kind_of(file)
    try:
        if kind in TABLES:
            yield from _rows(file, text_column, problems, on_read)
            return
        with _opened(file) as (raw, stream):
            found: Iterator[Text]
            if kind in PLAIN:
                found = _pieces(file, stream, separator, problems) if separator else _plain(file, stream, problems)
            else:
                read = {".jsonl": _json_lines, ".json": _json, ".csv": _csv}[kind]
                found = read(file, stream, text_column, problems)
            for record in found:
                on_read(raw.tell())
                yield record
    except OSError as reason:
        if "too much memory" in str(reason):
            problems("zstd window above 2 GiB", str(file), "compress it again without --long")
        elif reason.errno is None:  # an error of the decompressor
            problems("compressed file damaged", str(file), one_line(reason))
        else:
            raise DataError(f"--source: {file} cannot be read ({reason.strerror}); fix that, or move it away") from None


def kind_of(file: Path) -> tuple[str, str]:
    """The kind of the file in STREAMED or TABLES, and its compression in COMPRESSED or "", both by its name; "", "" for other kinds."""
    suffixes = [_SYNONYMS.get(suffix.lower(), suffix.lower()) for suffix in ["", *file.suffixes]]
    compression = suffixes.pop() if suffixes[-1] in COMPRESSED else ""
    return (suffixes[-1], compression) if suffixes[-1] in (STREAMED if compression else (*STREAMED, *TABLES)) else ("", "")


@contextmanager
def _opened(file: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The bytes of `file` as stored, and decompressed.

    Raises:
        OSError: without `errno` for content that cannot be decompressed.
    """
    opens: dict[str, Any] = {"": nullcontext, ".gz": gzip.open, ".xz": _open_streams, ".bz2": _open_streams, ".zst": _open_zstd}
    with open(file, "rb", buffering=BLOCK) as raw, opens[kind_of(file)[1]](raw) as stream:
        try:
            yield raw, stream
        except (EOFError, zlib.error, lzma.LZMAError) as reason:
            raise OSError(one_line(reason)) from None


class _Streams(io.RawIOBase):
    """The content of a .xz or .bz2 file: one or more streams, with zeros between and after them.

    The standard library's readers end in silence at what follows a stream and does not begin one.
    """

    def __init__(self, raw: BinaryIO):
        self._raw = raw
        self._stream: bz2.BZ2Decompressor | lzma.LZMADecompressor | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            rest = b""
            if self._stream is None or self._stream.eof:
                rest = (self._stream.unused_data if self._stream else b"").lstrip(b"\0")
                while len(rest) < len(b"BZh") and (block := self._raw.read(BLOCK)):
                    rest = (rest + block).lstrip(b"\0")
                if self._stream and not rest:
                    return 0
                self._stream = bz2.BZ2Decompressor() if rest.startswith(b"BZh") else lzma.LZMADecompressor()
            elif self._stream.needs_input and not (rest := self._raw.read(BLOCK)):
                raise EOFError("the file ends within a stream")
            data = self._stream.decompress(rest, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _open_streams(raw: BinaryIO) -> Any:
    return io.BufferedReader(_Streams(raw), BLOCK)


@contextmanager
def _open_zstd(raw: BinaryIO) -> Iterator[Any]:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    try:  # the window is in memory; 2 GiB, the largest of any encoder, is that of `zstd --ultra --long=31`
        with zstd.open(raw, options={zstd.DecompressionParameter.window_log_max: 31}) as stream:
            yield stream
    except zstd.ZstdError as reason:
        raise OSError(one_line(reason)) from None


def _plain(file: Path, stream: BinaryIO, problems: Problems) -> Iterator[Text]:
    decoder, sha256, n_bytes, line = codecs.getincrementaldecoder("utf-8")(), hashlib.sha256(), 0, 1
    start = stream.read(len(codecs.BOM_UTF8))
    first = data = (b"" if start == codecs.BOM_UTF8 else start) + stream.read(LARGE + 1)
    try:
        while True:
            decoder.decode(data, final=not data)
            if not data:
                break
            sha256.update(data)
            n_bytes, line = n_bytes + len(data), line + data.count(b"\n")
            data = stream.read(BLOCK)
    except UnicodeDecodeError as reason:
        line += reason.object.count(b"\n", 0, reason.start)
        encoding = "UTF-16" if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
        detail = f"byte 0x{reason.object[reason.start]:02x}; if it is {encoding}, convert it with iconv -f {encoding} -t UTF-8"
        problems("not UTF-8", f"{file}:{line}", detail)
        return
    # Not read_text: line ends stay as they are.
    yield Text((lambda: _blocks(file)) if n_bytes > LARGE else (lambda: (first.decode(),)), n_bytes, sha256.digest())


def _blocks(file: Path) -> Iterator[str]:
    """The text of a large file without its byte order mark, in parts of about BLOCK bytes."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with _opened(file) as (_, stream):
        while data := stream.read(BLOCK):
            yield decoder.decode(data)


def _pieces(file: Path, stream: BinaryIO, separator: str, problems: Problems) -> Iterator[Text]:
    """The text between separators, without the line ends around it; an empty piece is no document."""
    number = 0
    for line, piece in _cut_at(stream, separator.encode("utf-8", "surrogateescape"), problems.max_record):
        number += 1
        text = (piece.removeprefix(codecs.BOM_UTF8) if line == 1 else piece).lstrip(b"\r\n")
        place = f"{file}:{line + piece[: len(piece) - len(text)].count(10)}"  # 10: a line end
        if len(text) > problems.max_record:
            problems.too_large(place, f", up to the next {separator!r}")
        elif text := text.rstrip(b"\r\n"):
            yield from text_of({"": text}, "", place, problems)
    problems.uncut += number == 1


def _cut_at(stream: BinaryIO, mark: bytes, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yields the first line and the bytes of each piece between two marks; of a piece above `limit` only its beginning."""
    held, line, yielded = bytearray(), 1, False
    while block := stream.read(BLOCK):
        start = max(0, len(held) - len(mark) + 1)
        held += block
        while (end := held.find(mark, start)) >= 0:
            if not yielded:
                yield line, bytes(held[:end])
            end += len(mark)
            line += held.count(b"\n", 0, end)
            del held[:end]
            start, yielded = 0, False
        if len(held) > limit + len(mark):
            if not yielded:
                yield line, bytes(held)
            end, yielded = len(held) - len(mark) + 1, True
            line += held.count(b"\n", 0, end)
            del held[:end]
    if not yielded:
        yield line, bytes(held)


def _json_lines(file: Path, stream: BinaryIO, text_column: str, problems: Problems) -> Iterator[Text]:
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


def _json(file: Path, stream: BinaryIO, text_column: str, problems: Problems) -> Iterator[Text]:
    number = 0
    try:
        for number, record in enumerate(_JsonValues(stream, problems.max_record), 1):
            yield from text_of(record, text_column, f"{file}: record {number}", problems)
    except DataError:
        raise
    except RecordTooLarge:
        problems.too_large(f"{file}: record {number + 1}", REST_LOST)
    except (ValueError, RecursionError) as reason:
        problems("broken JSON", f"{file}: record {number + 1}", f"{one_line(reason)}{REST_LOST}")


class _JsonValues:
    """Reads JSON values of at most `limit` characters from a stream, which is never in memory as a whole."""

    def __init__(self, stream: BinaryIO, limit: int):
        self._limit = limit
        # Invalid UTF-8 becomes lone surrogates, which `text_of` reports for the one record; a strict decoder would fail for the whole file.
        self._characters = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._position = "", 0

    def __iter__(self) -> Iterator[Any]:
        """Yields the elements of one array, or consecutive values.

        Raises:
            RecordTooLarge: the next value has more characters than the limit.
            ValueError, RecursionError: the JSON is invalid.
        """
        array = self._next() == "["
        self._position += array
        first = True
        while (mark := self._next()) != ("]" if array else ""):
            if array and not first:
                if mark != ",":
                    raise ValueError(f"{mark!r} instead of a comma or the end of the array")
                self._position += 1
            first = False
            yield self._value()
        self._position += array
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


def _csv(file: Path, stream: BinaryIO, text_column: str, problems: Problems) -> Iterator[Text]:
    # Invalid UTF-8 becomes lone surrogates, which `text_of` reports for the one record; a strict decoder would fail for the whole file.
    characters = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    left = problems.max_record  # characters that the current row may still have

    def lines() -> Iterator[str]:
        nonlocal left
        while line := characters.readline(left + 1):
            if len(line) > left:
                raise RecordTooLarge
            left -= len(line)
            yield line

    csv.field_size_limit(sys.maxsize)
    # Strict: otherwise, an unclosed quote silently turns the rest of the file into one text.
    rows = csv.reader(lines(), strict=True)
    columns: list[str] | None = None
    while True:
        line, left = rows.line_num + 1, problems.max_record
        try:
            row = next(rows, None)
        except RecordTooLarge:  # possibly within quotes, so the start of the next row is unknown
            problems.too_large(f"{file}:{line}", REST_LOST)
            return
        except csv.Error as reason:  # possibly within quotes, so the start of the next row is unknown
            problems("broken CSV", f"{file}:{rows.line_num}", f"{one_line(reason)}{REST_LOST}")
            return
        if row is None:
            return
        if not row:
            continue
        if columns is None:
            columns = row
            if not _has_column(file, columns, text_column, problems):
                return
        elif any(row[len(columns) :]):  # an unquoted comma in a text cuts it
            problems("too many fields", f"{file}:{line}", f"{len(row)}, and the first row names {len(columns)}")
        elif len(row) < len(columns) and text_column in columns[: len(row)]:  # an unquoted line end in a text cuts it
            problems("too few fields", f"{file}:{line}", f"{len(row)}, and the first row names {len(columns)}")
        else:
            yield from text_of({text_column: None} | dict(zip(columns, row, strict=False)), text_column, f"{file}:{line}", problems)


def _rows(file: Path, text_column: str, problems: Problems, on_read: Callable[[int], None]) -> Iterator[Text]:
    import pyarrow  # here, as it takes a quarter of a second, and only these files need it

    kind, number = kind_of(file)[0][1:].capitalize(), 0
    try:
        batches = {"Parquet": _parquet, "Arrow": _arrow}[kind](file, text_column)
        schema = next(batches)
        if not _has_column(file, schema.names, text_column, problems):
            return
        if pyarrow.types.is_nested(type_ := schema.field(text_column).type):
            problems(f"text column {text_column!r} is not text", str(file), f"it is a {type_}; none of its records is used")
            return
        for batch, n_read in batches:
            column = batch.column(0)
            for place in range(len(column)):
                number += 1
                try:
                    record = {text_column: column[place].as_py()}
                except UnicodeDecodeError:
                    problems("not UTF-8", f"{file}: row {number}")
                    continue
                yield from text_of(record, text_column, f"{file}: row {number}", problems)
            on_read(n_read)
    except DataError:
        raise
    except Exception as reason:  # pyarrow raises many types
        if isinstance(reason, OSError) and reason.errno:
            raise
        problems(f"broken {kind} file", f"{file}: row {number + 1}", f"{one_line(reason)}{REST_LOST}")


def _parquet(file: Path, text_column: str) -> Iterator[Any]:
    """Yields the schema, and then each batch of the text column with the bytes of the file that have been read."""
    from pyarrow import parquet

    size, n_rows = file.stat().st_size, 0
    with parquet.ParquetFile(file, memory_map=False, pre_buffer=False, buffer_size=BLOCK) as table:
        yield table.schema_arrow
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[text_column], use_threads=False):
            n_rows += len(batch)
            yield batch, size * n_rows // table.metadata.num_rows


def _arrow(file: Path, text_column: str) -> Iterator[Any]:
    """The same of an Arrow file, in the format for streams (as `datasets` writes it) or that for files."""
    import pyarrow
    from pyarrow import ipc

    with open(file, "rb") as raw:
        pages = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
    opens = ipc.open_file if pages[:6] == b"ARROW1" else ipc.open_stream
    schema = opens(pyarrow.BufferReader(pages)).schema
    yield schema
    source = pyarrow.BufferReader(pages)
    reader = opens(source, options=ipc.IpcReadOptions(included_fields=[schema.names.index(text_column)], use_threads=False))
    for batch in reader if opens is ipc.open_stream else map(reader.get_batch, range(reader.num_record_batches)):
        batch.validate(full=True)  # a wrong offset would be read anywhere in memory
        yield batch, source.tell()


def _has_column(file: Path, columns: list[str], text_column: str, problems: Problems) -> bool:
    if (found := columns.count(text_column)) == 1:
        return True
    fix = "rename all but one" if found else "name one with --text_column"
    has = f"it has {', '.join(map(repr, columns[:20]))}: {fix}"
    problems(f"{found or 'no'} text column{'s' * (found > 1)} {text_column!r}", str(file), f"{has}; none of its records is used")
    return False


def text_of(record: object, text_column: str, place: str, problems: Problems) -> Iterator[Text]:
    """Yields the text of a good record, and reports a bad one."""
    if not isinstance(record, dict) or record.get(text_column) is None:
        has = f"it is a {type(record).__name__}, not an object"
        if isinstance(record, dict):
            keys = ", ".join(map(repr, list(record)[:8])) or "none"
            has = "it is null" if text_column in record else f"it has {keys}: name one with --text_column"
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
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        problems("not UTF-8", place, "an invalid byte, or half of a surrogate pair")
        return
    if len(data) > problems.max_record:
        problems.too_large(place)
        return
    yield Text(lambda: (text,), len(data), hashlib.sha256(data).digest())
