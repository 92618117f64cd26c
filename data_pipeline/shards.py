"""The corpus on disk: token shards and the manifest that vouches for them.

    data/stdlib/
        train-00000.bin  ...    little-endian ids, uint16 for up to 65,536 of them, else uint32; an end-of-text id ends each document
        val-00000.bin
        tokenizer.json          for Hugging Face's `tokenizers`
        tokenizer.tiktoken      base64 token and rank, a line each, for `tiktoken`
        manifest.json           what all of this is; written last

`open_corpus` checks everything that costs no reading of tokens; `Corpus.verify` reads every byte.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_pipeline.errors import DataError

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
SPLITS = ("train", "val")
PREPARE_COMMAND = "python data_pipeline/prepare.py --source stdlib --out {}"
CHUNK_TOKENS = 4 * 1024 * 1024

_COUNT = "an integer >= 0"
_TEXT = "a string"
_OBJECT = "an object"
_LIST = "a list"
_IS: dict[str, Callable[[object], bool]] = {
    _COUNT: lambda value: type(value) is int and value >= 0,  # bool is an int, so not isinstance
    _TEXT: lambda value: isinstance(value, str),
    _OBJECT: lambda value: isinstance(value, dict),
    _LIST: lambda value: isinstance(value, list),
}
_MANIFEST_FIELDS = {
    "dtype": _TEXT, "vocab_size": _COUNT, "eot_id": _COUNT, "tokenizer": _OBJECT, "source": _OBJECT, "options": _OBJECT, "splits": _OBJECT,
}  # fmt: skip
_SPLIT_FIELDS = {"tokens": _COUNT, "documents": _COUNT, "bytes": _COUNT, "shards": _LIST}
_SHARD_FIELDS = {"file": _TEXT, "tokens": _COUNT, "sha256": _TEXT}


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype of the format that holds every id."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """What the operating system refuses inside (permissions, a folder in place of a file) is a DataError that names the file."""
    try:
        yield
    except OSError as reason:
        raise DataError(f"{reason.filename}: cannot be read ({reason.strerror}); mend that, or prepare the corpus again") from None


class ShardWriter:
    """Writes one split as shards of `shard_tokens` tokens each, the last one shorter. Documents may cross from one to the next."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.documents = 0
        self.bytes = 0
        self._shards: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None

    def write(self, ids: np.ndarray, documents: int, n_bytes: int) -> None:
        """Appends `ids`: so many whole documents, each with its end of text, of so many bytes of UTF-8 text together."""
        self.documents += documents
        self.bytes += n_bytes
        while len(ids):
            if self._file is None:
                name = f"{self.split}-{len(self._shards):05d}.bin"
                self._shards.append({"file": name, "tokens": 0, "sha256": ""})
                self._file = open(self.folder / name, "xb")  # noqa: SIM115 (it outlives this call)
                self._sha256 = hashlib.sha256()
            shard = self._shards[-1]
            part, ids = np.split(ids, [self.shard_tokens - shard["tokens"]])
            data = np.ascontiguousarray(part, dtype=self.dtype).data.cast("B")
            self._file.write(data)
            self._sha256.update(data)
            shard["tokens"] += len(part)
            if shard["tokens"] == self.shard_tokens:
                self._finish_shard()

    def close(self) -> dict[str, Any]:
        """Finishes the last shard and returns the manifest's entry of this split."""
        self._finish_shard()
        tokens = sum(shard["tokens"] for shard in self._shards)
        return {"tokens": tokens, "documents": self.documents, "bytes": self.bytes, "shards": self._shards}

    def _finish_shard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._shards[-1]["sha256"] = self._sha256.hexdigest()
            self._file = None


