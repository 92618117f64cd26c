"""Where documents come from: every format and place, what is done with a bad record, and that no damage ends in more than one line."""

import bz2
import csv
import gzip
import hashlib
import importlib.metadata
import io
import json
import lzma
import os
import random
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import datasets
import numpy as np
import pyarrow
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_pipeline import documents, records
from data_pipeline.prepare import main
from data_pipeline.shards import open_corpus
from data_pipeline.sources import open_sources
from tests.helpers import ROOT

TEXTS = [f"document {number}: größer, 日本\n" * (1 + number % 3) for number in range(20)]


def read(out: Path, split: str) -> list[str]:
    """The documents of a corpus of `bytes`."""
    corpus = open_corpus(out)
    shards = [np.fromfile(out / shard["file"], corpus.dtype) for shard in corpus.manifest["splits"][split]["shards"]]
    parts = "".join(map(chr, np.concatenate(shards))).split(chr(256))
    assert parts.pop() == ""
    return [part.encode("latin-1").decode() for part in parts]


def in_split(texts: list[str], split: str, val_fraction: float = 0.3) -> list[str]:
    is_val = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < val_fraction * 2**64 for text in texts]
    return [text for text, val in zip(texts, is_val, strict=True) if val == (split == "val")]


@pytest.fixture
def run(tmp_path, capsys):
    """A function that prepares sources by bytes and returns (exit code, documents of train and val, manifest, stdout, stderr)."""
    numbers = iter(range(1000))

    def prepare(*sources: object, options: tuple = ()):
        out = tmp_path / f"out-{next(numbers)}"
        arguments = ["--source", *sources, "--out", out, "--tokenizer", "bytes", "--val_fraction", "0.3", *options]
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        if code:
            assert not out.exists()
            assert captured.err.count("\n") == 1
            return code, None, None, captured.out, captured.err
        assert captured.err == ""
        manifest = json.loads((out / "manifest.json").read_text())
        return code, {split: read(out, split) for split in ("train", "val")}, manifest, captured.out, captured.err

    return prepare


def jsonl(texts, column="text") -> bytes:
    return "".join(json.dumps({"id": 1, column: text}, ensure_ascii=len(text) % 2 == 0) + "\n" for text in texts).encode()


def table(texts, column="text", **options) -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), column: texts}), stream, **options)
    return stream.getvalue()


def arrow(texts, make=pyarrow.ipc.new_stream, **options) -> bytes:
    """Three rows per batch, and a column beside the text."""
    stream, data = io.BytesIO(), pyarrow.table({"id": [[1, 2]] * len(texts), "text": texts})
    with make(stream, data.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(data, max_chunksize=3)
    return stream.getvalue()


def rows(texts, column="text", **options) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, **options)
    writer.writerows([["id", column], *([number, text] for number, text in enumerate(texts))])
    return stream.getvalue().encode()


def zst(data: bytes, window_log: int = 20) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, chain_log=16, hash_log=16, write_content_size=False)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def all_of(texts) -> dict[str, list[str]]:
    return {split: in_split(texts, split) for split in ("train", "val")}


# Formats and places


