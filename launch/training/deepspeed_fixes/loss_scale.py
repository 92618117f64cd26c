"""fp16: how the loss scale changes."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.timer import NoopTimer

from launch.training.deepspeed_fixes.probe_engine import probe_engine, step_probe

# --- stage 0, fp16: the rule of the loss scale --------------------------------------------------------------------------------------


def unfused_loss_scale_misbehaves() -> bool:
    """Fault: `FP16_UnfusedOptimizer` updates the loss scale by its own rule, which has three faults.

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
    """Fault: the loss scale grows before the gradients are divided by it, so one update in `loss_scale_window` steps has half its size.

    Clipping counts the gradient double. Stage 3 also reports half of its norm. The code is `step` in
    deepspeed/runtime/zero/stage_1_and_2.py and stage3.py. Probe: an engine of two weights with plain SGD, whose scale grows in each step;
    two steps with the same gradient must be equal. All ranks must call this together.
    """
    rule = {"initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 1}
    with probe_engine(ds_engine, rule=rule) as probe:
        places = [safe_get_full_fp32_param(probe.module[0].weight).clone()]
        for _ in range(2):
            step_probe(probe, probe.module)
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
    """Fault: at stage 0 `engine.backward` does not multiply the loss by the loss scale, but the optimizer divides the gradients by it.

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
