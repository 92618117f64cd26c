"""Reads the records of one file of any format, each with its place in the file for error messages.

    .txt .md .py                    the file is one document; with `--separator`, each piece between two separators is a record
    .jsonl                          each line is an object; its text is in the text column
    .json                           consecutive objects, or one array of objects
    .csv                            a row is a record; the first row names the columns
    .parquet .arrow                 a row is a record

All but the last line may be compressed: .gz, .zst, .xz or .bz2 follows. The case of a name does not matter, and it may have a synonym.
Only one record is in memory at a time, of a .parquet file one page, and of an .arrow file one batch. The size of a record is limited
(`Problems.max_record`). It is checked before a line is read whole, since a small compressed file can hold a record of any size. Text
files have no limit: one above HELD is read several times, in blocks.
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
BLOCK = 2**20
#: The bytes of a plain text that are kept in memory instead of read again.
HELD = 8 * BLOCK
#: Largest record, in MiB. Parsed JSON can take 24 times as much memory: `{},` becomes an object of 72 bytes.
MAX_RECORD_MIB = 16
#: Rows of a Parquet file that are decoded at once.
PARQUET_ROWS = 16
#: Bad records of each kind that are described.
CASES = 3
REST_LOST = "; the rest of this file is lost"
_BLANK = re.compile(r"[ \t\r\n]*")


class Bad(ValueError):
    """Why a record cannot be used: a reader yields it in place of the record, or raises it if the rest of the file is lost."""

    def __init__(self, kind: str, detail: str):
        self.kind, self.detail = kind, detail


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

    def __call__(self, kind: str, place: str, detail: str) -> None:
        """Report a bad record of `kind` at `place`.

        Raises:
            DataError: with `--on_error stop`.
        """
        line = f"{place}: {kind} ({detail})"
        if self.on_error == "stop":
            raise DataError(f"{line}; fix it, or leave out such records with --on_error skip")
        self.counts[kind] += 1
        if len(self.cases.setdefault(kind, [])) < CASES:
            self.cases[kind].append(line)

    def too_large(self, rest: str = "") -> Bad:
        """What is wrong with a record above `max_record`."""
        return Bad("record too large", f"above the {self.max_record / 2**20:g} MiB of --max_record_mib{rest}")


class Text(NamedTuple):
    """The text of a document. `blocks` yields it from the beginning at every call; `n_bytes` and `sha256` are those of its UTF-8."""

    blocks: Callable[[], Iterable[str]]
    n_bytes: int
    sha256: bytes


#: What a reader yields for each record: its line, or 0 if records are counted instead; and the record, or why it is bad.
Read = Iterator[tuple[int, object]]


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
    kind, compression = kind_of(file)
    read, name = READERS.get(kind, (_pieces, ""))
    number = 0
    try:
        if kind in PLAIN and not separator:
            yield from _plain(file, problems)
            return
        with _opened(file) as (raw, stream):
            for number, (line, record) in enumerate(read(stream, problems, text_column if name else separator), 1):
                on_read(raw.tell())
                yield from text_of(record, text_column if name else "", f"{file}:{line}" if line else f"{file}: record {number}", problems)
    except (DataError, MemoryError):
        raise
    except Bad as bad:
        problems(bad.kind, f"{file}: record {number + 1}", bad.detail)
    except Exception as reason:  # decompressors and pyarrow raise many types
        if isinstance(reason, OSError) and reason.errno:
            raise DataError(f"--source: {file} cannot be read ({reason.strerror}); fix that, or move it away") from None
        if compression and not isinstance(reason, (ValueError, RecursionError)):
            problems("compressed file damaged", str(file), one_line(reason))
        else:
            problems(f"broken {name}", f"{file}: record {number + 1}", f"{one_line(reason)}{REST_LOST}")


def kind_of(file: Path) -> tuple[str, str]:
    """The kind of the file in STREAMED or TABLES, and its compression in COMPRESSED or "", both by its name; "", "" for other kinds."""
    suffixes = [_SYNONYMS.get(suffix.lower(), suffix.lower()) for suffix in ["", *file.suffixes]]
    compression = suffixes.pop() if suffixes[-1] in COMPRESSED else ""
    return (suffixes[-1], compression) if suffixes[-1] in (STREAMED if compression else (*STREAMED, *TABLES)) else ("", "")


@contextmanager
def _opened(file: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The bytes of `file` as stored, and decompressed. What is read of damaged content raises exceptions of any type."""
    compression = kind_of(file)[1]
    opens: dict[str, Callable[[BinaryIO], Any]] = {"": nullcontext, ".gz": gzip.open}
    streams = opens.get(compression, lambda raw: io.BufferedReader(_Streams(raw, compression), BLOCK))
    with open(file, "rb", buffering=BLOCK) as raw, streams(raw) as stream:
        yield raw, stream


