"""Checkpoints of a run that trains on: how long the loop stands still for one, against how long writing it takes.

    python benchmarks/checkpoint.py               # gpt2, 124 M parameters, ZeRO 0 in bf16: about three minutes on two cores, 4 GB of disk
    python benchmarks/checkpoint.py --deepspeed_config ds_configs/zero2_bf16.json --preset micro

Two runs of `launch/pretrain.py`'s own loop, each in a fresh process: one that saves every few steps, and one that saves at its end only.
Writing is timed twice: in the thread beside training, from the first file to the rename, and with the loop standing still, which is how
the last checkpoint of a run is written. Verification, as a resume makes it, is timed against reading the same files, interleaved, from the
page cache, where reading is fastest. Peaks are of the process (`ru_maxrss`), in each run after its last step. The text is random
numbers in nanoGPT's form, with GPT-2's vocabulary.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

QUICK = ("--preset", "micro", "--saves", "2", "--save_every", "3")
TOKENS = 2_000_000
#: Steps at the start of a run that are not counted: the first allocate and compile.
WARM_UP_STEPS = 3


def rows(record: dict[str, Any]) -> list[Row]:
    stalls = sorted(record["stall_ratios"])
    middle = statistics.quantiles(stalls, n=4)
    what = f"the loop's stall / writing a checkpoint, {record['preset']}; the first {100 * record['stall_ratios'][0]:.1f}%"
    found = [Row(what, f"{100 * statistics.median(stalls):.1f}%", [middle[0], middle[2]], "under 15%")]
    if ratios := record.get("verification_ratios"):
        low, median, high = statistics.quantiles(ratios, n=4)
        found.append(Row(f"verifying a checkpoint / reading its files, {record['preset']}", f"{median:.2f}", [low, high], "under 1.2"))
    return found


def train(flags: list[str]) -> dict[str, Any]:
    """One run in this process.

    Returns seconds of each: `saves` (the loop stands still), `writes` (the thread, or for the last one the loop), `steps`, and of the
    steps whether a checkpoint was `in_flight` at their beginning; with the `peak` of the process in bytes.
    """
    from launch.config.run_config import resolve
    from launch.formats.metrics import read_metrics
    from launch.pretrain import train
    from launch.training.checkpoint import Checkpoints
    from launch.training.folder import RunFolder
    from launch.training.provenance import describe_run
    from launch.training.signals import StopRequest
    from recipes import registry
    from recipes.technique import Technique, Techniques

    config, _ = resolve([*flags, "--quiet"])
    path = Path(config.runs_dir) / config.run_name
    saves: list[float] = []
    spans: list[tuple[float, float]] = []
    starts: list[float] = []

    class StepStarts(Technique):
        def on_step(self, step: int) -> None:
            starts.append(time.perf_counter())

    def timed(method: Any, note: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                note(start, time.perf_counter())

        return call

    Checkpoints.save = timed(Checkpoints.save, lambda start, end: saves.append(end - start))  # type: ignore[method-assign]
    Checkpoints._write = timed(Checkpoints._write, lambda start, end: spans.append((start, end)))  # type: ignore[method-assign]
    registry.make_techniques = lambda run: Techniques([StepStarts({}, run)])
    folder = RunFolder(path, describe_run(config), quiet=True)
    try:
        train(config, folder, StopRequest())
    finally:
        folder.close()
    lines = [line for line in read_metrics(path / "metrics.jsonl") if "step_seconds" in line]
    return {
        "saves": saves,
        "writes": [end - start for start, end in spans[:-1]] + saves[-1:],
        "steps": [line["step_seconds"] for line in lines],
        "in_flight": [any(start <= at < end for start, end in spans) for at in starts],
        "peak": lines[-1]["peak_memory_bytes"],
    }


def verification_ratios(checkpoint: Path, rounds: int = 7) -> list[float]:
    """Seconds of verifying a checkpoint by one rank over seconds of reading its files a MiB at a time, in pairs."""
    from launch.formats.checkpoint_files import read_state, verify

    def read() -> None:
        block = bytearray(1 << 20)
        for name in read_state(checkpoint)["files"]:
            with open(checkpoint / name, "rb", buffering=0) as stream:
                while stream.readinto(block):
                    pass

    def seconds(work: Any) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    run_id = read_state(checkpoint)["run_id"]
    read()  # into the page cache
    return [seconds(lambda: verify(checkpoint, run_id)) / seconds(read) for _ in range(rounds)]


def write_corpus(folder: Path) -> None:
    """Random tokens in nanoGPT's form."""
    import numpy as np

    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, 50257, TOKENS, dtype=np.uint16)
    tokens.tofile(folder / "train.bin")
    tokens[: TOKENS // 20].tofile(folder / "val.bin")


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--preset", default="gpt2", help="model size (gpt2)")
    parser.add_argument("--deepspeed_config", default="ds_configs/zero0_bf16.json", help="the engine's JSON (ds_configs/zero0_bf16.json)")
    parser.add_argument("--saves", type=int, default=4, help="checkpoints beside training (4)")
    parser.add_argument("--save_every", type=int, default=6, help="steps between checkpoints (6)")
    parser.add_argument("--seq_len", type=int, default=512, help="tokens of a step, a single sequence (512)")
    parser.add_argument("--runs_dir", help="where the runs are written, and removed (a temporary folder)")
    arguments = parser.parse_args()
    os.chdir(ROOT)

    folder = Path(tempfile.mkdtemp(prefix="benchmark-", dir=arguments.runs_dir))
    steps = (arguments.saves + 1) * arguments.save_every
    shape = ["--preset", arguments.preset, "--seq_len", str(arguments.seq_len), "--micro_batch_size", "1", "--global_batch_size", "1"]
    flags = ["--deepspeed_config", arguments.deepspeed_config, *shape, "--data", str(folder / "text"), "--runs_dir", str(folder)]
    flags += ["--steps", str(steps), "--eval_every", "0", "--keep", "1"]
    context = multiprocessing.get_context("spawn")
    found = {}
    try:
        write_corpus(folder / "text")
        for name, save_every in (("beside", arguments.save_every), ("at_the_end", 0)):
            with ProcessPoolExecutor(1, context) as process:
                found[name] = process.submit(train, [*flags, "--run_name", name, "--save_every", str(save_every)]).result()
            size = sum(path.stat().st_size for path in (folder / name / "checkpoints").rglob("*") if path.is_file())
            verification = verification_ratios(next((folder / name / "checkpoints").iterdir()))
            shutil.rmtree(folder / name)
    finally:
        shutil.rmtree(folder)

    beside, alone = found["beside"], found["at_the_end"]
    stalls, (*writes, _) = beside["saves"][:-1], beside["writes"]
    still = statistics.median([beside["writes"][-1], alone["writes"][-1]])  # written while the loop stands still
    pairs = list(zip(beside["steps"], beside["in_flight"], strict=True))[WARM_UP_STEPS:]
    during, between = ([seconds for seconds, flying in pairs if flying is which] for which in (True, False))
    without = alone["steps"][WARM_UP_STEPS:]
    print(f"a checkpoint of {size / 1e9:.2f} GB; written while the loop stands still: {still:.2f} s")
    for number, (stall, write) in enumerate(zip(stalls, writes, strict=True), 1):
        share = 100 * stall / still
        print(f"save {number}: the loop stands still for {stall:.3f} s, {share:.1f}% of that; written beside it in {write:.2f} s")
    for name, seconds in (
        ("with a write in flight", during),
        ("with none in flight", between),
        ("of a run that saves at its end", without),
    ):
        if len(seconds) < 2:  # writes that are done before the next step begins
            print(f"steps {name}: {len(seconds)}")
            continue
        times = report.spread(seconds)
        quartiles = f"{times['lower_quartile_ms']:.0f} to {times['upper_quartile_ms']:.0f}"
        print(f"steps {name}: {times['median_ms']:.0f} ms, quartiles {quartiles}, {times['count']} steps")
    print(f"verifying the checkpoint takes {statistics.median(verification):.2f} times as long as reading its files")
    print(f"peak: {beside['peak'] / 2**20:,.0f} MiB, {alone['peak'] / 2**20:,.0f} MiB without saves beside training")
    if not arguments.no_record:
        report.append(
            "checkpoint",
            {
                "config": arguments.deepspeed_config,
                "preset": arguments.preset,
                "bytes": size,
                "still_seconds": still,
                "stall_seconds": stalls,
                "stall_ratios": [stall / still for stall in stalls],
                "write_seconds_beside": writes,
                "verification_ratios": verification,
                "steps_in_flight": report.spread(during) if len(during) > 1 else None,
                "steps_between": report.spread(between),
                "steps_without_saves": report.spread(without),
                "peak_bytes": beside["peak"],
                "peak_bytes_without": alone["peak"],
            },
            report.device_name(),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
