"""The weights in a run's checkpoint, put together from DeepSpeed's own files on one process: no ranks, no engine, no DeepSpeed.

Where training kept fp32 master weights beside bf16 or fp16 ones, those are taken. DeepSpeed's `zero_to_fp32.py` does the like for ZeRO
stages 1 to 3, imports DeepSpeed, unpickles whatever a file holds, and holds the weights twice. Here every part goes from the file, which is
mapped and not read, to its place in the model.

    stage 0      mp_rank_00_model_states.pt: the weights, and in bf16 and fp16 the optimizer's `fp32_groups`
    stages 1, 2  mp_rank_00_model_states.pt, and of each rank a part of the flat fp32 weights of each group of parameters
    stage 3      of each rank a part of each parameter, flat in its sub-groups; those on a drive are files of their own

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
from launch.formats.tensor_files import UnreadableFile, load_tensors
from model.gpt import GPT, weight_decay_groups

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
        for name, place, values in _parts(model, checkpoint / ENGINE_TAG, ranks):
            whole = weights.get(name)
            if whole is None or place + values.numel() > whole.numel():
                raise UsageError(f"{checkpoint}: holds {name}, which is not this model's; the run's run.json was changed")
            whole.view(-1)[place : place + values.numel()].copy_(values)
            if place + values.numel() == whole.numel():
                left.discard(name)
    except UsageError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as reason:  # of files that hold something else
        text = " ".join(f"{type(reason).__name__}: {reason}".split())[:120]
        raise UsageError(f"{checkpoint}: its files are not as DeepSpeed writes them ({text}); copy the checkpoint again") from None
    if left:
        raise UsageError(f"{checkpoint}: lacks {', '.join(sorted(left)[:3])}; the run's run.json was changed")


def _parts(model: GPT, folder: Path, ranks: int) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Every parameter in parts that rise: (its name, the place of the part in it, flat values)."""
    of_optimizer = sorted(folder.glob("*zero_pp_rank_*_optim_states.pt"), key=_rank)
    whole = folder / "mp_rank_00_model_states.pt"
    if of_optimizer and len(of_optimizer) != ranks:
        raise UsageError(f"{folder}: has the files of {len(of_optimizer)} rank(s), {ranks} wrote; copy the checkpoint again")
    if not whole.exists() and not of_optimizer:
        raise UsageError(f"{folder}: holds no weights of DeepSpeed's; copy the checkpoint again")
    if not whole.exists():
        of_models = sorted(folder.glob("zero_pp_rank_*_model_states.pt"), key=_rank)
        if not of_models:
            raise UsageError(f"{folder}: lacks the files of model states; copy the checkpoint again")
        shapes = _load(of_models[0])["param_shapes"]
        yield from _parts_of_stage_3(shapes, of_optimizer)
        return
    state = _load(whole)
    module = {name: tensor for name, tensor in state["module"].items() if name != "lm_head.weight"}  # the embedding again
    masters: dict[str, torch.Tensor] = {}
    if all(tensor.dtype == torch.float32 for tensor in module.values()):
        masters = module
    elif of_optimizer:
        yield from _parts_of_stages_1_and_2(state["param_shapes"], of_optimizer)
        return
    elif "fp32_groups" in (state.get("optimizer") or {}):
        masters = _masters_of_stage_0(model, state["optimizer"]["fp32_groups"], module, whole)
    else:  # no optimizer of DeepSpeed's that is known keeps fp32 weights elsewhere
        masters = module
    for name, tensor in masters.items():
        if name in dict(model.named_parameters()) and tuple(tensor.shape) != tuple(model.get_parameter(name).shape):
            raise UsageError(f"{whole}: {name} is {tuple(tensor.shape)}, this model's is {tuple(model.get_parameter(name).shape)}")
        yield name, 0, tensor.detach().reshape(-1)


