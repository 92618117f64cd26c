"""The corpus on disk, as it is read: token shards and the manifest that vouches for them. `writing` makes it.

    data/stdlib/
        train-00000.bin  ...    little-endian ids, uint16 for up to 65,536 of them, else uint32; an end-of-text id ends each document
        train-00000.ends ...    little-endian uint32: for each document that ends in the shard, one past its end of text
        val-00000.bin    ...
        tokenizer.json  ...     the tokenizer's own files
        manifest.json           what all of this is; written last

`open_corpus` checks everything that costs no reading of tokens; `Corpus.verify` reads every byte.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_pipeline.errors import DataError

FORMAT_VERSION = 2
ENDS_DTYPE = np.dtype("<u4")
MANIFEST_FILE = "manifest.json"
SPLITS = ("train", "val")
PREPARE_COMMAND = "python data_pipeline/prepare.py --source stdlib --out {}"
CHUNK_TOKENS = 4 * 1024 * 1024
#: How far weights may be from the sum of 1, for what rounding makes of them.
SUM_TOLERANCE = 1e-6
#: A tenth of the parts that weights are rounded to (`sampler.DENOMINATOR`), so that none is raised by more than it has.
MAX_GROUPS = 1000
#: A manifest has about 350 bytes a shard; what is larger than this is another file.
MAX_MANIFEST_BYTES = 2**28
#: Ends of documents are places in a shard, written as uint32.
MAX_SHARD_TOKENS = 2**32 - 1

_COUNT = "an integer >= 0 and below 2^63"
_TEXT = "a string"
_SHA256 = "a sha256 of 64 hexadecimal digits"
_OBJECT = "an object"
_LIST = "a list"
_IS: dict[str, Callable[[object], bool]] = {
    _COUNT: lambda value: type(value) is int and 0 <= value < 2**63,  # bool is an int, so not isinstance
    _TEXT: lambda value: isinstance(value, str),
    _SHA256: lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
    _OBJECT: lambda value: isinstance(value, dict),
    _LIST: lambda value: isinstance(value, list),
}
_MANIFEST_FIELDS = {
    "dtype": _TEXT, "vocab_size": _COUNT, "eot_id": _COUNT, "tokenizer": _OBJECT, "sources": _LIST, "options": _OBJECT, "mixture": _LIST,
    "dropped": _OBJECT, "splits": _OBJECT,
}  # fmt: skip
_SPLIT_FIELDS = {"tokens": _COUNT, "documents": _COUNT, "bytes": _COUNT, "shards": _LIST}
_SHARD_FIELDS = {"file": _TEXT, "tokens": _COUNT, "sha256": _SHA256, "group": _COUNT, "documents": _COUNT, "ends": _OBJECT}
_ENDS_FIELDS = {"file": _TEXT, "sha256": _SHA256}


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype of the format that holds every id."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """What the operating system refuses inside (permissions, a folder in place of a file) is a DataError that names the file."""
    try:
        yield
    except OSError as reason:
        what = reason.filename or "the corpus"  # a map that cannot be made has no name
        raise DataError(f"{what}: cannot be read ({reason.strerror}); mend that, or prepare the corpus again") from None


class Split:
    """The tokens of one split, in windows of seq_len + 1 that overlap by one token: the last target is the next first input.

    Windows lie at stride seq_len within each shard and never cross from one shard to the next; a shard's remainder of less
    than seq_len tokens is not used. The shards of a group of a mixture stand together, and so do their windows.
    """

    def __init__(self, name: str, folder: Path, dtype: np.dtype, shards: list[dict[str, Any]]):
        self.name = name
        self.n_tokens = sum(shard["tokens"] for shard in shards)
        self._folder, self._dtype, self._shards = folder, dtype, shards
        self._views: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}

    def windows(self, seq_len: int) -> int:
        """How many windows there are; DataError when there is not even one."""
        return int(self._strided(seq_len)[0][-1])

    def group_windows(self, seq_len: int, n_groups: int) -> list[int]:
        """How many of the windows are of each group; DataError when one has none."""
        bounds, _ = self._strided(seq_len)
        counts = [0] * n_groups
        for shard, count in zip(self._shards, (bounds[1:] - bounds[:-1]).tolist(), strict=True):
            counts[shard["group"]] += count
        if 0 in counts:
            raise DataError(
                f"{self._folder}: no shard of group {counts.index(0)} of the {self.name} split holds one window of seq_len {seq_len} + 1"
                " tokens, so its weight in the mixture cannot be kept; lower seq_len, or prepare the corpus with more of that source"
            )
        return counts

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

    @readable()
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
                file = self._folder / shard["file"]
                try:
                    # A plain array over the map: indexing a numpy.memmap costs several microseconds more.
                    tokens = np.memmap(file, dtype=self._dtype, mode="r", shape=(shard["tokens"],)).view(np.ndarray)
                except ValueError:  # it is shorter than when the corpus was opened
                    raise DataError(f"{file}: truncated since it was opened; copy or prepare the corpus again") from None
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
        #: None where nothing ends a text: nanoGPT's characters.
        self.eot_id: int | None = manifest["eot_id"]
        self.dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self.train, self.val = (Split(name, path, self.dtype, manifest["splits"][name]["shards"]) for name in SPLITS)
        #: The weight of each group of shards in training; they sum to 1.
        self.mixture: list[float] = manifest["mixture"]
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

    @readable()
    def verify(self, watch: Callable[[int], None] = lambda n_bytes: None) -> None:
        """Reads everything; DataError on the first file whose hash is not the manifest's, or id or end of text that cannot be right.

        `watch` is told how many more bytes of tokens have been read. What is held at once does not grow with the corpus.
        """
        for name, expected in self.manifest["tokenizer"]["files"].items():
            check_sha256(self.path / name, _file_sha256(self.path / name), expected)
        for split in SPLITS:
            for shard in self.manifest["splits"][split]["shards"]:
                ends = self.path / shard["ends"]["file"]
                check_sha256(ends, _file_sha256(ends), shard["ends"]["sha256"])
                with open(self.path / shard["file"], "rb") as tokens_stream, open(ends, "rb") as ends_stream:
                    self._verify_shard(shard, tokens_stream, ends_stream, watch)

    @readable()
    def ends(self, shard: dict[str, Any]) -> np.ndarray:
        """Where documents end in a shard of the manifest, int64: rising, and within it. DataError where the file is not as written."""
        file = self.path / shard["ends"]["file"]
        data = file.read_bytes()
        check_sha256(file, hashlib.sha256(data).hexdigest(), shard["ends"]["sha256"])
        ends = np.frombuffer(data, dtype=ENDS_DTYPE).astype(np.int64)
        if len(ends) and (ends[0] < 1 or ends[-1] > shard["tokens"] or (np.diff(ends) < 1).any()):
            raise DataError(f"{file}: its ends of documents do not rise within the {shard['tokens']:,} tokens; prepare the corpus again")
        return ends

    def _check_ids(self, file: Path, tokens: np.ndarray, position: int, fix: str, split: str = "") -> None:
        """DataError for the first of `tokens`, which stand at `position` of `file`, that the vocabulary lacks."""
        if len(tokens) and tokens.max() >= self.vocab_size:
            first = int(np.argmax(tokens >= self.vocab_size))
            raise DataError(
                f"{file}: token id {tokens[first]} at token {position + first}{split}; allowed: 0 to {self.vocab_size - 1}; {fix}"
            )

    def _verify_shard(self, shard: dict[str, Any], tokens_stream: BinaryIO, ends_stream: BinaryIO, watch: Callable[[int], None]) -> None:
        file, sha256, position = self.path / shard["file"], hashlib.sha256(), 0
        same_ends = True
        while data := tokens_stream.read(CHUNK_TOKENS * self.dtype.itemsize):
            sha256.update(data)
            if len(data) % self.dtype.itemsize:
                break  # it has changed since it was opened; the hash says so
            tokens = np.frombuffer(data, dtype=self.dtype)
            self._check_ids(file, tokens, position, "the shard is damaged, prepare the corpus again")
            here = (np.flatnonzero(tokens == self.eot_id) + position + 1).astype(ENDS_DTYPE).tobytes()
            same_ends = same_ends and here == ends_stream.read(len(here))
            position += len(tokens)
            watch(len(data))
        check_sha256(file, sha256.hexdigest(), shard["sha256"])
        if not same_ends or ends_stream.read(1):
            raise DataError(f"{file}: its ends of text are not those of {shard['ends']['file']}; prepare the corpus again")


def shown(value: object) -> str:
    """A value of a JSON file, short and in one line."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "something nested too deep"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _file_sha256(file: Path) -> str:
    sha256 = hashlib.sha256()
    with open(file, "rb") as stream:
        while data := stream.read(2**20):
            sha256.update(data)
    return sha256.hexdigest()


