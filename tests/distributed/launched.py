"""Runs started as people start them, `deepspeed launch/pretrain.py ...`, to be signalled, killed and resumed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from launch.comparison.interleaved import free_port
from launch.formats.metrics import read_metrics
from tests.distributed.ranks import skip_without_gpus

ROOT = Path(__file__).resolve().parents[2]
#: A model that is there in a second and makes a step in a hundredth of one.
TINY = ["--n_layer", "2", "--n_head", "2", "--d_model", "32", "--seq_len", "32", "--micro_batch_size", "1", "--eval_batches", "1"]
PATIENCE_SECONDS = 240.0


class LaunchedRun:
    """One `deepspeed` command in a process group of its own.

    Args:
        flags: of `launch/pretrain.py`, without those of `TINY`.
        ranks: how many the launcher starts.
        under: a command that runs the `deepspeed` command, e.g. `prlimit --fsize=...`.
        pass_fds: files that the command inherits.
    """

    def __init__(
        self,
        runs: Path,
        name: str,
        stage: int,
        ranks: int,
        flags: list[str],
        under: tuple[str, ...] = (),
        pass_fds: tuple[int, ...] = (),
        **environment: str,
    ):
        skip_without_gpus(ranks, os.environ["DS_ACCELERATOR"])
        self.folder = runs / name
        self.log = runs / f"{name}.{time.monotonic_ns()}.out"
        runs.mkdir(parents=True, exist_ok=True)
        launcher = ["deepspeed", "--num_gpus", ranks, "--master_port", free_port(), "--log_level", "error"]
        config = ["--deepspeed_config", f"ds_configs/zero{stage}_fp32.json", "--runs_dir", runs, "--run_name", name]
        command = [str(part) for part in (*under, *launcher, "launch/pretrain.py", *config, *TINY, *flags)]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PATH": path, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
            )

    # --- looking ------------------------------------------------------------------------------------------------------------------

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        return read_metrics(file) if file.exists() else []

    def last_step(self) -> int:
        lines = self.metrics()
        return lines[-1]["step"] if lines else 0

    def processes(self) -> list[psutil.Process]:
        """All that live of this job: the command, its launcher, the ranks and what they started."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def launcher(self) -> psutil.Process:
        """DeepSpeed's per-host launcher."""
        return self._with_word("deepspeed.launcher.launch")

    def rank(self, local_rank: int) -> psutil.Process:
        return self._with_word(f"--local_rank={local_rank}")

    def _with_word(self, word: str) -> psutil.Process:
        """The process with `word` in its command line. Other processes may end meanwhile."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in process.cmdline():
                    return process
        raise AssertionError(f"no process has {word}:\n{self.output()}")

    # --- doing --------------------------------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool]) -> LaunchedRun:
        """Until `condition` holds; fails when the job ends before it does."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output()}"
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.005)
        return self

    def wait_for_step(self, step: int) -> LaunchedRun:
        return self.wait_until(lambda: self.last_step() >= step)

    def wait(self, patience: float = PATIENCE_SECONDS) -> int:
        """The exit code of the `deepspeed` command as a shell shows it, once all processes of the job have ended."""
        code = self.process.wait(patience)
        deadline = time.monotonic() + 45.0
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind: {[process.cmdline() for process in left]}\n{self.output()}"
            time.sleep(0.02)
        return 128 - code if code < 0 else code

    def kill(self) -> None:
        """`kill -9` of all processes of the job, at once."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()


def curve(run: LaunchedRun) -> list[tuple[int, float]]:
    """(step, loss) of every line that has a loss, as they stand in the file."""
    return [(line["step"], line["loss"]) for line in run.metrics() if "loss" in line]
