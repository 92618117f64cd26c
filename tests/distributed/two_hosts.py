"""Two hosts on one Linux machine, joined by a cable of a chosen speed: to try what runs over a network where there is no second machine.

    with TwoHosts(folder, mbit=100) as hosts:
        steps = hosts.pretrain(folder / "runs", "r", "--deepspeed_config", "ds_configs/zero0_fp32.json", "--steps", "10")

A host is a set of Linux namespaces: its own network, processes and name, and an sshd with keys of its own. The cable is a veth pair, whose
ends `tc` holds to a rate. `deepspeed --hostfile hosts ...` runs on the first host as people run it, with host names, pdsh and ssh and no
flags for the occasion; checkout, environment and data are at the same paths on both, since the file system is the machine's.

The namespaces have no names, so that two jobs on one machine cannot meet, and nothing of the machine changes: what sshd and ssh read in
/etc and /run is mounted over, in the hosts only. A host lives as long as the first process in it, which the kernel kills with its parent,
and all others of the host with it: nothing stays, not even after `kill -9`. Nor do the processes of a host see any others, which matters:
`deepspeed`, when it is interrupted, ends by `pkill -f` every launcher that it finds on its hosts, of whatever job.

Needs root, and what `missing` names (Debian: apt install iproute2 openssh-server pdsh util-linux).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from launch.formats.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
#: Name and address of each host. No other machine sees them, so they are the same in every job.
HOSTS = (("host-0", "10.0.0.1"), ("host-1", "10.0.0.2"))
INTERFACE = "eth0"
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "taskset", "ssh", "ssh-keygen", "sshd", "pdsh", "hostname")
#: A user's path may lack what only root runs.
SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
UNSHARE = ("unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
PATIENCE_SECONDS = 20.0

# The first process of a host: $1 name, $2 address, $3 the folder of the hosts, $4 ~/.ssh, $5 sshd.
BOOT = """set -e
mount --bind "$3/ssh" /etc/ssh
mount --bind "$3/names" /etc/hosts
[ ! -d "$4" ] || mount -t tmpfs tmpfs "$4"    # what the user has told ssh about other hosts
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
hostname "$1"
ip link set lo up
echo ready
read -r plugged_in
ip link set eth0 addrgenmode none             # no IPv6, and none of its own chatter
ip address add "$2/24" dev eth0
ip link set eth0 up
exec "$5" -D -e -f /etc/ssh/sshd_config -o "ListenAddress=$2"
"""

SSHD_CONFIG = """HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/user_key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
"""

SSH_CONFIG = """Host *
    IdentityFile /etc/ssh/user_key
    BatchMode yes
    LogLevel ERROR
