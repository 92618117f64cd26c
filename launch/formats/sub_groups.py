"""ZeRO stage 3 updates the parameters of a rank in sub-groups: how DeepSpeed cuts them."""

from __future__ import annotations

from collections.abc import Iterable

#: DeepSpeed's default for `zero_optimization.sub_group_size`, elements.
SUB_GROUP_SIZE = 10**9


def sub_group_sizes(elements: Iterable[int], ranks: int, limit: int) -> list[int]:
    """Elements of each sub-group on one rank, as `_create_fp16_sub_groups` (deepspeed/runtime/zero/stage3.py) cuts a parameter group.

    Args:
        elements: those of each whole parameter of the group, in order.
        limit: `zero_optimization.sub_group_size`; a sub-group ends with the parameter that reaches it.
    """
    sizes, size = [], 0
    for n in elements:
        size += -(-n // ranks)
        if size >= limit:
            sizes.append(size)
            size = 0
    return sizes + [size] * (size > 0)
