"""What a ZeRO stage costs on one rank: a step at stages 1, 2 and 3 against one at stage 0, in turns in one process.

    python benchmarks/stages.py                            # preset micro, bf16; about two minutes on two cores
    python benchmarks/stages.py --precisions bf16,fp32 --steps 40

One rank has nobody to share with and sends nothing: what is left is the engine's own work at each stage. An engine of each stage trains the
same initial weights on the same micro-batches, a step each, in an order that rotates. A ratio above 1 says that the stage costs time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks.report import Row

QUICK = ("--preset", "nano", "--steps", "25")
STAGES = (0, 1, 2, 3)


def rows(record: dict[str, Any]) -> list[Row]:
    return [
        Row(f"a step at ZeRO {stage} / at ZeRO 0, {precision}, {record['preset']}", f"{one['ratio']:.3f}", one["ratio_quartiles"])
        for precision, stages in record["precisions"].items()
        for stage, one in stages.items()
        if stage != "0"
    ]


def main() -> int:
    from benchmarks.report import WARM_UP_STEPS, append, device_name, ratio, show_times, spread, step_parser, train_step

    parser = step_parser(__doc__)
    parser.set_defaults(deepspeed_config="ds_configs/zero{stage}_{precision}.json")
    parser.add_argument("--precisions", default="bf16", help="precisions, a list with commas (bf16)")
    arguments = parser.parse_args()
    os.chdir(ROOT)

    from launch.config.run_config import resolve
    from launch.training.distributed import start_ranks
    from launch.training.engine import start_engine
    from recipes.technique import Techniques

    collectives = start_ranks()
    found: dict[str, dict[str, Any]] = {}
    for precision in arguments.precisions.split(","):

        def configured(stage: int, precision: str = precision) -> Any:
            file = arguments.deepspeed_config.format(stage=stage, precision=precision)
            run = ["--deepspeed_config", file, "--preset", arguments.preset, "--data", arguments.data, "--quiet"]
            return resolve([*run, "--steps", str(arguments.steps)])[0]

        configs = {stage: configured(stage) for stage in STAGES}
        engines = {stage: start_engine(config, Techniques(), collectives) for stage, config in configs.items()}
        config = configs[0]
        loader = config.training_loader(collectives)
        seconds: dict[int, list[float]] = {stage: [] for stage in STAGES}
        apart = 0.0
        for number in range(arguments.steps):
            place = number * config.global_batch_size, config.micro_batch_size, config.gradient_accumulation_steps
            batches = list(loader.micro_batches(*place))
            losses = []
            first = number % len(STAGES)
            for stage in (*STAGES[first:], *STAGES[:first]):
                spent, loss = train_step(engines[stage], batches, (number + 1) * config.tokens_per_step)
                seconds[stage].append(spent)
                losses.append(loss)
            apart = max(apart, max(losses) - min(losses))
        counted = {stage: times[WARM_UP_STEPS:] for stage, times in seconds.items()}
        found[precision] = {}
        for stage, times in counted.items():
            show_times(f"{precision} ZeRO {stage}", times)
            median, quartiles = ratio(times, counted[0])
            found[precision][str(stage)] = {"step": spread(times), "ratio": median, "ratio_quartiles": quartiles}
            if stage:
                print(f"{'':24} {median:.3f} of stage 0's (quartiles {quartiles[0]:.3f} to {quartiles[1]:.3f})", flush=True)
        print(f"losses at most {apart:.4f} apart", flush=True)
    if not arguments.no_record:
        append("stages", {"preset": arguments.preset, "precisions": found}, device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