FORMATS = {
    "a.jsonl": jsonl(TEXTS),
    "a.jsonl.gz": gzip.compress(jsonl(TEXTS)),
    "a.jsonl.zst": zst(jsonl(TEXTS)),
    "members.jsonl.gz": gzip.compress(jsonl(TEXTS[:7])) + gzip.compress(jsonl(TEXTS[7:])),
    "frames.jsonl.zst": zst(jsonl(TEXTS[:7])) + zst(jsonl(TEXTS[7:])),
    "padded.jsonl.gz": gzip.compress(jsonl(TEXTS[:7])) + bytes(512) + gzip.compress(jsonl(TEXTS[7:])) + bytes(10_000),
    "window.jsonl.zst": zst(jsonl(TEXTS), 28),
    "a.NDJSON": jsonl(TEXTS),
    "a.jsonlines.XZ": lzma.compress(jsonl(TEXTS)),
    "a.Json.bz2": bz2.compress(jsonl(TEXTS[:7])) + bz2.compress(jsonl(TEXTS[7:])),
    "a.ndjson.zstd": zst(jsonl(TEXTS)),
    "padded.jsonl.xz": lzma.compress(jsonl(TEXTS[:7])) + bytes(4) + lzma.compress(jsonl(TEXTS[7:])) + bytes(8),
    "mark.jsonl": b"\xef\xbb\xbf" + jsonl(TEXTS),
    "crlf.jsonl": jsonl(TEXTS).replace(b"\n", b"\r\n") + b"\r\n",
    "unended.jsonl": jsonl(TEXTS).rstrip(),
    "array.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    "array.json.gz": gzip.compress(b"\xef\xbb\xbf" + json.dumps([{"text": text} for text in TEXTS]).encode()),
    "objects.json": "\n\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS).encode(),
    "lines.json": jsonl(TEXTS),
    "a.parquet": table(TEXTS, row_group_size=3),
    "dictionary.parquet": table(pyarrow.array(TEXTS).dictionary_encode(), compression="zstd"),
    "a.pq": table(TEXTS),
    "stream.arrow": arrow(TEXTS),
    "file.arrow": arrow(pyarrow.array(TEXTS, pyarrow.large_string()), pyarrow.ipc.new_file, compression="zstd"),
    "dictionary.arrow": arrow(pyarrow.array(TEXTS).dictionary_encode(), emit_dictionary_deltas=True),
    "binary.parquet": table([text.encode() for text in TEXTS]),
    "a.csv": b"\n\n" + rows(TEXTS),
    "quoted.csv.gz": gzip.compress(rows(TEXTS, quoting=csv.QUOTE_ALL)),
    "mark.csv.zst": zst(b"\xef\xbb\xbf" + rows(TEXTS, lineterminator="\n")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_the_same_documents(run, tmp_path, name):
    (tmp_path / name).write_bytes(FORMATS[name])
    assert run(tmp_path / name)[1] == all_of(TEXTS)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_the_text_column_has_any_name(run, tmp_path, suffix):
    make = {".jsonl": jsonl, ".json": jsonl, ".csv": rows, ".parquet": table}[suffix]
    (tmp_path / f"a{suffix}").write_bytes(make(TEXTS, "der text"))
    assert run(tmp_path / f"a{suffix}", options=("--text_column", "der text"))[1] == all_of(TEXTS)
    code, *_, err = run(tmp_path / f"a{suffix}")
    assert code == 2
    assert "no text column 'text' (it has 'id', 'der text': name one with --text_column" in err


@pytest.mark.parametrize("block", [2, 7, 64])
def test_json_is_read_the_same_in_blocks_of_any_size(tmp_path, monkeypatch, block):
    monkeypatch.setattr(records, "BLOCK", block)
    values = [{"text": text, "n": [1.5e-7, -12, None, True, '\\u00e9"', {"a": []}], "end": 123} for text in TEXTS]
    (tmp_path / "a.json").write_text(json.dumps(values, indent=3))
    (tmp_path / "b.json").write_text("\n".join(json.dumps(value, indent=1) for value in values))
    for name in ("a.json", "b.json"):
        found = records.records(tmp_path / name, "text", records.Problems("stop"), lambda done: None)
        assert ["".join(text.blocks()) for text in found] == TEXTS


def test_folders_and_globs_are_read_in_the_order_of_their_paths(run, tmp_path):
    root = tmp_path / "root"
    names = ["b.txt", "a/z.md", "a.py", "a-b/1.txt.gz", "c/deep/er/x.txt.zst", "a/10.jsonl", ".hidden.txt", ".git/x.txt", "n.bin", "d.csv"]
    for name, text in zip(names, TEXTS, strict=False):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        data = jsonl([text]) if ".jsonl" in name else rows([text]) if ".csv" in name else text.encode()
        file.write_bytes(gzip.compress(data) if name.endswith(".gz") else zst(data) if name.endswith(".zst") else data)
    os.mkfifo(root / "pipe.txt")
    (root / "dangling.txt").symlink_to("nowhere")
    by_name = dict(zip(names, TEXTS, strict=False))
    kept = sorted(name for name in names if not name.startswith(".") and name != "n.bin")
    assert run(root)[1] == all_of([by_name[name] for name in kept])
    matched = [by_name[name] for name in ("a/10.jsonl", "a/z.md", "b.txt", "d.csv")]
    code, found, manifest, *_ = run(f"{root}/**/*.[mj]*", f"{root}/[bd].*", options=("--val_fraction", "0.55"))
    assert found == {split: in_split(matched, split, 0.55) for split in ("train", "val")}
    assert manifest["mixture"] == [1.0]
    code, *_, err = run(f"{root}/*.pdf")
    assert code == 2 and "no text file found" in err


KINDS = ["a.docx", "b.JSONL", "c.tsv", "d.Docx", "e", "f.tar.gz", "g.text", "h.\x1b[31m"]


def test_folders_and_globs_say_what_they_leave_out(run, tmp_path):
    for name in KINDS:
        (tmp_path / name).write_bytes(jsonl(TEXTS) if name == "b.JSONL" else b"text")
    said = "left out: 1 .\\x1b[31m, 2 .docx, 1 .tar.gz, 1 .tsv, 1 without suffix\n"
    for source in (tmp_path, f"{tmp_path}/*"):
        _, found, manifest, out, _ = run(source)
        assert found == all_of([*TEXTS, "text"]) and said in out
        assert manifest["dropped"][".docx"] == 2
    for source in (tmp_path / "a.docx", f"{tmp_path}/*.docx"):
        code, *_, err = run(source, tmp_path / "b.JSONL")
        assert code == 2 and " .docx; convert such files to .jsonl, .parquet or .txt); allowed: stdlib, a file" in err
        _, found, _, out, _ = run(source, tmp_path / "b.JSONL", options=("--on_error", "skip"))
        assert found == all_of(TEXTS) and " .docx\n" in out
    assert "no document for train (0 in total; left out: 1 .docx)" in run(tmp_path / "a.docx", options=("--on_error", "skip"))[4]
    (tmp_path / "link.txt").symlink_to("nowhere")
    (tmp_path / "manifest.json").write_text('{"files": 2}')  # of another tool: the folder is no prepared corpus
    assert "left out: 1 .\\x1b[31m" in (said := run(tmp_path, options=("--on_error", "skip"))[3]) and "1 broken link" in said


def test_what_describes_a_dataset_is_no_text(run, tmp_path):
    hub, docs = tmp_path / "hub", tmp_path / "docs"
    for folder in (hub / "data", docs):
        folder.mkdir(parents=True)
    (hub / "data" / "train.jsonl").write_bytes(jsonl(TEXTS))
    for name in ("README.md", "LICENSE.txt", "dataset_infos.json", ".gitattributes"):
        (hub / name).write_text("---\nlicense: cc0\n---\n" if name == "README.md" else "{}")
    for source in (hub, f"{hub}/**/*.*"):
        _, found, manifest, *_ = run(source)
        assert (found, manifest["dropped"]) == (all_of(TEXTS), {"dataset card": 2})
    for number, text in enumerate(TEXTS):
        (docs / f"{number:02}.md").write_text(text)
    (docs / "README.md").write_text("how to build")
    assert run(docs)[1] == all_of([*TEXTS, "how to build"])
    (docs / "README.md").write_text("---\r\nlicense: cc0\r\n---\r\n")
    _, found, manifest, *_ = run(docs)
    assert (found, manifest["dropped"]) == (all_of(TEXTS), {"dataset card": 1})
    found = run(hub / "README.md")[1]
    assert "".join(found["train"] + found["val"]) == "---\nlicense: cc0\n---\n"


# Separators


@pytest.mark.parametrize("block", [2, 5, 2**20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_separator_cuts_a_text_file_into_documents(run, tmp_path, monkeypatch, block, end):
    monkeypatch.setattr(records, "BLOCK", block)
    texts = [text.strip().replace("\n", end) for text in TEXTS]
    mark = "<|endoftext|>"
    data = mark + f"{end}{mark}{end}".join(texts[:10]) + mark + mark.join(texts[10:]) + end + mark + end
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + data.encode())
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(mark.join(texts[:3]).encode()))
    (tmp_path / "c.jsonl").write_bytes(jsonl(["not" + mark + "cut"]))
    (tmp_path / "d.py").write_bytes("\n\n\n".join(texts[:4]).encode())
    every = [tmp_path / name for name in ("a.txt", "b.md.gz", "c.jsonl")]
    _, found, manifest, out, _ = run(*every, options=("--separator", mark))
    assert found == all_of([*texts, *texts[:3], "not" + mark + "cut"])
    assert manifest["options"]["separator"] == mark
    assert f"{mark!r} occurs 1 times in the texts: it is text there and ends no document" in out
    assert run(tmp_path / "d.py", options=("--separator", "\\n\n\\n"))[1] == all_of(texts[:4])
    _, found, *_ = run(*every, options=("--separator", mark, "--dedup", "exact", "--max_docs", "5"))
    assert found == all_of([*texts[:5], "not" + mark + "cut"])


@pytest.mark.parametrize("size", [0, 3, 100])
def test_a_piece_above_the_limit_is_a_bad_record(tmp_path, monkeypatch, size):
    """Its end is found without the piece in memory, also where the separator is cut by a block."""
    monkeypatch.setattr(records, "BLOCK", 10)
    file = tmp_path / "a.txt"
    for shift in range(10):
        file.write_bytes(b"one\n<|>\n" + b"x" * shift + b"a\xff" * size + b"\n<|>\n\xff\n<|>\n\n<|>two\n")
        problems = records.Problems("skip", max_record=30)
        found = records.records(file, "text", problems, lambda done: None, "<|>")
        texts = ["".join(text.blocks()) for text in found]
        assert texts == (["one", "two"] if size or not shift else ["one", "x" * shift, "two"])
        cases = [case.replace(str(file), "")[:20] for kind in sorted(problems.cases) for case in problems.cases[kind]]
        assert cases == [*[":3: not UTF-8 ('utf-"] * (0 < size <= 15), ":5: not UTF-8 ('utf-", *[":3: record too large"] * (size > 15)]


def test_marks_of_an_end_in_the_texts_are_counted_and_the_flag_is_named(run, tmp_path):
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(f"story {number}\n" for number in range(58)))
    said = "'<|endoftext|>' occurs 57 times in the texts: it is text there and ends no document (--separator cuts text files)\n"
    assert said in run(tmp_path / "a.txt")[3]
    assert "occurs" not in run(tmp_path / "a.txt", options=("--separator", "<|endoftext|>"))[3]
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    assert "no source has a file of .txt .md .py" in run(tmp_path / "a.jsonl", options=("--separator", "x"))[4]
    assert "--separator '': allowed: one character" in run(tmp_path / "a.txt", options=("--separator", ""))[4]


def test_a_corpus_that_was_prepared_inside_a_source_is_not_read(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "a" / f"{number}.txt").write_text(text)
    command = ["--source", str(tmp_path / "a"), "--tokenizer", "bytes", "--val_fraction", "0.3", "--out"]
    for out in (tmp_path / "a" / "out", tmp_path / "a" / "out", tmp_path / "a" / "again"):
        assert main([*command, str(out)]) == 0, capsys.readouterr().err
    assert "nothing to do" in capsys.readouterr().out
    assert main(["--source", f"{tmp_path}/a/**/*.json", *command[2:], str(tmp_path / "glob")]) == 2
    assert "no text file found" in capsys.readouterr().err


def test_names_that_are_not_utf8_are_read_and_told(run, tmp_path):
    folder = tmp_path / os.fsdecode(b"gr\xf6\xdfer")
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(jsonl(TEXTS))
    assert run(folder)[1] == all_of(TEXTS)
    (folder / "b.jsonl").write_bytes(b"{broken\n")
    assert run(folder)[0] == 2
    assert run(folder, options=("--on_error", "skip"))[1] == all_of(TEXTS)


def test_max_docs_counts_the_documents_of_each_source(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{broken\n" + jsonl(TEXTS[:10]))
    (tmp_path / "b.parquet").write_bytes(table(TEXTS[10:]))
    _, found, *_ = run(tmp_path / "a.jsonl", tmp_path / "b.parquet", options=("--max_docs", "7", "--on_error", "skip"))
    assert found == all_of(TEXTS[:7] + TEXTS[10:17])


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize("max_docs", [None, 1000])
def test_a_tokenizer_is_trained_on_a_sample_of_all_documents(tmp_path, monkeypatch, suffix, max_docs):
    """Also if the size of the text is not known: with --max_docs, and of compressed files."""
    monkeypatch.setattr(documents, "TRAINING_BYTES", 50_000)
    texts = [f"{number:05d} " * 10 for number in range(4000)]
    file = tmp_path / f"a{suffix}"
    file.write_bytes(table(texts) if suffix == ".parquet" else gzip.compress(jsonl(texts)) if suffix.endswith(".gz") else jsonl(texts))
    sources, _ = open_sources([str(file)], max_docs=max_docs)
    drawn = list(documents.training_texts(documents.Documents(sources, 0.1)))
    assert 49_500 < sum(map(documents._memory, drawn)) <= 50_000 and 180 < len(drawn) < 200
    numbers = [int(text[:5]) for text in drawn]
    assert numbers == sorted(numbers)
    n = max_docs or 4000
    assert max(numbers) < n
    quarters = np.histogram(numbers, 4, (0, n))[0]
    assert min(quarters) > 20, quarters


def test_weights_are_kept_as_groups_that_no_document_crosses(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS[:10]))
    (tmp_path / "b@0.5.jsonl").write_bytes(jsonl(TEXTS[10:]))
    _, found, manifest, *_ = run(f"{tmp_path}/a.jsonl@3", f"{tmp_path}/b@0.5.jsonl@1", options=("--shard_tokens", "100"))
    assert found == all_of(TEXTS)
    assert manifest["mixture"] == [0.75, 0.25]
    for split in ("train", "val"):
        shards = manifest["splits"][split]["shards"]
        assert [shard["group"] for shard in shards] == sorted(shard["group"] for shard in shards)
        of_group = [sum(shard["documents"] for shard in shards if shard["group"] == group) for group in (0, 1)]
        assert of_group == [len(in_split(TEXTS[:10], split)), len(in_split(TEXTS[10:], split))]


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (["{a}@0.7", "{a}"], "has no weight, but others"),
        (["{a}@0"], "0 is not a weight; allowed: a number from"),
        (["{a}@-1"], "-1 is not a weight"),
        (["{a}@nan"], "nan is not a weight"),
        (["{a}@1e999"], "1e999 is not a weight"),
        (["{a}@1e308", "{a}@1e308"], "1e308 is not a weight"),
        (["{a}@1"] * 1001, "1,001 sources with weights; allowed: up to 1,000"),
        (["{a}@1", "{a}@9e-5"], "its share of the mixture is 9e-05; allowed: 1/10,000 or more"),
        (["hf:"], "not a dataset name"),
        (["hf:json"], "not a dataset name"),
        (["hf:json:{a}:train:more"], "not a dataset name"),
        (["hf:json:{a}:test"], "it cannot be opened"),
        (["hf:json:nowhere.jsonl"], "it cannot be opened"),
        (["x\0y"], "no such source"),
        ([""], "no such source"),  # an unset variable of the shell, not the current folder
        (["@0.5"], "no such source"),
        (["{a}/../**.jsonl"], "'**.jsonl' is not a pattern; allowed: ** as the whole name of a folder, such as **/*.txt"),
    ],
)
def test_a_source_that_is_none_is_one_line(run, tmp_path, sources, said):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    code, *_, err = run(*(source.format(a=tmp_path / "a.jsonl") for source in sources))
    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("text", "train"), [("title\n" + "a" * 994, 950), ("line\n" * 200, 950), ("a" * 949 + "\n" + "b" * 50, 950), ("ö" * 500, 950)]
)
def test_the_tail_of_a_single_document_is_the_fraction_that_is_asked_for(run, tmp_path, text, train):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = run(tmp_path / "a.txt", options=("--val_fraction", "0.05"))[1]
    assert "".join(found["train"] + found["val"]) == text
    assert len(found["train"][0].encode()) == train


