"""`launch/compare.py` on runs that exist, and what it refuses, in one line and before anything is trained or written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.registry import ROOT
from tests.run_folders import description, lines, write_run


def compare(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "launch/compare.py", *map(str, words)], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def runs(corpus, tmp_path) -> list[Path]:
    """Two seeds of a control and of a recipe whose loss is 0.3 higher, one of them in a folder of a wicked name."""
    made = []
    for name, flags, final in (
        ("control", ("--deepspeed_config", "ds_configs/zero1_bf16.json"), 4.0),
        ("<script>x", ("--recipe", "recipes/progressive_layer_drop"), 4.3),
    ):
        for seed in (1, 2):
            made.append(write_run(tmp_path / f"{name}{seed}", description(corpus, *flags, seed=seed), lines(final=final + seed / 100)))
    return made


def test_runs_are_compared_into_a_page_numbers_and_a_picture(runs, tmp_path):
    done = compare(*runs, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "progressive_layer_drop: loss_within 0.25 fails: +0.3 with each of 2 seeds, without noise" in done.stdout
    assert f"the report is {tmp_path / 'out' / 'report.html'}" in done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (pair,) = report["pairs"]
    assert pair["figures"]["final_val_loss"]["difference"]["mean"] == pytest.approx(0.3)
    assert {claim["claim"]: claim["outcome"] for claim in pair["claims"]} == {"loss_within": "fails", "step_time_ratio": "fails"}
    assert (tmp_path / "out" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "<script>x" not in (tmp_path / "out" / "report.html").read_text()
    again = compare(*runs, "--out", tmp_path / "out")
    assert again.returncode == 2 and "holds a report already; give another folder" in again.stderr


def test_what_is_no_experiment_is_refused_or_marked(runs, tmp_path):
    file = runs[3] / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"total_tokens": 999}))
    done = compare(*runs, "--out", tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    (line,) = done.stderr.splitlines()
    assert "its token budget (total_tokens) is 999, that of" in line and "--force" in line
    done = compare(*runs, "--out", tmp_path / "out", "--force", "--quiet")
    assert done.returncode == 0
    assert "marked: " in done.stdout
    assert "total_tokens" in json.loads((tmp_path / "out" / "report.json").read_text())["marks"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of: run folders, --recipe DIR, --all"),
        (["runs/a", "--all"], "give one of: run folders, --recipe DIR, --all; given are run folders and --all"),
        (["nowhere/run"], "nowhere/run: no such folder; give run folders"),
        (["recipes", "tests"], "recipes: holds no run.json, so it is not a run folder"),
        (["runs/a", "--steps", "3"], "--steps says how runs are trained, and runs/a is one that exists; leave it out, or give --recipe"),
        (["--recipe", "recipes/zero2"], "--recipe recipes/zero2: no recipe.json in it; the recipes are: activation_checkpointing"),
        (["--recipe", "recipes/tf32", "--data", "CORPUS"], "'tf32' needs CUDA"),
        (["--recipe", "recipes/zero_2", "--seeds", "0"], "--seeds: 0 is out of range"),
        (["--recipe", "recipes/zero_2", "--data", "nowhere"], "nowhere"),
        (["--recipe", "recipes/zero_2", "--data", "CORPUS", "--preset", "nanno"], "--preset nanno: no such preset; did you mean 'nano'?"),
        (["--recipe", "recipes/zero_2", "--data", "CORPUS", "--set", "zero_optimization.stgae=1"], "did you mean 'stage'?"),
        (["--recipe", "recipes/zero_2", "--data", "CORPUS", "--global_batch_size", "3"], "cannot be shared evenly by 2 ranks"),
        (["--recipe", "recipes/zero_2", "--stepz", "3"], "unknown argument '--stepz'; did you mean '--steps'?"),
        (["--recipe", "recipes/zero_2", "--out", "setup.cfg"], "--out setup.cfg: is a file; give a folder"),
    ],
)
def test_a_mistake_is_one_line(words, message, corpus, tmp_path):
    done = compare(
        *(str(corpus) if word == "CORPUS" else word for word in words),
        *(["--runs_dir", tmp_path / "trials"] if "--recipe" in words else []),
    )
    assert done.returncode == 2, done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "trials").exists()


def test_help_suffices():
    page = compare("--help").stdout
    assert all(
        flag in page
        for flag in ("--recipe", "--all", "--seeds", "--force", "--publish", "--at_once", "--preset", "--steps", "--eval_every")
    )
