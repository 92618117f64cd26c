"""Learns from the environment which rank this process is, whichever launcher started it: `deepspeed`, `torchrun`, `srun` or `mpirun`.

`deepspeed` and `torchrun` set torch's names: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. For a task of Slurm or MPI,
`learn_rank` sets them from the names of that launcher. Everything after it reads torch's names only.

| launcher | its names |
|---|---|
| `mpirun` of Open MPI | OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE |
| `mpirun` of MPICH and Intel MPI | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS |
| `srun` | SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_JOB_ID, SLURM_STEP_ID, |
|        | SLURM_STEP_NODELIST or SLURM_JOB_NODELIST, SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from launch.errors import UsageError

#: Torch's names for a rank, which `deepspeed` and `torchrun` set.
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: The port where ranks meet if the user has not set MASTER_PORT: torch's default, and for Slurm a port that depends on the job.
FIRST_PORT, SLURM_PORTS = 29_500, 1_000
#: The largest SLURM_STEP_ID that `srun` gives. Above it are Slurm's own steps, such as the shell of `salloc` (slurm/slurm.h,
#: SLURM_MAX_NORMAL_STEP_ID).
LAST_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Place:
    """Which rank a launcher started.

    Attributes:
        launcher: its name.
        names: the variables that hold `rank` and `size`.
        master: the host of rank 0; None if the launcher does not name it.
    """

    launcher: str
    names: tuple[str, str]
    rank: int
    size: int
    local_rank: int
    local_size: int
    master: str | None
    port: int = FIRST_PORT


def learn_rank() -> None:
    """Set torch's names in the environment, if a launcher started this process as one of several, and the threads of a task of Slurm.

    Raises:
        UsageError: names are missing, are no numbers, or contradict each other.
    """
    environment = os.environ
    place = _place(environment)
    # A mistake is printed by one rank of a host, which `launch/errors.py` finds by this name.
    if place is not None:
        environment.setdefault("LOCAL_RANK", str(place.local_rank))
    # `torchrun` and `deepspeed` start ranks of their own inside a task.
    if place is not None and not {"TORCHELASTIC_RUN_ID", "CROSS_RANK"} & set(environment):
        _compare(environment, place)
    if "RANK" in environment:
        _check(environment, place)
        return
    if place is None:
        return
    if place.size == 1:
        return
    if "MASTER_ADDR" not in environment and place.master is None and place.size > place.local_size:
        raise UsageError(
            f"{place.launcher} started {place.size} ranks on several hosts, and does not name the first host; "
            "set MASTER_ADDR to the host of rank 0"
        )
    if place.launcher == "srun" and (cores := environment.get("SLURM_CPUS_PER_TASK")):
        environment.setdefault("OMP_NUM_THREADS", cores)  # srun may bind each task to its own cores, which nobody divides again
    environment |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or place.master or "127.0.0.1",
        "MASTER_PORT": environment.get("MASTER_PORT") or str(place.port),
    }


def ranks_of_host() -> int | None:
    """How many ranks the launcher started on this host; None without a launcher, or if it does not say."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 0) or None


def require_launcher(ranks: int) -> None:
    """Refuse to train on one rank where the run is to have several.

    Args:
        ranks: of the resolved configuration: WORLD_SIZE, or `--ranks`.

    Raises:
        UsageError: no launcher started this process, and `ranks` or Slurm asks for more than one.
    """
    environment = os.environ
    if "RANK" in environment:
        return
    if ranks > 1:
        asked = (
            f"the environment variable WORLD_SIZE is {ranks}, and RANK is not set" if "WORLD_SIZE" in environment else f"--ranks {ranks}"
        )
        raise UsageError(f"{asked}: only --explain takes it without a launcher; start deepspeed --num_gpus {ranks}")
    # Slurm sets SLURM_NTASKS in the batch script and in the shell of `salloc` too.
    if _place(environment) is None and (tasks := _number(environment, "SLURM_NTASKS", 1)) > 1:
        raise UsageError(
            f"this process is in a Slurm job of {tasks} tasks, and is not one of its tasks; "
            "start srun python launch/pretrain.py, or unset SLURM_NTASKS to train on one rank"
        )


