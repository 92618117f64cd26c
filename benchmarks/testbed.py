"""Control runs of gpt2 on a GPU for a few minutes each: the loss at three learning rates and with three seeds.

    python benchmarks/testbed.py                           # all cells; each trains for one to two minutes on one GPU
    python benchmarks/testbed.py --only "control, lr 6e-4, seed 1"

A cell is one run of launch/pretrain.py: 32.8 M tokens (500 steps of 64 x 1,024) of `--data` in bf16. The learning rates show where the
optimum is, the seeds the variance of one configuration, and `zero_2`, which is mathematically the same, the variance between two. A record
holds the curve: each validation loss, and the mean training loss of every 20 steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report
from benchmarks.report import Row
from launch.formats.metrics import read_metrics

ONLY_BY_NAME = "it needs a GPU"
FULL = {"preset": "gpt2", "steps": 500, "warmup_steps": 100, "global_batch_size": 64, "micro_batch_size": 64, "eval_every": 100}
TINY = {"preset": "nano", "steps": 20, "warmup_steps": 8, "global_batch_size": 4, "micro_batch_size": 4, "eval_every": 10}
#: Steps whose mean training loss is one point of the curve.
POINT = 20


def cells(tiny: bool = False) -> dict[str, list[str]]:
    """The flags of launch/pretrain.py by the cell's name."""
    shape = [text for key, value in (TINY if tiny else FULL).items() for text in (f"--{key}", str(value))]
    runs = {f"control, lr {lr}, seed 1": ("zero1_bf16", lr, 1) for lr in ("6e-4", "3e-4", "1.2e-3")}
    runs |= {f"control, lr 6e-4, seed {seed}": ("zero1_bf16", "6e-4", seed) for seed in (2, 3)}
    runs |= {"zero_2, lr 6e-4, seed 1": ("zero2_bf16", "6e-4", 1)}
    chosen = list(runs.items())[: 2 if tiny else None]
    return {
        name: ["--deepspeed_config", f"ds_configs/{config}.json", *shape, "--lr", lr, "--seed", str(seed)]
        for name, (config, lr, seed) in chosen
    }


def train(name: str, flags: list[str]) -> dict[str, Any]:
    """Train one cell; its record."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        run = ["--save_every", "0", "--runs_dir", folder, "--run_name", "r", "--quiet"]
        report.train_interleaved([["launch/pretrain.py", *flags, *run]], folder)
        lines = read_metrics(Path(folder) / "r" / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    points = [steps[first : first + POINT] for first in range(0, len(steps), POINT)]
    return {
        "cell": name,
        "flags": flags,
        "tokens": steps[-1]["tokens"],
        "seconds": steps[-1]["seconds"],
        "mfu": steps[-1].get("mfu"),
        "losses": [[point[-1]["tokens"], sum(line["loss"] for line in point) / len(point)] for point in points],
        "val_losses": [[line["tokens"], line["val_loss"]] for line in lines if "val_loss" in line],
    }


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Train the chosen cells; a record for each."""
    report.require_gpu(arguments)
    for name, flags in report.chosen(cells(arguments.tiny), arguments.only).items():
        record = train(name, [*flags, "--data", arguments.data])
        print(f"{name}: {record['seconds']:.0f} s", flush=True)
        what = f"validation loss after {record['tokens'] / 1e6:.1f} M tokens, {name}"
        yield [Row(what, f"{record['val_losses'][-1][1]:.4f}")], record


def main() -> None:
    report.run(__file__, report.cells_parser(__doc__), measure)


if __name__ == "__main__":
    main()
