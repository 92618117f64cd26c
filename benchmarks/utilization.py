"""Model FLOPs utilization on a GPU: the engine's loop and a compiled plain PyTorch loop, interleaved; peak memory against its plan.

    python benchmarks/utilization.py                      # all cells; each takes one to three minutes on one GPU
    python benchmarks/utilization.py --only "gpt2, bf16"

A cell is a run of benchmarks/training_step.py with --compile and --profile: gpt2, gpt2-medium and gpt2-xl in bf16 with all fused kernels,
the same in fp8, again with half the micro-batch, and gpt2 without each kernel in turn. MFU is 6N + 12 n_layer d_model seq_len FLOPs a
token (model/accounting.py) over the device's dense bf16 peak, for fp8 too, so that the two compare. Out of memory, the micro-batch is
halved.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report
from benchmarks.report import Row

ONLY_BY_NAME = "it needs a GPU"
#: The floors of MFU in bf16, and the micro-batches that are tried first.
SIZES = {"gpt2": (0.38, 64), "gpt2-medium": (0.43, 32), "gpt2-xl": (0.45, 16)}
#: The kernels that still have an effect on a GPU for GPT-2 with compiled blocks.
KERNELS = ("cross_entropy", "compile")
PRECISIONS = {
    "bf16": ["--deepspeed_config", "ds_configs/fused_kernels.json"],
    "fp8": ["--deepspeed_config", "ds_configs/fp8.json", "--set", "fused_kernels=auto"],
}


def cells(tiny: bool = False) -> dict[str, list[str]]:
    """The flags of benchmarks/training_step.py by the cell's name; `tiny`: two cells that a CPU computes in two minutes."""
    sizes = {"nano": 4} if tiny else {preset: size for preset, (_, size) in SIZES.items()}
    found = {}
    for precision, flags in PRECISIONS.items():
        for preset, size in sizes.items():
            found[f"{preset}, {precision}"] = ["--preset", preset, "--micro_batch_size", str(size), *flags]
    if tiny:
        found["nano, fp8"] += ["--set", "fp8.emulate=true"]
        return {name: [*flags, "--steps", "15"] for name, flags in found.items()}
    for preset, size in sizes.items():
        found[f"{preset}, bf16, half"] = ["--preset", preset, "--micro_batch_size", str(size // 2), *PRECISIONS["bf16"]]
    for name in KERNELS:
        found[f"gpt2, bf16, without {name}"] = [*found["gpt2, bf16"], "--set", f"fused_kernels.{name}=false"]
    return found


def train(name: str, flags: list[str]) -> dict[str, Any]:
    """The record of training_step.py for one cell, with its micro-batch, halved until it fits into memory."""
    size = int(flags[flags.index("--micro_batch_size") + 1])
    while True:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            results = Path(folder) / "results.json"
            command = ["benchmarks/training_step.py", *flags, "--micro_batch_size", str(size), "--compile", "--profile"]
            environment = {**os.environ, "BENCHMARK_RESULTS": str(results)}
            done = subprocess.run([sys.executable, *command], cwd=report.ROOT, env=environment, stderr=subprocess.PIPE, text=True)
            if done.returncode == 0:
                return report.read_records(results)[0]
        if "out of memory" not in done.stderr or size == 1:
            report.fail(done.args, done.returncode, done.stderr)
        size //= 2
        print(f"{name}: out of memory, again with a micro-batch of {size}", flush=True)


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Train the chosen cells; a record for each."""
    report.require_gpu(arguments)
    for name, flags in report.chosen(cells(arguments.tiny), arguments.only).items():
        record = train(name, [*flags, "--data", arguments.data])
        cell = f"{name}, micro-batch {record['micro_batch_size']}"
        speed = f"{record['tokens_per_second_ratio']:.3f}"
        has_target = name in {f"{preset}, bf16" for preset in SIZES}
        target = "at least 0.98" if has_target else ""
        rows = [Row(f"compiled PyTorch loop / engine's loop, {cell}", speed, record["ratio_quartiles"], target)]
        if "mfu" in record:
            floor = f"at least {SIZES[record['preset']][0]}" if has_target else ""
            rows.append(Row(f"MFU of the engine's loop, {cell}", f"{record['mfu']:.3f}", bar=floor))
        if "peak_bytes" in record:
            planned = record["planned_bytes"] / record["peak_bytes"]
            rows.append(Row(f"planned / measured peak memory, {cell}", f"{planned:.3f}", bar="0.9 to 1.1"))
        yield rows, {"cell": name} | {key: value for key, value in record.items() if key not in report.HEAD}


def main() -> None:
    parser = report.cells_parser(__doc__)
    parser.add_argument("--data", default="data/stdlib", help="corpus (%(default)s)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
