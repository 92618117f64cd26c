"""What attention that stays within documents costs: a step with `--no_cross_document` against one without, in turns in one process.

    python benchmarks/no_cross_document.py            # about a minute on two cores
    python benchmarks/no_cross_document.py --preset nano --deepspeed_config ds_configs/zero0_fp32.json

Two engines of the same JSON train the same initial weights on the same micro-batches, a step each. The one with the flag makes a mask
from the tokens, once a forward pass, and its attention reads the mask where the other skips what lies above the diagonal. A ratio above
1 says that the flag costs time.
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


def rows(record: dict[str, Any]) -> list[Row]:
    sides = f"a step with --no_cross_document / one without, {record['preset']}"
    return [Row(sides, f"{record['step_time_ratio']:.3f}", record["ratio_quartiles"])]


def main() -> int:
    from benchmarks.report import WARM_UP_STEPS, append, device_name, ratio, show_times, spread, step_parser, train_step

    parser = step_parser(__doc__)
    arguments = parser.parse_args()
    os.chdir(ROOT)

    from launch.config.run_config import resolve
    from launch.training.distributed import start_ranks
    from launch.training.engine import start_engine
    from recipes.technique import Techniques

    run = ["--deepspeed_config", arguments.deepspeed_config, "--preset", arguments.preset, "--data", arguments.data, "--quiet"]
    run += ["--steps", str(arguments.steps)]
    configs = [resolve([*run, *flags])[0] for flags in ([], ["--no_cross_document"])]
    collectives = start_ranks()
    engines = [start_engine(config, Techniques(), collectives) for config in configs]
    loader = configs[0].training_loader(collectives)
    config = configs[0]
    seconds: tuple[list[float], list[float]] = ([], [])
    ends, apart = 0, 0.0
    for number in range(arguments.steps):
        place = number * config.global_batch_size, config.micro_batch_size, config.gradient_accumulation_steps
        batches = list(loader.micro_batches(*place))
        ends += sum(int((batch[:, :-1] == config.corpus.eot_id).sum()) for batch in batches)
        losses = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):  # neither is always the one that finds the batch in the cache
            spent, losses[side] = train_step(engines[side], batches, (number + 1) * config.tokens_per_step)
            seconds[side].append(spent)
        apart = max(apart, abs(losses[0] - losses[1]))

    without, within = (times[WARM_UP_STEPS:] for times in seconds)
    median, (lower, upper) = ratio(within, without)
    show_times("without the flag", without)
    show_times("--no_cross_document", within)
    print(
        f"a step with the flag takes {median:.3f} times the one without (quartiles {lower:.3f} to {upper:.3f}); "
        f"{ends} documents ended in {arguments.steps * config.global_batch_size} windows of {config.shape.seq_len} tokens; "
        f"losses at most {apart:.4f} apart"
    )
    if not arguments.no_record:
        results = {
            "config": arguments.deepspeed_config,
            "preset": arguments.preset,
            "without": spread(without),
            "within": spread(within),
            "step_time_ratio": median,
            "ratio_quartiles": [lower, upper],
            "document_ends": ends,
            "windows": arguments.steps * config.global_batch_size,
            "largest_loss_difference": apart,
        }
        append("no_cross_document", results, device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
