"""The curriculum's claim of stability: control and curriculum over a sweep of learning rates, then three seeds at one where they part.

    python benchmarks/stability.py                    # about 20 minutes on two cores; interrupted, it goes on where it was
    python benchmarks/stability.py --draw_only        # the picture again, from the kept results

Each run has the same tokens, and the learning rate follows tokens: under the curriculum, whose first steps have few, the warm-up takes more
steps. A third side tells the two effects apart: full length, with a warm-up of as many steps. The results are kept in
benchmarks/stability.json, the picture in recipes/curriculum_learning/stability.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

ALONE = "figures of recipes/curriculum_learning, kept in benchmarks/stability.json; about 20 minutes"
RESULTS = ROOT / "benchmarks" / "stability.json"
PICTURE = ROOT / "recipes" / "curriculum_learning" / "stability.png"
#: The sides, with their JSON and their colour; the third is run at the chosen learning rate only.
SIDES = {
    "control": ("zero1_bf16", "#d95f02"),
    "curriculum": ("curriculum_learning", "#1f6fb4"),
    "longer warm-up": ("zero1_bf16", "#6a3d9a"),
}
SWEPT = ("control", "curriculum")
#: Long sequences for its width, and a batch large enough that a step's loss is not mostly noise. Adam's usual second beta, with which
#: spikes are common, and not the 0.95 of the shipped JSONs.
BETAS = "optimizer.params.betas=[0.9, 0.999]"
RUN = {"n_layer": 4, "n_head": 4, "d_model": 128, "seq_len": 256, "global_batch_size": 16, "micro_batch_size": 16, "steps": 300}
RUN |= {"warmup_steps": 30, "eval_every": 25, "eval_batches": 4, "save_every": 0}
TOKENS = RUN["steps"] * RUN["global_batch_size"] * RUN["seq_len"]
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)


def train(side: str, rate: float, seed: int, runs_dir: Path, *more: str) -> dict[str, Any]:
    """One run, unless it is there: its training and validation loss over tokens, and its gradient norms."""
    from launch.formats.metrics import read_metrics

    name = f"{side.replace(' ', '_')}_{rate:g}_{seed}"
    flags = [text for key, value in RUN.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "launch/pretrain.py", "--deepspeed_config", f"ds_configs/{SIDES[side][0]}.json", *flags, "--quiet"]
    command += ["--set", BETAS, *more, "--lr", str(rate), "--seed", str(seed), "--runs_dir", str(runs_dir), "--run_name", name, "--resume"]
    file = runs_dir / name / "metrics.jsonl"
    if not (file.exists() and read_metrics(file)[-1]["tokens"] >= TOKENS):
        code = subprocess.run(command, cwd=ROOT).returncode
        if code not in (0, 1):  # 1: the loss is no number any more, and the run is kept up to there
            raise SystemExit(code)
    lines = read_metrics(file)
    steps = [line for line in lines if line.get("loss") is not None]
    evaluated = [line for line in lines if line.get("val_loss") is not None]
    every = -(-len(steps) // 100)
    means = [
        [chunk[-1]["tokens"], round(statistics.mean(line["loss"] for line in chunk), 4)]
        for chunk in (steps[start : start + every] for start in range(0, len(steps), every))
    ]
    return {
        "side": side,
        "lr": rate,
        "seed": seed,
        "steps": len(steps),
        "validation": [[line["tokens"], round(line["val_loss"], 4)] for line in evaluated],
        "training": means,
        "warm_up_steps": max(range(len(steps)), key=lambda place: steps[place]["lr"]) + 1,
        "diverged": lines[-1]["tokens"] < TOKENS,
        "gradient_norms": [line["grad_norm"] and round(line["grad_norm"], 2) for line in steps[:100]],
    }


def write(results: dict[str, Any]) -> None:
    """A line for each run."""
    head = json.dumps({key: value for key, value in results.items() if key != "runs"}, indent=1)
    runs = ",\n".join(json.dumps(run) for run in results["runs"])
    RESULTS.write_text(f'{head.removesuffix("}").rstrip()},\n "runs": [\n{runs}\n ]\n}}\n', encoding="utf-8")


def draw(results: dict[str, Any]) -> None:
    """The sweep on the left: final validation loss over the learning rate. The seeds on the right: loss over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    chosen, runs = results["chosen_lr"], results["runs"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.8), dpi=110, layout="constrained")
    for side, (_, color) in SIDES.items():
        if side in SWEPT:
            sweep = sorted((run["lr"], run["validation"][-1][1]) for run in runs if run["side"] == side and run["seed"] == 1)
            left.plot(*zip(*sweep, strict=True), color=color, marker="o", linewidth=1.8, label=side)
        at_chosen = [run for run in runs if run["side"] == side and run["lr"] == chosen]
        for run in at_chosen:
            right.plot(*zip(*run["training"], strict=True), color=color, linewidth=0.7, alpha=0.4)
            right.plot(*zip(*run["validation"], strict=True), color=color, marker="o", markersize=3, linewidth=1.6)
        warm_up = ", ".join(sorted({str(run["warm_up_steps"]) for run in at_chosen}))
        right.plot([], [], color=color, marker="o", markersize=3, label=f"{side}: {warm_up} steps of warm-up")
    left.axvline(chosen, color="#888888", linestyle="--", linewidth=1)
    left.set(xscale="log", xlabel="peak learning rate", ylabel="validation loss at the end (nats a token)", title="sweep, seed 1")
    right.set(
        xlabel="tokens", ylabel="loss (nats a token)", title=f"learning rate {chosen:g}, three seeds: validation (dots), training (thin)"
    )
    right.set_ylim(top=7.5)
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g} M"))
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(PICTURE)


def main() -> int:
    from launch.training.provenance import machine, repository_commit, versions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, help="where the seeds are compared (where the sweep's difference is largest)")
    parser.add_argument("--runs_dir", type=Path, default=ROOT / "runs" / "stability", help="where the runs are made (runs/stability)")
    parser.add_argument("--draw_only", action="store_true", help="draw the kept results again")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    if arguments.draw_only:
        draw(json.loads(RESULTS.read_text(encoding="utf-8")))
        return 0
    runs = [train(side, rate, 1, arguments.runs_dir) for rate in RATES for side in SWEPT]
    ends = {(run["side"], run["lr"]): run["validation"][-1][1] for run in runs}
    chosen = arguments.lr or max(RATES, key=lambda rate: ends["control", rate] - ends["curriculum", rate])
    runs += [train(side, chosen, seed, arguments.runs_dir) for seed in (2, 3) for side in SWEPT]
    warm_up = next(run["warm_up_steps"] for run in runs if run["side"] == "curriculum" and run["lr"] == chosen)
    longer = ("--warmup_steps", str(warm_up))
    runs += [train("longer warm-up", chosen, seed, arguments.runs_dir, *longer) for seed in (1, 2, 3)]
    results = {
        "commit": repository_commit(),
        "machine": machine(),
        "versions": versions(),
        "run": RUN | {"set": BETAS},
        "chosen_lr": chosen,
        "runs": runs,
    }
    write(results)
    draw(results)
    for run in runs:
        print(f"{run['side']:14}  lr {run['lr']:<8g} seed {run['seed']}  {run['steps']} steps  validation {run['validation'][-1][1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
