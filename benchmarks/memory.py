"""Memory of real runs against the plan: fresh processes on this machine's CPU, one after another.

    python benchmarks/memory.py                              # nano and micro, about 6 minutes on two cores
    python benchmarks/memory.py --presets gpt2 --micro_batch_sizes 1,2 --ranks 1

Each row is `deepspeed launch/pretrain.py` for a few steps without evaluation: `peak_memory_bytes` of rank 0 at the end (ru_maxrss) beside
the plan of `launch/config/memory.py`, with its parts. `--process` measures the constant that no arithmetic gives: the resident set of a
rank whose model has a few thousand parameters.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

QUICK = ("--presets", "nano", "--stages", "1", "--precisions", "bf16")
MIB = 2**20
TINY = ["--n_layer", "1", "--n_head", "1", "--d_model", "8", "--seq_len", "8"]
PARTS = (
    "weights",
    "gradients",
    "master_weights",
    "optimizer_states",
    "buffers",
    "update",
    "activations",
    "loss_head",
)


def rows(record: dict[str, Any]) -> list[Row]:
    presets = ", ".join(dict.fromkeys(row[0] for row in record["rows"]))
    sides = f"peak memory of {len(record['rows'])} runs / the plan's, {presets}"
    return [Row(sides, f"at most {100 * record['largest_error']:.1f}% apart", bar="at most 15%")]


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--presets", default="nano,micro", help="model sizes (nano,micro)")
    parser.add_argument("--stages", default="0,1,2,3", help="ZeRO stages (0,1,2,3)")
    parser.add_argument("--precisions", default="fp32,bf16", help="precisions (fp32,bf16)")
    parser.add_argument("--ranks", default="2", help="numbers of ranks (2)")
    parser.add_argument("--micro_batch_sizes", default="4", help="sequences a rank takes at once (4)")
    parser.add_argument("--checkpoints", default="0", help="activation checkpointing: segments that the blocks are cut into; 0 is none (0)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a run (3)")
    parser.add_argument("--data", default="data/stdlib", help="corpus (data/stdlib)")
    parser.add_argument("--process", action="store_true", help="measure the process instead: a model of a few thousand parameters")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from benchmarks.report import append
    from tests.distributed.memory_jobs import run_and_plan

    names = ("presets", "ranks", "micro_batch_sizes", "stages", "precisions", "checkpoints")
    choices = [getattr(arguments, name).split(",") for name in names]
    if arguments.process:
        choices = [["nano"], choices[1], ["1"], *choices[3:5], ["0"]]
    print(f"{'preset':6} ranks micro stage prec. ckpt  measured   plan  error  MiB by part: {', '.join(PARTS)}", flush=True)
    table = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for preset, ranks, micro, stage, precision, checkpoints in itertools.product(*choices):
            sequences = ["--micro_batch_size", micro, "--global_batch_size", str(int(micro) * int(ranks)), "--steps", str(arguments.steps)]
            flags = [
                "--deepspeed_config",
                f"ds_configs/zero{stage}_{precision}.json",
                "--preset",
                preset,
                *sequences,
                "--data",
                arguments.data,
            ]
            if arguments.process:
                flags += TINY
            if checkpoints != "0":
                flags += ["--set", f"activation_checkpointing.number_checkpoints={checkpoints}"]
            measured, plan = run_and_plan(Path(folder), f"run-{len(table)}", flags, int(ranks))
            error = plan.peak / measured - 1
            parts = " ".join(f"{getattr(plan, part) / MIB:.0f}" for part in PARTS)
            print(
                f"{preset:6} {ranks:>5} {micro:>5} {stage:>5} {precision:5} {checkpoints:>4} {measured / MIB:8.0f} {plan.peak / MIB:7.0f}"
                f" {100 * error:+5.1f}%  {parts} at {plan.peak_moment}",
                flush=True,
            )
            table.append([preset, int(ranks), int(micro), int(stage), precision, int(checkpoints), measured, plan.peak])
    errors = [abs(row[-1] / row[-2] - 1) for row in table]
    print(f"largest error of {len(table)} runs: {100 * max(errors):.1f}%, mean {100 * sum(errors) / len(errors):.1f}%")
    if not arguments.no_record and not arguments.process:
        columns = ["preset", "ranks", "micro_batch_size", "stage", "precision", "checkpoints", "measured_peak", "planned_peak"]
        append("memory", {"columns": columns, "rows": table, "largest_error": max(errors)}, "cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
