"""A pool of ranks: real processes in one real process group, started once and given one job after another.

A rank is forked from a process that has imported torch and DeepSpeed, and joins the group; a small configuration then trains in a second.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from launch.comparison.interleaved import free_port
from tests.commands import CONTEXT

JOB_SECONDS = 600.0
STOP_SECONDS = 3.0


def gpus() -> int:
    """How many CUDA GPUs this machine has."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def skip_without_gpus(ranks: int, device: str) -> None:
    """Skip the test if the ranks are to train on "cuda" and there are fewer GPUs: each rank needs its own."""
    if device == "cuda" and gpus() < ranks:
        pytest.skip(f"needs {ranks} GPUs, this machine has {gpus()}")


class Ranks:
    """`size` ranks on "cpu" or "cuda". `run("module:function", **arguments)` runs a function on all of them; its results by rank."""

    def __init__(self, size: int, device: str):
        skip_without_gpus(size, device)
        self.size, self.device = size, device
        self._processes: list[multiprocessing.Process] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, job: str, **arguments: Any) -> list[Any]:
        """Run `job` on all ranks. A rank that raises, dies or hangs fails the test and the pool is started anew."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a rank that died is named below
                pipe.send((job, arguments))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                # When one rank has failed, another that waits for it will never answer.
                answered = pipe.poll(5.0 if failures else JOB_SECONDS)
                good, result = pipe.recv() if answered else (False, "no answer")
            except (EOFError, OSError):
                good, result = False, "the rank died"
            results.append(result)
            if not good:
                failures.append(f"rank {rank}: {result}")
        if failures:
            self._stop()
            raise AssertionError("\n".join(failures))
        return results

    def train(self, flags: list[str]) -> list[dict[str, Any]]:
        """Pretrain with `flags` on all ranks. Returns the lines of the metrics."""
        return self.run("tests.distributed.jobs:pretrain", flags=flags)[0]

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, self.size, self.device, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # an idle rank then ends by itself
        for process in self._processes:
            process.join(STOP_SECONDS)
            process.kill()  # one that waits for another does not
            process.join()
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, device: str, port: int, pipe: Connection) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"DS_ACCELERATOR": device}
    from launch.training.ranks.distributed import start_ranks

    start_ranks()
    from tests.distributed.correction_jobs import remember_engine_as_shipped

    remember_engine_as_shipped()
    import torch

    from launch.training.run_folder import picture

    picture.draw_loss = picture.draw_experts = lambda lines, file, *_: file.touch()  # a third of a small run's time
    linear = torch.nn.functional.linear
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            return
        module, _, function = job.partition(":")
        try:
            pipe.send((True, getattr(importlib.import_module(module), function)(**arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        torch.nn.functional.linear = linear  # stage 3 replaces it, for good, by one that rounds before it adds the bias
