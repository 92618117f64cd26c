"""Time of a training step under several configurations, interleaved 10 steps by 10.

    python benchmarks/step_time.py                     # ZeRO 0 to 3, and attention within documents: two minutes on two cores
    python benchmarks/step_time.py --side "fp32: --deepspeed_config ds_configs/zero0_fp32.json" \\
                                   --side "fp32, ZeRO 3: --deepspeed_config ds_configs/zero3_fp32.json"

Each side is a name and flags of launch/pretrain.py, which trains it in a process of its own. All sides train the same initial weights on
the same samples; a ratio above 1 means that the side's step takes longer than the first side's. Where their FLOPs differ, the column `bar`
has the ratio of FLOPs. On one rank nothing is sent: the ZeRO stages differ by the engine's own work.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report
from launch.comparison.interleaved import run_interleaved
from launch.config.run_config import resolve
from launch.errors import UsageError

QUICK = ("--preset", "nano", "--steps", "25")
SIDES = (
    *(f"ZeRO {stage}: --deepspeed_config ds_configs/zero{stage}_bf16.json" for stage in range(4)),
    "--no_cross_document: --deepspeed_config ds_configs/zero0_bf16.json --no_cross_document",
)


def sides_of(texts: Iterable[str]) -> dict[str, list[str]]:
    """The flags of launch/pretrain.py by the side's name. Raises UsageError for a text that is not 'NAME: FLAGS'."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, colon, flags = text.partition(": ")
        if not (name and colon and flags.strip()) or name in found:
            raise UsageError(f"--side {text!r}: must be 'NAME: FLAGS', with a name that no other side has")
        found[name] = flags.split()
    return found


def train_interleaved(scripts: list[list[str]], folder: str) -> None:
    """Run scripts that train, each a path and its arguments, in processes of their own with interleaved steps."""
    codes: dict[str, int] = {}
    numbered = {str(number): (1, script) for number, script in enumerate(scripts)}
    run_interleaved(numbered, Path(folder), lambda name, steps: None, codes.__setitem__)
    for name, code in codes.items():
        if code:
            report.fail(scripts[int(name)], code, Path(folder, f"{name}.out").read_text(encoding="utf-8"))


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Train all sides; one record."""
    sides = sides_of(arguments.side or SIDES)
    for flags in sides.values():
        resolve([*report.run_flags(arguments), *flags])  # a mistake is reported before the first side is built
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        command = ["launch/pretrain.py", *report.run_flags(arguments), "--runs_dir", folder]
        runs = [[*command, *flags, "--run_name", str(number)] for number, flags in enumerate(sides.values())]
        train_interleaved(runs, folder)
        lines = {name: report.step_lines(Path(folder, str(number))) for number, name in enumerate(sides)}
    count = min(map(len, lines.values()))  # techniques may plan more steps
    counted = {name: steps[report.WARM_UP_STEPS : count] for name, steps in lines.items()}
    seconds, flops = ({name: [line[key] for line in steps] for name, steps in counted.items()} for key in ("step_seconds", "flops"))
    (first, base), *others = seconds.items()
    rows = []
    for name, times in others:
        of_flops, _ = report.ratio(flops[name], flops[first])
        bar = f"{of_flops:.3f}, the FLOPs'" if of_flops != 1 else ""
        rows.append(report.ratio_row(f"a step of {name} / {first}, {report.model_name(arguments)}", times, base, bar))
    apart = max(max(losses) - min(losses) for losses in zip(*([line["loss"] for line in steps] for steps in counted.values()), strict=True))
    print(f"losses differ by at most {apart:.4f}")
    details = {name: {"flags": flags, **report.spread(seconds[name])} for name, flags in sides.items()}
    yield rows, {"preset": arguments.preset, "sides": details}


def main() -> None:
    parser = report.run_parser(__doc__, steps=40)
    parser.add_argument("--side", action="append", metavar="'NAME: FLAGS'", help="a configuration; may be repeated (the five above)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
