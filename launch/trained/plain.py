"""The weights alone in one safetensors file, for those who want no library: names, shapes and numbers, and nothing to be followed.

GPT-2's names (`h.0.attn.c_attn.weight`), every matrix (out, in) so that a layer is `x @ weight.T + bias`, the vocabulary without its padded
rows, no head, which is `wte.weight`. The sizes are strings in the file's metadata: n_layer, n_head, d_model, seq_len, vocab_size, eot_id.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from launch.trained.hf_folder import CONV1D, hf_shapes
from launch.trained.safetensors_file import TORCH_NAMES, write_tensors
from model.presets import GPTConfig

if TYPE_CHECKING:
    from model.gpt import GPT


def write_plain(model: GPT, config: GPTConfig, file: Path, dtype: str, eot_id: int | None) -> None:
    """Write the file; `dtype` is safetensors' word."""
    import torch

    parameters = dict(model.named_parameters())
    target = getattr(torch, TORCH_NAMES[dtype])
    shapes = {name: shape[::-1] if CONV1D.search(name) else shape for name, shape in hf_shapes(config).items()}
    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "d_model": config.d_model, "seq_len": config.seq_len}
    sizes |= {"vocab_size": config.vocab_size} | ({} if eot_id is None else {"eot_id": eot_id})

    def tensor_of(name: str) -> list[torch.Tensor]:
        return [parameters[name].detach()[: shapes[name][0]].to(target)]

    write_tensors(
        file, {name: (dtype, shape) for name, shape in shapes.items()}, tensor_of, {key: str(size) for key, size in sizes.items()}
    )
