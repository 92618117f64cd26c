"""The commands of the README are real: each is run as it stands there, or explained where this machine has not what it needs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.config.run_config import resolve
from launch.formats.metrics import read_metrics
from model.presets import PRESETS
from tests.helpers import copy_checkout, free_port
from tests.run_folders import description, lines, write_run

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.strip() for line in README.splitlines() if re.match(r"    (deepspeed|python|make) ", line)]
TRAINING = [line for line in COMMANDS if line.startswith("deepspeed")]
#: What trains here in seconds: a small model on one or two CPU ranks. The others want GPUs, hosts, or a corpus of billions of tokens.
SMALL = [line for line in TRAINING if "gpt" not in line and "data/texts" not in line]


def ranks_of(words: list[str]) -> int:
    return int(words[words.index("--num_gpus") + 1]) if "--num_gpus" in words else 16 if "--hostfile" in words else 1


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_are_explained(command):
    if "--init_from" in command:
        pytest.skip("a published GPT-2 is not here; tests/test_export.py starts from folders like it")
    words = shlex.split(command)
    script = words.index("launch/pretrain.py")
    explain = [sys.executable, *words[script:], "--ranks", str(ranks_of(words)), "--explain"]
    done = subprocess.run(explain, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"x {ranks_of(words)} rank(s)" in done.stdout


@pytest.mark.parametrize("command", SMALL)
def test_training_commands_train(command, corpus, tmp_path):
    """As they stand, but for three steps, on the tests' corpus, into a folder of the test."""
    words = shlex.split(command)
    launcher = [f"{Path(sys.executable).parent}/deepspeed", "--master_port", str(free_port()), "--log_level", "error"]
    flags = ["--data", str(corpus), "--runs_dir", str(tmp_path), "--steps", "3"]
    done = subprocess.run([*launcher, *words[1:], *flags], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    name = words[words.index("--run_name") + 1]
    assert len(read_metrics(tmp_path / name / "metrics.jsonl")) == 4  # with the untrained validation loss at step 0


@pytest.mark.parametrize("command", [line for line in COMMANDS if re.match(r"python launch/(plan|pretrain)\.py", line)])
def test_commands_that_start_nothing_run_as_they_stand(command):
    done = subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) > 5


