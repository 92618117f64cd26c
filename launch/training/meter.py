"""Measures each step: time, memory, bytes sent, FLOPs. Also reduces the loss and the stop signal, once per step."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from launch.training.engine import TrainingEngine
from launch.training.ranks.distributed import Collectives
from launch.training.ranks.interleaving import Interleaving
from launch.training.ranks.signals import STOPPING
from model.accounting import flops_per_token, peak_flops
from recipes.technique import StepWork


class Meter:
    """Measures the steps of one run on this rank.

    Args:
        seconds_before: the seconds of the run before it was resumed.
        on_lost: called when the command that interleaves the runs has ended.

    Attributes:
        threads: the number of threads that each rank computes with on a CPU.
    """

    def __init__(self, engine: TrainingEngine, collectives: Collectives, seconds_before: float, on_lost: Callable[[], None]):
        self.engine, self.collectives, self.interleaving = engine, collectives, Interleaving(on_lost)
        self._start = time.monotonic() - seconds_before
        on_gpu = collectives.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(collectives.device) if on_gpu else "cpu"
        self.matmul_dtype = engine.techniques.matmul_dtype or engine.config.precision
        self.peak_flops = peak_flops(self.device_name, self.matmul_dtype)
        self.threads: list[int] = collectives.gather(torch.get_num_threads())

    def seconds(self) -> float:
        """Seconds since the start of the run, over resumes, without waits for interleaved runs."""
        return time.monotonic() - self._start

    def start_step(self) -> None:
        """Call before a step's first micro-batch. Waits for the runs that it is interleaved with."""
        self._start += self.interleaving.wait()
        self._step_start, self._bytes_before = time.perf_counter(), self.collectives.bytes_sent

    def reduce_loss_and_signal(self, loss: torch.Tensor | float, own_signal: int) -> tuple[float, int]:
        """The mean of `loss` over the ranks, and the signal for which all of them stop after this step (0: none).

        If ranks got different signals, it is the first of them in `STOPPING`.
        """
        signals = [float(own_signal == number) for number in STOPPING]
        shared = torch.tensor([0.0, *signals], dtype=torch.float64, device=self.collectives.device)
        shared[0] = loss
        total, *ranks = self.collectives.all_reduce(shared).tolist()
        stop_signal = next((int(number) for number, count in zip(STOPPING, ranks, strict=True) if count), 0)
        return total / self.collectives.world_size, stop_signal

    def end_step(self, work: StepWork) -> dict[str, Any]:
        """The measurements of a step that followed `work`. Call after `reduce_loss_and_signal`, which waits for the device.

        Bytes that are sent between two steps, in evaluations and for checkpoints, belong to no step.
        """
        seconds = time.perf_counter() - self._step_start
        rate = work.tokens * self.engine.data_ranks / seconds
        metrics = {
            **self.engine.step_metrics(),
            "tokens_per_second": rate,
            "step_seconds": seconds,
            "peak_memory_bytes": self._peak_memory(),
            "bytes_sent": round(self.collectives.bytes_sent - self._bytes_before),
        }
        model = self.engine.config.model_config
        per_token = flops_per_token(model, work.seq_len, work.equivalent_blocks)
        metrics["flops"] = per_token * work.tokens * self.engine.data_ranks
        if work.equivalent_blocks is not None:
            metrics["skipped_flops"] = 1 - per_token / flops_per_token(model, work.seq_len)
        if self.peak_flops is not None:
            metrics["mfu"] = rate * per_token / (self.peak_flops * self.collectives.world_size)
        return metrics

    def _peak_memory(self) -> int:
        """Peak bytes of this rank since its start: of the device's allocator on a GPU, of the process on a CPU."""
        if self.collectives.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.collectives.device)
        return peak_of_process()


def peak_of_process() -> int:
    """Peak resident bytes of this process.

    Not ru_maxrss, which begins with the peak of the process that started this one (Linux, fs/exec.c); only where /proc has no VmHWM.
    """
    high = Path("/proc/self/status").read_bytes().partition(b"VmHWM:")[2].split(maxsplit=1)  # both are in KiB
    return 1024 * (int(high[0]) if high else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
