"""A user's mistake costs one line on stderr and exit code 2, before ranks meet; nothing is made, and nothing overwritten."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.errors import DataError
from launch import errors
from launch.comparison.interleaved import free_port
from launch.config.run_config import resolve
from launch.errors import UsageError
from tests.commands import run_script
from tests.helpers import refused_start

pytestmark = pytest.mark.usefixtures("fixed_nano")

ROOT = Path(__file__).resolve().parents[1]
BASE = json.loads((ROOT / "ds_configs" / "zero1_bf16.json").read_text())
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def faults(tmp_path, corpus):
    """A function that resolves a JSON (text, or values) and flags on two ranks, which must fail, and returns the faults."""

    def run(content: Any = BASE, *flags: str) -> tuple[str, ...]:
        file = tmp_path / "engine.json"
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content, indent=1).encode())
        before = snapshot(tmp_path)
        with pytest.raises((UsageError, DataError)) as mistake:
            resolve(["--deepspeed_config", str(file), "--data", str(corpus), *flags], ranks=2)
        assert snapshot(tmp_path) == before
        found = getattr(mistake.value, "faults", (str(mistake.value),))
        assert all(fault.isprintable() and len(fault) < 900 for fault in found), found
        return found

    return run


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


def changed(key: str, value: Any) -> dict[str, Any]:
    """The base JSON with one value changed, at a dotted key."""
    values = copy.deepcopy(BASE)
    *sections, name = key.split(".")
    section = values
    for part in sections:
        section = section.setdefault(part, {})
    section[name] = value
    return values


# --- flags --------------------------------------------------------------------------------------------------------------------------

WRONG_FLAGS = {
    "--steps": ["0", "1.5", "nan", "1e400", "x", "", "0x10", "1_000", "99999999999999999999", "٣"],
    "--tokens": ["0", "1e30"],
    "--lr": ["0", "-1", "inf", "1e400", "1e-400", "3e3", "x"],
    "--min_lr": ["-1", "nan"],
    "--warmup_steps": ["-1", "1.5"],
    "--global_batch_size": ["0", "2.5", "1e18"],
    "--n_layer": ["0", "1e9"],
    "--dropout": ["1", "-0.1"],
    "--seed": ["-1", "1e30"],
    "--eval_batches": ["0"],
    "--resume": ["maybe", ""],
    "--ranks": ["0"],
    "--run_name": ["", "..", "a/b", "a\nb", "a ", "x" * 300],
    "--runs_dir": [""],
    "--data": ["", "/nonexistent", "/etc/passwd", "/proc"],
}


@pytest.mark.parametrize("flag", WRONG_FLAGS)
def test_wrong_value_of_a_flag(flag, faults):
    for value in WRONG_FLAGS[flag]:
        (fault,) = faults(BASE, f"{flag}={value}")
        assert flag in fault or "corpus" in fault or "prepare" in fault, fault


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--stepz", "3"], "unknown argument '--stepz'; did you mean '--steps'?"),
        (["--step", "3"], "did you mean '--steps'?"),  # no abbreviations
        (["--learning_rate", "1e-3"], "did you mean '--lr'?"),
        (["--batch_size=8"], "did you mean '--micro_batch_size' or '--global_batch_size'?"),
        (["stray"], "unknown argument 'stray'"),
        (["--steps"], "--steps: expected one argument"),
        (["--steps", "3", "--tokens", "9"], "--steps 3 and --tokens 9 both set the run's length"),
        (["--recipe", "recipes/none"], "give one of --deepspeed_config"),
        (["--preset", "GPT2"], "did you mean 'gpt2'?"),
        (["--preset", ""], "no such preset; there are nano, micro"),
        (["--d_model", "250"], "d_model must be a multiple of n_head"),
        (["--seq_len", "100000000"], "no shard of the train split holds one window of seq_len 100000000"),
        (["--global_batch_size", "7"], "cannot be shared evenly by 2 ranks; give --global_batch_size 6 or 8"),
        (
            ["--micro_batch_size", "3"],
            "micro-batch 3 x accumulation 2 x 2 ranks = 12 sequences, but the global batch is 16; give --global_batch_size 12 or 18, or "
            "--micro_batch_size 2 or 4",
        ),
        (["--global_batch_size", "999999999998", "--micro_batch_size", "7777777777"], "or --micro_batch_size 2969 or 168406871"),
        (["--lr", "0.1", "--set", "optimizer.params.lr=0.2"], "lr is 0.2, but --lr is 0.1; leave --set out or leave the flag out"),
        (["--deepspeed", "ds.json"], "unknown argument 'ds.json'"),
        (["--steps", "1e12", "--global_batch_size", "1e8"], "more than 10^18 tokens"),
        (["--set", "gradient_clipping"], "must be KEY=VALUE"),
        (["--set", "gradient_clipping="], "must be KEY=VALUE"),
        (["--min_lr", "1e-5", "--set", "scheduler.type=WarmupLR", "--set", "scheduler.params={}"], "WarmupLR ends where its own"),
        (["--set", "zero_optimization.stage.x=1"], "'zero_optimization.stage' is a value"),
        (["--set", 'zero_optimization.stage="2"'], '--set zero_optimization.stage is "2"; write one of 0, 1, 2, 3'),
        (["--set", "gradient_clipping=NaN"], "--set gradient_clipping: the number must be finite"),
        (["--set", "bf16={"], "--set bf16: line 1, column 2: not JSON"),
    ],
)
def test_misused_flag(flags, names, faults):
    (fault,) = faults(BASE, *flags)
    assert names in fault


def test_deepspeeds_own_switch_is_accepted(config):
    for flags in (["--deepspeed", *config], [*config, "--deepspeed", "--local_rank", "0"]):
        assert resolve(flags)[0] == resolve(config)[0]


def test_neither_json_nor_recipe():
    with pytest.raises(UsageError, match="give one of --deepspeed_config FILE"):
        resolve([])


# --- the JSON as a file -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"", "line 1, column 1: not JSON"),
        (b'{"a": 1,,}', "line 1, column 10: not JSON"),
        (b'{\n // {\n "a": 1 # ,\n /* "b": 1,\n } */ "b": 2}', "line 5, column 7: not JSON: Expecting ',' delimiter"),
        (b'{\n "gradient_clipping": 1, /* the rest', "not JSON"),
        (b"{} {}", "not JSON: Extra data"),
        (b"[]", "holds [], must be an object"),
        (b"\x00\xff\xfe", "not a text file in UTF-8 (byte 1)"),
        (b'{"bf16": {"enabled": true,\n "enabled": false}}', "line 2: 'bf16.enabled' is repeated (first on line 1)"),
        (b'{"gradient_clipping": NaN}', "'gradient_clipping' must be finite"),
        (b'{"gradient_clipping": 1e999}', "'gradient_clipping' must be finite"),
        (b'{"train_batch_size": ' + b"9" * 5000 + b"}", "'train_batch_size' must be finite"),
        (b'{"a":' + b"[" * 100_000, "nested too deep"),
    ],
)
def test_file_that_is_no_configuration(content, names, faults):
    (fault,) = faults(content)
    assert names in fault
    assert "engine.json" in fault


def test_file_that_is_not_there_or_a_folder(tmp_path):
    for path, names in (
        (tmp_path / "none.json", "no such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(UsageError, match=names):
            resolve(["--deepspeed_config", str(path)])


def test_a_file_that_may_never_end_is_not_read(command, config, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "w") as large:
        large.truncate(2**36)
    for file in (tmp_path / "pipe", tmp_path / "large", "/dev/zero"):
        assert f"error: {file}: " in command(*config[2:], "--deepspeed_config", file)


def test_a_message_is_short_whatever_the_file_holds(faults):
    (fault,) = faults({**BASE, "a" * 1_000_000: 1})
    assert "engine.json: line " in fault and "unknown key" in fault
    (fault,) = faults(changed("zero_optimization.stage", "\n" * 1_000_000))
    assert "zero_optimization.stage" in fault and "write one of 0, 1, 2, 3" in fault


def test_a_micro_batch_larger_than_the_corpus_is_refused(corpus, tmp_path):
    size = ["--micro_batch_size", "1000000000", "--global_batch_size", "2000000000"]
    fault = refused_start(tmp_path / "runs", "--deepspeed_config", "ds_configs/zero1_fp32.json", "--data", str(corpus), *size)
    assert "train_micro_batch_size_per_gpu" in fault and "lower --micro_batch_size" in fault


def test_a_key_with_a_line_break_stays_in_one_line(faults):
    assert "\\n" in faults({**BASE, "a\nb": 1})[0]
    assert "\\ud800" in faults(json.dumps({**BASE, "\ud800": 1}).encode())[0]


def test_comments_and_trailing_commas_are_read_as_deepspeed_reads_them(corpus, tmp_path, faults):
    text = """{ // "train_batch_size": 4,
      # its own line, with a "
      "train_batch_size": 8, /* two
      lines, } */ "_comment": "//", "//": {"a": 1}, "//": 2,
      "zero_optimization": {"stage": 1, "#": [], "comment": "none", "stag": 2,}, // last
      "wandb": {"enabled": false, "project": "a,} // #b", "group": "\\"/*", },
    }"""
    (tmp_path / "engine.json").write_text(text.replace(', "stag": 2', ""))
    engine = resolve(["--deepspeed_config", str(tmp_path / "engine.json"), "--data", str(corpus)], ranks=2)[0].ds_config
    assert (engine["train_batch_size"], engine["zero_optimization"]) == (8, {"stage": 1})
    assert engine["wandb"] == {"enabled": False, "project": "a,} // #b", "group": '"/*'}
    assert "line 5: 'zero_optimization.stag': unknown key; did you mean 'stage'?" in faults(text.encode())[0]


def test_a_byte_order_mark_is_no_mistake(tmp_path, corpus):
    file = tmp_path / "engine.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(BASE).encode())
    assert resolve(["--deepspeed_config", str(file), "--data", str(corpus)])[0].zero_stage == 1


def test_a_flag_of_the_recipe_is_not_blamed_on_the_user(corpus):
    with pytest.raises(UsageError, match=r"is 16, but recipes/batch_size_warmup/recipe\.json has --global_batch_size 32; .* or give --glo"):
        resolve(["--recipe", "recipes/batch_size_warmup", "--data", str(corpus), "--set", "train_batch_size=16"], ranks=1)


# --- the corpus ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(corpus, tmp_path) -> Path:
    return Path(shutil.copytree(corpus, tmp_path / "copied"))


def empty_shard(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    empty = hashlib.sha256(b"").hexdigest()
    shard = {"file": "val-00000.bin", "tokens": 0, "sha256": empty, "group": 0, "documents": 0}
    manifest["splits"]["val"] |= {"tokens": 0, "documents": 0, "shards": [shard]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "val-00000.bin").write_bytes(b"")


#: More of them: tests/test_damaged_corpora.py.
DAMAGES = {
    "a shard is missing": (lambda folder: (folder / "train-00000.bin").unlink(), "train-00000.bin: missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: missing"),
    "the manifest is nested": (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "manifest.json: not valid JSON"),
    "the tokenizer is missing": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "the validation split is empty": (empty_shard, "no shard of the val split holds one window"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_corpus(damage, faults, copied):
    spoil, names = DAMAGES[damage]
    spoil(copied)
    (fault,) = faults(BASE, "--data", str(copied))
    assert names in fault
    assert any(word in fault for word in ("prepare", "copy"))


# --- the command --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path):
    """A function that runs the real command in an empty folder and checks what every mistake has in common; the line it printed."""
    work = tmp_path / "work"
    work.mkdir()
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_NAMES}

    def run(*flags: Any, before: tuple[str, ...] = (), lines: int = 1, **extra: str) -> str:
        seen = snapshot(work)
        if before:
            arguments = [*before, sys.executable, str(ROOT / "launch/pretrain.py"), *map(str, flags)]
            done = subprocess.run(arguments, cwd=work, env=environment | extra, capture_output=True, text=True, timeout=60)
        else:
            done = run_script("launch/pretrain.py", *flags, cwd=work, environment=environment | extra)
        assert done.returncode == 2, (done.returncode, done.stderr)
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == lines, done.stderr
        assert all(line.startswith("error: ") for line in done.stderr.splitlines()), done.stderr
        assert snapshot(work) == seen
        return done.stderr

    run.work = work
    return run


@pytest.fixture
def config(corpus) -> list[str]:
    return ["--deepspeed_config", str(ROOT / "ds_configs/zero1_bf16.json"), "--data", str(corpus)]


def test_a_wrong_json_ends_the_command_with_a_line_for_each_fault(command, config, tmp_path):
    values = changed("zero_optimization.stage", 7)
    values["nonsense"] = 1
    (tmp_path / "engine.json").write_text(json.dumps(values))
    printed = command("--deepspeed_config", tmp_path / "engine.json", *config[2:], lines=2)
    assert "'zero_optimization.stage' is 7" in printed
    assert "'nonsense': unknown key" in printed


def test_a_mistake_is_one_line_of_local_rank_0(command, config):
    missing = "error: --data data/stdlib: no such corpus; prepare one with: python data_pipeline/prepare.py --source"
    assert command(*config[:2]).startswith(missing)
    assert "the run has 2 ranks" in command(*config, "--ranks", "2")
    ranks = {"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert "--steps" in command(*config, "--steps", "0", **ranks)


def test_a_run_that_exists_is_not_touched(command, config):
    taken = command.work / "runs" / "taken"
    taken.mkdir(parents=True)
    (taken / "run.json").write_text("{}")
    assert "taken: this run exists; give another --run_name" in command(*config, "--run_name", "taken")
    (command.work / "runs" / "file").write_text("")
    assert "file: " in command(*config, "--run_name", "file")


@pytest.mark.parametrize("exists", [False, True])
def test_a_resume_that_must_go_on_needs_a_checkpoint(exists, command, config):
    (command.work / "runs" / "demo").mkdir(parents=True)
    (command.work / "runs" / "demo" / "run.json").write_text("{}")
    printed = command(*config, "--resume=must", "--run_name", "demo" if exists else "dmeo")
    assert ("no complete checkpoint" in printed) if exists else ("no such run; give another" in printed)


@pytest.mark.parametrize("content", ['{"ranks": 1}', "[" * 100_000, "{"])
def test_a_resume_of_a_run_whose_description_is_damaged(content, command, config):
    run = command.work / "runs" / "demo"
    (run / "checkpoints").mkdir(parents=True)
    (run / ".lock").touch()
    (run / "run.json").write_text(content)
    assert f"{Path('runs/demo/run.json')}: " in command(*config, "--resume", "--run_name", "demo")


def test_a_runs_dir_that_is_a_file(command, config):
    (command.work / "results").write_text("")
    assert "results" in command(*config, "--runs_dir", "results")
    assert "results/below" in command(*config, "--runs_dir", "results/below")


def test_a_corpus_with_ids_out_of_range_makes_no_run_folder(command, config, copied):
    np.memmap(copied / "val-00000.bin", dtype="<u2", mode="r+")[5] = 6000
    assert "val-00000.bin: changed" in command(*config[:2], "--data", copied)


def without_roots_privileges() -> tuple[str, ...]:
    """What starts a command that file permissions hold for: root ignores them, unless this capability is taken away."""
    if os.geteuid() != 0:
        return ()
    tool = shutil.which("setpriv")
    before = (tool, "--bounding-set=-dac_override,-dac_read_search") if tool else ()
    if not tool or subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("run as root, and setpriv cannot take root's privilege away")
    return before


def test_a_folder_that_cannot_be_written(command, config):
    assert "cannot be" in command(*config, "--runs_dir", "/proc/runs")  # for root too
    (command.work / "locked").mkdir(mode=0o555)
    printed = command(*config, "--runs_dir", "locked", before=without_roots_privileges())
    assert "locked" in printed and "--runs_dir" in printed


def test_a_corpus_that_cannot_be_read(command, config, copied):
    (copied / "train-00000.bin").chmod(0o000)
    printed = command(*config[:2], "--data", copied, before=without_roots_privileges())
    assert "train-00000.bin: cannot be read (Permission denied)" in printed


#: Keeps a rank from starting for longer than the launcher takes to notice that another has ended.
SLOW_RANK = """
import os, time

if os.environ.get("LOCAL_RANK") == "{rank}":
    time.sleep(6)
"""


def launched_refusal(flags: list[str], folder: Path, slow_rank: int, port: int) -> str:
    """The one error of `deepspeed launch/pretrain.py` on two ranks, of which one starts late."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(SLOW_RANK.format(rank=slow_rank))
    (folder / "work").mkdir()
    launcher = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", "2", "--log_level", "error", "--master_port", str(port)]
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_NAMES} | {"PYTHONPATH": str(folder / "hook")}
    command = [*launcher, ROOT / "launch/pretrain.py", *flags]
    done = subprocess.run(command, cwd=folder / "work", env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not list((folder / "work").rglob("run.json"))
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error:"))
    return line


@pytest.mark.parametrize("slow_rank", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.gate)])
def test_a_mistake_through_the_launcher_is_said_once_whichever_rank_is_first(slow_rank, config, tmp_path):
    """All ranks end with 2, one of them speaks, and the launcher hands the exit code on."""
    assert "--lr: nan is out of range" in launched_refusal([*config, "--lr", "nan"], tmp_path, slow_rank, free_port())


@pytest.mark.parametrize(
    ("reason", "code", "line"),
    [
        (UsageError("of this rank"), 2, "of this rank"),
        (RuntimeError("[pair.cc:547] Connection closed by peer [::1]:1234"), 1, "another rank has ended; its output has the reason"),
    ],
)
def test_a_rank_whose_error_nobody_else_has_speaks_after_a_while(reason, code, line, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(errors, "OTHER_RANKS_WAIT_SECONDS", 0.0)
    handler = signal.getsignal(signal.SIGTERM)

    def failing() -> int:
        raise reason

    with pytest.raises(SystemExit) as end:
        errors.run_command(failing)
    signal.signal(signal.SIGTERM, handler)
    assert (end.value.code, capsys.readouterr().err) == (code, f"error: {line}\n")


@pytest.mark.long
def test_a_port_in_use_is_refused_before_anything_is_made(config, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port}" in launched_refusal(config, tmp_path, slow_rank=0, port=port)
    assert list((tmp_path / "work").iterdir()) == []
