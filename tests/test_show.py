"""`show.py` says what is in a corpus: counts as the manifest has them, the lengths as a picture, the beginnings of documents as text."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import prepare
from data_pipeline.shards import open_corpus
from tests.test_nanogpt import write_characters, write_folder

ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG\r\n\x1a\n"
ESCAPE = "\x1b]0;owned\x07\x1b[31m"


def show(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "data_pipeline/show.py", *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # it must work uninstalled
    return subprocess.run(command, cwd=ROOT, env=environment | options, capture_output=True, text=True, timeout=120)


def texts_of(folder: Path, word: str, count: int) -> dict[str, str]:
    """Documents of random length that begin with their own name."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(len(word))
    texts = {
        f"{word} {number}: größer {ESCAPE}": " ".join(generator.choice([word, "日本", "\n", "\r\n", "x"], 400)) for number in range(count)
    }
    for number, (start, text) in enumerate(texts.items()):
        (folder / f"{number}.txt").write_bytes(f"{start}{text[: int(generator.integers(0, 1500))]}".encode())
    return texts


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """Two weighted sources, several shards, so that documents cross from one to the next. Read only."""
    folder = tmp_path_factory.mktemp("show")
    texts_of(folder / "one", "one", 80)
    texts_of(folder / "two", "two", 40)
    sources = ["--source", f"{folder / 'one'}@0.75", f"{folder / 'two'}@0.25"]
    options = ["--tokenizer", "bpe:300", "--val_fraction", "0.2", "--shard_tokens", "3000", "--quiet"]
    assert prepare.main([*sources, "--out", str(folder / "mixture"), *options]) == 0
    return folder / "mixture"


@pytest.fixture
def copied(mixture, tmp_path) -> Path:
    return Path(shutil.copytree(mixture, tmp_path / "mixture"))


def rows_of(out: str) -> dict[tuple[str, str], list[str]]:
    """The table: (split, group) -> documents, tokens, bytes a token, shards, MB."""
    _, table = re.split(r"^split .*\n", out, maxsplit=1, flags=re.MULTILINE)
    rows = [line.split() for line in table.splitlines() if line.startswith(("train ", "val "))]
    return {(row[0], row[1] if len(row) == 7 else ""): row[-5:] for row in rows}


def test_a_corpus_is_counted_drawn_and_sampled(corpus, tmp_path):
    folder = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    done = show(folder, "--samples", 5)
    assert (done.returncode, done.stderr) == (0, "")
    manifest = json.loads((folder / "manifest.json").read_text())
    rows = rows_of(done.stdout)
    assert set(rows) == {("train", ""), ("val", "")}
    for split in ("train", "val"):
        entry = manifest["splits"][split]
        ratio, size = f"{entry['bytes'] / entry['tokens']:.2f}", f"{entry['tokens'] * 2 / 1e6:.1f}"
        assert rows[split, ""] == [f"{entry['documents']:,}", f"{entry['tokens']:,}", ratio, "1", size]
        assert f"{split}: {entry['documents']:,} documents; tokens in a document: " in done.stdout
    assert done.stdout.startswith(f"{folder}: 1,024 ids, uint16, tokenizer bpe\nsource {manifest['sources'][0]['name']} (")
    assert "options: tokenizer bpe:1024, val_fraction 0.15, " in done.stdout
    picture = folder / "lengths.png"
    assert picture.read_bytes().startswith(PNG)
    assert picture.stat().st_size > 10_000
    assert done.stdout.endswith(f"\nthe lengths are drawn in {picture}\n")
    opened = open_corpus(folder)  # with the picture in it
    opened.verify()
    assert opened.fingerprint == open_corpus(corpus).fingerprint


def samples_of(out: str) -> list[tuple[str, int, int, str]]:
    """(split, number, tokens, text) of each sample."""
    found = re.findall(r"\n--- (\w+), document ([\d,]+): ([\d,]+) tokens\n(.*?)\n(?=\n---|\nthe lengths)", out, flags=re.DOTALL)
    return [(split, int(number.replace(",", "")), int(tokens.replace(",", "")), text) for split, number, tokens, text in found]


def test_the_groups_of_a_mixture_are_counted_and_their_samples_are_the_sources_own(mixture, copied):
    done = show(copied, "--samples", 1000)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^source weight 0\.75 .*/one \(files 80, bytes [\d,]+\)$", done.stdout, flags=re.MULTILINE)
    assert re.search(r"^source weight 0\.25 .*/two \(files 40, bytes [\d,]+\)$", done.stdout, flags=re.MULTILINE)
    rows = rows_of(done.stdout)
    assert set(rows) == {(split, group) for split in ("train", "val") for group in ("0", "1", "all")}
    for column in (0, 1, 3):
        for split in ("train", "val"):
            parts = [int(rows[split, group][column].replace(",", "")) for group in ("0", "1", "all")]
            assert parts[0] + parts[1] == parts[2]
    assert int(rows["train", "0"][0]) + int(rows["val", "0"][0]) == 80

    # Every document, each where it belongs, each the beginning of its file; what a terminal would obey is written out.
    samples = samples_of(done.stdout)
    assert [(split, number) for split, number, _, _ in samples] == [
        (split, number) for split in ("train", "val") for number in range(int(rows[split, "all"][0]))
    ]
    assert all(c.isprintable() or c in "\n\t" for c in done.stdout)
    written = {}
    for file in [*mixture.parent.glob("one/*"), *mixture.parent.glob("two/*")]:
        shown = file.read_bytes().decode()[:300].replace("\x1b", "\\x1b").replace("\x07", "\\x07").replace("\r", "\\r")
        written[shown + ("..." if len(file.read_bytes().decode()) > 300 else "")] = file
    assert {text for _, _, _, text in samples} == set(written)
    names = [written[text].parent.name for _, _, _, text in samples]
    train = int(rows["train", "all"][0])
    assert names[:train] == sorted(names[:train])
    assert names[train:] == sorted(names[train:])
    assert sum(tokens for split, _, tokens, _ in samples if split == "train") == int(rows["train", "all"][1].replace(",", ""))


