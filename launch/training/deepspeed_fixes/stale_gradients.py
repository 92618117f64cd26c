"""Stage 3, and offload at stages 1, 2 and 3: gradients of earlier steps are applied again, and those of earlier micro-batches are lost."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param

from launch.training.deepspeed_fixes.probe_engine import probe_engine, step_probe


def gradients_go_stale(ds_engine: Any) -> bool:
    """Fault: a parameter without a gradient in a step is updated with its gradient of an earlier step.

    Stage 3 keeps gradients in one flat buffer that is never set to zero, and copies the gradients of the first micro-batch into it. With an
    offloaded optimizer, stages 1, 2 and 3 keep fp32 gradients on the host, and store only those of the last micro-batch. The norm used for
    clipping contains the old gradients too. With layer drop, losses were off by 0.67 after 12 steps. The code is `partition_grads` in
    deepspeed/runtime/zero/stage3.py and `copy_grads_in_partition` in stage_1_and_2.py. Probe: an engine of two weights with plain SGD; the
    weight that is left out of the second step must not change. All ranks must call this together.
    """
    with probe_engine(ds_engine) as probe:
        places = []
        for used in (probe.module, probe.module[:1]):
            step_probe(probe, used)
            places.append(safe_get_full_fp32_param(probe.module[1].weight).clone())
    return not torch.equal(*places)


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
    """Offload: copy from the flat buffer the gradients that `partition_grads` did not copy: zeros, or those of earlier micro-batches."""
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
