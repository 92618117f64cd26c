"""The commands of the README are real: each is resolved, or run, as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run.config import resolve
from model.presets import PRESETS
from recipes.registry import index_table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.strip() for line in README.splitlines() if re.match(r"    (deepspeed|python|make) ", line)]


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("deepspeed")])
def test_training_commands_resolve(command, corpus, tmp_path):
    words = shlex.split(command)
    script = words.index("launch/pretrain.py")
    ranks = int(words[words.index("--num_gpus") + 1]) if "--num_gpus" in words else 16 if "--hostfile" in words else 1
    flags = words[script + 1 :]
    # The corpus of the tests is too small for a context of thousands of tokens; nothing else is changed.
    config, _ = resolve([*flags, "--data", str(corpus), "--seq_len", "128", "--runs_dir", str(tmp_path)], ranks=ranks)
    assert config.micro_batch_size * config.gradient_accumulation_steps * ranks == config.global_batch_size


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
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / picture).exists(), picture
    assert all(f"`{name}`" in README for name in PRESETS)


def test_the_table_of_recipes_is_the_index():
    assert index_table().replace("](", "](recipes/").strip() in README
