"""The folders that nanoGPT's prepare.py and llm.c's scripts write, read in place: `--data data/openwebtext`

train.bin, val.bin      little-endian uint16 or uint32, without hashes
*train*.bin, *val*.bin  instead of these: shards of llm.c and modded-nanogpt, such as fineweb_train_000001.bin, each with a header
meta.pkl                only if ids are characters: their number, and the character of each; without this file, ids are GPT-2's

The size of an id is recognized from samples.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError, one_line, printable
from data_pipeline.manifest import FORMAT_VERSION, MANIFEST_FILE, SPLITS

FILES = {split: f"{split}.bin" for split in SPLITS}
META_FILE = "meta.pkl"
GPT2_VOCAB_SIZE, GPT2_END_OF_TEXT = 50_257, 50_256
#: A shard of llm.c begins with 256 int32: this magic, version 1, the number of tokens. Its ids are GPT-2's, uint16.
LLM_C, LLM_C_HEADER_BYTES = (20240520).to_bytes(4, "little"), 1024
CONVERT = "write its ids with numpy: IDS.astype('<u2').tofile('train.bin'), and val.bin alike, or prepare a corpus from the text"
#: Other forms, by the first bytes of a file: what is said of it.
OTHERS = {b"\x93NUMPY": "is a numpy file with a header", (20240801).to_bytes(4, "little"): "is a shard of llm.c with Llama 3's ids"}
#: Number and size of the blocks that a file's fingerprint hashes: evenly spaced, including the first and the last.
BLOCKS, BLOCK_BYTES = 64, 65_536
#: The number for a shard of llm.c, of which a folder may have a thousand.
BLOCKS_OF_SHARD = 4
#: The size of the blocks from which the form of ids is recognized, and the fewest groups of uint16 that suffice.
SAMPLE_BYTES, MIN_GROUPS = 8192, 32


def is_nanogpt(path: Path) -> bool:
    """Whether `path` has no manifest, but files of nanoGPT, of llm.c, or of another form."""
    if os.path.lexists(path / MANIFEST_FILE):
        return False
    return any(os.path.lexists(file) for files in _files(path).values() for file in files)


def _files(path: Path) -> dict[str, list[Path]]:
    """The files of each split: nanoGPT's, which may be missing, or llm.c's if there are only those."""
    nanogpt = {split: [path / file] for split, file in FILES.items()}
    shards = {split: sorted(path.glob(f"*{split}*.bin")) for split in SPLITS}
    # Shards of prepare.py whose manifest is missing have such names, too, but no header.
    if any(os.path.lexists(path / file) for file in FILES.values()) or not any(_start(file) for files in shards.values() for file in files):
        return nanogpt
    return {split: shards[split] or nanogpt[split] for split in SPLITS}


def _start(file: Path) -> bytes:
    """The first bytes of a file with a known header, otherwise none."""
    if not file.is_file():
        return b""
    with open(file, "rb") as stream:
        start = stream.read(12)
    return start if start.startswith((LLM_C, *OTHERS)) else b""


def nanogpt_manifest(path: Path) -> tuple[dict[str, Any], int]:
    """A manifest for a folder of nanoGPT or llm.c, in milliseconds for any size; and the number of bytes before the ids of each file.

    A file's hash covers its size and some blocks. It changes when tokens are added, removed or shifted, but not when ids are overwritten in
    place between the blocks (99.98% of a file of 17 GB).

    Raises:
        DataError: a file is missing, cut or of another form; `meta.pkl` is not nanoGPT's.
    """
    vocab_size, eot_id, tokenizer = _vocabulary(path / META_FILE)
    files = _files(path)
    headers = {file: _header_bytes(file) for split in SPLITS for file in files[split]}
    sizes = {size for file, n_bytes in headers.items() if (size := 2 if n_bytes else _itemsize(file, vocab_size))}
    if len(set(headers.values())) > 1 or len(sizes) > 1:
        raise DataError(f"{path}: its files differ in form (some with the header of llm.c, or ids of 2 and 4 bytes); prepare them again")
    header, itemsize = max(headers.values()), max(sizes, default=2)
    splits = {}
    for split in SPLITS:
        n_tokens, shards = 0, []
        for file in files[split]:
            size = file.stat().st_size - header
            if not size or size % itemsize:
                raise DataError(f"{file}: {size:,} bytes; nanoGPT's files are tokens of {itemsize} bytes; prepare it again")
            shards.append({"file": file.name, "tokens": size // itemsize, "sha256": sampled_sha256(file, header), "group": 0})
            n_tokens += size // itemsize
        splits[split] = {"tokens": n_tokens, "shards": shards}
    manifest = {
        "format_version": FORMAT_VERSION,
        "dtype": f"uint{8 * itemsize}",
        "vocab_size": vocab_size,
        "eot_id": eot_id,
        "tokenizer": tokenizer,
        "sources": [{"name": f"{'llm.c' if header else 'nanoGPT'}: {path.resolve()}"}],
        "options": {},
        "mixture": [1.0],
        "dropped": {},
        "splits": splits,
    }
    return manifest, header


def _header_bytes(file: Path) -> int:
    """The number of bytes before the first id. DataError if the file is missing, cut, or of another form."""
    if not file.is_file():
        raise DataError(f"{file}: missing; a nanoGPT folder has train.bin and val.bin; copy the missing file there, or prepare it again")
    start = _start(file)
    for magic, what in OTHERS.items():
        if start.startswith(magic):
            raise DataError(f"{file}: {what}; {CONVERT}")
    if not start:
        return 0
    version, tokens = np.frombuffer(start[4:].ljust(8, b"\0"), "<i4").tolist()
    if version != 1 or file.stat().st_size != LLM_C_HEADER_BYTES + 2 * tokens:
        raise DataError(f"{file}: a shard of llm.c that is cut or not of version 1 (version {version}, {tokens:,} tokens); copy it again")
    return LLM_C_HEADER_BYTES


def _itemsize(file: Path, vocab_size: int) -> int | None:
    """The size of an id, 2 or 4 bytes, or None if the file is too short to tell. DataError if its ids are in another form."""
    size = file.stat().st_size
    starts = sorted({start // 8 * 8 for start in _blocks(size, BLOCKS, SAMPLE_BYTES)})
    words = np.concatenate([np.fromfile(file, "<u2", min(SAMPLE_BYTES, size) // 8 * 4, offset=start) for start in starts])
    if not words.size:
        return None
    ids = _ids(words)
    swapped = ids.max() >= vocab_size > _ids(words.byteswap()[::-1]).max()
    if swapped or ids.itemsize > 4 or (ids.itemsize == 4 and ids.max() >= vocab_size):
        form = "big-endian" if swapped else f"{8 * ids.itemsize}-bit"
        raise DataError(f"{file}: has {form} ids, up to {ids.max():,} as read, but a vocabulary of {vocab_size:,}; {CONVERT}")
    return ids.itemsize if ids.itemsize == 4 or words.size >= 2 * MIN_GROUPS else None


def _ids(words: np.ndarray) -> np.ndarray:
    """The ids of which `words` are the parts. All but the first part of a larger id are 0 or nearly 0, as ids are far below 2^32."""
    for parts in (4, 2):
        groups = words.reshape(-1, parts)
        if len(groups) >= MIN_GROUPS and (groups[:, 0] > groups[:, 1:].max()).mean() > 0.5:
            return np.ascontiguousarray(words).view(f"<u{2 * parts}")
    return words


def _blocks(size: int, count: int, n_bytes: int) -> list[int]:
    """Where `count` evenly spaced blocks of a file start."""
    return [max(0, size - n_bytes) * number // (count - 1) for number in range(count)]


def sampled_sha256(file: Path, header: int) -> str:
    """A hash of a file's size and of some blocks of it. header: the number of bytes before its ids."""
    size = file.stat().st_size
    sha256 = hashlib.sha256(str(size).encode())
    with open(file, "rb") as stream:
        for start in _blocks(size, BLOCKS_OF_SHARD if header else BLOCKS, BLOCK_BYTES):
            stream.seek(start)
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
    try:
        if not file.is_file():  # reading a pipe would wait for ever
            raise ValueError("not a file")
        meta = _PlainUnpickler(io.BytesIO(file.read_bytes())).load()
        size, itos = meta["vocab_size"], meta["itos"]
        if type(size) is not int or not 0 < size <= 2**16:
            raise ValueError("vocab_size is not a number up to 65,536")
        characters = [itos[i] for i in range(size)]
        if not all(isinstance(c, str) and len(c) == 1 for c in characters) or len(set(characters)) < size:
            raise ValueError("itos has not a different character for each id")
    except Exception as reason:  # damaged bytes raise exceptions of any type
        why = printable(one_line(reason, 100))
        raise DataError(f"{file}: not nanoGPT's meta.pkl ({why}); prepare it again, or remove it if the ids are GPT-2's") from None
    return size, None, {"kind": "characters", "characters": "".join(characters), "files": {}}
