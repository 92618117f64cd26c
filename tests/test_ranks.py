"""Which rank a process is, from the variables of `deepspeed`, `torchrun`, `srun` and `mpirun`; one line if they contradict each other."""

from __future__ import annotations

import os

import pytest

from launch.config.ranks import FIRST_PORT, NAMES, PORTS_BETWEEN_STEPS, learn_rank, require_launcher
from launch.errors import UsageError

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))}
ONE_OF_EACH_HOST = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
#: The fourth of five tasks: three on the first host, and two on the second.
SLURM = {
    "SLURM_JOB_ID": "1002",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "node[07-09,12],gpu1",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "1002", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "2"}
#: Of `salloc --nodes 1` with `LaunchParameters=use_interactive_step`: its shell is a step, and without `--ntasks` there is no SLURM_NTASKS.
SHELL = {name: value for name, value in BATCH_SCRIPT.items() if name != "SLURM_NTASKS"} | {"SLURM_STEP_ID": "4294967290"}


@pytest.fixture
def learnt(monkeypatch):
    """A function that returns torch's names, and LOCAL_WORLD_SIZE, as `learn_rank` leaves them in an environment."""

    def learn(*environments: dict[str, str], **names: str) -> dict[str, str]:
        started = ("SLURM", "PMI_", "MPI_", "OMPI_", "TORCHELASTIC")
        for name in [name for name in os.environ if name.startswith(started) or name in (*NAMES, "CROSS_RANK", "LOCAL_WORLD_SIZE")]:
            monkeypatch.delenv(name)
        values = {name: value for environment in (*environments, names) for name, value in environment.items()}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        before = dict(os.environ)
        try:
            learn_rank()
            return {name: os.environ[name] for name in (*NAMES, "LOCAL_WORLD_SIZE") if name in os.environ}
        finally:
            for name in (*NAMES, "LOCAL_WORLD_SIZE"):
                if name in os.environ and name not in before:
                    monkeypatch.setenv(name, os.environ.pop(name))  # so that it is removed after the test

    return learn


#: Where the ranks of SLURM meet.
PORT = FIRST_PORT + 2 + PORTS_BETWEEN_STEPS


def of(rank: int, size: int, local_rank: int, local_size: int, master: str = "127.0.0.1", port: int = FIRST_PORT) -> dict[str, str]:
    values = (rank, size, local_rank, master, port, local_size)
    return dict(zip((*NAMES, "LOCAL_WORLD_SIZE"), map(str, values), strict=True))


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({**SLURM, "SLURM_CPUS_PER_TASK": "8"}, "8"),
        ({**SLURM, "SLURM_CPUS_PER_TASK": "8", "OMP_NUM_THREADS": "3"}, "3"),
        ({**SLURM, "SLURM_CPUS_PER_TASK": "64", **TORCH, "CROSS_RANK": "1"}, None),
        (SLURM, None),
    ],
    ids=["srun", "chosen", "deepspeed in a task", "not given"],
)
def test_a_task_of_slurm_computes_with_its_own_cores(environment, threads, learnt, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")  # restored after the test, whatever it becomes
    learnt(environment)
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_a_process_without_a_launcher_is_alone(learnt):
    assert learnt() == {}
    require_launcher(1)


@pytest.mark.parametrize("marker", ["TORCHELASTIC_RUN_ID", "CROSS_RANK", "NOTHING"])
def test_torchs_names_are_taken_as_they_are(marker, learnt):
    assert learnt(TORCH, {marker: "0"}) == TORCH
    require_launcher(4)
    if marker != "NOTHING":  # a launcher inside a task starts ranks of its own
        assert learnt(SLURM, TORCH, {marker: "0"}) == TORCH


@pytest.mark.parametrize("environment", [OPEN_MPI, HYDRA])
def test_a_rank_of_mpirun(environment, learnt):
    assert learnt(environment) == of(1, 2, 1, 2)
    assert learnt(environment, MASTER_ADDR="b", MASTER_PORT="9") == of(1, 2, 1, 2, "b", 9)


def test_a_task_of_slurm(learnt):
    assert learnt(SLURM) == of(3, 5, 0, 2, "node07", PORT)
    one_host = {"SLURM_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_LOCALID": "3", "SLURM_STEP_NODELIST": "n1"}
    assert learnt(SLURM, one_host) == of(3, 5, 3, 5, port=PORT)
    repeated = {"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu1,node[1-3]"}
    assert learnt(SLURM, repeated, SLURM_LOCALID="1", SLURM_PROCID="3") == of(3, 7, 1, 2, "gpu1", PORT)


def test_jobs_on_one_host_meet_at_different_ports(learnt):
    """Jobs with successive numbers, and their steps: a run that starts again in its allocation is the next step."""
    ports = [learnt(SLURM, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step))["MASTER_PORT"] for job in range(995, 1011) for step in range(3)]
    assert len(set(ports)) == len(ports)


