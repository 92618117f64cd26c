"""What dropping tokens saves: steps whose middle blocks see some tokens of each sequence and steps that drop none, in turns in one engine.

    python benchmarks/random_ltd.py                       # preset micro, 64, 128 and 192 of 256 tokens; about three minutes on two cores
    python benchmarks/random_ltd.py --preset gpt2 --reserved 128,512

Each pair of steps trains on the same micro-batches. Beside the ratio of the times stands that of the FLOPs: first block, last block, head
and update do not shrink, and to gather tokens and put them back costs time of its own. A ratio below 1 says that dropping saves time.
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

ALONE = "figures of recipes/random_ltd; about three minutes"
QUICK = ("--preset", "nano", "--reserved", "64", "--steps", "25")


def rows(record: dict[str, Any]) -> list[Row]:
    def row(reserved: int, ratio: list[float], flops: float, **_: Any) -> Row:
        sides = f"a step that keeps {reserved} tokens / one that keeps all, {record['preset']}"
        return Row(sides, f"{ratio[1]:.3f}", (ratio[0], ratio[2]), f"{flops:.3f}, the FLOPs'")

    return [row(**one) for one in record["lengths"]]


def main() -> int:
    from benchmarks.report import WARM_UP_STEPS, append, device_name, ratio, spread, step_parser, train_step

    parser = step_parser(__doc__, deepspeed_config="ds_configs/zero1_bf16.json")
    parser.add_argument("--reserved", default="64,128,192", help="how many tokens are kept, a list with commas (64,128,192)")
    arguments = parser.parse_args()
    os.chdir(ROOT)

    from launch.config.run_config import resolve
    from launch.training.distributed import start_ranks
    from launch.training.engine import start_engine
    from model.accounting import flops_per_token
    from recipes.random_ltd.technique import RandomLTD
    from recipes.technique import Techniques

    run = ["--deepspeed_config", arguments.deepspeed_config, "--preset", arguments.preset, "--data", arguments.data, "--quiet"]
    config = resolve([*run, "--steps", str(arguments.steps)])[0]
    technique = RandomLTD({}, config)
    collectives = start_ranks()
    engine = start_engine(config, Techniques([technique]), collectives)
    loader = config.training_loader(collectives)

    def train(number: int, reserved: int, batches: list[Any]) -> float:
        """Seconds of one step that keeps `reserved` tokens."""
        technique.on_step(number)
        technique.reserved = reserved
        return train_step(engine, batches, number * config.tokens_per_step)[0]

    lengths = []
    for reserved in map(int, arguments.reserved.split(",")):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(1, arguments.steps + 1):
            place = (number - 1) * config.global_batch_size, config.micro_batch_size, config.gradient_accumulation_steps
            batches = list(loader.micro_batches(*place))
            for drops in (False, True) if number % 2 else (True, False):
                seconds[drops].append(train(number, reserved if drops else config.shape.seq_len, batches))
        whole, dropping = (seconds[drops][WARM_UP_STEPS:] for drops in (False, True))
        median, (lower, upper) = ratio(dropping, whole)
        technique.reserved = reserved
        flops = flops_per_token(config.model_config, kept_blocks=technique.metrics()["kept_blocks"]) / flops_per_token(config.model_config)
        lengths.append(
            {"reserved": reserved, "whole": spread(whole), "dropping": spread(dropping), "ratio": [lower, median, upper], "flops": flops}
        )
        print(
            f"{reserved} of {config.shape.seq_len} tokens in {len(technique.layers)} of {config.shape.n_layer} blocks: "
            f"{lengths[-1]['dropping']['median_ms']:.1f} ms a step against {lengths[-1]['whole']['median_ms']:.1f}, ratio {median:.3f} "
            f"(quartiles {lower:.3f} to {upper:.3f}), of the FLOPs {flops:.3f}",
            flush=True,
        )
    if not arguments.no_record:
        results = {"config": arguments.deepspeed_config, "preset": arguments.preset, "lengths": lengths}
        append("random_ltd", results, device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
