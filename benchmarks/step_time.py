"""Time of a training step under several configurations, interleaved step by step in one process.

    python benchmarks/step_time.py                     # ZeRO 0 to 3, and attention within documents: two minutes on two cores
    python benchmarks/step_time.py --side "fp32: --deepspeed_config ds_configs/zero0_fp32.json" \\
                                   --side "fp32, ZeRO 3: --deepspeed_config ds_configs/zero3_fp32.json"

Each side is a name and flags of launch/pretrain.py. All sides train the same initial weights on the same samples; a ratio above 1 means
that the side's step takes longer than the first side's. Where their FLOPs differ, the last column is the ratio of FLOPs.
On one rank nothing is sent: the ZeRO stages differ by the engine's own work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report

QUICK = ("--preset", "nano", "--steps", "25")
SIDES = (
    *(f"ZeRO {stage}: --deepspeed_config ds_configs/zero{stage}_bf16.json" for stage in range(4)),
    "--no_cross_document: --deepspeed_config ds_configs/zero0_bf16.json --no_cross_document",
)


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Train all sides; one record."""
    from launch.config.run_config import resolve

    sides = report.sides_of(arguments.side or SIDES)
    for flags in sides.values():
        resolve([*report.run_flags(arguments), *flags])  # a mistake is reported before the first side is built
    trainings = {name: report.Training([*report.run_flags(arguments), *flags]) for name, flags in sides.items()}
    steps = {name: training.step for name, training in trainings.items()}
    seconds = report.interleave(steps, arguments.steps - report.WARM_UP_STEPS, report.WARM_UP_STEPS)
    (first, base), *others = seconds.items()
    rows = []
    for name, times in others:
        flops, _ = report.ratio(*(trainings[side].flops[report.WARM_UP_STEPS :] for side in (name, first)))
        bar = f"{flops:.3f}, the FLOPs'" if flops != 1 else ""
        rows.append(report.ratio_row(f"a step of {name} / {first}, {report.model_name(arguments)}", times, base, bar))
    apart = max(max(losses) - min(losses) for losses in zip(*(one.losses for one in trainings.values()), strict=True))
    print(f"losses differ by at most {apart:.4f}")
    details = {name: {"flags": flags, **report.spread(seconds[name])} for name, flags in sides.items()}
    yield rows, {"preset": arguments.preset, "sides": details}


def main() -> None:
    parser = report.run_parser(__doc__, steps=40)
    parser.add_argument("--side", action="append", metavar="'NAME: FLAGS'", help="a configuration; may be repeated (the five above)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