def test_exact_duplicates_are_left_out_wherever_they_come_from(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS + TEXTS[:5]))
    (tmp_path / "b.txt").write_text(TEXTS[0])
    (tmp_path / "c.parquet").write_bytes(table([*TEXTS[3:6], "new"]))
    sources = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.parquet")]
    _, found, manifest, *_ = run(*sources, options=("--dedup", "exact"))
    assert manifest["dropped"] == {"duplicate": 9}
    assert found == all_of([*TEXTS, "new"])
    assert "left out: 9 duplicate" in run(*sources, options=("--dedup", "exact"))[3]


# Datasets


@pytest.mark.parametrize("builder", ["json", "parquet", "csv", "text"])
def test_a_builder_of_datasets_streams_files(run, tmp_path, builder):
    texts = [text.strip().splitlines()[0] for text in TEXTS]
    data = {"json": jsonl, "parquet": table, "csv": rows, "text": lambda texts: "\n".join(texts).encode()}[builder](texts)
    (tmp_path / f"a.{builder}").write_bytes(data)
    assert run(f"hf:{builder}:{tmp_path}/a.{builder}")[1] == all_of(texts)
    assert run(f"hf:{builder}:{tmp_path}/a.{builder}:train@2")[1] == all_of(texts)


def test_a_builder_of_datasets_streams_a_url(run, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)  # it would go to stderr
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.jsonl"
        for source in (f"hf:json:{url}", f"hf:json:{url}:train@2"):
            assert run(source)[1] == all_of(TEXTS)
        server.shutdown()


