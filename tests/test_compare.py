"""`launch/compare.py` on runs that exist, and what it refuses, in one line and before anything is trained or written."""

from __future__ import annotations

import argparse
import fcntl
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.compare import build_parser
from launch.comparison import experiments
from launch.comparison.experiments import _paired_trials, check_corpus, error_of, has_ended
from launch.comparison.trials import CannotRun, make_trial, pair_trials
from launch.errors import UsageError
from recipes.registry import ROOT, read_recipe, read_recipes, read_testbed
from tests.commands import run_script
from tests.run_folders import description, lines, write_run

#: A training that would end at once, were it started.
TINY = ["--n_layer", "2", "--n_head", "2", "--d_model", "32", "--seq_len", "32", "--global_batch_size", "2", "--preset", "nano"]


def compare(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run_script("launch/compare.py", *words, cwd=cwd)


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
    assert "<script>x ends 0.3000 nats above control (95%: +0.3000 to +0.3000)" in done.stdout
    assert "exploratory: no claim is judged" in done.stdout
    assert f"report: {tmp_path / 'out' / 'report.html'}" in done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (pair,) = report["pairs"]
    assert pair["figures"]["final_val_loss"]["difference"]["mean"] == pytest.approx(0.3)
    assert pair["claims"] == []
    assert (tmp_path / "out" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "<script>x" not in (tmp_path / "out" / "report.html").read_text()
    assert compare(*runs[:2], "--out", tmp_path / "out").returncode == 0, "a report is replaced"
    assert json.loads((tmp_path / "out" / "report.json").read_text())["pairs"] == []
    refused = compare(*runs, "--out", runs[0])
    assert refused.returncode == 2 and "is not empty, and holds no report to replace" in refused.stderr


def test_what_is_no_experiment_is_refused_or_marked(runs, tmp_path):
    file = runs[3] / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"total_tokens": 999}))
    done = compare(*runs, "--out", tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    (line,) = done.stderr.splitlines()
    assert "its token budget (total_tokens) is 999, that of" in line and "--force" in line
    done = compare(*runs, "--out", tmp_path / "out", "--force", "--quiet")
    assert done.returncode == 0
    assert "not a controlled comparison: " in done.stdout
    assert "total_tokens" in json.loads((tmp_path / "out" / "report.json").read_text())["mismatches"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of: run folders, --recipe DIR, --all"),
        (["runs/a", "--all"], "give one of: run folders, --recipe DIR, --all; given are run folders and --all"),
        (["nowhere/run"], "nowhere/run/run.json: cannot be read"),
        (["recipes", "tests"], "recipes/run.json: cannot be read"),
        (["runs/a", "--steps", "3"], "--steps applies to runs that compare.py trains; leave it out, or replace runs/a by --recipe"),
        (
            ["--recipe", "recipes/zero2"],
            "--recipe recipes/zero2: has no recipe.json; did you mean recipes/zero_2; the recipes are: activation_checkpointing",
        ),
        (["--recipe", "recipes/tf32", "--data", "CORPUS"], "'tf32' needs CUDA"),
        (["--recipe", "recipes/zero_2", "--seeds", "1", "--publish"], "--publish --seeds: the recipe states the number of seeds"),
        (["--recipe", "recipes/zero_2", "--testbed", "nano-3M"], "--testbed nano-3M: unknown; the testbeds are: gpt2-33M, micro-1M"),
        (["--recipe", "recipes/zero_2", "--testbed", "gpt2-33M"], "it is for cuda, and this machine has cpu"),
        (
            ["--recipe", "recipes/zero_2", "--testbed", "micro-1M"],
            "no experiment on micro-1M; its testbeds are nano-0.5M-half-rate, pico-0.3M-experts; or give a setting",
        ),
        (["--recipe", "recipes/zero_1", "--testbed", "nano-0.5M", "--lr", "1"], "--lr: --testbed nano-0.5M sets it; leave out one"),
        (["--recipe", "recipes/zero_2", "--publish", "--steps", "3"], "--steps: --publish is for the recipe's testbeds"),
        (["--recipe", "recipes/zero_2", "--parallel", "2", "--at_once", "2"], "--at_once: the number of interleaved runs, and --parallel"),
        (["--tune"], "--tune needs exactly one --testbed NAME"),
        (["--tune", "--testbed", "nano-0.5M", "--testbed", "micro-1M"], "needs exactly one --testbed NAME"),
        (["--all", "--data", "CORPUS", "--preset", "nanno"], "--all: no recipe can run here; activation_checkpointing: --preset nanno"),
        (["--tune", "--testbed", "nano-0.5M-half-rate"], "nano-0.5M-half-rate has fixed values: For recipes with the same"),
        (["--tune", "--testbed", "nano-0.5M", "--seeds", "3"], "--seeds: --tune uses one seed"),
        (["--tune", "--testbed", "nano-0.5M", "--recipe", "recipes/zero_1"], "recipes/zero_1 names no sweep on nano-0.5M"),
        (["--recipe", "recipes/zero_2", "--seeds", "0"], "--seeds: 0 is out of range"),
        (["--recipe", "recipes/zero_2", "--data", "nowhere"], "nowhere"),
        (["--recipe", "recipes/zero_2", "--data", "CORPUS", "--preset", "nanno"], "--preset nanno: no such preset; did you mean 'nano'?"),
        (["--recipe", "recipes/zero_2", "--data", "CORPUS", "--set", "zero_optimization.stgae=1"], "did you mean 'stage'?"),
        (["--recipe", "recipes/zero_2", "--data", "CORPUS", "--global_batch_size", "3"], "cannot be shared evenly by 2 ranks"),
        (["--recipe", "recipes/zero_2", "--stepz", "3"], "unknown argument '--stepz'; did you mean '--steps'?"),
        (["--recipe", "recipes/zero_2", "--out", "setup.cfg"], "--out setup.cfg: cannot be written"),
        (["--recipe", "recipes/zero_2", "--out", "setup.cfg/x"], "--out setup.cfg/x: cannot be written"),
        (["--recipe", "recipes/zero_2", "--out", "n" * 300], "cannot be written (File name too long); give another folder"),
        (["--tune", "--testbed", "nano-0.5M", "--out", "recipes/zero_2"], "is not empty, and holds no report to replace; give another"),
        (["n" * 300], "cannot be read (File name too long)"),
        (
            ["--sweep", "lrr=1,2", "--data", "CORPUS"],
            "lrr 1: --sweep lrr: unknown key, which DeepSpeed would ignore; did you mean 'lr'?",
        ),
        (["--sweep", "learning_rate=1,2", "--data", "CORPUS"], "which DeepSpeed would ignore; did you mean 'lr'?"),
        (["--sweep", "batch_size=2,4", "--data", "CORPUS"], "would ignore; did you mean 'micro_batch_size' or 'global_batch_size'?"),
        (["--sweep", "train_batch_siz=2,4", "--data", "CORPUS"], "would ignore; did you mean 'train_batch_size'?"),
        (["--sweep", "lr=1e-3,2x", "--data", "CORPUS"], "zero0_bf16, lr 2x: --lr: '2x' is not a number above 0"),
        (["--sweep", "lr=1e-3,", "--data", "CORPUS"], "--sweep lr=1e-3,: must be NAME=VALUE,VALUE,..., e.g. --sweep lr=5e-4,1e-3,2e-3"),
        (["--sweep", "lr=1,2", "--lr", "1"], "lr is swept and given too; leave out one of the two"),
        (["--sweep", "seed=1,2"], "--sweep seed: is not a value of the model or its training"),
        (
            ["--sweep", "steps=5,6", "--data", "CORPUS"],
            "steps 6: its token budget (total_tokens) is 6,144, that of zero0_bf16, steps 5 is 5,120",
        ),
        (
            ["--sweep", "lr=1", "--eval_every", "0"],
            "--eval_every 0: a sweep compares validation losses; leave it out, or give --whole_eval",
        ),
        (["--sweep", "lr=1", "--testbed", "nano-0.5M"], "--sweep trains at a setting of your own; leave out --testbed"),
        (["--recipe", "recipes/muon", "--grid"], "--grid applies to a sweep; give --sweep NAME=VALUE,..., or leave it out"),
    ],
)
def test_a_mistake_is_one_line(words, message, corpus, tmp_path):
    done = compare(
        *(str(corpus) if word == "CORPUS" else word for word in words),
        *(["--runs_dir", tmp_path / "trials"] if {"--recipe", "--sweep"} & {*words} else []),
    )
    assert done.returncode == 2, done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "trials").exists()


