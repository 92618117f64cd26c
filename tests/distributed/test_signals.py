"""A run that is asked to stop does so at the next step boundary, with a checkpoint, whoever was asked; and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from launch.errors import REQUEUE
from launch.formats.checkpoint_files import complete_checkpoints
from launch.training.ranks.signals import LIKE
from tests.distributed.launched import ROOT, TINY, LaunchedRun, curve

STEPS = 16


@pytest.fixture(scope="module")
def flags(corpus: Path) -> list[str]:
    # 64 sequences / 2 ranks = 32 micro-batches a step: a signal comes in the middle of an accumulation.
    return f"--data {corpus} --global_batch_size 64 --steps {STEPS} --save_every 100 --eval_every 0".split()


@pytest.fixture(scope="module")
def finish(two_ranks, flags) -> Callable[..., list[tuple[int, float]]]:
    """Runs `name` to its end on the pool's two ranks, with --resume where it is there already; its curve."""

    def run(runs: Path, name: str) -> list[tuple[int, float]]:
        config = ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--runs_dir", str(runs), "--run_name", name]
        resume = ["--resume"] if (runs / name).exists() else []
        lines = two_ranks.train([*config, *TINY, *flags, *resume])
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]

    return run


@pytest.fixture(scope="module")
def uninterrupted(finish, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    return finish(tmp_path_factory.mktemp("uninterrupted"), "whole")


# What sends a signal to a process of the run. It is found first: that may take longer than a step.


def to_rank(local_rank: int) -> Callable[[LaunchedRun], Callable[[int], None]]:
    return lambda run: run.rank(local_rank).send_signal


def to_command(run: LaunchedRun) -> Callable[[int], None]:
    return run.process.send_signal


def to_launcher(run: LaunchedRun) -> Callable[[int], None]:
    return run.launcher().send_signal


def to_group(run: LaunchedRun) -> Callable[[int], None]:
    """As a terminal does on Ctrl-C, and a batch system at the end of its time."""
    return partial(os.killpg, run.process.pid)


@pytest.mark.parametrize(
    ("target", "number", "code"),
    [
        pytest.param(to_command, signal.SIGTERM, 143, id="SIGTERM-deepspeed", marks=pytest.mark.long),
        pytest.param(to_launcher, signal.SIGTERM, 1, id="SIGTERM-launcher", marks=pytest.mark.long),  # launch.py ends with 1 on any signal
        pytest.param(to_rank(1), signal.SIGUSR1, REQUEUE, id="SIGUSR1-rank-1", marks=pytest.mark.gate),
        pytest.param(to_rank(1), signal.SIGUSR2, REQUEUE, id="SIGUSR2-rank-1", marks=pytest.mark.long),
        pytest.param(to_group, signal.SIGTERM, 143, id="SIGTERM-group", marks=pytest.mark.gate),
        pytest.param(to_group, signal.SIGINT, 130, id="SIGINT-group", marks=pytest.mark.long),
        pytest.param(to_group, signal.SIGHUP, 129, id="SIGHUP-group", marks=pytest.mark.long),
    ],
)
def test_a_signal_stops_all_ranks_with_a_checkpoint_of_the_last_step(target, number, code, flags, finish, uninterrupted, tmp_path):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup")
    run = LaunchedRun(tmp_path, "r", stage=1, ranks=2, flags=flags).wait_for_step(2)
    send = target(run)
    before = run.last_step()
    send(number)
    assert run.wait() == code, run.output()
    stopped = run.last_step()
    # Two: the step after `before` may have been decided already when the signal came.
    assert before < stopped <= before + 2 and stopped < STEPS
    assert [path.name for path in complete_checkpoints(run.folder / "checkpoints")] == [f"step-{stopped:08d}"]
    name = LIKE.get(number, number).name
    assert f"stopped by {name} after step {stopped}" in (run.folder / "log.txt").read_text()
    if target is not to_group or number == signal.SIGTERM:
        assert "Traceback" not in run.output()
    assert finish(tmp_path, "r") == uninterrupted


@pytest.mark.long
def test_a_signal_stops_the_evaluation_of_the_whole_split(two_ranks, corpus, tmp_path):
    """Which may take long: a batch system would kill the job, and nothing would requeue it. A resume evaluates."""
    run = ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--runs_dir", str(tmp_path), "--run_name", "r", *TINY, "--data", str(corpus)]
    run += ["--steps", "2", "--eval_every", "0", "--whole_eval", "--global_batch_size", "2", "--micro_batch_size", "1"]
    job = "tests.distributed.failure_jobs:pretrain_signalled_in_the_whole_evaluation"
    two_ranks.run(job, flags=run, rank=1, number=int(signal.SIGUSR1), code=REQUEUE)
    assert json.loads((tmp_path / "r" / "run.json").read_text())["finished"] is None
    assert "stopped by SIGUSR1 after step 2" in (tmp_path / "r" / "log.txt").read_text()
    two_ranks.train([*run, "--resume"])
    assert json.loads((tmp_path / "r" / "run.json").read_text())["finished"]["whole_val_loss"] > 0


@pytest.mark.gate
def test_a_second_ctrl_c_ends_the_run_at_once(flags, tmp_path):
    run = LaunchedRun(tmp_path, "r", stage=1, ranks=2, flags=[*flags, "--global_batch_size", "16384"])
    run.wait_until(lambda: "a step" in run.output())
    time.sleep(1.0)  # a step takes several seconds
    ranks = run.rank(0), run.rank(1)
    for _ in range(2):
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        time.sleep(0.5)  # a signal that is still pending swallows its like
    assert run.wait() == 130, run.output()
    assert not run.metrics() and not complete_checkpoints(run.folder / "checkpoints")


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "number", "code"),
    [
        (to_rank(0), signal.SIGTERM, 143),
        (to_command, signal.SIGTERM, 143),
        (to_rank(1), signal.SIGUSR1, REQUEUE),
    ],
    ids=["SIGTERM-rank-0", "SIGTERM-deepspeed", "SIGUSR1-rank-1"],
)
def test_a_signal_during_start_up_ends_the_run_at_once_and_it_can_be_resumed(target, number, code, flags, finish, uninterrupted, tmp_path):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup")
    run = LaunchedRun(tmp_path, "r", stage=1, ranks=2, flags=flags)
    run.wait_until(lambda: (run.folder / ".lock").exists())
    target(run)(number)
    assert run.wait() == code, run.output()
    assert "Traceback" not in run.output()
    assert finish(tmp_path, "r") == uninterrupted
    assert "no complete checkpoint to resume from: starting at step 0" in (run.folder / "log.txt").read_text()


