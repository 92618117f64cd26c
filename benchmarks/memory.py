"""Memory of real runs against the plan: processes on this machine's CPU, one after another.

    python benchmarks/memory.py                              # nano and micro, about 6 minutes on two cores
    python benchmarks/memory.py --presets gpt2 --micro_batch_sizes 1,2 --ranks 1

Each line is a run of `deepspeed launch/pretrain.py` for a few steps without evaluation: `peak_memory_bytes` of rank 0 at its end
(ru_maxrss), the peak of the plan (`--explain`) and the plan's parts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report

QUICK = ("--presets", "nano", "--stages", "1", "--precisions", "bf16")
#: The flags that hold lists, with their defaults and help texts.
LISTS = {
    "presets": ("nano,micro", "model sizes"),
    "ranks": ("2", "numbers of ranks"),
    "micro_batch_sizes": ("4", "sequences of a micro-batch"),
    "stages": ("0,1,2,3", "ZeRO stages"),
    "precisions": ("fp32,bf16", "precisions"),
    "checkpoints": ("0", "activation checkpointing: segments of blocks, 0 for none"),
}
COLUMNS = ["preset", "ranks", "micro_batch_size", "stage", "precision", "checkpoints", "measured_peak", "planned_peak"]


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Run every combination of the lists; one record."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from launch.config.run_config import resolve
    from tests.distributed.memory_jobs import run_and_plan

    table = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for choice in itertools.product(*(getattr(arguments, name).split(",") for name in LISTS)):
            preset, ranks, micro, stage, precision, checkpoints = choice
            flags = ["--deepspeed_config", f"ds_configs/zero{stage}_{precision}.json", "--preset", preset, "--data", arguments.data]
            flags += ["--micro_batch_size", micro, "--global_batch_size", str(int(micro) * int(ranks)), "--steps", str(arguments.steps)]
            if checkpoints != "0":
                flags += ["--set", f"activation_checkpointing.number_checkpoints={checkpoints}"]
            resolve(flags, ranks=int(ranks))  # a mistake is reported once, here
            measured, plan = run_and_plan(Path(folder), f"run-{len(table)}", flags, int(ranks))
            parts = ", ".join(f"{name} {value / 2**20:.0f}" for name, value in vars(plan).items() if isinstance(value, int) and value)
            print(f"{' '.join(choice)}: measured {measured / 2**20:.0f} MiB, planned {parts}", flush=True)
            table.append([preset, int(ranks), int(micro), int(stage), precision, int(checkpoints), measured, plan.peak])
    largest = max(abs(planned / measured - 1) for *_, measured, planned in table)
    what = f"peak memory of {len(table)} runs / the plan's, {', '.join(dict.fromkeys(row[0] for row in table))}"
    row = report.Row(what, f"at most {100 * largest:.1f}% apart", bar="at most 15%")
    yield [row], {"device": "cpu", "columns": COLUMNS, "table": table}


def main() -> None:
    parser = report.parser(__doc__)
    for name, (default, help_text) in LISTS.items():
        parser.add_argument(f"--{name}", default=default, help=f"{help_text} (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a run (%(default)s)")
    parser.add_argument("--data", default="data/stdlib", help="corpus (%(default)s)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
