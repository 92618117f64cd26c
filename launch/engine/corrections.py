"""Faults of the DeepSpeed engine that change training in silence, each corrected by one small function.

Every correction has a probe, which runs the engine's own code at start-up and looks for the fault: where the engine has been
mended, the probe stays quiet and nothing is corrected twice. `before_initialize` and `after_initialize` apply what is needed
and return the names of what they applied, which the run's log shows.

The faults were measured on DeepSpeed 0.19.8; `tests/distributed/test_corrections.py` shows each of them with and without its correction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from launch.engine.distributed import Collectives

#: Elements of the tensor on which the gradient norm is probed. The error of an fp32 sum grows with its length: 2.8e-5 at 2 M.
PROBE_ELEMENTS = 2**21


def before_initialize(zero_stage: int, precision: str, collectives: Collectives) -> list[str]:
    """Corrections of the engine's classes, before an engine is built. Called by all ranks; what one of them finds, all correct."""
    if zero_stage != 0:
        return []
    candidates: list[tuple[Callable[[], bool], Callable[[], None]]] = [(engine_norm_is_inaccurate, take_norms_in_fp64)]
    if precision != "fp32":
        candidates.append((unfused_optimizer_steps_at_start, keep_weights_at_start))
    if precision == "fp16":
        candidates.append((unfused_loss_scale_misbehaves, scale_like_zero))
    applied = []
    for probe, correct in candidates:
        if collectives.any(probe()):
            correct()
            applied.append(correct.__name__)
    return applied


def after_initialize(engine: Any, collectives: Collectives) -> list[str]:
    """Corrections of one engine, after it was built. Called by all ranks."""
    if engine.zero_optimization_stage() != 0 or not engine.fp16_enabled() or not collectives.any(loss_is_not_scaled(engine)):
        return []
    scale_loss(engine)
    return ["scale_loss"]


# --- stage 0, bf16 and fp16: an optimizer step on zero gradients at start ------------------------------------------------------------


def unfused_optimizer_steps_at_start() -> bool:
    """Fault: `FP16_UnfusedOptimizer` allocates the optimizer's state by a real step on zero gradients.

    Adam then starts at step 1, and weight decay shrinks the fp32 weights by a factor of (1 - lr x weight_decay) before training.
    Seen in deepspeed/runtime/fp16/unfused_optimizer.py, `initialize_optimizer_states`. Probe: wrap one weight and see if it moves.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16, device=get_accelerator().current_device_name()))
    wrapper = FP16_UnfusedOptimizer(
        torch.optim.AdamW([weight], lr=0.5, weight_decay=0.5), low_precision_dtype=torch.bfloat16, verbose=False
    )
    return float(wrapper.fp32_groups[0][0].detach()) != 1.0


def keep_weights_at_start() -> None:
    """Correction: allocate nothing at start; torch's optimizers allocate their state in their first real step."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    FP16_UnfusedOptimizer.initialize_optimizer_states = _allocate_nothing


def _allocate_nothing(self: Any) -> None:
    """Stands in for `FP16_UnfusedOptimizer.initialize_optimizer_states`."""


# --- stage 0: the gradient norm, summed in fp32 --------------------------------------------------------------------------------------


def engine_norm_is_inaccurate(elements: int = PROBE_ELEMENTS) -> bool:
    """Fault: at stage 0 the norm used for clipping is summed in fp32, which on a CPU is off by 3e-5 at 2 M elements.

    Stages 1, 2, 3 sum in fp64, so the stages drift apart (3.7e-5 in the loss after 30 steps). Seen in deepspeed/runtime/utils.py,
    `clip_grad_norm_` and `get_weight_norm`. Probe: both of them on a known tensor against the norm in fp64. All ranks must call this
    together: the engine's `clip_grad_norm_` averages over them.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import utils

    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(elements, generator=generator).to(get_accelerator().current_device_name()))
    weight.grad = weight.data.clone()
    exact = float(torch.linalg.vector_norm(weight.data, dtype=torch.float64))
    found = (float(utils.get_weight_norm([weight])), float(utils.clip_grad_norm_([weight], max_norm=2 * exact)))
    return any(abs(norm - exact) > 1e-6 * exact for norm in found)


def take_norms_in_fp64() -> None:
    """Correction: both functions sum in fp64, wherever the engine imported them."""
    from deepspeed.runtime import engine, utils
    from deepspeed.runtime.fp16 import fused_optimizer, unfused_optimizer

    for module in (utils, engine, fused_optimizer, unfused_optimizer):
        for name, correct in (("clip_grad_norm_", clip_grad_norm), ("get_weight_norm", weight_norm)):
            if hasattr(module, name):
                setattr(module, name, correct)


def norm_in_fp64(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all tensors together, summed in fp64; a scalar."""
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]).norm()


