"""Converts the model to transformers' GPT-2, Llama, Qwen3, Mixtral or Qwen3-MoE for causal LM: names, shapes, layouts and configuration.

GPT-2: the names have a prefix, and matrices are (in, out), as in its Conv1D. Llama and Qwen3: the names differ, and our fused `c_attn` and
`c_fc` are three and two matrices. All: the vocabulary is not padded. Rotary positions need no conversion: both sides rotate halves.

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(config)))
    model.load_state_dict(to_hf_state_dict(gpt.state_dict(), config))
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import torch

from model.accounting import model_tensors
from model.presets import ARCHITECTURES, EXPERT_FIELDS, FIELDS, GPTConfig, ModelShape

HEAD = "lm_head.weight"
EMBEDDING = "wte.weight"
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
#: The prefixes of transformers' names, except for the head.
PREFIXES = {"gpt2": "transformer.", "llama": "model.", "qwen3": "model.", "mixtral": "model.", "qwen3_moe": "model."}
#: Fields that each form reads from its configuration; the others must be as in `ARCHITECTURES`.
FREE = {
    "gpt2": ("d_ff", "tied_head", "norm_eps", "rope_theta"),  # without rotary positions, rope_theta is not used
    "llama": ("n_kv_head", "d_head", "d_ff", "bias", "tied_head", "rope_theta", "norm_eps"),
    "qwen3": ("n_kv_head", "d_head", "d_ff", "tied_head", "rope_theta", "norm_eps"),
    "mixtral": ("n_kv_head", "d_head", "d_ff", *EXPERT_FIELDS, "tied_head", "rope_theta", "norm_eps"),
    "qwen3_moe": ("n_kv_head", "d_head", "d_ff", *EXPERT_FIELDS, "tied_head", "rope_theta", "norm_eps"),
}
_LLAMA_KEYS = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "d_model": "hidden_size",
    "seq_len": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "d_ff": "intermediate_size",
    "n_kv_head": "num_key_value_heads",
    "d_head": "head_dim",
    "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
    "dropout": "attention_dropout",
    "bias": "attention_bias",
}
_QWEN3_KEYS = {ours: theirs for ours, theirs in _LLAMA_KEYS.items() if ours != "bias"}
_EXPERT_KEYS = {ours: theirs for ours, theirs in _QWEN3_KEYS.items() if ours != "d_ff"} | {"n_expert_active": "num_experts_per_tok"}
#: Form -> our name of each field, and its key in transformers' config.json.
CONFIG_KEYS: dict[str, dict[str, str]] = {
    "gpt2": {
        "n_layer": "n_layer",
        "n_head": "n_head",
        "d_model": "n_embd",
        "seq_len": "n_positions",
        "vocab_size": "vocab_size",
        "d_ff": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "tied_head": "tie_word_embeddings",
        "dropout": "resid_pdrop",
    },
    "llama": _LLAMA_KEYS,
    "qwen3": _QWEN3_KEYS,
    "mixtral": _EXPERT_KEYS | {"n_expert": "num_local_experts", "d_expert": "intermediate_size"},
    "qwen3_moe": _EXPERT_KEYS | {"n_expert": "num_experts", "d_expert": "moe_intermediate_size"},
}
#: Llama's name of each of our modules of a block, for `c_attn` and `c_fc` the names of their parts.
_BLOCK_NAMES = {
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.c_proj": ("self_attn.o_proj",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.c_proj": ("mlp.down_proj",),
}
#: Form -> the names of the router and of each expert's matrices.
_EXPERT_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "mixtral": {
        "mlp.router": ("block_sparse_moe.gate",),
        "mlp.c_fc": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "mlp.c_proj": ("block_sparse_moe.experts.{}.w2",),
    },
    "qwen3_moe": {
        "mlp.router": ("mlp.gate",),
        "mlp.c_fc": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "mlp.c_proj": ("mlp.experts.{}.down_proj",),
    },
}
_MODEL_NAMES = {"wte": "embed_tokens", "ln_f": "norm"}


class HFTensor(NamedTuple):
    """A tensor of transformers that holds rows of one of ours.

    Attributes:
        name: with its prefix.
        shape: in transformers' layout.
        start, end: the rows of our tensor; those of all experts are counted one after the other.
        transposed: whether it is (in, out), and ours (out, in).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    end: int
    transposed: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This tensor as a view of ours."""
        rows = tensor.flatten(0, -2)[self.start : self.end] if tensor.dim() > 1 else tensor[self.start : self.end]
        return rows.t() if self.transposed else rows


def hf_form(config: ModelShape) -> str:
    """The architecture, a key of `ARCHITECTURES`, with which transformers computes this model.

    Raises:
        ValueError: there is none; one line that names the field.
    """
    differing = {form: _differing(config, form) for form in ARCHITECTURES}
    nearest = min(differing, key=lambda form: len(differing[form]))
    if differing[nearest]:
        values = ", ".join(f"--{name} {str(getattr(config, name)).lower()}" for name in differing[nearest])
        raise ValueError(f"transformers has no model of this architecture; the nearest is {nearest}, but for {values}")
    return nearest


def _differing(config: ModelShape, form: str) -> list[str]:
    """The fields whose values transformers' `form` does not support."""
    expected = {field.name: field.default for field in fields(ModelShape)} | ARCHITECTURES[form]
    expected |= {"n_kv_head": config.n_head, "d_head": config.d_model / config.n_head}
    faults = [name for name in FIELDS if name not in FREE[form] and getattr(config, name) != expected[name]]
    faults += ["n_expert"] * ("n_expert" in FREE[form] and not config.n_expert)
    return faults + (["d_head"] if form == "llama" and config.d_model % config.n_head else [])  # LlamaConfig refuses it


