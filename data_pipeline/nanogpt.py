"""The folder that nanoGPT's prepare.py writes, read in place: `--data data/openwebtext`

train.bin, val.bin      little-endian uint16, without hashes
meta.pkl                only if ids are characters: their number, and the character of each; without this file, ids are GPT-2's
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError, one_line, printable
from data_pipeline.manifest import FORMAT_VERSION, MANIFEST_FILE, SPLITS

FILES = {split: f"{split}.bin" for split in SPLITS}
META_FILE = "meta.pkl"
GPT2_VOCAB_SIZE, GPT2_END_OF_TEXT = 50_257, 50_256
ITEMSIZE = 2
#: Number and size of the blocks that a file's fingerprint hashes: evenly spaced, including the first and the last.
BLOCKS, BLOCK_BYTES = 64, 65_536
#: Largest meta.pkl; 65,536 characters take 1.5 MB.
MAX_META_BYTES = 2**24


def is_nanogpt(path: Path) -> bool:
    """Whether `path` has one of nanoGPT's files and no manifest."""
    return not os.path.lexists(path / MANIFEST_FILE) and any(os.path.lexists(path / file) for file in FILES.values())


def nanogpt_manifest(path: Path) -> dict[str, Any]:
    """A manifest for nanoGPT's folder, in milliseconds for any size.

    A file's hash covers its size and BLOCKS blocks. It changes when tokens are added, removed or shifted, but not when ids are overwritten
    in place between the blocks (99.98% of a file of 17 GB).

    Raises:
        DataError: a file is missing, empty or has half a token; `meta.pkl` is not nanoGPT's.
    """
    vocab_size, eot_id, tokenizer = _vocabulary(path / META_FILE)
    splits = {}
    for split, name in FILES.items():
        if not (path / name).is_file():
            problem = "not a file" if os.path.lexists(path / name) else "missing"
            raise DataError(
                f"{path / name}: {problem}; a nanoGPT folder has {' and '.join(FILES.values())} (one from prepare.py: {MANIFEST_FILE});"
                " copy the missing file there, or prepare the folder again"
            )
        size = (path / name).stat().st_size
        if not size or size % ITEMSIZE:
            raise DataError(f"{path / name}: {size:,} bytes; nanoGPT's files are tokens of {ITEMSIZE} bytes; prepare it again")
        shard = {"file": name, "tokens": size // ITEMSIZE, "sha256": sampled_sha256(path / name), "group": 0}
        splits[split] = {"tokens": size // ITEMSIZE, "shards": [shard]}
    return {
        "format_version": FORMAT_VERSION,
        "dtype": "uint16",
        "vocab_size": vocab_size,
        "eot_id": eot_id,
        "tokenizer": tokenizer,
        "sources": [{"name": f"nanoGPT: {path.resolve()}"}],
        "options": {},
        "mixture": [1.0],
        "dropped": {},
        "splits": splits,
    }


def sampled_sha256(file: Path) -> str:
    """A hash of the file's size and of BLOCKS blocks of it."""
    size = file.stat().st_size
    sha256 = hashlib.sha256(str(size).encode())
    with open(file, "rb") as stream:
        for number in range(BLOCKS):
            stream.seek(max(0, size - BLOCK_BYTES) * number // (BLOCKS - 1))
            sha256.update(stream.read(BLOCK_BYTES))
    return f"sampled-{sha256.hexdigest()}"


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings, lists and dicts; refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _vocabulary(file: Path) -> tuple[int, int | None, dict[str, Any]]:
    """The number of ids, the end-of-text id or None, and the manifest's entry of the tokenizer."""
    if not os.path.lexists(file):
        return GPT2_VOCAB_SIZE, GPT2_END_OF_TEXT, {"kind": "tiktoken", "name": "r50k_base", "files": {}}
    fix = "prepare it again, or remove it if the ids are GPT-2's"
    if not file.is_file() or file.stat().st_size > MAX_META_BYTES:
        raise DataError(f"{file}: not nanoGPT's meta.pkl, which is a file of at most {MAX_META_BYTES:,} bytes; {fix}")
    try:
        meta = _PlainUnpickler(io.BytesIO(file.read_bytes())).load()
    except Exception as reason:  # damaged bytes raise exceptions of any type
        raise DataError(f"{file}: not nanoGPT's meta.pkl ({printable(one_line(reason, 100))}); {fix}") from None
    size, itos = (meta.get("vocab_size"), meta.get("itos")) if isinstance(meta, dict) else (None, None)
    if type(size) is not int or not 0 < size <= 2**16 or not isinstance(itos, dict):
        raise DataError(f"{file}: needs vocab_size, up to 65,536, and itos, the character of each id; {fix}")
    characters = [itos.get(i) for i in range(size)]
    if not all(isinstance(c, str) and len(c) == 1 for c in characters) or len(set(characters)) < size:
        raise DataError(f"{file}: itos must have a different character for each id below {size}; {fix}")
    return size, None, {"kind": "characters", "characters": "".join(characters), "files": {}}  # type: ignore[arg-type]
