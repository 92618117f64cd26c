"""The share of the dropped blocks' time that a step saves: steps without and with dropped blocks, interleaved in one engine.

    python recipes/progressive_layer_drop/benchmark.py      # half of the blocks dropped, ZeRO stages 0 to 3; about three minutes

Each round trains three steps: one with all blocks, one with half of them, and one with all blocks that measures the blocks' own time, from
the input of the first to the output of the last, and the same in the backward pass. The share is the difference of the first two over half
of the blocks' time. The rest of a step (loss head, update) does not shrink.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks import report
from benchmarks.report import WARM_UP_STEPS

ONLY_BY_NAME = "it takes about three minutes"
QUICK = ("--preset", "nano", "--stages", "1", "--steps", "25")


def now() -> float:
    """Seconds, after the GPU has finished."""
    import torch  # seconds to import, which --help does without

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_stage(stage: int, arguments: argparse.Namespace) -> tuple[report.Row, dict[str, Any]]:
    """Train at one ZeRO stage; its row and its details."""
    training = report.Training([*report.run_flags(arguments), "--set", f"zero_optimization.stage={stage}"])
    technique, n_layer = training.techniques.members[0], training.config.shape.n_layer
    first, last = (training.engine.deepspeed.module.h[index] for index in (0, -1))
    clock: dict[str, float] = {}
    blocks: list[float] = []

    def start(module: Any, inputs: Any) -> None:
        clock["forward"] = now()
        inputs[0].register_hook(lambda gradient: clock.update(blocks=clock["blocks"] + now() - clock["backward"]))

    def end(module: Any, inputs: Any, output: Any) -> None:
        clock["blocks"] += now() - clock["forward"]
        output.register_hook(lambda gradient: clock.update(backward=now()))

    def train(drops: bool) -> None:
        """One step; the first block is never dropped, and the dropped ones change from step to step."""
        dropped = {1 + (training.steps + 2 * place) % (n_layer - 1) for place in range(n_layer // 2)} if drops else set()
        training.on_step = lambda step: setattr(technique, "keeps", [layer not in dropped for layer in range(n_layer)])
        training.step()

    def train_timed() -> None:
        clock["blocks"] = 0.0
        hooks = [first.register_forward_pre_hook(start), last.register_forward_hook(end)]
        train(False)
        for hook in hooks:
            hook.remove()
        blocks.append(clock["blocks"])

    sides = {"whole": lambda: train(False), "dropping": lambda: train(True), "timed": train_timed}
    seconds = report.interleave(sides, arguments.steps - WARM_UP_STEPS, WARM_UP_STEPS)
    half = statistics.median(blocks[WARM_UP_STEPS:]) * (n_layer // 2) / n_layer
    saved = [(whole - dropping) / half for whole, dropping in zip(seconds["whole"], seconds["dropping"], strict=True)]
    lower, _, upper = statistics.quantiles(saved, n=4)
    share = (statistics.median(seconds["whole"]) - statistics.median(seconds["dropping"])) / half
    what = f"time saved / time of the dropped blocks, half of the blocks, {report.model_name(arguments)}, ZeRO {stage}"
    spreads = {side: report.spread(times) for side, times in {**seconds, "blocks": blocks[WARM_UP_STEPS:]}.items()}
    return report.Row(what, f"{share:.2f}", [lower, upper]), {"stage": stage, **spreads}


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Train at all stages; one record."""
    rows, stages = zip(*(measure_stage(int(stage), arguments) for stage in arguments.stages.split(",")), strict=True)
    yield list(rows), {"preset": arguments.preset, "stages": list(stages)}


def main() -> None:
    parser = report.run_parser(__doc__, deepspeed_config="ds_configs/progressive_layer_drop.json", steps=40)
    parser.add_argument("--stages", default="0,1,2,3", help="ZeRO stages, separated by commas (%(default)s)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
