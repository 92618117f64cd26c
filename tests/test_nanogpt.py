"""A folder of nanoGPT's is a corpus where it lies: opened, explained, trained on, sampled from."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.loader import Loader
from data_pipeline.nanogpt import BLOCK_BYTES, BLOCKS
from data_pipeline.sampler import GlobalSampler
from data_pipeline.shards import SPLITS, open_corpus
from data_pipeline.tokenizer import Tokenizer
from launch.config.run_config import resolve
from tests.commands import run_script

ROOT = Path(__file__).resolve().parents[1]
TEXT = "def of(x):\n    return x + 1\n\nprint(of(2))  # größer\n" * 60


def write_folder(folder: Path, splits: dict[str, np.ndarray], meta: object = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, tokens in splits.items():
        tokens.astype("<u2").tofile(folder / f"{split}.bin")
    if meta is not None:
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def write_characters(folder: Path, text: str = TEXT) -> Path:
    """As nanoGPT's data/shakespeare_char/prepare.py does."""
    characters = sorted(set(text))
    stoi = {character: i for i, character in enumerate(characters)}
    ids = np.array([stoi[character] for character in text])
    cut = int(len(ids) * 0.8)
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": stoi}
    return write_folder(folder, {"train": ids[:cut], "val": ids[cut:]}, meta)


@pytest.fixture
def characters(tmp_path) -> Path:
    return write_characters(tmp_path / "characters")


@pytest.fixture
def gpt2(tmp_path) -> Path:
    generator = np.random.default_rng(0)
    return write_folder(tmp_path / "gpt2", {split: generator.integers(0, 50_257, size) for split, size in (("train", 9001), ("val", 777))})


def test_a_folder_of_gpt2s_ids_is_read_as_it_lies(gpt2):
    corpus = open_corpus(gpt2)
    corpus.verify()
    assert (corpus.vocab_size, corpus.eot_id, corpus.dtype, corpus.mixture) == (50_257, 50_256, np.dtype("<u2"), [1.0])
    tokens = np.fromfile(gpt2 / "train.bin", "<u2")
    assert corpus.train.windows(100) == 90
    assert corpus.train.read(np.array([0, 89, 4]), 100).tolist() == [tokens[at : at + 101].tolist() for at in (0, 8900, 400)]
    assert corpus.val.n_tokens == 777
    assert sorted(os.listdir(gpt2)) == ["train.bin", "val.bin"]


def test_a_folder_of_characters_is_read_and_decoded(characters):
    corpus = open_corpus(characters)
    corpus.verify()
    assert (corpus.vocab_size, corpus.eot_id) == (len(set(TEXT)), None)
    tokenizer = Tokenizer.load(corpus.path, corpus.manifest["tokenizer"])
    assert tokenizer.decode(corpus.train.read(np.array([1]), 50)[0]) == TEXT[50:101]
    assert tokenizer.decode(tokenizer.encode("größer(2)")) == "größer(2)"
    with pytest.raises(DataError, match=r"characters \['Z'\]: not among"):
        tokenizer.encode("Z")


def test_the_fingerprint_is_of_the_text_and_not_of_the_place(gpt2, tmp_path):
    fingerprint = open_corpus(gpt2).fingerprint
    assert fingerprint == "53839bf4610a6c6af999271a4f1bd87ba7921091e2f842b1eaed185837872519"  # runs of earlier versions continue
    assert open_corpus(shutil.copytree(gpt2, tmp_path / "elsewhere")).fingerprint == fingerprint
    tokens = np.fromfile(gpt2 / "train.bin", "<u2")
    for at in (0, 4000, -1):
        other = tokens.copy()
        other[at] ^= 1
        other.tofile(gpt2 / "train.bin")
        assert open_corpus(gpt2).fingerprint != fingerprint
    tokens.tofile(gpt2 / "train.bin")
    assert open_corpus(gpt2).fingerprint == fingerprint
    tokens[:-1].tofile(gpt2 / "train.bin")
    assert open_corpus(gpt2).fingerprint != fingerprint


def test_the_fingerprint_of_a_large_file_is_of_blocks_from_its_first_to_its_last(tmp_path):
    """Ten times what is read of it: another first or last token is another corpus; between two blocks a token may change unseen."""
    size = 10 * BLOCKS * BLOCK_BYTES
    folder = write_folder(tmp_path / "large", {split: np.zeros(100) for split in SPLITS})
    os.truncate(folder / "train.bin", size)
    fingerprint = open_corpus(folder).fingerprint

    def with_byte_at(place: int) -> str:
        with open(folder / "train.bin", "r+b") as stream:
            stream.seek(place)
            stream.write(b"\1")
            stream.flush()
            found = open_corpus(folder).fingerprint
            stream.seek(place)
            stream.write(b"\0")
        return found

    assert with_byte_at(0) != fingerprint
    assert with_byte_at(size - 1) != fingerprint
    assert with_byte_at(2 * BLOCK_BYTES) == fingerprint
    assert open_corpus(folder).fingerprint == fingerprint


