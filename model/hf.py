"""Converts the model to transformers' GPT2LMHeadModel: names, shapes, layouts and configuration.

Three things differ: the prefix of the names, the layout of matrices (transformers has GPT-2's Conv1D, (in, out)), and the padding of the
vocabulary.

    model = GPT2LMHeadModel(GPT2Config.from_dict(hf_config(config))); model.load_state_dict(to_hf_state_dict(gpt.state_dict(), config))
"""

from __future__ import annotations

import re
from typing import Any

import torch

from model.presets import GPTConfig

PREFIX = "transformer."
EMBEDDING = "wte.weight"
HEAD = "lm_head.weight"
#: The matrices of the blocks, which transformers stores as (in, out).
CONV1D = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")


def hf_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of GPT2LMHeadModel's weights without its head, under the names of `model.gpt.GPT`, unpadded."""
    width = config.d_model
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, width), "wpe.weight": (config.seq_len, width)}
    for index in range(config.n_layer):
        block = f"h.{index}."
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{block}{norm}.weight": (width,), f"{block}{norm}.bias": (width,)}
        for name, n_in, n_out in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes |= {f"{block}{name}.weight": (n_in, n_out), f"{block}{name}.bias": (n_out,)}
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def hf_config(config: GPTConfig, eot_id: int | None = None, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of a model for any version of transformers, with the unpadded vocabulary.

    Args:
        eot_id: the token that begins and ends a text, as in GPT-2.
        dtype: of the weights, such as "float32".
    """
    own = {} if config.document_end is None else {"document_end": config.document_end}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_ctx": config.seq_len,
        "n_positions": config.seq_len,
        "n_embd": config.d_model,
        "n_head": config.n_head,
        "n_inner": None,
        "n_layer": config.n_layer,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": config.vocab_size,
        "dtype": dtype,
        "torch_dtype": dtype,  # transformers from 5 on, and before
        **own,
    }


def to_hf_layout(name: str, tensor: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    """The weight `name` of `model.gpt.GPT` in transformers' layout: a view, without the padded rows of the vocabulary."""
    if CONV1D.search(name):
        return tensor.t()  # (out, in) -> (in, out)
    return tensor[: config.vocab_size] if name == EMBEDDING else tensor


def to_hf_state_dict(state_dict: dict[str, torch.Tensor], config: GPTConfig) -> dict[str, torch.Tensor]:
    """`GPT.state_dict()` with GPT2LMHeadModel's names and layouts. The head and the embedding share a tensor."""
    hf = {PREFIX + name: to_hf_layout(name, tensor, config).contiguous() for name, tensor in state_dict.items() if name != HEAD}
    return hf | {HEAD: hf[PREFIX + EMBEDDING]}
