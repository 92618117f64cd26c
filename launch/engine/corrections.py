"""Faults of the DeepSpeed engine that change training in silence, each corrected by one small function.

Every correction has a probe, which runs the engine's own code at start-up and looks for the fault: where the engine has been
mended, the probe stays quiet and nothing is corrected twice. `before_initialize` and `after_initialize` apply what is needed
and return the names of what they applied, which the run's log shows.

The faults were measured on DeepSpeed 0.19.8; `tests/distributed/test_corrections.py` shows each of them with and without its correction.
"""

from __future__ import annotations

from typing import Any

import torch

#: Elements of the tensor on which the gradient norm is probed. The error of an fp32 sum grows with its length: 2.8e-5 at 2 M.
PROBE_ELEMENTS = 2**21


def before_initialize(zero_stage: int, precision: str) -> list[str]:
    """Corrections of the engine's classes, before an engine is built."""
    applied = []
    if zero_stage == 0 and precision != "fp32" and unfused_optimizer_steps_at_start():
        keep_weights_at_start()
        applied.append("keep_weights_at_start")
    if zero_stage == 0 and engine_norm_is_inaccurate():
        take_norms_in_fp64()
        applied.append("take_norms_in_fp64")
    if zero_stage == 0 and precision == "fp16" and growing_scale_shrinks_the_update():
        unscale_by_the_scale_in_force()
        applied.append("unscale_by_the_scale_in_force")
    return applied


def after_initialize(engine: Any) -> list[str]:
    """Corrections of one engine, after it was built."""
    applied = []
    if loss_is_not_scaled(engine):
        scale_loss(engine)
        applied.append("scale_loss")
    return applied


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
    `clip_grad_norm_` and `get_weight_norm`. Probe: both of them on a known tensor against the norm in fp64.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import utils

    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.empty(0, device=get_accelerator().current_device_name()))
    weight.data = torch.randn(elements, generator=generator).to(weight.device)
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


# --- stage 0, fp16: a growing loss scale halves one update --------------------------------------------------------------------------


def growing_scale_shrinks_the_update() -> bool:
    """Fault: `FP16_UnfusedOptimizer.step` lets the loss scale grow before it divides the gradients by it.

    Once every `loss_scale_window` steps the update is then half of the right one, and clipping sees half of the norm. Seen in
    deepspeed/runtime/fp16/unfused_optimizer.py, `step`. Probe: one weight with gradient 1 through two steps, the second of which grows
    the scale; the second update must be 1 too. All ranks must call this together: the engine looks for overflows among them.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16, device=get_accelerator().current_device_name()))
    arguments = {"init_scale": 4.0, "scale_window": 1, "min_scale": 1.0, "delayed_shift": 1, "consecutive_hysteresis": False}
    wrapper = FP16_UnfusedOptimizer(torch.optim.SGD([weight], lr=1.0), dynamic_loss_scale=True, dynamic_loss_args=arguments, verbose=False)
    for _ in range(2):
        weight.grad = torch.full_like(weight, wrapper.loss_scale)
        wrapper.step()
    return float(wrapper.fp32_groups[0][0].detach()) != -2.0


def unscale_by_the_scale_in_force() -> None:
    """Correction: the gradients are divided by the scale that the loss was multiplied by."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    update_scale, unscale = FP16_UnfusedOptimizer._update_scale, FP16_UnfusedOptimizer.unscale_and_clip_grads

    def update_scale_and_remember(self: Any, skip: bool) -> None:
        self.scale_in_force = self.loss_scale_config.cur_scale
        update_scale(self, skip)

    def unscale_by_remembered(self: Any, total_norm: float, apply_scale: bool = True) -> float:
        grown, self.loss_scale_config.cur_scale = self.loss_scale_config.cur_scale, self.scale_in_force
        try:
            return unscale(self, total_norm, apply_scale)
        finally:
            self.loss_scale_config.cur_scale = grown

    FP16_UnfusedOptimizer._update_scale = update_scale_and_remember
    FP16_UnfusedOptimizer.unscale_and_clip_grads = unscale_by_remembered


# --- stage 0, fp16: the loss is not scaled -------------------------------------------------------------------------------------------


def loss_is_not_scaled(engine: Any) -> bool:
    """Fault: `engine.backward` multiplies the loss by the loss scale for ZeRO's optimizers only; at stage 0 the gradients are divided
    by it all the same.

    At a scale of 1024 the applied update was 1/1024 of the right one, and clipping did nothing. Seen in deepspeed/runtime/engine.py,
    `backward`. Probe: the gradient of a loss that is one weight, through the engine's own backward.
    """
    scale = getattr(engine.optimizer, "loss_scale", 1.0)
    if engine.zero_optimization_stage() != 0 or not engine.fp16_enabled() or scale == 1.0:
        return False
    weight = torch.ones((), device=engine.device, requires_grad=True)
    engine.enable_backward_allreduce = False  # the probe is local; the model has no gradients to reduce
    try:
        engine.backward(weight * 1.0, scale_wrt_gas=False)
    finally:
        engine.enable_backward_allreduce = True
    return float(weight.grad) != scale


def scale_loss(engine: Any) -> None:
    """Correction: `engine.backward` gets the loss multiplied by the scale in force."""
    backward = engine.backward

    def scaled_backward(loss: torch.Tensor, **options: Any) -> torch.Tensor:
        return backward(loss.float() * engine.optimizer.loss_scale, **options)

    engine.backward = scaled_backward
