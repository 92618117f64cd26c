"""A Hugging Face folder of GPT2LMHeadModel: what people's other tools read and write.

    config.json                     the model's sizes
    model.safetensors               its weights, or several files with model.safetensors.index.json
    generation_config.json, tokenizer.json, tokenizer_config.json, README.md

`open_hf_folder` checks all of it that can be checked without torch: the architecture, every value that changes the model's mathematics, and
the name, shape and bytes of every tensor. Weights in pickles (pytorch_model.bin) are not read unless the caller allows it.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.errors import UsageError
from launch.formats.safetensors_file import ITEMSIZE, TORCH_NAMES, Entry, is_finite, read_header, read_tensor, rounded, write_tensors
from model.hf import CONV1D, EMBEDDING, HEAD, PREFIX, hf_config, hf_shapes, to_hf_layout
from model.presets import GPTConfig

if TYPE_CHECKING:
    import torch

    from data_pipeline.tokenizer import Tokenizer
    from model.gpt import GPT

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
#: A buffer in old files, no weight.
CAUSAL_MASK = re.compile(r"\.attn\.(masked_)?bias$")
#: What a GPT2Config may say, and what it must say where it says anything, for the model to be the one of `model/gpt.py`.
MUST_BE: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
ARCHITECTURES = ("GPT2LMHeadModel", "GPT2Model")
#: What weights may be in, in safetensors' words.
FLOATING = ("F64", "F32", "F16", "BF16")
#: Of a file of weights: what the hub and its mirrors carry well.
SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class HFFolder:
    """A checked folder.

    Attributes:
        config: of the model.
        entries: where each weight is, by our name, in transformers' layout; empty for weights in pickles.
        head: the head's own tensor, which some files repeat; it must be the embedding.
        said: its config.json.
    """

    folder: Path
    config: GPTConfig
    said: dict[str, Any]
    entries: dict[str, Entry]
    head: Entry | None = None
    pickles: tuple[Path, ...] = field(default=())

    @property
    def dtype_name(self) -> str:
        """Of the model that is loaded, in safetensors' word: the folder's own where it is one of 16 bits throughout, else F32."""
        names = {entry.dtype for entry in self.entries.values()}
        return names.pop() if len(names) == 1 and names <= {"F16", "BF16"} else "F32"

    @property
    def dtype(self) -> torch.dtype:
        """The same as torch's."""
        import torch

        return getattr(torch, TORCH_NAMES[self.dtype_name])

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, where the folder says one that the vocabulary has."""
        said = self.said.get("eos_token_id")
        return said if type(said) is int and 0 <= said < self.config.vocab_size else None

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).exists() for name in TOKENIZER_FILES)

    @cached_property
    def end_of_text(self) -> str | None:
        """The text of the token that ends a text, as the tokenizer's own files say."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            try:
                said = json.loads((self.folder / name).read_text(encoding="utf-8")).get("eos_token")
            except (OSError, ValueError, AttributeError):
                continue
            token = said.get("content") if isinstance(said, dict) else said
            if isinstance(token, str):
                return token
        return None

    def fill(self, model: GPT) -> None:
        """Read the weights into `model`, a tensor at a time, in the model's dtype and our layout; padded rows become zero.

        Raises:
            UsageError: the head is not the embedding, or a weight not finite; of pickles, what they hold is not this model.
        """
        import torch

        with torch.no_grad():
            parameters = dict(model.named_parameters())
            for name, parameter in parameters.items():
                self.read_into(name, parameter.data)
            self.check_head(model.wte.weight[: self.config.vocab_size])

    def check_head(self, embedding: torch.Tensor) -> None:
        """Raises UsageError where the files have a head that is not `embedding`, the folder's own (vocab_size, d_model)."""
        import torch

        if self.head is not None and not torch.equal(read_tensor(self.head).to(embedding.dtype), embedding):
            raise UsageError(f"{self.head.file}: {HEAD} is not the token embedding; a head of its own is another architecture")

    def read_into(self, name: str, parameter: torch.Tensor) -> None:
        """The weight called `name` in our names, whole, into `parameter`, in our layout.

        Raises:
            UsageError: it holds a NaN or an infinity; what `fill` says of files.
        """
        self._read_into(name, parameter)
        if not is_finite(parameter):
            raise UsageError(f"{self.folder}: {name} holds values that are not finite; give a folder of a model that has not diverged")

    def _read_into(self, name: str, parameter: torch.Tensor) -> None:
        import torch

        if self.pickles:
            tensor = self._pickled[name]
        else:
            entry = self.entries[name]
            rows = parameter[: entry.shape[0]]
            same = (getattr(torch, TORCH_NAMES[entry.dtype]), "cpu") == (
                parameter.dtype,
                parameter.device.type,
            ) and parameter.is_contiguous()
            if same and not CONV1D.search(name):
                read_tensor(entry, rows)
                parameter[entry.shape[0] :].zero_()
                return
            tensor = read_tensor(entry)
        if CONV1D.search(name):
            tensor = tensor.t()  # (in, out) -> (out, in)
        parameter[: tensor.shape[0]].copy_(tensor)
        parameter[tensor.shape[0] :].zero_()

    @cached_property
    def _pickled(self) -> dict[str, torch.Tensor]:
        """The weights in pickles, by our names."""
        import torch

        from launch.formats.tensor_files import UnreadableFile, load_tensors

        found: dict[str, torch.Tensor] = {}
        for file in self.pickles:
            try:
                loaded = load_tensors(file, mapped=True)
            except UnreadableFile as reason:
                raise UsageError(f"{reason}; give a file of weights alone, as torch.save writes it") from None
            if not isinstance(loaded, dict):
                raise UsageError(f"{file}: holds a {type(loaded).__name__}; only a state_dict of GPT-2 can be read")
            found |= loaded
        for key, value in found.items():
            if not (
                isinstance(key, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
            ):
                raise UsageError(f"{self.pickles[0]}: {key} is no tensor under a name; only a state_dict of GPT-2 can be read")
            if value.dtype not in (getattr(torch, TORCH_NAMES[name]) for name in FLOATING) and not CAUSAL_MASK.search(key):
                raise UsageError(f"{self.pickles[0]}: {key} is of dtype {value.dtype}, not of floating point")
        shapes = {name: (tuple(tensor.shape), self.pickles[0]) for name, tensor in found.items()}
        names = check_shapes(shapes, self.config, self.folder)
        if names.get(HEAD) and not torch.equal(found[names[HEAD]], found[names[EMBEDDING]]):
            raise UsageError(f"{self.pickles[0]}: {HEAD} is not the token embedding; a head of its own is another architecture")
        return {ours: found[theirs] for ours, theirs in names.items() if ours != HEAD}


def open_hf_folder(folder: str | Path, allow_pickle: bool = False) -> HFFolder:
    """A Hugging Face folder, after every check that needs no torch.

    Raises:
        UsageError: a line for each fault: another architecture, a file that is missing or cut off, a tensor of another shape, weights in a
            pickle.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder}: {'is a file' if folder.exists() else 'no such folder'}; give a Hugging Face folder of GPT2LMHeadModel")
    said = _read_json(folder / CONFIG_FILE)
    config = _config(said, folder / CONFIG_FILE)
    files = _weight_files(folder)
    if not files:
        pickles = _pickle_files(folder)
        if pickles and not allow_pickle:
            raise UsageError(
                f"{folder}: its weights are a pickle ({pickles[0].name}), which can run any code and is not loaded; if you trust it,"
                f" convert it: python launch/export.py {folder} --allow_pickle --out NEW"
            )
        if not pickles:
            raise UsageError(f"{folder}: holds no {WEIGHTS_FILE}; copy or export it again")
        return HFFolder(folder, config, said, {}, pickles=tuple(pickles))
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in read_header(file)[0].items():
            if name in entries:
                raise UsageError(f"{file}: holds {name}, and {entries[name].file.name} holds it too; copy or export the folder again")
            entries[name] = entry
    shapes = {name: (entry.shape, entry.file) for name, entry in entries.items()}
    names = check_shapes(shapes, config, folder)
    ours = {name: entries[theirs] for name, theirs in names.items()}
    wrong = [
        f"{entry.file}: {names[name]} is of dtype {entry.dtype}, not of floating point"
        for name, entry in ours.items()
        if entry.dtype not in FLOATING
    ]
    if wrong:
        raise UsageError(*wrong[:8])
    head = ours.pop(HEAD, None)
    return HFFolder(folder, config, said, ours, head)


def check_shapes(found: dict[str, tuple[tuple[int, ...], Path]], config: GPTConfig, folder: Path) -> dict[str, str]:
    """Our name -> the name in the files, of every weight and of the head where it is there.

    Args:
        found: the shape of each tensor and its file, by the name in the files.

    Raises:
        UsageError: a line for each tensor that is missing, of another shape, or not GPT-2's.
    """
    if config.n_layer > len(found):  # before a name is made for each tensor of each layer
        raise UsageError(
            f"{folder}: {CONFIG_FILE} says n_layer {config.n_layer:,}, the files hold {len(found):,} tensors in all; copy it again"
        )
    expected = hf_shapes(config) | {HEAD: (config.vocab_size, config.d_model)}
    names: dict[str, str] = {}
    faults = []
    for theirs, (shape, file) in found.items():
        name = theirs.removeprefix(PREFIX)
        if CAUSAL_MASK.search(name):
            continue
        if name not in expected:
            faults.append(f"{file}: holds {theirs}, which a GPT-2 of {config.n_layer} layers has not")
        elif shape != expected[name]:
            faults.append(f"{file}: {theirs} is {list(shape)}, {CONFIG_FILE} says {list(expected[name])}")
        elif name in names:
            faults.append(f"{file}: holds {theirs}, which is {names[name]} under another name; take one of them out")
        names[name] = theirs
    missing = [name for name in expected if name not in names and name != HEAD]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        faults.append(f"{folder}: lacks {', '.join(missing[:3])}{more}; copy or export it again")
    if faults:
        raise UsageError(*faults[:8], *([f"{folder}: and {len(faults) - 8} more tensors"] if len(faults) > 8 else []))
    return names


def _read_json(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except OSError as reason:
        problem = "missing, so this is no Hugging Face folder" if not file.exists() else f"cannot be read ({reason.strerror})"
        raise UsageError(f"{file}: {problem}; give a folder of GPT2LMHeadModel") from None
    except (ValueError, RecursionError) as reason:
        raise UsageError(f"{file}: is not JSON ({reason}); copy or export the folder again") from None
    if not isinstance(said, dict):
        raise UsageError(f"{file}: holds a {type(said).__name__}, must be an object; copy or export the folder again")
    return said


def _config(said: dict[str, Any], file: Path) -> GPTConfig:
    """The model that a config.json names. Raises UsageError where it is not the one of `model/gpt.py`."""
    kind, named = said.get("model_type"), said.get("architectures") or ["GPT2LMHeadModel"]
    if kind != "gpt2" or not isinstance(named, list) or not all(name in ARCHITECTURES for name in named):
        what = ", ".join(map(str, named)) if isinstance(named, list) and kind == "gpt2" else str(kind)
        raise UsageError(f"{file}: is a model of {what[:60]!r}; only GPT2LMHeadModel (model_type gpt2) can be read")
    if "quantization_config" in said:
        raise UsageError(f"{file}: its weights are quantized, which nothing is trained or scored from here; give the folder it was made of")
    faults = [
        f"{file}: {key} is {json.dumps(said[key])}, this GPT-2 has {json.dumps(allowed[0])}"
        for key, allowed in MUST_BE.items()
        if key in said and said[key] is not None and said[key] not in allowed
    ]
    sizes: dict[str, Any] = {}
    for ours, theirs in (
        ("n_layer", "n_layer"),
        ("n_head", "n_head"),
        ("d_model", "n_embd"),
        ("seq_len", "n_positions"),
        ("vocab_size", "vocab_size"),
    ):
        sizes[ours] = said.get(theirs)
        if type(sizes[ours]) is not int:
            faults.append(f"{file}: {theirs} is {json.dumps(said.get(theirs))}, must be a whole number; copy or export the folder again")
    if not faults and said.get("n_inner") not in (None, 4 * sizes["d_model"]):
        faults.append(f"{file}: n_inner is {said['n_inner']}, this GPT-2 has 4 x n_embd = {4 * sizes['d_model']}")
    if faults:
        raise UsageError(*faults)
    end = said.get("document_end")  # ours: transformers keeps what it does not know
    dropout = said.get("resid_pdrop", 0.0)
    try:
        return GPTConfig(
            **sizes, dropout=dropout if isinstance(dropout, (int, float)) else 0.0, document_end=end if type(end) is int else None
        )
    except ValueError as reason:
        raise UsageError(f"{file}: {reason}") from None


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index where there is one."""
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).exists():
        return []
    return _of_index(folder / INDEX_FILE)


