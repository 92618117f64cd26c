"""The optimizer in CPU memory or on NVMe, after a resume."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_fp32_param

from launch.formats.tensor_files import load_tensors
from launch.training.deepspeed_fixes.probe_engine import probe_engine, step_probe
from launch.training.ranks.distributed import Collectives

#: Steps of Adam in a probe: in fp32, the two roundings of 0.95^t differ first at step 6.
PROBE_STEPS = range(1, 31)
#: The number of a CPU optimizer in a probe; DeepSpeed counts its own from 0.
PROBE_OPTIMIZER = -1

# --- offloaded Adam: bias correction after a resume ----------------------------------------------------------------------------------


def uses_cpu_adam(ds_engine: Any) -> bool:
    """Whether DeepSpeed's Adam for CPUs makes the updates."""
    return isinstance(ds_engine.basic_optimizer, DeepSpeedCPUAdam)


def cpu_adam_depends_on_its_start(ds_engine: Any) -> bool:
    """Fault: after a resume, the bias correction of an offloaded Adam is rounded differently.

    A process computes beta^t by one multiplication per step in fp32, but after a resume begins with a power. Losses in fp32 were off by
    5e-7 within 10 steps. The code is `IncrementStep` in csrc/includes/cpu_adam.h. Probe: the update of a step must not depend on the step
    before it, so updates in ascending and descending order of steps must be equal.
    """
    kernels, number = ds_engine.basic_optimizer.ds_opt_adam, PROBE_OPTIMIZER
    settings = 1.0, 0.9, 0.95, 1e-8, 0.0  # learning rate, betas, eps, weight decay

    def update(step: int) -> float:
        weight, gradient, *moments = (torch.full((1,), value) for value in (0.0, 1.0, 0.0, 0.0))
        kernels.adam_update(number, step, *settings, True, weight, gradient, *moments)
        return float(weight)

    kernels.create_adam(number, *settings, True, False)
    ascending = [update(step) for step in PROBE_STEPS]
    descending = [update(step) for step in reversed(PROBE_STEPS)]
    kernels.destroy_adam(number)
    return ascending != descending[::-1]


def derive_bias_correction_from_step(ds_engine: Any) -> None:
    """Correction: before each update, an update of no elements at step 0, after which the next step begins with a power."""
    empty = torch.empty(0)

    def forget_powers(optimizer: Any, *_: Any) -> None:
        group = optimizer.param_groups[0]
        settings = group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"]
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 0, *settings, empty, empty, empty, empty)

    ds_engine.basic_optimizer.register_step_pre_hook(forget_powers)


# --- an optimizer on NVMe: its state is not loaded ---------------------------------------------------------------------------------


def optimizer_on_drive_is_not_loaded(ds_engine: Any, collectives: Collectives) -> bool:
    """Fault: with the optimizer on NVMe, `load_checkpoint` only copies the swap files back.

    The moments in them are not registered, so Adam starts with zeros at step 1. Tensors too small for NVMe (biases and norms) keep their
    initial values, including their fp32 weights, and so does the loss scale. The code is `load_checkpoint` in deepspeed/runtime/engine.py
    ("not self.zero_nvme_offload_optimizer()"). Probe: save, step and load an engine with two small weights, which must then be the saved
    ones. All ranks must call this together.
    """
    section = dict(ds_engine.config["zero_optimization"]["offload_optimizer"])
    folder = os.path.join(section["nvme_path"], "probe")
    shutil.rmtree(folder, ignore_errors=True)  # left by a start that was killed
    collectives.barrier()
    with probe_engine(ds_engine, {**section, "nvme_path": folder}) as probe:
        weight = probe.module[0].weight
        step_probe(probe, probe.module)
        saved = safe_get_full_fp32_param(weight).clone()
        probe.save_checkpoint(folder, tag="probe")
        step_probe(probe, probe.module)
        probe.load_checkpoint(folder, tag="probe")
        lost = not torch.equal(saved, safe_get_full_fp32_param(weight))
    collectives.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return lost


def load_optimizer_on_drive(ds_engine: Any) -> None:
    """Correction: after `load_checkpoint`, load the optimizer's state from this rank's file and register the moments on NVMe."""
    load = ds_engine.load_checkpoint

    def load_all(load_dir: str, tag: str, **options: Any) -> Any:
        loaded = load(load_dir, tag=tag, **options)
        file = ds_engine._get_zero_ckpt_name(load_dir, tag)
        saved = load_tensors(file, deepspeed_objects=True)["optimizer_state_dict"]
        _take_optimizer_state(ds_engine.optimizer, saved, Path(load_dir) / tag / "offloaded_tensors" / f"rank{ds_engine.global_rank:02d}")
        return loaded

    ds_engine.load_checkpoint = load_all


def _take_optimizer_state(optimizer: Any, saved: dict[str, Any], folder: Path) -> None:
    """Load the state `saved` into a stage 3 optimizer; `folder` holds the swap files of the checkpoint.

    A swap file is named after the numbers of its first and last parameter: `12_48.tensor.swp`, `exp_avg-12_48.tensor.swp`. DeepSpeed
    numbers the parameters of all engines in a process together, so the numbers may differ in this process. Their order is the same.
    """
    optimizer.checkpoint_event_prologue()  # frees the gathered weights, which are gathered again below
    optimizer.loss_scaler, optimizer.dynamic_loss_scale = saved["loss_scaler"], saved["dynamic_loss_scale"]
    optimizer._set_fp32_optimizer_param_groups()
    parameters = [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]
    optimizer._clear_fp32_optimizer_param_groups()
    states = {id(parameter): saved["optimizer_state_dict"]["state"].get(index, {}) for index, parameter in enumerate(parameters)}
    names = iter(sorted((file.name for file in folder.glob("[0-9]*.tensor.swp")), key=lambda name: int(name.split("_")[0])))
    for index, (parameter, weights) in enumerate(zip(optimizer.fp32_partitioned_groups_flat, saved["fp32_flat_groups"], strict=True)):
        state = optimizer.optimizer.state[parameter]
        if on_drive := optimizer._swappable_optimizer_subgroup(index):
            name = next(names)
            optimizer._optimizer_states_and_gradient_swap_in(index)
            weights = _read(folder / name, parameter)
        parameter.data.copy_(weights)
        for key, value in states[id(parameter)].items():
            if torch.is_tensor(value):
                value = _read(folder / f"{key}-{name}", parameter) if on_drive else value.to(parameter.device)
                if key in state:  # after a step: keep the registered tensor
                    state[key].data.copy_(value)
                    continue
            state[key] = value
        optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if on_drive:
            optimizer._optimizer_states_and_gradient_swap_out(index)
            if name != f"{parameter.ds_id}.tensor.swp":  # DeepSpeed's copy under an outdated name
                for file in Path(optimizer.optimizer_swapper.swap_folder).glob(f"*{name}"):
                    file.unlink()
    optimizer.checkpoint_event_epilogue()


def _read(file: Path, like: torch.Tensor) -> torch.Tensor:
    """The tensor in a swap file, which is padded at its end."""
    return torch.from_file(str(file), size=like.numel(), dtype=like.dtype).clone()