@pytest.mark.long
def test_a_rank_that_waits_in_a_collective_can_be_stopped_during_start_up(flags, tmp_path):
    """Rank 1 never comes; rank 0 waits for it inside torch, where no handler of Python's runs."""
    run = LaunchedRun(tmp_path, "r", stage=1, ranks=2, flags=flags)
    run.wait_until(lambda: (run.folder / ".lock").exists())
    stuck, waiting = run.rank(1), run.rank(0)
    stuck.suspend()
    time.sleep(6.0)
    waiting.send_signal(signal.SIGTERM)
    waiting.wait(5.0)
    stuck.resume()
    assert run.wait() == 143, run.output()


@pytest.mark.long
def test_deepspeed_succeeds_when_its_launcher_is_killed_but_run_json_says_that_the_run_has_not(flags, tmp_path):
    run = LaunchedRun(tmp_path, "r", stage=1, ranks=2, flags=[*flags, "--steps", "100000"]).wait_for_step(2)
    run.launcher().kill()
    assert run.wait() == 0, "DeepSpeed hands the failure on: docs/checkpoints.md need not warn of it any more"
    (check,) = re.findall(r"^    (python -c .*run\.json.*)$", (ROOT / "docs" / "checkpoints.md").read_text(), re.MULTILINE)
    _, option, code = shlex.split(check)
    check_of_run = [sys.executable, option, code.replace("runs/demo", str(run.folder))]
    assert subprocess.run(check_of_run, capture_output=True).returncode == 1
    described = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps(described | {"finished": {"step": 12}}))
    assert subprocess.run(check_of_run).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("closed", [False, True], ids=["reader-gone", "closed"])
def test_output_that_nobody_reads_does_not_end_a_run(closed, flags, tmp_path):
    """`| head` and `>&-`, for standard output and standard error of all ranks and of the launchers."""
    reader, writer = os.pipe()
    os.close(reader)
    under = ("bash", "-c", '"$@" >&- 2>&-' if closed else f'"$@" >&{writer} 2>&{writer}', "bash")
    run = LaunchedRun(tmp_path, "r", stage=1, ranks=2, flags=[*flags, "--eval_every", "3"], under=under, pass_fds=(writer,))
    os.close(writer)
    assert run.wait() in (0, 120), "120 is what Python ends with where its last output goes nowhere"
    log = (run.folder / "log.txt").read_text()
    assert log.count(" validation ") > 3 and f"step {STEPS}, " in log.splitlines()[-1]
    assert json.loads((run.folder / "run.json").read_text())["finished"]["step"] == STEPS


@pytest.mark.long
def test_ranks_stop_when_their_launchers_were_killed_and_a_resume_waits_for_them(flags, uninterrupted, tmp_path):
    run = LaunchedRun(tmp_path, "r", stage=1, ranks=2, flags=flags).wait_for_step(2)
    before = run.last_step()
    run.launcher().kill()
    run.process.kill()
    resumed = LaunchedRun(tmp_path, "r", stage=1, ranks=2, flags=[*flags, "--resume"])
    run.wait()
    assert complete_checkpoints(run.folder / "checkpoints")[0].name <= f"step-{before + 20:08d}"
    assert resumed.wait() == 0, resumed.output()
    assert curve(resumed) == uninterrupted
    assert "resuming after step" in resumed.output()
