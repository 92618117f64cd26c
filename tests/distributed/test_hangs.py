"""A rank that is stopped (SIGSTOP) ends the job, which names the rank, its last step and its place; and the job can be resumed."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.errors import UsageError
from launch.formats.checkpoint_files import complete_checkpoints
from launch.training.engine import BACKWARD, CHECKPOINT, EVALUATION, FORWARD, UPDATE
from launch.training.ranks.heartbeat import PLACES, START, Beat, Heartbeat, _behind
from launch.training.ranks.interleaving import VARIABLE
from tests.distributed.launched import TINY, LaunchedRun
from tests.distributed.test_restarts import TorchRun

STEPS = 24
TIMEOUT = 15


@pytest.fixture(scope="module")
def flags(corpus: Path) -> list[str]:
    return f"--data {corpus} --global_batch_size 32 --steps {STEPS} --save_every 10 --eval_every 0".split()


@pytest.fixture(scope="module")
def finish(two_ranks, flags) -> Callable[..., list[tuple[int, float]]]:
    """Trains the run to its end on the pool's two ranks; its curve."""

    def run(runs: Path, *more: str) -> list[tuple[int, float]]:
        folder = ["--deepspeed_config", "ds_configs/zero2_fp32.json", "--runs_dir", str(runs), "--run_name", "r"]
        return [(line["step"], line["loss"]) for line in two_ranks.train([*folder, *TINY, *flags, *more])]

    return run


@pytest.fixture(scope="module")
def uninterrupted(finish, tmp_path_factory) -> list[tuple[int, float]]:
    return finish(tmp_path_factory.mktemp("whole"))


def deepspeed(runs: Path, name: str, flags: list[str]) -> LaunchedRun:
    return LaunchedRun(runs, name, stage=2, ranks=2, flags=flags)


def torchrun(runs: Path, name: str, flags: list[str]) -> LaunchedRun:
    return TorchRun(runs, name, flags, restarts=0)


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [
        pytest.param(deepspeed, 1, marks=pytest.mark.gate),
        pytest.param(torchrun, 0, marks=pytest.mark.long),
    ],
)
def test_a_stopped_rank_ends_the_job_which_names_it(
    launcher: Callable[..., LaunchedRun], rank: int, flags, finish, uninterrupted, tmp_path
):
    run = launcher(tmp_path, "r", [*flags, "--hang_timeout", str(TIMEOUT)]).wait_for_step(2)
    stopped = run.rank(rank)  # found first, because the search may take longer than a step
    run.wait_for_step(14)
    start = time.monotonic()
    stopped.suspend()
    assert run.wait() != 0, run.output()
    assert time.monotonic() - start < 60.0
    assert not psutil.pid_exists(stopped.pid) or stopped.status() == psutil.STATUS_ZOMBIE
    (line,) = re.findall(r"^error: rank .*$", run.output(), re.MULTILINE)
    found = re.search(
        r"rank (\d+) \((\S+), process (\d+), which does not run\) has made no progress for 15 s: the last step was (\d+), ", line
    )
    assert found and (int(found[1]), int(found[3])) == (rank, stopped.pid)
    assert run.last_step() - 1 <= int(found[4]) <= run.last_step() + 1
    assert line.endswith("--resume continues from step-00000010")
    assert (f"error: rank {rank} (" in (run.folder / "log.txt").read_text()) == (rank != 0)  # rank 0 writes the log
    assert finish(tmp_path, "--resume") == uninterrupted
    assert "resuming after step 10" in (run.folder / "log.txt").read_text()


def beat(ticks: int, beats: int, place: str = FORWARD, may_be_long: bool = False) -> Beat:
    return Beat(ticks, beats, step=3, place=PLACES.index(place), may_be_long=int(may_be_long))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        # Rank 1 does not run.
        ([beat(5, 9), beat(5, 8)], [beat(9, 9), beat(5, 8)], {1: "which does not run"}),
        # Also where a place may take long.
        ([beat(5, 9), beat(5, 8)], [beat(9, 9, CHECKPOINT, True), beat(5, 8, FORWARD, True)], {1: "which does not run"}),
        # Rank 1 runs, but is behind the others.
        ([beat(5, 9, BACKWARD), beat(5, 8)], [beat(9, 9, BACKWARD), beat(9, 8)], {1: "which runs"}),
        # Both wait in the same place.
        ([beat(5, 9), beat(5, 9)], [beat(9, 9), beat(9, 9)], {}),
        # Rank 1 is slow: it has made progress.
        ([beat(5, 9), beat(5, 4)], [beat(9, 9), beat(9, 5)], None),
        # Rank 1 is where it may take long: its first forward pass, or a checkpoint.
        ([beat(5, 9), beat(5, 4, FORWARD, True)], [beat(9, 9), beat(9, 4, FORWARD, True)], None),
        # Rank 1 has left the loop, in which rank 0 waits, or does not run.
        ([beat(5, 9), beat(5, 10)], [beat(9, 9)], None),
        ([beat(5, 9), beat(5, 10)], [beat(5, 9)], {0: "which does not run"}),
    ],
)
def test_who_is_behind(before, now, expected):
    assert _behind(dict(enumerate(before)), dict(enumerate(now)), 2) == expected


