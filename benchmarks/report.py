"""What the benchmarks share: flags, steps, spreads and ratios, and the JSON file where figures go, with commit and machine.

A benchmark is a module of this folder with a `main`. Beside it the module may have

    rows(record)    what a record of its own in results.json says, a `Row` for each comparison: for the last table and the README
    QUICK           flags that make a run short enough to try it out
    ALONE           why `python -m benchmarks` runs it only if it is named
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from launch.errors import nearest
from launch.training.provenance import machine, repository_commit, versions

#: Another file, where the figures are not to be kept beside the others.
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).with_name("results.json"))
#: What `append` puts before the benchmark's own values.
HEAD = ("benchmark", "date", "commit", "device", "machine", "versions")
#: Steps of each side that are not counted, where two sides train in turns.
WARM_UP_STEPS = 10


class Row(NamedTuple):
    """One comparison: which two things, the figure, its quartiles where it has a spread, and what it must reach where that is settled."""

    sides: str
    figure: str
    quartiles: tuple[float, float] | list[float] | None = None
    bar: str = ""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--no_record", action="store_true", help="do not append to benchmarks/results.json")
    return made


def step_parser(description: str | None, deepspeed_config: str = "ds_configs/zero0_bf16.json") -> argparse.ArgumentParser:
    """The flags of a benchmark that trains two sides in turns, step by step."""
    made = parser(description)
    made.add_argument("--preset", default="micro", help="model size (micro)")
    made.add_argument("--deepspeed_config", default=deepspeed_config, help="the engine's JSON (%(default)s)")
    made.add_argument("--steps", type=int, default=60, help=f"steps of each side, the first {WARM_UP_STEPS} not counted (60)")
    made.add_argument("--data", default="data/stdlib", help="corpus (data/stdlib)")
    return made


def cells_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of a benchmark that measures one cell after another, each with a record of its own."""
    made = parser(description)
    made.add_argument("--only", metavar="CELL", help="this cell (all)")
    made.add_argument("--tiny", action="store_true", help="a few cells at sizes for a CPU, to try the benchmark out")
    return made


def chosen(cells: dict[str, Any], only: str | None) -> dict[str, Any]:
    """The cell named `only`, or all. Ends the program with exit code 2 where there is no such cell."""
    if only is None:
        return cells
    if only not in cells:
        print(f"error: --only {only}: no such cell{nearest(only, cells)}; there are: {'; '.join(cells)}", file=sys.stderr)
        raise SystemExit(2)
    return {only: cells[only]}


def device_name() -> str:
    """As records name it: that of the GPU, or cpu."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles of a list of times, in milliseconds."""
    lower, median, upper = statistics.quantiles(seconds, n=4)
    return {"median_ms": 1e3 * median, "lower_quartile_ms": 1e3 * lower, "upper_quartile_ms": 1e3 * upper, "count": len(seconds)}


def ratio(over: Iterable[float], under: Iterable[float]) -> tuple[float, list[float]]:
    """Median and quartiles of the ratios of times that were taken in turns, pair by pair."""
    lower, median, upper = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4)
    return median, [lower, upper]


def show_times(name: str, seconds: list[float]) -> None:
    """A side's line on the terminal."""
    times = spread(seconds)
    print(
        f"{name:24} {times['median_ms']:8.1f} ms a step, "
        f"quartiles {times['lower_quartile_ms']:.1f} to {times['upper_quartile_ms']:.1f}, {times['count']} steps",
        flush=True,
    )


def train_step(engine: Any, batches: list[Any], tokens: int) -> tuple[float, float]:
    """Seconds of one step of `engine` (launch/training/engine.py) over `batches`, after which `tokens` are consumed; and its loss."""
    start = time.perf_counter()
    engine.set_learning_rate(tokens)
    for batch in batches:
        loss = engine.backward_and_step(engine.loss(batch), len(batches))
    value = float(loss)  # waits for the forward passes
    engine.collectives.wait()
    return time.perf_counter() - start, value


def records() -> list[dict[str, Any]]:
    """All that was ever appended, oldest first, and then what `python -m benchmarks.gpu` measured."""
    on_gpu = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(__file__).parent.glob("gpu/*.json"))]
    return appended() + [record for cells in on_gpu for cell in cells.values() for record in cell if record["benchmark"] != "setup"]


def appended() -> list[dict[str, Any]]:
    """The records of results.json."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []


def append(name: str, results: dict[str, Any], device: str) -> None:
    """Append one result of the benchmark `name` to `benchmarks/results.json`."""
    head = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("BENCHMARK_COMMIT") or repository_commit(),
        "device": device,
    }
    record = {**head, "machine": machine(), "versions": versions(), **results}
    RESULTS.write_text(json.dumps([*appended(), record], indent=1) + "\n", encoding="utf-8")