def hf_tensors(config: GPTConfig) -> dict[str, list[HFTensor]]:
    """For each parameter of `model.gpt.GPT`, by name: the tensors of transformers that hold it, in the order of its rows."""
    form = hf_form(config)
    return {name: list(_parts(name, shape, form, config)) for name, shape in model_tensors(config).items()}


def _parts(name: str, shape: tuple[int, ...], form: str, config: GPTConfig) -> list[HFTensor]:
    rows = config.vocab_size if name in (EMBEDDING, HEAD) else shape[0]
    rest = shape[1:]
    if name == HEAD:
        return [HFTensor(name, (rows, *rest), 0, rows, False)]
    if form == "gpt2":
        transposed = len(shape) == 2 and name.startswith("h.")
        return [HFTensor(PREFIXES[form] + name, (*rest, rows) if transposed else (rows, *rest), 0, rows, transposed)]
    module, kind = name.rsplit(".", 1)
    if module in _MODEL_NAMES:
        return [HFTensor(f"{PREFIXES[form]}{_MODEL_NAMES[module]}.{kind}", (rows, *rest), 0, rows, False)]
    _, index, inner = module.split(".", 2)
    names = (_BLOCK_NAMES | _EXPERT_NAMES.get(form, {}))[inner]
    if len(shape) == 3:  # the matrices of one expert after the other
        names, rows, rest = tuple(name.format(expert) for expert in range(rows) for name in names), shape[0] * shape[1], shape[2:]
    sizes = [heads * config.d_head for heads in config.qkv_heads] if inner == "attn.c_attn" else [rows // len(names)] * len(names)
    parts, start = [], 0
    for theirs, size in zip(names, sizes, strict=True):
        parts.append(HFTensor(f"{PREFIXES[form]}layers.{index}.{theirs}.{kind}", (size, *rest), start, start + size, False))
        start += size
    return parts


def hf_config(config: GPTConfig, eot_id: int | None = None, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of a model for any version of transformers, with the unpadded vocabulary.

    Args:
        eot_id: the token that begins and ends a text.
        dtype: of the weights, such as "float32".

    Raises:
        ValueError: transformers has no model of this architecture.
    """
    form = hf_form(config)
    return {
        "architectures": [CLASSES[form]],
        "model_type": form,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,  # the name before transformers 5
        **{theirs: getattr(config, ours) for ours, theirs in CONFIG_KEYS[form].items()},
        **(_gpt2_config(config) if form == "gpt2" else _llama_config(config)),
        **({} if config.document_end is None else {"document_end": config.document_end}),
    }


def _gpt2_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "n_ctx": config.seq_len,
        "n_inner": None if config.d_ff == 4 * config.d_model else config.d_ff,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
    }


def _llama_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": config.bias,
        "rope_theta": config.rope_theta,  # transformers before 5, and from 5 on
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        **({"use_sliding_window": False} if config.qk_norm else {} if config.n_expert else {"mlp_bias": config.bias}),
        **(_experts_config(config) if config.n_expert else {}),
    }


def _experts_config(config: GPTConfig) -> dict[str, Any]:
    if not config.qk_norm:
        return {"sliding_window": None, "router_jitter_noise": 0.0}
    return {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": config.d_ff}


def to_hf_state_dict(state_dict: dict[str, torch.Tensor], config: GPTConfig) -> dict[str, torch.Tensor]:
    """`GPT.state_dict()` with transformers' names and layouts. A tied head and the embedding share a tensor."""
    tensors = hf_tensors(config)
    hf = {part.name: part.of(state_dict[name]).contiguous() for name, parts in tensors.items() for part in parts}
    return hf if HEAD in hf else hf | {HEAD: hf[tensors[EMBEDDING][0].name]}
