"""Writes a corpus: shards of a fixed number of tokens, the ends of documents in them, the manifest, and the progress for `--resume`.

train-00000.bin     ids, little-endian
train-00000.ends    for each document that ends in the shard, the position after its end of text: little-endian uint32
.progress.json      how much of all files is on the disk; removed when the corpus is complete
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_pipeline.encoding import Encoded
from data_pipeline.errors import DataError
from data_pipeline.manifest import FORMAT_VERSION, MANIFEST_FILE, SPLITS, token_dtype
from data_pipeline.shards import ENDS_DTYPE

PROGRESS_FILE = ".progress.json"
#: Seconds between two commits. Each synchronizes all open files to disk.
SECONDS_BETWEEN_COMMITS = 1.0


class _File:
    """A file to append to, with the hash of its content."""

    def __init__(self, path: Path, size: int = 0):
        self.path, self.size = path, size
        self._sha256 = hashlib.sha256()
        self._file: BinaryIO = open(path, "r+b" if size else "wb")  # noqa: SIM115 (it outlives this call)
        while size:  # hash what an interrupted run has committed
            data = self._file.read(min(size, 2**20))
            if not data:
                raise DataError(f"{path}: shorter than when the run was interrupted; remove {path.parent} and prepare again")
            self._sha256.update(data)
            size -= len(data)
        self._file.truncate()

    def append(self, values: np.ndarray) -> None:
        if not len(values):  # an empty memoryview cannot be cast
            return
        data = values.data.cast("B")
        self._file.write(data)
        self._sha256.update(data)
        self.size += len(data)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> str:
        """Synchronize and close the file; return its hash."""
        self.sync()
        self._file.close()
        return self._sha256.hexdigest()

    def close(self) -> None:
        self._file.close()


class ShardWriter:
    """Writes one split as shards of `shard_tokens` tokens, except the last one of each group. Documents may continue in the next shard.

    `state` is what an earlier writer's `commit` returned, to continue from there.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, state: dict[str, Any] | None = None):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.bytes: int = state["bytes"] if state else 0
        self._shards: list[dict[str, Any]] = state["shards"] if state else []
        self._files: tuple[_File, _File] | None = None
        if state and state["open"]:
            shard = self._shards[-1]
            self._open(shard, shard["tokens"] * dtype.itemsize, shard["documents"] * ENDS_DTYPE.itemsize)

    def write(self, encoded: Encoded) -> None:
        """Append the ids of one group, with the ends of the documents in them."""
        self.bytes += encoded.n_bytes
        ids = np.ascontiguousarray(encoded.ids, dtype=self.dtype)
        ends = encoded.ends
        while len(ids):
            if self._files and self._shards[-1]["group"] != encoded.group:
                self._finish_shard()
            if self._files is None:
                name = f"{self.split}-{len(self._shards):05d}"
                empty = {"file": f"{name}.bin", "tokens": 0, "sha256": "", "group": encoded.group, "documents": 0}
                self._shards.append({**empty, "ends": {"file": f"{name}.ends", "sha256": ""}})
                self._open(self._shards[-1], 0, 0)
            assert self._files is not None
            shard = self._shards[-1]
            room = self.shard_tokens - shard["tokens"]
            here = int(np.searchsorted(ends, room, side="right"))
            self._files[0].append(ids[:room])
            self._files[1].append((ends[:here] + shard["tokens"]).astype(ENDS_DTYPE))
            shard["tokens"] += len(ids[:room])
            shard["documents"] += here
            ids, ends = ids[room:], ends[here:] - room
            if shard["tokens"] == self.shard_tokens:
                self._finish_shard()

    def commit(self) -> dict[str, Any]:
        """Synchronize to disk and return the state that a new writer continues from."""
        for file in self._files or ():
            file.sync()
        return {"bytes": self.bytes, "shards": self._shards, "open": self._files is not None}

    def finish(self) -> dict[str, Any]:
        """Finish the last shard and return the manifest entry of this split."""
        self._finish_shard()
        total = {key: sum(shard[key] for shard in self._shards) for key in ("tokens", "documents")}
        return {**total, "bytes": self.bytes, "shards": self._shards}

    def close(self) -> None:
        """Close the files and keep them."""
        for file in self._files or ():
            file.close()

    def _open(self, shard: dict[str, Any], tokens_size: int, ends_size: int) -> None:
        self._files = _File(self.folder / shard["file"], tokens_size), _File(self.folder / shard["ends"]["file"], ends_size)

    def _finish_shard(self) -> None:
        if self._files is not None:
            self._shards[-1]["sha256"] = self._files[0].finish()
            self._shards[-1]["ends"]["sha256"] = self._files[1].finish()
            self._files = None