def test_ids_beyond_the_vocabulary_are_named_by_verify_and_by_training(characters):
    tokens = np.fromfile(characters / "train.bin", "<u2")
    tokens[700] = 5000
    tokens.tofile(characters / "train.bin")
    corpus = open_corpus(characters)
    last = corpus.vocab_size - 1
    with pytest.raises(DataError, match=rf"train\.bin: token id 5000 at token 700; allowed: 0 to {last}"):
        corpus.verify()
    loader = Loader(corpus.train, GlobalSampler([corpus.train.windows(64)], 0, "f"), 64, corpus.vocab_size, 0, 1, "cpu")
    with pytest.raises(DataError, match=rf"train\.bin: token id 5000 at token 700 \(window 10 of train\); allowed: 0 to {last}"):
        list(loader.micro_batches(0, loader.n_windows, 1))


def test_what_changed_since_it_was_opened_is_found(characters):
    corpus = open_corpus(characters)
    tokens = np.fromfile(characters / "val.bin", "<u2")
    for changed in (tokens[:-7], tokens[::-1]):
        changed.tofile(characters / "val.bin")
        with pytest.raises(DataError, match=r"val\.bin: changed"):
            corpus.verify()
    (characters / "val.bin").unlink()
    with pytest.raises(DataError, match=r"val\.bin: cannot be read \(No such file"):
        corpus.verify()


def write_shards(folder: Path, ids: np.ndarray, magic: int = 20240520, version: int = 1) -> Path:
    """Two shards for training and one for validation, as llm.c's dev/data/fineweb.py names and writes them."""
    folder.mkdir()
    for name, part in zip(("val_000000", "train_000001", "train_000002"), np.array_split(ids, 3), strict=True):
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, len(part)
        (folder / f"fineweb_{name}.bin").write_bytes(header.tobytes() + part.astype("<u2").tobytes())
    return folder


def test_shards_of_llm_c_are_read_behind_their_headers(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50_257, 6000)
    corpus = open_corpus(write_shards(tmp_path / "fineweb", ids))
    corpus.verify()
    assert (corpus.vocab_size, corpus.eot_id, corpus.train.n_tokens, corpus.val.n_tokens) == (50_257, 50_256, 4000, 2000)
    starts = [2000, 2500, 3000, 4000, 4500, 5000]  # shards of 2,000 ids have three windows of 500 + 1
    assert corpus.train.read(np.arange(6), 500).tolist() == [ids[start : start + 501].tolist() for start in starts]
    loader = Loader(corpus.train, GlobalSampler([6], 0, corpus.fingerprint), 500, corpus.vocab_size, 0, 1, "cpu")
    assert len(list(loader.micro_batches(0, 2, 3))) == 3
    for name in ("train", "val"):  # the name that llm.c gives a corpus of one shard
        shutil.copy(corpus.path / f"fineweb_{name}_00000{'1' if name == 'train' else '0'}.bin", tmp_path / f"{name}.bin")
    assert open_corpus(tmp_path).train.read(np.array([3]), 100).tolist() == [ids[2300:2401].tolist()]


@pytest.mark.parametrize("vocabulary", ["gpt2", "characters"])
def test_ids_of_4_bytes_are_recognized(vocabulary, request):
    folder = request.getfixturevalue(vocabulary)
    short = open_corpus(folder)
    windows = {split: getattr(short, split).read(np.arange(10), 50) for split in SPLITS}
    for split in SPLITS:
        np.fromfile(folder / f"{split}.bin", "<u2").astype("<u4").tofile(folder / f"{split}.bin")
    corpus = open_corpus(folder)
    corpus.verify()
    assert (corpus.dtype, corpus.train.n_tokens, corpus.vocab_size) == (np.dtype("<u4"), short.train.n_tokens, short.vocab_size)
    for split in SPLITS:
        assert getattr(corpus, split).read(np.arange(10), 50).tolist() == windows[split].tolist()


def convert(dtype: str, add: int = 0) -> Callable[[Path], None]:
    """Writes the ids of a folder in another form."""

    def change(folder: Path) -> None:
        for split in SPLITS:
            (np.fromfile(folder / f"{split}.bin", "<u2").astype("<i8") + add).astype(dtype).tofile(folder / f"{split}.bin")

    return change


