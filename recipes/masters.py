"""The tensors that the optimizer of a DeepSpeed engine updates, and the parts of parameters that each of them holds.

At stage 0 each parameter has its own tensor: the parameter itself in fp32, else its fp32 master weights. ZeRO flattens: at stages 1 and 2
each rank has a part of every concatenated group of parameters, at stage 3 its part of each parameter of a sub-group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Fragment(NamedTuple):
    """`length` elements of parameter `name`, from its element `first`, which begin at element `start` of a flat tensor."""

    name: str
    first: int
    start: int
    length: int


class UpdatedTensor(NamedTuple):
    """A tensor that the optimizer updates, and the fragment that it holds of each parameter of its group; a fragment may be empty."""

    tensor: torch.Tensor
    fragments: list[Fragment]


def fragments_of_rank(group: Iterable[tuple[str, int, int]], rank: int, part: int) -> list[Fragment]:
    """The fragments that `rank` holds of a group of parameters (name, offset in the group, elements), `part` elements per rank."""
    begin, fragments = rank * part, []
    for name, offset, elements in group:
        low, high = max(begin, offset), min(begin + part, offset + elements)
        fragments.append(Fragment(name, low - offset, low - begin, max(0, high - low)))
    return fragments


def master_weights(ds_engine: Any) -> Iterator[UpdatedTensor]:
    """The tensors that this rank's optimizer updates, in its order."""
    wrapper, rank = ds_engine.optimizer, ds_engine.global_rank
    names = {id(parameter): name for name, parameter in ds_engine.module.named_parameters()}
    if ds_engine.zero_optimization_stage() == 0:
        halves = getattr(wrapper, "fp16_groups", None) or [group["params"] for group in wrapper.param_groups]
        fulls = getattr(wrapper, "fp32_groups", None) or halves
        for half, full in ((half, full) for group in zip(halves, fulls, strict=True) for half, full in zip(*group, strict=True)):
            yield UpdatedTensor(full, [Fragment(names[id(half)], 0, 0, half.numel())])
    elif ds_engine.zero_optimization_stage() == 3:
        for group, flat in zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True):
            fragments, start = [], 0
            for parameter in group:
                each = parameter.partition_numel()
                (own,) = fragments_of_rank([(names[id(parameter)], 0, parameter.ds_numel)], rank, each)
                fragments.append(own._replace(start=start))
                start += each
            yield UpdatedTensor(flat, fragments)
    else:
        groups = zip(
            wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets, wrapper.single_partition_of_fp32_groups, strict=True
        )
        for group, offsets, flat in groups:
            offsets_and_sizes = [(names[id(one)], offset, one.numel()) for one, offset in zip(group, offsets, strict=True)]
            yield UpdatedTensor(flat, fragments_of_rank(offsets_and_sizes, rank, flat.numel()))
