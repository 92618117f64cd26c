"""A Hugging Face folder of a model that this project trains: what `launch/export.py` writes, and what transformers reads and writes.

    config.json                     the model's sizes
    model.safetensors               its weights, or several files with model.safetensors.index.json
    generation_config.json, tokenizer.json, tokenizer_config.json, README.md

`open_hf_folder` checks the architecture, every value that changes the model's mathematics, and the name, shape and dtype of every tensor.
Weights in pickles (pytorch_model.bin) are never read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from launch.errors import UsageError
from launch.formats.files import read_json_object
from launch.formats.tensor_files import StoredTensor, is_finite, safetensors_tensors
from model.gpt import GPT
from model.hf import CLASSES, CONFIG_KEYS, EMBEDDING, HEAD, PREFIXES, HFTensor, hf_form, hf_tensors
from model.presets import ARCHITECTURES, GPTConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
#: Buffers in old files, not weights.
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
#: Fields without which there is no model.
SIZES = ("n_layer", "n_head", "d_model", "seq_len", "vocab_size")
#: transformers' value of a key that is absent or null, where it is not the architecture's default here.
ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"norm_eps": 1e-6, "rope_theta": 10_000.0, "tied_head": False},
    "qwen3": {"norm_eps": 1e-6, "rope_theta": 10_000.0, "tied_head": False, "d_head": 128},
    "mixtral": {"tied_head": False, "n_kv_head": 8},
    "qwen3_moe": {"rope_theta": 10_000.0, "tied_head": False, "n_kv_head": 4, "n_expert": 128, "n_expert_active": 8, "d_expert": 768},
}
_QWEN3: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "use_sliding_window": (False,)}
#: Form -> key -> the values that `model/gpt.py` supports; an absent or null key has the first one.
MUST_BE: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {"hidden_act": ("silu", "swish")},
    "qwen3": _QWEN3,
    "mixtral": {"hidden_act": ("silu", "swish"), "router_jitter_noise": (0.0,), "sliding_window": (None,)},
    "qwen3_moe": _QWEN3 | {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
}
#: transformers' value of a key that is absent, where it is not the first of `MUST_BE`.
UNSUPPORTED_IF_ABSENT = {"norm_topk_prob": False}
#: safetensors' names of the half precisions.
HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
#: Names of models without a head, whose folders hold the same weights where the head is tied.
HEADLESS = ("GPT2Model",)
FIX = f"give a Hugging Face folder of a {', '.join(CLASSES)}"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


@dataclass(frozen=True)
class HFFolder:
    """A checked folder.

    Attributes:
        config: of the model.
        content: of config.json.
        tensors: the weights by transformers' names, with their prefix; a tied head too where the files repeat it.
    """

    folder: Path
    config: GPTConfig
    content: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model is loaded: bf16 or fp16 where all weights have it, otherwise fp32."""
        found = {tensor.dtype for tensor in self.tensors.values()}
        return HALVES.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-text token of config.json, if it is in the vocabulary."""
        token = self.content.get("eos_token_id")
        return token if type(token) is int and 0 <= token < self.config.vocab_size else None

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).exists() for name in TOKENIZER_FILES)

    @cached_property
    def _parts(self) -> dict[str, list[HFTensor]]:
        return hf_tensors(self.config)

    def fill(self, model: GPT) -> None:
        """Read the weights into `model`, one tensor at a time, in the model's dtype and layout.

        Raises:
            UsageError: the head differs from the embedding, or a weight is not finite.
        """
        self.check_head()
        for name, parameter in model.named_parameters():
            self.read_into(name, parameter.data)

    def check_head(self) -> None:
        """Raises UsageError where the files hold a head that differs from the token embedding, although it is tied."""
        if self.config.tied_head and HEAD in self.tensors:
            (embedding,) = self._parts[EMBEDDING]
            if not torch.equal(self.tensors[HEAD].read(), self.tensors[embedding.name].read()):
                raise UsageError(f"{self.tensors[HEAD].file}: {HEAD} is not the token embedding, but tie_word_embeddings is true")

    def read_into(self, name: str, parameter: torch.Tensor) -> None:
        """Read the weight `name` into `parameter`, in our layout; rows that pad the vocabulary here become zero.

        Raises:
            UsageError: the weight holds NaN or infinity.
        """
        parts = self._parts[name]
        for part in parts:
            view = part.of(parameter)
            view.copy_(self.tensors[part.name].read()[: len(view)])
        parameter[parts[-1].end :].zero_()
        if not is_finite(parameter):
            raise UsageError(f"{self.folder}: {name} contains NaN or Inf; give the folder of a model that has not diverged")


def open_hf_folder(folder: str | Path, fix: str = FIX) -> HFFolder:
    """A Hugging Face folder, checked; the weights are not read yet. `fix` ends the message if it is none.

    Raises:
        UsageError: another architecture, a file that is missing or cut off, a tensor of another shape, weights in a pickle.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder}: {'is a file' if folder.exists() else 'no such folder'}; {fix}")
    config, content = read_config(folder, fix)
    if not (files := _files(folder)):
        remedy = "convert pytorch_model.bin with transformers' save_pretrained" if list(folder.glob("*.bin")) else "copy or export it again"
        raise UsageError(f"{folder}: holds no {WEIGHTS_FILE}; {remedy}")
    tensors = [tensor for file in files for tensor in safetensors_tensors(file)]
    return HFFolder(folder, config, content, _by_name(tensors, config, folder))


