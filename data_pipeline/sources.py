"""Where documents come from, and which split each belongs to.

A source is anything with `documents()` (an iterator of (name, text), the same at every call), `describe()` (what the
manifest records), `n_bytes` (for the progress bar) and `skipped` (reason -> count, of the latest pass). `open_source` maps
the text after `--source` to one:

    stdlib      the running Python's own *.py files, without tests: about 730 files, 12 MB, on every machine, no download
    FILE        one .txt, .md or .py file
    FOLDER      every .txt, .md and .py file below it
"""

import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".py")
# Tests more than double the size (31.5 MB) with repetitive text; installed packages would make the corpus the machine's own.
STDLIB_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class TextFiles:
    """Files below `root`, one document each, in the order of their relative paths."""

    def __init__(self, identity: dict[str, Any], root: Path, files: list[Path]):
        self.root = root
        self.files = files
        self.n_bytes = sum(file.stat().st_size for file in files)
        self.skipped: Counter[str] = Counter()
        self._identity = identity

    def describe(self) -> dict[str, Any]:
        """What the source was, and enough of its state to notice that it has changed since."""
        return {**self._identity, "files": len(self.files), "bytes": self.n_bytes}

    def documents(self) -> Iterator[tuple[str, str]]:
        self.skipped.clear()
        for file in self.files:
            try:
                text = file.read_bytes().decode("utf-8")  # not read_text: line ends stay as they are
            except UnicodeDecodeError:
                self.skipped["not utf-8"] += 1
                continue
            except PermissionError as error:
                raise DataError(f"--source: {file} cannot be read ({error.strerror}); allow reading it or move it away") from None
            if not text:
                self.skipped["empty"] += 1
                continue
            yield file.relative_to(self.root).as_posix(), text


def open_source(spec: str) -> TextFiles:
    """The source named by `spec`; DataError when there is no such source or nothing in it."""
    if spec == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return TextFiles({"name": "stdlib", "python": platform.python_version()}, root, _find(root, (".py",), STDLIB_EXCLUDED, spec))
    path = Path(spec)
    if path.is_dir():
        return TextFiles({"name": str(path.resolve())}, path, _find(path, TEXT_SUFFIXES, frozenset(), spec))
    if path.is_file():
        if path.suffix not in TEXT_SUFFIXES:
            raise DataError(f"--source {spec}: not a known kind of text file; allowed: {', '.join(TEXT_SUFFIXES)}; rename it")
        return TextFiles({"name": str(path.resolve())}, path.parent, [path])
    raise DataError(f"--source {spec}: no such source; allowed: stdlib, a {'/'.join(TEXT_SUFFIXES)} file, or a folder of such files")


def _find(root: Path, suffixes: tuple[str, ...], excluded: frozenset[str], spec: str) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        files += [Path(folder, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
    files = [file for file in files if file.is_file()]  # neither dangling links nor pipes
    if not files:
        raise DataError(f"--source {spec}: no {'/'.join(suffixes)} file below {root}; name a file, or a folder that holds some")
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def split_documents(documents: Iterable[tuple[str, str]], val_fraction: float) -> Iterator[tuple[str, str, int]]:
    """Each document as (split, text, bytes of UTF-8), where split is "train" or "val".

    The split depends on the document's text alone, so it survives reordering, renaming and additions, and two copies of one
    text can never end up on both sides. A lone document is cut in two at a line end instead, the tail being "val".
    """
    documents = iter(documents)
    first, second = next(documents, None), next(documents, None)
    if first is None:
        return
    if second is None:
        text = first[1]
        position = int(len(text) * (1 - val_fraction))
        position = text.rfind("\n", 0, position) + 1 or position
        for split, part in (("train", text[:position]), ("val", text[position:])):
            if part:
                yield split, part, len(part.encode())
        return
    bound = int(val_fraction * 2**64)
    for _, text in chain((first, second), documents):
        encoded = text.encode()
        is_val = int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big") < bound
        yield "val" if is_val else "train", text, len(encoded)
