"""Model FLOPs utilization on a GPU: the engine's loop and a compiled plain PyTorch loop in turns, and memory against its plan.

    python benchmarks/utilization.py                      # all cells; each takes one to three minutes on one GPU
    python benchmarks/utilization.py --only "gpt2, bf16"

A cell is a run of benchmarks/training_step.py with --compile and --profile in a process of its own: gpt2, gpt2-medium and gpt2-xl in bf16
with all fused kernels, the same in fp8, again with half of the micro-batch, and gpt2 without each kernel in turn. MFU is 6N + 12 n_layer
d_model seq_len FLOPs a token (model/accounting.py) over the device's dense bf16 peak, in fp8 too, so that the two can be compared. Where
memory is out, the micro-batch is halved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

ALONE = "needs a GPU"
#: The floors of MFU in bf16, and the micro-batches that are tried first.
SIZES = {"gpt2": (0.38, 64), "gpt2-medium": (0.43, 32), "gpt2-xl": (0.45, 16)}
KERNELS = ("adamw", "attention", "cross_entropy", "layer_norm", "gelu", "compile", "tf32", "cuda_graphs")
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


def rows(record: dict[str, Any]) -> list[Row]:
    cell = f"{record['cell']}, micro-batch {record['micro_batch_size']}"
    ratio = f"{record['tokens_per_second_ratio']:.3f}"
    found = [Row(f"compiled PyTorch loop / engine's loop, {cell}", ratio, record["ratio_quartiles"], "at least 0.98")]
    if "mfu" in record:
        floor = f"at least {SIZES[record['preset']][0]}" if record["cell"] in {f"{preset}, bf16" for preset in SIZES} else ""
        found.append(Row(f"MFU of the engine's loop, {cell}", f"{record['mfu']:.3f}", bar=floor))
    if "peak_bytes" in record:
        planned = record["planned_bytes"] / record["peak_bytes"]
        found.append(Row(f"planned / measured peak memory, {cell}", f"{planned:.3f}", bar="0.9 to 1.1"))
    return found


def measure(name: str, flags: list[str]) -> dict[str, Any]:
    """The record of one cell, with the largest micro-batch up to its own for which memory is enough."""
    size = int(flags[flags.index("--micro_batch_size") + 1])
    while True:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            results = Path(folder) / "results.json"
            command = [sys.executable, "benchmarks/training_step.py", *flags, "--micro_batch_size", str(size), "--compile", "--profile"]
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, "BENCHMARK_RESULTS": str(results)}, stderr=subprocess.PIPE, text=True
            )
            if done.returncode == 0:
                (record,) = json.loads(results.read_text(encoding="utf-8"))
                return {"cell": name, **{key: value for key, value in record.items() if key not in report.HEAD}}
        if "out of memory" not in done.stderr or size == 1:
            raise SystemExit(f"error: {' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        size //= 2
        print(f"{name}: out of memory, again with a micro-batch of {size}", flush=True)


def main() -> int:
    parser = report.cells_parser(__doc__)
    parser.add_argument("--data", default="data/stdlib", help="corpus (data/stdlib)")
    arguments = parser.parse_args()

    import torch

    if not torch.cuda.is_available() and not arguments.tiny:
        print("error: utilization.py: there is no GPU here; --tiny tries the cells on a CPU", file=sys.stderr)
        return 2
    for name, flags in report.chosen(cells(arguments.tiny), arguments.only).items():
        record = measure(name, [*flags, "--data", arguments.data])
        mfu = f"MFU {record['mfu']:.3f} (plain {record['plain_mfu']:.3f}), " if "mfu" in record else ""
        print(f"{name}: {mfu}{record['tokens_per_second']:,.0f} tokens/s, {record['tokens_per_second_ratio']:.3f} of the plain loop's")
        if not arguments.no_record:
            report.append("utilization", record, report.device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
