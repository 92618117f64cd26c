"""Learns from the environment which rank this process is, whichever launcher started it: `deepspeed`, `torchrun`, `srun` or `mpirun`.

`deepspeed` and `torchrun` set torch's names: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. For a task of Slurm or MPI,
`learn_rank` sets them from the names of that launcher. All other code reads torch's names only.

| launcher | its names |
|---|---|
| `mpirun` of Open MPI | OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE |
| `mpirun` of MPICH and Intel MPI | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS |
| `srun` | SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_JOB_ID, SLURM_STEP_ID, SLURM_TASK_PID, |
|        | SLURM_STEP_NODELIST or SLURM_JOB_NODELIST, SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE |
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from launch.errors import UsageError

#: Torch's names for a rank, which `deepspeed` and `torchrun` set.
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: The port where ranks meet if the user has not set MASTER_PORT: torch's default, and for Slurm a port that depends on the job and its
#: step. The second step of a job does not get the port of the next job, which may run on the same host.
FIRST_PORT, SLURM_PORTS, PORTS_BETWEEN_STEPS = 29_500, 1_000, 101
#: The largest SLURM_STEP_ID that `srun` gives. Above it are Slurm's own steps, such as the shell of `salloc` (slurm/slurm.h,
#: SLURM_MAX_NORMAL_STEP_ID).
LAST_STEP = 0xFFFFFFF0
START = "start with deepspeed, torchrun, srun or mpirun"


class Task(NamedTuple):
    """The place of this process among the ranks, as `launcher` gives it. master: the host of rank 0; empty if it is not named."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    master: str = ""
    port: int = FIRST_PORT


def learn_rank() -> None:
    """If a launcher started this process as one of several, set torch's names in the environment, and for Slurm the number of threads.

    Raises:
        UsageError: names are missing, not numbers, or contradict each other.
    """
    environment = os.environ
    if (task := _task()) is not None:
        # A mistake is printed by one rank of a host, which `launch/errors.py` finds by this name.
        environment.setdefault("LOCAL_RANK", str(task.local_rank))
        if {"TORCHELASTIC_RUN_ID", "CROSS_RANK"} & set(environment):
            task = None  # inside the task, `torchrun` or `deepspeed` has started other ranks
    if task is not None and (task.size > 1 or "RANK" in environment):
        names = {"RANK": task.rank, "WORLD_SIZE": task.size, "LOCAL_RANK": task.local_rank, "LOCAL_WORLD_SIZE": task.local_size}
        for name, value in names.items():
            if environment.setdefault(name, str(value)) != str(value):
                raise UsageError(
                    f"the environment variable {name} is {environment[name]!r}, and {task.launcher} says {value}; unset {name}"
                )
        if not task.master and not environment.get("MASTER_ADDR") and task.size > task.local_size:
            raise UsageError(f"{task.launcher} does not name the first of several hosts; set MASTER_ADDR to the host of rank 0")
        if task.launcher == "srun" and (cores := environment.get("SLURM_CPUS_PER_TASK")):
            environment.setdefault("OMP_NUM_THREADS", cores)  # srun may not have bound the task to its cores
        environment["MASTER_ADDR"] = environment.get("MASTER_ADDR") or task.master or "127.0.0.1"
        environment["MASTER_PORT"] = environment.get("MASTER_PORT") or str(task.port)
    elif "RANK" in environment:
        if missing := [name for name in NAMES if not environment.get(name)]:
            raise UsageError(f"the environment names a rank, but {', '.join(missing)} is empty or not set; {START}, or unset RANK")
        rank, size, local_rank = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        _check(Task("the environment", rank, size, local_rank, size))