def write_manifest(
    folder: Path,
    vocab_size: int,
    eot_id: int,
    tokenizer_entry: dict[str, Any],
    source: dict[str, Any],
    options: dict[str, Any],
    splits: dict[str, Any],
) -> None:
    """Writes `manifest.json`; `tokenizer_entry` is what Tokenizer.save returned, `splits` what each ShardWriter did."""
    manifest = {
        "format_version": FORMAT_VERSION,
        "dtype": token_dtype(vocab_size).name,
        "vocab_size": vocab_size,
        "eot_id": eot_id,
        "tokenizer": tokenizer_entry,
        "source": source,
        "options": options,
        "splits": splits,
    }
    Path(folder, MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


class Split:
    """The tokens of one split, in windows of seq_len + 1 that overlap by one token: the last target is the next first input.

    Windows lie at stride seq_len within each shard and never cross from one shard to the next; a shard's remainder of less
    than seq_len tokens is not used.
    """

    def __init__(self, name: str, folder: Path, dtype: np.dtype, shards: list[dict[str, Any]]):
        self.name = name
        self.n_tokens = sum(shard["tokens"] for shard in shards)
        self._folder, self._dtype, self._shards = folder, dtype, shards
        self._views: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}

    def windows(self, seq_len: int) -> int:
        """How many windows there are; DataError when there is not even one."""
        return int(self._strided(seq_len)[0][-1])

    def read(self, indices: np.ndarray, seq_len: int, out: np.ndarray | None = None) -> np.ndarray:
        """The windows `indices`, each in [0, windows(seq_len)): shape (len(indices), seq_len + 1), in `out` if given."""
        bounds, views = self._strided(seq_len)
        if out is None:
            out = np.empty((len(indices), seq_len + 1), dtype=self._dtype)
        if len(views) == 1:
            out[...] = views[0][indices]
        else:
            shards = np.searchsorted(bounds, indices, side="right") - 1
            for row, (shard, window) in enumerate(zip(shards.tolist(), (indices - bounds[shards]).tolist(), strict=True)):
                out[row] = views[shard][window]
        return out

    def locate(self, index: int, seq_len: int) -> tuple[Path, int]:
        """The shard that holds window `index`, and the position of the window's first token in it."""
        bounds, _ = self._strided(seq_len)
        shard = int(np.searchsorted(bounds, index, side="right")) - 1
        return self._folder / self._shards[shard]["file"], int(index - bounds[shard]) * seq_len

    @_readable()
    def _strided(self, seq_len: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """For each shard the first of its windows (and, last, how many there are), and its windows as a view: (windows, seq_len + 1)."""
        if seq_len not in self._views:
            counts = [max(0, (shard["tokens"] - 1) // seq_len) for shard in self._shards]
            if not sum(counts):
                largest = max((shard["tokens"] for shard in self._shards), default=0)
                raise DataError(
                    f"{self._folder}: no shard of the {self.name} split holds one window of seq_len {seq_len} + 1 tokens (the largest has"
                    f" {largest:,}, the split {self.n_tokens:,}); lower seq_len, or prepare a larger corpus"
                    f"{' or a larger --val_fraction' if self.name == 'val' else ''}"
                )
            views = []
            for shard, count in zip(self._shards, counts, strict=True):
                if not shard["tokens"]:  # an empty file cannot be mapped
                    views.append(np.empty((0, seq_len + 1), dtype=self._dtype))
                    continue
                # A plain array over the map: indexing a numpy.memmap costs several microseconds more.
                tokens = np.memmap(self._folder / shard["file"], dtype=self._dtype, mode="r").view(np.ndarray)
                strides = (seq_len * tokens.itemsize, tokens.itemsize)
                views.append(np.lib.stride_tricks.as_strided(tokens, (count, seq_len + 1), strides, writeable=False))
            self._views[seq_len] = np.cumsum([0, *counts]), views
        return self._views[seq_len]


class Corpus:
    """An opened corpus. `fingerprint` is a hash of its content, the same wherever and whenever it was prepared."""

    def __init__(self, path: Path, manifest: dict[str, Any]):
        self.path = path
        self.manifest = manifest
        self.vocab_size: int = manifest["vocab_size"]
        self.eot_id: int = manifest["eot_id"]
        self.dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self.train, self.val = (Split(name, path, self.dtype, manifest["splits"][name]["shards"]) for name in SPLITS)
        content = {
            "dtype": manifest["dtype"],
            "vocab_size": self.vocab_size,
            "eot_id": self.eot_id,
            "tokenizer": manifest["tokenizer"]["files"],
            "shards": {name: [[shard["tokens"], shard["sha256"]] for shard in manifest["splits"][name]["shards"]] for name in SPLITS},
        }
        self.fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @_readable()
    def verify(self) -> None:
        """Reads everything; DataError on the first file whose hash is not the manifest's, or id that the vocabulary lacks."""
        for name, expected in self.manifest["tokenizer"]["files"].items():
            check_sha256(self.path / name, hashlib.sha256((self.path / name).read_bytes()).hexdigest(), expected)
        for split in SPLITS:
            for shard in self.manifest["splits"][split]["shards"]:
                self._verify_shard(self.path / shard["file"], shard["sha256"])

    def _verify_shard(self, file: Path, expected: str) -> None:
        sha256 = hashlib.sha256()
        with open(file, "rb") as stream:
            position = 0
            while data := stream.read(CHUNK_TOKENS * self.dtype.itemsize):
                sha256.update(data)
                tokens = np.frombuffer(data, dtype=self.dtype)
                if tokens.max() >= self.vocab_size:
                    first = int(np.argmax(tokens >= self.vocab_size))
                    raise DataError(
                        f"{file}: token id {tokens[first]} at token {position + first}; allowed: 0 to {self.vocab_size - 1};"
                        " the shard is damaged, prepare the corpus again"
                    )
                position += len(tokens)
        check_sha256(file, sha256.hexdigest(), expected)


def check_sha256(file: Path, found: str, expected: str | None) -> None:
    """DataError unless the hash found in `file` is the manifest's."""
    if found != expected:
        raise DataError(f"{file}: changed, its sha256 is {found[:16]}..., the manifest's {str(expected)[:16]}...; prepare the corpus again")


@_readable()
def open_corpus(path: str | Path) -> Corpus:
    """The corpus in folder `path`, after every check that needs no reading of tokens; DataError names the file and the fix."""
    path = Path(path)
    if not path.is_dir():
        problem = "not a folder" if path.exists() else "no such corpus"
        raise DataError(f"{path}: {problem}; prepare one with: {PREPARE_COMMAND.format(path)}")
    manifest = _read_manifest(path / MANIFEST_FILE)
    for name in manifest["tokenizer"]["files"]:
        if not (path / name).is_file():
            raise DataError(f"{path / name}: missing, the corpus is not complete; prepare it again")
    itemsize = np.dtype(manifest["dtype"]).itemsize
    for split in SPLITS:
        for shard in manifest["splits"][split]["shards"]:
            file, expected = path / shard["file"], shard["tokens"] * itemsize
            if not file.is_file():
                raise DataError(f"{file}: missing, the corpus is not complete; prepare it again")
            found = file.stat().st_size
            if found != expected:
                problem = "truncated" if found < expected else "too long"
                raise DataError(f"{file}: {problem}, {found:,} bytes where the manifest has {expected:,}; copy or prepare the corpus again")
    return Corpus(path, manifest)


def _read_manifest(file: Path) -> dict[str, Any]:
    """The manifest, with every field there and of its type, and no name that leads out of the folder."""
    fix = "prepare the corpus again"

    def check(entry: object, fields: dict[str, str], where: str) -> None:
        if not isinstance(entry, dict):
            raise DataError(f"{file}: {where.rstrip('.')} is {json.dumps(entry)}, not {_OBJECT}; {fix}")
        for key, kind in fields.items():
            if key not in entry:
                raise DataError(f"{file}: {where}{key} is missing; {fix}")
            if not _IS[kind](entry[key]):
                raise DataError(f"{file}: {where}{key} is {json.dumps(entry[key])}, not {kind}; {fix}")

    def check_name(name: str, where: str) -> None:
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise DataError(f"{file}: {where} is {json.dumps(name)}, not the name of a file in this folder; {fix}")

    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{file}: missing, so this is no corpus; prepare one with: {PREPARE_COMMAND.format(file.parent)}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{file}: not JSON at line {error.lineno}, column {error.colno} ({error.msg}); {fix}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 at byte {error.start}; {fix}") from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of thousands of digits
        raise DataError(f"{file}: not a manifest ({error}); {fix}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise DataError(f"{file}: format_version is {json.dumps(version)}; allowed: {FORMAT_VERSION}; {fix} with this version")
    check(manifest, _MANIFEST_FIELDS, "")
    if manifest["dtype"] not in ("uint16", "uint32"):
        raise DataError(f"{file}: dtype is {json.dumps(manifest['dtype'])}; allowed: uint16, uint32; {fix}")
    largest = 2 ** (8 * np.dtype(manifest["dtype"]).itemsize)
    if not 0 < manifest["vocab_size"] <= largest:
        raise DataError(f"{file}: vocab_size is {manifest['vocab_size']}; allowed with {manifest['dtype']}: 1 to {largest}; {fix}")
    if manifest["eot_id"] >= manifest["vocab_size"]:
        raise DataError(f"{file}: eot_id is {manifest['eot_id']}; allowed: below vocab_size, {manifest['vocab_size']}; {fix}")
    check(manifest["tokenizer"], {"files": _OBJECT}, "tokenizer.")
    for name, sha256 in manifest["tokenizer"]["files"].items():
        check_name(name, "tokenizer.files")
        check({name: sha256}, {name: _TEXT}, "tokenizer.files.")
    check(manifest["splits"], dict.fromkeys(SPLITS, _OBJECT), "splits.")
    for split in SPLITS:
        entry = manifest["splits"][split]
        check(entry, _SPLIT_FIELDS, f"splits.{split}.")
        for number, shard in enumerate(entry["shards"]):
            where = f"splits.{split}.shards[{number}]."
            check(shard, _SHARD_FIELDS, where)
            check_name(shard["file"], where + "file")
        total = sum(shard["tokens"] for shard in entry["shards"])
        if total != entry["tokens"]:
            raise DataError(f"{file}: splits.{split}.tokens is {entry['tokens']}, its shards have {total}; {fix}")
    return manifest
