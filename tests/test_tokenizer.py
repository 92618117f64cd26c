"""The tokenizer: tiktoken's ids are those of `tokenizers`, training repeats, and every text comes back."""

import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from data_pipeline.errors import DataError
from data_pipeline.tokenizer import Tokenizer, parse_spec, train_tokenizer

CORPUS = [file.read_text(encoding="utf-8") for file in sorted(Path(sysconfig.get_paths()["stdlib"], "email").glob("*.py"))]

AWKWARD = [
    "",
    " ",
    "\x00\x1c\x1f\x7f\x85\xa0",
    "don't WE'LL it'S 'tis",
    "tab\t\tnew\r\n\r\n  trailing   ",
    "naïve café e\u0301 \u200d\u200b\ufeff",
    "数字１２３ ٣٤٥ Ⅷ ½ ²",
    "👩‍👩‍👧‍👦🏳️‍🌈 🇨🇭",
    "\u3000\u2028\u2029\u180e x",
    "𝕳𝖊𝖑𝖑𝖔 \U0010ffff \U000e0001",
    "<|endoftext|> in a text",
    "a" * 5000 + " " * 5000 + "b",
]


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer("bpe:1000", CORPUS)


def original(tokenizer: Tokenizer, folder: Path) -> HuggingFaceTokenizer:
    tokenizer.save(folder)
    loaded = HuggingFaceTokenizer.from_file(str(folder / "tokenizer.json"))
    loaded.encode_special_tokens = True  # special tokens in a text are text
    return loaded


@pytest.mark.parametrize("spec", ["bpe:1000", "bytes"])
def test_ids_are_those_of_the_tokenizers_library(spec, bpe, tmp_path):
    tokenizer = bpe if spec == "bpe:1000" else train_tokenizer(spec, [])
    huggingface = original(tokenizer, tmp_path)
    assert huggingface.get_vocab_size() == tokenizer.vocab_size
    assert huggingface.token_to_id("<|endoftext|>") == tokenizer.eot_id
    generator = random.Random(0)
    points = [*range(0x3000), *range(0x1F000, 0x1FB00)]
    noise = ["".join(map(chr, generator.choices(points, k=200))) for _ in range(200)]
    for text in [*CORPUS, *AWKWARD, *noise]:
        ids = tokenizer.encode(text)
        assert ids.tolist() == huggingface.encode(text).ids
        assert tokenizer.decode(ids) == text


@pytest.mark.long
def test_every_code_point_is_cut_alike(bpe, tmp_path):
    huggingface = original(bpe, tmp_path)
    # Planes 0 to 3 and 14; nothing is assigned in the others.
    points = [point for point in [*range(0x40000), *range(0xE0000, 0xE1000)] if not 0xD800 <= point < 0xE000]
    for start in range(0, len(points), 256):
        text = "".join(f"a{c}1 {c}.  {c}" for c in map(chr, points[start : start + 256]))
        assert bpe.encode(text).tolist() == huggingface.encode(text).ids, hex(points[start])


def test_vocabulary_counts_the_end_of_text(bpe):
    assert (bpe.vocab_size, bpe.eot_id, bpe.decode([999])) == (1000, 999, "<|endoftext|>")
    by_byte = train_tokenizer("bytes", [])
    assert (by_byte.vocab_size, by_byte.eot_id) == (257, 256)
    assert by_byte.encode("é\n").tolist() == [0xC3, 0xA9, 0x0A]


def test_a_run_of_spaces_on_which_the_regex_fails_is_encoded_in_parts(bpe):
    text = "x" + " " * 1_200_000 + "y"
    assert bpe.decode(bpe.encode(text)) == text


def test_lone_surrogate_is_replaced(bpe):
    assert bpe.decode(bpe.encode("a\ud800b")) == "a\ufffdb"


def test_training_repeats_to_the_byte(bpe, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert bpe.save(tmp_path / "a") == train_tokenizer("bpe:1000", reversed(CORPUS)).save(tmp_path / "b")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.tiktoken"])
def test_a_saved_tokenizer_is_loaded_and_a_changed_or_missing_file_is_named(bpe, tmp_path, name):
    entry = bpe.save(tmp_path)
    loaded = Tokenizer.load(tmp_path, entry)
    assert np.array_equal(loaded.encode(CORPUS[0]), bpe.encode(CORPUS[0]))
    assert loaded.save(tmp_path) == entry
    with open(tmp_path / name, "ab") as file:
        file.write(b"\n")
    with pytest.raises(DataError, match=f"{name}: changed.*prepare the corpus again"):
        Tokenizer.load(tmp_path, entry)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"No such file.*{name}"):
        Tokenizer.load(tmp_path, entry)


def test_a_small_text_reaches_a_smaller_vocabulary():
    tokenizer = train_tokenizer("bpe:5000", ["abab abab"])
    assert 257 < tokenizer.vocab_size < 270 and tokenizer.eot_id == tokenizer.vocab_size - 1


@pytest.mark.parametrize("ids", [[1000], [-1], [5, 2**40]])
def test_decoding_an_unknown_id_names_it(bpe, ids):
    with pytest.raises(DataError, match=f"token id {ids[-1]}: .*0 to 999"):
        bpe.decode(ids)


@pytest.mark.parametrize("spec", ["", "bpe", "bpe:", "bpe:256", "bpe:1000001", "bpe:-5", "bpe:8k", "bpe:²", "word", "bytes:300"])
def test_unknown_specification_is_refused(spec):
    with pytest.raises(DataError, match="allowed: bytes, bpe:N"):
        parse_spec(spec)
