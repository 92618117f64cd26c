"""The folder of GPT-2's ids that nanoGPT's prepare.py writes, read in place: `--data data/openwebtext`

train.bin, val.bin      little-endian uint16, without hashes
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.manifest import FORMAT_VERSION, MANIFEST_FILE, SPLITS

FILES = {split: f"{split}.bin" for split in SPLITS}
#: The file that nanoGPT writes where ids are not GPT-2's, but characters.
META_FILE = "meta.pkl"
GPT2_VOCAB_SIZE, GPT2_END_OF_TEXT = 50_257, 50_256
ITEMSIZE = 2
#: The fingerprint of a file is of so many blocks of so many bytes, evenly spaced, including the first and the last.
BLOCKS, BLOCK_BYTES = 64, 65_536


def is_nanogpt(path: Path) -> bool:
    """Whether `path` has one of nanoGPT's files and no manifest."""
    return not os.path.lexists(path / MANIFEST_FILE) and any(os.path.lexists(path / file) for file in FILES.values())


def nanogpt_manifest(path: Path) -> dict[str, Any]:
    """The manifest that nanoGPT's folder would have. Takes milliseconds whatever its size.

    The hash of a file is that of its size and of BLOCKS blocks. It changes when tokens are added, removed or shifted. It misses ids that
    are overwritten in place between the blocks, which are 99.98% of a file of 17 GB.

    Raises:
        DataError: a file is missing, empty or has half a token; or the ids are characters.
    """
    if os.path.lexists(path / META_FILE):
        raise DataError(f"{path / META_FILE}: ids that are characters cannot be read; prepare the text with --tokenizer bytes")
    splits = {}
    for split, name in FILES.items():
        if not (path / name).is_file():
            problem = "not a file" if os.path.lexists(path / name) else "missing"
            raise DataError(f"{path / name}: {problem}; a nanoGPT folder has {' and '.join(FILES.values())}; prepare it again")
        size = (path / name).stat().st_size
        if not size or size % ITEMSIZE:
            raise DataError(f"{path / name}: {size:,} bytes; nanoGPT's files are tokens of {ITEMSIZE} bytes; prepare it again")
        shard = {"file": name, "tokens": size // ITEMSIZE, "sha256": _sampled_sha256(path / name), "group": 0}
        splits[split] = {"tokens": size // ITEMSIZE, "shards": [shard]}
    return {
        "format_version": FORMAT_VERSION,
        "dtype": "uint16",
        "vocab_size": GPT2_VOCAB_SIZE,
        "eot_id": GPT2_END_OF_TEXT,
        "tokenizer": {"kind": "tiktoken", "name": "r50k_base", "files": {}},
        "sources": [{"name": f"nanoGPT: {path.resolve()}"}],
        "options": {},
        "mixture": [1.0],
        "dropped": {},
        "splits": splits,
    }


def _sampled_sha256(file: Path) -> str:
    """A hash of the file's size and of BLOCKS blocks of it."""
    size = file.stat().st_size
    sha256 = hashlib.sha256(str(size).encode())
    with open(file, "rb") as stream:
        for number in range(BLOCKS):
            stream.seek(max(0, size - BLOCK_BYTES) * number // (BLOCKS - 1))
            sha256.update(stream.read(BLOCK_BYTES))
    return f"sampled-{sha256.hexdigest()}"
