"""Tokenizers that others made: their ids in the shards, special tokens in text, long documents in pieces, what is said of a missing one."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import zstandard
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from data_pipeline import documents, records
from data_pipeline.errors import DataError
from data_pipeline.prepare import main
from data_pipeline.shards import open_corpus
from data_pipeline.tokenizer import Tokenizer, make_tokenizer
from launch.trained_model.hf_export import write_tokenizer

ROOT = Path(__file__).resolve().parents[1]
STDLIB = Path(sysconfig.get_paths()["stdlib"])
TEXTS = [file.read_bytes().decode() for file in sorted(STDLIB.glob("*.py"))[:40]]
AWKWARD = [
    "größer 日本 </s> [SEP] <|endoftext|> x\u0301 \r\n\r\n  a\ufeff 👩‍👩‍👧‍👦 " * 60,
    "x" + " " * 3000 + "b",
    "x" * 3000,
    "a\n" * 2000,
    "1 2 3 " * 3000,
    "\n\n\t\n" * 1000 + "end",
]
KINDS = ("byte_level", "prefix_space", "word_piece", "unigram", "unigram_of_whole_texts", "merges_without_words", "folder", "gpt2")
#: The file of r50k_base in tiktoken's cache.
GPT2_FILE = hashlib.sha1(b"https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken").hexdigest()
CACHE = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", f"{tempfile.gettempdir()}/data-gym-cache"))
has_gpt2 = Path(CACHE, GPT2_FILE).exists()
needs_gpt2 = pytest.mark.skipif(not has_gpt2, reason="r50k_base is not in tiktoken's cache folder, see TIKTOKEN_CACHE_DIR")
#: A kind of each model: byte pairs, word pieces, unigram. The others are left to `make test_all`.
QUICK = ("byte_level", "word_piece", "unigram")
marks = {kind: [needs_gpt2] * (kind == "gpt2") + [pytest.mark.long] * (kind not in QUICK) for kind in KINDS}
each_kind = pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks[kind]) for kind in KINDS])
# What a model of whole pieces finds in a text even where its library does not look for it.
IN_VOCABULARY = {"unigram": "</s>", "unigram_of_whole_texts": "</s>", "word_piece": "[SEP]"}


def train(kind: str) -> HuggingFaceTokenizer:
    byte_level = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    pieces = {"special_tokens": ["<unk>", "</s>"], "unk_token": "<unk>"}
    if kind in ("byte_level", "prefix_space"):
        tokenizer, options, trainer = HuggingFaceTokenizer(models.BPE()), byte_level, trainers.BpeTrainer
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix_space")
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "word_piece":
        tokenizer, trainer = HuggingFaceTokenizer(models.WordPiece(unk_token="[UNK]")), trainers.WordPieceTrainer
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        options = {"special_tokens": ["[UNK]", "[SEP]"]}
    elif kind == "merges_without_words":  # as Llama 2
        tokenizer, trainer = HuggingFaceTokenizer(models.BPE(unk_token="<unk>")), trainers.BpeTrainer
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        options = {"special_tokens": ["<unk>", "</s>"]}
    else:
        tokenizer, options, trainer = HuggingFaceTokenizer(models.Unigram()), pieces, trainers.UnigramTrainer
        words = {"unigram": {}, "unigram_of_whole_texts": {"split": False, "prepend_scheme": "first"}}[kind]
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**words)
    texts = [line for text in TEXTS[:8] for line in text.splitlines(keepends=True)]
    tokenizer.train_from_iterator(texts, trainer(vocab_size=700, show_progress=False, **options))
    return tokenizer


@pytest.fixture(scope="module")
def of_others(tmp_path_factory):
    """A function from a kind to (what --tokenizer is given, text -> the ids of the original library)."""
    folder, made = tmp_path_factory.mktemp("tokenizers"), {}

    def make(kind: str):
        if kind == "gpt2":
            encoding = tiktoken.get_encoding("r50k_base")
            return "gpt2", lambda text: encoding.encode(text, disallowed_special=())
        file = folder / f"{kind}.json"
        if kind == "folder":
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            fast = PreTrainedTokenizerFast(tokenizer_object=train("byte_level"), eos_token="<|endoftext|>", model_max_length=512)
            fast.save_pretrained(folder / kind)
            original = AutoTokenizer.from_pretrained(folder / kind)
            options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            return str(folder / kind), lambda text: original(text, **options)["input_ids"]
        train(kind).save(str(file))
        original = HuggingFaceTokenizer.from_file(str(file))
        original.encode_special_tokens = True
        return str(file), lambda text: original.encode(text, add_special_tokens=False).ids

    def once(kind: str):
        if kind not in made:
            made[kind] = make(kind)
        return made[kind]

    return once


def shards(out: Path, split: str) -> list[int]:
    corpus = open_corpus(out)
    entry = corpus.manifest["splits"][split]
    return np.concatenate([np.fromfile(out / shard["file"], corpus.dtype) for shard in entry["shards"]]).tolist()


def prepare(*arguments: object) -> None:
    assert main([*map(str, arguments), "--quiet"]) == 0


# Ids


@each_kind
def test_ids_in_the_shards_are_those_of_the_original_library(kind, of_others, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    spec, original = of_others(kind)
    expected = {"train": [], "val": []}
    for number, text in enumerate([*TEXTS[:25], *AWKWARD]):
        text = text.replace(IN_VOCABULARY.get(kind, "</s>"), "")
        (source / f"{number:02d}.txt").write_bytes(text.encode())
        is_val = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < 0.05 * 2**64
        expected["val" if is_val else "train"].append(original(text))
    prepare("--source", source, "--out", tmp_path / "out", "--tokenizer", spec, "--shard_tokens", "300000")
    eot_id = open_corpus(tmp_path / "out").eot_id
    for split, texts in expected.items():
        assert shards(tmp_path / "out", split) == [i for ids in texts for i in (*ids, eot_id)]


@each_kind
def test_a_special_token_written_in_a_text_is_text(kind, of_others):
    tokenizer = make_tokenizer(of_others(kind)[0], [])
    for token in ("<|endoftext|>", "</s>", "[SEP]"):
        for text in (token, f"before {token} behind", token * 3, f"\n{token}\n"):
            ids = tokenizer.encode(text)
            assert tokenizer.eot_id not in ids
            if kind == "byte_level":
                assert tokenizer.decode(ids) == text


def test_a_text_that_a_tokenizer_takes_for_its_end_is_refused(tmp_path, capsys):
    tokenizer = train("byte_level")
    tokenizer.add_tokens(["<end>"])  # not a special one: the library finds it in any text
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a line\n" * 100 + "an <end> and\n" + "a line\n" * 100)
    arguments = ["--source", f"{tmp_path}/a.txt", "--out", f"{tmp_path}/out", "--tokenizer", f"{tmp_path}/tokenizer.json"]
    assert main([*arguments, "--end_of_text", "<end>"]) == 2
    error = capsys.readouterr().err
    assert "'<end>'" in error and "--end_of_text" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0


@each_kind
def test_a_corpus_brings_its_tokenizer(kind, of_others, tmp_path):
    spec, original = of_others(kind)
    tokenizer = make_tokenizer(spec, [])
    entry = json.loads(json.dumps(tokenizer.save(tmp_path)))
    loaded = Tokenizer.load(tmp_path, entry)
    assert (loaded.vocab_size, loaded.eot_id) == (tokenizer.vocab_size, tokenizer.eot_id)
    assert loaded.encode(TEXTS[0]).tolist() == original(TEXTS[0])
    assert loaded.decode(loaded.encode(TEXTS[0])) == tokenizer.decode(tokenizer.encode(TEXTS[0]))
    (tmp_path / "again").mkdir()
    assert loaded.save(tmp_path / "again") == entry


def test_a_special_token_of_a_unigram_model_is_read_as_the_text_beside_it(of_others, tmp_path):
    """Of its own special tokens and of later ones nothing is found, and the tokens added behind the vocabulary keep their ids."""
    tokenizer = HuggingFaceTokenizer.from_file(of_others("unigram")[0])
    tokenizer.add_tokens(["<mine>"])
    tokenizer.add_special_tokens(["<|other|>"])
    tokenizer.add_tokens(["<yours>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = make_tokenizer(str(tmp_path / "tokenizer.json"), [])
    assert ours.vocab_size == tokenizer.get_vocab_size() == tokenizer.token_to_id("<yours>") + 1
    tokenizer.encode_special_tokens = True
    for text in (TEXTS[0], "a <mine> and <yours> <|other|>"):
        assert ours.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    for name in ("</s>", "<unk>"):
        assert tokenizer.token_to_id(name) not in ours.encode(f"a{name}b").tolist() or name == "<unk>"  # "<" itself may be unknown
        assert len(ours.encode(f"a{name}b")) > 3


@pytest.mark.parametrize(
    "kind", ["unigram", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("byte_level", "unigram_of_whole_texts"))]
)
def test_auto_tokenizer_gives_the_same_ids_beside_an_exported_model(kind, of_others, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = make_tokenizer(of_others(kind)[0], [])
    write_tokenizer(tokenizer, tmp_path, 32)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS[:40], f"a{tokenizer.end_name}b", f"Whoever {tokenizer.end_name} comes", f"no{tokenizer.end_name}"):
        ids = tokenizer.encode(text).tolist()
        assert exported(text, verbose=False)["input_ids"] == ids
        assert tokenizer.eot_id not in ids
    assert exported.eos_token_id == tokenizer.eot_id


# Long documents


@each_kind
def test_a_long_document_is_cut_where_no_id_changes(kind, of_others, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 1000)
    spec, original = of_others(kind)
    tokenizer = make_tokenizer(spec, [])
    n_pieces = 0
    for text in [*(text[:30_000] for text in TEXTS[:12]), *AWKWARD]:
        text = text.replace(IN_VOCABULARY.get(kind, "</s>"), "")
        for size in (len(text), 700):  # as one block, and as a large file is read
            blocks = [text[start : start + size] for start in range(0, len(text), size)]
            pieces = list(documents.pieces([documents.Document("train", 0, lambda blocks=blocks: blocks, b"")], tokenizer))
            n_pieces += len(pieces)
            assert "".join(piece.text for piece in pieces) == text
            assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            assert [i for piece in pieces for i in tokenizer.encode(piece.text).tolist()] == original(text)
    if kind not in ("unigram_of_whole_texts", "merges_without_words"):  # these are never sure
        assert n_pieces > 200


@pytest.mark.parametrize("kind", ["bytes", "unigram_of_whole_texts"])
def test_a_document_without_a_place_for_a_cut_is_cut_nevertheless(kind, of_others, monkeypatch):
    """So that neither memory nor time depends on how long a word a document has."""
    monkeypatch.setattr(documents, "PIECE", 1000)
    monkeypatch.setattr(documents, "MAX_PIECE", 4000)
    tokenizer = make_tokenizer("bytes" if kind == "bytes" else of_others(kind)[0], [])
    text = "a" * 50_000
    for size in (len(text), 700):
        blocks = [text[start : start + size] for start in range(0, len(text), size)]
        pieces = list(documents.pieces([documents.Document("train", 0, lambda blocks=blocks: blocks, b"")], tokenizer))
        assert "".join(piece.text for piece in pieces) == text
        assert max(len(piece.text) for piece in pieces) <= 4000
        assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    parts = list(documents._in_parts(["some words\n", "a" * 10**6, " word" * 10**5]))
    assert "".join(parts) == "some words\n" + "a" * 10**6 + " word" * 10**5
    assert max(map(len, parts)) <= documents.TRAINING_WORD


@pytest.fixture(scope="module")
def lone_text() -> str:
    """250 kB of lines, with a line of 60 kB in the place where a validation share of 0.3 begins."""
    lines = "".join(f"{text[:8000]}größer 日本 {number}\n" for number, text in enumerate(TEXTS[:30]))
    middle = int(len(lines) * 0.7)
    return lines[:middle] + "wörter und mehr " * 4000 + lines[middle:]


@pytest.mark.parametrize(("spec", "suffix"), [("bytes", ".txt.gz"), ("unigram", ".txt"), ("bpe:400", ".txt.zst")])
def test_a_large_file_is_the_same_corpus_as_a_small_one(spec, suffix, of_others, lone_text, tmp_path, monkeypatch):
    compress = {".txt": bytes, ".txt.gz": gzip.compress, ".txt.zst": zstandard.ZstdCompressor().compress}[suffix]
    (tmp_path / f"lone{suffix}").write_bytes(compress(lone_text.encode()))
    (tmp_path / "two").mkdir()  # and a large file beside a small one, which is not cut
    (tmp_path / "two" / f"lone{suffix}").write_bytes(compress(lone_text.encode()))
    (tmp_path / "two" / "small.txt").write_text("small")
    spec = spec if spec[0] == "b" else of_others(spec)[0]
    found = {}
    for size in ("small", "large"):
        if size == "large":
            monkeypatch.setattr(records, "BLOCK", 7_001)
            monkeypatch.setattr(documents, "PIECE", 9_000)
        for source, val_fraction in ((f"lone{suffix}", "0.3"), (f"lone{suffix}", "1e-3"), ("two", "0.5")):
            out = tmp_path / f"{size}-{source}-{val_fraction}"
            arguments = ["--source", tmp_path / source, "--out", out, "--tokenizer", spec, "--val_fraction", val_fraction]
            if main([*map(str, arguments), "--quiet"]):  # both of two documents fell to one split
                out.mkdir()
            found[size, source, val_fraction] = {file.name: file.read_bytes() for file in out.iterdir()}
            if spec == "bytes" and source != "two":
                text = bytes(shards(out, "train")[:-1]) + bytes(shards(out, "val")[:-1])
                assert text.decode() == lone_text
    for (size, *key), files in found.items():
        assert size == "large" or files == found[("large", *key)]


# What is imported


@pytest.mark.parametrize("kind", ["bpe:400", "byte_level", pytest.param("gpt2", marks=needs_gpt2), "hf"])
def test_no_tokenizer_and_no_dataset_imports_torch(kind, of_others, tmp_path):
    with open(tmp_path / "a.jsonl", "w") as stream:
        stream.writelines(json.dumps({"text": f"document {number}"}) + "\n" for number in range(50))
    source = f"hf:json:{tmp_path}/a.jsonl" if kind == "hf" else f"{tmp_path}/a.jsonl"
    spec = {"hf": "bytes"}.get(kind) or (kind if kind[0] == "b" and kind != "byte_level" else of_others(kind)[0])
    code = (
        "import sys; from data_pipeline.prepare import main; status = main(sys.argv[1:])\n"
        "sys.exit(status or str({'torch', 'deepspeed', 'tensorflow', 'jax'} & set(sys.modules) or ''))"
    )
    arguments = ["--source", source, "--out", f"{tmp_path}/out", "--tokenizer", spec, "--val_fraction", "0.3", "--quiet"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout + done.stderr == "\n"


# What is said


def error_of(capsys, *arguments: object) -> str:
    assert main([*map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.fixture
def source(tmp_path) -> Path:
    (tmp_path / "input.txt").write_text("a line\n" * 100)
    return tmp_path / "input.txt"


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_without_a_network_a_missing_encoding_is_one_line(source, tmp_path, monkeypatch, capsys, content):
    (tmp_path / "cache").mkdir()
    if content is not None:
        (tmp_path / "cache" / GPT2_FILE).write_bytes(content)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    for variable in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nobody listens
    tiktoken.registry.ENCODINGS.pop("r50k_base", None)
    error = error_of(capsys, "--source", source, "--out", tmp_path / "out", "--tokenizer", "gpt2")
    assert "r50k_base" in error and "TIKTOKEN_CACHE_DIR" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "input.txt"]


def test_a_tokenizer_that_cannot_be_used_is_one_line(of_others, source, tmp_path, capsys):
    broken, no_end = tmp_path / "broken.json", tmp_path / "no_end.json"
    broken.write_text('{"model": 1}')
    tokenizer = json.loads(Path(of_others("byte_level")[0]).read_text().replace("<|endoftext|>", "<|stop|>"))
    no_end.write_text(json.dumps(tokenizer))
    (tmp_path / "folder").mkdir()
    arguments = ("--source", source, "--out", tmp_path / "out", "--tokenizer")
    assert f"{broken} is not a valid tokenizer.json" in error_of(capsys, *arguments, broken)
    assert "none of <|endoftext|>" in error_of(capsys, *arguments, no_end)
    assert "no token '<|no|>'" in error_of(capsys, *arguments, no_end, "--end_of_text", "<|no|>")
    assert "AutoTokenizer" in error_of(capsys, *arguments, tmp_path / "folder")
    assert "has its own" in error_of(capsys, *arguments, "bytes", "--end_of_text", "<|stop|>")
    assert "not a tokenizer; allowed" in error_of(capsys, *arguments, tmp_path / "nowhere.json")
    assert not (tmp_path / "out").exists()
    assert main([*map(str, arguments), str(no_end), "--end_of_text", "<|stop|>", "--quiet"]) == 0


WORD_PIECE = {
    "type": "WordPiece",
    "unk_token": "x",
    "continuing_subword_prefix": "#",
    "max_input_chars_per_word": 9,
    "vocab": {"</s>": 0, "zq": 1},
}
BYTE_PAIR = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        # The first two panic when they are read, the third with the first text; the last has no id for an unknown word.
        ("unigram", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "is not a valid tokenizer.json"),
        ("byte_level", {"model": BYTE_PAIR}, "is not a valid tokenizer.json"),
        ("byte_level", {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}}, "the tokenizer cannot encode"),
        ("word_piece", {"model": WORD_PIECE}, "the tokenizer cannot encode a text"),
    ],
)
@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_library_that_panics_is_one_line(kind, values, said, place, source, tmp_path, capfd):
    path = tmp_path / "folder" / "tokenizer.json"
    path.parent.mkdir()
    description = json.loads(train(kind).to_str()) | values
    path.write_text(json.dumps(description))
    (path.parent / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')
    spec = path if place == "file" else path.parent
    assert main(["--source", str(source), "--out", str(tmp_path / "out"), "--tokenizer", str(spec), "--quiet"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]  # after what the library's own hook prints of a panic
    assert line.startswith("error: ") and said in line


def test_a_folder_without_a_vocabulary_is_refused(tmp_path):
    """transformers makes an empty tokenizer of it, with which every text would be lost."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(DataError, match="the tokenizer has no vocabulary"):
        make_tokenizer(str(tmp_path), [])