def _pickle_files(folder: Path) -> list[Path]:
    whole, index = (folder / name for name in PICKLES)
    return [whole] if whole.exists() else _of_index(index) if index.exists() else []


def _of_index(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) and "/" not in name for name in weight_map.values()):
        raise UsageError(f"{index}: weight_map is no object of file names; copy or export the folder again")
    files = [index.parent / name for name in dict.fromkeys(weight_map.values())]
    missing = [file for file in files if not os.path.isfile(file)]  # False for names that no file can have, of which is_file() raises
    if missing:
        raise UsageError(*(f"{file}: missing, and {index.name} names it; copy or export the folder again" for file in missing[:8]))
    return files


def write_weights(model: GPT, config: GPTConfig, folder: Path, dtype: str, shard_bytes: int = SHARD_BYTES) -> int:
    """Write the weights as GPT2LMHeadModel's, in one file or in several of at most `shard_bytes` with their index; the bytes of all.

    The padded rows of the vocabulary are left out, and so is the head, which is the embedding. dtype: safetensors' word for the files'.
    Raises UsageError where a weight is too large for it.
    """
    parameters = dict(model.named_parameters())

    def tensor_of(theirs: str) -> list[torch.Tensor]:
        name = theirs.removeprefix(PREFIX)
        return [rounded(name, to_hf_layout(name, parameters[name].detach(), config), dtype)]

    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    room = shard_bytes
    for name, shape in hf_shapes(config).items():
        size = math.prod(shape) * ITEMSIZE[dtype]
        if size > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][PREFIX + name] = (dtype, shape)
        room -= size
    total = 0
    weight_map: dict[str, str] = {}
    for number, described in enumerate(shards, 1):
        name = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += write_tensors(folder / name, described, tensor_of, {"format": "pt"})
        weight_map |= dict.fromkeys(described, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def write_config(folder: Path, config: GPTConfig, eot_id: int | None, dtype: str) -> None:
    """config.json and generation_config.json. `dtype`: torch's name of the weights', such as "float32"."""
    generation = {"_from_model_config": True, "bos_token_id": eot_id, "eos_token_id": eot_id, "pad_token_id": eot_id}
    for name, said in ((CONFIG_FILE, hf_config(config, eot_id, dtype)), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, seq_len: int) -> None:
    """tokenizer.json and tokenizer_config.json, from which AutoTokenizer gives the ids that `tokenizer` gives.

    So special tokens that are written in a text are text (`split_special_tokens`), and nothing is put around a text.

    Raises:
        DataError: the tokenizer has no form that `tokenizers` reads.
    """
    text, end = tokenizer.hugging_face_json(), tokenizer.end_name
    said: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **({} if end is None else {"bos_token": end, "eos_token": end, "pad_token": end}),
    }
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def other_ids(tokenizer: Tokenizer, folder: Path, texts: list[str]) -> int:
    """In how many of `texts` AutoTokenizer, from `folder`, gives other ids than `tokenizer`."""
    from transformers import AutoTokenizer

    written = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    theirs = written(texts, return_attention_mask=False, verbose=False)["input_ids"]
    return sum(own.tolist() != found for own, found in zip(tokenizer.encode_many(texts), theirs, strict=True))