@pytest.mark.parametrize("vocabulary", ["gpt2", "characters"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (convert(">u2"), r"train\.bin: has big-endian ids, up to [\d,]+ as read, but a vocabulary of [\d,]+; write its ids with numpy"),
        (convert(">i4"), r"train\.bin: has big-endian ids"),
        (convert("<i8"), r"train\.bin: has 64-bit ids"),
        (convert("<u4", add=60_000), r"train\.bin: has 32-bit ids, up to \d{2,3},\d{3} as read"),
        (
            lambda f: (np.save(f / "x.npy", np.arange(999)), (f / "x.npy").rename(f / "train.bin")),
            r"train\.bin: is a numpy file with a header",
        ),
        (lambda f: (np.arange(999) % 9).astype("<u4").tofile(f / "val.bin"), r": its files differ in form"),
    ],
)
def test_other_forms_of_ids_are_named(vocabulary, change, said, request):
    refused(request.getfixturevalue(vocabulary), change, said)


def refused(folder: Path, change: Callable[[Path], object], said: str) -> None:
    change(folder)
    with pytest.raises(DataError, match=said) as raised:
        open_corpus(folder)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda f: os.truncate(f / "fineweb_train_000002.bin", 3000),
            r"train_000002\.bin: a shard of llm\.c that is cut or .* 2,000 tokens",
        ),
        (lambda f: os.truncate(f / "fineweb_train_000001.bin", 6), r"train_000001\.bin: a shard of llm\.c that is cut"),
        (lambda f: np.zeros(99, "<u2").tofile(f / "fineweb_val_000000.bin"), r": its files differ in form"),
        (lambda f: (f / "fineweb_val_000000.bin").unlink(), r"val\.bin: missing; a nanoGPT folder has"),
        (lambda f: rewrite(f, magic=20240801, version=7), r"train_000001\.bin: is a shard of llm\.c with Llama 3's ids"),
        (lambda f: rewrite(f, version=2), r"train_000001\.bin: a shard of llm\.c that is cut or not of version 1"),
    ],
)
def test_what_is_wrong_with_shards_of_others_is_named(tmp_path, change, said):
    refused(write_shards(tmp_path / "shards", np.arange(6000)), change, said)


def rewrite(folder: Path, **header: int) -> None:
    shutil.rmtree(folder)
    write_shards(folder, np.zeros(99), **header)


def no_file(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Puts something else in the place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "train.bin").write_bytes(b""), r"train\.bin: 0 bytes; nanoGPT's files are tokens of 2 bytes"),
        (lambda f: (f / "val.bin").write_bytes(b"abc"), r"val\.bin: 3 bytes; nanoGPT's files are tokens of 2 bytes"),
        (lambda f: (f / "val.bin").unlink(), r"val\.bin: missing; a nanoGPT folder has train\.bin and val\.bin"),
        (no_file("train.bin", os.mkfifo), r"train\.bin: missing; a nanoGPT folder has train"),
        (lambda f: (f / "meta.pkl").write_bytes(b""), r"meta\.pkl: not nanoGPT's meta\.pkl"),
        (no_file("meta.pkl", os.mkfifo), r"meta\.pkl: not nanoGPT's meta\.pkl \(not a file\)"),
        (no_file("meta.pkl", lambda file: file.symlink_to("gone")), r"meta\.pkl: not nanoGPT's meta\.pkl"),
        (lambda f: (f / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 3})), r"not nanoGPT's meta\.pkl \('itos'\)"),
        (lambda f: (f / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 2, "itos": ["a", "a"]})), r"a different character for each id"),
    ],
)
def test_what_is_wrong_is_named(characters, change, said):
    refused(characters, change, said)


# The commands


def pretrain(*flags: object) -> subprocess.CompletedProcess:
    return run_script("launch/pretrain.py", "--deepspeed_config", "ds_configs/zero1_bf16.json", *flags)


def test_characters_have_no_documents_to_keep_apart(characters, gpt2, tmp_path):
    for more in ([], ["--explain"]):
        done = pretrain("--data", characters, "--seq_len", "64", "--no_cross_document", "--runs_dir", tmp_path / "runs", *more)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: --no_cross_document: {characters} has no end-of-text token: its ids are characters; leave")
    assert not (tmp_path / "runs").exists()
    flags = ["--deepspeed_config", "ds_configs/zero1_bf16.json", "--seq_len", "64", "--no_cross_document", "--data", str(gpt2)]
    assert resolve(flags)[0].model_config.document_end == 50_256


def test_a_model_trains_on_characters(one_rank, characters, tmp_path):
    shape = ["--n_layer", "1", "--n_head", "2", "--d_model", "32", "--seq_len", "32", "--global_batch_size", "4", "--steps", "2"]
    flags = ["--deepspeed_config", "ds_configs/zero1_fp32.json", *shape, "--data", str(characters), "--runs_dir", str(tmp_path)]
    hashes = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in characters.iterdir()}
    lines = one_rank.train([*flags, "--run_name", "known", "--eval_batches", "1"])
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert lines[0]["val_loss"] == pytest.approx(np.log(len(set(TEXT))), abs=0.2)
    assert hashes == {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in characters.iterdir()}
