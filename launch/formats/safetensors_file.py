"""Safetensors files, read and written a tensor at a time: the header is checked without torch, and a tensor goes straight to its place.

The library maps a file, so that what has been read is in memory twice until the system takes it back, and writes from a dictionary of
contiguous tensors, so that every transposed matrix is there twice. A model is read and written here in its own size and one tensor.

The format (https://huggingface.co/docs/safetensors): 8 bytes, the header's length; the header, a JSON object of
`{"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}`; the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.errors import UsageError

if TYPE_CHECKING:
    import torch

#: Bytes of an element; those that a GPT's weights can be in have a torch dtype too.
ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I8": "int8"}
#: The library's own limit of a header.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its bytes are [begin, end) of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file and its metadata; all bytes of all tensors are there.

    Raises:
        UsageError: it is missing, cut off, or is no safetensors file.
    """
    fix = "copy or export it again"
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            text = stream.read(length) if length <= min(MAX_HEADER_BYTES, size - 8) else b""
    except OSError as reason:
        raise UsageError(f"{file}: {'missing' if not file.exists() else f'cannot be read ({reason.strerror})'}; {fix}") from None
    # A length may begin with the same two bytes: 640 does, and 19,280. As lengths, what pickles and zip files go on with are beyond any.
    if not text and start[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise UsageError(f"{file}: is a pickle under the name of a safetensors file, and is not loaded; {fix}")
    if len(start) < 8 or not text:
        raise UsageError(f"{file}: is no safetensors file, or cut off in its header ({size:,} bytes); {fix}")
    try:
        header = json.loads(text, object_pairs_hook=_without_repetition)
        if not isinstance(header, dict):
            raise ValueError(f"a {type(header).__name__}, must be an object")
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(file, described, 8 + length) for name, described in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        raise UsageError(f"{file}: its header is none of a safetensors file ({reason}); {fix}") from None
    here = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        if entry.begin != here:
            raise UsageError(f"{file}: {name} does not begin where the tensor before it ends; {fix}")
        here = entry.end
    if here != size:
        raise UsageError(
            f"{file}: has {size:,} bytes, its header tells of {here:,}: it is {'cut off' if size < here else 'too long'}; {fix}"
        )
    return entries, metadata


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a name that is there twice, of which any reader would take the one or the other."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]} is there twice")
    return made


def _entry(file: Path, described: dict[str, Any], offset: int) -> Entry:
    dtype, shape, (begin, end) = described["dtype"], tuple(described["shape"]), described["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("a shape or a place is no whole number")
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype {dtype}")
    if end - begin != math.prod(shape) * ITEMSIZE[dtype]:
        raise ValueError(f"{end - begin} bytes for {dtype} of shape {list(shape)}")
    return Entry(file, dtype, shape, offset + begin, offset + end)


def read_tensor(entry: Entry, out: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor of an entry; straight into `out` if given, which is contiguous and of its dtype and size."""
    import torch

    if out is None:
        out = torch.empty(entry.shape, dtype=getattr(torch, TORCH_NAMES[entry.dtype]))
    with open(entry.file, "rb", buffering=0) as stream:
        stream.seek(entry.begin)
        left = out.view(-1).view(torch.uint8).numpy().data
        while left:
            count = stream.readinto(left[: 2**30])
            if not count:
                raise UsageError(f"{entry.file}: has become shorter while it was read; copy it again")
            left = left[count:]
    return out


def rounded(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """`tensor` in `dtype`, safetensors' word. Raises UsageError where it becomes infinite, as fp16 does above 65,504."""
    import torch

    tensor = tensor.to(getattr(torch, TORCH_NAMES[dtype]))
    if not is_finite(tensor):
        raise UsageError(f"--dtype: {name} holds numbers that {TORCH_NAMES[dtype]} has not; take bf16 or fp32")
    return tensor


def is_finite(weight: torch.Tensor) -> bool:
    """Whether it holds neither a NaN nor an infinity."""
    return all(bool(bound.isfinite()) for bound in weight.aminmax())  # which pass on NaN, and need no memory


def write_tensors(
    file: Path,
    described: dict[str, tuple[str, tuple[int, ...]]],
    tensor_of: Callable[[str], Iterable[torch.Tensor]],
    metadata: dict[str, str],
) -> int:
    """Write a file of the tensors `described` by name (dtype, shape); their number of bytes.

    Args:
        tensor_of: the tensor of a name, in pieces whose bytes lie one behind the other; asked for one after the other.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    place = 0
    # The library writes them so: larger elements first, then by name. Whoever maps the file finds every tensor aligned.
    order = sorted(described, key=lambda name: (-ITEMSIZE[described[name][0]], name))
    for name in order:
        dtype, shape = described[name]
        size = math.prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name in order:
            written = 0
            for piece in tensor_of(name):
                written += stream.write(piece.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
            assert written == math.prod(described[name][1]) * ITEMSIZE[described[name][0]], name
    return place