"""

# Both ends of a transfer: as much as arrives within a time, after a first part that a token bucket lets pass at any speed.
RECEIVE = """import socket, sys, time
with socket.create_server((sys.argv[1], 5001)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        connection.recv(1 << 20)
    start, received = time.monotonic(), 0
    while time.monotonic() < start + float(sys.argv[2]):
        received += len(connection.recv(1 << 20))
    print(received * 8e-6 / (time.monotonic() - start))
"""
SEND = """import contextlib, socket, sys
with contextlib.suppress(OSError), socket.create_connection((sys.argv[1], 5001)) as connection:
    while True:
        connection.sendall(bytes(1 << 18))
"""


def missing() -> str | None:
    """In one line, why two hosts cannot be had here; None where they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "two hosts on one machine need Linux and root"
    if lacks := [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]:
        return f"not installed: {', '.join(lacks)} (Debian: apt install iproute2 openssh-server pdsh util-linux)"
    if not Path("/etc/ssh").is_dir():
        return "there is no /etc/ssh, where the hosts' ssh would look"
    probe = f"tc qdisc add dev lo root {_shape(100)} && mount -t tmpfs tmpfs /run"
    done = subprocess.run([*UNSHARE, "sh", "-c", probe], capture_output=True, text=True, env={**os.environ, "PATH": SEARCHED})
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return f"namespaces with a link that tc's tbf shapes cannot be made here: {said}"
    return None


def _shape(mbit: int) -> str:
    """What `tc` makes of a link of `mbit` Mbit/s. A token bucket lets pass 8 ms of traffic, 256 KB at least, as fast as it comes."""
    return f"tbf rate {mbit}mbit burst {max(256, mbit)}kb latency 50ms"


class TwoHosts:
    """Two hosts, up inside of a `with`.

    Args:
        folder: an empty or missing one for keys, logs and the hostfile.
        mbit: Mbit/s of the cable, in each direction.
        cores: one for each host, on which all of its processes run; any where None.
        job_seconds: after which a job is taken for one that hangs.
    """

    def __init__(self, folder: Path, mbit: int, cores: tuple[int, int] | None = None, job_seconds: float = 300.0):
        self.folder, self.mbit, self.cores, self.job_seconds = folder, mbit, cores, job_seconds
        self._hosts: list[subprocess.Popen[str]] = []
        self._first: list[int] = []  # process id of each host's first process

    def __enter__(self) -> TwoHosts:
        try:
            self._write_files()
            for number in range(len(HOSTS)):
                self._boot(number)
            ends = [str(host.pid) for host in self._hosts]
            cable = ["ip", "link", "add", INTERFACE, "netns", ends[0], "type", "veth", "peer", "name", INTERFACE, "netns", ends[1]]
            subprocess.run(cable, check=True, env=self._environment())
            self.set_rate(self.mbit)
            for number, host in enumerate(self._hosts):
                host.stdin.write("\n")
                host.stdin.flush()
                self._wait(number, lambda number=number: "Server listening" in self._log(number).read_text(errors="replace"))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End both hosts, with all that runs on them."""
        for first in self._first:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(first).kill()
        for host in self._hosts:
            if len(self._first) < len(self._hosts):  # it never came up
                host.kill()
            host.wait(PATIENCE_SECONDS)
            host.stdin.close()
            host.stdout.close()
        self._hosts, self._first = [], []

    # --- the hosts ----------------------------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        """The hostfile, the names, and an /etc/ssh for both."""
        ssh = self.folder / "ssh"
        ssh.mkdir(parents=True)
        for key in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", ssh / key], check=True, env=self._environment())
        everyone = ",".join(word for host in HOSTS for word in host)
        (ssh / "ssh_known_hosts").write_text(f"{everyone} {(ssh / 'host_key.pub').read_text()}")
        (ssh / "sshd_config").write_text(SSHD_CONFIG)
        (ssh / "ssh_config").write_text(SSH_CONFIG)
        (self.folder / "names").write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in HOSTS))
        (self.folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name, _ in HOSTS))
        # ssh hands on no environment. DeepSpeed exports what this file says on every host.
        exports = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        exports |= {name: os.environ[name] for name in ("TORCH_EXTENSIONS_DIR",) if name in os.environ}
        (self.folder / "environment").write_text("".join(f"{name}={value}\n" for name, value in exports.items()))

    def _boot(self, number: int) -> None:
        pinned = ["taskset", "--cpu-list", str(self.cores[number])] if self.cores else []
        tied = ["setpriv", "--pdeathsig", "KILL"]  # to the life of this process
        of_user = Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".ssh"
        boot = ["sh", "-c", BOOT, "boot", *HOSTS[number], self.folder.resolve(), of_user, shutil.which("sshd", path=SEARCHED)]
        with open(self._log(number), "wb") as log:
            host = subprocess.Popen(
                [str(word) for word in (*pinned, *tied, *UNSHARE, *boot)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C is for this process, which then ends the hosts
            )
        self._hosts.append(host)
        if host.stdout.readline() != "ready\n":
            raise RuntimeError(f"{HOSTS[number][0]} does not come up:\n{self._log(number).read_text(errors='replace')}")
        self._first.append(psutil.Process(host.pid).children()[0].pid)

    def _log(self, number: int) -> Path:
        return self.folder / f"{HOSTS[number][0]}.log"

    def _wait(self, number: int, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self._hosts[number].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{HOSTS[number][0]} does not come up:\n{self._log(number).read_text(errors='replace')}")
            time.sleep(0.01)

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{SEARCHED}"}

    def command(self, number: int, *words: object) -> list[str]:
        """A command that runs `words` on a host, in the checkout."""
        return [str(word) for word in ("nsenter", "--target", self._first[number], "--all", "--", "env", "-C", ROOT, *words)]

    # --- the cable ----------------------------------------------------------------------------------------------------------------

    def set_rate(self, mbit: int) -> None:
        """Hold both directions to `mbit` Mbit/s from now on."""
        for first in self._first:
            shape = ["nsenter", "--target", str(first), "--net", "tc", "qdisc", "replace", "dev", INTERFACE, "root", *_shape(mbit).split()]
            subprocess.run(shape, check=True, env=self._environment())
        self.mbit = mbit

    def sent_bytes(self) -> tuple[int, ...]:
        """What each host's end of the cable has sent since it was plugged in, headers included: the kernel's own `tx_bytes`."""
        return tuple(self._sent(first) for first in self._first)

    @staticmethod
    def _sent(first: int) -> int:
        lines = Path(f"/proc/{first}/net/dev").read_text().splitlines()
        fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
        return int(fields[8])  # eight fields of what was received come first

    def measured_mbit(self, seconds: float = 2.0) -> float:
        """Mbit/s that arrive on the second host in one TCP connection from the first, headers not counted."""
        address = HOSTS[1][1]
        receive = self.command(1, sys.executable, "-c", RECEIVE, address, seconds)
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True, env=self._environment()) as receiver:
            receiver.stdout.readline()
            subprocess.run(self.command(0, sys.executable, "-c", SEND, address), check=True, env=self._environment())
            return float(receiver.stdout.read())

    # --- jobs ---------------------------------------------------------------------------------------------------------------------

    def deepspeed(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """`deepspeed --hostfile ... <arguments>` on the first host: a rank on each. A job that hangs takes the hosts along."""
        launcher = [Path(sys.executable).with_name("deepspeed"), "--hostfile", self.folder.resolve() / "hostfile", "--log_level", "error"]
        environment = {**self._environment(), "DS_ENV_FILE": str(self.folder.resolve() / "environment"), "DS_ACCELERATOR": "cpu"}
        words = self.command(0, *launcher, *arguments)
        try:
            return subprocess.run(
                words,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=self.job_seconds,
            )
        except BaseException:
            self.close()
            raise

    def pretrain(self, runs: Path, name: str, *flags: object) -> list[dict[str, Any]]:
        """The steps in `metrics.jsonl` of a run over both hosts. Raises RuntimeError, with its output, where it fails."""
        done = self.deepspeed("launch/pretrain.py", "--runs_dir", runs, "--run_name", name, *flags)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}:\n{done.stdout}")
        return [line for line in read_metrics(runs / name / "metrics.jsonl") if "loss" in line]
