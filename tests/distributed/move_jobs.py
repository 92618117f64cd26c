"""What ranks hold after a checkpoint of another layout was loaded, asked of DeepSpeed's own accessors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.training.checkpoint import Checkpoints
from launch.training.distributed import start_ranks
from launch.training.engine import start_engine
from recipes.registry import make_techniques
from tests.distributed.jobs import forget_engines


def loaded(flags: list[str]) -> dict[str, Any]:
    """Resume the run of `flags` without training. What this rank's engine then holds, or `refused`, the lines of a UsageError."""
    config, _ = resolve([*flags, "--quiet"])
    collectives = start_ranks()
    techniques = make_techniques(config)
    engine = start_engine(config, techniques, collectives).deepspeed
    folder, log = Path(config.runs_dir) / config.run_name, list[str]()
    run_id = json.loads((folder / "run.json").read_text())["run_id"]
    checkpoints = Checkpoints(folder / "checkpoints", 9, engine, techniques, collectives, lambda: None, log.append, run_id)
    try:
        state = checkpoints.load_newest()
        assert state is not None
        return {"log": log, "notes": list(techniques.notes), **held(engine)}
    except UsageError as refused:
        return {"refused": refused.faults, "log": log}
    finally:
        forget_engines()


def held(engine: Any) -> dict[str, Any]:
    """Digests of the fp32 weights, the 16-bit or fp32 weights of the model, and the states of every parameter; steps and counters."""
    wrapper, found = engine.optimizer, dict[str, Any]()
    base = getattr(wrapper, "optimizer", wrapper)
    stage = engine.zero_optimization_stage()
    if stage in (1, 2):
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
    masters = {}
    if stage == 0:
        halves = [half for group in getattr(wrapper, "fp16_groups", ()) for half in group] or list(engine.module.parameters())
        fulls = [full for group in getattr(wrapper, "fp32_groups", ()) for full in group] or halves
        masters = {id(half): full for half, full in zip(halves, fulls, strict=True)}
    for name, parameter in engine.module.named_parameters():
        if stage:
            found[name] = digest(safe_get_full_fp32_param(parameter))
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{key}"] = digest(safe_get_full_optimizer_state(parameter, key))
        else:
            master = masters[id(parameter)]
            found[name] = digest(master)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{key}"] = digest(base.state[master][key])
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[f"{name}.computed"] = digest(parameter)
    steps = [state["step"] for state in base.state.values()]
    shared = {step.data_ptr() for step in steps if torch.is_tensor(step)}
    assert len(shared) in (0, len(steps)), "each part counts its own steps"
    counters = {name: getattr(engine, name) for name in ("global_steps", "skipped_steps", "global_samples")}
    return {"content": found, "steps": sorted({float(step) for step in steps}), "counters": counters}


def digest(tensor: torch.Tensor) -> str:
    """Of the values of a tensor."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
