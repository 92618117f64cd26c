"""Where the figures of a benchmark go: a table on the terminal, and a JSON file with commit and machine."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from launch.run.provenance import machine, repository_commit, versions

RESULTS = Path(__file__).with_name("results.json")


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
