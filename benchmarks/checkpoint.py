"""Checkpoints written beside training: how long the loop stalls for one, against how long writing it takes.

    python benchmarks/checkpoint.py               # gpt2, 124 M parameters, ZeRO 0 in bf16: about three minutes on two cores, 4 GB of disk
    python benchmarks/checkpoint.py --deepspeed_config ds_configs/zero2_bf16.json --preset micro

Two runs of the loop of `launch/pretrain.py`, each in a fresh process: one saves every few steps, one only at its end. Writing is timed in
the thread beside training, from the first file to the rename, and while the loop waits for it, which is how the last checkpoint of a run
is written. Peaks are of the process (`ru_maxrss`) after the last step. The text is random tokens of GPT-2's vocabulary in nanoGPT's format.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from benchmarks import report
from launch.config.flags import whole_number
from launch.config.run_config import resolve
from launch.formats.files import check_writable

QUICK = ("--preset", "micro", "--saves", "2", "--save_every", "3")
TOKENS = 2_000_000
#: Steps at the start of a run that are not counted.
WARM_UP_STEPS = 3


def train(flags: list[str], folder: str) -> dict[str, Any]:
    """Train one run in this process.

    Returns seconds: of `saves` (the loop waits), of `writes` (in the thread, for the last one in the loop) and of `steps`; and the `peak`
    of the process in bytes.
    """
    from launch.training.checkpoint import Checkpoints

    def timed(method: Any, seconds: list[float]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                seconds.append(time.perf_counter() - start)

        return call

    saves: list[float] = []
    writes: list[float] = []
    Checkpoints.save = timed(Checkpoints.save, saves)  # type: ignore[method-assign]
    Checkpoints._write = timed(Checkpoints._write, writes)  # type: ignore[method-assign]
    lines = report.train(flags, folder)
    steps = [line["step_seconds"] for line in lines[WARM_UP_STEPS:]]
    return {"saves": saves, "writes": [*writes[:-1], saves[-1]], "steps": steps, "peak": lines[-1]["peak_memory_bytes"]}


def write_corpus(folder: Path) -> None:
    """Write random tokens in nanoGPT's format."""
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, 50257, TOKENS, dtype=np.uint16)
    tokens.tofile(folder / "train.bin")
    tokens[: TOKENS // 20].tofile(folder / "val.bin")


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Train both runs; one record."""
    if arguments.runs_dir:
        check_writable(Path(arguments.runs_dir), "--runs_dir")
        Path(arguments.runs_dir).mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    found, size = {}, 0
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=arguments.runs_dir) as folder:
        write_corpus(Path(folder, "text"))
        more = {"data": f"{folder}/text", "seq_len": arguments.seq_len, "micro_batch_size": 1, "global_batch_size": 1, "keep": 1}
        more |= {"steps": (arguments.saves + 1) * arguments.save_every}
        resolve(report.run_flags(arguments, **more))  # a mistake is reported once, here
        for name, save_every in (("beside", arguments.save_every), ("at the end", 0)):
            flags = report.run_flags(arguments, save_every=save_every, **more)
            with ProcessPoolExecutor(1, context) as process:
                found[name] = process.submit(train, flags, f"{folder}/{name}").result()
            checkpoints = Path(folder, name, "r", "checkpoints")
            size = sum(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file())
            shutil.rmtree(Path(folder, name))
    beside, alone = found["beside"], found["at the end"]
    stalls, writes = beside["saves"][:-1], beside["writes"][:-1]
    waited = statistics.median([beside["writes"][-1], alone["writes"][-1]])
    print(f"a checkpoint of {size / 1e9:.2f} GB; written while the loop waits: {waited:.2f} s")
    for number, (stall, write) in enumerate(zip(stalls, writes, strict=True), 1):
        print(f"save {number}: the loop stalls for {stall:.3f} s; written beside it in {write:.2f} s")
    print(f"peak: {beside['peak'] / 2**20:,.0f} MiB, {alone['peak'] / 2**20:,.0f} MiB without saves beside training")
    ratios = [stall / waited for stall in stalls]
    lower, median, upper = statistics.quantiles(ratios, n=4)
    row = report.Row(f"the loop's stall / writing a checkpoint, {arguments.preset}", f"{median:.3f}", [lower, upper], "under 0.15")
    details = {"config": arguments.deepspeed_config, "preset": arguments.preset, "bytes": size, "still_seconds": waited}
    details |= {"stall_seconds": stalls, "stall_ratios": ratios, "write_seconds_beside": writes}
    details |= {"steps_with_saves": report.spread(beside["steps"]), "steps_without_saves": report.spread(alone["steps"])}
    yield [row], {**details, "peak_bytes": beside["peak"], "peak_bytes_without": alone["peak"]}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--preset", default="gpt2", help="model size (%(default)s)")
    parser.add_argument("--deepspeed_config", default="ds_configs/zero0_bf16.json", help="DeepSpeed's JSON (%(default)s)")
    parser.add_argument("--saves", type=whole_number(2), default=4, help="checkpoints beside training (%(default)s)")
    parser.add_argument("--save_every", type=whole_number(1), default=6, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--seq_len", type=int, default=512, help="tokens per step, in a single sequence (%(default)s)")
    parser.add_argument("--runs_dir", help="where the runs are written, and removed (a temporary folder)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