def test_a_folder_laid_out_like_the_hub_has_configurations_and_splits(run, tmp_path):
    hub = tmp_path / "hub"
    for name, texts in (("small/train", TEXTS[:8]), ("small/validation", TEXTS[8:12]), ("large/train", TEXTS)):
        (hub / name).parent.mkdir(parents=True, exist_ok=True)
        (hub / f"{name}.parquet").write_bytes(table(texts, "content"))
    (hub / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  default: true\n  data_files:\n  - split: train\n    path: small/train.parquet\n"
        "  - split: validation\n    path: small/validation.parquet\n- config_name: large\n  data_files: large/train.parquet\n---\n"
    )
    options = ("--text_column", "content")
    assert run(f"hf:{hub}", options=options)[1] == all_of(TEXTS[:8])
    assert run(f"hf:{hub}:large", options=options)[1] == all_of(TEXTS)
    expected = {split: in_split(TEXTS[8:12], split, 0.4) for split in ("train", "val")}
    assert run(f"hf:{hub}:small:validation", options=(*options, "--val_fraction", "0.4"))[1] == expected
    _, found, *_ = run(f"hf:{hub}:large:train", options=(*options, "--max_docs", "6"))
    assert found == all_of(TEXTS[:6])
    assert "row 1: no text column 'text' (it has 'id', 'content'" in run(f"hf:{hub}")[4]
    assert "it cannot be opened" in run(f"hf:{hub}:huge", options=options)[4]
    assert "it cannot be opened" in run(f"hf:{hub}:small:test", options=options)[4]