def test_the_seed_chooses_the_samples(copied):
    runs = [samples_of(show(copied, "--samples", 4, "--seed", seed).stdout) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert [len(run) for run in runs] == [8, 8, 8]


def test_characters_are_sampled_from_the_beginning_and_have_no_lengths(tmp_path):
    folder = write_characters(tmp_path / "characters")
    done = show(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokenizer characters" in done.stdout
    assert "--- train, its beginning\ndef of(x):\n    return x + 1\n" in done.stdout
    assert "train: no end of a document, so there are no lengths\nval: no end of a document, so there are no lengths\n" in done.stdout
    assert "drawn" not in done.stdout
    assert sorted(os.listdir(folder)) == ["meta.pkl", "train.bin", "val.bin"]


def test_gpt2s_ids_are_counted_though_the_tokenizer_is_not_here(tmp_path):
    tokens = np.arange(1000) % 50_257
    tokens[99::100] = 50_256
    folder = write_folder(tmp_path / "gpt2", {"train": tokens, "val": tokens[:300]})
    done = show(folder, TIKTOKEN_CACHE_DIR=str(tmp_path / "none"))
    assert (done.returncode, done.stderr) == (0, "")
    assert rows_of(done.stdout)["train", ""] == ["-", "1,000", "-", "1", "0.0"]
    assert "train: 10 documents; tokens in a document: 100 at least, 100 (10%), 100 (median), 100 (90%), 100 at most" in done.stdout
    assert "no samples: the tokenizer r50k_base is not here: " in done.stdout
    assert (folder / "lengths.png").stat().st_size > 10_000


def test_the_picture_goes_where_it_is_asked_and_quiet_says_nothing(copied, tmp_path):
    for name in ("elsewhere.png", "no_suffix"):
        done = show(copied, "--quiet", "--picture", tmp_path / name)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert (tmp_path / name).read_bytes().startswith(PNG)
    assert not (copied / "lengths.png").exists()


def test_a_folder_of_any_name_is_drawn(copied):
    renamed = copied.rename(copied.with_name("a$b_{$ 日\x1b"))
    done = show(renamed, "--samples", 0)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a$b_{$ 日\\x1b: 300 ids" in done.stdout
    assert (renamed / "lengths.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--picture", "{corpus}/manifest.json/x.png"],
            r"manifest\.json/x\.png: cannot be written \(Not a directory\); name another place",
        ),
        (["--picture", "{corpus}/none/x.png"], r"none/x\.png: cannot be written \(No such file or directory\); name another place"),
        (["--picture", "/proc/x.png"], r"/proc/x\.png: cannot be written \(.*\); name another place with --picture FILE\.png"),
        (["--picture", "{corpus}"], r"mixture: cannot be written \(Is a directory\); name another place"),
        (["--picture", "x.txt"], r"x\.txt: cannot be written \(Format 'txt' is not supported"),
        (["--samples", "-1"], r"--samples -1: allowed: 0 or more"),
        (["--seed", "-1"], r"--seed -1: allowed: 0 or more"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(copied, arguments, said):
    before = sorted(os.listdir(copied))
    done = show(copied, *[argument.format(corpus=copied) for argument in arguments])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.match(f"error: .*{said}", line)
    assert sorted(os.listdir(copied)) == before


def test_a_corpus_that_is_none_or_damaged_is_named(copied, tmp_path):
    damaged = copied / "train-00000.ends"
    damaged.write_bytes(bytes(reversed(damaged.read_bytes())))
    for folder, said in ((tmp_path / "none\nsuch", r"none\\nsuch: no such corpus"), (copied, r"train-00000\.ends: changed, its sha256")):
        done = show(folder)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert re.match(f"error: .*{said}", line)


def test_a_reader_that_has_enough_leaves_no_traceback(copied):
    command = f"{sys.executable} data_pipeline/show.py {copied} --samples 1000 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{copied}: 300 ids, uint16, tokenizer bpe\n"
    assert (copied / "lengths.png").exists()


def test_a_terminal_without_the_letters_gets_them_written_out(copied):
    done = show(copied, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr\\xf6\\xdfer" in done.stdout


def test_what_only_people_read_may_be_anything(copied):
    file = copied / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest |= {"sources": [ESCAPE, 3, None, {"name": ["a", "b"], ESCAPE: {"deep": 1}}], "options": {"x\ny": [1, 2]}}
    manifest |= {"dropped": {"odd": "many", "empty": 1200}}
    manifest["tokenizer"]["name"] = {"a": 1}
    file.write_text(json.dumps(manifest))
    done = show(copied)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(c.isprintable() or c in "\n\t" for c in done.stdout)
    assert "options: x\\ny [1, 2]\nleft out: many odd, 1,200 empty\n" in done.stdout


def test_a_split_without_a_token_is_shown(copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["splits"]["val"] = {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}
    (copied / "manifest.json").write_text(json.dumps(manifest))
    done = show(copied, "--samples", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert rows_of(done.stdout)["val", ""] == ["0", "0", "-", "0", "0.0"]


def test_showing_needs_neither_torch_nor_deepspeed(copied):
    code = (
        f"import sys, runpy; sys.argv = ['data_pipeline/show.py', {str(copied)!r}, '--quiet']; sys.path[0] = 'data_pipeline'\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: assert 'matplotlib' in sys.modules and not {'torch', 'deepspeed'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