def test_a_name_that_does_not_print_is_one_line_of_a_terminal(runs, corpus, tmp_path):
    other = description(corpus, "--recipe", "recipes/progressive_layer_drop") | {"total_tokens": 999}
    wicked = write_run(tmp_path / "a\n\x1b[31mb", other, lines())
    done = compare(runs[0], wicked, "--force", "--out", tmp_path / "out\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and "a\\n\\x1b[31mb: its token budget" in done.stdout
    assert done.stdout.endswith("out\\n/report.html\n")


def test_numbers_beyond_all_reason_are_compared_without_a_word(runs, corpus, tmp_path):
    high, low = ({"final": sign * 1.7e308, "loss": sign * 1.7e308, "step_seconds": 5e-324} for sign in (1, -1))
    huge = [
        write_run(tmp_path / f"huge{seed}", description(corpus, "--recipe", "recipes/progressive_layer_drop", seed=seed), lines(**of))
        for seed, of in ((1, high), (2, low))
    ]
    done = compare(*runs[:2], *huge, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")


def test_where_one_command_trains_another_does_not(corpus, tmp_path):
    (tmp_path / "trials").mkdir()
    with open(tmp_path / "trials" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = compare("--recipe", "recipes/zero_1", "--data", corpus, "--runs_dir", tmp_path / "trials", "--out", tmp_path / "out")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"--runs_dir {tmp_path / 'trials'}: another launch/compare.py is training there; wait" in line
    assert [path.name for path in (tmp_path / "trials").iterdir()] == [".lock"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["file/x", "n" * 300])
def test_where_runs_cannot_be_made_is_said_in_one_line(name, corpus, tmp_path):
    (tmp_path / "file").touch()
    done = compare("--recipe", "recipes/zero_1", "--data", corpus, "--runs_dir", tmp_path / name)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"--runs_dir {tmp_path / name}: cannot be written" in line


@pytest.mark.long
def test_runs_that_cannot_start_are_in_the_report_and_fail_the_command(corpus, tmp_path):
    """From a folder that is not the project's, to which all paths are relative."""
    flags = [*TINY, "--data", str(corpus), "--steps", "5"]
    experiment = pair_trials(read_recipe(ROOT / "recipes/zero_1"), flags, [1], 1)
    names = [trial.name for trial in (*experiment.control, *experiment.own)]
    (tmp_path / "trials").mkdir()
    for name in names:
        (tmp_path / "trials" / name).write_text("no run")
        (tmp_path / "trials" / f"{name}.out").write_text("error: of an earlier attempt\n")
    words = ["--recipe", ROOT / "recipes/zero_1", "--seeds", 1, "--ranks", 1, "--runs_dir", "trials", "--out", "out", *flags]
    done = compare(*words, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: not all runs finished: {', '.join(names)}; ")
    (absent,) = json.loads((tmp_path / "out" / "report.json").read_text())["absent"]
    assert absent["recipe"] == "zero_1" and absent["reason"].startswith(f"trials/{names[0]}: is a file, not a run folder")
    assert (tmp_path / "out" / "loss.png").exists() and (tmp_path / "trials" / names[0]).read_text() == "no run"
    shutil.rmtree(tmp_path / "trials")
    done = compare(*words, cwd=tmp_path)
    assert done.returncode == 0, "the same command resumes, and replaces the report of its failure"
    assert json.loads((tmp_path / "out" / "report.json").read_text())["absent"] == []


def test_why_a_run_ended_is_its_last_error(tmp_path):
    output = tmp_path / "run.out"
    output.write_text("no error\n")
    assert error_of(output, 247) == f"exit code 247, see {output}"
    output.write_text("error: the first\nerror: the second\n")
    assert error_of(output, 1) == "the second"


def test_what_has_ended_is_told_by_the_whole_run(runs, tmp_path):
    assert has_ended(runs[0]) and not has_ended(tmp_path / "nothing")
    metrics = runs[0] / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 21}\n')
    assert not has_ended(runs[0])
    with metrics.open("a") as stream:
        stream.write('{"step": 22, "tok')
    done = compare(runs[0], runs[1], "--out", tmp_path / "out")
    assert done.returncode == 0 and "control1: metrics.jsonl: 1 damaged line skipped" in done.stdout
    (runs[1] / "run.json").unlink()
    assert not has_ended(runs[1])


def test_what_is_not_tuned_is_named_before_it_is_trained_with_the_command_that_tunes_it(corpus, monkeypatch, capsys):
    words = ["--recipe", "recipes/muon", "--recipe", "recipes/zero_1", "--seeds", "2", *TINY, "--data", str(corpus), "--out", "x"]
    monkeypatch.setattr(sys, "argv", ["launch/compare.py", *words])
    monkeypatch.setattr(experiments, "train_missing", lambda *_: 1 / 0)
    flags = build_parser().parse(words)
    with pytest.raises(ZeroDivisionError):
        experiments.run_experiments(flags.recipe, [*TINY, "--data", str(corpus)], flags)
    (line,) = capsys.readouterr().out.splitlines()  # zero_1 does not change the optimization
    assert line.startswith("muon changes the optimization; its learning rate, 0.002 (preset nano), and that of its control, 0.002, are not")
    *_, command = line.split("to tune both: ")
    tuning = build_parser().parse(shlex.split(command)[2:])
    assert (tuning.recipe, tuning.sweep, tuning.extend, tuning.seeds) == (["recipes/muon"], ["lr=0.001,0.002,0.004"], True, 2)
    assert tuning.data == str(corpus) and tuning.out is None


def test_recipes_without_a_sweep_keep_the_algorithm():
    """None of those claims a better loss. The others have a sweep, or another optimizer or schedule than their control."""
    kept = [recipe.name for recipe in read_recipes() if not recipe.needs_own_tuning]
    claims = {claim.question for name in kept for one in read_recipe(ROOT / "recipes" / name).experiments.values() for claim in one.claims}
    assert "lower_by" not in claims and "muon" not in kept and "zero_3" in kept


def test_a_testbed_that_no_recipe_uses_is_refused(monkeypatch):
    monkeypatch.setattr(experiments, "device_type", lambda: "cpu")
    monkeypatch.setattr(experiments, "check_corpus", lambda _: None)
    flags = build_parser().parse(["--recipe", "recipes/zero_2", "--testbed", "nano-0.5M-half-rate", "--testbed", "micro-1M"])
    with pytest.raises(UsageError, match="--testbed micro-1M: none of the recipes has an experiment on it; leave it out"):
        experiments.run_experiments([ROOT / "recipes" / "zero_2"], [], flags)


def test_a_testbed_without_its_corpus_names_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    testbed = read_testbed("pico-5M")
    command = "python data_pipeline/prepare.py --source stdlib --tokenizer bpe:1024 --out data/stdlib_1024"
    with pytest.raises(CannotRun, match=f"data/stdlib_1024, does not exist; make it: {command}"):
        check_corpus(testbed)
    (tmp_path / "data" / "stdlib_1024").mkdir(parents=True)
    manifest = tmp_path / "data" / "stdlib_1024" / "manifest.json"
    manifest.write_text(json.dumps({"options": {"tokenizer": "bpe:8192"}}))
    with pytest.raises(CannotRun, match="data/stdlib_1024, has the tokenizer bpe:8192; move it away, and make it: python"):
        check_corpus(testbed)
    manifest.write_text(json.dumps({"options": {"tokenizer": "bpe:1024"}}))
    check_corpus(testbed)


def test_parallel_runs_cannot_be_published_for_a_claim_about_time():
    flags = argparse.Namespace(parallel=2, publish=True, seeds=None, ranks=None)
    with pytest.raises(UsageError, match=r"recipes/bf16 claims '.*time per step.*', which needs interleaved runs; leave out --parallel"):
        _paired_trials(read_recipe(ROOT / "recipes/bf16"), read_testbed("nano-0.5M-half-rate"), [], flags)


def test_runs_that_are_reused_are_counted(corpus, tmp_path, monkeypatch, capsys):
    first, *others = (make_trial("ds_configs/zero0_bf16.json", [*TINY, "--data", str(corpus), "--seed", seed], 1) for seed in "123")
    monkeypatch.setattr(experiments, "has_ended", lambda run: run.name != first.name)
    monkeypatch.setattr(experiments, "run_interleaved", lambda *_: None)
    flags = argparse.Namespace(runs_dir=str(tmp_path), parallel=None, at_once=None, quiet=True)
    experiments.train_missing(flags, [[first, *others]])
    assert capsys.readouterr().out == f"training 1 run, 2 reused, in {tmp_path}\n"
