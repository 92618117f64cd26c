"""The prepare command, the corpus that it writes, and the batches that are read from it."""

import json
import os
import re
import shutil
import subprocess
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest
import torch

from data_pipeline.documents import Documents
from data_pipeline.encoding import Encoded
from data_pipeline.errors import DataError
from data_pipeline.loader import Loader
from data_pipeline.manifest import token_dtype
from data_pipeline.prepare import main
from data_pipeline.records import Problems
from data_pipeline.sampler import GlobalSampler
from data_pipeline.shards import Split, open_corpus
from data_pipeline.sources import open_sources
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from data_pipeline.writing import ShardWriter, write_manifest
from tests.commands import run_script

ROOT = Path(__file__).resolve().parents[1]


def prepare(*arguments) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # it must work uninstalled
    return run_script("data_pipeline/prepare.py", *arguments, environment=environment)


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """80 small documents, among them one that is empty and one that is not UTF-8."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.default_rng(0)
    words = ["the", "model", "reads", "tokens", "größer", "def", "return", "\n", "<|endoftext|>", "12", "日本"]
    for number in range(80):
        sub = folder / f"part{number % 3}"
        sub.mkdir(exist_ok=True)
        (sub / f"{number}.txt").write_text(" ".join(generator.choice(words, size=200)), encoding="utf-8")
    (folder / "empty.md").write_text("")
    (folder / "latin.txt").write_bytes("größer".encode("latin-1"))
    (folder / "ignored.bin").write_bytes(b"\0")
    return folder


@pytest.fixture(scope="session")
def prepared(texts, tmp_path_factory) -> Path:
    """A corpus of several shards, made by the command. Read only."""
    out = tmp_path_factory.mktemp("data") / "corpus"
    options = ("--val_fraction", "0.2", "--shard_tokens", "5000", "--on_error", "skip")
    done = prepare("--source", texts, "--out", out, "--tokenizer", "bpe:300", *options)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def corpus_folder(prepared, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(prepared, tmp_path / "corpus"))


# The command


def read_split(corpus, name) -> np.ndarray:
    return np.concatenate([np.fromfile(corpus.path / shard["file"], corpus.dtype) for shard in corpus.manifest["splits"][name]["shards"]])


def documents_of(texts: Path) -> Documents:
    sources, _ = open_sources([str(texts)], problems=Problems("skip"))
    return Documents(sources, 0.2)


def test_shards_hold_the_documents_in_order_each_with_its_end(texts, prepared):
    corpus = open_corpus(prepared)
    tokenizer = Tokenizer.load(corpus.path, corpus.manifest["tokenizer"])
    documents = documents_of(texts)
    expected = {"train": [], "val": []}
    assert len(list(documents)) == 80
    for document in documents:  # a second pass, whose skipped files count anew
        expected[document.split_name].append("".join(document.text()))
    assert corpus.manifest["dropped"] == {".bin": 1, "empty": 1, "not UTF-8": 1}
    (source,) = documents.sources
    assert documents.dropped + source.problems.counts + source.left_out == corpus.manifest["dropped"]
    assert sum(map(len, expected.values())) == 80
    for split, of_split in expected.items():
        entry = corpus.manifest["splits"][split]
        tokens = read_split(corpus, split)
        ends = np.flatnonzero(tokens == corpus.eot_id)
        assert ends[-1] == len(tokens) - 1
        assert [tokenizer.decode(part[:-1]) for part in np.split(tokens, ends[:-1] + 1)] == of_split
        assert (entry["documents"], entry["bytes"]) == (len(of_split), sum(len(text.encode()) for text in of_split))
        assert sum(shard["documents"] for shard in entry["shards"]) == entry["documents"]
        assert all(shard["tokens"] == 5000 for shard in entry["shards"][:-1])
    assert len(corpus.manifest["splits"]["train"]["shards"]) > 2


def test_tokenizer_has_seen_training_documents_only(texts, prepared, tmp_path):
    seen = ["".join(document.text()) for document in documents_of(texts) if document.split_name == "train"]
    entry = train_tokenizer("bpe:300", seen).save(tmp_path)
    assert open_corpus(prepared).manifest["tokenizer"] == entry


def test_workers_do_not_change_a_byte(tmp_path):
    folders = {workers: tmp_path / "deep" / "er" / f"by{workers}" for workers in (1, 2)}
    for workers, out in folders.items():  # 12 MB: a dozen chunks, more than are under way at once
        done = prepare("--source", "stdlib", "--out", out, "--tokenizer", "bytes", "--workers", workers, "--quiet")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for file in folders[1].iterdir():
        assert file.read_bytes() == (folders[2] / file.name).read_bytes(), file.name
    assert sorted(os.listdir(tmp_path / "deep" / "er")) == ["by1", "by2"]


def test_a_second_run_finds_the_work_done_and_a_different_one_is_refused(texts, corpus_folder):
    arguments = ("--source", texts, "--out", corpus_folder, "--tokenizer", "bpe:300", "--shard_tokens", "5000", "--on_error", "skip")
    before = {file.name: (file.stat().st_mtime_ns, file.stat().st_ino) for file in corpus_folder.iterdir()}
    done = prepare(*arguments, "--val_fraction", "0.2")
    assert done.returncode == 0
    assert "already prepared" in done.stdout
    done = prepare(*arguments, "--val_fraction", "0.1")
    assert done.returncode == 2
    assert "val_fraction was 0.2, now 0.1" in done.stderr
    assert before == {file.name: (file.stat().st_mtime_ns, file.stat().st_ino) for file in corpus_folder.iterdir()}
    (corpus_folder / "val-00000.bin").unlink()
    done = prepare(*arguments, "--val_fraction", "0.2")
    assert done.returncode == 2
    assert "not a complete corpus" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--source", "nowhere"], "nowhere: no such source; allowed: stdlib"),
        (["--source", "setup.cfg", "--on_error", "stop"], "no text file found (left out: 1 .cfg; convert such files to .jsonl"),
        (["--source", "{empty}"], "no text file found"),
        (["--tokenizer", "word"], "allowed: bytes, bpe:N"),
        (["--val_fraction", "0"], "allowed: above 0 and below 1"),
        (["--val_fraction", "nan"], "allowed: above 0 and below 1"),
        (["--val_fraction", "1e-9"], "no document for val (80 in total"),
        (["--val_fraction", "0.999999999"], "no document for train"),
        (["--shard_tokens", "0"], "allowed: 1 or more"),
        (["--workers", "-1"], "allowed: 1 or more"),
        (["--out", "/proc/corpus"], "cannot write to /proc"),
        (["--out", "{empty}/.."], "not a complete corpus"),
        (["--max_docs", str(2**63)], f"allowed: 1 or more, up to {2**63 - 1}"),
        (["--out", "{empty}"], "not a complete corpus"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(texts, tmp_path, arguments, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("kept")
    arguments = [argument.format(empty=tmp_path / "empty", file=tmp_path / "file") for argument in arguments]
    source = () if "--source" in arguments else ("--source", texts)
    done = prepare(*source, "--out", tmp_path / "out", "--tokenizer", "bytes", "--on_error", "skip", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["empty", "file"]
    assert (tmp_path / "file").read_text() == "kept"


# The split


def test_the_split_of_a_document_depends_on_its_text_alone(tmp_path):
    def split(numbers, val_fraction: float) -> dict[str, str]:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in numbers))
        sources, _ = open_sources([str(tmp_path / "a.jsonl")])
        return {"".join(document.text()): document.split_name for document in Documents(sources, val_fraction)}

    first = split(range(4000), 0.1)
    again = split(reversed(range(2000)), 0.1)
    assert all(first[text] == of_text for text, of_text in again.items())
    larger = split(range(4000), 0.2)
    assert all(larger[text] == "val" for text, of_text in first.items() if of_text == "val")
    assert 320 < sum(of_text == "val" for of_text in first.values()) < 480  # 400, four standard deviations


# Opening and verifying


def change_manifest(folder: Path, **changes) -> None:
    """Changes manifest entries named by dotted paths (with __ for the dot); the value `del` deletes."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for path, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("__")]
        entry = reduce(getitem, parents, manifest)
        entry[last] = value
        if value == "del":
            del entry[last]
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format_version": 1}, "format_version is 1; allowed: 2"),
        ({"format_version": "del"}, "format_version is null"),
        ({"vocab_size": "del"}, "vocab_size: Field required"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"eot_id": 300}, "eot_id is 300, .*below vocab_size"),
        ({"dtype": "int8"}, 'dtype is "int8": .*uint16.*uint32'),
        ({"tokenizer__files": None}, "tokenizer.files is null"),
        ({"tokenizer__files": {"../x": ""}}, r'tokenizer.files.*"../x": .*name of a file'),
        ({"tokenizer__files": {"x": 1}}, "tokenizer.files.x is 1"),
        ({"splits__val": "del"}, "splits: .*at least 2 items"),
        ({"splits__train__tokens": -1}, "splits.train.tokens is -1"),
        ({"splits__train__shards__0": 3}, r"splits.train.shards.0 is 3"),
        ({"splits__train__tokens": 7}, "splits.train: tokens is 7, but its shards have"),
        ({"splits__val__shards__0__file": "/etc/passwd"}, r'shards.0.file is "/etc/passwd": .*name of a file in this folder'),
        ({"splits__val__shards__0__sha256": "del"}, r"shards.0.sha256: Field required"),
        ({"splits__val__shards__0__file": "\ud800"}, r'shards.0.file is "\\ud800"'),
        ({"splits__train__shards__1__file": "train-00000.bin"}, "train-00000.bin is named twice"),
        ({"splits__train__shards__0__group": 1}, "group"),
        ({"mixture": [1e400]}, "mixture.0 is Infinity"),
        ({"mixture": [0.7, 0.2]}, "mixture sums to 0.9"),
        ({"mixture": [0.5, -0.5, 1.0]}, "mixture.1 is -0.5"),
        ({"mixture": [1 / 2000] * 2000}, "at most 1000 items"),
        ({"splits__train__tokens": 10**400}, "splits.train.tokens is 1000"),
    ],
)
def test_a_broken_manifest_is_named(corpus_folder, changes, said):
    change_manifest(corpus_folder, **changes)
    with pytest.raises(DataError, match=r"manifest\.json: .*" + said) as raised:
        open_corpus(corpus_folder)
    assert "\n" not in str(raised.value)


