"""The computation of compressed optimizers, without a network: a compressed all-reduce and whole steps against torch's fused AdamW.

    python recipes/one_bit_adam/benchmark.py                    # 14 M parameters, two ranks, one core; a few seconds
    python recipes/one_bit_adam/benchmark.py --ranks 64 --parameters 124000000

One process does the work of one rank: it receives its own data, as if all ranks had sent the same. The tensors are those of a GPT of that
size. Interleaved: the reduction alone, AdamW's fused step, LAMB's, the steps of 1-bit Adam and 1-bit LAMB with their variance frozen,
reduction included, and of 0/1 Adam with and without an exchange.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks import report
from launch.config.flags import whole_number
from model.accounting import model_tensors, parameter_count
from model.presets import GPTConfig
from recipes.compressed_all_reduce import CompressedAllReduce
from recipes.lamb.optimizer import Lamb
from recipes.one_bit_adam.optimizer import CompressedAdam
from recipes.one_bit_lamb.optimizer import CompressedLamb
from recipes.zero_one_adam.optimizer import LocalStepAdam

QUICK = ("--rounds", "10", "--parameters", "2000000")


class Echo:
    """Collectives of `world_size` ranks that all send the same."""

    rank = 0

    def __init__(self, world_size: int):
        self.world_size = world_size

    def all_to_all(self, received: Any, sent: Any) -> None:
        received.copy_(sent[:1].expand_as(received))

    def all_gather(self, received: Any, sent: Any) -> None:
        received.copy_(sent.expand_as(received))


def tensors(parameters: int) -> list[tuple[int, ...]]:
    """The shapes of the smallest GPT of at least this many parameters: 8,192 tokens, 256 positions, width 64 times the number of blocks."""
    configs = (GPTConfig(n_layer=n, n_head=n, d_model=64 * n, seq_len=256, vocab_size=8192) for n in itertools.count(1))
    return list(model_tensors(next(config for config in configs if parameter_count(config) >= parameters)).values())


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Time all optimizers and return one record."""
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    parameters = [torch.randn(shape, device=device, generator=generator) for shape in tensors(arguments.parameters)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)
    collectives, common = Echo(arguments.ranks), (1e-5, (0.9, 0.999), 1e-8, 0.1)
    reduction = CompressedAllReduce([parameter.numel() for parameter in parameters], collectives, device)
    for view, parameter in zip(reduction.views, parameters, strict=True):
        view.copy_(parameter.grad.view(-1))  # type: ignore[union-attr]
    compressed: dict[str, Any] = {"1-bit Adam": CompressedAdam, "1-bit LAMB": CompressedLamb, "0/1 Adam": LocalStepAdam}
    for name, kind in compressed.items():
        compressed[name] = optimizer = kind([{"params": parameters}], *common)
        optimizer.bind(collectives)
        optimizer.step()
    compressed["1-bit Adam"].compressing = compressed["1-bit LAMB"].compressing = True

    def step_of_zero_one(exchanges: bool) -> None:
        compressed["0/1 Adam"].updates_variance, compressed["0/1 Adam"].exchanges = False, exchanges
        compressed["0/1 Adam"].step()

    sides: dict[str, Callable[[], Any]] = {
        "fused AdamW": torch.optim.AdamW(parameters, lr=1e-5, fused=True).step,
        "compressed reduction": reduction.reduce,
        "1-bit Adam, reduction included": compressed["1-bit Adam"].step,
        "1-bit LAMB, reduction included": compressed["1-bit LAMB"].step,
        "LAMB": Lamb([{"params": parameters}], *common).step,
        "0/1 Adam without an exchange": functools.partial(step_of_zero_one, False),
        "0/1 Adam with an exchange": functools.partial(step_of_zero_one, True),
    }
    seconds = report.interleave(sides, arguments.rounds, 3)
    count = sum(parameter.numel() for parameter in parameters)
    rows, base = [], seconds.pop("fused AdamW")
    print(f"fused AdamW: {1e3 * statistics.median(base):.1f} ms")
    for name, times in seconds.items():
        median, quartiles = report.ratio(times, base)
        what = f"{name} / fused AdamW, {count / 1e6:.0f} M parameters"
        rows.append(report.Row(what, f"{median:.2f} ({1e3 * statistics.median(times):.1f} ms)", quartiles))
    spreads = {name: report.spread(times) for name, times in {"fused AdamW": base, **seconds}.items()}
    yield rows, {"parameters": count, "ranks": arguments.ranks, "threads": arguments.threads, "sides": spreads}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--parameters", type=whole_number(1), default=11_000_000, help="least number of parameters (%(default)s)")
    parser.add_argument("--ranks", type=whole_number(1), default=2, help="ranks of the job (%(default)s)")
    parser.add_argument("--rounds", type=whole_number(2), default=30, help="rounds that are counted (%(default)s)")
    parser.add_argument("--threads", type=whole_number(1), default=1, help="threads on a CPU (%(default)s)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