def _place(environment: Mapping[str, str]) -> Place | None:
    """What Slurm or MPI says; None for a process that neither started."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _mpi_place(environment, *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
    # Before Slurm: inside a job, `mpirun` starts one task per host with `srun`, and the ranks inherit that task's names.
    if "MPI_LOCALRANKID" in environment:
        return _hydra_place(environment)
    if "SLURM_PROCID" in environment and _number(environment, "SLURM_STEP_ID", LAST_STEP + 1) <= LAST_STEP:
        return _slurm_place(environment)
    # After Slurm: `srun --mpi=pmi2` sets PMI_RANK too.
    return _hydra_place(environment) if "PMI_RANK" in environment else None


def _hydra_place(environment: Mapping[str, str]) -> Place:
    """MPICH and Intel MPI."""
    return _mpi_place(environment, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _mpi_place(environment: Mapping[str, str], *names: str) -> Place:
    rank, size, local_rank, local_size = (_number(environment, name) for name in names)
    return _valid(Place("mpirun", (names[0], names[1]), rank, size, local_rank, local_size, master=None))


def _slurm_place(environment: Mapping[str, str]) -> Place:
    rank, size, local_rank, node = (
        _number(environment, name) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")
    )
    counts = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(size))
    local_size = counts[node] if node < len(counts) else 1
    several = len(counts) > 1
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    # A job may run several steps at a time.
    job = sum(int(environment[name]) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if environment.get(name, "").isdecimal())
    names = ("SLURM_PROCID", "SLURM_NTASKS")
    master = _first_host(hosts) if several else "127.0.0.1"
    return _valid(Place("srun", names, rank, size, local_rank, local_size, master, FIRST_PORT + job % SLURM_PORTS))


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


def _valid(place: Place) -> Place:
    """`place`, if its numbers fit together."""
    rank, size = place.names
    if not place.rank < place.size:
        raise UsageError(
            f"the environment variable {rank} is {place.rank}, and {size} is {place.size}: a rank must be below the number of ranks"
        )
    if not place.local_rank < place.local_size <= place.size:
        raise UsageError(
            f"{place.launcher} gave this process local rank {place.local_rank} of {place.local_size} on its host, "
            f"and {place.size} ranks in all; start all ranks with one {place.launcher}"
        )
    return place


def _check(environment: Mapping[str, str], place: Place | None) -> None:
    """Refuse torch's names where one is missing or no number, or they do not fit together. `place`: what Slurm or MPI says."""
    fix = (
        f"unset RANK, because {place.launcher} says which rank this is"
        if place
        else "start with deepspeed, torchrun, srun or mpirun, or unset RANK to train on one rank"
    )
    if not environment["RANK"]:
        raise UsageError(f"the environment variable RANK is empty; {fix}")
    if missing := [name for name in NAMES if not environment.get(name)]:
        raise UsageError(
            f"the environment variable RANK is set, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not; {fix}"
        )
    rank, size, local_rank = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not rank < size:
        raise UsageError(f"the environment variable RANK is {rank}, and WORLD_SIZE is {size}: a rank must be below the number of ranks")
    if not local_rank < size:
        raise UsageError(
            f"the environment variable LOCAL_RANK is {local_rank}, and WORLD_SIZE is {size}: it must be below the number of ranks"
        )


def _compare(environment: Mapping[str, str], place: Place) -> None:
    """Refuse torch's names where Slurm or MPI says something else."""
    for name, theirs, value in (("RANK", place.names[0], place.rank), ("WORLD_SIZE", place.names[1], place.size)):
        if name in environment and environment[name] != str(value):
            raise UsageError(
                f"the environment variable {name} is {environment[name]}, and {theirs} of {place.launcher} is {value}; unset {name}"
            )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal()):
        what = f"is {text!r}" if name in environment else "is not set"
        raise UsageError(
            f"the environment variable {name} {what}: it must be a number, 0 or more; start with deepspeed, torchrun, srun or mpirun"
        )
    return int(text)