def test_missing_parts_are_named_with_the_fix(corpus_folder):
    command = r"python data_pipeline/prepare\.py --source SOURCE --out .*"
    for wrong in ("nowhere", "manifest.json"):
        with pytest.raises(DataError, match=f"{wrong}: no such corpus; prepare one with: {command}{wrong}"):
            open_corpus(corpus_folder / wrong)
    misspelt = corpus_folder.with_name(f"{corpus_folder.name}x")
    with pytest.raises(DataError, match=f"no such corpus; did you mean {corpus_folder}\\? Else prepare one with: {command}"):
        open_corpus(misspelt)
    (corpus_folder / "tokenizer.json").rename(corpus_folder / "kept")
    with pytest.raises(DataError, match=r"tokenizer\.json: missing, .*prepare it again"):
        open_corpus(corpus_folder)
    (corpus_folder / "kept").rename(corpus_folder / "tokenizer.json")
    for content, said in ((b'{\n  "format_version": 1,\n  oops', "line 3 column 3"), (b"\xff", "utf-8")):
        (corpus_folder / "manifest.json").write_bytes(content)
        with pytest.raises(DataError, match=rf"manifest\.json: not valid JSON .*{said}"):
            open_corpus(corpus_folder)
    (corpus_folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json: missing"):
        open_corpus(corpus_folder)


def test_a_shard_of_the_wrong_length_is_named(corpus_folder):
    shard = corpus_folder / "train-00001.bin"
    content = shard.read_bytes()
    for changed in (content[:-1], content + b"\0\0"):
        shard.write_bytes(changed)
        with pytest.raises(DataError, match=rf"train-00001\.bin: has {len(changed):,} bytes, but in the manifest 10,000"):
            open_corpus(corpus_folder)
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00001\.bin: missing"):
        open_corpus(corpus_folder)


def test_verify_names_a_file_that_has_changed(corpus_folder, capsys):
    def verified() -> tuple[int, str, str]:
        return main(["--verify", str(corpus_folder)]), *capsys.readouterr()

    code, out, _ = verified()
    assert code == 0 and [line.endswith(", intact") for line in out.splitlines()] == [True, True]
    shard = corpus_folder / "train-00001.bin"
    tokens = np.fromfile(shard, "<u2")
    tokens[77] ^= 1
    tokens.tofile(shard)
    code, out, err = verified()
    assert (code, out) == (2, "") and re.search(r"error: .*train-00001\.bin: changed: .*sha256.*prepare the corpus again", err)
    with open(corpus_folder / "tokenizer.tiktoken", "ab") as file:
        file.write(b"\n")
    code, out, err = verified()
    assert (code, out) == (2, "") and "tokenizer.tiktoken: changed" in err


def test_the_fingerprint_is_of_the_content_not_of_the_place(prepared, corpus_folder):
    fingerprint = open_corpus(prepared).fingerprint
    change_manifest(corpus_folder, sources=[{"name": "elsewhere"}], options={})
    assert open_corpus(corpus_folder).fingerprint == fingerprint
    change_manifest(corpus_folder, splits__val__shards__0__sha256="0" * 64)
    assert open_corpus(corpus_folder).fingerprint != fingerprint


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_large_vocabularies_take_four_bytes(tmp_path, vocab_size, dtype):
    splits = {}
    for name in ("train", "val"):
        writer = ShardWriter(tmp_path, name, token_dtype(vocab_size), vocab_size - 1, 10)
        writer.write(Encoded(name, 0, 25, np.arange(vocab_size - 25, vocab_size)))
        splits[name] = writer.finish()
    rest = {"sources": [], "options": {}, "mixture": [1.0], "dropped": {}, "splits": splits}
    write_manifest(tmp_path, vocab_size, vocab_size - 1, tokenizer={"kind": "bytes", "files": {}}, **rest)
    corpus = open_corpus(tmp_path)
    corpus.verify()
    assert corpus.dtype.name == dtype
    assert [shard["tokens"] for shard in splits["train"]["shards"]] == [10, 10, 5]
    assert corpus.train.read(np.array([0]), 4).tolist() == [[*range(vocab_size - 25, vocab_size - 20)]]


# Reading


@pytest.mark.parametrize("seq_len", [1, 7, 64, 4999])
def test_windows_tile_each_shard_with_one_token_of_overlap(prepared, seq_len):
    corpus = open_corpus(prepared)
    expected = []
    for shard in corpus.manifest["splits"]["train"]["shards"]:
        tokens = np.fromfile(corpus.path / shard["file"], corpus.dtype)
        expected += [tokens[i : i + seq_len + 1] for i in range(0, len(tokens) - seq_len, seq_len)]
    split = corpus.train
    assert split.windows(seq_len) == len(expected)
    order = np.random.default_rng(0).permutation(len(expected))
    found = split.read(order, seq_len)
    assert found.dtype == corpus.dtype
    assert np.array_equal(found, np.stack(expected)[order])
    out = np.zeros((len(order), seq_len + 1), dtype=np.int64)
    assert split.read(order, seq_len, out=out) is out
    assert np.array_equal(out, found)


@pytest.fixture
def numbered(tmp_path) -> Split:
    """A split whose window i of seq_len 8 starts with token 8 i; three shards."""
    writer = ShardWriter(tmp_path, "train", np.dtype("<u2"), 0, 801)
    for shard in range(3):
        writer.write(Encoded("train", 0, 801, np.arange(800 * shard, 800 * shard + 801)))
    return Split("train", tmp_path, np.dtype("<u2"), writer.finish()["shards"])


def loader(split, rank, world_size, vocab_size=2401, seed=0) -> Loader:
    return Loader(split, GlobalSampler([split.windows(8)], seed, "f"), 8, vocab_size, rank, world_size, "cpu")


def test_the_global_batch_is_the_same_for_every_number_of_ranks(numbered):
    expected = GlobalSampler([300], 0, "f").indices(290, 24)  # over the end of the epoch
    for world_size, micro, accumulation in ((1, 24, 1), (1, 4, 6), (2, 4, 3), (4, 6, 1), (3, 2, 4)):
        found = np.empty(24, dtype=np.int64)
        for rank in range(world_size):
            batches = list(loader(numbered, rank, world_size).micro_batches(290, micro, accumulation))
            assert len(batches) == accumulation
            for step, batch in enumerate(batches):
                assert batch.dtype == torch.int64
                assert batch.shape == (micro, 9)
                assert torch.equal(batch, batch[:, :1] + torch.arange(9))
                first = (step * world_size + rank) * micro
                found[first : first + micro] = batch[:, 0].numpy() // 8
        assert np.array_equal(found, expected), (world_size, micro, accumulation)


@pytest.mark.parametrize("n", [1, 5, 37, 64, 300, 10_000])
def test_validation_is_the_same_windows_for_every_number_of_ranks(numbered, n):
    expected = np.arange(min(n, 300)) * 300 // min(n, 300)
    for world_size, micro in ((1, 8), (2, 8), (3, 5), (4, 16)):
        loaders = [Loader(numbered, None, 8, 2401, rank, world_size, "cpu") for rank in range(world_size)]
        pairs = [list(loader.validation_batches(loader.validation_windows(n), micro)) for loader in loaders]
        assert len({len(of_rank) for of_rank in pairs}) == 1
        for batch, weight in (pair for of_rank in pairs for pair in of_rank):
            assert len(batch) == max(weight, 1)
            assert weight <= micro
        found = torch.cat([batch[:weight, 0] // 8 for of_rank in pairs for batch, weight in of_rank])
        assert found.sort().values.tolist() == expected.tolist(), (world_size, micro)


def test_an_id_beyond_the_vocabulary_is_stopped_with_its_place(numbered):
    reader = loader(numbered, 0, 1, vocab_size=1700)
    with pytest.raises(
        DataError, match=r"train-00002\.bin: token id \d+ at token \d+ \(window \d+ of train\); allowed: 0 to 1699"
    ) as raised:
        list(reader.micro_batches(0, 300, 1))
    words = str(raised.value).split()
    assert int(words[3]) == 1600 + int(words[6])  # the third shard starts with id 1,600
