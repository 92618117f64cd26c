"""Write a trained model as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import stat
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from data_pipeline.tokenizer import Tokenizer
from launch.errors import UsageError
from launch.formats.hf_folder import CONFIG_FILE
from launch.formats.metrics import read_metrics
from launch.formats.tensor_files import is_finite
from launch.trained_model.card import model_card
from launch.trained_model.flags import DTYPES
from launch.trained_model.load import TrainedModel, open_trained
from model.gpt import GPT
from model.hf import hf_config, hf_form, hf_tensors
from model.presets import GPTConfig

#: The largest size of one file of weights.
SHARD_BYTES = 5_000_000_000


def export(flags: argparse.Namespace, folder: Path, name: str) -> tuple[TrainedModel, dict[str, torch.Tensor], list[str]]:
    """Write the model that the flags of `launch/export.py` name into `folder`. Returns the model, its weights, and notes for the user."""
    trained = open_trained(flags.source, checkpoint=flags.checkpoint, data=flags.data)
    try:
        hf_form(trained.config)
    except ValueError as reason:
        raise UsageError(f"{flags.source}: {reason}; generate.py and score.py read the run itself") from None
    model = trained.load_model()
    dtype = getattr(torch, DTYPES[flags.dtype]) if flags.dtype else model.wte.weight.dtype
    weights = converted_weights(model, trained.config, dtype)
    return trained, weights, write_folder(trained, weights, folder, name)


def write_folder(trained: TrainedModel, weights: dict[str, torch.Tensor], folder: Path, name: str) -> list[str]:
    """Write weights, config, tokenizer and model card into `folder`; returns notes for the user.

    Args:
        weights: from `converted_weights`.
        name: of the model, for its card.
    """
    first = next(iter(weights.values()))
    dtype, width = str(first.dtype).removeprefix("torch."), first.itemsize
    write_config(folder, trained.config, trained.eot_id, dtype)  # AutoTokenizer reads it too
    notes = []
    if trained.tokenizer is None:
        notes.append(f"the folder has no tokenizer: {trained.no_tokenizer}")
    else:
        write_tokenizer(trained.tokenizer, folder, trained.config.seq_len)
    if trained.eot_id is None and trained.description is not None and trained.corpus is None:
        notes.append("the folder has no eos_token_id: run.json does not have it, and the corpus was not found; give its place with --data")
    if trained.config.document_end is not None:
        notes.append("trained with --no_cross_document, and transformers does not mask documents: give it one document at a time")
    if trained.config.n_expert and (trained.config.d_model * width % 16 or trained.config.d_expert * width % 16):
        notes.append('transformers multiplies experts of whole 16 bytes only: load it with experts_implementation="eager"')
    save_torch_state_dict(weights, folder, max_shard_size=SHARD_BYTES)
    for file in folder.glob("*.safetensors"):  # safetensors makes them readable by their owner only
        file.chmod(stat.S_IMODE((folder / CONFIG_FILE).stat().st_mode))
    metrics, state = trained.folder / "metrics.jsonl", trained.state
    lines = [line for line in read_metrics(metrics) if line["step"] <= state["step"]] if state is not None and metrics.exists() else []
    public = ["the folder has no tokenizer", *notes[1:]] if trained.tokenizer is None else notes  # without this machine's folders
    (folder / "README.md").write_text(model_card(name, trained, dtype, lines, public), encoding="utf-8")
    return notes


def converted_weights(model: GPT, config: GPTConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights under transformers' names and in its layouts, without the padded rows of the vocabulary and a tied head.

    Frees the weights of `model` one by one, so that memory holds one model only. Raises UsageError where a weight overflows in `dtype`.
    """
    weights, parts = {}, hf_tensors(config)
    for name, parameter in model.named_parameters():
        for part in parts[name]:
            view = part.of(parameter.data)
            weight = torch.empty(view.shape, dtype=dtype).copy_(view)  # a new storage: safetensors refuses a slice of the embedding
            if not is_finite(weight):
                raise UsageError(f"--dtype: {name} holds values beyond the range of {dtype}; take bf16 or fp32")
            weights[part.name] = weight
            view = torch.empty(0)
        parameter.data = view
    return weights


def write_config(folder: Path, config: GPTConfig, eot_id: int | None, dtype: str) -> None:
    """config.json and generation_config.json. `dtype`: torch's name, such as "float32"."""
    generation = {"_from_model_config": True, "bos_token_id": eot_id, "eos_token_id": eot_id, "pad_token_id": eot_id}
    for name, values in ((CONFIG_FILE, hf_config(config, eot_id, dtype)), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, seq_len: int) -> None:
    """tokenizer.json and tokenizer_config.json, with which AutoTokenizer gives the same ids as `tokenizer`.

    Special-token strings in a text are tokenized as plain text (`split_special_tokens`), and no token is added around a text.
    """
    text, end = tokenizer.hugging_face_json(), tokenizer.end_name
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "split_special_tokens": True,
        # Without it, transformers 4 also returns token_type_ids, which GPT-2 adds to its input as tokens 0, and Llama and Qwen3 refuse.
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **({} if end is None else {"bos_token": end, "eos_token": end, "pad_token": end}),
    }
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
