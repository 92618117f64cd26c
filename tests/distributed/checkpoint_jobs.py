"""What ranks load from damaged checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.training.checkpoints.checkpoint import Checkpoints
from launch.training.engine import start_engine
from launch.training.ranks.distributed import start_ranks
from recipes.registry import make_techniques
from tests.distributed.jobs import forget_engines


def load_each(flags: list[str], runs: list[str]) -> list[dict[str, Any]]:
    """Load the newest good checkpoint of each of `runs` into one engine.

    Of each: `step`, a digest of the `content` of this rank's engine and techniques, the `log`, and in place of the first two `refused`,
    the lines of a UsageError.
    """
    config, _ = resolve([*flags, "--quiet"])
    collectives = start_ranks()
    techniques = make_techniques(config)
    engine = start_engine(config, techniques, collectives)
    found = []
    for run in map(Path, runs):
        log: list[str] = []
        run_id = json.loads((run / "run.json").read_text()).get("run_id")
        checkpoints = Checkpoints(run / "checkpoints", 9, engine.ds_engine, techniques, collectives, lambda: None, log.append, run_id)
        try:
            state = checkpoints.load_newest()
            content = _content([engine.ds_engine.module.state_dict(), engine.ds_engine.optimizer.state_dict(), techniques.state_dict()])
            found.append({"step": state and state["step"], "content": content, "log": log})
        except UsageError as refused:
            found.append({"refused": refused.faults, "log": log})
    forget_engines()
    return found


def _content(state: Any) -> str:
    digest = hashlib.sha256()
    for leaf in _leaves(state):
        if isinstance(leaf, torch.Tensor):
            digest.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (int, float, str)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, dict):
        for key in state:
            yield from (key, *_leaves(state[key]))
    elif isinstance(state, (list, tuple)):
        for item in state:
            yield from _leaves(item)
    else:
        yield (
            vars(state) and str(sorted(vars(state).items()))
            if hasattr(state, "__dict__") and not isinstance(state, torch.Tensor)
            else state
        )
