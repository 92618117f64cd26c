"""Reads a corpus: token shards, and the manifest with their hashes. `writing` writes it.

    data/stdlib/
        train-00000.bin  ...    little-endian ids, uint16 for up to 65,536 of them, else uint32; an end-of-text id ends each document
        val-00000.bin    ...
        tokenizer.json  ...     the tokenizer's own files
        manifest.json           counts, hashes, options and sources; written last

`open_corpus` checks everything that can be checked without reading tokens; `Corpus.verify` reads every byte.
"""

import contextlib
import hashlib
import json
import mmap
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError, nearest_name
from data_pipeline.manifest import MANIFEST_FILE, PREPARE_COMMAND, SPLITS, check_sha256, read_manifest, source_names
from data_pipeline.nanogpt import is_nanogpt, nanogpt_manifest, sampled_sha256

CHUNK_TOKENS = 4 * 1024 * 1024
OnRead = Callable[[int], None]


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Turns an OSError raised inside (permissions, a folder instead of a file) into a DataError that names the file."""
    try:
        yield
    except OSError as reason:
        what = reason.filename or "the corpus"  # a failed memory map has no file name
        raise DataError(f"{what}: cannot be read ({reason.strerror}); fix that, or prepare the corpus again") from None


def raise_open_file_limit() -> None:
    """Raise this process's soft limit of open files, usually 1,024, to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError):  # above the kernel's own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _place(bounds: np.ndarray, index: int) -> tuple[int, int]:
    """The shard that holds window `index`, and the window's number in it. bounds: the first window of each shard."""
    shard = bisect_right(bounds, index) - 1
    return shard, index - int(bounds[shard])


