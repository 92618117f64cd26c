"""A mixture's sources have names, and each its own validation loss: exact, for any number of ranks."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import prepare
from data_pipeline.shards import open_corpus
from launch.comparison.comparison import compare
from launch.comparison.runs import read_run
from launch.comparison.tables import figures
from launch.trained_model.load import open_trained
from launch.trained_model.scoring import window_losses
from tests.distributed.test_monitors import of_tensorboard
from tests.test_show import show

SEQ_LEN, STEPS = 32, 6
NAMES = ["code", "prose"]
LOSSES = ["val_loss", *(f"val_loss/{name}" for name in NAMES)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """JSON lines with the text in `content` and a folder of text files."""
    folder = tmp_path_factory.mktemp("mixture")
    records = [{"content": f"{number} " + "a" * (30 + 10 * (number % 7)), "text": "no text of this source"} for number in range(170)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (folder / "prose").mkdir()
    for number in range(80):
        (folder / "prose" / f"{number}.txt").write_text(f"{number} uvw xyz, " * (3 + number * 5 % 11))
    sources = ["--source", f"code={folder / 'lines.jsonl'}@0.5:content", f"{folder / 'prose'}@0.5"]
    options = ["--tokenizer", "bytes", "--val_fraction", "0.2", "--quiet"]
    assert prepare.main([*sources, "--out", str(folder / "corpus"), *options]) == 0
    return folder / "corpus"


def flags(mixture: Path, runs: Path, name: str, *more: str) -> list[str]:
    run = f"--deepspeed_config ds_configs/zero3_fp32.json --data {mixture} --runs_dir {runs} --run_name {name} --steps {STEPS}"
    run += f" --n_layer 2 --n_head 2 --d_model 32 --seq_len {SEQ_LEN} --global_batch_size 10 --micro_batch_size 5 --eval_every 3"
    return [*run.split(), "--eval_batches", "4", "--whole_eval", "--lr", "1e-2", *more]


@pytest.fixture(scope="module")
def runs(mixture, one_rank, two_ranks, tmp_path_factory) -> Path:
    """The same run on one rank with monitors and on two, and one of another rate."""
    folder = tmp_path_factory.mktemp("runs")
    monitors = ["--set", "csv_monitor.enabled=true", "--set", "tensorboard.enabled=true"]
    one_rank.train(flags(mixture, folder, "one", *monitors))
    two_ranks.train(flags(mixture, folder, "two"))
    one_rank.train(flags(mixture, folder, "faster", "--lr", "3e-2"))
    return folder


def evaluated(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "val_loss" in line]


def test_sources_have_names_and_text_columns(mixture, capsys):
    corpus = open_corpus(mixture)
    assert corpus.names == NAMES and corpus.manifest["options"]["text_column"] == ["content", "text"]
    assert "no text of this source" not in (out := show(mixture, capsys))
    assert "source code, weight 0.5: " in out and "source prose, weight 0.5: " in out


def test_a_corpus_of_an_earlier_version_names_its_sources_after_their_files(mixture, tmp_path, capsys):
    old = Path(shutil.copytree(mixture, tmp_path / "old"))
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["names"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    assert open_corpus(old).names == ["lines", "prose"] and open_corpus(old).fingerprint == open_corpus(mixture).fingerprint
    folder = mixture.parent
    command = ["--source", f"{folder / 'lines.jsonl'}@0.5:content", f"{folder / 'prose'}@0.5", "--tokenizer", "bytes"]
    assert prepare.main([*command, "--val_fraction", "0.2", "--out", str(old)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert prepare.main([*(word.removesuffix(":content") for word in command), "--val_fraction", "0.2", "--out", str(old)]) == 2
    assert "text_column was ['content', 'text'], now text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (["x={a}@1", "x={b}@1"], "--source x=: 2 sources have this name; give each another"),
        (["x={a}", "{b}"], "--source x=: only sources of a mixture have names; add @WEIGHT to each, or leave out the name"),
        (["{a}@1:nothing", "{b}@1"], "no text column 'nothing'"),
    ],
)
def test_a_wrong_name_or_column_is_one_line(sources, said, mixture, tmp_path, capsys):
    given = [source.format(a=mixture.parent / "lines.jsonl", b=mixture.parent / "prose") for source in sources]
    assert prepare.main(["--source", *given, "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_names_are_unique_and_a_path_with_an_equals_sign_is_a_path(tmp_path, capsys):
    for name in ("year=1/texts", "b/texts", "c"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(40):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number}")
    given = [f"{tmp_path}/year=1/texts@1", f"{tmp_path}/b/*/*.txt@1", f"texts={tmp_path}/c@1"]
    out = tmp_path / "corpus"
    assert prepare.main(["--source", *given, "--out", str(out), "--tokenizer", "bytes", "--val_fraction", "0.2", "--quiet"]) == 0
    assert open_corpus(out).names == ["texts-2", "b", "texts"]


def test_each_source_has_its_loss_for_any_number_of_ranks(runs, mixture):
    one, two = evaluated(runs / "one"), evaluated(runs / "two")
    assert [line["step"] for line in one] == [0, 3, 6]
    for mine, theirs in zip(one, two, strict=True):
        assert [mine[key] for key in LOSSES] == pytest.approx([theirs[key] for key in LOSSES], abs=1e-5)
    val = open_corpus(mixture).val
    windows = val.group_windows(SEQ_LEN, 2)
    shown = np.arange(40) * sum(windows) // 40
    count = [int((shown < windows[0]).sum()), int((shown >= windows[0]).sum())]
    assert min(count) and count[0] % 5, "a batch is not full"
    for line in one:
        assert line["val_loss"] == pytest.approx(np.average([line[key] for key in LOSSES[1:]], weights=count), abs=1e-12)
    log = (runs / "one" / "log.txt").read_text()
    assert f"({count[0]} of code; {count[1]} of prose)" in log
    assert "validation {:.4f} (code {:.4f}, prose {:.4f})".format(*(one[-1][key] for key in LOSSES)) in log


def test_losses_are_those_of_the_windows_of_each_source_alone(runs, mixture):
    """Scored window by window with the weights of the last checkpoint, over the whole split."""
    corpus, trained = open_corpus(mixture), open_trained(str(runs / "two"))
    windows = corpus.val.group_windows(SEQ_LEN, 2)
    losses = window_losses(trained.load_model(), corpus, corpus.val, sum(windows))
    expected = [losses.mean(), losses[: windows[0]].mean(), losses[windows[0] :].mean()]
    assert abs(expected[1] - expected[2]) > 0.05
    for name in ("one", "two"):
        finished = json.loads((runs / name / "run.json").read_text())["finished"]
        assert [finished[f"whole_{key}"] for key in LOSSES] == pytest.approx(expected, abs=1e-4)


def test_monitors_and_comparisons_have_them(runs):
    lines = evaluated(runs / "one")
    events = of_tensorboard(runs / "one" / "tensorboard")
    for key in LOSSES:
        rows = [(line["step"], line[key]) for line in lines]
        with open(runs / "one" / "csv_monitor" / f"{key.replace('/', '_')}.csv", newline="") as stream:
            assert [*csv.reader(stream)] == [["step", key.rpartition("/")[2]], *([str(step), str(value)] for step, value in rows)]
        assert events[key] == [(step, pytest.approx(value, rel=1e-6)) for step, value in rows]
    (pair,) = compare([read_run(runs / "one"), read_run(runs / "faster")]).pairs
    rows = {row[0]: row[1:] for row in figures(pair).rows}
    for run, column in (("one", 0), ("faster", 1)):
        finished = json.loads((runs / run / "run.json").read_text())["finished"]
        for name in NAMES:
            assert rows[f"final validation loss on {name} (nats)"][column] == f"{finished[f'whole_val_loss/{name}']:.4f}"
