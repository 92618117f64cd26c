"""Extensions are built once for all ranks, a killed build hangs nobody, and a run on CPU ranks builds none and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from deepspeed.accelerator import get_accelerator

from launch.training.deepspeed_fixes import start_up
from tests.distributed.launched import ROOT, LaunchedRun

NAME = "deepspeed_shm_comm"  # the smallest of DeepSpeed's extensions for CPUs
LOAD = "from launch.config.deepspeed_schema import quiet_deepspeed; from launch.training.deepspeed_fixes.start_up import load_extension;"
LOAD += "quiet_deepspeed(); load_extension('ShareMemCommBuilder')"


def test_ranks_read_the_cpu_before_they_wait_for_each_other(monkeypatch):
    """DeepSpeed asks twice for each extension, a second each time."""
    cpuinfo = pytest.importorskip("cpuinfo")
    asked: list[None] = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: asked.append(None) or {"arch": "X86_64", "flags": []})
    start_up._read_cpu_once.__wrapped__()
    assert len(asked) == 1
    builder = get_accelerator().create_op_builder("CPUAdamBuilder")
    builder.cpu_arch(), builder.simd_width()
    assert len(asked) == 1


def load(extensions: Path) -> subprocess.Popen:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(extensions), "PATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", LOAD], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.long
def test_two_ranks_build_once_after_a_build_that_was_killed(tmp_path):
    """Which leaves a lock, on which torch would wait for ever."""
    first = load(tmp_path)
    process = psutil.Process(first.pid)
    while not (compilers := [child for child in process.children(recursive=True) if child.name() == "cc1plus"]):
        assert first.poll() is None
        time.sleep(0.05)
    for victim in (process, *process.children(recursive=True), *compilers):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    first.wait()
    lock = tmp_path / NAME / "lock"
    assert lock.exists()
    ranks = [load(tmp_path), load(tmp_path)]
    said = "".join(rank.communicate(timeout=300)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said.count(f"Removing {lock}: the build that made it was killed") == 1
    assert said.count(f"Building DeepSpeed's extension {NAME} into {tmp_path}") == 1
    assert not lock.exists()


@pytest.mark.long
def test_a_run_on_cpu_ranks_builds_nothing_and_leaves_nothing_in_shared_memory(corpus, tmp_path):
    before = set(os.listdir("/dev/shm"))
    flags = f"--data {corpus} --global_batch_size 4 --steps 2 --eval_every 0".split()
    run = LaunchedRun(tmp_path / "runs", "r", 1, 2, flags, TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    assert run.wait() == 0, run.output()
    assert run.last_step() == 2
    assert not list(tmp_path.glob("extensions/*"))
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "deepspeed" in name}
