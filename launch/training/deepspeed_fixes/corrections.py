"""The list of corrections: when each applies, its probe, and the function that corrects.

A probe runs DeepSpeed's own code at start-up and returns whether it has the fault; without it, nothing is changed. The names of those that
a probe asked for are logged. A correction without a probe (None) is always applied where it is listed: it replaces what DeepSpeed does by
something that is right or faster in any case.

They are applied in this order: a probe sees what the ones before it have corrected.

The faults were measured with DeepSpeed 0.19.8; `tests/distributed/test_corrections.py` and `test_nvme.py` train with and without the
corrections that are listed in `tests/distributed/correction_jobs.py`. To add one, see `__init__.py`. To remove one, delete its line here,
its functions, its entry and jobs there, its row in `docs/deepspeed-faults.md`, and what `git grep` finds of both names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from launch.training.deepspeed_fixes import loss_scale, offload, resume, stage_0, stage_3, stale_gradients, start_up, unfused_step
from launch.training.ranks.distributed import Collectives

#: When it applies, its probe, the correction.
Correction = tuple[bool, Callable[..., bool] | None, Callable[..., None]]


def before_initialize(stage: int, precision: str, compiled: bool, collectives: Collectives) -> list[str]:
    """Correct DeepSpeed's classes before an engine is built, for a model whose blocks may be `compiled`.

    All ranks call this together; a fault found by one is corrected on all.
    """
    half = precision != "fp32"
    corrections: list[Correction] = [
        (stage == 0, stage_0.engine_norm_is_inaccurate, stage_0.take_norms_in_fp64),
        (stage == 0 and half, stage_0.unfused_optimizer_steps_at_start, stage_0.keep_weights_at_start),
        (stage == 0 and precision == "fp16", loss_scale.unfused_loss_scale_misbehaves, loss_scale.scale_like_zero),
        (stage == 0 and half, None, unfused_step.use_fused_step),
        (stage == 3 and compiled, stage_3.compiled_gradients_are_lost, stage_3.add_bias_out_of_place),
        (stage > 0, None, start_up.without_compiled_muon),
    ]
    return _apply(corrections, collectives)


def after_initialize(ds_engine: Any, collectives: Collectives) -> list[str]:
    """Correct one engine after it is built. All ranks call this together."""
    stage, fp16 = ds_engine.zero_optimization_stage(), ds_engine.fp16_enabled()
    half = fp16 or ds_engine.bfloat16_enabled()
    corrections: list[Correction] = [
        (stage == 0 and fp16, loss_scale.loss_is_not_scaled, loss_scale.scale_loss),
        (stage > 0 and fp16, loss_scale.scale_grows_before_the_update, loss_scale.grow_scale_after_the_update),
        (stage == 3 or ds_engine.zero_use_cpu_optimizer(), stale_gradients.gradients_go_stale, stale_gradients.forget_gradients),
        (offload.uses_cpu_adam(ds_engine), offload.cpu_adam_depends_on_its_start, offload.derive_bias_correction_from_step),
        (
            ds_engine.zero_nvme_offload_optimizer(),
            partial(offload.optimizer_on_drive_is_not_loaded, collectives=collectives),
            offload.load_optimizer_on_drive,
        ),
        (True, None, resume.keep_own_settings),
        (ds_engine.lr_scheduler is not None, None, resume.schedule_by_step),
        (stage == 3, None, stage_3.forget_trace_of_evaluation),
        (stage == 0 and collectives.world_size == 1, None, stage_0.skip_reduction),
        (stage == 0 and not half, None, partial(stage_0.check_and_clip_fp32, collectives=collectives)),
        (stage == 0 and half, None, partial(stage_0.clip_by_mean_norm, collectives=collectives)),
    ]
    return _apply(corrections, collectives, ds_engine)


def _apply(corrections: list[Correction], collectives: Collectives, *arguments: Any) -> list[str]:
    """Apply the corrections, and return the names of those whose probe has found the fault."""
    found = []
    for applies, probe, correct in corrections:
        if applies and probe is None:
            correct(*arguments)
        elif applies and probe is not None and collectives.any(probe(*arguments)):
            correct(*arguments)
            found.append(correct.__name__)
    return found
