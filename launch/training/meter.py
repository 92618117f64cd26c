"""What a step took: time, memory, bytes on the wire, arithmetic; and the one reduction that a step makes for the log."""

from __future__ import annotations

import resource
import signal
import time
from typing import Any

import torch

from launch.config.steps import trained_flops_per_token
from launch.training.distributed import Collectives
from launch.training.engine import Engine
from launch.training.interleaving import Interleaving
from model.accounting import peak_flops


class Meter:
    """Measures the steps of one run on this rank.

    Args:
        seconds_before: what earlier parts of a resumed run took; `seconds()` goes on from there.
        interleaving: with other runs; the time that this run waits for them is not counted.

    Attributes:
        threads: with how many each rank computes on a CPU.
    """

    def __init__(self, engine: Engine, collectives: Collectives, seconds_before: float, interleaving: Interleaving):
        self.engine, self.collectives, self.interleaving = engine, collectives, interleaving
        self._start = time.monotonic() - seconds_before
        on_gpu = collectives.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(collectives.device) if on_gpu else "cpu"
        self.matmul_dtype = engine.technique.matmul_dtype or engine.config.precision
        self.peak_flops = peak_flops(self.device_name, self.matmul_dtype)
        self.threads = [round(threads) for threads in collectives.of_each(torch.get_num_threads())]

    def seconds(self) -> float:
        """Since the start of the run, over resumes, without the time spent waiting for interleaved runs."""
        return time.monotonic() - self._start

    def start_step(self) -> None:
        """Call before a step's first micro-batch. Waits for the runs that it is interleaved with."""
        self._start += self.interleaving.wait()
        self._step_start, self._bytes_before = time.perf_counter(), self.collectives.bytes_sent

    def agree(self, loss: torch.Tensor, stop_signal: int) -> tuple[float, int]:
        """Mean of `loss` over the ranks, and the signal on which all of them stop after this step (0: none).

        Ctrl-C comes before SIGTERM where ranks saw different ones: the launcher turns the one into the other.
        """
        shared = torch.stack(
            [
                loss.double(),
                *(
                    torch.tensor(float(stop_signal == number), dtype=torch.float64, device=loss.device)
                    for number in (signal.SIGINT, signal.SIGTERM)
                ),
            ]
        )  # (3,)
        total, interrupted, terminated = self.collectives.all_reduce(shared).tolist()
        stopped = signal.SIGINT if interrupted else signal.SIGTERM if terminated else 0
        return total / self.collectives.world_size, int(stopped)

    def end_step(self, tokens: int, technique: dict[str, float]) -> dict[str, Any]:
        """The step's measurements. Call after `agree`, whose result waited for the device.

        Args:
            tokens: of all ranks in this step.
            technique: what the techniques report of the step.
        """
        seconds = time.perf_counter() - self._step_start
        rate = tokens / seconds
        metrics = {
            **self.engine.step_metrics(),
            "tokens_per_second": rate,
            "step_seconds": seconds,
            "peak_memory_bytes": self._peak_memory(),
            "bytes_sent": round(self.collectives.bytes_sent - self._bytes_before),
        }
        per_token, of_all_blocks = trained_flops_per_token(self.engine.model_config, technique)
        if "kept_blocks" in technique:
            metrics["skipped_flops"] = 1 - per_token / of_all_blocks
        if self.peak_flops is not None:
            metrics["mfu"] = rate * per_token / (self.peak_flops * self.collectives.world_size)
        return metrics

    def _peak_memory(self) -> int:
        """Of this rank, since its start: the device's allocator on a GPU, the process on a CPU (ru_maxrss is in KiB on Linux)."""
        if self.collectives.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.collectives.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
