"""`torchrun --max-restarts`: when a rank is killed, the run comes up again at the first attempt, and its curve is the uninterrupted one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch.comparison.interleaved import free_port
from launch.formats.checkpoint_files import complete_checkpoints
from tests.distributed.launched import ROOT, TINY, LaunchedRun, curve

STEPS = 40


class TorchRun(LaunchedRun):
    """One `torchrun` command in a process group of its own, with two ranks.

    Args:
        restarts: `--max-restarts`.
        launcher: further flags of `torchrun`.
    """

    def __init__(self, runs: Path, name: str, flags: list[str], restarts: int, launcher: tuple[str, ...] = ()):
        self.folder = runs / name
        self.log = runs / f"{name}.{time.monotonic_ns()}.out"
        runs.mkdir(parents=True, exist_ok=True)
        command = [Path(sys.executable).with_name("torchrun"), "--nproc_per_node", 2, "--max-restarts", restarts]
        command += [*(launcher or ("--master_port", free_port())), "launch/pretrain.py"]
        command += ["--deepspeed_config", "ds_configs/zero2_fp32.json", "--runs_dir", runs, "--run_name", name, *TINY, *flags]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env={**os.environ, "TEST_JOB": str(self.log)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """All that live of this job. `torchrun` starts each rank in a session of its own."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TEST_JOB") == str(self.log) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def rank(self, local_rank: int) -> psutil.Process:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("LOCAL_RANK") == str(local_rank):
                    return process
        raise AssertionError(f"no rank {local_rank}:\n{self.output()}")

    def starts(self) -> int:
        """How often rank 0 has come as far as its first step."""
        log = self.folder / "log.txt"
        said = log.read_text() if log.exists() else ""
        return said.count("no complete checkpoint to resume from") + said.count("resuming after step")


def a_file_is_being_written(run: TorchRun) -> bool:
    return any((run.folder / "checkpoints").glob(".tmp-step-*/engine/*"))


def before_the_first_checkpoint(run: TorchRun) -> bool:
    return run.last_step() >= 2


def between_checkpoints(run: TorchRun) -> bool:
    return run.last_step() % 10 in (4, 5, 6)


@pytest.fixture(scope="module")
def flags(corpus: Path) -> list[str]:
    return f"--data {corpus} --global_batch_size 32 --steps {STEPS} --save_every 10 --eval_every 0 --resume".split()


@pytest.fixture(scope="module")
def uninterrupted(two_ranks, flags, tmp_path_factory) -> list[tuple[int, float]]:
    runs = ["--deepspeed_config", "ds_configs/zero2_fp32.json", "--runs_dir", str(tmp_path_factory.mktemp("whole")), "--run_name", "r"]
    lines = two_ranks.train([*runs, *TINY, *flags])
    return [(line["step"], line["loss"]) for line in lines]


Moment = Callable[[TorchRun], bool]


def kill_and_finish(run: TorchRun, kills: list[tuple[int, Moment]]) -> list[tuple[int, float]]:
    halves: list[Path] = []
    for number, (rank, moment) in enumerate(kills, start=1):
        run.wait_until(lambda number=number: run.starts() == number)
        killed = run.rank(rank)  # found beforehand: a write takes milliseconds
        run.wait_until(lambda moment=moment: moment(run))
        killed.kill()
        if moment is a_file_is_being_written:
            halves += list((run.folder / "checkpoints").glob(".tmp-step-*"))
    assert run.wait() == 0, run.output()
    # Each kill has led to one start, and no start has failed.
    assert run.starts() == len(kills) + 1
    assert "connectFullMesh" not in run.output()
    assert halves or not any(moment is a_file_is_being_written for _, moment in kills), "no write was interrupted"
    return curve(run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGUSR1, ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1")),
    ],
)
def test_a_signal_to_torchrun_leaves_a_checkpoint(number, launcher, flags, tmp_path):
    run = TorchRun(tmp_path, "r", flags, restarts=1, launcher=(*launcher, "--master_port", str(free_port()))).wait_for_step(13)
    run.process.send_signal(number)
    assert run.wait() == 1, "torchrun says how its ranks have ended: docs/clusters.md need not warn of it any more"
    stopped = run.last_step()
    assert f"stopped by {number.name} after step {stopped}" in (run.folder / "log.txt").read_text()
    assert complete_checkpoints(run.folder / "checkpoints")[-1].name == f"step-{stopped:08d}"
    assert re.search(rf"SignalException: Process \d+ got signal: {int(number)}", run.output())
    assert run.starts() == 1


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.gate), pytest.param(0, marks=pytest.mark.long)])
def test_a_killed_rank_is_restarted(rank, flags, uninterrupted, tmp_path):
    run = TorchRun(tmp_path, "r", flags, restarts=1)
    assert kill_and_finish(run, [(rank, between_checkpoints)]) == uninterrupted


@pytest.mark.long
def test_every_restart_comes_up_at_the_first_attempt(flags, uninterrupted, tmp_path):
    """Six kills of one run, of one rank or the other."""
    kills = [
        *((rank, before_the_first_checkpoint) for rank in (0, 1)),
        *((rank, moment) for moment in (a_file_is_being_written, between_checkpoints) for rank in (1, 0)),
    ]
    run = TorchRun(tmp_path, "r", flags, restarts=len(kills))
    assert kill_and_finish(run, kills) == uninterrupted