def test_mpirun_inside_a_slurm_job_is_mpirun(learnt):
    assert learnt(SLURM, OPEN_MPI) == of(1, 2, 1, 2)
    assert learnt(SLURM, HYDRA) == of(1, 2, 1, 2)
    assert learnt(SLURM, {"PMI_RANK": "3", "PMI_SIZE": "5"})["RANK"] == "3", "srun --mpi=pmi2 sets PMI_RANK too"


def test_the_shell_of_salloc_is_not_a_task(learnt):
    assert learnt(SHELL) == learnt(SHELL, SLURM_NTASKS="2") == {}
    assert learnt(SHELL, TORCH) == TORCH
    learnt(SHELL)
    require_launcher(1)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("started_by_a_shell", [True, False])
def test_a_command_in_the_shell_of_srun_pty_is_not_a_task(terminal, started_by_a_shell, learnt, monkeypatch):
    """A command that `srun --pty` itself or a script starts is in the process group of the task."""
    monkeypatch.setattr(os, "isatty", lambda file: terminal)
    monkeypatch.setattr(os, "getpgid", {7: 7 if started_by_a_shell else os.getpgrp()}.__getitem__)
    environment = {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "5", "SLURM_TASK_PID": "7"}
    if not (terminal and started_by_a_shell):
        assert learnt(environment)["RANK"] == "3"
        return
    assert learnt(environment) == {}
    with pytest.raises(UsageError, match=r"in a Slurm job of 5 tasks, .* start srun"):
        require_launcher(1)


def test_one_task_is_alone(learnt):
    one = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n1"}
    assert learnt(SLURM, one) == {"LOCAL_RANK": "0"}
    require_launcher(1)


@pytest.mark.parametrize(
    ("environments", "message"),
    [
        ([TORCH, {"RANK": "x"}], "RANK is 'x': it must be a number"),
        ([TORCH, {"RANK": "4"}], "the environment says that this process is rank 4 of 4, and"),
        ([TORCH, {"MASTER_PORT": ""}], "the environment names a rank, but MASTER_PORT is empty or not set"),
        ([OPEN_MPI, {"RANK": "0"}], "RANK is '0', and mpirun says 1; unset RANK"),
        ([{"RANK": "0"}], "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is empty or not set"),
        ([SLURM, TORCH], "RANK is '1', and srun says 3; unset RANK"),
        ([SLURM, {"WORLD_SIZE": "1"}], "WORLD_SIZE is '1', and srun says 5; unset WORLD_SIZE"),
        ([SLURM, {"SLURM_PROCID": "5"}], "srun says that this process is rank 5 of 5"),
        ([SLURM, {"SLURM_NTASKS": ""}], "SLURM_NTASKS is '': it must be a number"),
        ([SLURM, {"SLURM_LOCALID": "2"}], "and 2 of 2 on its host"),
        ([SLURM, {"SLURM_TASKS_PER_NODE": "two"}], "SLURM_TASKS_PER_NODE is 'two'"),
        ([SLURM, {"SLURM_STEP_NODELIST": ""}], "no SLURM_STEP_NODELIST; set MASTER_ADDR"),
        ([OPEN_MPI, ONE_OF_EACH_HOST], "mpirun does not name the first of several hosts; set MASTER_ADDR"),
        ([{"OMPI_COMM_WORLD_RANK": "1"}], "OMPI_COMM_WORLD_SIZE is not set"),
        ([HYDRA, {"MPI_LOCALNRANKS": "3"}], "rank 1 of 2, and 1 of 3 on its host"),
    ],
)
def test_contradictions_are_one_line(environments, message, learnt):
    with pytest.raises(UsageError) as refused:
        learnt(*environments)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "ranks", "message"),
    [
        ({}, 2, "the run has 2 ranks, but RANK is not set: training on several ranks needs a launcher"),
        ({"WORLD_SIZE": "2"}, 2, "WORLD_SIZE is 2, but RANK is not set"),
        *((script, 1, "in a Slurm job of 2 tasks, .* start srun") for script in (BATCH_SCRIPT, SHELL | {"SLURM_NTASKS": "2"})),
    ],
)
def test_a_run_of_several_ranks_does_not_train_alone(environment, ranks, message, learnt):
    learnt(environment)
    with pytest.raises(UsageError, match=message):
        require_launcher(ranks)
