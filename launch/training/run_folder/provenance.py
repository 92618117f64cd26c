"""Describes a run for `run.json`: configuration, versions, commit, machine and command, so that it can be reproduced."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import uuid
from typing import Any

from launch.config.hardware import cpuinfo_field, device_type, gpus
from launch.config.run_config import ROOT, RunConfig
from launch.training.ranks.interleaving import interleaved_group

PACKAGES = ("torch", "deepspeed", "numpy", "tiktoken", "tokenizers", "transformers", "torchao", "liger-kernel")


def describe_run(config: RunConfig) -> dict[str, Any]:
    """The content of `run.json`: the resolved configuration, the corpus, versions, commit, machine and command."""
    manifest = config.corpus.manifest
    return {
        "run_id": uuid.uuid4().hex,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "flags": config.given,
        **config.as_json(),
        "corpus_fingerprint": config.corpus.fingerprint,
        "corpus": {
            "path": str(config.corpus.path),
            "sources": manifest["sources"],
            "vocab_size": config.corpus.vocab_size,
            "eot_id": config.corpus.eot_id,
        },
        "commit": repository_commit(),
        "versions": versions(),
        "machine": machine(),
        "interleaved": interleaved_group(),
    }


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that affect results."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # or a folder of that name on the path, such as a checkout
            found[name] = importlib.metadata.version(name)
    return {"python": platform.python_version(), **found}


def machine() -> dict[str, Any]:
    """The host, its processor, cores and OMP_NUM_THREADS, and the GPUs that a run may use: none with DS_ACCELERATOR=cpu."""
    host = {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": cpuinfo_field("model name") or platform.processor(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    return host | ({"gpus": names} if device_type() == "cuda" and (names := [gpu.name for gpu in gpus()]) else {})


def machine_in_words(found: dict[str, Any]) -> str:
    """The GPUs of a machine, or its processor and cores."""
    names = found.get("gpus", [])
    return f"{len(names)} x {names[0]}" if names else f"{found['processor']}, {found['cores']} cores"


def repository_commit() -> str | None:
    """The commit of the checkout, with `+changes` if tracked files differ from it; None if this is not a checkout."""
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        found = subprocess.run(describe, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
