"""Writes a corpus: shards of a fixed number of tokens, the manifest, and the progress for `--resume`.

train-00000.bin     ids, little-endian
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
from data_pipeline.staging import remove_unfinished, write_atomically
from data_pipeline.tokenizer import Tokenizer

PROGRESS_FILE = ".progress.json"
#: Seconds between two commits. Each synchronizes all open files to disk.
SECONDS_BETWEEN_COMMITS = 1.0


class ShardWriter:
    """Writes one split as shards of `shard_tokens` tokens, except the last one of each group. Documents may continue in the next shard.

    `state` is what an earlier writer's `commit` returned, to continue from there.
    """

    def __init__(self, folder: Path, split_name: str, dtype: np.dtype, eot_id: int, shard_tokens: int, state: dict[str, Any] | None = None):
        self.folder, self.split_name, self.dtype, self.eot_id, self.shard_tokens = folder, split_name, dtype, eot_id, shard_tokens
        self.bytes: int = state["bytes"] if state else 0
        self._shards: list[dict[str, Any]] = state["shards"] if state else []
        self._file: BinaryIO | None = None  # the last shard, while it is not full
        if state and state["open"]:
            self._file = self._open_shard()

    def write(self, encoded: Encoded) -> None:
        """Append the ids of one group."""
        self.bytes += encoded.n_bytes
        ids = np.ascontiguousarray(encoded.ids, dtype=self.dtype)
        while len(ids):
            if self._file and self._shards[-1]["group"] != encoded.group:
                self._finish_shard()
            if not self._file:
                file = f"{self.split_name}-{len(self._shards):05d}.bin"
                self._shards.append({"file": file, "tokens": 0, "sha256": "", "group": encoded.group, "documents": 0})
                self._file = self._open_shard()
            shard = self._shards[-1]
            room = self.shard_tokens - shard["tokens"]
            part, ids = ids[:room], ids[room:]
            self._file.write(part.data)
            shard["tokens"] += len(part)
            shard["documents"] += int(np.count_nonzero(part == self.eot_id))
            if shard["tokens"] == self.shard_tokens:
                self._finish_shard()

    def commit(self) -> dict[str, Any]:
        """Synchronize to disk and return the state that a new writer continues from."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"bytes": self.bytes, "shards": self._shards, "open": self._file is not None}

    def finish(self) -> dict[str, Any]:
        """Finish the last shard and return the manifest entry of this split."""
        self._finish_shard()
        total = {key: sum(shard[key] for shard in self._shards) for key in ("tokens", "documents")}
        return {**total, "bytes": self.bytes, "shards": self._shards}

    def close(self) -> None:
        """Close the file and keep it."""
        if self._file:
            self._file.close()

    def _open_shard(self) -> BinaryIO:
        """The file of the last shard to append to, truncated to its recorded length."""
        shard = self._shards[-1]
        path, size = self.folder / shard["file"], shard["tokens"] * self.dtype.itemsize
        file = open(path, "r+b" if size else "wb")  # noqa: SIM115 (it outlives this call)
        if file.seek(0, os.SEEK_END) < size:
            raise DataError(f"{path}: shorter than when the run was interrupted; remove {path.parent} and prepare again")
        file.seek(size)
        file.truncate()
        return file

    def _finish_shard(self) -> None:
        """Close the last shard, if it is open, and record its hash."""
        if self._file:
            self.commit()
            self.close()
            self._file = None
            self._shards[-1]["sha256"] = sha256_of(self.folder / self._shards[-1]["file"])


class CorpusWriter:
    """Writes both splits of a corpus to a partial folder, and the progress from which an interrupted run resumes.

    Args:
        identity: sources, their state, and options, which must be the same on resume.
        progress: the result of `read_progress`, to resume from.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        shard_tokens: int,
        identity: dict[str, Any],
        tokenizer_entry: dict[str, Any],
        progress: dict[str, Any] | None,
    ):
        self.folder, self._identity, self._tokenizer_entry = folder, identity, tokenizer_entry
        self.chunks: int = progress["chunks"] if progress else 0
        states = progress["writers"] if progress else {}
        form = token_dtype(tokenizer.vocab_size), tokenizer.eot_id, shard_tokens
        self.splits = {name: ShardWriter(folder, name, *form, states.get(name)) for name in SPLITS}
        self._committed = 0.0
        if progress is None:
            self.commit()

    def write(self, chunk: list[Encoded]) -> None:
        """Append one chunk of text, encoded."""
        for encoded in chunk:
            self.splits[encoded.split_name].write(encoded)
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
        mentioned = {shard["file"] for split in splits.values() for shard in split["shards"]}
        for file in self.folder.glob("*-*.bin"):  # started after the last commit of an interrupted run, and not needed
            if file.name not in mentioned:
                file.unlink()
        return splits

    def close(self) -> None:
        """Close the files and keep them."""
        for writer in self.splits.values():
            writer.close()


def read_progress(folder: Path) -> dict[str, Any] | None:
    """The last commit of an interrupted run in `folder`; None if there is none."""
    try:
        return json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_manifest(folder: Path, vocab_size: int, eot_id: int, **rest: Any) -> None:
    """Write `manifest.json`, the last file of a corpus.

    Args:
        rest: `tokenizer` (the result of Tokenizer.save), `sources`, `options`, `mixture` (a weight per group), `names` (one per group, only
            in a mixture), `dropped`, `splits`.
    """
    known = {"format_version": FORMAT_VERSION, "dtype": token_dtype(vocab_size).name, "vocab_size": vocab_size, "eot_id": eot_id}
    _write_json(folder / MANIFEST_FILE, {**known, **rest})


def remove_progress(folder: Path) -> None:
    """Remove the file from which an interrupted run would resume, and copies of it that a kill left unfinished."""
    remove_unfinished(folder)
    (folder / PROGRESS_FILE).unlink(missing_ok=True)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(value, indent=2) + "\n")
