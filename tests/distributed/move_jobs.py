"""What ranks hold after a checkpoint of another layout was loaded, by DeepSpeed's own accessors; and an engine that is filled by hand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.training.checkpoints.checkpoint import Checkpoints
from launch.training.checkpoints.move import Move
from launch.training.engine import TrainingEngine, start_engine
from launch.training.observers import Observer
from launch.training.ranks.distributed import start_ranks
from recipes.registry import make_techniques
from tests.distributed.jobs import forget_engines, pretrain


def loaded(flags: list[str], file: str = "") -> dict[str, Any]:
    """Resume the run of `flags` without training; what this rank then holds, or `refused`, the lines of a UsageError.

    file: where rank 0 saves the weights and the state of each parameter.
    """
    config, _ = resolve([*flags, "--quiet"])
    collectives = start_ranks()
    techniques = make_techniques(config)
    engine = start_engine(config, techniques, collectives).ds_engine
    folder, log = Path(config.runs_dir) / config.run_name, list[str]()
    run_id = json.loads((folder / "run.json").read_text())["run_id"]
    checkpoints = Checkpoints(folder / "checkpoints", 9, engine, techniques, collectives, lambda: None, log.append, run_id)
    try:
        assert checkpoints.load_newest() is not None
    except UsageError as refused:
        forget_engines()
        return {"refused": refused.faults}
    states, steps = held(engine)
    if file and collectives.rank == 0:
        torch.save(states, file)
    counters = {name: getattr(engine, name) for name in ("global_steps", "skipped_steps", "global_samples")}
    content = {f"{name} {key}": digest(value) for name, state in states.items() for key, value in state.items()}
    forget_engines()
    return {"content": content, "steps": steps, "counters": counters, "log": log, "notes": list(techniques.notes)}


def held(engine: Any) -> tuple[dict[str, dict[str, torch.Tensor]], list[float]]:
    """The fp32 weights ("weight") and states of each parameter, whole, and the steps that the optimizer has counted.

    Checks that the model computes with these weights, rounded to its precision.
    """
    wrapper, stage = engine.optimizer, engine.zero_optimization_stage()
    base, masters = getattr(wrapper, "optimizer", wrapper), dict[int, torch.Tensor]()
    if stage == 0:
        halves = [half for group in getattr(wrapper, "fp16_groups", ()) for half in group] or list(engine.module.parameters())
        fulls = [full for group in getattr(wrapper, "fp32_groups", ()) for full in group] or halves
        masters = {id(half): full for half, full in zip(halves, fulls, strict=True)}
    elif stage < 3:
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
    keys = sorted({key for state in base.state.values() for key, value in state.items() if torch.is_tensor(value) and value.dim()})
    found = {}
    for name, parameter in engine.module.named_parameters():
        if stage:
            found[name] = {"weight": safe_get_full_fp32_param(parameter).clone()}
            found[name] |= {key: safe_get_full_optimizer_state(parameter, key).clone() for key in keys if has(name, parameter, key, keys)}
        else:
            master = masters[id(parameter)]
            found[name] = {"weight": master.detach().clone(), **base.state.get(master, {})}
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            assert torch.equal(parameter, found[name]["weight"].to(parameter.dtype)), name
    counted = [state["step"] for state in base.state.values() if "step" in state]
    tensors = [step.data_ptr() for step in counted if torch.is_tensor(step)]
    assert len(set(tensors)) == len(tensors), "each part counts its own steps"
    for state in found.values():
        state.pop("step", None)
    return found, sorted({float(step) for step in counted})


def has(name: str, parameter: torch.nn.Parameter, key: str, keys: Container[str]) -> bool:
    """Whether a parameter has this state: Muon keeps a momentum of hidden matrices, and AdamW's moments of the others."""
    is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1
    is_hidden = name.startswith("h.") and is_matrix and "router" not in name
    return "momentum" not in keys or is_hidden == (key == "momentum")


def digest(value: Any) -> str:
    """Of the values of a tensor, or a number."""
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if torch.is_tensor(value) else repr(value)
    return hashlib.sha256(data if isinstance(data, bytes) else data.encode()).hexdigest()


def trained_by_hand(flags: list[str], file: str, step: int) -> list[dict[str, Any]]:
    """`pretrain` with `--resume` into an engine that is filled with what `loaded` has saved in `file`, parameter by parameter."""
    with _filled_by_hand(file, step):
        return pretrain(flags)


@contextlib.contextmanager
def _filled_by_hand(file: str, step: int) -> Iterator[None]:
    fill = Move.fill

    @torch.no_grad()
    def fill_by_hand(self: Move) -> None:
        states, engine = torch.load(file), self._ds_engine
        wrapper, names = engine.optimizer, {id(parameter): name for name, parameter in engine.module.named_parameters()}
        base = getattr(wrapper, "optimizer", wrapper)
        for parameter in engine.module.parameters():
            parameter.copy_(states[names[id(parameter)]]["weight"])
        if hasattr(wrapper, "single_partition_of_fp32_groups"):  # of one rank: a group's parameters one after another, and padding
            assert os.environ["WORLD_SIZE"] == "1"
            parts = zip(wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups, strict=True)
        else:
            halves = [half for group in getattr(wrapper, "fp16_groups", ()) for half in group] or list(engine.module.parameters())
            fulls = [full for group in getattr(wrapper, "fp32_groups", ()) for full in group] or halves
            parts = (([half], full) for half, full in zip(halves, fulls, strict=True))
        for group, full in parts:
            whole = {
                key: torch.cat([states[names[id(one)]][key].reshape(-1) for one in group]) for key in ("weight", "exp_avg", "exp_avg_sq")
            }
            filled = {key: torch.zeros_like(full, requires_grad=False) for key in whole}
            for key, value in whole.items():
                filled[key].view(-1)[: value.numel()] = value
            full.copy_(filled.pop("weight"))
            base.state[full] = {"step": torch.tensor(float(step)), **filled}
        engine.global_steps, engine.global_samples = step, 0

    Move.fill = fill_by_hand  # type: ignore[method-assign]
    try:
        yield
    finally:
        Move.fill = fill  # type: ignore[method-assign]


class FinalWeights(Observer):
    """The fp32 weights after step `last`, whole."""

    def __init__(self, last: int) -> None:
        self.last, self.weights = last, dict[str, Any]()

    def start(self, engine: TrainingEngine) -> None:
        self.ds_engine = engine.ds_engine

    def after_step(self, step: int) -> None:
        if step == self.last:
            self.weights = {name: state["weight"].cpu().numpy().copy() for name, state in held(self.ds_engine)[0].items()}


def pretrain_keeping_weights(flags: list[str], steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """`pretrain`, and the weights after its last step, number `steps`."""
    observer = FinalWeights(steps)
    return pretrain(flags, [observer]), observer.weights
