"""A folder as nanoGPT's prepare.py leaves it, read where it lies: `--data data/openwebtext`

train.bin, val.bin      little-endian uint16, and nothing that vouches for them
meta.pkl                where ids are characters: their number and what each is; without it they are GPT-2's
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.shards import CHUNK_TOKENS, FORMAT_VERSION, MANIFEST_FILE, SPLITS, Corpus, readable

FILES = {split: f"{split}.bin" for split in SPLITS}
META_FILE = "meta.pkl"
GPT2_VOCAB_SIZE, GPT2_END_OF_TEXT = 50_257, 50_256
ITEMSIZE = 2
#: What the fingerprint reads of a file: so many blocks of so many bytes, evenly spaced, the first and the last among them.
BLOCKS, BLOCK_BYTES = 64, 65_536
#: 65,536 characters take 1.5 MB.
MAX_META_BYTES = 2**24
#: What Python writes a dict of numbers and strings with, whatever the protocol.
PLAIN_OPCODES = {
    "PROTO", "FRAME", "MARK", "STOP", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "NONE",
    "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
}  # fmt: skip


def is_nanogpt(path: Path) -> bool:
    """Whether `path` has one of nanoGPT's files, and no manifest of ours."""
    return not os.path.lexists(path / MANIFEST_FILE) and any(os.path.lexists(path / file) for file in FILES.values())


class NanoGPTCorpus(Corpus):
    """Opened in milliseconds whatever its size: the fingerprint is of the sizes and of BLOCKS blocks of each file.

    Text that is longer or shorter by a token is another corpus, and so is text whose ids have moved. A change that moves nothing and lies
    between the blocks is not noticed: ids written over in place, of which a file of 17 GB has 99.98% outside of them.

    Raises:
        DataError: a file is missing, empty or has half a token; `meta.pkl` is not nanoGPT's.
    """

    def __init__(self, path: Path):
        vocab_size, eot_id, tokenizer = _vocabulary(path / META_FILE)
        splits = {}
        for split, name in FILES.items():
            if not (path / name).is_file():
                problem = "not a file" if os.path.lexists(path / name) else "missing"
                raise DataError(
                    f"{path / name}: {problem}; a folder of nanoGPT's has {' and '.join(FILES.values())} (one of ours has {MANIFEST_FILE}"
                    " instead); copy it there, or prepare it again"
                )
            size = (path / name).stat().st_size
            if not size or size % ITEMSIZE:
                raise DataError(f"{path / name}: {size:,} bytes; nanoGPT's files are tokens of {ITEMSIZE} bytes; prepare it again")
            shard = {"file": name, "tokens": size // ITEMSIZE, "sha256": _sampled_sha256(path / name), "group": 0}
            splits[split] = {"tokens": size // ITEMSIZE, "shards": [shard]}
        manifest: dict[str, Any] = {
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
        super().__init__(path, manifest)

    @readable()
    def verify(self, watch: Callable[[int], None] = lambda n_bytes: None) -> None:
        """Reads every token; DataError on the first id that the vocabulary lacks, and where a file has changed since it was opened.

        Nothing else can be known of these files.
        """
        for split, name in FILES.items():
            position = 0
            with open(self.path / name, "rb") as stream:
                while data := stream.read(CHUNK_TOKENS * ITEMSIZE):
                    tokens = np.frombuffer(data[: len(data) // ITEMSIZE * ITEMSIZE], dtype=self.dtype)
                    self._check_ids(self.path / name, tokens, position, "prepare it again", f" of {split}")
                    position += len(tokens)
                    watch(len(data))
            (shard,) = self.manifest["splits"][split]["shards"]
            if position != shard["tokens"] or _sampled_sha256(self.path / name) != shard["sha256"]:
                raise DataError(f"{self.path / name}: changed since it was opened; start again")


def _sampled_sha256(file: Path) -> str:
    size = file.stat().st_size
    sha256 = hashlib.sha256(str(size).encode())
    with open(file, "rb") as stream:
        for number in range(BLOCKS):
            stream.seek(max(0, size - BLOCK_BYTES) * number // (BLOCKS - 1))
            sha256.update(stream.read(BLOCK_BYTES))
    return f"sampled-{sha256.hexdigest()}"


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpickled(data: bytes) -> Any:
    """What holds numbers and strings. A pickle that asks for more could run code, or take all time and memory there is."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in PLAIN_OPCODES:
            raise pickle.UnpicklingError(f"it has the opcode {opcode.name}; allowed: those of numbers, strings, dicts and lists")
        if opcode.name.endswith("PUT") and int(argument or 0) > len(data):  # a table of that length would be made
            raise pickle.UnpicklingError(f"it puts something at place {argument}")
    return _Plain(io.BytesIO(data)).load()


def _vocabulary(file: Path) -> tuple[int, int | None, dict[str, Any]]:
    """How many ids there are, which ends a text (None where none does), and the manifest's entry of the tokenizer."""
    if not os.path.lexists(file):
        return GPT2_VOCAB_SIZE, GPT2_END_OF_TEXT, {"kind": "tiktoken", "name": "r50k_base", "files": {}}
    fix = "prepare it again, or remove it if the ids are GPT-2's"
    if not file.is_file() or file.stat().st_size > MAX_META_BYTES:
        raise DataError(f"{file}: is no meta.pkl of nanoGPT, which is a file of at most {MAX_META_BYTES:,} bytes; {fix}")
    data = file.read_bytes()
    try:
        meta = _unpickled(data)
    except Exception as reason:  # whatever bytes make of a pickle
        said = "".join(c if c.isprintable() else " " for c in str(reason))[:100]
        raise DataError(f"{file}: is no meta.pkl of nanoGPT ({said}); {fix}") from None
    size = meta.get("vocab_size") if isinstance(meta, dict) else None
    itos = meta.get("itos") if isinstance(meta, dict) else None
    if type(size) is not int or not 0 < size <= 2**16 or not isinstance(itos, dict):
        raise DataError(f"{file}: has no vocab_size up to 65,536 with itos, the character of each id; {fix}")
    characters = [itos.get(i) for i in range(size)]
    if not all(isinstance(c, str) and len(c) == 1 for c in characters) or len(set(characters)) < size:
        raise DataError(f"{file}: itos has not one character of its own for each id below {size}; {fix}")
    return size, None, {"kind": "characters", "characters": "".join(characters), "files": {}}  # type: ignore[arg-type]
