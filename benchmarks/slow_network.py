"""Step times over a slow network, interleaved: two hosts at 100 Mbit/s and at 1 Gbit/s, preset `micro`, one rank and one core each.

    python benchmarks/slow_network.py                    # AdamW and 1-bit Adam, fp32 and bf16; about 15 minutes on two cores
    python benchmarks/slow_network.py --side "fp32: --recipe recipes/fp32" \\
                                      --side "clipped at 0.1: --recipe recipes/fp32 --set gradient_clipping=0.1"

A side is a name and flags of launch/pretrain.py. The first side is what the others are compared with. The hosts are network namespaces of
this machine (tests/distributed/two_hosts.py) whose link is shaped to the rate; each has one core for its rank and its half of the network
stack. In each turn every side trains at every rate from step 1. Needs root and otherwise idle cores. The record has the seconds and bytes
of each side's step, and the measured rate of the link.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report
from launch.config.flags import whole_number
from launch.config.run_config import resolve
from launch.errors import UsageError

ONLY_BY_NAME = "it needs root and an idle machine, and takes about 15 minutes"
QUICK = ("--turns", "1", "--steps", "3")
COMPRESSED = "--deepspeed_config ds_configs/one_bit_adam.json --set optimizer.params.freeze_step=2"
SIDES = (
    "AdamW fp32: --deepspeed_config ds_configs/zero0_fp32.json",
    f"1-bit Adam fp32: {COMPRESSED} --set bf16.enabled=false",
    "AdamW bf16: --deepspeed_config ds_configs/zero0_bf16.json",
    f"1-bit Adam bf16: {COMPRESSED}",
)
#: Steps of a run that are not counted: the first touch memory, and 1-bit Adam compresses after its second.
WARM_UP_STEPS = 4


def train(sides: dict[str, list[str]], common: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every side at every rate in turns, with the `common` flags. Returns a row for each, over the steps of all turns."""
    from tests.distributed.two_hosts import TwoHosts

    own, rates = sorted(os.sched_getaffinity(0)), arguments.rates
    keys = [(rate, name) for rate in rates for name in sides]
    steps: dict[tuple[int, str], list[dict[str, Any]]] = {key: [] for key in keys}
    links: dict[int, list[float]] = {rate: [] for rate in rates}
    with tempfile.TemporaryDirectory() as folder, TwoHosts(Path(folder) / "hosts", rates[0], (own[0], own[-1]), 3600.0) as hosts:
        for turn in range(arguments.turns):
            for rate in rates:
                hosts.set_rate(rate)
                links[rate].append(hosts.measured_mbit())
                for place, (name, flags) in report.rotated(list(enumerate(sides.items())), turn):
                    with tempfile.TemporaryDirectory() as runs:  # removed at once, with the checkpoint at the run's end
                        lines = hosts.pretrain(Path(runs), f"side_{place}", *flags, *common)[WARM_UP_STEPS:]
                    steps[rate, name] += lines
                    median = statistics.median(line["step_seconds"] for line in lines)
                    print(f"turn {turn + 1}, {rate} Mbit/s, {name}: {median:.3f} s per step", flush=True)
    return [
        {
            "side": name,
            "flags": " ".join(sides[name]),
            "mbit": rate,
            "measured_mbit": statistics.median(links[rate]),
            "step_seconds": [line["step_seconds"] for line in steps[rate, name]],
            "bytes_sent": statistics.median(line["bytes_sent"] for line in steps[rate, name]),
        }
        for rate, name in keys
    ]


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Train all sides; one record."""
    from tests.distributed.two_hosts import missing

    sides = report.sides_of(arguments.side or SIDES)
    batches = {name: getattr(arguments, name) for name in ("micro_batch_size", "global_batch_size")}
    common = report.run_flags(arguments, steps=WARM_UP_STEPS + arguments.steps, **batches)
    for flags in sides.values():
        resolve([*flags, *common], ranks=2)  # a mistake is reported once, here
    if reason := missing():
        raise UsageError(reason)
    table = train(sides, common, arguments)
    rows = []
    for row in table:
        base = next(other for other in table if other["mbit"] == row["mbit"])
        if row is not base:
            what = f"a step of {row['side']} / {base['side']}, {row['mbit']:,} Mbit/s, {report.model_name(arguments)}"
            rows.append(report.ratio_row(what, row["step_seconds"], base["step_seconds"]))
    keys = ("preset", "micro_batch_size", "global_batch_size", "turns", "steps")
    yield rows, {"device": "cpu", **{key: getattr(arguments, key) for key in keys}, "table": table}


def main() -> None:
    parser = report.run_parser(__doc__)
    parser.add_argument("--side", action="append", metavar="'NAME: FLAGS'", help="a configuration; may be repeated (the four above)")
    parser.add_argument("--rates", nargs="+", type=whole_number(1), default=[100, 1000], help="Mbit/s of the network (100 1000)")
    parser.add_argument("--turns", type=whole_number(1), default=3, help="runs of each side at each rate (%(default)s)")
    parser.add_argument("--steps", type=whole_number(2), default=8, help="steps of a run that are counted (%(default)s)")
    parser.add_argument("--micro_batch_size", type=whole_number(1), default=4, help="sequences of a rank's micro-batch (%(default)s)")
    parser.add_argument("--global_batch_size", type=whole_number(1), default=8, help="sequences per step on both ranks (%(default)s)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
