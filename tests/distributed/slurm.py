"""A Slurm of this machine alone: its controller and two nodes of two processors each, for the length of a test."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.comparison.interleaved import free_port

NODES = ("n1", "n2")
PATIENCE_SECONDS = 60.0
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=45
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def reason_for_no_slurm() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    if os.geteuid() != 0:
        return "starting Slurm needs root"
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed (slurm-wlm and munge of Debian)" if missing else ""


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `srun` and `sbatch` find a Slurm that runs inside."""
    if reason := reason_for_no_slurm():
        pytest.skip(reason)
    host = socket.gethostname()
    conf = folder / "slurm.conf"
    text = CONF.format(host=host, folder=folder, port=free_port())
    for name in NODES:
        text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 RealMemory=4000\n"
    conf.write_text(text)
    (folder / "state").mkdir()
    munge = folder / "munge"
    munge.mkdir()
    munge_key = munge / "key"
    munge_key.write_bytes(os.urandom(1024))
    munge_key.chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    own = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={munge}/socket", *own],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", name] for name in NODES),
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context(open(folder / f"{command[0]}-{command[-1].rpartition('/')[2]}.out", "wb"))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            stack.callback(_end, process)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while _idle_nodes(environment) < len(NODES):
            assert time.monotonic() < deadline, "".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.out")))
            time.sleep(0.2)
        yield environment


def _idle_nodes(environment: dict[str, str]) -> int:
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %T"], env=environment, capture_output=True, text=True)
    return done.stdout.split().count("idle")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