def _masters_of_stage_0(
    model: GPT, groups: list[list[torch.Tensor]], module: dict[str, torch.Tensor], file: Path
) -> dict[str, torch.Tensor]:
    """The fp32 weights by name: the engine's wrapper of the optimizer keeps them in the order of the groups that it was given."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_groups = [[names[id(parameter)] for parameter in group["params"]] for group in weight_decay_groups(model, 0.0)]
    found: dict[str, torch.Tensor] = {}
    for in_group, tensors in zip(of_groups, groups, strict=False):
        found |= dict(zip(in_group, tensors, strict=False))
    for name, half in module.items():
        # The rounding of its master weight. An order that is not ours would give another tensor of maybe the same shape.
        if name not in found or found[name].shape != half.shape or not torch.equal(found[name].to(half.dtype), half):
            raise UsageError(f"{file}: the optimizer's fp32 weights of {name} are not those of the model; copy the checkpoint again")
    return found


def _parts_of_stages_1_and_2(shapes: list[dict[str, torch.Size]], files: list[Path]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The parameters of a group lie one behind the other in one flat tensor, of which every rank has a part, padded at the end."""
    states = [_load(file)["optimizer_state_dict"] for file in files]
    aligned = states[0].get("param_alignment_paddings")
    for group, names in enumerate(shapes):
        flat = [state["single_partition_of_fp32_groups"][group].detach() for state in states]
        paddings = aligned[group] if aligned else [0] * len(names)
        begin = 0
        for (name, shape), padding in zip(names.items(), paddings, strict=True):
            yield from ((name, place, values) for place, values in _cut(flat, begin, math.prod(shape), files[0]))
            begin += math.prod(shape) + padding


def _parts_of_stage_3(shapes: list[dict[str, torch.Size]], files: list[Path]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Every rank has a part of each parameter, the last one padded; its parts lie one behind the other in its sub-groups."""
    ranks = len(files)
    flat = [_sub_groups(_load(file), shapes, file, rank, ranks) for rank, file in enumerate(files)]
    begin = 0
    for name, shape in (item for group in shapes for item in group.items()):
        numel, each = math.prod(shape), -(-math.prod(shape) // ranks)
        for rank in range(ranks):
            first = rank * each
            for place, values in _cut(flat[rank], begin, max(0, min(each, numel - first)), files[rank]):
                yield name, first + place, values
        begin += each


def _sub_groups(state: dict[str, Any], shapes: list[dict[str, torch.Size]], file: Path, rank: int, ranks: int) -> list[torch.Tensor]:
    """A rank's sub-groups of stage 3, flat, in their order; those that were on a drive are mapped from their copies."""
    groups: list[torch.Tensor] = [tensor.detach() for tensor in state["optimizer_state_dict"]["fp32_flat_groups"]]
    if all(group.numel() for group in groups):
        return groups
    # As DeepSpeed cuts them (zero/stage3.py, `_create_fp16_sub_groups`).
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
    # A file is named by the numbers of the first and the last parameter in it, `12_48.tensor.swp`; behind the tensor it is padded.
    folder = file.parent / "offloaded_tensors" / f"rank{rank:02d}"
    drive = iter(sorted(folder.glob("[0-9]*.tensor.swp"), key=lambda path: int(path.name.split("_")[0])))
    found = []
    for group, size in zip(groups, sizes, strict=False):
        if group.numel():
            found.append(group)
            continue
        swapped = next(drive, None)
        if swapped is None or swapped.stat().st_size < 4 * size:
            raise UsageError(f"{folder}: lacks weights that were on the drive; copy the checkpoint again")
        found.append(torch.from_file(str(swapped), size=size, dtype=torch.float32))
    return found


def _cut(flat: list[torch.Tensor], begin: int, length: int, file: Path) -> Iterator[tuple[int, torch.Tensor]]:
    """The elements [begin, begin + length) of tensors that lie one behind the other, as (place from `begin` on, values)."""
    end, here = begin + length, 0
    for tensor in flat:
        low, high = max(begin, here), min(end, here + tensor.numel())
        if low < high:
            yield low - begin, tensor[low - here : high - here]
        here += tensor.numel()
    if here < end:
        raise UsageError(f"{file}: holds fewer weights than its parameters have; copy the checkpoint again")


def _rank(file: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", file.name)
    return int(found[1]) if found else 0


def _load(file: Path) -> dict[str, Any]:
    """A file of DeepSpeed's, mapped: what is not used is not read."""
    try:
        loaded = load_tensors(file, mapped=True)
    except UnreadableFile as reason:
        raise UsageError(f"{reason}; copy the checkpoint again") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"{file}: holds no state of DeepSpeed's; copy the checkpoint again")
    return loaded
