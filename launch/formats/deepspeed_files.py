"""Reads the weights and the optimizer state of each parameter, by name, from DeepSpeed's checkpoint files.

A checkpoint of any ZeRO stage, number of ranks, precision and offload is read by one process, without ranks or an engine. In bf16 and
fp16, the weights are the fp32 master weights. DeepSpeed's `zero_to_fp32.py` reads the weights of stages 1 to 3 too, but unpickles any
object, keeps the weights in memory twice, and does not read weights offloaded to NVMe. Here every piece is copied from the mapped file to
its place in a model (`fill_from_checkpoint`) or in an engine (`launch/training/checkpoints/move.py`).

    stage 0      mp_rank_00_model_states.pt: the weights, the optimizer's state of each parameter, and in bf16 and fp16 its `fp32_groups`
    stages 1, 2  mp_rank_00_model_states.pt, and per rank a part of the flat fp32 weights and state of each group of parameters
    stage 3      per rank a part of each parameter and its state, flat in sub-groups; those offloaded to NVMe have separate files

DeepSpeed's files are pickles; `launch/formats/tensor_files.py` loads them without running their code.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from launch.errors import UsageError
from launch.formats.checkpoint_files import ENGINE_TAG
from launch.formats.sub_groups import SUB_GROUP_SIZE, sub_group_sizes
from launch.formats.tensor_files import load_tensors
from model.gpt import GPT
from model.hf import HEAD
from recipes.technique import FP32_NAMES, ranks_in_words

#: Stage -> keys of `zero_optimization` that determine the order and the padding of the parameters in its files, with DeepSpeed's defaults.
ORDER: dict[int, dict[str, Any]] = {
    1: {"round_robin_gradients": False, "parameter_alignment": False},
    2: {"round_robin_gradients": False, "parameter_alignment": False},
    3: {"sub_group_size": SUB_GROUP_SIZE},
}
#: Errors from reading files with other content than DeepSpeed's.
OTHER_CONTENT = (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError)
#: The offset of a piece in its flat parameter, and its values, mapped from a file.
Piece = tuple[int, torch.Tensor]


@dataclass(frozen=True)
class DeepSpeedLayout:
    """The division of weights and optimizer state among the ranks of DeepSpeed's engine, and so among the files of a checkpoint.

    Attributes:
        offload: where the optimizer is: "none", "cpu" or "nvme".
        others: other settings of DeepSpeed that matter at this stage.
    """

    ranks: int
    stage: int
    precision: str
    offload: str
    others: tuple[Any, ...] = ()

    @classmethod
    def of(cls, config: dict[str, Any], ranks: int) -> DeepSpeedLayout:
        """The layout of an engine with DeepSpeed's `config`, which each checkpoint has as `ds_config`."""
        zero = config.get("zero_optimization") or {}
        stage = int(zero.get("stage") or 0)
        precision = next((name for name in ("fp16", "bf16") if (config.get(name) or {}).get("enabled")), "fp32")
        offload = (zero.get("offload_optimizer") or {}).get("device") or "none"
        accumulated = (config.get("data_types") or {}).get("grad_accum_dtype")
        accumulated = "fp32" if accumulated in FP32_NAMES else accumulated
        order = (zero.get(key, default) for key, default in ORDER.get(stage, {}).items())
        return cls(ranks, stage, precision, str(offload), (accumulated, *order))

    def __str__(self) -> str:
        where = {"cpu": " with the optimizer on the CPU", "nvme": " with the optimizer on NVMe"}.get(self.offload, "")
        return f"{ranks_in_words(self.ranks)} at stage {self.stage} in {self.precision}{where}"


@dataclass
class OptimizerState:
    """The state of an optimizer.

    Attributes:
        pieces: state of the parameters' shape, such as "exp_avg" -> parameter -> its pieces.
        others: parameter -> its other states: numbers, such as "step", and at stage 0 tensors of any shape.
        groups: the values of each group of parameters.
    """

    pieces: dict[str, dict[str, list[Piece]]]
    others: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


class _Flat(NamedTuple):
    """A parameter (stage 0), or a rank's part of a group (stages 1 and 2) or of a sub-group (stage 3), flat.

    Attributes:
        weights: in fp32.
        states: of the same size, such as "exp_avg".
        numbers: the other states.
    """

    weights: torch.Tensor
    states: dict[str, torch.Tensor]
    numbers: dict[str, Any]
    padding: int = 0  # of the states, where DeepSpeed saves the weights without it


class _Place(NamedTuple):
    """A piece of a parameter: its offset in the flat parameter, and where its values are."""

    offset: int
    flat: _Flat
    part: slice