def clip_grad_norm(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """Stands in for `deepspeed.runtime.utils.clip_grad_norm_` where gradients are the same on all ranks (stage 0, no model parallelism).

    Scales the gradients in place so that their norm is at most `max_norm`; returns the norm before that, in fp64.
    """
    assert norm_type == 2 and mpu is None, "this project clips by the 2-norm, without model parallelism"
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = norm_in_fp64(gradients)
    scale = float(max_norm / (norm + 1e-6))
    if scale < 1:
        torch._foreach_mul_(gradients, scale)
    return norm


def weight_norm(parameters: list[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Stands in for `deepspeed.runtime.utils.get_weight_norm`: the 2-norm, or -1 where it is not finite, as the engine expects."""
    assert norm_type == 2 and mpu is None, "this project clips by the 2-norm, without model parallelism"
    norm = float(norm_in_fp64([parameter.data for parameter in parameters]))
    return norm if norm < float("inf") else -1.0  # NaN compares false


# --- stage 0, fp16: the rule of the loss scale --------------------------------------------------------------------------------------


def unfused_loss_scale_misbehaves() -> bool:
    """Fault: `FP16_UnfusedOptimizer` has a loss scale of its own making, and three things are wrong with it.

    The scale grows before the gradients are divided by it, so that every `loss_scale_window` steps one update is half of the right one;
    `hysteresis` and `consecutive_hysteresis` are ignored; and at `min_loss_scale` it skips steps for ever, where stages 1, 2, 3 stop.
    Seen in deepspeed/runtime/fp16/unfused_optimizer.py, `step` and `_update_scale`. Probe: one weight with gradient 1 through two steps,
    the second of which grows the scale; the second update must be 1 too. Then an overflow at the minimum, which must raise.
    All ranks must call this together: the engine looks for overflows among them.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

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
    except Exception:  # what stages 1, 2, 3 raise is a bare Exception
        return False
    return True


def scale_like_zero() -> None:
    """Correction: the loss scale of stage 0 follows `DynamicLossScaler`, the rule of stages 1, 2, 3, and changes after the update."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    build, unscale = FP16_UnfusedOptimizer.__init__, FP16_UnfusedOptimizer.unscale_and_clip_grads
    save, load = FP16_UnfusedOptimizer.state_dict, FP16_UnfusedOptimizer.load_state_dict

    def build_with_rule(
        self: Any, *args: Any, deepspeed: Any = None, dynamic_loss_args: dict[str, Any] | None = None, **options: Any
    ) -> None:
        arguments = dynamic_loss_args or (deepspeed.dynamic_loss_scale_args() if deepspeed is not None else None)
        build(self, *args, deepspeed=deepspeed, dynamic_loss_args=dynamic_loss_args, **options)
        self.rule = DynamicLossScaler(**arguments) if arguments and self.loss_scale_config.dynamic_loss_scale else None

    def update_scale(self: Any, overflow: bool) -> None:
        config, rule = self.loss_scale_config, self.rule
        self.scale_in_force = config.cur_scale
        if rule is not None:
            rule.cur_scale, rule.cur_iter, rule.last_overflow_iter = config.cur_scale, config.cur_iter, config.last_overflow_iter
            rule.update_scale(overflow)
            config.cur_scale, config.last_overflow_iter = rule.cur_scale, rule.last_overflow_iter
        config.cur_iter += 1

    def unscale_by_scale_in_force(self: Any, total_norm: float, apply_scale: bool = True) -> float:
        new, self.loss_scale_config.cur_scale = self.loss_scale_config.cur_scale, self.scale_in_force
        try:
            return unscale(self, total_norm, apply_scale)
        finally:
            self.loss_scale_config.cur_scale = new

    def save_with_rule(self: Any) -> dict[str, Any]:
        return {**save(self), "cur_hysteresis": self.rule.cur_hysteresis if self.rule else None}

    def load_with_rule(self: Any, state: dict[str, Any], load_optimizer_states: bool = True) -> None:
        load(self, state, load_optimizer_states)
        if self.rule and state.get("cur_hysteresis") is not None:
            self.rule.cur_hysteresis = state["cur_hysteresis"]

    FP16_UnfusedOptimizer.__init__ = build_with_rule
    FP16_UnfusedOptimizer._update_scale = update_scale
    FP16_UnfusedOptimizer.unscale_and_clip_grads = unscale_by_scale_in_force
    FP16_UnfusedOptimizer.state_dict = save_with_rule
    FP16_UnfusedOptimizer.load_state_dict = load_with_rule


# --- stage 0, fp16: the loss is not scaled -------------------------------------------------------------------------------------------


def loss_is_not_scaled(engine: Any) -> bool:
    """Fault: `engine.backward` multiplies the loss by the loss scale for ZeRO's optimizers only; at stage 0 the gradients are divided
    by it all the same.

    At a scale of 1024 the applied update was 1/1024 of the right one, and clipping did nothing. Seen in deepspeed/runtime/engine.py,
    `backward`. Probe: the gradient of a loss that is one weight, through the engine's own backward.
    """
    from deepspeed.utils.timer import NoopTimer

    weight = torch.ones((), device=engine.device, requires_grad=True)
    # Local (the model has no gradients to reduce), at a scale that shows, and without timers, which only a forward pass starts.
    before = engine.enable_backward_allreduce, engine.timers, engine.optimizer.loss_scale
    engine.enable_backward_allreduce, engine.timers, engine.optimizer.loss_scale = False, NoopTimer(), 4.0
    try:
        engine.backward(weight * 1.0, scale_wrt_gas=False)
    finally:
        engine.enable_backward_allreduce, engine.timers, engine.optimizer.loss_scale = before
    assert weight.grad is not None, "the engine's backward leaves a gradient"
    return float(weight.grad) != 4.0


def scale_loss(engine: Any) -> None:
    """Correction: `engine.backward` gets the loss multiplied by the scale in force."""
    backward = engine.backward

    def scaled_backward(loss: torch.Tensor, **options: Any) -> torch.Tensor:
        return backward(loss.float() * engine.optimizer.loss_scale, **options)

    engine.backward = scaled_backward
