"""Corrects DeepSpeed bugs that change training without an error. Each correction is one small function.

Each correction has a probe, which runs DeepSpeed's own code at start-up and returns whether it has the bug. A DeepSpeed without the bug is
not changed. `before_initialize` and `after_initialize` apply the corrections that are needed and return their names for the log.

The bugs were measured with DeepSpeed 0.19.8; `tests/distributed/test_corrections.py` shows each one with and without its correction.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime import utils
from deepspeed.runtime.fp16 import fused_optimizer, unfused_optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.timer import NoopTimer

from launch.config.hardware import deepspeed_silenced
from launch.formats.tensor_files import load_tensors
from launch.training.ranks.distributed import Collectives

#: Elements of the tensor on which the gradient norm is probed. The error of an fp32 sum grows with its length: 2.8e-5 at 2 M.
PROBE_ELEMENTS = 2**21
#: Steps of Adam in a probe: in fp32, the two roundings of 0.95^t differ first at step 6.
PROBE_STEPS = range(1, 31)
#: The number of a CPU optimizer in a probe; DeepSpeed counts its own from 0.
PROBE_OPTIMIZER = -1
#: Number of squares that are summed in fp32. Each such sum has an error of at most 1e-7, of either sign, and a norm of many sums 1e-8.
NORM_ROW = 384


class NormNotFinite(ArithmeticError):
    """The gradient norm of the step is not finite, and the update was not made. Raised on all ranks."""


def before_initialize(zero_stage: int, precision: str, collectives: Collectives) -> list[str]:
    """Correct DeepSpeed's classes before an engine is built. All ranks must call this together; a bug found by one is corrected on all."""
    if zero_stage != 0:
        return []
    candidates: list[Candidate] = [(engine_norm_is_inaccurate, take_norms_in_fp64)]
    if precision != "fp32":
        candidates.append((unfused_optimizer_steps_at_start, keep_weights_at_start))
    if precision == "fp16":
        candidates.append((unfused_loss_scale_misbehaves, scale_like_zero))
    return _correct(candidates, collectives)


def after_initialize(ds_engine: Any, collectives: Collectives) -> list[str]:
    """Correct one engine after it is built. All ranks must call this together."""
    candidates: list[Candidate] = []
    stage = ds_engine.zero_optimization_stage()
    if stage == 0 and ds_engine.fp16_enabled():
        candidates.append((loss_is_not_scaled, scale_loss))
    if stage > 0 and ds_engine.fp16_enabled():
        candidates.append((scale_grows_before_the_update, grow_scale_after_the_update))
    if stage == 3 or ds_engine.zero_use_cpu_optimizer():
        candidates.append((gradients_go_stale, forget_gradients))
    if isinstance(ds_engine.basic_optimizer, DeepSpeedCPUAdam):
        candidates.append((cpu_adam_depends_on_its_start, derive_bias_correction_from_step))
    if ds_engine.zero_nvme_offload_optimizer():
        candidates.append((lambda ds_engine: optimizer_on_drive_is_not_loaded(ds_engine, collectives), load_optimizer_on_drive))
    return _correct(candidates, collectives, ds_engine)


Candidate = tuple[Callable[..., bool], Callable[..., None]]  # a probe and its correction


def _correct(candidates: list[Candidate], collectives: Collectives, *ds_engine: Any) -> list[str]:
    applied = []
    for probe, correct in candidates:
        if collectives.any(probe(*ds_engine)):
            correct(*ds_engine)
            applied.append(correct.__name__)
    return applied


# --- stage 0, bf16 and fp16: an optimizer step on zero gradients at start ------------------------------------------------------------


def unfused_optimizer_steps_at_start() -> bool:
    """Bug: `FP16_UnfusedOptimizer` allocates the optimizer state with a real step on zero gradients.

    Adam then starts at step 1, and weight decay shrinks the fp32 weights by a factor of (1 - lr x weight_decay) before training. The code
    is `initialize_optimizer_states` in deepspeed/runtime/fp16/unfused_optimizer.py. Probe: wrap one weight, which must keep its value.
    """
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16, device=get_accelerator().current_device_name()))
    wrapper = FP16_UnfusedOptimizer(
        torch.optim.AdamW([weight], lr=0.5, weight_decay=0.5), low_precision_dtype=torch.bfloat16, verbose=False
    )
    return float(wrapper.fp32_groups[0][0].detach()) != 1.0


