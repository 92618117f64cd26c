"""The weights of a run's checkpoint, assembled from DeepSpeed's files by one process, without ranks or an engine.

fp32 master weights are taken where training kept them beside bf16 or fp16 weights. DeepSpeed's `zero_to_fp32.py` does similar work for ZeRO
stages 1 to 3, but unpickles whatever a file holds, keeps the weights in memory twice, and reads no weights offloaded to NVMe. Here every
piece goes from the mapped file to its place in the model.

    stage 0      mp_rank_00_model_states.pt: the weights, and in bf16 and fp16 the optimizer's `fp32_groups`
    stages 1, 2  mp_rank_00_model_states.pt, and of each rank a part of the flat fp32 weights of each group of parameters
    stage 3      of each rank a part of each parameter, flat in its sub-groups; those offloaded to NVMe are files of their own

DeepSpeed's files are pickles; `launch/formats/tensor_files.py` loads them without running their code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from launch.errors import UsageError
from launch.formats.checkpoint_files import ENGINE_TAG
from launch.formats.tensor_files import load_tensors
from model.gpt import GPT
from model.hf import HEAD

#: DeepSpeed's default for `zero_optimization.sub_group_size`, elements.
SUB_GROUP_SIZE = 1_000_000_000


def fill_from_checkpoint(model: GPT, checkpoint: Path, ranks: int) -> None:
    """Write the weights of `checkpoint`, which `ranks` ranks wrote, into `model`.

    Raises:
        UsageError: a file is missing, cannot be read, or holds other tensors than this model's.
    """
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    left = set(weights)
    try:
        for name, offset, values in _pieces(model, checkpoint / ENGINE_TAG, ranks):
            weight = weights.get(name)
            if weight is None or offset + values.numel() > weight.numel():
                raise UsageError(f"{checkpoint}: {name} is not a weight of the model in run.json; restore run.json")
            weight.view(-1)[offset : offset + values.numel()].copy_(values)
            if offset + values.numel() == weight.numel():
                left.discard(name)
    except UsageError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as reason:  # files with other content
        text = " ".join(f"{type(reason).__name__}: {reason}".split())[:120]
        raise UsageError(f"{checkpoint}: its files are not as DeepSpeed writes them ({text}); copy the checkpoint again") from None
    if left:
        raise UsageError(f"{checkpoint}: lacks {', '.join(sorted(left)[:3])} of the model in run.json; restore run.json")


def _pieces(model: GPT, folder: Path, ranks: int) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Every parameter in consecutive pieces: (its name, the offset of the piece in it, flat values)."""
    optimizer_files = sorted(folder.glob("*zero_pp_rank_*_optim_states.pt"), key=_rank)
    whole = folder / "mp_rank_00_model_states.pt"
    if optimizer_files and len(optimizer_files) != ranks:
        raise UsageError(f"{folder}: has the files of {len(optimizer_files)} rank(s), but {ranks} wrote it; copy the checkpoint again")
    if not whole.exists():
        model_files = sorted(folder.glob("zero_pp_rank_*_model_states.pt"), key=_rank)
        if not optimizer_files or not model_files:
            raise UsageError(f"{folder}: lacks DeepSpeed's files of weights; copy the checkpoint again")
        yield from _pieces_of_stage_3(load_tensors(model_files[0], mapped=True)["param_shapes"], optimizer_files)
        return
    state = load_tensors(whole, mapped=True)
    weights = {name: tensor for name, tensor in state["module"].items() if name != HEAD}  # the head is the embedding
    if any(tensor.dtype != torch.float32 for tensor in weights.values()):
        if optimizer_files:
            yield from _pieces_of_stages_1_and_2(state["param_shapes"], optimizer_files)
            return
        if "fp32_groups" in (state.get("optimizer") or {}):
            weights = _masters_of_stage_0(model, state["optimizer"]["fp32_groups"], weights, whole)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, tensor in weights.items():
        if name in shapes and tensor.shape != shapes[name]:
            raise UsageError(f"{whole}: {name} is {tuple(tensor.shape)}, the model in run.json has {tuple(shapes[name])}")
        yield name, 0, tensor.detach().reshape(-1)