def test_a_dataset_that_fails_while_it_streams_is_one_line(run, tmp_path, monkeypatch):
    """By a record that its builder refuses, or the network."""
    (tmp_path / "a.csv").write_bytes(rows([f"row {number}" for number in range(10_000)]) + b"1,2,3,4\r\n")
    code, *_, err = run(f"hf:csv:{tmp_path}/a.csv", options=("--workers", "1"))
    assert code == 1 and err.startswith(f"failed: --source hf:csv:{tmp_path}/a.csv: row 10001 cannot be read (")
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    load_dataset = datasets.load_dataset

    def fails_at_row_6(**arguments):
        def rows(part):
            yield from ({"text": row["text"]} for row in part)
            raise RuntimeError("read timed out \x1b[31m")

        part = load_dataset(**arguments).take(5)
        return datasets.IterableDataset.from_generator(rows, gen_kwargs={"part": part})

    monkeypatch.setattr(datasets, "load_dataset", fails_at_row_6)
    code, *_, err = run(f"hf:json:{tmp_path}/a.jsonl")
    assert code == 1 and "row 6 cannot be read (read timed out \\x1b[31m)" in err


def test_a_saved_dataset_is_its_split(run, tmp_path):
    whole = datasets.Dataset.from_dict({"id": [[number] for number in range(20)], "text": TEXTS})
    changed = whole.shuffle(seed=0).filter(lambda row: row["id"] != [3]).select(range(15))
    changed.save_to_disk(tmp_path / "one", num_shards=3)
    loaded = datasets.load_from_disk(tmp_path / "one")
    loaded.map(lambda row: {"text": row["text"] * 2})  # leaves a cache in the folder
    assert list((tmp_path / "one").glob("cache-*.arrow"))
    datasets.DatasetDict({"test": whole.select([0]), "train": changed}).save_to_disk(tmp_path / "several")
    texts = list(changed["text"])
    for name in ("one", "several"):
        for source in (tmp_path / name, f"hf:{tmp_path}/{name}", f"hf:{tmp_path}/{name}:train@0.5"):
            _, found, manifest, *_ = run(source)
            assert (found, manifest["dropped"]) == (all_of(texts), {"split 'test'": 1} if name == "several" else {})
    assert "no split 'best'; it has test, train: name one as hf:" in run(f"hf:{tmp_path}/several:best")[4]
    assert "no split 'test'; it has train: name one as hf:" in run(f"hf:{tmp_path}/one:test")[4]
    _, found, *_ = run(f"hf:{tmp_path}/several:test")
    assert "".join(found["train"] + found["val"]) == TEXTS[0]


# Bad records


def changed(data: bytes, *places: tuple[int, bytes]) -> bytes:
    for place, new in places:
        data = data[:place] + new + data[place:]
    return data


def line_of(number: int, new: bytes) -> bytes:
    lines = jsonl(TEXTS).splitlines(keepends=True)
    return b"".join([*lines[:number], new, *lines[number:]])


