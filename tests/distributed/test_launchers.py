"""Every launcher starts the same run: the losses of `torchrun`, `mpirun` and `srun` are those of `deepspeed`, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.comparison.interleaved import free_port
from launch.formats.metrics import read_metrics
from launch.training.ranks.distributed import share_of_cores
from tests.distributed.launched import ROOT, TINY
from tests.distributed.slurm import running_slurm
from tests.helpers import resumed_after, rewind

STEPS = 6
CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with running_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def losses(
    launcher: list[str], corpus: Path, runs: Path, environment: dict[str, str] | None = None, resumed: bool = False
) -> list[tuple[int, float]]:
    """(step, loss) of a run of two ranks that `launcher` starts; if `resumed`, the launcher continues it from step 3 by its folder."""
    flags = f"--deepspeed_config ds_configs/zero2_fp32.json --data {corpus} --runs_dir {runs} --run_name r --global_batch_size 4".split()
    flags += [*TINY, "--steps", str(STEPS), "--eval_every", "0", "--save_every", "3"]
    values = {key: value for key, value in (environment or os.environ).items() if key not in CLEAN} | {"OMP_NUM_THREADS": "1"}
    values["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{values['PATH']}"
    for more in (flags, ["--resume", str(runs / "r")]) if resumed else (flags,):
        done = subprocess.run([*launcher, "launch/pretrain.py", *more], cwd=ROOT, env=values, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        if resumed and more is flags:
            rewind(runs / "r", 3)
    assert not resumed or resumed_after(runs / "r") == 3
    return [(line["step"], line["loss"]) for line in read_metrics(runs / "r" / "metrics.jsonl") if "loss" in line]


def deepspeed() -> list[str]:
    return ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "--log_level", "error"]


def torchrun() -> list[str]:
    return ["torchrun", "--nproc_per_node", "2", "--master_port", str(free_port())]


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    found = losses(deepspeed(), corpus, tmp_path_factory.mktemp("deepspeed"))
    assert len({loss for _, loss in found}) == STEPS
    return found


@pytest.mark.gate
def test_torchrun(expected, corpus, tmp_path):
    assert losses(torchrun(), corpus, tmp_path) == expected


@pytest.mark.long
@pytest.mark.parametrize("launcher", [deepspeed, torchrun])
def test_a_run_continues_by_its_folder(launcher, expected, corpus, tmp_path):
    assert losses(launcher(), corpus, tmp_path, resumed=True) == expected


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        ([("a", {0, 1})], [2]),
        ([("a", {0, 1, 2, 3})] * 2, [2, 2]),
        ([("a", {0, 1, 2, 3}), ("a", {4, 5, 6, 7})], [4, 4]),  # `mpirun` binds each rank to its own cores
        ([("a", {0, 1, 2, 3}), ("b", {0, 1, 2, 3})], [4, 4]),
        ([("a", {0, 1})] * 2 + [("a", {2, 3, 4, 5})], [1, 1, 4]),
        ([("a", set(range(98)))] * 49, [2] * 49),
        ([("a", {0})] * 4, [1] * 4),
    ],
    ids=["one rank", "unbound", "bound", "two hosts", "bound in part", "many", "too many"],
)
def test_each_rank_has_its_share_of_the_cores(cores, threads):
    assert [share_of_cores(cores, rank) for rank in range(len(cores))] == threads


def test_a_bound_rank_computes_with_all_its_cores(two_ranks):
    assert two_ranks.run("tests.distributed.jobs:threads_when_bound", cores=[[0, 1, 2], [3, 4, 5, 6]]) == [3, 4]


@pytest.mark.long
def test_mpirun(expected, corpus, tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (openmpi-bin of Debian)")
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "-x", f"MASTER_PORT={free_port()}", sys.executable]
    assert losses(launcher, corpus, tmp_path, resumed=True) == expected


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
def test_srun(nodes, expected, slurm, corpus, tmp_path):
    launcher = ["srun", "--kill-on-bad-exit=1", "--nodes", str(nodes), "--ntasks", "2"]
    if nodes == 2:  # the names of these nodes are known to Slurm only
        launcher += ["--export", f"ALL,MASTER_ADDR=127.0.0.1,MASTER_PORT={free_port()}"]
    assert losses([*launcher, sys.executable], corpus, tmp_path, slurm, resumed=True) == expected


@pytest.mark.long
def test_the_batch_script_of_several_tasks_does_not_train_alone(slurm, corpus, tmp_path):
    script = tmp_path / "job.sh"
    flags = f"--deepspeed_config {ROOT}/ds_configs/zero2_fp32.json --data {corpus} --runs_dir {tmp_path} --run_name r --steps 2"
    script.write_text(f"#!/bin/bash\n{sys.executable} {ROOT}/launch/pretrain.py {flags}\n")
    done = subprocess.run(
        ["sbatch", "--wait", "--ntasks", "2", "--output", tmp_path / "out", script], env=slurm, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2, (tmp_path / "out").read_text()
    assert "this process is in a Slurm job of 2 tasks" in (tmp_path / "out").read_text()
    assert not (tmp_path / "r").exists()
