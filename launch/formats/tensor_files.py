"""The one place that calls `torch.load`: every file that torch has pickled is read here, and none of them can run code.

DeepSpeed 0.19.8 loads with `weights_only=False`, which executes whatever a file asks for. `weights_only=True` makes tensors, containers and
numbers only; beside them DeepSpeed's files hold objects of four of its own classes, which are allowed by name.
"""

from __future__ import annotations

import importlib
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

#: Classes whose objects are in DeepSpeed's files: the loss scaler of fp16, the ZeRO stage, and where a parameter lies in a flat buffer.
DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class UnreadableFile(ValueError):
    """A file that holds no tensors, or more than tensors: one line with the file and the reason."""


class Ignored:
    """Takes the place of an object of DeepSpeed's that the caller does not need: accepts any state and keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> Ignored:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def load_tensors(file: str | Path, *, mapped: bool = False, deepspeed_objects: bool = False) -> Any:
    """What `torch.save` wrote into `file`, on the CPU.

    Args:
        mapped: map the tensors into memory where the format allows it, so that only what is used is read.
        deepspeed_objects: make DeepSpeed's own objects, for its `load_checkpoint`; otherwise each is `Ignored`.

    Raises:
        UnreadableFile: it is damaged, or holds an object of another class. None of its code has run.
    """
    allowed: list[Any] = [(_deepspeed_class(name) if deepspeed_objects else Ignored, name) for name in DEEPSPEED_CLASSES]
    try:
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of formats that it then refuses
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(file))
    except Exception as reason:  # of the zip file, the unpickler, the operating system
        text = " ".join(str(reason).split())
        if found := re.search(r"GLOBAL (\S+)", text):
            raise UnreadableFile(f"{file}: holds {found[1]}, and only tensors are loaded") from None
        text = text.partition("WeightsUnpickler error: ")[2] or text  # behind advice to load it all the same
        raise UnreadableFile(f"{file}: cannot be read ({type(reason).__name__}: {text[:120]})") from None


def _deepspeed_class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