WHOLE = json.dumps([{"text": text} for text in TEXTS[:3]]).encode()
#: A file's content, the texts that can be used of it, how the bad record is counted, and its place.
BAD = {
    "a.jsonl": (line_of(3, b'{"text": "broken\n'), TEXTS, "broken JSON line", "a.jsonl:4"),
    "b.jsonl": (line_of(0, b'{"text": "gr\xf6"}\n'), TEXTS, "not UTF-8", "b.jsonl:1"),
    "c.jsonl": (line_of(5, b'{"body": "x"}\n'), TEXTS, "no text column 'text'", "c.jsonl:6"),
    "d.jsonl": (line_of(20, b'{"text": 3}\n'), TEXTS, "text column 'text' is not text", "d.jsonl:21"),
    "e.jsonl": (line_of(2, b'{"text": "half \\ud83d"}\n'), TEXTS, "not UTF-8", "e.jsonl:3"),
    "f.jsonl": (line_of(2, b"[" * 100_000 + b"\n"), TEXTS, "broken JSON line", "f.jsonl:3"),
    "g.jsonl": (line_of(2, b'{"text": "x", "n": ' + b"1" * 5000 + b"}\n"), TEXTS, "broken JSON line", "g.jsonl:3"),
    "h.jsonl": (line_of(1, b'["text"]\n'), TEXTS, "no text column 'text'", "h.jsonl:2"),
    "a.json": (WHOLE[:-1] + b', {"text": "half \\ud83d"}, {"text": "end"}]', [*TEXTS[:3], "end"], "not UTF-8", "a.json: record 4"),
    "c.json": (WHOLE[:-1] + b', {"text" "end"}]', TEXTS[:3], "broken JSON", "c.json: record 4"),
    "d.json": (WHOLE[:-1], TEXTS[:3], "broken JSON", "d.json: record 4"),
    "e.json": (WHOLE + b"]", TEXTS[:3], "broken JSON", "e.json: record 4"),
    "f.json": (b"[" * 100_000, [], "broken JSON", "f.json: record 1"),
    "g.json": (WHOLE[:-1] + b', {"text": "x", "n": 1e99999999999999}]', [*TEXTS[:3], "x"], None, ""),
    "a.txt": (b"one\ntwo\ngr\xf6\xdfer\n", [], "not UTF-8", "a.txt:3"),
    "b.txt": ("größer".encode("utf-16"), [], "not UTF-8", "b.txt:1"),
    "a.csv": (rows(TEXTS) + b"99,gr\xf6\r\n", TEXTS, "not UTF-8", f"a.csv:{2 + sum(text.count(chr(10)) + 1 for text in TEXTS)}"),
    "b.csv": (rows(TEXTS) + b'99,"never closed\r\n', TEXTS, "broken CSV", "b.csv:"),
    "d.csv": (rows(TEXTS[:5]) + b'99,"a "bad" quote\r\n2,rest of a cell"\r\n' + rows(TEXTS), TEXTS[:5], "broken CSV", "d.csv:"),
    "c.csv": (rows(TEXTS) + b"99\r\n100,end\r\n", [*TEXTS, "end"], "no text column 'text'", "c.csv:"),
    "e.csv": (b"id,text\r\n1,one\r\n2,Hello, world\r\n3,three\r\n", ["one", "three"], "too many fields", "e.csv:3"),
    "g.csv": (b"text,id\r\none,1\r\ntwo\nlines,2\r\n", ["one", "lines"], "too few fields", "g.csv:3"),
    "h.csv": (b"text,text\r\none,two\r\n", [], "2 text columns 'text'", "h.csv"),
    "f.csv": (b"id,text\r\n1,one,\r\n2,two,,\r\n", ["one", "two"], None, ""),
    "a.txt.gz": (gzip.compress(b"a line\n" * 1000)[:-20], [], "compressed file damaged", "a.txt.gz"),
    "a.txt.zst": (zst(os.urandom(5000).hex().encode())[:-20], [], "compressed file damaged", "a.txt.zst"),
    "c.txt.zst": (zst(b"a line\n") + b"behind", [], "compressed file damaged", "c.txt.zst"),
    "b.jsonl.gz": (gzip.compress(jsonl(TEXTS)) + b"\0\0behind", TEXTS, "compressed file damaged", "b.jsonl.gz"),
    "a.txt.xz": (lzma.compress(b"a line\n" * 1000)[:-20], [], "compressed file damaged", "a.txt.xz"),
    "b.txt.xz": (b"no xz", [], "compressed file damaged", "b.txt.xz"),
    "a.txt.bz2": (bz2.compress(b"a line\n" * 1000)[:-20], [], "compressed file damaged", "a.txt.bz2"),
    # The header of a frame whose window is 2^32 bytes, and an empty block.
    "d.txt.zst": (bytes.fromhex("28b52ffd 00 b0 010000"), [], "compressed file damaged", "d.txt.zst"),
    "a.arrow": (b"no arrow", [], "broken Arrow file", "a.arrow: record 1"),
    "b.arrow": (arrow(TEXTS)[:-400], TEXTS[:18], "broken Arrow file", "b.arrow: record 19"),
    "c.arrow": (arrow([*TEXTS, None]), TEXTS, "no text column 'text'", "c.arrow: record 21"),
    "a.parquet": (b"no parquet", [], "broken Parquet file", "a.parquet: record 1"),
    "b.parquet": (table(TEXTS)[:-9], [], "broken Parquet file", "b.parquet: record 1"),
    "c.parquet": (table([*TEXTS, None]), TEXTS, "no text column 'text'", "c.parquet: record 21"),
    "e.parquet": (table([["a", "b"]]), [], "text column 'text' is not text", "e.parquet: record 1"),
    "d.parquet": (table([b"gr\xf6", *(text.encode() for text in TEXTS)]), TEXTS, "not UTF-8", "d.parquet: record 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_stops_with_its_place_or_is_counted_and_named(run, tmp_path, name):
    data, good, kind, place = BAD[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    (tmp_path / "in" / "z.jsonl").write_bytes(jsonl(["behind 1", "behind 2", "behind 3", "behind 12"]))
    _, found, manifest, out, _ = run(tmp_path / "in", options=("--on_error", "skip"))
    assert found == all_of([*good, "behind 1", "behind 2", "behind 3", "behind 12"])
    assert manifest["dropped"] == ({kind: 1} if kind else {})
    if kind:
        assert f"left out: 1 {kind}" in out
        assert f"  {tmp_path}/in/{place}" in out
        code, _, _, _, err = run(tmp_path / "in")
        assert code == 2
        assert f"error: {tmp_path}/in/{place}" in err and kind in err and "--on_error skip" in err
    else:
        assert run(tmp_path / "in")[0] == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_large_file_that_is_not_utf8_is_named_by_its_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "BLOCK", 100)
    line = "größer\n".encode()
    for data, place in (
        (line * 150 + b"\xff" + line, 151),
        (line * 50 + b"\xff" + line * 150, 51),
        (line * 200 + "ö".encode()[:1], 201),
        (line * 124 + b"1234\n" + b"\xc3" + line * 3, 126),
    ):
        (tmp_path / "a.txt").write_bytes(data)
        assert f"a.txt:{place}: not UTF-8" in run(tmp_path / "a.txt")[4]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + line * 150)  # a byte order mark is no text
    found = run(tmp_path / "a.txt")[1]
    assert "".join(found["train"] + found["val"]) == "größer\n" * 150


def test_if_every_record_is_left_out_the_first_reason_is_named(run, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    code, *_, error = run(tmp_path / "a.jsonl", options=("--text_column", "content", "--on_error", "skip"))
    assert code == 2 and "left out: 20 no text column 'content'; the first: " in error and "content" in error


def test_only_the_first_cases_of_a_kind_are_named(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS) + b"{\n" * 50)
    _, _, manifest, out, _ = run(tmp_path / "a.jsonl", options=("--on_error", "skip"))
    assert manifest["dropped"] == {"broken JSON line": 50}
    assert [line for line in out.splitlines() if line.startswith("  /")] == [
        line for line in out.splitlines() if any(f"a.jsonl:{number}: broken JSON line" in line for number in (21, 22, 23))
    ]


# Damage of any kind


CONTENTS = {
    **{name: FORMATS[name] for name in ("a.jsonl", "array.json", "objects.json", "lines.json", "a.csv", "mark.jsonl", "crlf.jsonl")},
    "a.txt": "".join(TEXTS).encode(),
    "a.arrow": arrow(TEXTS),
    "a.parquet": table(TEXTS, row_group_size=3),
    "zstd.parquet": table(TEXTS, compression="zstd"),
}
GARBAGE = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [b"\n", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"\0", b"\xff", b"\\ud800", b"\r", b"1e999", b"NaN", b"\xef\xbb\xbf"]
    ),
)
MUTATION = st.tuples(st.sampled_from(["replace", "replace", "cut", "flip", "none"]), st.integers(0, 10**6), st.integers(1, 40), GARBAGE)


