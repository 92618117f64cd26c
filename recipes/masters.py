"""The tensors that the optimizer of a DeepSpeed engine updates, and which elements of which parameter each of them holds.

At stage 0 each parameter has its own tensor: the parameter itself in fp32, else its fp32 master weights. ZeRO flattens: at stages 1 and 2
each rank has a part of every concatenated group of parameters, at stage 3 its part of each parameter of a sub-group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Fragment(NamedTuple):
    """`length` elements of parameter `name`, from its element `first`, which begin at element `start` of a flat tensor."""

    name: str
    first: int
    start: int
    length: int


class Master(NamedTuple):
    """A tensor that the optimizer updates, and what it holds: of every parameter of its group a fragment, which may be empty."""

    tensor: torch.Tensor
    fragments: list[Fragment]


def master_weights(engine: Any) -> Iterator[Master]:
    """The tensors that this rank's optimizer updates, in its order. `engine` is DeepSpeed's."""
    wrapper, rank = engine.optimizer, engine.global_rank
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if engine.zero_optimization_stage() == 0:
        halves = getattr(wrapper, "fp16_groups", None) or [group["params"] for group in wrapper.param_groups]
        fulls = getattr(wrapper, "fp32_groups", None) or halves
        for half, full in ((half, full) for group in zip(halves, fulls, strict=True) for half, full in zip(*group, strict=True)):
            yield Master(full, [Fragment(names[id(half)], 0, 0, half.numel())])
    elif engine.zero_optimization_stage() == 3:
        for group, flat in zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True):
            fragments, start = [], 0
            for parameter in group:
                each = parameter.partition_numel()
                length = max(0, min(each, parameter.ds_numel - rank * each))
                fragments.append(Fragment(names[id(parameter)], rank * each, start, length))
                start += each
            yield Master(flat, fragments)
    else:
        groups = zip(
            wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets, wrapper.single_partition_of_fp32_groups, strict=True
        )
        for group, offsets, flat in groups:
            begin, fragments = rank * flat.numel(), []
            for parameter, offset in zip(group, offsets, strict=True):
                low, high = max(begin, offset), min(begin + flat.numel(), offset + parameter.numel())
                fragments.append(Fragment(names[id(parameter)], low - offset, low - begin, max(0, high - low)))
            yield Master(flat, fragments)