class DeepSpeedFiles:
    """DeepSpeed's files in `checkpoint`, which `ranks` ranks wrote. Tensors are mapped, and read only where they are used.

    Args:
        shapes: of the model's parameters, in the model's order.

    Attributes:
        engine: the state of the engine beside weights and optimizer: `global_steps`, `lr_scheduler`, `ds_config`, ...
        layout: of the engine that wrote the files.

    Raises:
        UsageError: a file is missing or cannot be read.
    """

    def __init__(self, checkpoint: Path, ranks: int, shapes: Mapping[str, Sequence[int]]):
        self.checkpoint, self._shapes = checkpoint, {name: torch.Size(shape) for name, shape in shapes.items()}
        folder = checkpoint / ENGINE_TAG
        self._of_ranks = sorted(folder.glob("*zero_pp_rank_*_optim_states.pt"), key=_rank)
        if self._of_ranks and len(self._of_ranks) != ranks:
            raise UsageError(f"{folder}: has files of {ranks_in_words(len(self._of_ranks))}, but {ranks} wrote it; copy it again")
        self._file = folder / "mp_rank_00_model_states.pt"
        self._partitioned = not self._file.exists()
        if self._partitioned:
            parts = sorted(folder.glob("zero_pp_rank_*_model_states.pt"), key=_rank)
            if not self._of_ranks or not parts:
                raise UsageError(f"{folder}: lacks DeepSpeed's files of weights; copy the checkpoint again")
            self._file = parts[0]
        self.state = load_tensors(self._file, mapped=True)
        with self.as_deepspeed_writes():
            self.layout = DeepSpeedLayout.of(self.state.get("ds_config") or {}, ranks)

    @contextlib.contextmanager
    def as_deepspeed_writes(self) -> Iterator[None]:
        """Turn errors in the body about unexpected content of the files into a UsageError."""
        try:
            yield
        except UsageError:
            raise
        except OTHER_CONTENT as reason:
            text = " ".join(f"{type(reason).__name__}: {reason}".split())[:120]
            raise UsageError(f"{self.checkpoint}: its files are not as DeepSpeed writes them ({text}); copy the checkpoint again") from None

    def weights(self) -> dict[str, list[Piece]]:
        """The fp32 weights of each parameter, in consecutive pieces.

        Raises:
            UsageError: the files hold other parameters than the model has.
        """
        return {name: [(offset, flat.weights[part]) for offset, flat, part in places] for name, places in self._places.items()}

    def optimizer(self) -> OptimizerState:
        """The state of the optimizer; empty before its first update.

        Raises:
            UsageError: ZeRO has cut a state that is neither one number nor of the shape of its parameter.
        """
        for same in zip(*self._flats, strict=True):  # the parts of one group or sub-group
            for flat in same:
                # At stage 0 a parameter is one part, and its other states may be tensors.
                if flat is not same[0] and not (list(flat.states) == list(same[0].states) and _are_equal(flat.numbers, same[0].numbers)):
                    raise UsageError(f"{self.checkpoint}: the optimizer's state differs between its parts; copy the checkpoint again")
                for key, value in flat.states.items():
                    if value.numel() - flat.weights.numel() not in (0, flat.padding):
                        raise UsageError(f"{self.checkpoint}: the optimizer's {key} differs in shape from the weights; it cannot be moved")
        pieces: dict[str, dict[str, list[Piece]]] = {}
        for name, places in self._places.items():
            for key in places[0].flat.states:
                pieces.setdefault(key, {})[name] = [(offset, flat.states[key][part]) for offset, flat, part in places]
        saved = self._states[0]
        groups = saved if not self._of_ranks else saved["optimizer_state_dict"] if self._partitioned else saved["base_optimizer_state"]
        return OptimizerState(
            pieces,
            {name: dict(places[0].flat.numbers) for name, places in self._places.items()},
            groups["param_groups"] if isinstance(groups, dict) else [],
        )

    def loss_scale(self) -> dict[str, Any]:
        """fp16: the state of the loss scale, under the names of DeepSpeed's `DynamicLossScaler`."""
        if not self._of_ranks:
            return dict(self.state["optimizer"])
        state = load_tensors(self._of_ranks[0], mapped=True, deepspeed_objects=True)["optimizer_state_dict"]
        return dict(vars(state["loss_scaler"]))

    @functools.cached_property
    def _states(self) -> list[dict[str, Any]]:
        """The optimizer's state in the file of each rank; at stage 0 in the one file."""
        if self._of_ranks:
            return [load_tensors(file, mapped=True)["optimizer_state_dict"] for file in self._of_ranks]
        return [self.state["optimizer"].get("optimizer_state_dict", self.state["optimizer"])]

    @functools.cached_property
    def _flats(self) -> list[list[_Flat]]:
        """The flat parts of each rank, in order."""
        if not self._of_ranks:
            return [self._flats_of_stage_0()]
        cut = self._flats_of_stage_3 if self._partitioned else _flats_of_stages_1_and_2
        return [cut(state, rank) for rank, state in enumerate(self._states)]

    def _flats_of_stage_0(self) -> list[_Flat]:
        """Each parameter as a flat tensor, in the order of `_names`. In bf16 and fp16 the weights are the optimizer's `fp32_groups`."""
        module, saved = self.state["module"], self._states[0]
        self._require_shapes({name: tensor.shape for name, tensor in module.items() if name != HEAD or HEAD in self._shapes})
        weights = [module[name] for name in self._names]
        if any(tensor.dtype != torch.float32 for tensor in weights):
            weights = [master for group in self.state["optimizer"]["fp32_groups"] for master in group]
        indices = [index for group in saved["param_groups"] for index in group["params"]]
        flats = []
        for name, weight, index in zip(self._names, weights, indices, strict=True):
            # `module` has the rounded master weight; in a wrong order, the shape alone could match.
            half = module[name]
            if weight is not half and (weight.shape != half.shape or not torch.equal(weight.to(half.dtype), half)):
                raise UsageError(f"{self._file}: the optimizer has other weights of {name} than the model; copy the checkpoint again")
            state = saved["state"].get(index, {})
            states = {key: value.reshape(-1) for key, value in state.items() if getattr(value, "shape", None) == weight.shape}
            numbers = {key: value for key, value in state.items() if key not in states and value is not None}
            flats.append(_Flat(weight.detach().reshape(-1), states, numbers))
        return flats

    @property
    def _names(self) -> list[str]:
        """The parameters in the order of the optimizer's groups: matrices, then biases and norms."""
        return sorted(self._shapes, key=lambda name: len(self._shapes[name]) < 2)

    def _flats_of_stage_3(self, state: dict[str, Any], rank: int) -> list[_Flat]:
        """A rank's sub-groups. Those offloaded to NVMe are mapped from their copies: `12_48.tensor.swp`, `exp_avg-12_48.tensor.swp`.

        A file is named by the numbers of the first and the last parameter in it, and padded after the tensor.
        """
        weights = [tensor.detach() for tensor in state["fp32_flat_groups"]]
        states = _by_index(state["optimizer_state_dict"], len(weights))
        if all(tensor.numel() for tensor in weights):
            return [_Flat(tensor, *_split(one)) for tensor, one in zip(weights, states, strict=True)]
        folder = self._file.parent / "offloaded_tensors" / f"rank{rank:02d}"
        swapped = iter(sorted(folder.glob("[0-9]*.tensor.swp"), key=lambda path: int(path.name.split("_")[0])))
        found = []
        for tensor, one, size in zip(weights, states, self._sizes_of_sub_groups(), strict=False):
            flat = _Flat(tensor, *_split(one))
            if not tensor.numel():
                name = next(swapped, folder / "?").name
                of_states = {key: _mapped(folder / f"{key}-{name}", size) for key in flat.states}
                flat = _Flat(_mapped(folder / name, size), of_states, flat.numbers)
            found.append(flat)
        return found

    def _sizes_of_sub_groups(self) -> list[int]:
        """Elements of each sub-group on one rank."""
        limit = (self.state.get("ds_config") or {}).get("zero_optimization", {}).get("sub_group_size", SUB_GROUP_SIZE)
        groups = [map(math.prod, names.values()) for names in self.state["param_shapes"]]
        return [size for group in groups for size in sub_group_sizes(group, len(self._of_ranks), limit)]

    @functools.cached_property
    def _places(self) -> dict[str, list[_Place]]:
        """Parameter -> its consecutive pieces in the flat parts."""
        if not self._of_ranks:
            return {name: [_Place(0, flat, slice(None))] for name, flat in zip(self._names, self._flats[0], strict=True)}
        groups = self.state["param_shapes"]
        self._require_shapes({name: shape for names in groups for name, shape in names.items()})
        places = self._places_at_stage_3 if self._partitioned else self._places_at_stages_1_and_2
        return {name: found for group, names in enumerate(groups) for name, found in places(group, names)}

    def _places_at_stages_1_and_2(self, group: int, names: dict[str, torch.Size]) -> Iterator[tuple[str, list[_Place]]]:
        """The parameters of a group are concatenated in one flat tensor; every rank has a part of it, padded at the end."""
        flats, aligned, begin = [of_rank[group] for of_rank in self._flats], self._states[0].get("param_alignment_paddings"), 0
        for (name, shape), padding in zip(names.items(), aligned[group] if aligned else [0] * len(names), strict=True):
            yield name, self._cut(flats, begin, math.prod(shape))
            begin += math.prod(shape) + padding

    def _places_at_stage_3(self, group: int, names: dict[str, torch.Size]) -> Iterator[tuple[str, list[_Place]]]:
        """Every rank has a part of each parameter, the last one padded; its parts are concatenated in its sub-groups."""
        ranks = len(self._flats)
        begin = sum(-(-math.prod(shape) // ranks) for before in self.state["param_shapes"][:group] for shape in before.values())
        for name, shape in names.items():
            numel, each, places = math.prod(shape), -(-math.prod(shape) // ranks), list[_Place]()
            for rank, of_rank in enumerate(self._flats):
                first = rank * each
                places += self._cut(of_rank, begin, max(0, min(each, numel - first)), first)
            yield name, places
            begin += each

    def _cut(self, flats: list[_Flat], begin: int, length: int, offset: int = 0) -> list[_Place]:
        """The elements [begin, begin + length) of concatenated flat parts; the first has `offset` in its parameter."""
        end, here, places = begin + length, 0, []
        for flat in flats:
            size = flat.weights.numel()
            low, high = max(begin, here), min(end, here + size)
            if low < high:
                places.append(_Place(offset + low - begin, flat, slice(low - here, high - here)))
            here += size
        if here < end:
            raise UsageError(f"{self.checkpoint}: its files hold fewer weights than the model has; copy the checkpoint again")
        return places

    def _require_shapes(self, found: dict[str, torch.Size]) -> None:
        for name in {**found, **self._shapes}:
            if found.get(name) != self._shapes.get(name):
                has, needs = (f"of shape {list(one[name])}" if name in one else "missing" for one in (found, self._shapes))
                raise UsageError(f"{self.checkpoint}: {name} is {has}, and {needs} in that of the model in run.json; restore run.json")


def fill_from_checkpoint(model: GPT, checkpoint: Path, ranks: int) -> None:
    """Write the weights of `checkpoint`, which `ranks` ranks wrote, into `model`.

    Raises:
        UsageError: a file is missing, cannot be read, or holds other tensors than this model's.
    """
    parameters = dict(model.named_parameters())
    files = DeepSpeedFiles(checkpoint, ranks, {name: parameter.shape for name, parameter in parameters.items()})
    with files.as_deepspeed_writes():
        for name, pieces in files.weights().items():
            copy_pieces(pieces, parameters[name].data.view(-1))


def copy_pieces(pieces: list[Piece], target: torch.Tensor, first: int = 0) -> None:
    """Copy the elements [first, first + len(target)) of a parameter into the flat `target`.

    Raises:
        ValueError: the pieces do not have all of them.
    """
    copied, end = 0, first + target.numel()
    for offset, values in pieces:
        low, high = max(first, offset), min(end, offset + values.numel())
        if low < high:
            target[low - first : high - first].copy_(values[low - offset : high - offset])
            copied += high - low
    if copied != target.numel():
        raise ValueError(f"{copied} of {target.numel()} elements were found")


def _flats_of_stages_1_and_2(state: dict[str, Any], rank: int) -> list[_Flat]:
    """A rank's part of each group."""
    weights = [tensor.detach() for tensor in state["single_partition_of_fp32_groups"]]
    states = _by_index(state["base_optimizer_state"], len(weights))
    return [_Flat(tensor, *_split(one), padding) for tensor, one, padding in zip(weights, states, state["group_paddings"], strict=True)]


def _by_index(saved: Any, count: int) -> list[dict[str, Any]]:
    """The state of each of `count` flat tensors in what an optimizer has saved; {} before the first update."""
    groups = saved["param_groups"]
    # FusedAdam of earlier versions of DeepSpeed counts the steps of a group.
    steps = [{"step": group["step"]} if "step" in group else {} for group in groups for _ in group["params"]]
    return [{**step, **saved["state"].get(index, {})} for index, step in zip(range(count), steps, strict=True)]


def _split(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a state, and its numbers."""
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
    return tensors, {key: value for key, value in state.items() if key not in tensors and value is not None}


def _are_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(one[key] == other[key]) for key in one)


def _mapped(file: Path, size: int) -> torch.Tensor:
    if not file.exists() or file.stat().st_size < 4 * size:
        raise UsageError(f"{file.parent}: lacks tensors that were offloaded to NVMe; copy the checkpoint again")
    return torch.from_file(str(file), size=size, dtype=torch.float32)


def _rank(file: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", file.name)
    return int(found[1]) if found else 0
