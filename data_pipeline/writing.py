"""Writes a corpus: shards of a fixed number of tokens, the ends of documents in them, the manifest, and the progress for `--resume`.

train-00000.bin     ids, little-endian
train-00000.ends    for each document that ends in the shard, the position after its end of text: little-endian uint32
.progress.json      how much of all files is on the disk; removed when the corpus is complete
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_pipeline.encoding import Encoded
from data_pipeline.errors import DataError
from data_pipeline.manifest import FORMAT_VERSION, MANIFEST_FILE, SPLITS, sha256_of, token_dtype
from data_pipeline.shards import ENDS_DTYPE

PROGRESS_FILE = ".progress.json"
#: Seconds between two commits. Each synchronizes all open files to disk.
SECONDS_BETWEEN_COMMITS = 1.0


def _open(path: Path, size: int) -> BinaryIO:
    """The file `path` to append to, cut to its first `size` bytes."""
    file = open(path, "r+b" if size else "wb")  # noqa: SIM115 (it outlives this call)
    if file.seek(0, os.SEEK_END) < size:
        raise DataError(f"{path}: shorter than when the run was interrupted; remove {path.parent} and prepare again")
    file.seek(size)
    file.truncate()
    return file


class ShardWriter:
    """Writes one split as shards of `shard_tokens` tokens, except the last one of each group. Documents may continue in the next shard.

    `state` is what an earlier writer's `commit` returned, to continue from there.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, state: dict[str, Any] | None = None):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.bytes: int = state["bytes"] if state else 0
        self._shards: list[dict[str, Any]] = state["shards"] if state else []
        self._files: list[BinaryIO] = []  # of the last shard while it is not full: tokens and ends
        if state and state["open"]:
            self._open_shard()

    def write(self, encoded: Encoded) -> None:
        """Append the ids of one group, with the ends of the documents in them."""
        self.bytes += encoded.n_bytes
        ids = np.ascontiguousarray(encoded.ids, dtype=self.dtype)
        ends = encoded.ends
        while len(ids):
            if self._files and self._shards[-1]["group"] != encoded.group:
                self._finish_shard()
            if not self._files:
                name = f"{self.split}-{len(self._shards):05d}"
                empty = {"file": f"{name}.bin", "tokens": 0, "sha256": "", "group": encoded.group, "documents": 0}
                self._shards.append({**empty, "ends": {"file": f"{name}.ends", "sha256": ""}})
                self._open_shard()
            shard = self._shards[-1]
            room = self.shard_tokens - shard["tokens"]
            here = int(np.searchsorted(ends, room, side="right"))
            self._files[0].write(ids[:room].data)
            self._files[1].write((ends[:here] + shard["tokens"]).astype(ENDS_DTYPE).data)
            shard["tokens"] += len(ids[:room])
            shard["documents"] += here
            ids, ends = ids[room:], ends[here:] - room
            if shard["tokens"] == self.shard_tokens:
                self._finish_shard()

    def commit(self) -> dict[str, Any]:
        """Synchronize to disk and return the state that a new writer continues from."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return {"bytes": self.bytes, "shards": self._shards, "open": bool(self._files)}

    def finish(self) -> dict[str, Any]:
        """Finish the last shard and return the manifest entry of this split."""
        self._finish_shard()
        total = {key: sum(shard[key] for shard in self._shards) for key in ("tokens", "documents")}
        return {**total, "bytes": self.bytes, "shards": self._shards}

    def close(self) -> None:
        """Close the files and keep them."""
        for file in self._files:
            file.close()

    def _open_shard(self) -> None:
        """Open the files of the last shard, truncated to their recorded length."""
        shard = self._shards[-1]
        tokens, ends = shard["tokens"] * self.dtype.itemsize, shard["documents"] * ENDS_DTYPE.itemsize
        self._files = [_open(self.folder / shard["file"], tokens), _open(self.folder / shard["ends"]["file"], ends)]

    def _finish_shard(self) -> None:
        """Close the files of the last shard, if they are open, and record their hashes."""
        if self._files:
            self.commit()
            self.close()
            self._files = []
            for entry in (self._shards[-1], self._shards[-1]["ends"]):
                entry["sha256"] = sha256_of(self.folder / entry["file"])


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
