"""Time from the command to the end of the first step, on one rank of a CPU, through `python` and through `deepspeed`.

    python benchmarks/start_up.py                     # five starts of each, about two minutes on two cores

`python launch/pretrain.py` and `deepspeed --num_gpus 1 launch/pretrain.py` are interleaved. The time ends when the first step's line is in
`metrics.jsonl`; it includes the first evaluation. One start of each, which is not counted, comes first.
`python -X importtime launch/pretrain.py ...` shows what imports take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report
from launch.comparison.interleaved import free_port
from launch.config.flags import whole_number
from launch.config.run_config import resolve

QUICK = ("--starts", "3")
LAUNCHERS = {"python": [sys.executable], "deepspeed": [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "1"]}


def start(launcher: str, flags: list[str]) -> float:
    """Seconds from the command to the end of the first step."""
    port = ["--master_port", str(free_port())] if launcher == "deepspeed" else []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        metrics, seconds = Path(folder, "r", "metrics.jsonl"), 0.0
        command = [*LAUNCHERS[launcher], *port, "launch/pretrain.py", *flags, "--runs_dir", folder, "--run_name", "r"]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            if not seconds and metrics.exists() and '"loss"' in metrics.read_text(encoding="utf-8"):
                seconds = time.perf_counter() - began
            time.sleep(0.005)
    if process.returncode or not seconds:
        report.fail(command, process.returncode)
    return seconds


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Time all starts; one record."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    flags = report.run_flags(arguments, steps=1, eval_every=None)
    resolve(flags)  # a mistake is reported once, here
    starts: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
    for number in range(arguments.starts + 1):
        for launcher, times in starts.items():
            spent = start(launcher, flags)
            times += [spent] if number else []
    rows, name = [], Path(arguments.deepspeed_config).stem
    for launcher, times in starts.items():
        lower, median, upper = statistics.quantiles(times, n=4)
        what = f"{launcher} launch/pretrain.py to the end of the first step, {report.model_name(arguments)}, {name}"
        rows.append(report.Row(what, f"{median:.2f} s", [lower, upper], "under 9 s"))
    spreads = {launcher: report.spread(times) for launcher, times in starts.items()}
    yield rows, {"device": "cpu", "config": arguments.deepspeed_config, "preset": arguments.preset, "starts": spreads}


def main() -> None:
    parser = report.run_parser(__doc__, preset="nano", deepspeed_config="ds_configs/zero1_bf16.json")
    parser.add_argument("--starts", type=whole_number(2), default=5, help="starts of each that are counted (%(default)s)")
    report.run(__file__, parser, measure)


if __name__ == "__main__":
    main()
