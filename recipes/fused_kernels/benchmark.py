"""Compares each fused kernel with the plain operations: time of the forward and backward pass, interleaved, and additional memory.

    python recipes/fused_kernels/benchmark.py                         # about two minutes on two cores
    python recipes/fused_kernels/benchmark.py --only head --rounds 9

A ratio below 1 means that the kernel is faster. Memory is measured in a separate process for each side: the peak resident set during
the first call (VmHWM, reset before it) minus the resident set before it; on CUDA, torch's own count. It includes the gradients.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks import report
from launch.config.flags import whole_number
from launch.errors import UsageError
from model import gpt
from model.presets import GPTConfig
from recipes.fused_kernels.attention import blockwise_attention
from recipes.fused_kernels.cross_entropy import in_one, in_rows, linear_cross_entropy, write_gradient
from recipes.fused_kernels.gelu import CompiledGELU

QUICK = ("--only", "attention", "--rounds", "5")
#: The loss head of GPT-2 over 4,096 tokens, in bf16.
LARGE_HEAD = (4096, 768, 50_304)
BARS = {"head, 4,096 x 768 x 50,304": "at most 1.15, and 0.6 GB"}
WARM_UP_ROUNDS = 2
Side = Callable[[], None]


def cases(dtype: Any, device: str) -> dict[str, Callable[[], tuple[Side, Side]]]:
    """Name of a case -> a function that builds its plain side and its fused side."""

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
        qkv = random(B, T, 3, heads, 64)
        return tuple(both_passes(lambda x, f=f: f(*x.unbind(2), None, 0.0), qkv) for f in (gpt.attend, blockwise_attention))  # type: ignore[return-value]

    def head(tokens: int, width: int, vocabulary: int) -> tuple[Side, Side]:
        x, weight = random(tokens, width), random(vocabulary, width, scale=0.02)
        targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
        kernel = in_rows if device == "cpu" else partial(in_one, write=torch.compile(write_gradient))
        return (
            both_passes(lambda x, w: gpt.linear_cross_entropy(x, w, None, targets), x, weight),
            both_passes(lambda x, w: linear_cross_entropy(x, w, None, targets, kernel), x, weight),
        )

    def gelu(*shape: int) -> tuple[Side, Side]:
        x = random(*shape)
        return both_passes(torch.nn.GELU(approximate="tanh"), x), both_passes(CompiledGELU(), x)

    def layer_norm(*shape: int) -> tuple[Side, Side]:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # an optional dependency

        x, weight, bias = random(*shape), random(shape[-1]), random(shape[-1])
        return (
            both_passes(lambda x, w, b: torch.nn.functional.layer_norm(x, shape[-1:], w, b), x, weight, bias),
            both_passes(lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5), x, weight, bias),
        )

    def block(B: int, T: int, width: int, heads: int) -> tuple[Side, Side]:
        config = GPTConfig(n_layer=1, n_head=heads, d_model=width, seq_len=T, vocab_size=256)
        plain, compiled = (gpt.Block(config, 0).to(device, dtype) for _ in range(2))
        compiled.compile()
        return tuple(both_passes(one, random(B, T, width)) for one in (plain, compiled))  # type: ignore[return-value]

    def adamw(parameters: int) -> tuple[Side, Side]:
        def side(**kind: Any) -> Side:
            weights = [torch.zeros(parameters // 50, device=device, requires_grad=True) for _ in range(50)]
            for weight in weights:
                weight.grad = torch.full_like(weight, 1e-3)
            optimizer = torch.optim.AdamW(weights, **kind)
            return lambda: optimizer.step() and None

        return side(foreach=True), side(fused=True)

    every: dict[str, Callable[[], tuple[Side, Side]]] = {
        "head, 2,048 x 384 x 8,192": lambda: head(2048, 384, 8192),
        "head, {:,} x {} x {:,}".format(*LARGE_HEAD): lambda: head(*LARGE_HEAD),
        "gelu, 2,048 x 1,536": lambda: gelu(2048, 1536),
        "compiled block, 8 x 256 x 384": lambda: block(8, 256, 384, 6),
        "adamw, 13.9 M parameters in fp32, against foreach": lambda: adamw(13_900_000),
    }
    if device == "cpu":
        every["attention, 8 x 256, 6 heads of 64"] = lambda: attention(8, 256, 6)
        every["attention, 4 x 1,024, 12 heads of 64"] = lambda: attention(4, 1024, 12)
    else:
        every["layer_norm, 16,384 x 768"] = lambda: layer_norm(16384, 768)
    return every


def added_bytes(side: Side, device: str) -> int:
    """The peak of memory during the first call of `side`, minus the memory before."""
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


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Measure the chosen cases; one record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every = cases(getattr(torch, arguments.dtype), device)
    if arguments.memory:
        name, number = arguments.memory
        print(added_bytes(every[name]()[int(number)], device), flush=True)
        return
    chosen = [name for name in every if name.startswith(arguments.only)]
    if not chosen:
        raise UsageError(f"--only {arguments.only}: no case begins with this; allowed are: {'; '.join(every)}")
    rows, found = [], {}
    for name in chosen:
        plain, fused = every[name]()
        seconds = report.interleave({"plain": plain, "fused": fused}, arguments.rounds, WARM_UP_ROUNDS)
        del plain, fused
        command = [sys.executable, __file__, "--dtype", arguments.dtype, "--memory", name]
        outputs = [subprocess.run([*command, str(side)], check=True, capture_output=True, text=True).stdout for side in (0, 1)]
        added = dict(zip(("plain", "fused"), map(int, outputs), strict=True))
        found[name] = {side: {**report.spread(times), "added_bytes": added[side]} for side, times in seconds.items()}
        median, quartiles = report.ratio(seconds["fused"], seconds["plain"])
        times = " / ".join(f"{found[name][side]['median_ms']:.2f}" for side in ("fused", "plain"))
        memory = " / ".join(f"{added[side] / 1e9:.2f}" for side in ("fused", "plain"))
        figure = f"{median:.3f} ({times} ms, {memory} GB)"
        case = name if name.startswith("adamw") else f"{name}, {arguments.dtype}"  # the optimizer's tensors are fp32
        rows.append(report.Row(f"{case}: fused / plain", figure, quartiles, BARS.get(name, "")))
        print(f"{len(rows)} of {len(chosen)} cases are measured", flush=True)
    yield rows, {"dtype": arguments.dtype, "cases": found}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=whole_number(2), default=21, help="rounds that are counted (%(default)s)")
    parser.add_argument("--only", default="", metavar="CASE", help="only cases whose names begin with this (all)")
    dtypes = ["bfloat16", "float32", "float16"]
    parser.add_argument("--dtype", default="bfloat16", choices=dtypes, help="of all cases but adamw (%(default)s)")
    parser.add_argument("--memory", nargs=2, metavar=("CASE", "SIDE"), help=argparse.SUPPRESS)  # print the bytes that a side adds
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