def check_sha256(file: Path, found: str, expected: str | None) -> None:
    """DataError unless the hash found in `file` is the manifest's."""
    if found != expected:
        raise DataError(f"{file}: changed, its sha256 is {found[:16]}..., the manifest's {str(expected)[:16]}...; prepare the corpus again")


@readable()
def open_corpus(path: str | Path) -> Corpus:
    """The corpus in folder `path`, after every check that needs no reading of tokens; DataError names the file and the fix.

    A folder of nanoGPT's is one too.
    """
    path = Path(path)
    if not path.is_dir():
        problem = "not a folder" if path.exists() else "no such corpus"
        raise DataError(f"{path}: {problem}; prepare one with: {PREPARE_COMMAND.format(path)}")
    from data_pipeline.nanogpt import NanoGPTCorpus, is_nanogpt

    if is_nanogpt(path):
        return NanoGPTCorpus(path)
    manifest = _read_manifest(path / MANIFEST_FILE)
    for name in manifest["tokenizer"]["files"]:
        _check_is_file(path / name)
    itemsize = np.dtype(manifest["dtype"]).itemsize
    for split in SPLITS:
        for shard in manifest["splits"][split]["shards"]:
            _check_size(path / shard["file"], shard["tokens"] * itemsize)
            _check_size(path / shard["ends"]["file"], shard["documents"] * ENDS_DTYPE.itemsize)
    return Corpus(path, manifest)