class CorpusWriter:
    """Writes both splits of a corpus to a partial folder, and the progress from which an interrupted run resumes.

    Args:
        identity: sources, their state, and options, which must be the same on resume.
        progress: the result of `read_progress`, to resume from.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        shard_tokens: int,
        identity: dict[str, Any],
        tokenizer_entry: dict[str, Any],
        progress: dict[str, Any] | None,
    ):
        self.folder, self._identity, self._tokenizer_entry = folder, identity, tokenizer_entry
        self.chunks: int = progress["chunks"] if progress else 0
        states = progress["writers"] if progress else {}
        self.dtype = token_dtype(vocab_size)
        self.splits = {split: ShardWriter(folder, split, self.dtype, shard_tokens, states.get(split)) for split in SPLITS}
        self.documents = self.tokens = 0  # written by this process
        self._committed = 0.0
        if progress is None:
            self.commit()

    def write(self, chunk: list[Encoded]) -> None:
        """Append one chunk of text, encoded."""
        for encoded in chunk:
            self.splits[encoded.split].write(encoded)
            self.documents += len(encoded.ends)
            self.tokens += len(encoded.ids)
        self.chunks += 1
        if time.monotonic() - self._committed >= SECONDS_BETWEEN_COMMITS:
            self.commit()

    def commit(self) -> None:
        """Record what has been written so far, for an interrupted run to resume from."""
        writers = {name: writer.commit() for name, writer in self.splits.items()}
        progress = {"identity": self._identity, "tokenizer": self._tokenizer_entry, "chunks": self.chunks, "writers": writers}
        _write_json(self.folder / PROGRESS_FILE, progress)
        self._committed = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Finish the shards and return the manifest entries of the splits."""
        splits = {name: writer.finish() for name, writer in self.splits.items()}
        mentioned = {file for split in splits.values() for shard in split["shards"] for file in (shard["file"], shard["ends"]["file"])}
        for file in self.folder.glob("*-*.*"):  # started after the last commit of an interrupted run, and not needed
            if file.suffix in (".bin", ".ends") and file.name not in mentioned:
                file.unlink()
        return splits

    def close(self) -> None:
        """Close the files and keep them."""
        for writer in self.splits.values():
            writer.close()


def read_progress(folder: Path) -> dict[str, Any] | None:
    """The last commit of an interrupted run in `folder`; None if there is none."""
    try:
        progress = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return progress if isinstance(progress, dict) and isinstance(progress.get("chunks"), int) else None


def write_manifest(folder: Path, vocab_size: int, eot_id: int, **rest: Any) -> None:
    """Write `manifest.json`, the last file of a corpus.

    Args:
        rest: `tokenizer` (the result of Tokenizer.save), `sources`, `options`, `mixture` (a weight per group), `dropped`, `splits`.
    """
    known = {"format_version": FORMAT_VERSION, "dtype": token_dtype(vocab_size).name, "vocab_size": vocab_size, "eot_id": eot_id}
    _write_json(folder / MANIFEST_FILE, {**known, **rest})


def remove_progress(folder: Path) -> None:
    """Remove the file from which an interrupted run would resume."""
    (folder / PROGRESS_FILE).unlink(missing_ok=True)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(value, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
