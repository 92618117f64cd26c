"""Measures what `launch/config/memory.py` predicts: the model states of a live engine."""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from launch.config.explain import bytes_of
from launch.config.memory import MemoryPlan, MemorySizes, gathered_weights, memory_per_rank
from launch.config.run_config import RunConfig, resolve
from launch.training.engine import TrainingEngine
from launch.training.meter import peak_of_process
from launch.training.observers import Observer
from recipes.registry import make_techniques
from tests.distributed.jobs import pretrain
from tests.distributed.muon_jobs import PeakMemory
from tests.distributed.parity import section

#: Of malloc.h.
M_MMAP_THRESHOLD = -3
PARTS = ("weights", "gradients", "master_weights", "optimizer_states")


def short_first_step(length: int) -> list[str]:
    """Flags: a step of 256 tokens, which makes the model states, and one of `length`, after which the tokens of `--steps` are over."""
    schedule = {"difficulty": [256, length], "max_step": [1]}
    return ["--steps", "1", *section("curriculum_learning", {"schedule_type": "fixed_discrete", "schedule_config": schedule})]


def plan_of(config: RunConfig) -> MemoryPlan:
    """The plan of a resolved run on CPU ranks."""
    return memory_per_rank(config, config.model_config, "cpu", make_techniques(config).checkpointed_segments)


# --- model states ------------------------------------------------------------------------------------------------------------------------


class StatesInStep(Observer):
    """Counts the engine's tensors at the end of each backward pass of the second step, when all model states are there."""

    def start(self, training: TrainingEngine) -> None:
        ds_engine = training.ds_engine
        self.calls, self.found, step = 0, [], ds_engine.step

        def counted_step(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if ds_engine.gradient_accumulation_steps() < self.calls <= 2 * ds_engine.gradient_accumulation_steps():
                self.found.append(states_of(ds_engine))
            return step(*arguments, **options)

        ds_engine.step = counted_step


def states_of(ds_engine: Any) -> dict[str, int]:
    """Bytes of all distinct tensor storages that hold the engine's model states, by part; each storage counts once, whole.

    weights: behind the module's parameters (at stage 3 behind their partitions, `ds_tensor`; gathered weights are buffers). gradients:
    `.grad` of the parameters and what the ZeRO optimizer keeps of them, without its buckets. master weights and optimizer states: the
    groups and the `state` of torch's optimizer, as far as they are not the weights. `all`: every storage that the garbage collector
    knows of, so that nothing is overlooked.
    """
    optimizer = ds_engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    parameters = list(ds_engine.module.parameters())
    attribute = vars(optimizer).get
    parts = {
        "weights": [getattr(p, "ds_tensor", p) for p in parameters],
        "gradients": [
            *(p.grad for p in parameters),
            attribute("averaged_gradients"),
            attribute("grads_in_partition"),
            attribute("grad_partitions_flat_buffer"),
            attribute("fp32_groups_gradients_flat"),
        ],
        "master_weights": [
            attribute("fp32_groups"),
            attribute("single_partition_of_fp32_groups"),
            attribute("fp32_partitioned_groups_flat"),
            attribute("fp32_groups_flat_partition"),
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


def model_states(flags: list[str]) -> dict[str, Any]:
    """Model states on this rank after each backward pass of the second of three steps, and bytes sent in the last; each as planned too."""
    before = sum(storage.nbytes() for storage in known_storages().values())  # of this pool's earlier jobs
    states = StatesInStep()
    lines = pretrain([*flags, "--steps", "3", "--eval_every", "0", "--save_every", "0"], [states])
    assert states.found, "no second step"
    config = resolve(flags)[0]
    plan = plan_of(config)
    return {
        "found": [{name: found[name] for name in PARTS} for found in states.found],
        "planned": {name: plan.parts[name] for name in PARTS},
        "buffers": plan.parts["buffers"],
        "not in a part": states.found[-1]["not in a part"] - before,
        "sent": (lines[-1]["bytes_sent"], bytes_of(config, config.model_config)),
    }


class _GrowthOfStep(Observer):
    """`grown`: bytes by which the resident memory of this process grows in step 2 over what it is before the forward pass."""

    def on_step(self, step: int) -> None:
        if step == 2:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident (man 5 proc)
            self.before = peak_of_process()

    def after_step(self, step: int) -> None:
        if step == 2:
            self.grown = peak_of_process() - self.before


def growth_of_step(flags: list[str]) -> dict[str, int]:
    """Bytes by which this rank's memory grows at most in the second step, the last, measured and planned."""
    # What is freed is given back at once. By default glibc keeps blocks below 32 MiB, of which the next step then takes some.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)
    growth = _GrowthOfStep()
    pretrain(flags, [growth])
    plan = plan_of(resolve(flags)[0])
    stands = sum(size for part, size in plan.moments["forward"].items() if part in (*PARTS, "buffers"))
    return {"measured": growth.grown, "planned": plan.peak - stands}


def peaks_at_stage_3(flags: list[str]) -> dict[str, tuple[int, int]]:
    """Measured and planned bytes: the most that the last update has beside what is there before it; the most gathered weights of the last
    steps, with the buffer of the last gather; and the bytes sent."""
    update, peaks = DeepSpeedZeroOptimizer_Stage3.step, list[int]()
    fetch, live = PartitionedParameterCoordinator.fetch_sub_module, list[int]()

    def measured(optimizer: Any, *arguments: Any) -> None:
        before = known_storages()  # kept until the end, so that no address is used again
        memory = PeakMemory()
        memory.known = set(before)
        with memory:
            update(optimizer, *arguments)
        peaks.append(memory.peak)
        if len(peaks) == 1:
            live.clear()  # the first step records the order of the modules

    def counted(coordinator: Any, module: Any, forward: bool) -> None:
        fetch(coordinator, module, forward)
        if whole is not None:  # as in the engines that probe DeepSpeed before the run's own
            live.append(sum(p.ds_numel for p in whole.parameters() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE))

    class Model(Observer):
        def start(self, training: TrainingEngine) -> None:
            nonlocal whole
            whole = training.ds_engine.module

    whole: Any = None
    config = resolve(flags)[0]
    with (
        mock.patch.object(DeepSpeedZeroOptimizer_Stage3, "step", measured),
        mock.patch.object(PartitionedParameterCoordinator, "fetch_sub_module", counted),
    ):
        lines = pretrain(flags, [Model()])
    rank = MemorySizes(config, config.model_config, "cpu", 0)
    return {
        "update": (peaks[-1], plan_of(config).parts["update"]),
        "live": (max(live), gathered_weights(rank)[1]),
        "sent": (lines[-1]["bytes_sent"], bytes_of(config, config.model_config)),
    }