class Alone:
    """The collectives of a run of one rank."""

    rank, world_size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_what_may_take_long(tmp_path, monkeypatch):
    """The first of each place, which may compile; checkpoints; the wait for interleaved runs."""
    heartbeat = Heartbeat(tmp_path, 60, 3, Alone(), log=print)  # type: ignore[arg-type]

    def may_be_long(place: str) -> bool:
        heartbeat.on_phase(place)
        return bool(heartbeat._beat.may_be_long)

    step = (START, FORWARD, BACKWARD, FORWARD, BACKWARD, UPDATE)
    assert [may_be_long(place) for place in step] == [True, True, True, False, False, True]
    heartbeat.after_step(4)
    assert [may_be_long(place) for place in step] == [False] * 6
    assert [may_be_long(place) for place in (EVALUATION, EVALUATION, CHECKPOINT, FORWARD, CHECKPOINT)] == [True, True, True, False, True]
    monkeypatch.setenv(VARIABLE, "socket")
    assert may_be_long(START) and not may_be_long(FORWARD)
    assert heartbeat._beat[1:4] == (20, 4, PLACES.index(FORWARD))


def test_a_run_names_its_phases(one_rank, corpus, tmp_path):
    run = ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--data", str(corpus), "--runs_dir", str(tmp_path), "--run_name", "r", *TINY]
    run += ["--micro_batch_size", "2", "--global_batch_size", "4", "--steps", "1", "--eval_every", "1", "--eval_batches", "1"]
    evaluation, step = [EVALUATION] * 2, [FORWARD, BACKWARD, UPDATE] * 2
    assert one_rank.run("tests.distributed.failure_jobs:phases", flags=run)[0] == [*evaluation, *step, *evaluation, CHECKPOINT]


class TwoHosts(Alone):
    def gather(self, value: Any) -> list[Any]:
        return [value, ("another", 1)]


def test_training_does_not_wait_for_the_file_system(tmp_path, monkeypatch):
    """Only the thread writes, and it waits for the drive where the interpreter goes on; a rank that has left has no record."""
    waits, answers = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "fsync", lambda file: (waits.set(), answers.wait(30.0)))
    heartbeat = Heartbeat(tmp_path, 1, 3, TwoHosts(), log=print)  # type: ignore[arg-type]
    with heartbeat.training():
        assert waits.wait(10.0)
        written = heartbeat._read()[0]
        heartbeat.on_phase(FORWARD)
        assert heartbeat._read()[0] == written
        answers.set()
    assert heartbeat._read() == {}


def test_a_rank_that_ends_by_an_exception_is_seen_as_one_that_does_not_run(tmp_path):
    heartbeat = Heartbeat(tmp_path, 1, 3, Alone(), log=print)  # type: ignore[arg-type]
    with pytest.raises(SystemExit), heartbeat.training():
        raise SystemExit(1)
    left = heartbeat._read()
    assert _behind(left, left, 2) == {0: "which does not run"}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / ".heartbeat").touch()
    with pytest.raises(UsageError, match=r"\.heartbeat: cannot be written \(File exists\); give a --runs_dir that all hosts share"):
        Heartbeat(tmp_path, 60, 0, Alone(), log=print)  # type: ignore[arg-type]


class Many(Alone):
    world_size = 500


def test_many_ranks_write_less_often_and_an_old_verdict_does_not_count(tmp_path):
    (tmp_path / ".heartbeat").mkdir()
    (old := tmp_path / ".heartbeat" / "verdict-0").touch()
    heartbeat = Heartbeat(tmp_path, 300, 3, Many(), log=print)  # type: ignore[arg-type]
    assert heartbeat._tick == 5.0 and not old.exists()
    assert Heartbeat(tmp_path, 20, 3, Many(), log=print)._tick == 1.0  # type: ignore[arg-type]


def test_a_failing_run_may_wait_for_its_checkpoint(two_ranks, flags, tmp_path):
    """The write takes longer than the timeout. The failure is reported, and the checkpoint is complete."""
    run = ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--runs_dir", str(tmp_path), "--run_name", "r", *TINY, *flags]
    run += ["--save_every", "5", "--hang_timeout", "3"]
    job = "tests.distributed.failure_jobs:end_in_the_middle_of_a_write"
    assert two_ranks.run(job, flags=run, how="error", seconds=7.0) == ["a fault of ours"] * 2
    assert [path.name for path in complete_checkpoints(tmp_path / "r/checkpoints")] == ["step-00000005"]


@pytest.mark.long
def test_a_slow_rank_is_not_ended(flags, tmp_path):
    """Rank 1 is stopped and continued, each time for less than the time, which both together are longer than."""
    run = deepspeed(tmp_path, "r", [*flags, "--hang_timeout", str(TIMEOUT)]).wait_for_step(3)
    slow = run.rank(1)
    for _ in range(2):
        slow.suspend()
        time.sleep(0.6 * TIMEOUT)
        slow.resume()
        run.wait_for_step(run.last_step() + 1)
    assert run.wait() == 0, run.output()
    assert "error:" not in run.output()


@pytest.mark.long
def test_a_job_that_was_suspended_as_a_whole_continues(flags, tmp_path):
    run = deepspeed(tmp_path, "r", [*flags, "--hang_timeout", "4"]).wait_for_step(3)
    ranks = run.rank(0), run.rank(1)
    for rank in ranks:
        rank.suspend()
    time.sleep(10.0)
    for rank in ranks:
        rank.resume()
    assert run.wait() == 0, run.output()