def mutate(data: bytes, mutations: list) -> bytes:
    for kind, place, n, new in mutations:
        place %= len(data) + 1
        if kind == "replace":
            data = data[:place] + new + data[place + n - 1 :]
        elif kind == "cut":
            data = data[:place]
        elif kind == "flip" and place < len(data):
            data = data[:place] + bytes([data[place] ^ (1 << n % 8)]) + data[place + 1 :]
    return data


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    st.sampled_from(sorted(CONTENTS)),
    st.sampled_from(["", "", ".gz", ".zst", ".xz", ".bz2"]),
    st.lists(MUTATION, max_size=3),
    st.lists(MUTATION, max_size=2),
)
@example("array.json", "", [("replace", 0, 1, b"[" * 5000)], [])
@example("a.parquet", "", [("flip", 3000, 1, b"")], [])
def test_no_damage_ends_in_more_than_one_line(tmp_path_factory, capsys, name, compression, before, after):
    if name.endswith((".parquet", ".arrow")):
        compression, before = "", []
    data = mutate(CONTENTS[name], before)
    data = mutate({"": bytes, ".gz": gzip.compress, ".zst": zst, ".xz": lzma.compress, ".bz2": bz2.compress}[compression](data), after)
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "in").mkdir()
    (folder / "in" / f"{name}{compression}").write_bytes(data)
    behind = [f"behind {number}" for number in range(12)]
    (folder / "in" / "~behind.jsonl").write_bytes(jsonl(behind))
    arguments = ["--source", f"{folder}/in", "--tokenizer", "bytes", "--val_fraction", "0.3"]
    codes = {}
    for on_error in ("stop", "skip"):
        codes[on_error] = main([*arguments, "--out", f"{folder}/{on_error}", "--on_error", on_error])
        out, err = capsys.readouterr()
        assert codes[on_error] in (0, 2)
        assert err.count("\n") == (codes[on_error] == 2), err
        assert "Traceback" not in out + err
        if codes[on_error]:
            assert not [path for path in folder.iterdir() if on_error in path.name]
    assert codes["skip"] == 0
    found = {split: read(folder / "skip", split) for split in ("train", "val")}
    assert set(behind) <= {*found["train"], *found["val"]}
    if not codes["stop"]:
        assert found == {split: read(folder / "stop", split) for split in ("train", "val")}
        assert json.loads((folder / "skip" / "manifest.json").read_text())["dropped"].keys() <= {"empty"}


