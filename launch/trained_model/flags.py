"""The flags that name a trained model, the same in `launch/export.py`, `launch/generate.py` and `launch/score.py`. Imports no torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from launch.config.flags import Parser
from launch.errors import UsageError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

DTYPES = ("fp32", "bf16", "fp16")


def add_source_flags(parser: Parser) -> None:
    """The flags that say which model."""
    parser.add_argument("source", metavar="RUN|DIR", help="a run's folder, such as runs/first, or a Hugging Face folder of GPT2LMHeadModel")
    parser.add_argument("--checkpoint", metavar="NAME", help="of a run: step-00000300, or newest, be the run over or not (the run's end)")
    parser.add_argument(
        "--allow_pickle", action="store_true", help="of a Hugging Face folder: also read pytorch_model.bin (safetensors only)"
    )


def check_choice(flag: str, value: str, allowed: Iterable[str]) -> None:
    """Raises UsageError where `value` is none of `allowed`."""
    if value not in (names := tuple(allowed)):
        raise UsageError(f"--{flag} {value}: no such choice{nearest(value, names)}; there are {', '.join(names)}")


def check_dtype(flags: argparse.Namespace) -> None:
    """Raises UsageError for a `--dtype` that there is not."""
    check_choice("dtype", flags.dtype, DTYPES)


def torch_dtype(name: str) -> torch.dtype:
    """torch's name of one of `DTYPES`."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
