"""What all benchmarks share: flags, interleaved sides, the record in results.json, and the lines on the terminal.

A benchmark is a script `benchmarks/<name>.py` with a function `main`. It passes `run` its flags and a
function `measure(arguments)`, which yields the rows and the details of each record. The script may also define

    QUICK           flags that shorten it, to check that it runs
    ONLY_BY_NAME    why `python -m benchmarks` runs it only when it is named
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from data_pipeline.staging import write_atomically
from launch.config.flags import as_words, whole_number
from launch.config.run_config import resolve
from launch.errors import UsageError, nearest, run_command
from launch.formats.metrics import read_metrics
from launch.training.observers import Observer
from launch.training.ranks.signals import StopRequest
from launch.training.run_folder.folder import RunFolder
from launch.training.run_folder.provenance import describe_run, machine, repository_commit, versions
from model.presets import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
#: `BENCHMARK_RESULTS` names another file.
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).with_name("results.json"))
#: What `append` writes beside the details.
HEAD = ("benchmark", "date", "commit", "device", "machine", "versions", "rows")
#: Steps at the start of each side that are not counted.
WARM_UP_STEPS = 10


class Row(NamedTuple):
    """One figure: what it is of, its quartiles if it has a spread, and the benchmark's target (`bar`) if it has one."""

    what: str
    figure: str
    quartiles: Sequence[float] | None = None
    bar: str = ""

    def __str__(self) -> str:
        spread = f", quartiles {self.quartiles[0]:.3f} to {self.quartiles[1]:.3f}" if self.quartiles else ""
        return f"{self.what}: {self.figure}{spread}{f' (bar: {self.bar})' if self.bar else ''}"


