"""Measures what `launch/config/memory.py` predicts: the model states of a live engine."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from launch.config.memory import MemoryPlan, memory_per_rank
from launch.config.optimizer import state_tensors
from launch.config.run_config import RunConfig, resolve
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer
from launch.training.run_folder.folder import NoFolder
from recipes.registry import make_techniques
from tests.distributed.jobs import pretrain
from tests.distributed.muon_jobs import PeakMemory

PARTS = ("weights", "gradients", "master_weights", "optimizer_states")


def plan_of(config: RunConfig) -> MemoryPlan:
    """The plan of a resolved run on CPU ranks."""
    zero = config.ds_config["zero_optimization"]
    batch = config.micro_batch_size, config.gradient_accumulation_steps
    techniques = make_techniques(config)
    shape = (config.model_config, config.precision, zero, config.ranks, *batch, techniques.checkpointed_segments)
    states, terms = techniques.optimizer_tensors or state_tensors(config.optimizer), techniques.memory_terms(config.model_config, "cpu")
    return memory_per_rank(*shape, optimizer_states=states, terms=terms, own_group=techniques.own_group)


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
    found["not in a part"] = sum(storage.nbytes() for address, storage in known_storages().items() if address not in seen)
    return found


def known_storages() -> dict[int, Any]:
    """Every tensor storage that the garbage collector knows of, by its address."""
    import torch
    from torch._subclasses import FakeTensor  # torch.compile's, which have no memory

    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not isinstance(thing, FakeTensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu" and tensor.layout == torch.strided]
    return {storage.data_ptr(): storage for storage in storages}


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
    from launch.training.ranks.signals import StopRequest

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
    before = sum(storage.nbytes() for storage in known_storages().values())  # of this pool's earlier jobs
    config, (*_, found) = states_in_step(flags)
    plan = plan_of(config)
    return (
        {"not in a part": found["not in a part"] - before, "buffers": plan.parts["buffers"]}
        | {"rank": int(os.environ["RANK"])}
        | {name: (found[name], plan.parts[name]) for name in PARTS}
    )


def largest_states(flags: list[str]) -> dict[str, int]:
    """The bytes of each part on this rank, after that backward pass of a step after which their sum is largest."""
    _, found = states_in_step(flags)
    largest = max(found, key=lambda states: sum(states[part] for part in PARTS))
    return {part: largest[part] for part in PARTS}


def peak_of_update(flags: list[str]) -> tuple[int, int]:
    """The most bytes that the last optimizer step at stage 3 has beside what is there before it, and the planned bytes."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Optimizer

    update, peaks = Optimizer.step, list[int]()

    def measured(optimizer: Any, *arguments: Any) -> None:
        before = known_storages()  # kept until the end, so that no address is used again
        memory = PeakMemory()
        memory.known = set(before)
        with memory:
            update(optimizer, *arguments)
        peaks.append(memory.peak)

    with mock.patch.object(Optimizer, "step", measured):
        pretrain(flags)
    return peaks[-1], plan_of(resolve(flags)[0]).parts["update"]
