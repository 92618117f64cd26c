"""`manifest.json` of a corpus: its fields, and all checks that do not need to read tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from glob import has_magic
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from data_pipeline.errors import DataError, printable

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
SPLITS = ("train", "val")
PREPARE_COMMAND = "python data_pipeline/prepare.py --source SOURCE --out {} (SOURCE: your text, or stdlib)"
#: Tolerance for the sum of the mixture's weights, which must be 1.
SUM_TOLERANCE = 1e-6
#: A tenth of `sampler.DENOMINATOR`, so that rounding small weights up to one part never uses more parts than there are.
MAX_GROUPS = 1000


def _is_file_name(name: str) -> str:
    if name in ("", ".", "..", MANIFEST_FILE) or "/" in name or "\\" in name or not name.isprintable() or len(name.encode()) > 255:
        raise ValueError("must be the name of a file in this folder")
    return name


Count = Annotated[int, Field(ge=0, lt=2**63)]
FileName = Annotated[str, AfterValidator(_is_file_name)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
SourceName = Annotated[str, Field(pattern=r"^[\w.-]+$")]
Weight = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class Shard(_Strict):
    """One file of tokens. `group` is the index of its source in a mixture, else 0."""

    file: FileName
    tokens: Count
    sha256: Sha256
    group: Count
    documents: Count


class SplitTotals(_Strict):
    """One split: its shards, and the sums over them. `bytes` is the size of the text in UTF-8."""

    tokens: Count
    documents: Count
    bytes: Count
    shards: list[Shard]

    @model_validator(mode="after")
    def _check(self) -> SplitTotals:
        if sum(shard.tokens for shard in self.shards) != self.tokens:
            raise ValueError(f"tokens is {self.tokens}, but its shards have {sum(shard.tokens for shard in self.shards)}")
        if any(before.group > after.group for before, after in pairwise(self.shards)):
            raise ValueError("the groups of its shards must not decrease")
        return self


class TokenizerFiles(_Strict):
    """The tokenizer's files and their hashes; `tokenizer` reads the other fields."""

    files: dict[FileName, Sha256]


class Manifest(_Strict):
    """All fields that the reader of a corpus needs. `sources`, `options` and `dropped` only describe how it was prepared."""

    dtype: Literal["uint16", "uint32"]
    vocab_size: Annotated[int, Field(gt=0, le=2**32)]
    eot_id: Count
    tokenizer: TokenizerFiles
    sources: list[Any]
    options: dict[Any, Any]
    mixture: Annotated[list[Weight], Field(min_length=1, max_length=MAX_GROUPS)]
    names: list[SourceName] | None = None  # of a mixture's sources; earlier versions wrote none
    dropped: dict[Any, Any]
    splits: Annotated[dict[Literal["train", "val"], SplitTotals], Field(min_length=2)]

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        if self.eot_id >= self.vocab_size:
            raise ValueError(f"eot_id is {self.eot_id}, but must be below vocab_size, {self.vocab_size}")
        if abs(sum(self.mixture) - 1) > SUM_TOLERANCE:
            raise ValueError(f"mixture sums to {sum(self.mixture):g}, but must sum to 1")
        if self.names is not None and not len(self.names) == len({*self.names}) == len(self.mixture):
            raise ValueError(f"names must be {len(self.mixture)} different names, one for each weight of the mixture")
        shards = [*self.splits["train"].shards, *self.splits["val"].shards]
        if any(shard.group >= len(self.mixture) for shard in shards):
            raise ValueError(f"the group of a shard must be below {len(self.mixture)}, the number of weights of the mixture")
        names = [*self.tokenizer.files, *(shard.file for shard in shards)]
        if len(set(names)) < len(names):
            raise ValueError(f"the file {next(name for name in names if names.count(name) > 1)} is named twice")
        return self


def source_names(sources: Iterable[Any], given: Iterable[str] = ()) -> list[str]:
    """A name for each of the manifest's `sources`: that of its folder or file without suffixes, made unique.

    given: names that are in use.
    """
    taken, names = {*given}, list[str]()
    for source in sources:
        place = str(source.get("name")) if isinstance(source, dict) else ""
        last = next((part for part in reversed(place.split("/")) if part and not has_magic(part)), "")
        name = re.sub(r"[^\w.-]+", "_", re.sub(r"(\.[A-Za-z]\w*)+$", "", last)).strip("._") or "source"
        names.append(next(one for one in (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3))) if one not in taken))
        taken.add(names[-1])
    return names


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of the format's dtypes that holds every id."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def read_manifest(file: Path) -> dict[str, Any]:
    """The checked content of `manifest.json`.

    Raises:
        DataError: there is no such file, or a field is missing, invalid, or inconsistent with others.
    """
    fix = "prepare the corpus again"
    if not file.is_file():
        raise DataError(f"{file}: missing, so this is not a corpus; prepare one with: {PREPARE_COMMAND.format('data/NAME')}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:  # not UTF-8, not JSON, nested too deep, or a number of thousands of digits
        raise DataError(f"{file}: not valid JSON ({error}); {fix}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise DataError(f"{file}: format_version is {shown(version)}; allowed: {FORMAT_VERSION}; {fix} with this version")
    try:
        Manifest.model_validate(manifest)
    except ValidationError as error:
        raise DataError(f"{file}: {_first_problem(error)}; {fix}") from None
    return manifest


def _first_problem(error: ValidationError) -> str:
    """The first invalid field, its value unless it is an object, and what it must be."""
    first = error.errors(include_url=False)[0]
    value = "" if isinstance(first["input"], dict) else f" is {shown(first['input'])}"
    return f"{printable('.'.join(map(str, first['loc'])))}{value}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": ")


def shown(value: object) -> str:
    """A value of a JSON file, short and on one line."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def sha256_of(file: Path) -> str:
    """The hash of a file's content."""
    sha256 = hashlib.sha256()
    with open(file, "rb") as stream:
        while data := stream.read(2**20):
            sha256.update(data)
    return sha256.hexdigest()


def check_sha256(file: Path, expected: str, found: str = "") -> None:
    """DataError unless the hash of `file`, `found` if it is given, is the one in the manifest."""
    found = found or sha256_of(file)
    if found != expected:
        raise DataError(f"{file}: changed: its sha256 is {found[:16]}..., the manifest has {expected[:16]}...; prepare the corpus again")