class Split:
    """The tokens of one split, in windows of seq_len + 1 that overlap by one token: a window's last target is the next one's first input.

    Windows start every seq_len tokens within each shard and never cross its end; a remainder of less than seq_len tokens is not used. The
    shards of one group of a mixture are consecutive, and so are their windows. header: the number of bytes before the ids of each shard.
    """

    def __init__(self, name: str, folder: Path, dtype: np.dtype, shards: list[dict[str, Any]], header: int = 0):
        self.name, self._header = name, header
        self.n_tokens = sum(shard["tokens"] for shard in shards)
        self._folder, self._dtype, self._shards = folder, dtype, shards
        self._maps: list[mmap.mmap | None] = []  # None for an empty file, which cannot be mapped
        self._views: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}

    def windows(self, seq_len: int) -> int:
        """The number of windows; DataError if there are none."""
        return int(self._strided(seq_len)[0][-1])

    def group_tokens(self, n_groups: int) -> list[int]:
        """The number of tokens of each group."""
        counts = [0] * n_groups
        for shard in self._shards:
            counts[shard["group"]] += shard["tokens"]
        return counts

    def group_windows(self, seq_len: int, n_groups: int) -> list[int]:
        """The number of windows of each group; DataError if a group of the training split has none."""
        bounds, _ = self._strided(seq_len)
        counts = [0] * n_groups
        for shard, count in zip(self._shards, (bounds[1:] - bounds[:-1]).tolist(), strict=True):
            counts[shard["group"]] += count
        if 0 in counts and self.name == "train":
            raise DataError(
                f"{self._folder}: no {self.name} shard of source number {counts.index(0) + 1} holds one window of seq_len {seq_len} + 1"
                " tokens, so its weight in the mixture cannot be reached; lower seq_len, or prepare the corpus with more of that source"
            )
        return counts

    def read(self, indices: np.ndarray, seq_len: int, out: np.ndarray | None = None) -> np.ndarray:
        """The windows `indices`, each in [0, windows(seq_len)): shape (len(indices), seq_len + 1), in `out` if given.

        DataError if a shard has been truncated.
        """
        bounds, views = self._strided(seq_len)
        if out is None:
            out = np.empty((len(indices), seq_len + 1), dtype=self._dtype)
        if len(views) == 1:
            self._check_size(0)
            out[...] = views[0][indices]
        else:
            shards = np.searchsorted(bounds, indices, side="right") - 1
            for shard in set(shards.tolist()):
                self._check_size(shard)
            for row, (shard, window) in enumerate(zip(shards.tolist(), (indices - bounds[shards]).tolist(), strict=True)):
                out[row] = views[shard][window]
        return out

    def prefetch(self, indices: np.ndarray, seq_len: int) -> None:
        """Start to read the windows `indices` from disk, all at the same time. `read` alone waits for each, and for the pages around it."""
        bounds, _ = self._strided(seq_len)
        stride = seq_len * self._dtype.itemsize
        for index in indices.tolist():
            shard, window = _place(bounds, index)
            mapped, start = self._maps[shard], self._header + window * stride
            assert mapped is not None, "an empty shard has no windows"
            in_page = start % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, start - in_page, in_page + stride + self._dtype.itemsize)

    def locate(self, index: int, seq_len: int) -> tuple[Path, int]:
        """The file of the shard that holds window `index`, and the position of the window's first token in it."""
        bounds, _ = self._strided(seq_len)
        shard, window = _place(bounds, index)
        return self._folder / self._shards[shard]["file"], window * seq_len

    @readable()
    def _strided(self, seq_len: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """The first window number of each shard, followed by the total; and the windows of each shard, as views (windows, seq_len + 1)."""
        if seq_len not in self._views:
            counts = [max(0, (shard["tokens"] - 1) // seq_len) for shard in self._shards]
            if not sum(counts):
                largest = max((shard["tokens"] for shard in self._shards), default=0)
                raise DataError(
                    f"{self._folder}: no shard of the {self.name} split holds one window of seq_len {seq_len} + 1 tokens (the largest has"
                    f" {largest:,}, the split {self.n_tokens:,}); lower seq_len, or prepare a larger corpus"
                    f"{' or a larger --val_fraction' if self.name == 'val' else ''}"
                )
            if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * len(self._shards):  # a map keeps its file open
                raise_open_file_limit()
            self._maps = self._maps or [self._map(shard) for shard in self._shards]
            views = []
            for mapped, count in zip(self._maps, counts, strict=True):
                # A plain array over the map: indexing a numpy.memmap costs several microseconds more.
                tokens = np.frombuffer(mapped or b"", self._dtype, offset=self._header)
                strides = (seq_len * tokens.itemsize, tokens.itemsize)
                views.append(np.lib.stride_tricks.as_strided(tokens, (count, seq_len + 1), strides, writeable=False))
            self._views[seq_len] = np.cumsum([0, *counts]), views
        return self._views[seq_len]

    def _map(self, shard: dict[str, Any]) -> mmap.mmap | None:
        if not shard["tokens"]:
            return None
        with open(self._folder / shard["file"], "rb") as stream:
            try:
                return mmap.mmap(stream.fileno(), self._header + shard["tokens"] * self._dtype.itemsize, access=mmap.ACCESS_READ)
            except ValueError:
                raise self._truncated(shard) from None

    def _check_size(self, shard: int) -> None:
        """A read behind the end of a mapped file kills the process (SIGBUS), so its size is looked up first; this takes 0.5 us."""
        mapped = self._maps[shard]
        if mapped is not None and mapped.size() < len(mapped):
            raise self._truncated(self._shards[shard])

    def _truncated(self, shard: dict[str, Any]) -> DataError:
        return DataError(f"{self._folder / shard['file']}: truncated since it was opened; copy or prepare the corpus again, then --resume")


class Corpus:
    """An opened corpus. `fingerprint` is a hash of its content, independent of its path and of when it was prepared."""

    def __init__(self, path: Path, manifest: dict[str, Any], header: int = 0):
        self.path = path
        #: The number of bytes before the ids of each shard.
        self.header = header
        self.manifest = manifest
        self.vocab_size: int = manifest["vocab_size"]
        #: None for nanoGPT's character-level corpora, which have no end-of-text token.
        self.eot_id: int | None = manifest["eot_id"]
        self.dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self.train, self.val = (Split(name, path, self.dtype, manifest["splits"][name]["shards"], header) for name in SPLITS)
        files = [path / shard["file"] for name in SPLITS for shard in manifest["splits"][name]["shards"]]
        self._as_opened = {file: _identity(file) for file in files}
        #: The weight of each group of shards in training. They sum to 1.
        self.mixture: list[float] = manifest["mixture"]
        #: The name of each group of a mixture; none without a mixture.
        self.names: list[str] = []
        if (count := len(self.mixture)) > 1:
            self.names = manifest.get("names") or source_names([*manifest["sources"], *[None] * count][:count])
        content = {
            "dtype": manifest["dtype"],
            "vocab_size": self.vocab_size,
            "eot_id": self.eot_id,
            "tokenizer": manifest["tokenizer"]["files"],
            "shards": {name: [[shard["tokens"], shard["sha256"]] for shard in manifest["splits"][name]["shards"]] for name in SPLITS},
        }
        if len(self.mixture) > 1:
            groups = [shard["group"] for name in SPLITS for shard in manifest["splits"][name]["shards"]]
            content |= {"mixture": self.mixture, "groups": groups}
        self.fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def n_bytes(self) -> int:
        """The size of all shards."""
        return sum(shard["tokens"] for split in SPLITS for shard in self.manifest["splits"][split]["shards"]) * self.dtype.itemsize

    @readable()
    def check_unchanged(self) -> None:
        """DataError if a shard has been written to or replaced since the corpus was opened. Does not read the shards."""
        for file, before in self._as_opened.items():
            if _identity(file) != before:
                raise DataError(
                    f"{file}: changed since the run has opened it (its size, time of modification or inode); restore the corpus"
                )

    @readable()
    def verify(self, on_read: OnRead = lambda n_bytes: None) -> None:
        """Reads everything; DataError for the first file whose hash is not the manifest's.

        Files of nanoGPT and llm.c have no hashes. Instead, every id is checked, and the sampled hash from when they were opened. Memory
        use does not grow with the corpus.

        Args:
            on_read: is called with the size of each file of tokens after it has been read, in bytes.
        """
        for name, expected in self.manifest["tokenizer"]["files"].items():
            check_sha256(self.path / name, expected)
        for shard in (shard for split in SPLITS for shard in self.manifest["splits"][split]["shards"]):
            file = self.path / shard["file"]
            if "documents" in shard:
                check_sha256(file, shard["sha256"])
            else:
                self._check_ids(file, shard["tokens"])
                check_sha256(file, shard["sha256"], sampled_sha256(file, self.header))
            on_read(shard["tokens"] * self.dtype.itemsize)

    def _check_ids(self, file: Path, n_tokens: int) -> None:
        for position in range(0, n_tokens, CHUNK_TOKENS):
            tokens = np.fromfile(file, self.dtype, CHUNK_TOKENS, offset=self.header + position * self.dtype.itemsize)
            if tokens.max(initial=0) >= self.vocab_size:
                first = int(np.argmax(tokens >= self.vocab_size))
                raise DataError(
                    f"{file}: token id {tokens[first]} at token {position + first}; allowed: 0 to {self.vocab_size - 1}; it is damaged,"
                    " prepare the corpus again"
                )


@readable()
def open_corpus(path: str | Path) -> Corpus:
    """The corpus in folder `path`, which `prepare.py`, nanoGPT or llm.c wrote, after every check that can be done without reading tokens.

    Raises:
        DataError: something is missing or wrong; names the file and the fix.
    """
    path = Path(path)
    if not path.is_dir():
        near = nearest_name(path.name, (file.parent.name for file in path.parent.glob(f"*/{MANIFEST_FILE}")))
        meant = f"did you mean {path.parent / near}? Else " if near else ""
        raise DataError(f"{path}: no such corpus; {meant}prepare one with: {PREPARE_COMMAND.format(path)}")
    if is_nanogpt(path):
        return Corpus(path, *nanogpt_manifest(path))
    manifest = read_manifest(path / MANIFEST_FILE)
    for name in manifest["tokenizer"]["files"]:
        _check_file(path / name)
    itemsize = np.dtype(manifest["dtype"]).itemsize
    for shard in (shard for split in SPLITS for shard in manifest["splits"][split]["shards"]):
        _check_file(path / shard["file"], shard["tokens"] * itemsize)
    return Corpus(path, manifest)


def _identity(file: Path) -> tuple[int, int, int]:
    """What changes when a file is written to or replaced."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _check_file(file: Path, size: int | None = None) -> None:
    """DataError unless `file` exists and, if `size` is given, has this size."""
    if not file.is_file():
        raise DataError(f"{file}: missing, the corpus is incomplete; prepare it again")
    found = file.stat().st_size
    if size is not None and found != size:
        raise DataError(f"{file}: has {found:,} bytes, but in the manifest {size:,}; copy or prepare the corpus again")
