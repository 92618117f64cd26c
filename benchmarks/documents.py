"""Attention within the documents of long rows, forward and backward, against plain causal attention over the whole row, interleaved.

    python benchmarks/documents.py                     # 16,384 tokens on one core: two minutes

On a CPU, seconds are those of this thread, so that other programs count little; on a GPU, those of the clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report
from launch.config.flags import whole_number

QUICK = ("--length", "2048", "--rounds", "2")
HEADS, D_HEAD = 2, 64
#: Documents in a row -> the most time relative to causal attention.
BARS = {40: 0.35, 1: 1.05}


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Time all sides; one record."""
    import torch

    from model.gpt import attend
    from model.layout import DocumentBounds, Mask

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length, dtype = arguments.length, torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, length, HEADS, D_HEAD, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def side(mask: Mask | None) -> Callable[[], None]:
        return lambda: attend(q, k, v, mask, 0.0).sum().backward()

    bounds = {count: torch.arange(count + 1, device=device) * length // count for count in BARS}
    sides = {"causal": side(None), **{str(count): side(DocumentBounds(ends, length)) for count, ends in bounds.items()}}
    seconds = report.interleave(sides, arguments.rounds, 1, time.thread_time if device == "cpu" else time.perf_counter)
    what = f"attention within {{}} / causal, {length:,} tokens, {HEADS} heads, {str(dtype)[6:]}"
    named = {count: f"{count} documents" if count > 1 else "one document" for count in BARS}
    rows = [report.ratio_row(what.format(named[n]), seconds[str(n)], seconds["causal"], f"at most {bar}") for n, bar in BARS.items()]
    yield rows, {"sides": {name: report.spread(times) for name, times in seconds.items()}}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--length", type=whole_number(128), default=16_384, help="tokens of the row (%(default)s)")
    parser.add_argument("--rounds", type=whole_number(2), default=5, help="rounds of all sides (%(default)s)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
