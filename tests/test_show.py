"""`prepare.py --show` prints the counts of a corpus and the beginnings of some documents."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from data_pipeline import prepare
from tests.helpers import ROOT
from tests.test_nanogpt import write_characters, write_folder

ESCAPE = "\x1b]0;title\x07\x1b[31m"


def show(folder: Path, capsys) -> str:
    assert prepare.main(["--show", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(c.isprintable() or c in "\n\t" for c in out), "an escape sequence would reach the terminal"
    return out


def rows_of(out: str) -> dict[tuple[str, str], list[str]]:
    """The table: (split, source) -> documents, tokens, bytes per token, shards, MB."""
    rows = [line.split() for line in out.splitlines() if line.startswith(("train ", "val "))]
    return {(row[0], row[1]): row[2:] for row in rows}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """Two weighted sources in several shards."""
    folder = tmp_path_factory.mktemp("show")
    for name, count in (("one", 80), ("two", 40)):
        (folder / name).mkdir()
        for number in range(count):
            (folder / name / f"{number}.txt").write_text(f"{name} {number}: größer {ESCAPE}\n" * (1 + number))
    sources = ["--source", f"{folder / 'one'}@0.75", f"{folder / 'two'}@0.25"]
    options = ["--tokenizer", "bytes", "--val_fraction", "0.2", "--shard_tokens", "30000", "--quiet"]
    assert prepare.main([*sources, "--out", str(folder / "mixture"), *options]) == 0
    return folder / "mixture"


def test_counts_and_documents_of_a_mixture_are_shown(mixture, capsys):
    out = show(mixture, capsys)
    rows, manifest = rows_of(out), json.loads((mixture / "manifest.json").read_text())
    assert set(rows) == {(split, group) for split in ("train", "val") for group in ("one", "two", "all")}
    for split in ("train", "val"):
        entry = manifest["splits"][split]
        assert rows[split, "all"][:2] == [f"{entry['documents']:,}", f"{entry['tokens']:,}"]
        for column in (0, 1, 3):
            parts = [int(rows[split, group][column].replace(",", "")) for group in ("one", "two", "all")]
            assert parts[0] + parts[1] == parts[2]
    assert "source one, weight 0.75: " in out and "'tokenizer': 'bytes'" in out
    assert "one 0: größer \\x1b" in out and "\ntwo " in out


def test_nanogpt_folders_are_shown(tmp_path, capsys, monkeypatch):
    assert "def of(x):\n    return x + 1\n" in show(write_characters(tmp_path / "characters"), capsys)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "none"))
    for variable in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nobody listens
    tiktoken.registry.ENCODINGS.pop("r50k_base", None)
    out = show(write_folder(tmp_path / "gpt2", {"train": np.arange(1000), "val": np.arange(300)}), capsys)
    assert rows_of(out)["train", "all"] == ["-", "1,000", "-", "1", "0.0"]
    assert f"no samples: {tmp_path / 'gpt2'}: r50k_base is not in tiktoken's cache" in out


def test_descriptive_fields_may_hold_anything(mixture, tmp_path, capsys):
    folder = Path(shutil.copytree(mixture, tmp_path / "a$b\x1b"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"sources": [ESCAPE, 3, None, {ESCAPE: {"deep": 1}}], "options": {"x\ny": [1, 2]}, "dropped": {"odd": "many"}}
    manifest["splits"]["val"] = {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert rows_of(show(folder, capsys))["val", "all"] == ["0", "0", "-", "0", "0.0"]


def test_a_missing_corpus_is_one_line_and_a_closed_pipe_none(mixture, tmp_path):
    command = f"{sys.executable} data_pipeline/prepare.py --show {mixture} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert prepare.main(["--show", str(tmp_path / "none\nsuch")]) == 2


def test_a_closed_pipe_ends_a_preparation_with_an_error(tmp_path):
    command = f"{sys.executable} data_pipeline/prepare.py --source model --out {tmp_path / 'out'} --tokenizer bytes | true"
    done = subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("failed: [Errno 32] Broken pipe: nothing was written to") and done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_preparation_needs_no_standard_output(tmp_path):
    command = [sys.executable, "data_pipeline/prepare.py", "--source", "launch", "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    done = subprocess.run(["bash", "-c", '"$@" >&-', "bash", *command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--dedup", "exact"], "--dedup: is for preparing a corpus; leave it out"),
        (["--verify", "x"], "argument --verify: not allowed with argument --show"),
    ],
)
def test_a_flag_without_effect_is_refused(more, said, mixture, capsys):
    with pytest.raises(SystemExit, match="2"):
        prepare.main(["--show", str(mixture), *more])
    assert said in capsys.readouterr().err