def keep_weights_at_start() -> None:
    """Correction: allocate no state in advance. torch's optimizers allocate it in their first step."""
    FP16_UnfusedOptimizer.initialize_optimizer_states = lambda self: None


# --- stage 0: the gradient norm, summed in fp32 --------------------------------------------------------------------------------------


def engine_norm_is_inaccurate() -> bool:
    """Bug: at stage 0 the norm used for clipping is summed in fp32, which on a CPU is off by 3e-5 at 2 M elements.

    Stages 1, 2 and 3 sum in fp64, so the losses of the stages drift apart (3.7e-5 after 30 steps). The code is `clip_grad_norm_` and
    `get_weight_norm` in deepspeed/runtime/utils.py. Probe: both functions on a known tensor, compared with the norm in fp64. All ranks must
    call this together, because `clip_grad_norm_` averages over them.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(PROBE_ELEMENTS, generator=generator).to(get_accelerator().current_device_name()))
    weight.grad = weight.data.clone()
    exact = float(torch.linalg.vector_norm(weight.data, dtype=torch.float64))
    found = (float(utils.get_weight_norm([weight])), float(utils.clip_grad_norm_([weight], max_norm=2 * exact)))
    return any(abs(norm - exact) > 1e-6 * exact for norm in found)


def take_norms_in_fp64() -> None:
    """Correction: replace both functions in every module that has imported them."""
    for module in (utils, engine_module, fused_optimizer, unfused_optimizer):
        for name, correct in (("clip_grad_norm_", clip_grad_norm), ("get_weight_norm", weight_norm)):
            if hasattr(module, name):
                setattr(module, name, correct)


def norm_in_fp64(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all tensors together as an fp64 scalar; on a CPU with a relative error of 1e-7.

    `NORM_ROW` squares at a time are summed in fp32, and these sums in fp64, because converting every element to fp64 takes three times as
    long on a CPU. A GPU sums each tensor in fp32 as a tree, in one kernel for many tensors. If squares overflow in fp32, everything is
    summed in fp64.
    """
    if tensors[0].is_cuda:
        norm = torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).double().norm()
    else:
        norms = [torch.linalg.vector_norm(row, dim=-1, dtype=torch.float32) for tensor in tensors for row in _in_rows(tensor)]
        norm = torch.cat([one.double().view(-1) for one in norms]).norm()
    if torch.isfinite(norm):
        return norm
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]).norm()


def _in_rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The elements of `tensor` as (n, NORM_ROW), and the remaining ones; views if the tensor is contiguous."""
    flat = tensor.reshape(-1)
    whole = len(flat) // NORM_ROW * NORM_ROW
    return [part for part in (flat[:whole].view(-1, NORM_ROW), flat[whole:]) if part.numel()]


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """Replaces `deepspeed.runtime.utils.clip_grad_norm_` at stage 0, where all ranks have the same gradients.

    Scales the gradients in place so that their norm is at most `max_norm`; returns the norm before that, in fp64.
    """
    assert norm_type == 2 and mpu is None, "this project clips by the 2-norm, without model parallelism"
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = norm_in_fp64(gradients)
    clip_gradients(gradients, float(norm), max_norm)
    return norm


def clip_gradients(gradients: list[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients whose norm is `norm` in place, so that it is at most `max_norm`."""
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        torch._foreach_mul_(gradients, scale)


