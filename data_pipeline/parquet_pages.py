"""The size of a Parquet file's pages, from their headers alone.

`pyarrow` decompresses a page at once, and a page of 1 GiB can take a few KiB of the file. The size is in the page's header, which `pyarrow`
does not show: `PageHeader` of https://github.com/apache/parquet-format, in Thrift's compact protocol.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO


def largest_page(file: Path, metadata: Any, column: str) -> int:
    """The largest page of a column in bytes, compressed or not, dictionaries included.

    Args:
        metadata: what `pyarrow` read from the file's end.

    Raises:
        ValueError, IndexError: a header is none.
    """
    largest = 0
    numbers = [number for number in range(metadata.num_columns) if metadata.schema.column(number).path == column]
    with open(file, "rb") as stream:
        for group in range(metadata.num_row_groups):
            for chunk in (metadata.row_group(group).column(number) for number in numbers):
                position = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)
                end = position + chunk.total_compressed_size
                while position < end:
                    stream.seek(position)
                    header = _struct(stream)
                    sizes = header.get(2, -1), header.get(3, -1)  # uncompressed, compressed
                    if min(sizes) < 0:
                        raise ValueError("a page without a size")
                    largest, position = max(largest, *sizes), stream.tell() + sizes[1]
    return largest


def _struct(stream: BinaryIO, depth: int = 0) -> dict[int, int]:
    """The whole numbers among the fields of a struct, by the fields' numbers; the others are passed over."""
    values: dict[int, int] = {}
    field = 0
    while (head := stream.read(1)[0]) != 0:
        kind = head & 15
        field = field + (head >> 4) if head >> 4 else _whole(stream)
        if kind in (4, 5, 6):  # i16, i32, i64
            values[field] = _whole(stream)
        elif kind == 8:  # binary
            stream.seek(_varint(stream), 1)
        elif kind == 12 and depth < 8:
            _struct(stream, depth + 1)
        elif kind in (3, 7):  # byte, double
            stream.seek(1 if kind == 3 else 8, 1)
        elif kind not in (1, 2):  # true, false
            raise ValueError("a page's header is broken")
    return values


def _whole(stream: BinaryIO) -> int:
    value = _varint(stream)
    return (value >> 1) ^ -(value & 1)


def _varint(stream: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("a page's header is broken")
