"""What `run.json` records beside the configuration: where a number comes from, so that it can be had again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import uuid
from typing import Any

from launch.config.hardware import gpu_names
from launch.config.run_config import ROOT, RunConfig
from launch.training.interleaving import interleaved_group

PACKAGES = ("torch", "deepspeed", "numpy", "tiktoken", "tokenizers", "transformers")


def describe_run(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration, the corpus, versions, commit, machine and command. Imports no torch."""
    manifest = config.corpus.manifest
    return {
        "run_id": uuid.uuid4().hex,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        **config.as_json(),
        "corpus_fingerprint": config.corpus.fingerprint,
        "corpus": {"path": str(config.corpus.path), "sources": manifest["sources"], "vocab_size": config.corpus.vocab_size},
        "commit": repository_commit(),
        "versions": versions(),
        "machine": machine(),
        "interleaved": interleaved_group(),
    }


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that decide numbers."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def machine() -> dict[str, Any]:
    """The host, its processor and its cores, and the GPUs that a run may use."""
    of_host = {"host": platform.node(), "system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()}
    return of_host | ({"gpus": names} if (names := gpu_names()) else {})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def repository_commit() -> str | None:
    """The checkout's commit, with `+changes` where tracked files differ from it; None where this is no checkout."""
    try:
        commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        changes = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")) if commit.returncode == 0 else None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.processor())
    except OSError:
        return platform.processor()