@pytest.mark.parametrize("kind", ["byte_level", "folder"])
def test_another_tokenizer_of_the_same_name_is_noticed(kind, of_others, source, tmp_path, capsys):
    given = Path(of_others(kind)[0])
    name = Path((shutil.copytree if given.is_dir() else shutil.copy)(given, tmp_path / given.name))
    arguments = ("--source", source, "--out", tmp_path / "out", "--tokenizer", name)
    prepare(*arguments)
    prepare(*arguments)
    shutil.copy(of_others("unigram")[0], name / "tokenizer.json" if name.is_dir() else name)
    assert f"{name}: differs from that in {tmp_path / 'out'}" in error_of(capsys, *arguments)


def test_the_tokenizer_of_a_corpus_encodes_another_one(source, tmp_path, capsys):
    """With the same ids; it is not trained again, and another one in its place is noticed."""
    (tmp_path / "more.txt").write_text("The tokenizer of one corpus encodes another.\n" * 50)
    first, second = tmp_path / "first", tmp_path / "second"
    prepare("--source", source, "--out", first, "--tokenizer", "bpe:300")
    arguments = ("--source", tmp_path / "more.txt", "--out", second, "--tokenizer", first)
    prepare(*arguments)
    entries = [open_corpus(out).manifest["tokenizer"] for out in (first, second)]
    assert entries[0] == entries[1]
    text = "The square of 7"
    assert len({tuple(Tokenizer.load(out, entries[0]).encode(text)) for out in (first, second)}) == 1
    other = ("--source", source, "--out", tmp_path / "third", "--tokenizer", first)
    assert "has its own; omit the flag" in error_of(capsys, *other, "--end_of_text", "</s>")
    shutil.rmtree(first)
    prepare("--source", source, "--out", first, "--tokenizer", "bytes")
    assert f"{first}: differs from that in {second}" in error_of(capsys, *arguments)