class _Streams(io.RawIOBase):
    """The content of a .xz, .bz2 or .zst file: one or more streams, with zeros between and after them.

    The standard library's readers end in silence at what follows a stream and does not begin one.
    """

    def __init__(self, raw: BinaryIO, compression: str):
        self._raw, self._compression = raw, compression
        self._stream: Any = None

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
                self._stream = _decompressor(self._compression)
            elif self._stream.needs_input and not (rest := self._raw.read(BLOCK)):
                raise EOFError("the file ends within a stream")
            data = self._stream.decompress(rest, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _decompressor(compression: str) -> Any:
    if compression != ".zst":
        return bz2.BZ2Decompressor() if compression == ".bz2" else lzma.LZMADecompressor()
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    # The window is in memory; 2 GiB, the largest of any encoder, is that of `zstd --ultra --long=31`.
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 31})


def _plain(file: Path, problems: Problems) -> Iterator[Text]:
    sha256, n_bytes, line, held = hashlib.sha256(), 0, 1, list[str]()
    try:
        for block in _blocks(file):
            data = block.encode()
            sha256.update(data)
            n_bytes, line = n_bytes + len(data), line + data.count(b"\n")
            held = [*held, block] if n_bytes <= HELD else []
    except UnicodeDecodeError as reason:
        line += reason.object.count(b"\n", 0, reason.start)
        problems("not UTF-8", f"{file}:{line}", f"{one_line(reason)}; convert it with iconv -f ENCODING -t UTF-8")
        return
    yield Text((lambda: held) if held else (lambda: _blocks(file)), n_bytes, sha256.digest())


