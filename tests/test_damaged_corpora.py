"""Whatever is wrong with a corpus is said in one line: it is read rightly, or a DataError names the file; nothing else ever comes.

Hypothesis damages a corpus that `prepare` made: its manifest, its shards, and a nanoGPT folder. The cases are the same at every run
(`derandomize`). What no check can know without reading every token (two shards of one size exchanged) is `verify`'s to find.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from data_pipeline import prepare, show
from data_pipeline.errors import DataError
from data_pipeline.loader import Loader
from data_pipeline.sampler import GlobalSampler
from data_pipeline.shards import SPLITS, Corpus, open_corpus

SEQ_LEN = 16
FIXED = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


def prepared(folder: Path, weights: tuple[str, ...]) -> Path:
    """A corpus of some shards and a few hundred documents, by the real command, in this process."""
    generator = np.random.default_rng(0)
    sources = []
    for number, weight in enumerate(weights):
        source = folder / f"text{number}"
        source.mkdir()
        for document in range(60):
            words = generator.choice(["the", "größer", "def", "\n", "<|endoftext|>", "12", "日本"], size=20)
            (source / f"{document}.txt").write_text(" ".join([str(number), *words]), encoding="utf-8")
        sources.append(f"{source}{weight}")
    out = folder / "corpus"
    arguments = ["--out", str(out), "--tokenizer", "bytes", "--val_fraction", "0.2", "--shard_tokens", "2000", "--quiet"]
    assert prepare.main(["--source", *sources, *arguments]) == 0
    return out


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> dict[str, Path]:
    """Sound corpora of one group and of two weighted ones. Read only."""
    return {
        "plain": prepared(tmp_path_factory.mktemp("plain"), ("",)),
        "mixture": prepared(tmp_path_factory.mktemp("mixture"), ("@0.7", "@0.3")),
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def copy_of(sound: Path, place: Path) -> Path:
    """A fresh copy to damage."""
    shutil.rmtree(place / "corpus", ignore_errors=True)
    return Path(shutil.copytree(sound, place / "corpus"))


def windows_of(corpus: Corpus) -> dict[str, np.ndarray]:
    return {name: split.read(np.arange(split.windows(SEQ_LEN)), SEQ_LEN) for name, split in (("train", corpus.train), ("val", corpus.val))}


def rows_of(windows: dict[str, np.ndarray]) -> list[bytes]:
    return sorted(row.tobytes() for found in windows.values() for row in found)


def batches_of(corpus: Corpus) -> np.ndarray:
    """One epoch and more, as training reads it."""
    groups = corpus.train.group_windows(SEQ_LEN, len(corpus.mixture))
    sampler = GlobalSampler(groups, 1, corpus.fingerprint, corpus.mixture)
    loader = Loader(corpus.train, sampler, SEQ_LEN, corpus.vocab_size, 0, 1, "cpu")
    return np.concatenate([batch.numpy() for batch in loader.micro_batches(0, 8, sum(groups) // 8 + 1)])


class Outcome:
    """What comes of opening a corpus, verifying and reading it, with every refusal checked to be one line."""

    def __init__(self, folder: Path):
        self.refusals: list[str] = []
        self.windows: dict[str, np.ndarray] | None = None
        corpus = self._said(lambda: open_corpus(folder))
        self.opened, self.verified = corpus is not None, False
        if corpus is not None:
            self.verified = self._said(lambda: corpus.verify() or True) is True
            self.windows = self._said(lambda: windows_of(corpus))
            batches = self._said(lambda: batches_of(corpus))
            if batches is not None and self.windows is not None:
                assert {row.tobytes() for row in batches} <= {row.tobytes() for row in self.windows["train"].astype(np.int64)}
            self._said(lambda: self._show(corpus))

    @staticmethod
    def _show(corpus: Corpus) -> None:
        assert all(c.isprintable() or c in "\n\t" for line in show.show(corpus) for c in line)

    def _said(self, act: Any) -> Any:
        try:
            return act()
        except DataError as reason:
            text = str(reason)
            assert "\n" not in text and all(c.isprintable() for c in text), repr(text)
            assert 20 < len(text) < 1000, text
            self.refusals.append(text)
            return None


# The manifest


def is_read(path: tuple) -> bool:
    """Whether the reading side knows the value, and does not only show it."""
    return len(path) < 3 or path[0] in ("mixture", "splits", "tokenizer")


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path to every value of a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return (
        [path, *(place for key, item in inner for place in places(item, (*path, key)))]
        if path
        else [place for key, item in inner for place in places(item, (key,))]
    )


class Raw(str):
    """A piece of JSON text that `json.dumps` would not write."""


def as_json(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {as_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_json, value)) + "]"
    return json.dumps(value)


UGLY = [
    None, True, False, 0, 1, -1, 2, 3, 256, 257, 65536, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 10**4299, 0.5, 0.3, 1.0,
    -0.0, -1.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"), Raw("1e400"), Raw("-1e400"), Raw("1e-400"), Raw("1" * 5000),
    "", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "\x1b[2J", "\ud800", "x" * 300, "manifest.json",
    "train-00000.bin", "train-00001.bin", "val-00000.bin", "tokenizer.json", "uint16", "uint32", "int64", "0" * 64, "tiktoken",
    "characters", "transformers", "tokenizers",
    [], {}, [[]], [1], ["x"], [0.5, 0.5], [0.7, 0.2], [0, 1], [True], [float("nan"), 0.5], [1e-9, 1.0],
    [1 / 3] * 3, [1 / 1500] * 1500, {"files": {}}, {"name": "a\nb"}, Raw("[" * 900 + "]" * 900), Raw("[" * 50_000 + "]" * 50_000),
    Raw('{"a":' * 900 + "1" + "}" * 900), Raw("nonsense"),
]  # fmt: skip


@settings(max_examples=120, **FIXED)
@given(data=st.data())
def test_a_changed_manifest_is_refused_or_means_the_same_tokens(sound, place, data):
    kind = data.draw(st.sampled_from(sorted(sound)))
    folder = copy_of(sound[kind], place)
    manifest = json.loads((folder / "manifest.json").read_text())
    for _ in range(data.draw(st.sampled_from([1, 1, 1, 2]))):
        *parents, last = data.draw(st.sampled_from([path for path in places(manifest) if is_read(path)]))
        entry = manifest
        for key in parents:
            entry = entry[key]
        change = data.draw(st.sampled_from(["set", "set", "set", "set", "delete", "extra", "exchange", "repeat", "near"]))
        if change == "set":
            entry[last] = copy.deepcopy(data.draw(st.sampled_from(UGLY)))
        elif change == "delete":
            del entry[last]
        elif change == "extra" and isinstance(entry, dict):
            entry[data.draw(st.sampled_from(["extra", "", "a\nb", "\ud800", "../x", "x" * 300]))] = copy.deepcopy(
                data.draw(st.sampled_from(UGLY))
            )
        elif change == "repeat" and isinstance(entry, list):
            entry.append(entry[last])
        elif change == "exchange":
            other = data.draw(st.sampled_from(sorted(entry) if isinstance(entry, dict) else range(len(entry))))
            entry[last], entry[other] = entry[other], entry[last]
        elif change == "near" and type(entry[last]) in (int, float) and not abs(entry[last]) > 1e300:
            entry[last] += data.draw(st.sampled_from([1, -1, 1e-9, 0.1]))
    (folder / "manifest.json").write_text(as_json(manifest))
    outcome = Outcome(folder)
    if outcome.verified and outcome.windows is not None:
        expected = windows_of(open_corpus(sound[kind]))
        # Shards in another order, or of the other split, are another corpus and no less sound: then the same windows are elsewhere.
        assert rows_of(outcome.windows) == rows_of(expected)


# The files


def damage_file(data: st.DataObject, folder: Path) -> bool:
    """Change the files; whether what is read through their names is other bytes than before."""
    files = sorted(file for file in folder.iterdir() if file.name != "manifest.json")
    file = data.draw(st.sampled_from(files), label="file")
    content = file.read_bytes()
    how = data.draw(
        st.sampled_from(["flip", "flip", "truncate", "extend", "exchange", "empty", "remove", "folder", "loop", "pipe", "moved"])
    )
    if how == "flip" and content:
        at = data.draw(st.integers(0, len(content) - 1))
        file.write_bytes(content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :])
    elif how == "truncate" and content:
        file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif how == "extend":
        file.write_bytes(content + data.draw(st.binary(min_size=1, max_size=64)))
    elif how == "exchange":
        other = data.draw(st.sampled_from(files), label="other")
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return content != file.read_bytes()
    elif how == "moved":  # reached through a link, it is what it was
        file.rename(folder / "elsewhere")
        file.symlink_to("elsewhere")
        return False
    else:
        file.unlink()
        if how in ("empty", "flip", "truncate"):
            file.write_bytes(b"")
            return bool(content)
        if how == "folder":
            file.mkdir()
        elif how == "loop":
            file.symlink_to(file.name)
        elif how == "pipe":
            os.mkfifo(file)
    return True


@settings(max_examples=80, **FIXED)
@given(data=st.data())
def test_no_damaged_file_passes_verify(sound, place, data):
    kind = data.draw(st.sampled_from(sorted(sound)))
    folder = copy_of(sound[kind], place)
    damaged = damage_file(data, folder)
    outcome = Outcome(folder)
    assert outcome.verified != damaged
    if not damaged:
        assert all(np.array_equal(outcome.windows[split], windows_of(open_corpus(sound[kind]))[split]) for split in SPLITS)


def test_what_was_exchanged_between_opening_and_reading_is_found(sound, place):
    for name in ("train-00001.bin", "tokenizer.json"):
        folder = copy_of(sound["plain"], place)
        corpus = open_corpus(folder)
        file = folder / name
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(DataError, match=f"{name}: changed"):
            corpus.verify()
    folder = copy_of(sound["plain"], place)
    corpus = open_corpus(folder)
    os.truncate(folder / "train-00001.bin", 100)
    with pytest.raises(DataError, match=r"train-00001\.bin: truncated since it was opened"):
        corpus.train.windows(SEQ_LEN)
    (folder / "train-00001.bin").unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin: cannot be read \(No such file or directory\)"):
        corpus.train.windows(SEQ_LEN)


def replace(file: Path) -> None:
    """By the same content, with the same time of modification."""
    other = shutil.copy2(file, file.with_name("other"))
    other.rename(file)


def overwrite(file: Path) -> None:
    with open(file, "r+b") as stream:
        stream.write(bytes(100))


@pytest.mark.parametrize("name", ["train-00001.bin", "val-00000.bin"])
@pytest.mark.parametrize("change", [os.utime, replace, overwrite, lambda file: os.truncate(file, 100), Path.unlink])
def test_a_corpus_that_changes_after_it_was_opened_is_noticed(sound, place, name, change):
    corpus = open_corpus(copy_of(sound["plain"], place))
    corpus.train.windows(SEQ_LEN)
    corpus.check_unchanged()
    change(corpus.path / name)
    with pytest.raises(DataError, match=rf"{name}: (changed since|cannot be read \(No such)"):
        corpus.check_unchanged()


def test_a_shard_that_is_cut_after_it_was_mapped_is_refused_before_it_is_read(sound, place):
    """Not by a SIGBUS, which ends the process without a message."""
    nanogpt = place / "nanogpt"
    nanogpt.mkdir(exist_ok=True)
    for split in SPLITS:
        np.zeros(5000, "<u2").tofile(nanogpt / f"{split}.bin")
    for folder, name in ((copy_of(sound["plain"], place), "train-00001.bin"), (nanogpt, "train.bin")):
        corpus = open_corpus(folder)
        windows = np.arange(corpus.train.windows(SEQ_LEN))
        corpus.train.read(windows, SEQ_LEN)
        os.truncate(folder / name, 100)
        with pytest.raises(DataError, match=rf"{name}: truncated since it was opened; copy or prepare .* --resume"):
            corpus.train.read(windows, SEQ_LEN)


# nanoGPT's folders


class Runs:
    """Pickled, it asks for a function to be called."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __reduce__(self):
        return self.arguments


META = {"vocab_size": 65, "itos": {i: chr(32 + i) for i in range(65)}, "stoi": {chr(32 + i): i for i in range(65)}}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda mark: pickle.dumps(Runs(os.mkdir, (mark,))), "it refers to"),
        (lambda mark: pickle.dumps(Runs(os.mkdir, (mark,)), 2), "it refers to"),
        (lambda mark: pickle.dumps(META | {"x": Runs(eval, (f"__import__('os').mkdir({mark!r})",))}), "it refers to"),
        (lambda mark: b"(S'" + mark.encode() + b"'\nios\nmkdir\n.", "it refers to"),
    ],
)
def test_a_pickle_runs_no_code(tmp_path, data, said):
    for split in SPLITS:
        (tmp_path / f"{split}.bin").write_bytes(b"\0\0" * 100)
    (tmp_path / "meta.pkl").write_bytes(data(str(tmp_path / "ran")))
    with pytest.raises(DataError, match=r"meta\.pkl: not nanoGPT's") as raised:
        open_corpus(tmp_path)
    assert said in str(raised.value)
    assert not (tmp_path / "ran").exists()
