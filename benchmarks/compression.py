"""What compressing costs by itself: a rank's work in a compressed all-reduce, without a network, beside torch's fused AdamW.

    python benchmarks/compression.py                    # 11 M parameters, two ranks, one core; a few seconds
    python benchmarks/compression.py --ranks 64 --parameters 124000000

The other ranks are played by this one: what it sends comes back to it as if they all had sent the same. So the work is that of a rank of a
real job (its own tensors to compress, all ranks' messages of its chunk to add up and to compress, all chunks to expand), on the tensors
of a GPT of that size. In turns, on the same machine: the reduction, AdamW's fused update of the same tensors, LAMB's, the whole updates
of 1-bit Adam and 1-bit LAMB with their variance frozen, reduction included, and a step alone and an exchange of 0/1 Adam.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

QUICK = ("--turns", "10", "--parameters", "2000000")


def rows(record: dict[str, Any]) -> list[Row]:
    base, what = record["sides"]["adamw"]["median_ms"], f"{record['parameters'] / 1e6:.0f} M parameters"
    names = {"reduction": "compressed reduction", "one_bit_adam": "1-bit Adam, reduction included", "lamb": "LAMB"}
    sides = {f"{name} / fused AdamW, {what}": record["sides"][key] for key, name in names.items() if key in record["sides"]}
    return [
        Row(name, f"{side['median_ms'] / base:.2f}", [side[f"{end}_quartile_ms"] / base for end in ("lower", "upper")])
        for name, side in sides.items()
    ]


class Echo:
    """The way to `world_size` - 1 other ranks that send what this one sends."""

    rank = 0

    def __init__(self, world_size: int):
        self.world_size = world_size

    def all_to_all(self, received: Any, sent: Any) -> None:
        received.copy_(sent[:1].expand_as(received))

    def all_gather(self, received: Any, sent: Any) -> None:
        received.copy_(sent.expand_as(received))


def tensors(parameters: int) -> list[tuple[int, ...]]:
    """The shapes of a GPT of about this many parameters: 8,192 tokens, 64 wide for each block, 256 positions."""
    layers = 1
    while 12 * layers * (64 * layers) ** 2 + 8448 * 64 * layers < parameters:
        layers += 1
    d = 64 * layers
    block = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d), (3 * d,), (d,), (4 * d,), *[(d,)] * 5]
    return [(8192, d), (256, d), *(block * layers), (d,), (d,)]


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--parameters", type=int, default=11_000_000, help="about how many (11,000,000)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the job (2)")
    parser.add_argument("--turns", type=int, default=30, help="turns that are counted (30)")
    parser.add_argument("--threads", type=int, default=1, help="threads, on a CPU (1)")
    arguments = parser.parse_args()
    os.chdir(ROOT)

    import torch

    from benchmarks.report import append, device_name, spread
    from recipes.compressed_all_reduce import CompressedAllReduce
    from recipes.lamb.optimizer import Lamb
    from recipes.one_bit_adam.optimizer import CompressedAdam
    from recipes.one_bit_lamb.optimizer import CompressedLamb
    from recipes.zero_one_adam.optimizer import LocalStepAdam

    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    parameters = [torch.randn(shape, device=device, generator=generator) for shape in tensors(arguments.parameters)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)
    count = sum(parameter.numel() for parameter in parameters)

    collectives = Echo(arguments.ranks)
    reduction = CompressedAllReduce([parameter.numel() for parameter in parameters], collectives, device)
    for view, parameter in zip(reduction.views, parameters, strict=True):
        view.copy_(parameter.grad.view(-1))
    adamw = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    usual = 1e-5, (0.9, 0.999), 1e-8, 0.1
    lamb = Lamb([{"params": parameters}], *usual)
    one_bit = {
        name: cls([{"params": parameters}], *usual) for name, cls in (("one_bit_adam", CompressedAdam), ("one_bit_lamb", CompressedLamb))
    }
    for optimizer in one_bit.values():
        optimizer.bind(collectives)
        optimizer.step()
        optimizer.compressing = True

    zero_one = LocalStepAdam([{"params": parameters}], *usual)
    zero_one.bind(collectives)
    zero_one.step()

    def step_of_zero_one(exchanges: bool) -> Callable[[], None]:
        def step() -> None:
            zero_one.renews, zero_one.exchanges = False, exchanges
            zero_one.step()

        return step

    sides: dict[str, Callable[[], None]] = {"reduction": reduction.reduce, "adamw": adamw.step, "lamb": lamb.step}
    sides |= {name: optimizer.step for name, optimizer in one_bit.items()}
    sides |= {"zero_one_adam_alone": step_of_zero_one(False), "zero_one_adam": step_of_zero_one(True)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(arguments.turns + 3):
        for name, run in sides.items():
            since = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - since)
    found = {name: spread(times) for name, times in seconds.items()}
    print(f"{count:,} parameters in {len(parameters)} tensors, {arguments.ranks} ranks, {arguments.threads} thread(s) on {device.type}")
    names = {"reduction": "compressing and expanding", "adamw": "AdamW, fused", "lamb": "LAMB"}
    names |= {"one_bit_adam": "1-bit Adam's step with both", "one_bit_lamb": "1-bit LAMB's step with both"}
    names |= {"zero_one_adam_alone": "0/1 Adam's step alone", "zero_one_adam": "0/1 Adam's exchange"}
    for name, row in found.items():
        quartiles = f"{row['lower_quartile_ms']:.1f} to {row['upper_quartile_ms']:.1f}"
        print(f"{names[name]:28} {row['median_ms']:8.1f} ms ({quartiles})  {row['median_ms'] * 11e6 / count:8.1f} ms for 11 M", flush=True)
    if not arguments.no_record:
        results = {"parameters": count, "ranks": arguments.ranks, "threads": arguments.threads, "sides": found}
        append("compression", results, device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
