"""The weights alone in one safetensors file, for those who want no library: names, shapes and numbers, and nothing to be followed.

GPT-2's names (`h.0.attn.c_attn.weight`), every matrix (out, in) so that a layer is `x @ weight.T + bias`, the vocabulary without its padded
rows, no head, which is `wte.weight`. The sizes are strings in the file's metadata: n_layer, n_head, d_model, seq_len, vocab_size, eot_id;
`origin` says whose weights they are.
With int8, a matrix is `weight * weight_scale[:, None]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.formats.safetensors_file import rounded, write_tensors
from model.hf import CONV1D, hf_shapes
from model.presets import GPTConfig

if TYPE_CHECKING:
    import torch

    from model.gpt import GPT

PLAIN_FILE = "weights.safetensors"
#: Behind the name of a matrix in int8: its scales.
SCALE = "_scale"


def write_plain(model: GPT, config: GPTConfig, file: Path, dtype: str, eot_id: int | None, origin: str, int8: bool = False) -> None:
    """Write the file.

    Args:
        dtype: of the weights, in safetensors' word.
        origin: whose weights they are, for the metadata.
        int8: the blocks' matrices went through `launch.trained_model.int8.quantize`; beside each, `NAME_scale` holds a factor for each row.
    """
    parameters: dict[str, Any] = dict(model.named_parameters())
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in hf_shapes(config).items():
        matrix = bool(CONV1D.search(name))
        described[name] = ("I8" if matrix and int8 else dtype, shape[::-1] if matrix else shape)
        if matrix and int8:
            described[name + SCALE] = ("F32", (shape[1],))
    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "d_model": config.d_model, "seq_len": config.seq_len}
    sizes |= {"vocab_size": config.vocab_size} | ({} if eot_id is None else {"eot_id": eot_id})
    said = {key: str(size) for key, size in sizes.items()} | {"origin": origin}

    def tensor_of(name: str) -> list[torch.Tensor]:
        if name.endswith(SCALE):
            return [parameters[name.removesuffix(SCALE)].scale.float()]
        if described[name][0] == "I8":
            return [parameters[name].qdata]
        return [rounded(name, parameters[name].detach()[: described[name][1][0]], dtype)]

    write_tensors(file, described, tensor_of, said)
