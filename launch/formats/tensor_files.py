"""Files of tensors: what torch has pickled, and safetensors. Reading them never runs code.

This is the one place that calls `torch.load`. DeepSpeed 0.19.8 loads with `weights_only=False`, which executes whatever a file contains.
`weights_only=True` makes only tensors, containers and numbers. DeepSpeed's files also hold objects of four of its classes, which are
allowed by name.
"""

from __future__ import annotations

import pickle
import pkgutil
import re
import warnings
import zipfile
from dataclasses import dataclass
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data_pipeline.staging import require_regular
from launch.errors import UsageError

#: Classes whose objects are in DeepSpeed's files: the loss scaler of fp16, the ZeRO stage, and the place of a parameter in a flat buffer.
DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class UnreadableFile(UsageError):
    """A file that is damaged, or that holds objects other than tensors."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, which is read on demand. dtype: as the file names it, such as "F32" or "BF16"."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> torch.Tensor:
        """The tensor, mapped from the file.

        Each tensor has its own mapping: with one for the whole file, the pages of all tensors read so far would stay in memory.
        """
        try:
            with safe_open(self.file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self.name)
        except (SafetensorError, OSError) as reason:
            raise UsageError(f"{self.file}: cannot be read ({reason}); copy or export it again") from None
        return tensor


def safetensors_tensors(file: Path) -> list[StoredTensor]:
    """The tensors in the header of a safetensors file. Raises UsageError where it is missing, cut off, or of another format."""
    try:
        require_regular(file)
        with safe_open(file, framework="pt") as opened:
            found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            return [StoredTensor(file, name, tuple(one.get_shape()), one.get_dtype()) for name, one in found.items()]
    except (SafetensorError, OSError) as reason:
        raise UsageError(f"{file}: is not a complete safetensors file ({reason}); copy or export it again") from None


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether it holds neither NaN nor infinity. Needs no memory: minimum and maximum propagate NaN."""
    return all(bool(bound.isfinite()) for bound in tensor.aminmax())


class Ignored:
    """Stands in for an object of DeepSpeed's that the caller does not need: accepts any state and keeps none."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def _member(of: Any, name: str) -> Any:
    """Stands in for `getattr`, by which Python 3.11.0 to 3.11.3 pickles an enum's member: returns members, and no other attribute."""
    if of is Ignored:
        return Ignored()
    if isinstance(of, EnumMeta) and name in of.__members__:
        return of[name]
    raise pickle.UnpicklingError("GLOBAL builtins.getattr")


def load_tensors(file: str | Path, *, mapped: bool = False, deepspeed_objects: bool = False) -> dict[str, Any]:
    """The dictionary that `torch.save` wrote into `file`, with its tensors on the CPU.

    Args:
        mapped: map the tensors into memory where the format allows it, so that only those used are read.
        deepspeed_objects: make DeepSpeed's own objects, for its `load_checkpoint`; by default each is `Ignored`.

    Raises:
        UnreadableFile: it is damaged, or holds an object of another class. None of its code runs.
    """
    allowed: list[Any] = [(pkgutil.resolve_name(name) if deepspeed_objects else Ignored, name) for name in DEEPSPEED_CLASSES]
    allowed.append((_member, "builtins.getattr"))
    try:
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about formats that it then refuses
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(file))
    except Exception as reason:  # from the zip file, the unpickler or the operating system
        text = " ".join(str(reason).split())
        if found := re.search(r"GLOBAL (\S+)", text):
            raise UnreadableFile(f"{file}: holds {found[1]}, and only tensors are loaded; give a file of tensors") from None
        text = text.partition("WeightsUnpickler error: ")[2] or text  # after advice to load it anyway
        raise UnreadableFile(f"{file}: cannot be read ({type(reason).__name__}: {text[:120]}); copy it again") from None
    if not isinstance(loaded, dict):
        raise UnreadableFile(f"{file}: holds a {type(loaded).__name__}, must be a dictionary of tensors; copy it again")
    return loaded
