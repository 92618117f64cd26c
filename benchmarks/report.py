"""Where the figures of a benchmark go: a table on the terminal, and a JSON file with commit and machine."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from launch.run.provenance import machine, repository_commit, versions

RESULTS = Path(__file__).with_name("results.json")
#: Steps of each side that are not counted, where two sides train in turns.
WARM_UP_STEPS = 10


def step_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of a benchmark that trains two sides in turns, step by step."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="micro", help="model size (micro)")
    parser.add_argument("--deepspeed_config", default="ds_configs/zero0_bf16.json", help="the engine's JSON (ds_configs/zero0_bf16.json)")
    parser.add_argument("--steps", type=int, default=60, help=f"steps of each side, the first {WARM_UP_STEPS} not counted (60)")
    parser.add_argument("--data", default="data/stdlib", help="corpus (data/stdlib)")
    return parser


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles of a list of times, in milliseconds."""
    lower, median, upper = statistics.quantiles(seconds, n=4)
    return {"median_ms": 1e3 * median, "lower_quartile_ms": 1e3 * lower, "upper_quartile_ms": 1e3 * upper, "count": len(seconds)}


def append(name: str, results: dict[str, Any], device: str) -> None:
    """Append one result of the benchmark `name` to `benchmarks/results.json`."""
    records = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    records.append(
        {
            "benchmark": name,
            "date": time.strftime("%Y-%m-%d"),
            "commit": repository_commit(),
            "device": device,
            "machine": machine(),
            "versions": versions(),
            **results,
        }
    )
    RESULTS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
