"""The same weights as transformers' GPT2LMHeadModel: how a run leaves this project, and how a published GPT-2 enters it.

Three things differ: the names' prefix, the matrices' layout (transformers keeps GPT-2's Conv1D, (in, out)), and our
vocabulary's padding.

    model = GPT2LMHeadModel(hf_config(config)); model.load_state_dict(to_hf_state_dict(gpt.state_dict(), config))
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from model.presets import GPTConfig

if TYPE_CHECKING:
    from transformers import GPT2Config

_PREFIX = "transformer."
_CONV1D = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")  # GPT-2's matrices in the blocks, all of them
_CAUSAL_MASK = re.compile(r"\.attn\.(masked_)?bias$")  # a buffer in old checkpoints, not a weight


def hf_config(config: GPTConfig, eos_token_id: int | None = None) -> GPT2Config:
    """transformers.GPT2Config of the same model, with the vocabulary unpadded. `eos_token_id` also begins a text, as in GPT-2."""
    from transformers import GPT2Config  # some seconds, and only for export

    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.seq_len,
        n_embd=config.d_model,
        n_layer=config.n_layer,
        n_head=config.n_head,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )


def to_hf_state_dict(state_dict: dict[str, torch.Tensor], config: GPTConfig) -> dict[str, torch.Tensor]:
    """Our `GPT.state_dict()` under GPT2LMHeadModel's names and layouts. The head stays the embedding's own tensor."""
    hf = {}
    for name, tensor in state_dict.items():
        if name == "lm_head.weight":
            continue
        if _CONV1D.search(name):
            tensor = tensor.t().contiguous()  # (out, in) -> (in, out)
        elif name == "wte.weight":
            tensor = tensor[: config.vocab_size].clone()  # a view would take the padded rows along when it is saved
        hf[_PREFIX + name] = tensor
    hf["lm_head.weight"] = hf["transformer.wte.weight"]
    return hf


def from_hf_state_dict(hf_state_dict: dict[str, torch.Tensor], config: GPTConfig) -> dict[str, torch.Tensor]:
    """GPT2LMHeadModel's (or GPT2Model's, without the prefix) state_dict under our names and layouts; padded rows are zero.

    Raises ValueError, one line, where names or shapes are not those of `config`.
    """
    ours = {}
    for name, tensor in hf_state_dict.items():
        name = name.removeprefix(_PREFIX)
        if name == "lm_head.weight" or _CAUSAL_MASK.search(name):
            continue
        if _CONV1D.search(name):
            tensor = tensor.t().contiguous()  # (in, out) -> (out, in)
        elif name == "wte.weight":
            if len(tensor) != config.vocab_size:
                raise ValueError(f"the checkpoint has {len(tensor)} tokens: vocab_size is {config.vocab_size}")
            # (vocab_size, C) -> (padded_vocab_size, C)
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
        ours[name] = tensor
    _check(ours, config)
    ours["lm_head.weight"] = ours["wte.weight"]
    return ours


def _check(state_dict: dict[str, torch.Tensor], config: GPTConfig) -> None:
    """Raises ValueError, one line, for the first name or shape that is not the model's."""
    from model.gpt import GPT

    with torch.device("meta"):
        expected = {name: tuple(parameter.shape) for name, parameter in GPT(config).named_parameters()}
    for name in sorted(expected.keys() ^ state_dict.keys()):
        where = "lacks" if name in expected else "has"
        raise ValueError(f"the checkpoint {where} {name}: it is not a GPT-2 of {config.n_layer} layers")
    for name, shape in expected.items():
        if tuple(state_dict[name].shape) != shape:
            raise ValueError(f"the checkpoint's {name} is {tuple(state_dict[name].shape)}: this model's is {shape}")