def _check_is_file(file: Path) -> None:
    if not file.is_file():
        problem = "not a file" if file.exists() else "missing"
        raise DataError(f"{file}: {problem}, the corpus is not complete; prepare it again")


def _check_size(file: Path, expected: int) -> None:
    _check_is_file(file)
    found = file.stat().st_size
    if found != expected:
        problem = "truncated" if found < expected else "too long"
        raise DataError(f"{file}: {problem}, {found:,} bytes where the manifest has {expected:,}; copy or prepare the corpus again")


def _read_manifest(file: Path) -> dict[str, Any]:
    """The manifest, with every field there and of its type, and no name that leads out of the folder."""
    fix = "prepare the corpus again"

    def check(entry: object, fields: dict[str, str], where: str) -> None:
        if not isinstance(entry, dict):
            raise DataError(f"{file}: {where.rstrip('.')} is {shown(entry)}, not {_OBJECT}; {fix}")
        for key, kind in fields.items():
            if key not in entry:
                raise DataError(f"{file}: {where}{key} is missing; {fix}")
            if not _IS[kind](entry[key]):
                raise DataError(f"{file}: {where}{key} is {shown(entry[key])}, not {kind}; {fix}")

    def check_name(name: str, where: str) -> None:
        if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable() or len(name.encode()) > 255:
            raise DataError(f"{file}: {where} is {shown(name)}, not the name of a file in this folder; {fix}")

    if not file.is_file():
        problem = "not a file" if file.exists() else "missing"
        raise DataError(f"{file}: {problem}, so this is no corpus; prepare one with: {PREPARE_COMMAND.format(file.parent)}")
    if file.stat().st_size > MAX_MANIFEST_BYTES:
        raise DataError(f"{file}: {file.stat().st_size:,} bytes, more than any manifest has; {fix}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}: not JSON at line {error.lineno}, column {error.colno} ({error.msg}); {fix}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 at byte {error.start}; {fix}") from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of thousands of digits
        raise DataError(f"{file}: not a manifest ({error}); {fix}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise DataError(f"{file}: format_version is {shown(version)}; allowed: {FORMAT_VERSION}; {fix} with this version")
    check(manifest, _MANIFEST_FIELDS, "")
    if manifest["dtype"] not in ("uint16", "uint32"):
        raise DataError(f"{file}: dtype is {shown(manifest['dtype'])}; allowed: uint16, uint32; {fix}")
    largest = 2 ** (8 * np.dtype(manifest["dtype"]).itemsize)
    if not 0 < manifest["vocab_size"] <= largest:
        raise DataError(f"{file}: vocab_size is {manifest['vocab_size']}; allowed with {manifest['dtype']}: 1 to {largest}; {fix}")
    if manifest["eot_id"] >= manifest["vocab_size"]:
        raise DataError(f"{file}: eot_id is {manifest['eot_id']}; allowed: below vocab_size, {manifest['vocab_size']}; {fix}")
    check(manifest["tokenizer"], {"files": _OBJECT}, "tokenizer.")
    for name, sha256 in manifest["tokenizer"]["files"].items():
        check_name(name, "tokenizer.files")
        check({name: sha256}, {name: _SHA256}, "tokenizer.files.")
    mixture = manifest["mixture"]
    if not mixture or not all(type(weight) in (int, float) and 0 < weight <= 1 for weight in mixture):
        raise DataError(f"{file}: mixture is {shown(mixture)}; allowed: weights above 0, a number for each group; {fix}")
    if len(mixture) > MAX_GROUPS:
        raise DataError(f"{file}: mixture has {len(mixture):,} weights; allowed: up to {MAX_GROUPS:,}; {fix} from fewer weighted sources")
    if abs(sum(mixture) - 1) > SUM_TOLERANCE:
        raise DataError(f"{file}: mixture sums to {sum(mixture):g}; allowed: 1; {fix}")
    check(manifest["splits"], dict.fromkeys(SPLITS, _OBJECT), "splits.")
    seen = {MANIFEST_FILE, *manifest["tokenizer"]["files"]}
    for split in SPLITS:
        entry = manifest["splits"][split]
        check(entry, _SPLIT_FIELDS, f"splits.{split}.")
        for number, shard in enumerate(entry["shards"]):
            where = f"splits.{split}.shards[{number}]."
            check(shard, _SHARD_FIELDS, where)
            check(shard["ends"], _ENDS_FIELDS, where + "ends.")
            if shard["tokens"] > MAX_SHARD_TOKENS:
                raise DataError(f"{file}: {where}tokens is {shard['tokens']}; allowed: up to {MAX_SHARD_TOKENS:,}; {fix}")
            for name, place in ((shard["file"], "file"), (shard["ends"]["file"], "ends.file")):
                check_name(name, where + place)
                if name in seen:
                    raise DataError(f"{file}: {where}{place} is {shown(name)}, which is named twice; {fix}")
                seen.add(name)
            before = entry["shards"][number - 1]["group"] if number else 0
            if not before <= shard["group"] < len(mixture):
                raise DataError(f"{file}: {where}group is {shard['group']}; allowed: {before} to {len(mixture) - 1}; {fix}")
        for key in ("tokens", "documents"):
            total = sum(shard[key] for shard in entry["shards"])
            if total != entry[key]:
                raise DataError(f"{file}: splits.{split}.{key} is {entry[key]}, its shards have {total}; {fix}")
    return manifest
