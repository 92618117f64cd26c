"""Sources of documents.

A source is one value of `--source`:

    stdlib              the running Python's own *.py files, without tests: about 730 files, 12 MB, on every machine, no download
    packages:FILE       the *.py files of the installed packages that FILE pins as NAME==VERSION, without torch: 280 MB for constraints.txt
    FILE                .txt .md .py .jsonl .json .csv (each also .gz .zst .xz .bz2), .parquet or .arrow
    FOLDER, 'GLOB'      all files of these kinds in the folder and below, or all that match, ordered by path; a folder that
                        `save_to_disk` of `datasets` wrote is its split train
    hf:NAME[:CONFIG][:SPLIT]    a dataset of the Hugging Face hub, or a folder with the same layout, streamed by `datasets`, or a folder of
                        `save_to_disk`; hf:json:FILES and the like name a builder and its files, which may be a URL
    ...@0.7             any of them with its weight in a mixture; ...@0.7:COLUMN also names its text column
    NAME=...@0.7        and how metrics name it, by default like its folder or file
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.errors import DataError, one_line, printable
from data_pipeline.manifest import MANIFEST_FILE, MAX_GROUPS, read_manifest, source_names
from data_pipeline.records import ALLOWED_FILES, COMPRESSED, PLAIN, Problems, Text, kind_of, records, text_of
from data_pipeline.sampler import DENOMINATOR

# Tests more than double the size (31.5 MB) with repetitive text, and installed packages differ between machines.
STDLIB_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
ALLOWED = f"stdlib, a file, folder or glob of {ALLOWED_FILES}, packages:FILE, or hf:NAME[:CONFIG][:SPLIT]"
ALLOWED += "; in a mixture [NAME=]SOURCE@WEIGHT[:COLUMN]"
#: Builders of `datasets` that take files instead of a name on the hub.
BUILDERS = ("json", "parquet", "csv", "text")


class _Source:
    """Documents, in the same order at every call of `documents`, which yields the text of each; the caller applies `max_docs`.

    `describe` is the entry in the manifest, and `state` a hash that differs after any change of the source; checked on resume.
    `n_bytes` is the size of the source, None if it is not known, and `n_read` how much of it has been read in the current pass.
    `left_out` counts what is no source of text by kind, and `plain` tells whether a file is one document without a separator.
    """

    left_out: Counter[str] = Counter()
    plain = False

    def __init__(self, name: str, text_column: str, max_docs: int | None, problems: Problems, separator: str | None):
        self.name, self.text_column, self.max_docs, self.problems, self.separator = name, text_column, max_docs, problems, separator
        self.n_bytes: int | None = None
        self.n_read = 0


class Files(_Source):
    """Files below `root`."""

    def __init__(self, identity: dict[str, Any], root: Path, files: list[Path], left_out: Counter[str], *options: Any):
        super().__init__(identity["name"], *options)
        self.root, self.files, self.left_out, self._identity = root, files, left_out, identity
        self.plain = any(kind_of(file)[0] in PLAIN for file in files)
        self._stats = [file.stat() for file in files]
        self.n_bytes = sum(stat.st_size for stat in self._stats)

    def describe(self) -> dict[str, Any]:
        """The paths and sizes of the files: an edit that keeps the size does not change it."""
        listing = "\n".join(
            f"{file.relative_to(self.root).as_posix()} {stat.st_size}" for file, stat in zip(self.files, self._stats, strict=True)
        )
        sha256 = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()
        return {**self._identity, "files": len(self.files), "bytes": self.n_bytes, "listing_sha256": sha256}

    def state(self) -> str:
        changes = [f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in zip(self.files, self._stats, strict=True)]
        return hashlib.sha256("\n".join(changes).encode("utf-8", "surrogateescape")).hexdigest()

    def documents(self) -> Iterator[Text]:
        before = 0
        for file, stat in zip(self.files, self._stats, strict=True):

            def on_read(done: int, before: int = before) -> None:
                self.n_read = before + done

            yield from records(file, self.text_column, self.problems, on_read, self.separator)
            before += stat.st_size
            self.n_read = before


class HubDataset(_Source):
    """A dataset that `datasets` streams; only the current rows are in memory."""

    def __init__(self, name: str, arguments: dict[str, Any], *options: Any):
        super().__init__(name, *options)
        self._arguments = arguments

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, **self._arguments}

    def state(self) -> str:
        arguments = {key: value for key, value in self._arguments.items() if key != "split"}
        try:
            files = _datasets().load_dataset_builder(**arguments).config.data_files or {}
        except Exception as reason:
            raise self._unopened(reason) from None
        # For each file its modification time, the commit on the hub, or the ETag of a server.
        versions = {split: [list(of_split), of_split.origin_metadata] for split, of_split in files.items()}
        return hashlib.sha256(repr((self.describe(), versions)).encode("utf-8", "surrogateescape")).hexdigest()

    def documents(self) -> Iterator[Text]:
        """Raises DataError for a bad record, or if it cannot be opened; OSError if reading failed after some rows."""
        number = 0
        try:
            dataset = _datasets().load_dataset(**self._arguments, streaming=True)
            if self.text_column in (dataset.column_names or ()):  # None if they are not known before the first row
                dataset = dataset.select_columns([self.text_column])
            for number, row in enumerate(dataset, 1):
                yield from text_of(row, self.text_column, f"{self.name}: row {number}", self.problems)
        except (DataError, MemoryError):
            raise
        except Exception as reason:  # exceptions of any type, from builders, file systems and the network
            if not number:
                raise self._unopened(reason) from None
            raise OSError(f"--source {self.name}: row {number + 1} cannot be read ({one_line(reason, 300)})") from None

    def _unopened(self, reason: Exception) -> DataError:
        line = one_line(reason, 300)
        return DataError(f"--source {self.name}: it cannot be opened: {line}; check its name, configuration and split")


Source = Files | HubDataset


def _datasets() -> Any:
    """The library `datasets`, without its log messages and progress bars."""
    os.environ.setdefault("USE_TORCH", "0")  # it would import torch: two seconds and 300 MB
    import datasets  # here, as it takes a second and only hf: needs it

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # a builder logs an error before it raises it
    datasets.utils.logging.disable_progress_bar()
    return datasets


def open_sources(
    specs: list[str],
    text_column: str = "text",
    max_docs: int | None = None,
    problems: Problems | None = None,
    separator: str | None = None,
) -> tuple[list[Source], dict[str, float]]:
    """The sources that `specs` name; and the name and the weight of each, which sum to 1, or neither if no spec has a weight.

    Raises:
        DataError: a source does not exist or is empty, only some have weights, or two have the same name.
    """
    options = (max_docs, problems or Problems("stop"), separator)
    parts = [_parts(spec) for spec in specs]
    weights = [one.weight for one in parts if one.weight is not None]
    if weights and len(weights) < len(parts):
        missing = next(spec for spec, one in zip(specs, parts, strict=True) if one.weight is None)
        raise DataError(f"--source {missing}: has no weight, but others have one; write {missing}@WEIGHT, or no weights")
    given = [one.name for one in parts if one.name]
    if again := [name for name in given if given.count(name) > 1]:
        raise DataError(f"--source {again[0]}=: {len(again)} sources have this name; give each another")
    if given and not weights:
        raise DataError(f"--source {given[0]}=: only sources of a mixture have names; add @WEIGHT to each, or leave out the name")
    if len(weights) > MAX_GROUPS:
        raise DataError(f"--source: {len(weights):,} sources with weights; allowed: up to {MAX_GROUPS:,}; put files into folders")
    total = sum(weights)
    for spec, one in zip(specs, parts, strict=True):
        if one.weight is not None and one.weight / total < 1 / DENOMINATOR:
            raise DataError(
                f"--source {spec}: its share of the mixture is {one.weight / total:.2g}; allowed: 1/{DENOMINATOR:,} or more; raise"
                " it, or put its files into another source"
            )
    sources = [_open(one.place, (one.column or text_column, *options)) for one in parts]
    if not weights:
        return sources, {}
    own = iter(source_names([source.describe() for source, one in zip(sources, parts, strict=True) if not one.name], given))
    return sources, {one.name or next(own): weight / total for one, weight in zip(parts, weights, strict=True)}


class _Parts(NamedTuple):
    """What a `--source` consists of; a part that it lacks is "" or None."""

    name: str
    place: str
    weight: float | None
    column: str


def _parts(spec: str) -> _Parts:
    place, weight, column = spec, None, ""
    found = re.fullmatch(r"(.*)@([^@:/]+)(?::([^/]+))?", spec, re.DOTALL)
    if found and not os.path.exists(spec):
        with suppress(ValueError):  # no number, but a part of the path
            weight = float(found[2])
            place, column = found[1], found[3] or ""
    if found and weight is not None and not 1e-9 <= weight <= 1e9:  # so that every fraction of their sum is above 0
        raise DataError(f"--source {spec}: {found[2]} is not a weight; allowed: a number from 1e-9 to 1e9, such as 0.7")
    name, _, rest = place.partition("=")
    if rest and re.fullmatch(r"[\w.-]+", name) and not glob.glob(place):  # else a path such as year=2024/*.txt
        return _Parts(name, rest, weight, column)
    return _Parts("", place, weight, column)


def _open(spec: str, options: tuple[Any, ...]) -> Source:
    path, split, left_out = Path(spec), "train", Counter[str]()
    if spec.startswith("hf:"):
        arguments = _hub_arguments(spec)
        path, split = Path(arguments["path"]), arguments.get("name", arguments["split"])
        if not _saved_splits(path):
            return HubDataset(spec, arguments, *options)
    if splits := _saved_splits(path):
        if split not in splits:
            raise DataError(f"--source {spec}: no split {split!r}; it has {', '.join(splits)}: name one as hf:{path}:SPLIT")
        left_out.update(f"split {name!r}" for name in splits if name != split)
        path = splits[split]
    root, name, version = path, spec, {}
    if spec == "stdlib":
        root, version = Path(sysconfig.get_paths()["stdlib"]), {"python": platform.python_version()}
        found = [file for file in _find(root, STDLIB_EXCLUDED, spec) if file.name.endswith(".py")]
    elif spec.startswith("packages:"):
        root, found = _packages(Path(spec.removeprefix("packages:")), spec)
    elif spec and path.is_dir():
        found, name = _find(path, frozenset(), spec), str(path.resolve())
    elif path.is_file():
        root, found, name = path.parent, [path], str(path.resolve())
    elif glob.has_magic(spec):
        found = _match(spec)
    else:
        raise DataError(f"--source {spec}: no such source; allowed: {ALLOWED}")
    files = _readable(found, left_out, named=path.is_file())
    if not files and not (left_out and options[2].on_error == "skip"):
        others = f" (left out: {listed(left_out)}; convert such files to .jsonl, .parquet or .txt)" if left_out else ""
        raise DataError(f"--source {spec}: no text file found{others}; allowed: {ALLOWED}; put a glob in quotes")
    if files and not root.is_dir():  # a glob
        root = Path(os.path.commonpath([file.parent for file in files]))
    return Files({"name": name, **version}, root, files, left_out, *options)


def _packages(pins: Path, spec: str) -> tuple[Path, list[Path]]:
    """The folder of installed packages, and the *.py files of those that `pins` names in the installed version, by their RECORDs."""
    try:
        pinned = re.findall(r"^([\w.-]+)==([^\s;]+)", pins.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError) as reason:
        raise DataError(f"--source {spec}: {pins} cannot be read ({one_line(reason)}); give a file of NAME==VERSION lines") from None
    root, files = Path(sysconfig.get_paths()["purelib"]), set[Path]()
    for name, version in pinned:
        with suppress(importlib.metadata.PackageNotFoundError):
            package = importlib.metadata.distribution(name)
            if name != "torch" and package.version.partition("+")[0] == version:  # torch differs by build
                files |= {root / file for file in package.files or () if file.suffix == ".py" and ".." not in file.parts}
    return root, [file for file in files if file.is_file()]


def _saved_splits(folder: Path) -> dict[str, Path]:
    """The folder of each split that `save_to_disk` of `datasets` wrote to `folder`; none if it is another folder."""
    if (folder / "dataset_dict.json").is_file():
        return {file.parent.name: file.parent for file in sorted(folder.glob("*/state.json"))}
    return {"train": folder} if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file() else {}


def _hub_arguments(spec: str) -> dict[str, Any]:
    """The arguments of `datasets.load_dataset`."""
    name, *rest = spec.removeprefix("hf:").split(":", 1)
    rest = [part for after in rest for part in re.split(":(?!.*/)", after)]  # colons before the last slash belong to a URL
    if not name or len(rest) > 2 or "" in rest or (name in BUILDERS and not rest):
        raise DataError(f"--source {spec}: not a dataset name; allowed: hf:NAME[:CONFIG][:SPLIT], or hf:json:FILES[:SPLIT] and the like")
    if name in BUILDERS:
        return {"path": name, "data_files": rest[0], "split": rest[1] if len(rest) > 1 else "train"}
    if len(rest) == 1 and re.match(r"(train|validation|val|test)\b", rest[0]):  # a single part is a split if it is named like one
        return {"path": name, "split": rest[0]}
    return {"path": name, **({"name": rest[0]} if rest else {}), "split": rest[1] if len(rest) > 1 else "train"}


def _find(root: Path, excluded: frozenset[str], spec: str) -> list[Path]:
    """The files below `root` without hidden ones. Links to folders are not followed."""

    def refuse_folder(reason: OSError) -> None:
        raise DataError(f"--source {spec}: {reason.filename} cannot be read ({reason.strerror}); fix that, or move it away")

    files = list[Path]()
    for folder, subfolders, names in os.walk(root, onerror=refuse_folder):
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return files


def _match(pattern: str) -> list[Path]:
    """The files that match, without hidden ones. `**` does not follow links to folders."""
    parts = Path(pattern).parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root, rest = Path(*parts[:fixed]), [*parts[fixed:], *(["*"] if parts[-1] == "**" else [])]
    if wrong := [part for part in rest if "**" in part and part != "**"]:  # Python 3.13 reads it as `*`, older ones refuse it
        raise DataError(f"--source {pattern}: {wrong[0]!r} is not a pattern; allowed: ** as the whole name of a folder, such as **/*.txt")
    return [path for path in root.glob("/".join(rest)) if not any(part.startswith(".") for part in path.relative_to(root).parts)]


def _readable(paths: list[Path], left_out: Counter[str], named: bool) -> list[Path]:
    """The regular files of known kinds among `paths`, ordered by path, without those of `datasets`.

    Counts the other files in `left_out`; a dataset card is one of them, unless it is the one file that is `named`.
    """
    corpora = {folder for folder in {path.parent for path in paths} if not named and _is_corpus(folder)}
    left_out.update("file of a prepared corpus" for path in paths if path.parent in corpora)
    kinds = {
        path: kind_of(path)[0] for path in sorted(paths, key=str) if path.parent not in corpora and (named or not _is_of_datasets(path))
    }
    with_records = any(kind not in (*PLAIN, "") and path.is_file() for path, kind in kinds.items())
    files = list[Path]()
    for path, kind in kinds.items():
        if path.is_symlink() and not path.exists():
            left_out["broken link"] += 1
        elif path.is_file() and not named and _is_card(path, with_records):
            left_out["dataset card"] += 1
        elif path.is_file() and kind:
            files.append(path)
        elif path.is_file():
            suffixes = path.suffixes[-2 if path.suffix.lower() in COMPRESSED else -1 :]
            left_out[printable("".join(suffixes).lower()) or "without suffix"] += 1
    return files


def _is_corpus(folder: Path) -> bool:
    """Whether `prepare.py` wrote the files of the folder."""
    with suppress(DataError):
        return (folder / MANIFEST_FILE).is_file() and bool(read_manifest(folder / MANIFEST_FILE))
    return False


def _is_of_datasets(path: Path) -> bool:
    """Whether the library `datasets` wrote the file beside its records."""
    if path.name == "state.json" or path.match("cache-*.arrow"):
        return path.with_name("dataset_info.json").is_file()
    return path.name in ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")


def _is_card(path: Path, with_records: bool) -> bool:
    """Whether the file is the card or the license of a dataset: it is beside records, or begins with the card's YAML."""
    if re.fullmatch(r"(readme|license|changelog|citation|dataset_?card)([._-].*)?(\.md|\.txt)?", path.name.lower()) and with_records:
        return True
    with suppress(OSError), open(path, "rb") as stream:
        return path.name.lower() == "readme.md" and stream.read(4) in (b"---\n", b"---\r")
    return False


def listed(left_out: Counter[str]) -> str:
    """What is left out, with its number."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