def read_config(folder: Path, fix: str = FIX) -> tuple[GPTConfig, dict[str, Any]]:
    """The model of a folder's config.json, and its content. Raises UsageError if it cannot be read, or is of another model."""
    content = read_json_object(folder / CONFIG_FILE, fix)
    try:
        return _config(content), content
    except (ValueError, TypeError, AttributeError) as reason:  # a value of another type or out of range, or none
        raise UsageError(f"{folder / CONFIG_FILE}: {reason}") from None


def _by_name(tensors: list[StoredTensor], config: GPTConfig, folder: Path) -> dict[str, StoredTensor]:
    """The weights by transformers' names. Raises UsageError for one that is missing, repeated, or of another shape or dtype."""
    if config.n_layer > len(tensors):  # before names are made for each layer
        raise UsageError(f"{folder}: {CONFIG_FILE} has n_layer {config.n_layer:,}, the files have {len(tensors):,} tensors; copy it again")
    prefix = PREFIXES[hf_form(config)]
    expected = {part.name: part.shape for parts in hf_tensors(config).values() for part in parts}
    found: dict[str, StoredTensor] = {}
    for tensor in tensors:
        name = tensor.name if tensor.name == HEAD else prefix + tensor.name.removeprefix(prefix)
        if BUFFERS.search(name):
            continue
        shape = (config.vocab_size, config.d_model) if name == HEAD else expected.get(name)  # files may repeat a tied head
        if shape is None:
            fault = f"is not a weight of a {hf_form(config)} of {config.n_layer} layers"
        elif tensor.shape != shape:
            fault = f"is {list(tensor.shape)}, {CONFIG_FILE} says {list(shape)}"
        elif not tensor.dtype.startswith(("F", "BF")):
            fault = f"is of dtype {tensor.dtype}, must be floating point"
        elif name in found:
            fault = f"repeats {found[name].name} of {found[name].file.name}; remove one of them"
        else:
            found[name] = tensor
            continue
        raise UsageError(f"{tensor.file}: {tensor.name} {fault}")
    if missing := [name.removeprefix(prefix) for name in expected if name not in found]:
        raise UsageError(f"{folder}: lacks {', '.join(missing[:3])}{' ...' * (len(missing) > 3)}; copy or export it again")
    return found


def _config(content: dict[str, Any]) -> GPTConfig:
    """The model that a config.json describes. Raises ValueError unless it is a model of `model/gpt.py`."""
    form, named = content.get("model_type"), content.get("architectures")
    if form not in list(ARCHITECTURES) or not set(named or ()) <= {CLASSES[form], *HEADLESS}:  # a list: a JSON value may be unhashable
        raise ValueError(f"is a model of {str(named or form)[:60]!r}; only {', '.join(CLASSES.values())} can be read")
    given = UNSUPPORTED_IF_ABSENT | {key: value for key, value in content.items() if value is not None}
    for key, allowed in (MUST_BE[form] | {"quantization_config": (None,)}).items():
        if key in given and given[key] not in allowed:
            raise ValueError(f"{key} is {json.dumps(given[key])[:60]}, must be {json.dumps(allowed[0])}")
    if form == "qwen3_moe" and "num_local_experts" in content:  # the name that transformers 5 writes
        content = {"num_experts": content["num_local_experts"], **content}
    own = ARCHITECTURES[form] | ABSENT.get(form, {})
    own |= {ours: content[theirs] for ours, theirs in CONFIG_KEYS[form].items() if content.get(theirs) is not None}
    for ours in SIZES:
        if type(own.get(ours)) is not int:
            theirs = CONFIG_KEYS[form][ours]
            raise ValueError(f"{theirs} is {json.dumps(content.get(theirs))}, must be a whole number; copy or export the folder again")
    if form != "gpt2":
        # transformers 5 has `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`, which transformers 5 still prefers.
        rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
        theta = rope.get("rope_theta", content.get("rope_theta"))
        own["rope_theta"] = own["rope_theta"] if theta is None else theta
        if rope.get("rope_type", rope.get("type", "default")) != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"its rotary positions are {json.dumps(rope)[:120]}; only the default type, of whole heads, is supported")
    if form == "llama" and content.get("mlp_bias", False) is not own["bias"]:
        raise ValueError("mlp_bias and attention_bias differ, and here all linear layers have biases or none has")
    try:
        return GPTConfig(**own, document_end=content.get("document_end"))  # our key: transformers keeps unknown keys
    except ValueError as reason:
        raise ValueError(re.sub(r"(?<![-\w])\w+", lambda name: CONFIG_KEYS[form].get(name[0], name[0]), str(reason))) from None


def _files(folder: Path) -> list[Path]:
    """The file of weights, or the files that its index lists; empty if there is neither."""
    whole, index = folder / WEIGHTS_FILE, folder / f"{WEIGHTS_FILE}.index.json"
    if whole.exists() or not index.exists():
        return [whole] if whole.exists() else []
    weight_map = read_json_object(index, "copy or export the folder again").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) and "/" not in name for name in weight_map.values()):
        raise UsageError(f"{index}: weight_map must be an object of file names; copy or export the folder again")
    return [folder / name for name in dict.fromkeys(weight_map.values())]
