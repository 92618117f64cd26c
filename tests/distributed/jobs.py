"""What the ranks of a pool are asked to do. Every function runs on all ranks at once."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from launch.pretrain import train
from launch.run.config import resolve
from launch.run.folder import NoFolder, RunFolder
from launch.run.metrics import read_metrics
from launch.run.provenance import describe_run
from launch.run.signals import StopRequest


def pretrain(flags: list[str]) -> list[dict[str, Any]]:
    """`launch/pretrain.py` with `flags`, in this process group; the lines of its metrics."""
    config, _ = resolve([*flags, "--quiet"])
    path = Path(config.runs_dir) / config.run_name
    folder = RunFolder(path, describe_run(config), quiet=True) if os.environ["RANK"] == "0" else NoFolder()
    try:
        assert train(config, folder, StopRequest()) == 0
    finally:
        folder.close()
        gc.collect()
    return read_metrics(path / "metrics.jsonl")
