"""The update at stage 0 in 16 bits is DeepSpeed's, bit for bit, on the CPU or with --device cuda on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch


def updates(step: Any, dtype: torch.dtype, device: str, clip: float, changes: dict[int, float | None]) -> tuple[list[torch.Tensor], list]:
    """The weights, full and half, after three updates with `step`, and what each update returned.

    changes: tensor of the second update's gradients -> what all its elements are then; None: it has no gradient.
    """
    from deepspeed.runtime.fp16 import unfused_optimizer

    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (7,), (3,), (11, 5)]
    halves = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]
    groups = [{"params": halves[::2], "weight_decay": 0.1}, {"params": halves[1::2], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.1, fused=True)
    wrapper = unfused_optimizer.FP16_UnfusedOptimizer(adam, static_loss_scale=8.0, clip_grad=clip, low_precision_dtype=dtype, verbose=False)
    # DeepSpeed's asks all ranks. In bf16 the engine does not ask: the norm shows an overflow.
    grads_are_finite = lambda: all(half.grad is None or bool(half.grad.isfinite().all()) for half in halves)  # noqa: E731
    wrapper.overflow_checker.check = lambda: dtype == torch.float16 and not grads_are_finite()
    returned = []
    for number in range(3):
        for index, half in enumerate(halves):
            half.grad = torch.randn(half.shape, generator=generator).to(device, dtype) * 8
            if number == 1 and index in changes:
                half.grad = None if (value := changes[index]) is None else torch.full_like(half, value)
        returned.append((bool(step(wrapper)), float(wrapper._global_grad_norm)))
    return [tensor.detach() for group in (*wrapper.fp32_groups, *wrapper.fp16_groups) for tensor in group], returned


@pytest.mark.parametrize("changes", [{}, {1: None}, {0: math.inf}, {2: math.nan}], ids=["", "none", "inf", "nan"])
@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_update_is_deepspeeds(dtype, clip, changes, device, monkeypatch):
    from deepspeed.runtime.fp16 import unfused_optimizer

    from launch.training.deepspeed_fixes import norms, unfused_step

    shipped = unfused_optimizer.FP16_UnfusedOptimizer.step
    assert shipped is not unfused_step._step
    # What both are corrected by: the norm, and no update at the start.
    monkeypatch.setattr(unfused_optimizer, "get_weight_norm", norms.weight_norm)
    monkeypatch.setattr(unfused_optimizer.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(unfused_optimizer.FP16_UnfusedOptimizer, "initialize_optimizer_states", lambda self: None)
    (theirs, said), (ours, found) = (updates(step, dtype, device, clip, changes) for step in (shipped, unfused_step._step))
    assert found == said
    assert [overflow for overflow, _ in found] == [False, any(value is not None for value in changes.values()), False]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_count_of_overflows_goes_on_through_a_resume(monkeypatch):
    """Of the two overflows that halve the loss scale, the first may be before the checkpoint."""
    from deepspeed.runtime.fp16 import unfused_optimizer

    from launch.training.deepspeed_fixes.loss_scale import scale_like_zero

    kind = unfused_optimizer.FP16_UnfusedOptimizer
    for name in ("__init__", "state_dict", "load_state_dict"):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # which `scale_like_zero` replaces
    monkeypatch.setattr(unfused_optimizer.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(kind, "initialize_optimizer_states", lambda self: None)
    scale_like_zero()
    rule = {"init_scale": 16.0, "scale_window": 100, "min_scale": 1.0, "delayed_shift": 2, "consecutive_hysteresis": False}

    def wrapper() -> Any:
        sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))], lr=1.0)
        return kind(sgd, dynamic_loss_scale=True, dynamic_loss_args=rule, verbose=False)

    before, resumed = wrapper(), wrapper()
    before._update_scale(True)
    assert before.loss_scale_config.cur_scale == 16
    resumed.load_state_dict(before.state_dict())
    resumed._update_scale(True)
    assert resumed.loss_scale_config.cur_scale == 8
