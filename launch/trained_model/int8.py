"""The blocks' matrices as int8, one scale for each row of (out, in), by torchao; and what that costs, on validation text.

Embeddings, norms and biases stay: the head is the token embedding, whose rows a softmax compares with each other.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from launch.errors import UsageError
from launch.formats.safetensors_file import rounded
from model.hf import CONV1D

if TYPE_CHECKING:
    from data_pipeline.shards import Corpus
    from model.gpt import GPT

INSTALL = 'pip install -e ".[int8]" -c constraints.txt'
#: Of validation text, tokens at most: 12 s on two cores for `gpt2`.
MEASURED_TOKENS = 65_536


def check_int8() -> None:
    """Raises UsageError where torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise UsageError(f"--int8: needs torchao, which is not installed; {INSTALL}")


def quantize(model: GPT) -> None:
    """Put int8 weights in place of the blocks' matrices: `weight.qdata` int8 (out, in), `weight.scale` (out, 1)."""
    from torch import nn

    from recipes.fp8.technique import quiet_import

    with quiet_import():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    quantize_(model, Int8WeightOnlyConfig(version=2), filter_fn=lambda module, name: isinstance(module, nn.Linear))


def round_others(model: GPT, dtype: str) -> None:
    """Round what is not int8 to `dtype`, safetensors' word of that in which it is written, so that the loss is that of the file."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not CONV1D.search(name):
                parameter.copy_(rounded(name, parameter, dtype))


def measured_windows(corpus: Corpus, seq_len: int, asked: int) -> int:
    """How many windows of validation text are read: `asked`, as far as there are so many, and `MEASURED_TOKENS`."""
    return max(1, min(asked, corpus.val.windows(seq_len), MEASURED_TOKENS // seq_len))