def test_comparing_commands_compare(corpus, tmp_path):
    """On runs with the names that the page gives them, and with a recipe, trained for seconds only."""
    by_recipe, by_runs = (shlex.split(line)[1:] for line in COMMANDS if line.startswith("python launch/compare.py"))
    for words in (shlex.split(line) for line in SMALL):
        name = words[words.index("--run_name") + 1]
        flags = words[words.index("launch/pretrain.py") + 1 : words.index("--run_name")]
        write_run(tmp_path / "runs" / name, description(corpus, *flags, "--preset", "nano"), lines())
    tiny = ["--n_layer", "1", "--n_head", "1", "--d_model", "16", "--seq_len", "16", "--steps", "5", "--seeds", "1", "--eval_batches", "1"]
    by_recipe += ["--data", str(corpus), "--runs_dir", str(tmp_path / "trials"), *tiny]
    by_runs = [str(tmp_path / word) if word.startswith("runs/") else word for word in by_runs]
    for number, words in enumerate((by_recipe, by_runs)):
        done = subprocess.run([sys.executable, *words, "--out", str(tmp_path / str(number))], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {path.name for path in (tmp_path / str(number)).iterdir()} == {"report.html", "report.json", "loss.png"}


def test_the_data_command_runs(tmp_path):
    (command,) = [line for line in COMMANDS if line.startswith("python data_pipeline/prepare.py")]
    source = tmp_path / "texts"
    source.mkdir()
    for number in range(200):  # enough for the documents' hashes to fill both splits
        (source / f"{number}.txt").write_text(f"The square of {number} is {number**2}, its cube {number**3}.\n" * 20, encoding="utf-8")
    words = [sys.executable, *shlex.split(command)[1:]]
    words = [str(source) if word == "~/texts" else str(tmp_path / "out") if word == "data/texts" else word for word in words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.json").exists()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the working tree in which the Makefile finds the environment that these tests run in, already set up."""
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("the tests do not run in the Makefile's environment")
    copy = copy_checkout(tmp_path_factory.mktemp("readme") / "checkout")
    (copy / ".venv").symlink_to(ROOT / ".venv")
    return copy


def test_make_pretrain_does_everything_from_the_corpus_to_the_picture(checkout):
    """Both of the README's lines, but for the set-up and for fewer steps; `-o` keeps make from installing again into the shared .venv."""
    for number, command in enumerate(line for line in COMMANDS if line.startswith("make pretrain")):
        arguments = shlex.split(command.partition("#")[0])[1:]
        asked = next((word.removeprefix("ARGS=") for word in arguments if word.startswith("ARGS=")), "")
        make = ["make", "-o", ".venv/.installed", "pretrain", f"ARGS={asked} --steps 4 --eval_batches 1"]
        done = subprocess.run(make, cwd=checkout, capture_output=True, text=True, timeout=300, env=os.environ | {"DS_ACCELERATOR": "cpu"})
        assert done.returncode == 0, done.stderr
        folder = checkout / "runs" / ("first" if number == 0 else f"first-{number + 1}")
        assert {"run.json", "metrics.jsonl", "loss.png", "log.txt"} <= {path.name for path in folder.iterdir()}
        assert f"the curve is runs/{folder.name}/loss.png" in done.stdout
        assert "a sample after" in done.stdout


def test_what_it_shows_of_a_plan_is_what_the_command_prints(checkout):
    """Each line of the excerpt, wherever it stands, with the corpus that it names."""
    subprocess.run(["make", "-o", ".venv/.installed", "data"], cwd=checkout, capture_output=True, check=True)
    (command,) = [line for line in COMMANDS if line.endswith("--explain")]
    words = [sys.executable, *shlex.split(command)[1:]]
    printed = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True).stdout
    found = [" ".join(line.split()) for line in printed.splitlines()]
    excerpt = README.partition("An excerpt, with the corpus of `make data`:\n")[2].partition("\nModel states alone")[0]
    shown = [" ".join(line.split()) for line in excerpt.splitlines() if line.startswith("    ") and line.strip() != "..."]
    assert len(shown) > 25
    assert [line for line in shown if line not in found] == []


def test_the_refusals_that_it_shows_are_real(tmp_path, corpus):
    shown = re.findall(r"^    error: my\.json: line \d+: ('[\w.]+': .*)$", README, re.MULTILINE)
    assert len(shown) == 4
    keys = {"zero_optimization.stgae": "1", "lr": "0.1", "amp": '{"enabled": true}', "zero_optimization.offload_param": '{"device": "cpu"}'}
    assert [line.split("'")[1] for line in shown] == list(keys)
    for line, (key, value) in zip(shown, keys.items(), strict=True):
        with pytest.raises(ValueError) as mistake:
            resolve(["--deepspeed_config", "ds_configs/zero2_bf16.json", "--data", str(corpus), "--set", f"{key}={value}"])
        assert str(mistake.value) == f"--set {key}: {line.partition(': ')[2]}"


def test_no_place_is_left_to_fill_in():
    for page in ROOT.rglob("*.md"):
        if ".venv" not in page.parts:
            assert not re.findall(r"@[A-Z_0-9]+@", page.read_text(encoding="utf-8")), page


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z_]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {command.split()[1] for command in COMMANDS if command.startswith("make")} <= targets


def test_every_file_and_preset_it_names_exists():
    for name in re.findall(r"`((?:launch|tests|recipes|model|data_pipeline|benchmarks)/[\w/]+\.(?:py|md|png))`", README):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    assert all(f"`{name}`" in README for name in PRESETS)
