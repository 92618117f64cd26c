"""Step times over a slow network: sides in turns over two hosts at 100 Mbit/s and at 1 Gbit/s, the preset `micro`, a rank and a core each.

    python benchmarks/slow_network.py                    # AdamW and 1-bit Adam, fp32 and bf16; about 15 minutes on two cores
    python benchmarks/slow_network.py --turns 1 --steps 3
    python benchmarks/slow_network.py --side "fp32: --deepspeed_config ds_configs/zero0_fp32.json" \\
                                      --side "clipped at 0.1, after 5: --recipe recipes/fp32 --set gradient_clipping=0.1"

A side is a name, optionally the number of its steps that are not counted (the first ones: memory is touched for the first time, and a
technique may only begin later), and its flags. The first side is what the others are compared with. The two hosts are namespaces of this
machine (tests/distributed/two_hosts.py), their cable is shaped to the rate, and each has one core for its rank and for its half of the
network's work. Each turn trains every side at every rate, from the start. Nothing else may run on those cores: how busy the machine is
before each run is printed and kept. Needs root. Writes the table to benchmarks/slow_network.md too.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

ALONE = "needs root and an idle machine; about 15 minutes"
QUICK = ("--turns", "1", "--steps", "3")


def rows(record: dict[str, Any]) -> list[Row]:
    first, found = record["rows"][0]["side"], []
    for row in record["rows"]:
        if row["side"] == first:
            base = row["step"]["median_ms"]
        else:
            sides = f"a step of {row['side']} / {first}, {row['mbit']:,} Mbit/s, {record['preset']}"
            quartiles = [row["step"][f"{end}_quartile_ms"] / base for end in ("lower", "upper")]
            found.append(Row(sides, f"{row['step']['median_ms'] / base:.2f}", quartiles))
    return found


TABLE = Path(__file__).with_suffix(".md")
COMPRESSED = "--deepspeed_config ds_configs/one_bit_adam.json --set optimizer.params.freeze_step=2"
SIDES = (
    "AdamW fp32: --deepspeed_config ds_configs/zero0_fp32.json",
    f"1-bit Adam fp32, after 4: {COMPRESSED} --set bf16.enabled=false",
    "AdamW bf16: --deepspeed_config ds_configs/zero0_bf16.json",
    f"1-bit Adam bf16, after 4: {COMPRESSED}",
)
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Side:
    """A name, flags of `launch/pretrain.py`, and how many of its first steps are not counted."""

    name: str
    flags: list[str]
    after: int

    @classmethod
    def parse(cls, text: str) -> Side:
        found = re.fullmatch(r"([^:,]+)(?:, after (\d+))?: (.+)", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r}: a side is 'NAME: FLAGS' or 'NAME, after N: FLAGS'")
        return cls(found[1], found[3].split(), int(found[2] or WARM_UP_STEPS))


def measure(sides: list[Side], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every side at every rate, in turns; a row for each, with the steps of all its turns."""
    import psutil

    from benchmarks.report import spread
    from tests.distributed.two_hosts import TwoHosts

    # A core for each host. Where there is one only, they share it.
    own = sorted(os.sched_getaffinity(0))
    steps: dict[tuple[int, str], list[dict[str, Any]]] = {(rate, side.name): [] for rate in arguments.rates for side in sides}
    busy: dict[tuple[int, str], float] = dict.fromkeys(steps, 0.0)
    links: dict[int, list[float]] = {rate: [] for rate in arguments.rates}
    flags = ["--preset", arguments.preset, "--data", arguments.data, "--eval_every", "0", "--save_every", "0", "--quiet"]
    flags += ["--micro_batch_size", arguments.micro_batch_size, "--global_batch_size", arguments.global_batch_size]
    cores, patience = (own[0], own[-1]), 3600.0
    with tempfile.TemporaryDirectory() as folder, TwoHosts(Path(folder) / "hosts", arguments.rates[0], cores, patience) as hosts:
        for turn in range(arguments.turns):
            for rate in arguments.rates:
                hosts.set_rate(rate)
                links[rate].append(hosts.measured_mbit())
                for place, side in enumerate(sides):
                    others = psutil.cpu_percent(1.0)
                    busy[rate, side.name] = max(busy[rate, side.name], others)
                    with tempfile.TemporaryDirectory() as runs:  # a run ends with a checkpoint, which nobody needs
                        length = ["--steps", side.after + arguments.steps]
                        lines = hosts.pretrain(Path(runs), f"side_{place}", *side.flags, *flags, *length)[side.after :]
                    steps[rate, side.name] += lines
                    seconds = sorted(line["step_seconds"] for line in lines)
                    print(
                        f"turn {turn + 1}, {rate} Mbit/s, {side.name}: {statistics.median(seconds):.3f} s a step "
                        f"({seconds[0]:.3f} to {seconds[-1]:.3f}); before it, the machine was {others:.0f}% busy",
                        flush=True,
                    )
    return [
        {
            "side": side.name,
            "flags": " ".join(side.flags),
            "after": side.after,
            "mbit": rate,
            "measured_mbit": statistics.median(links[rate]),
            "step": spread([line["step_seconds"] for line in steps[rate, side.name]]),
            "busy_percent": busy[rate, side.name],
            "bytes_sent": statistics.median(line["bytes_sent"] for line in steps[rate, side.name]),
        }
        for rate in arguments.rates
        for side in sides
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown. On the wire: what the bytes alone take at the measured rate."""
    lines = ["| network, Mbit/s | side | sent a step and rank, MB | on the wire, s | step, s (quartiles) | of the first side's |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        first = next(other for other in rows if other["mbit"] == row["mbit"])
        median, lower, upper = (row["step"][key] / 1e3 for key in ("median_ms", "lower_quartile_ms", "upper_quartile_ms"))
        wire = row["bytes_sent"] * 8e-6 / row["measured_mbit"]
        times = f"{wire:.3f} | {median:.3f} ({lower:.3f} to {upper:.3f}) | {row['step']['median_ms'] / first['step']['median_ms']:.2f}"
        lines.append(f"| {row['mbit']:,} ({row['measured_mbit']:.1f} measured) | {row['side']} | {row['bytes_sent'] / 1e6:.3f} | {times} |")
    return "\n".join(lines)


def main() -> int:
    from benchmarks.report import append
    from launch.training.provenance import machine, repository_commit
    from tests.distributed.two_hosts import missing

    parser = report.parser(__doc__)
    parser.add_argument("--side", action="append", metavar="'NAME[, after N]: FLAGS'", help="what is compared; may be repeated")
    parser.add_argument("--rates", default="100,1000", help="Mbit/s of the network, a list with commas (100,1000)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each side at each rate (3)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a run that are counted (8)")
    parser.add_argument("--preset", default="micro", help="model size (micro)")
    parser.add_argument("--micro_batch_size", default="4", help="sequences a rank takes at once (4)")
    parser.add_argument("--global_batch_size", default="8", help="sequences a step of both ranks (8, the preset's)")
    parser.add_argument("--data", default="data/stdlib", help="corpus (data/stdlib)")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    try:
        arguments.rates = [int(rate) for rate in arguments.rates.split(",")]
        sides = [Side.parse(text) for text in arguments.side or SIDES]
    except (argparse.ArgumentTypeError, ValueError) as error:
        parser.error(str(error))
    if len({side.name for side in sides}) < len(sides):
        parser.error("two sides have the same name")
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    rows = measure(sides, arguments)
    print(table(rows))
    if not arguments.no_record:
        where = f"{machine()['cores']} cores of an {machine()['processor']}, commit {repository_commit()}"
        page = f"`python benchmarks/slow_network.py`, preset `{arguments.preset}`, {where}\n\n{table(rows)}\n"
        TABLE.write_text(page, encoding="utf-8")
        keys = ("preset", "micro_batch_size", "global_batch_size", "turns", "steps")
        append("slow_network", {**{key: getattr(arguments, key) for key in keys}, "rows": rows}, "cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