def _masters_of_stage_0(
    model: GPT, groups: list[list[torch.Tensor]], halves: dict[str, torch.Tensor], file: Path
) -> dict[str, torch.Tensor]:
    """The fp32 master weights by name. DeepSpeed keeps them in the order of the optimizer's groups: matrices, then biases and norms."""
    names = [name for matrix in (True, False) for name, parameter in model.named_parameters() if (parameter.ndim >= 2) == matrix]
    found = dict(zip(names, (master for group in groups for master in group), strict=False))
    for name, half in halves.items():
        # The rounded master weight. In another order there could be another tensor of the same shape.
        if name not in found or found[name].shape != half.shape or not torch.equal(found[name].to(half.dtype), half):
            raise UsageError(f"{file}: the optimizer's fp32 weights of {name} are not those of the model; copy the checkpoint again")
    return found


def _pieces_of_stages_1_and_2(shapes: list[dict[str, torch.Size]], files: list[Path]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The parameters of a group are concatenated in one flat tensor; every rank has a part of it, padded at the end."""
    states = [load_tensors(file, mapped=True)["optimizer_state_dict"] for file in files]
    aligned = states[0].get("param_alignment_paddings")
    for group, names in enumerate(shapes):
        flat = [state["single_partition_of_fp32_groups"][group].detach() for state in states]
        paddings = aligned[group] if aligned else [0] * len(names)
        begin = 0
        for (name, shape), padding in zip(names.items(), paddings, strict=True):
            yield from ((name, offset, values) for offset, values in _cut(flat, begin, math.prod(shape), files[0]))
            begin += math.prod(shape) + padding


def _pieces_of_stage_3(shapes: list[dict[str, torch.Size]], files: list[Path]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Every rank has a part of each parameter, the last one padded; its parts are concatenated in its sub-groups."""
    ranks = len(files)
    flat = [_sub_groups(load_tensors(file, mapped=True), shapes, file, rank, ranks) for rank, file in enumerate(files)]
    begin = 0
    for name, shape in (item for group in shapes for item in group.items()):
        numel, each = math.prod(shape), -(-math.prod(shape) // ranks)
        for rank in range(ranks):
            first = rank * each
            for offset, values in _cut(flat[rank], begin, max(0, min(each, numel - first)), files[rank]):
                yield name, first + offset, values
        begin += each


def _sub_groups(state: dict[str, Any], shapes: list[dict[str, torch.Size]], file: Path, rank: int, ranks: int) -> list[torch.Tensor]:
    """A rank's sub-groups of stage 3, flat and in order; those offloaded to NVMe are mapped from their copies."""
    groups: list[torch.Tensor] = [tensor.detach() for tensor in state["optimizer_state_dict"]["fp32_flat_groups"]]
    if all(group.numel() for group in groups):
        return groups
    # As DeepSpeed's `_create_fp16_sub_groups` (zero/stage3.py) cuts them.
    limit = (state.get("ds_config") or {}).get("zero_optimization", {}).get("sub_group_size") or SUB_GROUP_SIZE
    sizes = []
    for names in shapes:
        size = 0
        for shape in names.values():
            size += -(-math.prod(shape) // ranks)
            if size >= limit:
                sizes.append(size)
                size = 0
        sizes += [size] if size else []
    # A file is named by the numbers of the first and the last parameter in it, `12_48.tensor.swp`. It is padded after the tensor.
    folder = file.parent / "offloaded_tensors" / f"rank{rank:02d}"
    swapped_files = iter(sorted(folder.glob("[0-9]*.tensor.swp"), key=lambda path: int(path.name.split("_")[0])))
    found = []
    for group, size in zip(groups, sizes, strict=False):
        if group.numel():
            found.append(group)
            continue
        swapped = next(swapped_files, None)
        if swapped is None or swapped.stat().st_size < 4 * size:
            raise UsageError(f"{folder}: lacks weights that were offloaded to NVMe; copy the checkpoint again")
        found.append(torch.from_file(str(swapped), size=size, dtype=torch.float32))
    return found


def _cut(flat: list[torch.Tensor], begin: int, length: int, file: Path) -> Iterator[tuple[int, torch.Tensor]]:
    """The elements [begin, begin + length) of concatenated tensors, as (offset from `begin`, values)."""
    end, here = begin + length, 0
    for tensor in flat:
        low, high = max(begin, here), min(end, here + tensor.numel())
        if low < high:
            yield low - begin, tensor[low - here : high - here]
        here += tensor.numel()
    if here < end:
        raise UsageError(f"{file}: holds fewer weights than the model has; copy the checkpoint again")


def _rank(file: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", file.name)
    return int(found[1]) if found else 0