def _blocks(file: Path) -> Iterator[str]:
    """The text of a file without its byte order mark, in parts of about BLOCK bytes. Line ends stay as they are."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with _opened(file) as (_, stream):
        while data := stream.read(BLOCK):
            yield decoder.decode(data)
        decoder.decode(b"", final=True)


def _pieces(stream: BinaryIO, problems: Problems, separator: str) -> Read:
    """The text between separators, without the line ends around it; an empty piece is no document."""
    for line, piece in _cut_at(stream, separator.encode("utf-8", "surrogateescape"), problems.max_record):
        text = (piece.removeprefix(codecs.BOM_UTF8) if line == 1 else piece).lstrip(b"\r\n")
        line += piece[: len(piece) - len(text)].count(b"\n")
        if len(text) > problems.max_record:
            yield line, problems.too_large(f", up to the next {separator!r}")
        elif text := text.rstrip(b"\r\n"):
            yield line, {"": text}


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


def _files(stream: BinaryIO, problems: Problems, text_column: str) -> Read:
    limit = problems.max_record
    for number in count(1):
        line = stream.readline(limit + 1)
        if not line:
            return
        if len(line) > limit:
            yield number, problems.too_large()
            while line and not line.endswith(b"\n"):
                line = stream.readline(BLOCK)
        elif line.strip():
            try:
                yield number, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as reason:
                yield number, Bad("not UTF-8" if isinstance(reason, UnicodeError) else "broken JSON line", one_line(reason))


def _characters(stream: BinaryIO) -> io.TextIOWrapper:
    """Invalid UTF-8 becomes lone surrogates, which `text_of` reports for the one record; a strict decoder would fail for the whole file."""
    return io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")


def _json(stream: BinaryIO, problems: Problems, text_column: str) -> Read:
    """Yields the elements of one array, or consecutive values. The file is never in memory as a whole."""
    characters, decode, text, position = _characters(stream), json.JSONDecoder().raw_decode, "", 0

    def more() -> bool:
        """Double the text in memory, up to the limit; False at the end of the stream."""
        nonlocal text, position
        held = len(text) - position
        if held > problems.max_record:
            raise problems.too_large(REST_LOST)
        new = characters.read(min(max(BLOCK, held), problems.max_record + 1 - held))
        if new:
            text, position = text[position:] + new, 0
        return bool(new)

    def mark() -> str:
        """The next non-blank character, or "" at the end."""
        nonlocal position
        while True:
            position = _BLANK.match(text, position).end()  # type: ignore[union-attr]
            if position < len(text) or not more():
                return text[position : position + 1]

    array = mark() == "["
    position += array
    first = True
    while (found := mark()) != ("]" if array else ""):
        if array and not first:
            if found != ",":
                raise ValueError(f"{found!r} instead of a comma or the end of the array")
            position += 1
            mark()
        first = False
        while True:
            try:
                value, end = decode(text, position)
            except json.JSONDecodeError as reason:
                # Invalid; or incomplete, which is reported near the end of the text read so far, or at an opening quote.
                if not ((reason.pos > len(text) - 16 or reason.msg.startswith("Unterminated string")) and more()):
                    raise ValueError(reason.msg) from None
            else:
                if end < len(text) or not more():  # 12 may be the beginning of 123
                    position = end
                    break
        yield 0, value
    position += array
    if found := mark():
        raise ValueError(f"{found!r} after the end of the array")


def _csv(stream: BinaryIO, problems: Problems, text_column: str) -> Read:
    characters = _characters(stream)
    left = problems.max_record  # characters that the current row may still have

    def lines() -> Iterator[str]:
        nonlocal left
        while line := characters.readline(left + 1):
            if len(line) > left:  # possibly within quotes, so the start of the next row is unknown
                raise problems.too_large(REST_LOST)
            left -= len(line)
            yield line

    csv.field_size_limit(sys.maxsize)
    # Strict: otherwise, an unclosed quote silently turns the rest of the file into one text.
    rows = csv.reader(lines(), strict=True)
    columns, line = list[str](), 1
    try:
        for row in rows:
            if not row:
                pass  # a blank line
            elif not columns:
                columns = row
                _check_column(columns, text_column)
            elif any(row[len(columns) :]):  # an unquoted comma in a text cuts it
                yield line, Bad("too many fields", f"{len(row)}, and the first row names {len(columns)}")
            elif len(row) < len(columns) and text_column in columns[: len(row)]:  # an unquoted line end in a text cuts it
                yield line, Bad("too few fields", f"{len(row)}, and the first row names {len(columns)}")
            else:
                yield line, {text_column: None} | dict(zip(columns, row, strict=False))
            line, left = rows.line_num + 1, problems.max_record
    except csv.Error as reason:
        raise ValueError(f"line {rows.line_num}: {reason}") from None


def _parquet(raw: BinaryIO, problems: Problems, text_column: str) -> Read:
    from pyarrow import parquet  # here, as it takes a quarter of a second, and only these files need it

    table = parquet.ParquetFile(raw, pre_buffer=False, buffer_size=BLOCK)
    _check_column(table.schema_arrow.names, text_column)
    return _rows(table.iter_batches(batch_size=PARQUET_ROWS, columns=[text_column], use_threads=False), text_column)


def _arrow(raw: BinaryIO, problems: Problems, text_column: str) -> Read:
    """The rows of an Arrow file, in the format for streams (as `datasets` writes it) or that for files."""
    import pyarrow
    from pyarrow import ipc

    pages = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
    opens = ipc.open_file if pages[:6] == b"ARROW1" else ipc.open_stream
    names = opens(pyarrow.BufferReader(pages)).schema.names
    _check_column(names, text_column)
    source = pyarrow.BufferReader(pages)
    reader = opens(source, options=ipc.IpcReadOptions(included_fields=[names.index(text_column)], use_threads=False))

    def batches() -> Iterator[Any]:
        for batch in reader if opens is ipc.open_stream else map(reader.get_batch, range(reader.num_record_batches)):
            batch.validate(full=True)  # a wrong offset would be read anywhere in memory
            raw.seek(source.tell())
            yield batch

    return _rows(batches(), text_column)


def _rows(batches: Iterable[Any], text_column: str) -> Read:
    for batch in batches:
        for value in batch.column(0):
            try:
                yield 0, {text_column: value.as_py()}
            except UnicodeDecodeError as reason:
                yield 0, Bad("not UTF-8", one_line(reason))


def _check_column(columns: list[str], text_column: str) -> None:
    if (found := columns.count(text_column)) != 1:
        fix = "rename all but one" if found else "name one with --text_column"
        has = f"it has {', '.join(map(repr, columns[:20]))}: {fix}; none of its records is used"
        raise Bad(f"{found or 'no'} text column{'s' * (found > 1)} {text_column!r}", has)


#: The reader of each kind of file with records, and what is said of a broken file.
READERS: dict[str, tuple[Callable[[BinaryIO, Problems, Any], Read], str]] = {
    ".jsonl": (_files, "JSON line"),
    ".json": (_json, "JSON"),
    ".csv": (_csv, "CSV"),
    ".parquet": (_parquet, "Parquet file"),
    ".arrow": (_arrow, "Arrow file"),
}


def text_of(record: object, text_column: str, place: str, problems: Problems) -> Iterator[Text]:
    """Yields the text of a good record, and reports a bad one."""
    try:
        text = _text(record, text_column)
        data = text.encode()
        if len(data) > problems.max_record:
            raise problems.too_large()
    except Bad as bad:
        problems(bad.kind, place, bad.detail)
    except UnicodeError as reason:
        problems("not UTF-8", place, one_line(reason))
    else:
        yield Text(lambda: (text,), len(data), hashlib.sha256(data).digest())


def _text(record: object, text_column: str) -> str:
    """The text of a record. Raises Bad or UnicodeError if it has none."""
    if isinstance(record, Bad):
        raise record
    if not isinstance(record, dict):
        raise Bad(f"no text column {text_column!r}", f"it is a {type(record).__name__}, not an object")
    text = record.get(text_column)
    if text is None:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        has = "it is null" if text_column in record else f"it has {keys}: name one with --text_column"
        raise Bad(f"no text column {text_column!r}", has)
    if isinstance(text, bytes):
        return text.decode()
    if not isinstance(text, str):
        raise Bad(f"text column {text_column!r} is not text", f"it is a {type(text).__name__}")
    return text
