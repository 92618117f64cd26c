"""A run can be watched while it trains: its picture, its lines on a terminal, and `launch/compare.py` on its folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from launch.training.run_folder.picture import draw_run
from launch.training.run_folder.progress import _measured
from tests.commands import run_script
from tests.run_folders import TOKENS, description, line, write_run

TINY = "--n_layer 2 --n_head 2 --d_model 32 --seq_len 32 --global_batch_size 4 --eval_every 2 --eval_batches 1 --save_every 0"


def flags(corpus: Path, runs: Path, name: str, steps: int) -> list[str]:
    run = f"--deepspeed_config ds_configs/zero1_fp32.json --data {corpus} --runs_dir {runs} --run_name {name} --steps {steps}"
    return [*run.split(), *TINY.split()]


@pytest.fixture(scope="module")
def watched(two_ranks, corpus, tmp_path_factory) -> tuple[Path, list[dict]]:
    runs = tmp_path_factory.mktemp("watched")
    lines = two_ranks.run("tests.distributed.jobs:pretrain_watching_the_picture", flags=flags(corpus, runs, "r", 4))[0]
    return runs / "r", lines


def test_the_picture_is_drawn_at_every_evaluation(watched):
    run, lines = watched
    assert [one.get("drawn_before") for one in lines] == [None, 1, 1, 2, 2]
    assert (run / "loss.png").exists() and not list(run.glob(".loss.png*"))


def test_a_run_that_trains_is_compared(watched, tmp_path):
    """Its folder as it is after three steps, while the line of the fourth is being written."""
    run = Path(shutil.copytree(watched[0], tmp_path / "r"))
    described = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(described | {"finished": None}))
    texts = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*texts[:4], texts[4][:50]]))
    log = (run / "log.txt").read_text()
    (run / "log.txt").write_text(log[: log.index("step     4/4")].rpartition("\n")[0] + "\n")
    done = run_script("launch/compare.py", run, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    loss = json.loads(texts[2])["val_loss"]
    said = r"unfinished \(still training, or stopped\): step 3, 384 of 512 tokens; "
    assert re.search(rf"{said}last logged: step [23]/4, loss [\d.]+, validation {loss:.4f}$", done.stdout, re.MULTILINE)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "report.json", "loss.png"}


@pytest.mark.parametrize("columns", [100, 0])
def test_evaluations_stay_on_a_terminal(columns, corpus, tmp_path):
    """Above the bar; as plain lines if the width is unknown."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = run_script("launch/pretrain.py", *flags(corpus, tmp_path, "r", 4), environment=environment, columns=columns)
    assert done.returncode == 0, done.stdout
    lines = [text for text in re.split(r"[\r\n]+", done.stdout) if text.strip()]
    evaluated = [text for text in lines if re.match(r"step +\d/4  loss [\d.]+ \(mean of \d steps?\), validation [\d.]+  lr", text)]
    assert [text.split("/")[0].split()[1] for text in evaluated] == ["2", "4"]
    assert all(re.search(r"  norm [\d.e+-]+  [\d.]+ GiB  [\d,]+ tok/s  \d\d:\d\d left$", text) for text in evaluated)
    bars = [text for text in lines if text.startswith("r: ")]
    if columns:
        assert lines.index(bars[0]) < lines.index(evaluated[0]) < lines.index(bars[-1])
        assert re.search(r"step 4, loss [\d.]+, norm [\d.e+-]+, [\d.]+ GiB", bars[-1]) and max(map(len, bars)) <= columns
    else:
        assert not bars


def test_a_line_has_the_mfu_where_it_is_known():
    assert [*_measured({"grad_norm": None, "mfu": 0.4412, "peak_memory_bytes": 3 * 2**29})] == ["norm not finite", "mfu 44.1%", "1.50 GiB"]


def test_a_stranger_reads_the_picture(corpus, tmp_path, monkeypatch):
    """What it shows of a mixture's run that was resumed, and whose technique drops blocks."""
    losses = np.random.default_rng(0).normal(4, 0.5, 200)
    made = [line(step, float(losses[step - 1]) if step else None, skipped_flops=0.1) for step in range(201)]
    for step, one in enumerate(made[::100]):
        one |= {"val_loss": 6.0 - step, "val_loss/code": 5.5 - step, "val_loss/prose": 6.5 - step}
    log = "2026-01-01 00:00:00 resuming after step 150\n"
    run = write_run(tmp_path / "a$^$b", description(corpus, "--deepspeed_config", "ds_configs/zero1_bf16.json"), made, log)
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: (figures.append(figure), save(figure, *args, **more)))
    draw_run(run)
    (figure,) = figures
    (axes,) = figure.axes
    shown = {one.get_label(): one for one in axes.lines}
    assert re.fullmatch(r"a\$\^\$b\n[\d.]+ M parameters \(4 layers, 256 wide, 128 tokens\), ZeRO 1, bf16", axes.get_title())
    assert {"validation: 4.0000", "validation on code: 3.5000", "validation on prose: 4.5000", "training, each step"} <= set(shown)
    assert set(shown["resumed after step 150"].get_xdata()) == {150 * TOKENS}
    mean = shown["training, mean over 7 steps"]  # 3% of 200
    assert mean.get_ydata()[3:-3] == pytest.approx(np.convolve(losses, np.ones(7) / 7, "valid"))
    assert mean.get_ydata()[0] == pytest.approx(losses[:4].mean()) and mean.get_ydata()[-1] == pytest.approx(losses[-4:].mean())
    for words in ("before its update, with dropped blocks or tokens", "text that is not trained on", "sources by their weights"):
        assert words in figure.get_supxlabel()
