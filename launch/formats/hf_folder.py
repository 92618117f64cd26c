"""A Hugging Face folder of GPT2LMHeadModel: what `launch/export.py` writes, and what transformers reads and writes.

    config.json                     the model's sizes
    model.safetensors               its weights, or several files with model.safetensors.index.json
    generation_config.json, tokenizer.json, tokenizer_config.json, README.md

`open_hf_folder` checks the architecture, every value that changes the model's mathematics, and the name, shape and dtype of every tensor.
Weights in pickles (pytorch_model.bin) are never read.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launch.errors import UsageError
from launch.formats.files import read_json_object
from launch.formats.tensor_files import StoredTensor, is_finite, safetensors_tensors
from model.gpt import GPT
from model.hf import CONV1D, EMBEDDING, HEAD, PREFIX, hf_shapes
from model.presets import GPTConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
#: A buffer in old files, not a weight.
CAUSAL_MASK = re.compile(r"\.attn\.(masked_)?bias$")
#: Our name of each size, and GPT2Config's.
SIZES = {"n_layer": "n_layer", "n_head": "n_head", "d_model": "n_embd", "seq_len": "n_positions", "vocab_size": "vocab_size"}
#: The values of a GPT2Config with which the model is that of `model/gpt.py`; an absent key has the first one.
MUST_BE: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
ARCHITECTURES = ("GPT2LMHeadModel", "GPT2Model")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
#: At most so many faults of a folder are printed.
MAX_FAULTS = 8


@dataclass(frozen=True)
class HFFolder:
    """A checked folder.

    Attributes:
        config: of the model.
        content: of config.json.
        tensors: the weights by our names, in transformers' layout; the head too where the files repeat it.
    """

    folder: Path
    config: GPTConfig
    content: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model is loaded: bf16 or fp16 where all weights have it, otherwise fp32."""
        found = {tensor.dtype for tensor in self.tensors.values()}
        return found.pop() if len(found) == 1 and found <= {torch.bfloat16, torch.float16} else torch.float32

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-text token of config.json, if it is in the vocabulary."""
        token = self.content.get("eos_token_id")
        return token if type(token) is int and 0 <= token < self.config.vocab_size else None

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).exists() for name in TOKENIZER_FILES)

    @property
    def end_of_text(self) -> str | None:
        """The text of the end-of-text token, from the tokenizer's files."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            try:
                token = json.loads((self.folder / name).read_text(encoding="utf-8")).get("eos_token")
            except (OSError, ValueError, AttributeError):
                continue
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
        return None

    def fill(self, model: GPT) -> None:
        """Read the weights into `model`, one tensor at a time, in the model's dtype and layout.

        Raises:
            UsageError: the head differs from the embedding, or a weight is not finite.
        """
        self.check_head()
        for name, parameter in model.named_parameters():
            self.read_into(name, parameter.data)

    def check_head(self) -> None:
        """Raises UsageError where the files hold a head that differs from the token embedding."""
        if HEAD in self.tensors and not torch.equal(self.tensors[HEAD].read(), self.tensors[EMBEDDING].read()):
            raise UsageError(f"{self.tensors[HEAD].file}: {HEAD} is not the token embedding; models with an untied head are not supported")

    def read_into(self, name: str, parameter: torch.Tensor) -> None:
        """Read the weight `name` into `parameter`, in our layout; padded rows of the vocabulary become zero.

        Raises:
            UsageError: the weight holds NaN or infinity.
        """
        tensor = self.tensors[name].read()
        if CONV1D.search(name):
            tensor = tensor.t()  # (in, out) -> (out, in)
        parameter[: len(tensor)].copy_(tensor)
        parameter[len(tensor) :].zero_()
        if not is_finite(parameter):
            raise UsageError(f"{self.folder}: {name} holds values that are not finite; give the folder of a model that has not diverged")


