"""Each kernel of recipes/fused_kernels alone against the plain operations: time of both passes in turns, and the memory that they add.

    python benchmarks/kernels.py                         # about two minutes on two cores
    python benchmarks/kernels.py --only head --turns 9

A turn is a forward and a backward pass of each side on the same values. A ratio below 1 says that the kernel is faster. Memory is measured
in a process of its own for each side: the resident set's peak during the first turn (VmHWM, reset before it) less what was resident
before; on CUDA torch's own count. The gradients that the passes leave are in it.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
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

QUICK = ("--only", "attention", "--turns", "5")
#: The loss head of GPT-2 over 4,096 tokens, in bf16.
LARGE_HEAD = (4096, 768, 50_304)
BARS = {"head, 4,096 x 768 x 50,304": "at most 1.15, and 0.6 GB"}
WARM_UP_TURNS = 2
Side = Callable[[], None]


def rows(record: dict[str, Any]) -> list[Row]:
    found = []
    for name, one in record["cases"].items():
        memory = " / ".join(f"{one[side]['added_bytes'] / 1e9:.2f}" for side in ("fused", "plain"))
        sides = (
            f"{name}, {record['dtype']}: fused / plain, ms {one['fused']['median_ms']:.2f} / {one['plain']['median_ms']:.2f}, GB {memory}"
        )
        found.append(Row(sides, f"{one['ratio']:.3f}", one["ratio_quartiles"], BARS.get(name, "")))
    return found


def cases(dtype: Any, device: str) -> dict[str, Callable[[], tuple[Side, Side]]]:
    """What is compared: by its name, how to make the plain side and the fused one. Nothing is allocated before that."""
    import torch

    from model import gpt
    from recipes.fused_kernels.cross_entropy import in_one, in_rows, linear_cross_entropy

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return (scale * torch.randn(*shape, generator=generator)).to(device, dtype).requires_grad_()

    def both_passes(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Side:
        ones: list[torch.Tensor] = []

        def side() -> None:
            for leaf in leaves:
                leaf.grad = None
            value = function(*leaves)
            if not ones:
                ones.append(torch.ones_like(value))
            value.backward(ones[0])

        return side

    def attention(B: int, T: int, heads: int) -> tuple[Side, Side]:
        from recipes.fused_kernels.attention import blockwise_attention

        qkv = random(B, T, 3, heads, 64)
        return tuple(both_passes(lambda x, f=f: f(x, None, 0.0), qkv) for f in (gpt.attend, blockwise_attention))  # type: ignore[return-value]

    def head(tokens: int, width: int, vocabulary: int) -> tuple[Side, Side]:
        x, weight = random(tokens, width), random(vocabulary, width, scale=0.02)
        targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
        kernel = in_rows if device == "cpu" else torch.compile(in_one)
        return (
            both_passes(lambda x, w: gpt.linear_cross_entropy(x, w, None, targets), x, weight),
            both_passes(lambda x, w: linear_cross_entropy(x, w, None, targets, kernel), x, weight),
        )

    def gelu(*shape: int) -> tuple[Side, Side]:
        from recipes.fused_kernels.gelu import CompiledGELU

        x = random(*shape)
        return both_passes(torch.nn.GELU(approximate="tanh"), x), both_passes(CompiledGELU(), x)

    def layer_norm(*shape: int) -> tuple[Side, Side]:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        x, weight, bias = random(*shape), random(shape[-1]), random(shape[-1])
        return (
            both_passes(lambda x, w, b: torch.nn.functional.layer_norm(x, shape[-1:], w, b), x, weight, bias),
            both_passes(lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5), x, weight, bias),
        )

    def block(B: int, T: int, width: int, heads: int) -> tuple[Side, Side]:
        from model.presets import GPTConfig

        config = GPTConfig(n_layer=1, n_head=heads, d_model=width, seq_len=T, vocab_size=256)
        plain, compiled = (gpt.Block(config, 0).to(device, dtype) for _ in range(2))
        compiled.compile()
        return tuple(both_passes(one, random(B, T, width)) for one in (plain, compiled))  # type: ignore[return-value]

    def adamw(parameters: int) -> tuple[Side, Side]:
        def side(**kind: bool) -> Side:
            weights = [torch.zeros(parameters // 50, device=device, requires_grad=True) for _ in range(50)]
            for weight in weights:
                weight.grad = torch.full_like(weight, 1e-3)
            optimizer = torch.optim.AdamW(weights, **kind)
            return lambda: optimizer.step() and None

        return side(foreach=True), side(fused=True)

    chosen: dict[str, Callable[[], tuple[Side, Side]]] = {
        "head, 2,048 x 384 x 8,192": lambda: head(2048, 384, 8192),
        "head, {:,} x {} x {:,}".format(*LARGE_HEAD): lambda: head(*LARGE_HEAD),
        "gelu, 2,048 x 1,536": lambda: gelu(2048, 1536),
        "compiled block, 8 x 256 x 384": lambda: block(8, 256, 384, 6),
        "adamw, 13.9 M parameters in fp32, against foreach": lambda: adamw(13_900_000),
    }
    if device == "cpu":
        chosen["attention, 8 x 256, 6 heads of 64"] = lambda: attention(8, 256, 6)
        chosen["attention, 4 x 1,024, 12 heads of 64"] = lambda: attention(4, 1024, 12)
    else:
        chosen["layer_norm, 16,384 x 768"] = lambda: layer_norm(16384, 768)
    return chosen


def added_bytes(side: Side, device: str) -> int:
    """The memory at the peak of the first run of `side`, less what there was before."""
    import torch

    gc.collect()
    if device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        side()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes VmRSS
    before = resident("VmRSS")
    side()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """A size of this process in bytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--turns", type=int, default=21, help=f"turns of both sides, after {WARM_UP_TURNS} that are not counted (21)")
    parser.add_argument("--only", default="", help="the cases whose names begin so (all)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"], help="of all but adamw (bfloat16)")
    parser.add_argument("--memory", nargs=2, metavar=("CASE", "SIDE"), help="print the bytes that SIDE, 0 plain or 1 fused, adds, and stop")
    arguments = parser.parse_args()

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = cases(getattr(torch, arguments.dtype), device)
    if arguments.memory:
        name, number = arguments.memory
        print(added_bytes(every[name]()[int(number)], device))
        return 0
    found: dict[str, Any] = {}
    for name in [name for name in every if name.startswith(arguments.only)]:
        sides, seconds = every[name](), ([], [])  # type: ignore[var-annotated]
        for turn in range(WARM_UP_TURNS + arguments.turns):
            for side in (turn % 2, 1 - turn % 2):
                start = time.perf_counter()
                sides[side]()
                if device != "cpu":
                    torch.cuda.synchronize()
                seconds[side].append(time.perf_counter() - start)
        plain, fused = (times[WARM_UP_TURNS:] for times in seconds)
        median, quartiles = report.ratio(fused, plain)
        del sides
        added = [
            int(
                subprocess.run(
                    [sys.executable, __file__, "--dtype", arguments.dtype, "--memory", name, str(side)],
                    check=True,
                    capture_output=True,
                    text=True,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                ).stdout
            )
            for side in (0, 1)
        ]
        found[name] = {
            "plain": {**report.spread(plain), "added_bytes": added[0]},
            "fused": {**report.spread(fused), "added_bytes": added[1]},
            "ratio": median,
            "ratio_quartiles": quartiles,
        }
        said = [
            f"{side} {1e3 * statistics.median(times):8.2f} ms, {size / 1e9:.2f} GB"
            for side, times, size in zip(("plain", "fused"), (plain, fused), added, strict=True)
        ]
        print(f"{name:50} {'; '.join(said)}; ratio {median:.3f} ({quartiles[0]:.3f} to {quartiles[1]:.3f})", flush=True)
    if not arguments.no_record:
        report.append("kernels", {"dtype": arguments.dtype, "cases": found}, report.device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