def test_damage_far_into_compressed_lines_keeps_what_is_in_front_of_it(run, tmp_path):
    generator = random.Random(0)
    texts = [f"{number} " + "".join(generator.choices("abcdefgh \n", k=3000)) for number in range(400)]
    for suffix, compress in ((".gz", gzip.compress), (".zst", zst)):
        whole = compress(jsonl(texts))
        (tmp_path / f"a.jsonl{suffix}").write_bytes(whole[: len(whole) * 3 // 4])
        _, found, manifest, *_ = run(tmp_path / f"a.jsonl{suffix}", options=("--on_error", "skip"))
        assert manifest["dropped"] == {"compressed file damaged": 1}
        n = sum(map(len, found.values()))
        assert 250 < n < 310
        assert found == all_of(texts[:n])


# Links


def test_links_to_files_are_read_and_those_to_folders_are_not_followed(run, tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (root / "in").mkdir(parents=True)
    (outside / "other.txt").write_text("other")
    for number, text in enumerate(TEXTS):
        (root / "in" / f"{number:02d}.txt").write_text(text)
    (root / "z.txt").symlink_to("in/00.txt")
    (root / "inside").symlink_to("in")
    for name in ("loop", "in/loop"):
        (root / name).symlink_to(root)
    (root / "loop.txt").symlink_to("loop.txt")
    (root / "other.txt").symlink_to("../outside/other.txt")
    (root / "folder").symlink_to(outside)
    (tmp_path / "named").symlink_to(root)
    for source in (root, tmp_path / "named", f"{root}/**/*.txt", f"{tmp_path}/named/**"):
        _, found, manifest, *_ = run(source)
        assert sorted(found["train"] + found["val"]) == sorted([*TEXTS, TEXTS[0], "other"]), source
        assert manifest["dropped"] == {"broken link": 1}


# Large records


LARGE = 2**20 + 1
#: Files with one record above 1 MiB, the texts that can be used, and the place.
TOO_LARGE = {
    "a.jsonl": (line_of(3, b'{"text": "' + b"a" * LARGE + b'"}\n'), TEXTS, "a.jsonl:4"),
    "blank.jsonl": (line_of(3, b" " * LARGE + b"\n"), TEXTS, "blank.jsonl:4"),
    "end.jsonl.gz": (gzip.compress(line_of(20, b'{"x": "' + b"a" * LARGE)), TEXTS, "end.jsonl.gz:21"),
    "a.jsonl.zst": (zst(line_of(0, b'{"text": "x", "y": [1' + b", 1" * LARGE + b"]}\n")), TEXTS, "a.jsonl.zst:1"),
    "a.json": (WHOLE[:-1] + b', {"text": "' + b"a" * LARGE + b'"}, {"text": "lost"}]', TEXTS[:3], "a.json: record 4"),
    "b.json": (b'{"text":\n"a"}\n{"text": "' + "日".encode() * LARGE + b'"}', ["a"], "b.json: record 2"),
    "a.csv": (rows(TEXTS[:5]) + b"9," + b"a" * LARGE + b"\r\n9,lost\r\n", TEXTS[:5], "a.csv:"),
    "quoted.csv.gz": (gzip.compress(rows(TEXTS[:5]) + b'9,"' + b"line\n" * LARGE), TEXTS[:5], "quoted.csv.gz:"),
    "a.arrow": (arrow([*TEXTS, "a" * LARGE]), TEXTS, "a.arrow: record 21"),
    "a.parquet": (table([*TEXTS, "a" * LARGE], use_dictionary=False), TEXTS, "a.parquet: record 21"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_record_above_the_limit_is_a_bad_record(run, tmp_path, name):
    data, good, place = TOO_LARGE[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    behind = [f"behind {number}" for number in range(12)]
    (tmp_path / "in" / "z.jsonl").write_bytes(jsonl(behind))
    options = ("--max_record_mib", "1", "--on_error", "skip")
    _, found, manifest, out, _ = run(tmp_path / "in", options=options)
    assert found == all_of([*good, *behind])
    assert manifest["dropped"] == {"record too large": 1} and manifest["options"]["max_record_mib"] == 1
    assert f"{tmp_path}/in/{place}" in out
    code, _, _, _, err = run(tmp_path / "in", options=options[:2])
    assert code == 2 and f"{tmp_path}/in/{place}" in err and "--max_record_mib" in err and "--on_error skip" in err
    if not name.startswith(("blank", "end", "quoted")):
        assert run(tmp_path / "in", options=("--max_record_mib", "64"))[0] == 0
    assert run(tmp_path / "in", options=("--max_record_mib", "0"))[0] == 2


def peak_memory(command: list[str | Path]) -> float:
    """The peak memory of a command in MiB. A small process starts it, because a child's peak begins with the size of its parent."""
    code = "import os, sys; _, status, usage = os.wait4(os.posix_spawn(sys.executable, sys.argv[1:], os.environ), 0)"
    code += "; print(usage.ru_maxrss / 1024); sys.exit(status != 0)"
    return float(subprocess.run([sys.executable, "-c", code, *command], check=True, stdout=subprocess.PIPE, text=True).stdout)


@pytest.mark.long
def test_memory_does_not_grow_with_the_text_or_with_a_record(tmp_path):
    """128 MiB of documents, or in one record, of which a compressed file holds a few hundred KB."""
    contents = {
        "a.jsonl.gz": (b"", jsonl(["some words of ordinary text. " * 350])),
        "b.jsonl.zst": (b'{"text": "', b"a" * 2**20),
        "c.json.gz": (b'[{"text": "', b"a" * 2**20),
        "d.csv.gz": (b'id,text\n1,"', b"line\n" * 2**18),
    }
    (tmp_path / "behind.jsonl").write_bytes(jsonl(TEXTS))
    peaks = {}
    for name in ("", *contents):
        if name:
            before, unit = contents[name]
            opens = gzip.open if name.endswith(".gz") else zstandard.open
            with opens(tmp_path / name, "wb") as stream:
                stream.write(before)
                for _ in range(2**27 // len(unit)):
                    stream.write(unit)
        sources = [tmp_path / "behind.jsonl", *([tmp_path / name] if name else [])]
        command = [sys.executable, ROOT / "data_pipeline/prepare.py", "--source", *sources, "--out", tmp_path / f"out-{name}"]
        command += ["--tokenizer", "bytes", "--val_fraction", "0.3", "--on_error", "skip", "--workers", "1", "--quiet"]
        peaks[name] = peak_memory(command)
        if name[:1] not in ("", "a"):
            assert json.loads((tmp_path / f"out-{name}" / "manifest.json").read_text())["dropped"] == {"record too large": 1}
    assert max(peaks.values()) < peaks[""] + 100, peaks  # MiB


def test_packages_are_the_python_files_of_those_that_are_pinned_as_installed(run, tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text(
        f"# a comment\ntqdm=={importlib.metadata.version('tqdm')}; python_version > '3'\nnumpy==0.1\nno-such-package==1\ntorch>=2\n"
    )
    code, _, manifest, *_ = run(f"packages:{pins}")
    files = [file for file in importlib.metadata.files("tqdm") if file.suffix == ".py"]
    (source,) = manifest["sources"]
    assert (code, source["files"]) == (0, len(files)) and source["bytes"] == sum(file.locate().stat().st_size for file in files)
    assert run(f"packages:{tmp_path}/none.txt")[4].endswith("give a file of NAME==VERSION lines\n")