def open_hf_folder(folder: str | Path) -> HFFolder:
    """A Hugging Face folder, checked; the weights are not read yet.

    Raises:
        UsageError: one line for each fault: another architecture, a file that is missing or cut off, a tensor of another shape, weights
            in a pickle.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder}: {'is a file' if folder.exists() else 'no such folder'}; give a Hugging Face folder of GPT2LMHeadModel")
    content = read_json_object(folder / CONFIG_FILE, "give a Hugging Face folder of GPT2LMHeadModel")
    config = _config(content, folder / CONFIG_FILE)
    if not (files := _files(folder)):
        fix = "convert pytorch_model.bin with transformers' save_pretrained" if list(folder.glob("*.bin")) else "copy or export it again"
        raise UsageError(f"{folder}: holds no {WEIGHTS_FILE}; {fix}")
    tensors = [tensor for file in files for tensor in safetensors_tensors(file)]
    return HFFolder(folder, config, content, _by_our_names(tensors, config, folder))


def _by_our_names(tensors: list[StoredTensor], config: GPTConfig, folder: Path) -> dict[str, StoredTensor]:
    """The weights by our names. Raises UsageError: one line for each tensor that is missing, repeated, or of another shape or dtype."""
    if config.n_layer > len(tensors):  # before names are made for each layer
        raise UsageError(
            f"{folder}: {CONFIG_FILE} says n_layer {config.n_layer:,}, but the files hold {len(tensors):,} tensors in all; copy it again"
        )
    expected = hf_shapes(config) | {HEAD: (config.vocab_size, config.d_model)}
    found: dict[str, StoredTensor] = {}
    faults = []
    for tensor in tensors:
        name, where = tensor.name.removeprefix(PREFIX), f"{tensor.file}: {tensor.name}"
        if CAUSAL_MASK.search(name):
            continue
        if name not in expected:
            faults.append(f"{where} is not a weight of a GPT-2 of {config.n_layer} layers")
        elif tensor.shape != expected[name]:
            faults.append(f"{where} is {list(tensor.shape)}, {CONFIG_FILE} says {list(expected[name])}")
        elif not tensor.dtype.is_floating_point:
            faults.append(f"{where} is of dtype {tensor.dtype}, must be floating point")
        elif name in found:
            faults.append(f"{where} repeats {found[name].name} of {found[name].file.name}; remove one of them")
        found[name] = tensor
    if missing := [name for name in expected if name not in found and name != HEAD]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        faults.append(f"{folder}: lacks {', '.join(missing[:3])}{more}; copy or export it again")
    if len(faults) > MAX_FAULTS:
        faults[MAX_FAULTS:] = [f"{folder}: and {len(faults) - MAX_FAULTS} more faults"]
    if faults:
        raise UsageError(*faults)
    return found


def _config(content: dict[str, Any], file: Path) -> GPTConfig:
    """The model that a config.json describes. Raises UsageError unless it is the model of `model/gpt.py`."""
    kind, named = content.get("model_type"), content.get("architectures") or ["GPT2LMHeadModel"]
    if kind != "gpt2" or not isinstance(named, list) or not all(name in ARCHITECTURES for name in named):
        what = ", ".join(map(str, named)) if isinstance(named, list) and kind == "gpt2" else str(kind)
        raise UsageError(f"{file}: is a model of {what[:60]!r}; only GPT2LMHeadModel (model_type gpt2) can be read")
    if "quantization_config" in content:
        raise UsageError(f"{file}: its weights are quantized, which is not supported; give the folder they were made from")
    faults = [
        f"{file}: {key} is {json.dumps(content[key])}, must be {json.dumps(allowed[0])}"
        for key, allowed in MUST_BE.items()
        if key in content and content[key] is not None and content[key] not in allowed
    ]
    sizes: dict[str, Any] = {ours: content.get(theirs) for ours, theirs in SIZES.items()}
    for ours, theirs in SIZES.items():
        if type(sizes[ours]) is not int:
            faults.append(f"{file}: {theirs} is {json.dumps(sizes[ours])}, must be a whole number; copy or export the folder again")
    if not faults and content.get("n_inner") not in (None, 4 * sizes["d_model"]):
        faults.append(f"{file}: n_inner is {content['n_inner']}, must be 4 x n_embd = {4 * sizes['d_model']}")
    if faults:
        raise UsageError(*faults)
    end = content.get("document_end")  # our key: transformers keeps unknown keys
    dropout = content.get("resid_pdrop", 0.0)
    try:
        return GPTConfig(
            **sizes, dropout=dropout if isinstance(dropout, (int, float)) else 0.0, document_end=end if type(end) is int else None
        )
    except ValueError as reason:
        raise UsageError(f"{file}: {reason}") from None


def _files(folder: Path) -> list[Path]:
    """The file of weights, or the files that its index lists; empty if there is neither."""
    whole, index = folder / WEIGHTS_FILE, folder / f"{WEIGHTS_FILE}.index.json"
    if whole.exists() or not index.exists():
        return [whole] if whole.exists() else []
    weight_map = read_json_object(index, "copy or export the folder again").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) and "/" not in name for name in weight_map.values()):
        raise UsageError(f"{index}: weight_map must be an object of file names; copy or export the folder again")
    files = [index.parent / name for name in dict.fromkeys(weight_map.values())]
    missing = [file for file in files if not os.path.isfile(file)]  # Path.is_file raises for names that no file can have
    if missing:
        raise UsageError(*(f"{file}: missing, but {index.name} lists it; copy or export the folder again" for file in missing[:MAX_FAULTS]))
    return files
