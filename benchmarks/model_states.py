"""Model states on each rank, measured in live engines, against the plan of `--explain` and the ZeRO paper.

    python benchmarks/model_states.py                         # nano, two ranks, about a minute on two cores
    python benchmarks/model_states.py --preset gpt2 --ranks 4 --precisions bf16

The paper (Rajbhandari et al., arXiv 1910.02054, section 3.1 and figure 1), for Adam in mixed precision on N ranks: 2 bytes of weights, 2 of
gradients and 12 of optimizer states (fp32 weights and two moments) a parameter. Stage 1 divides the optimizer states by N, stage 2 the
gradients too, stage 3 all. Every tensor that the engine keeps is counted, each storage once, at the backward pass of a step after which the
sum is largest: there are two micro-batches, because stage 1 holds whole gradients only between them. In fp32 (4 + 4 + 8 bytes) DeepSpeed
keeps master weights at stages 1 to 3: 4 bytes per parameter over N, which the paper's column includes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report

STAGES = (0, 1, 2, 3)
QUICK = ("--precisions", "bf16")


def bytes_per_parameter(stage: int, ranks: int, precision: str) -> float:
    """Model states of one rank by the paper, in fp32 with the master weights that DeepSpeed keeps from stage 1 on."""
    weights, gradients, optimizer = (2, 2, 12) if precision != "fp32" else (4, 4, 8 if stage == 0 else 12)
    return weights / (ranks if stage >= 3 else 1) + gradients / (ranks if stage >= 2 else 1) + optimizer / (ranks if stage >= 1 else 1)


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Count the states of every stage and precision; one record."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from launch.config.run_config import resolve
    from model.accounting import parameter_count
    from tests.distributed.memory_jobs import PARTS
    from tests.distributed.ranks import Ranks

    table, runs = [], {}
    for precision, stage in itertools.product(arguments.precisions.split(","), STAGES):
        more = {"deepspeed_config": f"ds_configs/zero{stage}_{precision}.json"}
        flags = report.run_flags(arguments, micro_batch_size=1, global_batch_size=2 * arguments.ranks, **more)
        config, _ = resolve(flags, ranks=arguments.ranks)  # a mistake is reported before ranks start
        runs[precision, stage] = flags, parameter_count(config.model_config)
    print(f"bytes per parameter: {', '.join(PARTS)}", flush=True)
    with Ranks(arguments.ranks, "cpu") as pool:
        for (precision, stage), (flags, parameters) in runs.items():
            paper = bytes_per_parameter(stage, arguments.ranks, precision)
            for rank, (states, at_end, plan) in enumerate(pool.run("tests.distributed.memory_jobs:largest_states", flags=flags)):
                each = " + ".join(f"{states[part] / parameters:.2f}" for part in PARTS)
                total = f"{sum(states.values()) / parameters:.2f}, paper {paper:.2f}"
                end = f"at the end of the step {at_end / parameters:.2f}, plan {plan / parameters:.2f}"
                print(f"{precision} ZeRO {stage}, rank {rank}: {each} = {total}; {end}", flush=True)
                table.append([precision, stage, rank, *states.values(), round(paper * parameters), at_end, plan])
    rows = []
    for name, pairs in (
        ("the ZeRO paper's", [(sum(row[3:7]), row[7]) for row in table]),
        # The plan is that of the rank that holds most.
        ("the plan's at the end of a step", [max(row[8:] for row in table if row[:2] == list(key)) for key in runs]),
    ):
        largest = max(abs(measured / expected - 1) for measured, expected in pairs)
        what = f"model states in live engines / {name}, {report.model_name(arguments)}, {arguments.ranks} ranks"
        rows.append(report.Row(what, f"at most {100 * largest:.1f}% apart", bar="at most 5%"))
    columns = ["precision", "stage", "rank", *PARTS, "paper", "at_end", "plan"]
    yield rows, {"device": "cpu", "preset": arguments.preset, "ranks": arguments.ranks, "columns": columns, "table": table}


def main() -> None:
    parser = report.run_parser(__doc__, preset="nano")
    parser.add_argument("--ranks", type=int, default=2, help="ranks (%(default)s)")
    parser.add_argument("--precisions", default="bf16,fp16,fp32", help="precisions (%(default)s)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
