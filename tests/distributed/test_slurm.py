"""`launch/slurm/pretrain.sbatch` under a real Slurm: a job that is requeued ends with the curve of an uninterrupted run."""

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
from launch.config.flags import MUST, build_parser
from launch.formats.checkpoint_files import complete_checkpoints
from launch.formats.metrics import read_metrics
from tests.distributed.launched import ROOT, TINY
from tests.distributed.slurm import NODES, running_slurm

pytestmark = pytest.mark.long

STEPS = 2000
PATIENCE_SECONDS = 600.0
#: 3 minutes, with a signal 100 s before their end. Slurm sends it up to a minute earlier: 20 to 80 s after the start.
LIMIT = ("--time=3", "--signal=USR1@100")


@pytest.fixture
def slurm(tmp_path):
    (tmp_path / "slurm").mkdir()
    with running_slurm(tmp_path / "slurm") as environment:
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        yield environment | {"PATH": path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


class Job:
    """A job of two tasks of `pretrain.sbatch`.

    Args:
        least: seconds that a start lasts, after which the run may start again.
        steps: of the run.
    """

    def __init__(self, slurm: dict[str, str], corpus: Path, folder: Path, *options: str, least: int = 60, steps: int = STEPS):
        self.slurm, self.run, self.out = slurm, folder / "runs" / "r", folder / "job.out"
        # What a user edits; this Slurm has no GPUs.
        script = folder / "pretrain.sbatch"
        text = (ROOT / "launch" / "slurm" / "pretrain.sbatch").read_text().replace("-lt 60", f"-lt {least}")
        script.write_text(re.sub(r"#SBATCH --(ntasks|gpus|cpus)-per-.*\n", "", text))
        self.number = self.command(
            *("sbatch", "--parsable", "--nodes=1", "--ntasks=2", f"--output={self.out}", *options, script),
            *("--deepspeed_config", "ds_configs/zero1_fp32.json", "--data", corpus, "--runs_dir", folder / "runs", "--run_name", "r"),
            *(*TINY, "--global_batch_size", "32", "--steps", steps, "--save_every", "0", "--eval_every", "0"),
        ).strip()

    def command(self, *words: object) -> str:
        done = subprocess.run([str(word) for word in words], cwd=ROOT, env=self.slurm, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def field(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S*)", self.command("scontrol", "show", "job", self.number))
        return found[1] if found else ""

    def losses(self) -> list[tuple[int, float]]:
        file = self.run / "metrics.jsonl"
        return [(line["step"], line["loss"]) for line in read_metrics(file) if "loss" in line] if file.exists() else []

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            out = self.out.read_text() if self.out.exists() else self.command("squeue")
            assert time.monotonic() < deadline and self.field("JobState") not in ("FAILED", "NODE_FAIL", "TIMEOUT"), out
            time.sleep(0.3)

    def train(self, steps: int) -> None:
        """Wait until the job has made more steps."""
        before = len(self.losses())
        self.wait_until(lambda: len(self.losses()) >= before + steps)

    def start_again(self, restarts: int, *changes: str) -> None:
        """Wait until the job is requeued for the `restarts`-th time, and shorten the time for which Slurm holds it."""
        self.wait_until(lambda: self.field("JobState") == "PENDING" and self.field("Restarts") == str(restarts))
        time.sleep(5.0)  # the script of the start before may still be ending
        self.command("scontrol", "update", f"JobId={self.number}", "StartTime=now", *changes)


def test_the_arguments_may_demand_a_checkpoint(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    command = ["bash", ROOT / "launch" / "slurm" / "pretrain.sbatch", "--recipe", "recipes/zero_2"]
    named = ["--run_name=r"]
    for given, resume in ((named, True), ([*named, "--resume=must"], MUST), (["--resume", "runs/r"], "runs/r"), (["--resume=./r"], "./r")):
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        words = subprocess.run([*command, *given], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout.split()
        arguments = words[words.index("launch/pretrain.py") + 1 :]
        assert build_parser().parse(arguments).resume == resume
    unnamed = subprocess.run([*command, "--resume"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (unnamed.returncode, unnamed.stdout) == (2, "") and "error: give --run_name" in unnamed.stderr


def test_a_requeued_job_has_the_curve_of_an_uninterrupted_one(slurm, corpus, tmp_path):
    for name in ("whole", "requeued"):
        (tmp_path / name).mkdir()
    whole = Job(slurm, corpus, tmp_path / "whole", "--time=10")
    whole.wait_until(lambda: whole.field("JobState") == "COMPLETED")
    assert whole.field("Restarts") == "0" and len(whole.losses()) == STEPS

    job = Job(slurm, corpus, tmp_path / "requeued", *LIMIT)
    job.train(20)
    assert job.field("NumNodes") == "1"
    job.command("scancel", "--signal=USR1", job.number)  # to the tasks, as --signal does
    job.start_again(1, "NumNodes=2-2")
    job.train(20)
    assert job.field("NumNodes") == "2"
    job.wait_until(lambda: job.field("JobState") == "PENDING")  # by the signal before the end of its time
    job.start_again(2, "NumNodes=1-1", "TimeLimit=10")  # which suffices for the rest
    job.wait_until(lambda: job.field("JobState") == "COMPLETED")
    assert job.field("Restarts") == "2" and job.field("ExitCode") == "0:0"
    assert job.losses() == whole.losses()
    said = (job.run / "log.txt").read_text()
    assert said.count("stopped by SIGUSR1 after step") == said.count("resuming after step") == 2
    assert said.count("no complete checkpoint to resume from: starting at step 0") == 1


def test_a_preempted_job_saves_a_checkpoint_and_continues(slurm, corpus, tmp_path):
    job = Job(slurm, corpus, tmp_path, "--time=10")
    job.train(20)
    job.command("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    job.start_again(1)
    job.train(20)
    said = (job.run / "log.txt").read_text()
    (stopped,) = re.findall(r"stopped by SIGTERM after step (\d+)", said)
    assert re.findall(r"resuming after step (\d+)", said) == [stopped]
    assert job.field("PreemptTime") == "None", "a later failure is not taken for a preemption"
    job.command("scancel", job.number)


def environment(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return process.environ()
    return {}


def test_a_job_that_loses_a_node_without_the_script_is_requeued(slurm, corpus, tmp_path):
    """The script starts the run again, also on the node that has failed, before Slurm knows."""
    job = Job(slurm, corpus, tmp_path, "--time=10", "--nodes=2", least=10)
    job.train(20)
    node = next(name for name in NODES if name != job.field("BatchHost"))
    kill_node(slurm, job.number, node)
    job.start_again(1, "NumNodes=1-1")
    job.train(20)
    assert job.field("NodeList") in {*NODES} - {node}
    job.command("scancel", job.number)


def kill_node(slurm: dict[str, str], job: str, node: str) -> None:
    """Kill all of `job` on a node, and the node's daemon."""
    own = [process for process in psutil.process_iter() if environment(process).get("SLURM_CONF") == slurm["SLURM_CONF"]]
    tasks = [one for one in own if (environment(one).get("SLURM_JOB_ID"), environment(one).get("SLURMD_NODENAME")) == (job, node)]
    daemons = [process for process in own if process.cmdline() == ["slurmd", "-D", "-N", node]]
    daemons += {parent for task in tasks if (parent := task.parent()) is not None and parent.name() == "slurmstepd"}
    for process in daemons + tasks:  # first those that would report the end of the others
        process.kill()


def test_a_cancelled_and_a_failed_job_are_not_requeued(slurm, corpus, tmp_path):
    (tmp_path / "failed").mkdir()
    failed = Job(slurm, tmp_path / "no_corpus", tmp_path / "failed", *LIMIT)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while failed.field("JobState") != "FAILED":
        assert time.monotonic() < deadline, failed.field("JobState")
        time.sleep(0.5)
    assert sum(line.startswith("0: error:") for line in failed.out.read_text().splitlines()) == 1
    job = Job(slurm, corpus, tmp_path, *LIMIT)
    job.train(5)
    job.command("scancel", job.number)
    job.wait_until(lambda: job.field("JobState") == "CANCELLED")
    job.wait_until(lambda: "stopped by SIGTERM" in (job.run / "log.txt").read_text())
    time.sleep(10.0)
    assert [one.field(name) for one in (job, failed) for name in ("JobState", "Restarts")] == ["CANCELLED", "0", "FAILED", "0"]
    assert complete_checkpoints(job.run / "checkpoints")


def test_a_run_whose_rank_is_killed_starts_again_in_its_allocation(slurm, corpus, tmp_path):
    job = Job(slurm, corpus, tmp_path, "--time=10", least=0, steps=500)
    job.train(5)
    of_job = ("pgrep", "-f", f"python launch/pretrain.py .*--runs_dir {tmp_path}/runs")
    tasks = [int(line) for line in subprocess.run(of_job, capture_output=True, text=True).stdout.split()]
    tasks = [number for number in tasks if Path(f"/proc/{number}/comm").read_text().startswith("python")]
    os.kill(tasks[0], signal.SIGKILL)
    job.wait_until(lambda: job.field("JobState") == "COMPLETED")
    assert job.field("Restarts") == "0" and job.losses()[-1][0] == 500