def ranks_of_host() -> int | None:
    """The number of ranks that the launcher started on this host; None without a launcher, or if it does not say."""
    return next((_number(name) for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE") if os.environ.get(name)), 0) or None


def require_launcher(ranks: int) -> None:
    """Refuse to train on one rank where the run is to have several.

    Args:
        ranks: of the resolved configuration.

    Raises:
        UsageError: no launcher started this process, and `ranks` or Slurm asks for more than one.
    """
    if "RANK" in os.environ:
        return
    if ranks > 1:
        asked = f"the environment variable WORLD_SIZE is {ranks}" if "WORLD_SIZE" in os.environ else f"the run has {ranks} ranks"
        raise UsageError(f"{asked}, but RANK is not set: training on several ranks needs a launcher; start deepspeed --num_gpus {ranks}")
    # Slurm sets SLURM_NTASKS in the batch script and in the shell of `salloc` too.
    if _task() is None and (tasks := _number("SLURM_NTASKS", 1)) > 1:
        raise UsageError(
            f"this process is in a Slurm job of {tasks} tasks, but is not one of them; "
            "start srun python launch/pretrain.py, or unset SLURM_NTASKS to train on one rank"
        )


def _task() -> Task | None:
    """The task of Slurm or MPI that this process is; None if neither started it."""
    environment = os.environ
    hydra = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # MPICH and Intel MPI
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _mpi_task(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
    # Before Slurm: inside a job, `mpirun` starts one task per host with `srun`, and the ranks inherit that task's names.
    if "MPI_LOCALRANKID" in environment:
        return _mpi_task(*hydra)
    if "SLURM_PROCID" in environment and _number("SLURM_STEP_ID", LAST_STEP + 1) <= LAST_STEP:
        return None if _typed_in_a_task() else _slurm_task()
    # After Slurm: `srun --mpi=pmi2` sets PMI_RANK too.
    return _mpi_task(*hydra) if "PMI_RANK" in environment else None


def _typed_in_a_task() -> bool:
    """Whether the user has typed this command in the shell of `srun --pty`, which is the task itself.

    Only `srun --pty` gives a task a terminal, and an interactive shell gives each command a process group of its own.
    """
    try:
        return os.isatty(0) and os.getpgrp() != os.getpgid(_number("SLURM_TASK_PID", 0))
    except OSError:  # a container does not see the processes outside
        return False


def _mpi_task(*names: str) -> Task:
    rank, size, local_rank, local_size = map(_number, names)
    return _check(Task("mpirun", rank, size, local_rank, local_size))


def _slurm_task() -> Task:
    environment = os.environ
    rank, size, local_rank, node = map(_number, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"))
    counts = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(size))
    local_size = counts[node] if node < len(counts) else 1
    master = "127.0.0.1"
    if len(counts) > 1:
        master = _first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
    job, step = (_number(name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = FIRST_PORT + (job + step * PORTS_BETWEEN_STEPS) % SLURM_PORTS
    return _check(Task("srun", rank, size, local_rank, local_size, master, port))


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's short form of the number of tasks of each node: "2(x3),1" is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        if (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)) is None:
            raise UsageError(f"the environment variable SLURM_TASKS_PER_NODE is {text!r}: it must be counts such as '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(hosts: str) -> str:
    """The first host of Slurm's short form: "node[07-09,12],gpu1" begins with node07."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\])?", hosts)
    if match is None:
        raise UsageError("srun set no SLURM_STEP_NODELIST; set MASTER_ADDR to the host of rank 0")
    return match[1] + (match[2] or "")


def _check(task: Task) -> Task:
    """Return `task`. Raises UsageError if its numbers contradict each other."""
    if not task.rank < task.size or not task.local_rank < task.local_size <= task.size:
        raise UsageError(
            f"{task.launcher} says that this process is rank {task.rank} of {task.size}, and {task.local_rank} of {task.local_size} on its "
            "host: a rank must be below the number of ranks, and a host has at most all of them; start all ranks with one launcher"
        )
    return task


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        what = f"is {text!r}" if name in os.environ else "is not set"
        raise UsageError(f"the environment variable {name} {what}: it must be a number, 0 or more; {START}")
    return int(text)
