"""Stage 0: the start of the optimizer, and the norm by which gradients are clipped."""

from __future__ import annotations

import math
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime import utils
from deepspeed.runtime.fp16 import fused_optimizer, unfused_optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from launch.training.deepspeed_fixes.mean_norm import MeanNorm
from launch.training.deepspeed_fixes.norms import NormNotFinite, clip_grad_norm, clip_gradients, norm_in_fp64, weight_norm
from launch.training.ranks.distributed import Collectives

#: Elements of the tensor on which the gradient norm is probed. The error of an fp32 sum grows with its length: 2.8e-5 at 2 M.
PROBE_ELEMENTS = 2**21

# --- stage 0, bf16 and fp16: an optimizer step on zero gradients at start ------------------------------------------------------------


def unfused_optimizer_steps_at_start() -> bool:
    """Fault: `FP16_UnfusedOptimizer` allocates the optimizer state with a real step on zero gradients.

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
    """Fault: at stage 0 the norm used for clipping is summed in fp32, which on a CPU is off by 3e-5 at 2 M elements.

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


# --- the update ---------------------------------------------------------------------------------------------------------------------


def skip_reduction(ds_engine: Any) -> None:
    """Correction for one rank: reduce nothing.

    The engine would copy all gradients into one tensor, reduce it over one rank, and copy it back: 3 ms for 14 M parameters. Its code
    before that must run, because it gives a parameter without a gradient one of zeros.
    """
    ds_engine._reduce_non_expert_gradients = lambda gradients, elements_per_buffer: None


def check_and_clip_fp32(ds_engine: Any, collectives: Collectives) -> None:
    """Correction in fp32, where the engine discards the norm and updates the weights with gradients that are not finite.

    Before each update, record the gradient norm, raise `NormNotFinite` if it is not finite, and clip.
    """
    clipping, mean_norm, update = ds_engine.gradient_clipping(), MeanNorm(collectives), ds_engine._take_model_step

    def clip_and_update(*args: Any) -> None:
        gradients, reduced = _gradients(ds_engine), ds_engine.enable_backward_allreduce
        if reduced and clipping > 0:  # as in the engine's own method, which discards the norm
            norm = float(engine_module.clip_grad_norm_(parameters=ds_engine.module.parameters(), max_norm=clipping))
        else:
            norm = float(norm_in_fp64(gradients)) if reduced else mean_norm.of(gradients)
        ds_engine._global_grad_norm = norm
        if not math.isfinite(norm):  # the other stages and precisions make no update then
            raise NormNotFinite
        if clipping > 0 and not reduced:
            clip_gradients(gradients, norm, clipping)
        update(*args)

    ds_engine._take_model_step = clip_and_update
    ds_engine.clip_fp32_gradients = lambda: None  # which `update` calls


def clip_by_mean_norm(ds_engine: Any, collectives: Collectives) -> None:
    """Correction in bf16 and fp16: clip by the estimated norm of the mean gradient if a technique has switched off the reduction.

    DeepSpeed would clip by the norm of this rank's gradients. In bf16, its search for overflows is skipped while gradients are reduced,
    because their norm shows an overflow too.
    """
    wrapper, mean_norm = ds_engine.optimizer, MeanNorm(collectives)
    unscale, checker = wrapper.unscale_and_clip_grads, wrapper.overflow_checker
    look_for_overflows = checker.check
    if ds_engine.bfloat16_enabled():  # two passes over all gradients
        checker.check = lambda: not ds_engine.enable_backward_allreduce and look_for_overflows()

    def unscale_by_mean(total_norm: float, apply_scale: bool = True) -> float:
        if not ds_engine.enable_backward_allreduce:
            total_norm = wrapper._global_grad_norm = mean_norm.of(_gradients(ds_engine))
            if not math.isfinite(total_norm):  # by all ranks together
                raise NormNotFinite
        return unscale(total_norm, apply_scale)

    wrapper.unscale_and_clip_grads = unscale_by_mean


def _gradients(ds_engine: Any) -> list[torch.Tensor]:
    """The model's gradients on this rank."""
    return [parameter.grad for parameter in ds_engine.module.parameters() if parameter.grad is not None]