Measured = Iterator[tuple[list[Row], dict[str, Any]]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--no_record", action="store_true", help="do not append to benchmarks/results.json")
    return made


def run_parser(
    description: str | None, preset: str = "micro", deepspeed_config: str | None = None, steps: int = 0
) -> argparse.ArgumentParser:
    """The flags of a benchmark that trains, with its defaults; without `deepspeed_config` or `steps` it has no such flag."""
    made = parser(description)
    made.add_argument("--preset", default=preset, help="model size (%(default)s)")
    made.add_argument("--architecture", default="gpt2", choices=ARCHITECTURES, help="components of the model (%(default)s)")
    made.add_argument("--data", default="data/stdlib", help="corpus (%(default)s)")
    if deepspeed_config:
        made.add_argument("--deepspeed_config", default=deepspeed_config, help="DeepSpeed's JSON (%(default)s)")
    if steps:
        counted = f"steps of each side, the first {WARM_UP_STEPS} not counted (%(default)s)"
        made.add_argument("--steps", type=whole_number(WARM_UP_STEPS + 2), default=steps, help=counted)
    return made


def run_flags(arguments: argparse.Namespace, **more: object) -> list[str]:
    """The flags of launch/pretrain.py that `arguments` of `run_parser` and `more` give."""
    values = {name: getattr(arguments, name, None) for name in ("deepspeed_config", "preset", "architecture", "data", "steps")}
    values |= {"eval_every": 0, "save_every": 0, **more}
    return as_words({**values, "quiet": True})


def model_name(arguments: argparse.Namespace) -> str:
    """The preset, and the architecture if it is not GPT-2's."""
    return arguments.preset if arguments.architecture == "gpt2" else f"{arguments.preset}, {arguments.architecture}"


def cells_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of a benchmark that measures cells, each with its own record."""
    made = parser(description)
    made.add_argument("--only", metavar="CELL", help="measure this cell (all)")
    made.add_argument("--tiny", action="store_true", help="measure a few small cells that a CPU can train")
    return made


def chosen(cells: dict[str, Any], only: str | None) -> dict[str, Any]:
    """The cell named `only`, or all cells. Raises UsageError if there is no such cell."""
    if only is not None and only not in cells:
        raise UsageError(f"--only {only}: no such cell{nearest(only, cells)}; allowed are: {'; '.join(cells)}")
    return cells if only is None else {only: cells[only]}


def fail(command: Sequence[str], code: int, output: str = "") -> NoReturn:
    """Exit with the code of a command and the end of what it printed."""
    raise SystemExit(f"error: {' '.join(command)}: exit code {code}\n{output[-3000:]}".strip())


def require_gpu(arguments: argparse.Namespace) -> None:
    """Raises UsageError if there is no GPU and --tiny is not given."""
    if device_name() == "cpu" and not arguments.tiny:
        raise UsageError("this benchmark needs a GPU; --tiny runs a few small cells on a CPU")


def run(file: str, parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Measured]) -> None:
    """Parse the flags, measure, print the rows and append the records, then exit.

    A mistake of the user's is one line on standard error and exit code 2; a record with failures is exit code 1.
    """

    def main() -> int:
        arguments = parser.parse_args()
        os.chdir(ROOT)
        failed = False
        for rows, details in measure(arguments):
            print(*rows, sep="\n", flush=True)
            failed |= bool(details.get("failed"))
            if not arguments.no_record:
                append(Path(file).stem, rows, details)
        return int(failed)

    run_command(main)


def device_name() -> str:
    """The GPU's name, or cpu."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def interleave(
    sides: dict[str, Callable[[], Any]], rounds: int, warm_up: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each side in each of `rounds` rounds, after `warm_up` rounds that are not counted. The order of the sides rotates."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            sides[name]()
            if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(clock() - start)
    return {name: times[warm_up:] for name, times in seconds.items()}


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles of times, in milliseconds."""
    lower, median, upper = statistics.quantiles(seconds, n=4)
    return {"median_ms": 1e3 * median, "lower_quartile_ms": 1e3 * lower, "upper_quartile_ms": 1e3 * upper, "count": len(seconds)}


def ratio(over: Iterable[float], under: Iterable[float]) -> tuple[float, list[float]]:
    """Median and quartiles of the ratios of interleaved times, pair by pair."""
    lower, median, upper = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
    return median, [lower, upper]


def ratio_row(what: str, over: Iterable[float], under: Iterable[float], bar: str = "") -> Row:
    """The row of the ratio of two sides."""
    median, quartiles = ratio(over, under)
    return Row(what, f"{median:.3f}", quartiles, bar)


def train(flags: list[str], folder: str | Path, *observers: Observer) -> list[dict[str, Any]]:
    """Train in this process through the loop of launch/pretrain.py.

    The run is in `folder`/r. Returns the lines of `metrics.jsonl` that have a loss.
    """
    from launch import pretrain

    config, _ = resolve([*flags, "--runs_dir", str(folder), "--run_name", "r"])
    run_folder = RunFolder(Path(folder, "r"), describe_run(config), quiet=True)
    try:
        pretrain.train(config, run_folder, StopRequest(), observers)
    finally:
        run_folder.close()
    return step_lines(Path(folder, "r"))


def step_lines(run: Path) -> list[dict[str, Any]]:
    """The lines of the steps in a run's `metrics.jsonl`."""
    return [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


def records() -> list[dict[str, Any]]:
    """All records of results.json, oldest first, then those of `python -m benchmarks.gpu` that have figures."""
    on_gpu = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(__file__).parent.glob("gpu/*.json"))]
    return read_records(RESULTS) + [record for cells in on_gpu for cell in cells.values() for record in cell if record["rows"]]


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records in `file`, none if it does not exist."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def measured_commit() -> str | None:
    """The commit of the checkout, with `+changes` if tracked files differ from it, other than the records themselves."""
    found = repository_commit()
    records = [":(exclude)benchmarks/results.json", ":(exclude,glob)benchmarks/gpu/*.json"]
    if found and subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ".", *records], cwd=ROOT).returncode == 0:
        return found.removesuffix("+changes")
    return found


def append(name: str, rows: list[Row], details: dict[str, Any]) -> None:
    """Append a record of the benchmark `name` to results.json. `details` may name another `device` than this machine's."""
    record = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": measured_commit(),
        "device": details.get("device") or device_name(),
        "machine": machine(),
        "versions": versions(),
        "rows": [row._asdict() for row in rows],
        **{key: value for key, value in details.items() if key != "device"},
    }
    write_atomically(RESULTS, json.dumps([*read_records(RESULTS), record], indent=1) + "\n")
