"""Measuring what `launch/config/memory.py` predicts: model states in a live engine, peaks of fresh processes."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.config.memory import MemoryPlan, memory_per_rank
from launch.config.run_config import RunConfig, resolve
from launch.formats.metrics import read_metrics
from launch.training.engine import TrainingEngine
from launch.training.folder import NoFolder
from launch.training.observers import Observer
from tests.distributed.correction_jobs import fp16_allowed
from tests.helpers import free_port

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("weights", "gradients", "master_weights", "optimizer_states")


def plan_of(config: RunConfig) -> MemoryPlan:
    """The plan of a resolved run on CPU ranks."""
    zero = config.engine["zero_optimization"]
    batch = config.micro_batch_size, config.gradient_accumulation_steps
    techniques = config.built_techniques
    shape = (config.model_config, config.precision, zero, config.ranks, *batch, techniques.costs.checkpointed_segments)
    return memory_per_rank(*shape, terms=techniques.memory_terms(config.model_config, "cpu"))


# --- model states ------------------------------------------------------------------------------------------------------------------------


class _StatesInStep(Observer):
    """Counts the engine's tensors at the end of each backward pass of the second step, when all model states are there."""

    def start(self, training: TrainingEngine) -> None:
        engine = training.deepspeed
        self.calls, self.found, step = 0, [], engine.step

        def counted_step(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if engine.gradient_accumulation_steps() < self.calls <= 2 * engine.gradient_accumulation_steps():
                self.found.append(states_of(engine))
            return step(*arguments, **options)

        engine.step = counted_step


def states_of(engine: Any) -> dict[str, int]:
    """Bytes of all distinct tensor storages that hold the engine's model states, by part; each storage counts once, whole.

    weights: behind the module's parameters (at stage 3 behind their partitions, `ds_tensor`; gathered weights are buffers). gradients:
    `.grad` of the parameters and what the ZeRO optimizer keeps of them, without its buckets. master weights and optimizer states: the
    groups and the `state` of torch's optimizer, as far as they are not the weights. `all`: every storage that the garbage collector
    knows of, so that nothing is overlooked.
    """
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    parameters = list(engine.module.parameters())
    attribute = vars(optimizer).get
    parts = {
        "weights": [getattr(p, "ds_tensor", p) for p in parameters],
        "gradients": [
            *(p.grad for p in parameters),
            attribute("averaged_gradients"),
            attribute("grads_in_partition"),
            attribute("grad_partitions_flat_buffer"),
        ],
        "master_weights": [
            attribute("fp32_groups"),
            attribute("single_partition_of_fp32_groups"),
            attribute("fp32_partitioned_groups_flat"),
        ],
        "optimizer_states": [list(state.values()) for state in inner.state.values()],
    }
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    seen = {tensor.untyped_storage().data_ptr() for tensor in tensors_in([bucket.buffer for bucket in buckets])}
    found = {}
    for name, holders in parts.items():
        found[name] = 0
        for tensor in tensors_in(holders):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[name] += storage.nbytes()
    found["not in a part"] = sum(size for pointer, size in known_storages().items() if pointer not in seen)
    return found


def known_storages() -> dict[int, int]:
    """Bytes of every tensor storage that the garbage collector knows of, by its address."""
    import torch
    from torch._subclasses import FakeTensor  # torch.compile's, which have no memory

    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not isinstance(thing, FakeTensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu" and tensor.layout == torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def tensors_in(holder: Any) -> Iterator[Any]:
    """Every tensor in nested lists and dictionaries."""
    import torch

    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, dict):
        yield from tensors_in(list(holder.values()))
    elif isinstance(holder, (list, tuple)):
        yield from itertools.chain.from_iterable(tensors_in(item) for item in holder)


def states_in_step(flags: list[str]) -> tuple[RunConfig, list[dict[str, int]]]:
    """Train two steps in this pool of ranks; this rank's model states after each backward pass of the second."""
    from launch.pretrain import train
    from launch.training.signals import StopRequest

    config, _ = resolve([*flags, "--steps", "2", "--eval_every", "0", "--save_every", "0", "--quiet"])
    states = _StatesInStep()
    try:
        assert train(config, NoFolder(), StopRequest(), [states]) == 0
    finally:
        gc.collect()
    assert states.found, "no second step"
    return config, states.found


def model_states(flags: list[str]) -> dict[str, Any]:
    """(measured, predicted) bytes of each part on this rank, at the end of a step."""
    before = sum(known_storages().values())  # of this pool's earlier jobs
    config, (*_, found) = states_in_step(flags)
    plan = plan_of(config)
    return (
        {"not in a part": found["not in a part"] - before, "buffers": plan.parts["buffers"]}
        | {"rank": int(os.environ["RANK"])}
        | {name: (found[name], plan.parts[name]) for name in PARTS}
    )


def largest_states(flags: list[str]) -> dict[str, int]:
    """Bytes of each part on this rank after that backward pass of a step after which they are most; fp16 also where it is slow."""
    with fp16_allowed():
        _, found = states_in_step(flags)
    largest = max(found, key=lambda states: sum(states[part] for part in PARTS))
    return {part: largest[part] for part in PARTS}


# --- peaks ------------------------------------------------------------------------------------------------------------------------


#: A model of a few thousand parameters.
TINY = ["--n_layer", "1", "--n_head", "1", "--d_model", "8", "--seq_len", "8"]
_process: dict[int, int] = {}  # its peak, by the number of ranks: Python, torch and DeepSpeed, which the plan leaves out


def run_and_plan(runs: Path, name: str, flags: list[str], ranks: int) -> tuple[int, MemoryPlan]:
    """`deepspeed launch/pretrain.py FLAGS` in fresh processes: the peak of rank 0 less that of a run of a tiny model, and the plan."""
    if ranks not in _process:
        _process[ranks] = _peak(runs, f"{name}-tiny", [*flags, *TINY], ranks)
    measured = _peak(runs, name, flags, ranks)
    return measured - _process[ranks], plan_of(resolve(flags, ranks=ranks)[0])


def _peak(runs: Path, name: str, flags: list[str], ranks: int) -> int:
    """Rank 0's `peak_memory_bytes` at the end. ru_maxrss only grows, so that it can be measured once in a process."""
    arguments = [*flags, "--runs_dir", str(runs), "--run_name", name, "--save_every", "0", "--eval_every", "0", "--quiet"]
    launcher = [
        str(Path(sys.executable).with_name("deepspeed")),
        "--log_level",
        "error",
        "--num_gpus",
        str(ranks),
        "--master_port",
        str(free_port()),
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*launcher, "launch/pretrain.py", *arguments], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in read_metrics(runs / name / "metrics.jsonl") if "peak_memory_bytes" in line]
    return int(lines[-1]["peak_memory_bytes"])