def weight_norm(parameters: list[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Replaces `deepspeed.runtime.utils.get_weight_norm`: the 2-norm, or -1 if it is not finite, as the engine expects."""
    assert norm_type == 2 and mpu is None, "this project clips by the 2-norm, without model parallelism"
    norm = float(norm_in_fp64([parameter.data for parameter in parameters]))
    return norm if norm < float("inf") else -1.0  # NaN compares false


# --- stage 0, fp16: the rule of the loss scale --------------------------------------------------------------------------------------


def unfused_loss_scale_misbehaves() -> bool:
    """Bug: `FP16_UnfusedOptimizer` updates the loss scale by its own rule, which has three faults.

    The scale grows before the gradients are divided by it, so one update in every `loss_scale_window` steps has half its size. `hysteresis`
    and `consecutive_hysteresis` are ignored. At `min_loss_scale` it skips steps forever, where the other stages raise. The code is `step`
    and `_update_scale` in deepspeed/runtime/fp16/unfused_optimizer.py. Probe: two steps of one weight with gradient 1, the second of which
    makes the scale grow; both updates must be 1. Then an overflow at the minimum, which must raise. All ranks must call this together,
    because the engine combines their overflows.
    """
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16, device=get_accelerator().current_device_name()))
    rule = {"init_scale": 4.0, "scale_window": 1, "min_scale": 8.0, "delayed_shift": 1, "consecutive_hysteresis": False}
    wrapper = FP16_UnfusedOptimizer(torch.optim.SGD([weight], lr=1.0), dynamic_loss_scale=True, dynamic_loss_args=rule, verbose=False)
    for _ in range(2):
        weight.grad = torch.full_like(weight, wrapper.loss_scale)
        wrapper.step()
    if float(wrapper.fp32_groups[0][0].detach()) != -2.0:
        return True
    weight.grad = torch.full_like(weight, float("inf"))
    try:
        wrapper.step()
    except Exception:  # stages 1, 2 and 3 raise a bare Exception
        return False
    return True


def scale_like_zero() -> None:
    """Correction: stage 0 uses `DynamicLossScaler`, as stages 1, 2 and 3 do, and its scale grows after the update."""
    build, save, load = FP16_UnfusedOptimizer.__init__, FP16_UnfusedOptimizer.state_dict, FP16_UnfusedOptimizer.load_state_dict

    def build_with_rule(
        self: Any, *args: Any, deepspeed: Any = None, dynamic_loss_args: dict[str, Any] | None = None, **options: Any
    ) -> None:
        build(self, *args, deepspeed=deepspeed, dynamic_loss_args=dynamic_loss_args, **options)
        if self.loss_scale_config.dynamic_loss_scale:
            rule = DynamicLossScaler(**(dynamic_loss_args or deepspeed.dynamic_loss_scale_args()))
            rule.dynamic_loss_scale = rule.use_grad_scaling = True  # as in DeepSpeed's LossScaleConfig, which it replaces
            self.loss_scale_config, self._update_scale = rule, rule.update_scale
            _grow_after_the_update(self)

    def save_with_rule(self: Any) -> dict[str, Any]:
        return {**save(self), "cur_hysteresis": getattr(self.loss_scale_config, "cur_hysteresis", None)}

    def load_with_rule(self: Any, state: dict[str, Any], load_optimizer_states: bool = True) -> None:
        load(self, state, load_optimizer_states)
        if self.loss_scale_config.dynamic_loss_scale and state.get("cur_hysteresis") is not None:
            self.loss_scale_config.cur_hysteresis = state["cur_hysteresis"]

    FP16_UnfusedOptimizer.__init__ = build_with_rule
    FP16_UnfusedOptimizer.state_dict = save_with_rule
    FP16_UnfusedOptimizer.load_state_dict = load_with_rule


# --- stages 1 to 3, fp16: the loss scale grows before the update ---------------------------------------------------------------------


def scale_grows_before_the_update(ds_engine: Any) -> bool:
    """Bug: the loss scale grows before the gradients are divided by it, so one update in every `loss_scale_window` steps has half its size.

    Clipping counts the gradient double. Stage 3 also reports half of its norm. The code is `step` in
    deepspeed/runtime/zero/stage_1_and_2.py and stage3.py. Probe: an engine of two weights with plain SGD, whose scale grows in each step;
    two steps with the same gradient must be equal. All ranks must call this together.
    """
    rule = {"initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 1}
    with _probe_engine(ds_engine, rule=rule) as probe:
        places = [safe_get_full_fp32_param(probe.module[0].weight).clone()]
        for _ in range(2):
            _step(probe, probe.module)
            places.append(safe_get_full_fp32_param(probe.module[0].weight).clone())
    first, second = places[1] - places[0], places[2] - places[1]
    return not torch.allclose(first, second, rtol=0.1)


def grow_scale_after_the_update(ds_engine: Any) -> None:
    """Correction: an overflow changes the scale at once, and a step without one when its update is made."""
    _grow_after_the_update(ds_engine.optimizer)


def _grow_after_the_update(optimizer: Any) -> None:
    step, update_scale = optimizer.step, optimizer._update_scale

    def update_scale_on_overflow(has_overflow: bool = False) -> None:
        if has_overflow:
            update_scale(True)

    def step_and_update_scale(*args: Any, **options: Any) -> Any:
        done = step(*args, **options)
        if not optimizer.overflow:
            update_scale(False)
        return done

    optimizer._update_scale, optimizer.step = update_scale_on_overflow, step_and_update_scale


# --- stage 0, fp16: the loss is not scaled -------------------------------------------------------------------------------------------


def loss_is_not_scaled(ds_engine: Any) -> bool:
    """Bug: at stage 0 `engine.backward` does not multiply the loss by the loss scale, but the optimizer divides the gradients by it.

    At a scale of 1024, the update was 1/1024 of the correct one, and nothing was clipped. The code is `backward` in
    deepspeed/runtime/engine.py. Probe: the engine's own `backward` on a loss that is a single weight; its gradient must be the scale.
    """
    weight = torch.ones((), device=ds_engine.device, requires_grad=True)
    # At a scale other than 1, without the reduction (the model has no gradients yet) and the timers (only a forward pass starts them).
    before = ds_engine.enable_backward_allreduce, ds_engine.timers, ds_engine.optimizer.loss_scale
    ds_engine.enable_backward_allreduce, ds_engine.timers, ds_engine.optimizer.loss_scale = False, NoopTimer(), 4.0
    try:
        ds_engine.backward(weight * 1.0, scale_wrt_gas=False)
    finally:
        ds_engine.enable_backward_allreduce, ds_engine.timers, ds_engine.optimizer.loss_scale = before
    assert weight.grad is not None, "the engine's backward leaves a gradient"
    return float(weight.grad) != 4.0


def scale_loss(ds_engine: Any) -> None:
    """Correction: multiply the loss by the current scale before `engine.backward`."""
    backward = ds_engine.backward

    def scaled_backward(loss: torch.Tensor, **options: Any) -> torch.Tensor:
        return backward(loss.float() * ds_engine.optimizer.loss_scale, **options)

    ds_engine.backward = scaled_backward


# --- offloaded Adam: bias correction after a resume ----------------------------------------------------------------------------------


def cpu_adam_depends_on_its_start(ds_engine: Any) -> bool:
    """Bug: after a resume, the bias correction of an offloaded Adam is rounded differently.

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


# --- stage 3, and offload at stages 1, 2 and 3: gradients of earlier steps ---------------------------------------------------------------


def gradients_go_stale(ds_engine: Any) -> bool:
    """Bug: a parameter without a gradient in a step is updated with its gradient of an earlier step.

    Stage 3 keeps gradients in one flat buffer that is never set to zero, and copies the gradients of the first micro-batch into it. With an
    offloaded optimizer, stages 1, 2 and 3 keep fp32 gradients on the host, and store only those of the last micro-batch. The norm used for
    clipping contains the old gradients too. With layer drop, losses were off by 0.67 after 12 steps. The code is `partition_grads` in
    deepspeed/runtime/zero/stage3.py and `copy_grads_in_partition` in stage_1_and_2.py. Probe: an engine of two weights with plain SGD; the
    weight that is left out of the second step must not change. All ranks must call this together.
    """
    with _probe_engine(ds_engine) as probe:
        places = []
        for used in (probe.module, probe.module[:1]):
            _step(probe, used)
            places.append(safe_get_full_fp32_param(probe.module[1].weight).clone())
    return not torch.equal(*places)


@contextlib.contextmanager
def _probe_engine(ds_engine: Any, offload: dict[str, Any] | None = None, rule: dict[str, Any] | None = None) -> Iterator[Any]:
    """An engine with two small weights and plain SGD, with the stage and precision of `ds_engine`.

    Args:
        offload: the section `offload_optimizer`; by default the CPU if `ds_engine` offloads its optimizer.
        rule: of the loss scale, which is fixed at 1 by default.
    """
    # Small buckets: stage 3 allocates its own as soon as it is built.
    stage = ds_engine.zero_optimization_stage()
    section: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 64, "stage3_prefetch_bucket_size": 64}
    if ds_engine.zero_use_cpu_optimizer():
        section["offload_optimizer"] = offload or {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": section,
        "bf16": {"enabled": ds_engine.bfloat16_enabled()},
        "fp16": {"enabled": ds_engine.fp16_enabled(), **(rule or {"loss_scale": 1})},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(2))
    with deepspeed_silenced():
        probe, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
        yield probe
        probe.destroy()


def _step(probe: Any, used: Any) -> None:
    """Run one step of the probe engine in which only the layers `used` get a gradient."""
    values = torch.ones(1, 8, device=probe.device, dtype=next(probe.module.parameters()).dtype)
    # The engine's own forward pass is not needed: its hooks are on the modules and the parameters.
    probe.optimizer.clear_backward_seen_flag()
    probe.backward(sum(layer(values).float().sum() for layer in used))
    probe.step()


def forget_gradients(ds_engine: Any) -> None:
    """Correction: before the update, set missing gradients to zero and store those of earlier micro-batches; after it, clear all."""
    optimizer = ds_engine.optimizer
    step = optimizer.step
    complete, clear = (
        (_complete_stage_3, _clear_stage_3) if ds_engine.zero_optimization_stage() == 3 else (_complete_offload, _clear_offload)
    )

    def step_and_forget(*args: Any, **options: Any) -> Any:
        complete(optimizer)
        try:
            return step(*args, **options)
        finally:
            clear(optimizer)

    optimizer.step = step_and_forget


def _complete_stage_3(optimizer: Any) -> None:
    """Offload: copy the gradients that `partition_grads` did not copy from the flat buffer: zeros, or those of earlier micro-batches."""
    if not optimizer.offload_optimizer:
        return
    partitions = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    to_swap: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    for group in optimizer.fp16_groups:
        for parameter in group:
            if optimizer.get_param_id(parameter) not in optimizer.norm_for_param_grads and parameter.ds_id in partitions:
                optimizer._offload_grad_partition_at_boundary(parameter, partitions[parameter.ds_id], *to_swap)
    optimizer._swap_out_offload_fp32_gradients(*to_swap)


def _clear_stage_3(optimizer: Any) -> None:
    optimizer.grad_partitions_flat_buffer.zero_()
    if optimizer.offload_optimizer:
        optimizer.norm_for_param_grads.clear()


def _complete_offload(optimizer: Any) -> None:
    """Stages 1 and 2: set missing gradients to zero, and store those of earlier micro-batches."""
    missing = set()
    for index, group in enumerate(optimizer.params_in_partition):
        for parameter in group:
            identity = optimizer.get_param_id(parameter)
            if identity in optimizer.norm_for_param_grads:
                continue
            if identity in optimizer._offload_accumulated_param_ids:
                missing.add(identity)
            else:
                _, _, offset, elements = optimizer.grad_position[identity]
                optimizer.single_partition_of_fp32_groups[index].grad.view(-1).narrow(0, offset, elements).zero_()
    if missing:
        accumulated, optimizer._offload_accumulated_param_ids = optimizer._offload_accumulated_param_ids, missing
        optimizer._finalize_cpu_offload_gradient_accumulation()
        optimizer._offload_accumulated_param_ids = accumulated


def _clear_offload(optimizer: Any) -> None:
    optimizer.norm_for_param_grads.clear()
    for gradient in optimizer.accumulated_grads_in_cpu.values():
        gradient.zero_()


# --- an optimizer on NVMe: its state is not loaded ---------------------------------------------------------------------------------


def optimizer_on_drive_is_not_loaded(ds_engine: Any, collectives: Collectives) -> bool:
    """Bug: with the optimizer on NVMe, `load_checkpoint` only copies the swap files back.

    The moments in them are not registered, so Adam starts with zeros at step 1. Tensors too small for NVMe (biases and norms) keep their
    initial values, including their fp32 weights, and so does the loss scale. The code is `load_checkpoint` in deepspeed/runtime/engine.py
    ("not self.zero_nvme_offload_optimizer()"). Probe: save, step and load an engine with two small weights, which must then be the saved
    ones. All ranks must call this together.
    """
    section = dict(ds_engine.config["zero_optimization"]["offload_optimizer"])
    folder = os.path.join(section["nvme_path"], "probe")
    shutil.rmtree(folder, ignore_errors=True)  # left by a start that was killed
    collectives.barrier()
    with _probe_engine(ds_engine, {**section, "nvme_path": folder}) as probe:
        weight = probe.module[0].weight
        _step(probe, probe.module)
        saved = safe_get_full_fp32_param(weight).clone()
        probe.save_checkpoint(folder, tag="probe")
        _step(probe, probe.module)
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
