"""Over a network: two hosts with a rank each, under `deepspeed --hostfile`. Skipped, with the reason, where such hosts cannot be made."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from launch.formats.metrics import read_metrics
from tests.distributed.launched import LaunchedRun, curve
from tests.distributed.two_hosts import HOSTS, ROOT, TwoHosts, missing

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
# 4 blocks x 12 x 160^2 + 1,024 tokens x 160 + 32 positions x 160 = 1.4 M parameters
MODEL = ["--n_layer", "4", "--n_head", "4", "--d_model", "160", "--seq_len", "32", "--global_batch_size", "4", "--micro_batch_size", "2"]
SHORT, LONG = 8, 28
#: In both runs compressed from the sixth step on.
ONE_BIT = ("--set", "bf16.enabled=false", "--set", "optimizer.params.freeze_step=5")


class NetworkRun(NamedTuple):
    """The steps of a run over both hosts, and what each host's end of the cable sent from its start to its end."""

    steps: list[dict[str, Any]]
    sent: tuple[int, ...]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with TwoHosts(tmp_path_factory.mktemp("two") / "hosts", mbit=1000) as up:
        yield up


@pytest.fixture(scope="module")
def train(hosts, corpus, tmp_path_factory) -> Callable[..., NetworkRun]:
    """`train(config, steps, *flags)`: a run over both hosts at 1 Gbit/s, once for all who ask for it."""

    @functools.cache
    def train(config: str, steps: int, *flags: str) -> NetworkRun:
        hosts.set_rate(1000)
        before = hosts.sent_bytes()
        run = ["--data", corpus, "--steps", steps, "--eval_every", 0, "--quiet", *MODEL, *flags]
        lines = hosts.pretrain(tmp_path_factory.mktemp("runs"), "r", "--deepspeed_config", f"ds_configs/{config}.json", *run)
        return NetworkRun(lines, tuple(b - a for a, b in zip(before, hosts.sent_bytes(), strict=True)))

    return train


@pytest.mark.long
def test_two_hosts_train_what_two_ranks_of_one_host_train(train, corpus, tmp_path):
    two = [(line["step"], line["loss"]) for line in train("zero0_fp32", SHORT).steps]
    flags = ["--data", str(corpus), "--steps", str(SHORT), "--eval_every", "0", *MODEL]
    one = LaunchedRun(tmp_path, "one", stage=0, ranks=2, flags=flags)
    assert one.wait() == 0, one.output()
    assert len(two) == SHORT
    assert two == [(step, pytest.approx(loss, abs=1e-6)) for step, loss in curve(one)]


class TorchRuns:
    """`torchrun` on both hosts, with a rank each, which find each other on the first host (`--rdzv_backend c10d`)."""

    def __init__(self, hosts: TwoHosts, folder: Path, restarts: int, *flags: object):
        self.folder, self.out = folder / "runs" / "r", folder / "out"
        torchrun = [Path(sys.executable).with_name("torchrun"), "--nnodes", 2, "--nproc_per_node", 1, "--max-restarts", restarts]
        torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{HOSTS[0][1]}:29400", "--rdzv_id", folder.name]
        run = ["launch/pretrain.py", "--deepspeed_config", "ds_configs/zero1_fp32.json", "--runs_dir", folder / "runs", "--run_name", "r"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        with open(self.out, "wb") as out:
            self.launchers = [
                subprocess.Popen(hosts.command(number, *torchrun, *run, *MODEL, *flags), env=environment, stdout=out, stderr=out)
                for number in range(len(HOSTS))
            ]

    def losses(self) -> list[tuple[int, float]]:
        file = self.folder / "metrics.jsonl"
        return [(line["step"], line["loss"]) for line in read_metrics(file) if "loss" in line] if file.exists() else []

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120.0
        while not self.losses() or self.losses()[-1][0] < step:
            assert time.monotonic() < deadline and all(launcher.poll() is None for launcher in self.launchers), self.out.read_text()
            time.sleep(0.05)

    def rank(self, host: int) -> psutil.Process:
        """The rank on a host: a process of the namespace, as this machine sees it."""
        theirs = psutil.Process(self.launchers[host].pid).children(recursive=True)
        return next(process for process in theirs if process.cmdline()[1:3] == ["-u", "launch/pretrain.py"])

    def wait(self) -> list[int]:
        return [launcher.wait(200.0) for launcher in self.launchers]


@pytest.mark.long
def test_torchrun_on_two_hosts_has_the_losses_of_one_host_bit_for_bit_also_after_a_killed_and_a_stopped_rank(hosts, corpus, tmp_path):
    hosts.set_rate(1000)
    flags = ["--data", str(corpus), "--steps", "60", "--eval_every", "0", "--save_every", "10"]
    one = LaunchedRun(tmp_path, "one", stage=1, ranks=2, flags=[*flags, *MODEL])
    assert one.wait() == 0, one.output()
    runs = TorchRuns(hosts, tmp_path, 2, *flags, "--resume", "--hang_timeout", "15")
    runs.wait_for_step(14)
    runs.rank(1).kill()
    time.sleep(2.0)
    said = "resuming after step"
    deadline = time.monotonic() + 120.0
    while said not in (runs.folder / "log.txt").read_text():
        assert time.monotonic() < deadline, runs.out.read_text()
        time.sleep(0.1)
    runs.wait_for_step(24)
    runs.rank(1).suspend()
    assert runs.wait() == [0, 0], runs.out.read_text()
    assert runs.losses() == curve(one)
    assert (runs.folder / "log.txt").read_text().count(said) == 2
    assert "rank 1 (host-1, " in runs.out.read_text()


@pytest.mark.long
@pytest.mark.parametrize(("config", "flags"), [("zero0_fp32", ()), ("one_bit_adam", ONE_BIT)])
def test_the_network_carries_what_a_step_says_it_sends(train, config, flags):
    """`bytes_sent` against the kernel's counters, within 10%: headers, acknowledgements and gloo's own messages are not in `bytes_sent`.

    Of a short and a long run: start, the broadcast of the weights and the end are the same in both, and 20 steps remain.
    """
    short, long = train(config, SHORT, *flags), train(config, LONG, *flags)
    if flags == ONE_BIT:
        whole, compressed = (long.steps[index]["bytes_sent"] for index in (0, -1))
        assert compressed <= whole / 30
    said = sum(line["bytes_sent"] for line in long.steps) - sum(line["bytes_sent"] for line in short.steps)
    for host in range(2):
        assert long.sent[host] - short.sent[host] == pytest.approx(said, rel=0.1)


@pytest.mark.parametrize("mbit", [100, 1000])
def test_the_cable_is_as_fast_as_it_was_set(hosts, mbit):
    hosts.set_rate(mbit)
    # 1,448 of 1,514 bytes of a packet are payload: 95.6%
    assert 0.9 * mbit < hosts.measured_mbit(1.0) < mbit


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_hosts_end_with_the_process_that_made_them(tmp_path, ended_by):
    code = (
        "import sys, time; from pathlib import Path; from tests.distributed.two_hosts import TwoHosts\n"
        "with TwoHosts(Path(sys.argv[1]), mbit=100): print('up', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "hosts")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as owner:
        assert owner.stdout.readline() == b"up\n"
        theirs = psutil.Process(owner.pid).children(recursive=True)
        assert sum("sshd" in process.name() for process in theirs) == 2
        owner.send_signal(ended_by)
    deadline = time.monotonic() + 10.0
    while alive := [process for process in theirs if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)
