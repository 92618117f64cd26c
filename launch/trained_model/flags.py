"""Flags shared by `launch/export.py`, `launch/generate.py` and `launch/score.py`."""

from __future__ import annotations

from launch.config.flags import Parser

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def add_source_flags(parser: Parser, data_help: str, dtype_help: str, dtype: str | None = None) -> None:
    """The flags that name a trained model, its corpus and its dtype, which is `dtype` by default."""
    parser.add_argument("source", metavar="RUN|DIR", help="run folder, such as runs/first, or Hugging Face folder")
    parser.add_argument("--checkpoint", metavar="NAME", help="step-00000300, or newest; required for an unfinished run (last)")
    parser.add_argument("--data", metavar="DIR", help=data_help)
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, metavar="NAME", help=f"fp32, bf16 or fp16: {dtype_help}")
