"""How much of the time of blocks that are dropped is really saved: steps that drop some and steps that drop none, in turns in one engine.

    python benchmarks/layer_drop.py                          # half of the blocks dropped, ZeRO stages 0 to 3; about three minutes
    python benchmarks/layer_drop.py --schedule 200           # the gates of a run of 200 steps at theta 0.5, at the JSON's own stage
    deepspeed --num_gpus 2 benchmarks/layer_drop.py          # on two ranks

Each turn is three steps on the same micro-batches: with every block, with the blocks that are kept, and with every block under a clock,
from the input of the first block to the output of the last and the same way back. Saved is the difference of the first two; had dropping no
cost of its own, it would be the dropped share of what the blocks cost. The rest of a step (the head, the update) does not shrink.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.report import Row

ALONE = "figures of recipes/progressive_layer_drop; about three minutes"
QUICK = ("--preset", "nano", "--stages", "1", "--steps", "25")


def rows(record: dict[str, Any]) -> list[Row]:
    gates = f"gates of {record['schedule']} steps" if record["schedule"] else "half of the blocks"
    name = f"time saved / time of the dropped blocks, {gates}, {record['preset']}, {record['ranks']} rank(s), ZeRO"
    return [
        Row(f"{name} {one['stage']}", f"{one['saved_share_of_dropped_block_time']:.2f}", one["turn_quartiles"]) for one in record["stages"]
    ]


def measure(stage: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Turns of steps at one ZeRO stage: times of a step that drops none, of its blocks, and of one that drops; what was saved."""
    import torch

    from benchmarks.report import WARM_UP_STEPS, spread
    from launch.config.run_config import resolve
    from launch.training.distributed import start_ranks
    from launch.training.engine import start_engine
    from recipes.progressive_layer_drop.technique import ProgressiveLayerDrop
    from recipes.technique import Techniques

    pairs = arguments.schedule or arguments.steps
    flags = ["--deepspeed_config", arguments.deepspeed_config, "--preset", arguments.preset, "--data", arguments.data, "--quiet"]
    flags += ["--steps", str(pairs), "--set", f"zero_optimization.stage={stage}", *arguments.flags]
    config = resolve(flags)[0]
    technique = ProgressiveLayerDrop({"theta": 0.5}, config)
    collectives = start_ranks()
    engine = start_engine(config, Techniques([technique]), collectives)
    loader = config.training_loader(collectives)
    n_layer = config.shape.n_layer
    on_gpu = torch.cuda.is_available()

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    clock = {"blocks": 0.0}
    first, last = (engine.deepspeed.module.h[index] for index in (0, -1))

    def start(module: Any, inputs: Any) -> None:
        clock["since"] = now()
        inputs[0].register_hook(lambda gradient: clock.update(blocks=clock["blocks"] + now() - clock["back"]))

    def end(module: Any, inputs: Any, output: Any) -> None:
        clock["blocks"] += now() - clock["since"]
        output.register_hook(lambda gradient: clock.update(back=now()))

    def train(keeps: list[bool], batches: list[Any], number: int) -> float:
        """Seconds of one step that runs the blocks that `keeps` names."""
        technique.on_step(number)
        technique.keeps, since = keeps, now()
        engine.set_learning_rate(number * config.tokens_per_step)
        for batch in batches:
            engine.backward_and_step(engine.loss(batch), len(batches))
        return now() - since

    def time_blocks(batches: list[Any], number: int) -> float:
        """Seconds of the blocks in a step that runs them all. On a GPU the clock waits for it, so this step counts for nothing else."""
        clock["blocks"] = 0.0
        hooks = [first.register_forward_pre_hook(start), last.register_forward_hook(end)]
        train([True] * n_layer, batches, number)
        for hook in hooks:
            hook.remove()
        return clock["blocks"]

    whole, blocks, dropping, dropped = [], [], [], []
    for number in range(1, pairs + WARM_UP_STEPS + 1):
        place = (number - 1) * config.global_batch_size, config.micro_batch_size, config.gradient_accumulation_steps
        batches = list(loader.micro_batches(*place))
        technique.on_step(max(1, number - WARM_UP_STEPS))
        # Half of the blocks, the first never among them; others in each turn.
        half = {1 + (number + 2 * place) % (n_layer - 1) for place in range(n_layer // 2)}
        keeps = technique.keeps if arguments.schedule else [layer not in half for layer in range(n_layer)]
        seconds: dict[bool, float] = {}
        for drops in (False, True) if number % 2 else (True, False):
            seconds[drops] = train(keeps if drops else [True] * n_layer, batches, number)
        if number > WARM_UP_STEPS:
            whole.append(seconds[False])
            dropping.append(seconds[True])
            blocks.append(time_blocks(batches, number))
            dropped.append(1 - sum(keeps) / n_layer)
    cost = statistics.median(blocks)
    # A median for each number of dropped blocks, against what disturbs a single turn.
    by_share: dict[float, list[float]] = {}
    for share, a, b in zip(dropped, whole, dropping, strict=True):
        by_share.setdefault(share, []).append(a - b)
    saved = sum(statistics.median(times) * len(times) for times in by_share.values())
    expected = sum(share * len(times) * cost for share, times in by_share.items())
    turns = [(a - b) / (share * cost) for share, a, b in zip(dropped, whole, dropping, strict=True) if share]
    lower, _, upper = statistics.quantiles(turns, n=4)
    return {
        "stage": stage,
        "whole": spread(whole),
        "blocks": spread(blocks),
        "dropping": spread(dropping),
        "dropped_share": statistics.mean(dropped),
        "saved_share_of_dropped_block_time": saved / expected,
        "turn_quartiles": [lower, upper],
        "saved_share_of_run": saved / (statistics.median(whole) * len(whole)),
    }


def main() -> int:
    from benchmarks.report import append, device_name, step_parser

    parser = step_parser(__doc__, deepspeed_config="ds_configs/zero1_bf16.json")
    parser.add_argument("--stages", default="0,1,2,3", help="ZeRO stages, a list with commas (0,1,2,3; the JSON's own with --schedule)")
    parser.add_argument("--schedule", type=int, default=0, metavar="N", help="the gates of a run of N steps in place of a fixed share")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the launcher's
    arguments, arguments.flags = parser.parse_known_args()
    os.chdir(ROOT)
    own = json.loads(Path(arguments.deepspeed_config).read_text(encoding="utf-8"))["zero_optimization"]["stage"]
    stages = [own] if arguments.schedule else [int(stage) for stage in arguments.stages.split(",")]

    found = []
    for stage in stages:
        row = measure(stage, arguments)
        found.append(row)
        if os.environ.get("RANK", "0") == "0":
            times = [row[key]["median_ms"] for key in ("whole", "blocks", "dropping")]
            quartiles, share = row["turn_quartiles"], 100 * row["saved_share_of_dropped_block_time"]
            print(
                f"stage {stage}: {times[0]:.1f} ms a step, of which the blocks {times[1]:.1f}; {times[2]:.1f} ms where "
                f"{100 * row['dropped_share']:.0f}% of them are dropped: {share:.1f}% of their time is saved ("
                f"quartiles of turns {100 * quartiles[0]:.0f} to {100 * quartiles[1]:.0f}), "
                f"{100 * row['saved_share_of_run']:.1f}% of the run",
                flush=True,
            )
    if not arguments.no_record and os.environ.get("RANK", "0") == "0":
        results = {
            "config": arguments.deepspeed_config,
            "preset": arguments.preset,
            "schedule": arguments.schedule,
            "ranks": int(os.environ.get("WORLD_SIZE", 1)),
            "stages": found,
        }
        append("layer_drop", results, device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
