"""From the command to the end of the first step: a second start, on one rank, of a preset `nano` on a CPU; and where its seconds go.

    python benchmarks/start_up.py                     # five starts of each kind, about two minutes on two cores
    python benchmarks/start_up.py --imports 15        # and the dearest imports

In turns: `python launch/pretrain.py` and `deepspeed --num_gpus 1 launch/pretrain.py`, from the moment the command is given until the first
step's line is in `metrics.jsonl`, the first evaluation included; one start of each that is not counted comes before. The parts are those
of one more start each round, in which clocks stand around them; there the imports come first and not each where it is needed.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

QUICK = ("--starts", "3")
BAR_SECONDS = 9.0
LAUNCHERS = {"python": [sys.executable], "deepspeed": [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "1"]}


def rows(record: dict[str, Any]) -> list[Row]:
    return [
        Row(
            f"{launcher} launch/pretrain.py to the end of the first step, {record['preset']}, {Path(record['config']).stem}",
            f"{one['median_ms'] / 1e3:.2f} s",
            (one["lower_quartile_ms"] / 1e3, one["upper_quartile_ms"] / 1e3),
            f"under {BAR_SECONDS:g} s",
        )
        for launcher, one in record["starts"].items()
    ]


def start(launcher: str, flags: list[str], folder: Path) -> float:
    """Seconds from the command to the end of the first step."""
    from tests.helpers import free_port

    port = ["--master_port", str(free_port())] if launcher == "deepspeed" else []
    metrics, began = folder / "r" / "metrics.jsonl", time.perf_counter()
    command = [*LAUNCHERS[launcher], *port, "launch/pretrain.py", *flags, "--runs_dir", str(folder), "--run_name", "r"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (metrics.exists() and '"loss"' in metrics.read_text(encoding="utf-8")):
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(command)}: ended with exit code {process.returncode} before its first step")
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    if process.wait():
        raise SystemExit(f"{' '.join(command)}: ended with exit code {process.returncode}")
    return seconds


def parts(flags: list[str], folder: Path) -> dict[str, float]:
    """Seconds of each part of a start through `python`."""
    command = [sys.executable, __file__, "--parts_of", str(time.time()), *flags, "--runs_dir", str(folder), "--run_name", "r"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report_parts(began: float, flags: list[str]) -> None:
    """In a process of its own, begun at `began`: train, and print where the time went up to the end of the first step."""
    seconds: dict[str, float] = {}
    last = began

    def mark(part: str) -> None:
        nonlocal last
        now = time.time()
        seconds[part] = seconds.get(part, 0.0) + now - last
        last = now

    def clocked(owner: Any, name: str, part: str, before: str = "the rest", then: Callable[[], None] = lambda: None) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            mark(before)
            result = function(*arguments, **options)
            mark(part)
            then()
            return result

        setattr(owner, name, call)

    mark("the interpreter")
    sys.argv = ["launch/pretrain.py", *flags]
    from launch import pretrain
    from launch.training.folder import RunFolder

    mark("our own imports")
    import torch  # noqa: F401

    mark("import torch")
    from launch.config.hardware import quiet_deepspeed

    quiet_deepspeed()
    import deepspeed

    mark("import deepspeed")
    from launch.training import distributed, engine
    from launch.training.evaluation import Evaluation
    from launch.training.meter import Meter

    mark("our own imports")

    def finish() -> None:
        print("\n" + json.dumps(seconds), flush=True)

    clocked(pretrain, "resolve", "validation")
    clocked(distributed, "start_ranks", "ranks")
    clocked(engine, "GPT", "the model's weights")
    clocked(engine, "_adam", "the optimizer (torch._dynamo's import)")
    clocked(deepspeed, "initialize", "deepspeed.initialize")
    clocked(RunFolder, "open_metrics", "the run's files, TensorBoard")
    clocked(Evaluation, "loss", "first evaluation")
    clocked(Meter, "end_step", "first step", before="first step", then=finish)
    pretrain.main()


def dearest_imports(count: int, flags: list[str], folder: Path) -> list[tuple[float, str]]:
    """The imports of a start that took longest, each with what it imports itself; seconds and name."""
    command = [sys.executable, "-X", "importtime", "launch/pretrain.py", *flags, "--runs_dir", str(folder), "--run_name", "r"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = re.findall(r"^import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)$", done.stderr, re.MULTILINE)
    return sorted(((int(micros) / 1e6, name) for micros, name in found), reverse=True)[:count]


def main() -> int:
    if sys.argv[1:2] == ["--parts_of"]:
        report_parts(float(sys.argv[2]), sys.argv[3:])
    parser = report.parser(__doc__)
    parser.add_argument("--preset", default="nano", help="model size (nano)")
    parser.add_argument("--deepspeed_config", default="ds_configs/zero1_bf16.json", help="the engine's JSON (ds_configs/zero1_bf16.json)")
    parser.add_argument("--data", default="data/stdlib", help="corpus (data/stdlib)")
    parser.add_argument("--starts", type=int, default=5, help="starts of each kind that are counted (5)")
    parser.add_argument("--imports", type=int, default=0, metavar="N", help="print the N dearest imports too")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ["DS_ACCELERATOR"] = "cpu"

    flags = ["--deepspeed_config", arguments.deepspeed_config, "--preset", arguments.preset, "--data", arguments.data]
    flags += ["--steps", "1", "--save_every", "0", "--quiet"]
    seconds: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
    clocks: list[dict[str, float]] = []
    for number in range(arguments.starts + 1):
        for launcher, times in seconds.items():
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                spent = start(launcher, flags, Path(folder))
            times += [spent] if number else []
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            clocks += [parts(flags, Path(folder))] if number else []
    starts = {launcher: report.spread(times) for launcher, times in seconds.items()}
    for launcher, times in starts.items():
        lower, median, upper = (times[key] / 1e3 for key in ("lower_quartile_ms", "median_ms", "upper_quartile_ms"))
        print(
            f"{launcher:10} {median:5.2f} s to the end of the first step (quartiles {lower:.2f} to {upper:.2f}, {arguments.starts} starts)"
        )
    shares = {part: statistics.median(clock[part] for clock in clocks) for part in clocks[0]}
    for part, share in shares.items():
        print(f"  {share:5.2f} s  {part}")
    if arguments.imports:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            for spent, name in dearest_imports(arguments.imports, flags, Path(folder)):
                print(f"  {spent:5.2f} s  import {name}")
    if not arguments.no_record:
        results = {"config": arguments.deepspeed_config, "preset": arguments.preset, "starts": starts, "parts_seconds": shares}
        report.append("start_up", results, "cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
