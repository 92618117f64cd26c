"""A trained model from a run folder or a Hugging Face folder, in one process without an engine.

trained = open_trained("runs/first")
model = trained.load_model()
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_pipeline.errors import DataError
from data_pipeline.shards import Corpus, open_corpus
from data_pipeline.tokenizer import Tokenizer
from launch.config.run_config import ROOT
from launch.errors import UsageError, print_once
from launch.formats.checkpoint_files import checkpoint_name, complete_checkpoints, newest_good, read_state, verify
from launch.formats.deepspeed_files import fill_from_checkpoint
from launch.formats.folder_tokenizer import tokenizer_of_corpus, tokenizer_of_folder
from launch.formats.hf_folder import HFFolder, open_hf_folder
from launch.formats.metrics import model_of_run, read_run_json
from launch.formats.tensor_files import is_finite
from model.gpt import GPT
from model.presets import MODELS_IN_WORDS, GPTConfig

FIX = f"give a run folder, such as runs/first, or a Hugging Face folder of a {MODELS_IN_WORDS}"


@dataclass(frozen=True)
class TrainedModel:
    """A checked source of weights, which are not loaded yet.

    Attributes:
        folder: as given.
        config: of the model.
        tokenizer: None where the folder or the run's corpus has none; `no_tokenizer` is the reason.
        eot_id: the token that ends a text, or None.
        description: `run.json` of a run, otherwise None.
        checkpoint, state: the run's checkpoint and its `state.json`, otherwise None.
        hf: the Hugging Face folder, otherwise None.
        corpus: on which the run was trained, if it is still there.
    """

    folder: Path
    config: GPTConfig
    tokenizer: Tokenizer | None
    no_tokenizer: str
    eot_id: int | None
    description: dict[str, Any] | None = None
    checkpoint: Path | None = None
    state: dict[str, Any] | None = None
    hf: HFFolder | None = None
    corpus: Corpus | None = None

    @property
    def checkpoint_name(self) -> str | None:
        return self.checkpoint.name if self.checkpoint else None

    @property
    def step(self) -> int | None:
        """The optimizer step of the checkpoint."""
        return int(self.state["step"]) if self.state else None

    def load_model(self) -> GPT:
        """A plain GPT on the CPU in evaluation mode: fp32 for a run, the folder's dtype for a Hugging Face folder.

        Raises:
            UsageError: files are damaged or hold another model, or weights are not finite; one line.
        """
        if self.hf is not None:
            model = empty_model(self.config, self.hf.dtype)
            self.hf.fill(model)
            return model
        assert self.checkpoint is not None and self.state is not None, "a run has a checkpoint"
        model = empty_model(self.config, torch.float32)
        fill_from_checkpoint(model, self.checkpoint, self.state["ranks"])
        for name, parameter in model.named_parameters():
            if not is_finite(parameter):
                raise UsageError(f"{self.checkpoint}: {name} contains NaN or Inf; take an earlier --checkpoint")
        return model


def empty_model(config: GPTConfig, dtype: torch.dtype) -> GPT:
    """A GPT in evaluation mode with uninitialized weights; its memory is that of the weights."""
    with torch.device("meta"):
        model = GPT(config)
    model.to(dtype).to_empty(device="cpu")
    if config.tied_head:
        model.lm_head.weight = model.wte.weight
    model.lm_head.hide_padding()
    return model.eval().requires_grad_(False)


def open_trained(source: str | Path, *, checkpoint: str | None = None, data: str | Path | None = None) -> TrainedModel:
    """Check a run folder or a Hugging Face folder.

    Args:
        source: `runs/<name>`, or a folder of such a model in safetensors, as `launch/export.py` writes it.
        checkpoint: of a run, its name (`step-00000300`) or "newest". None: the newest, which must be the end of the run.
        data: where the corpus of a run is now; None: the path in `run.json`.

    Raises:
        UsageError: one line: neither of the two, an unfinished run, files that are missing, damaged or of another model.
    """
    folder = Path(source)
    if (folder / "run.json").exists():
        return _open_run(folder, checkpoint, data)
    hf = open_hf_folder(folder, FIX)
    for flag, value in (("--checkpoint", checkpoint), ("--data", data)):
        if value is not None:
            raise UsageError(f"{flag} {value}: is for a run, and {folder} is none; leave it out")
    tokenizer, why = tokenizer_of_folder(hf)
    eot = hf.eos_token_id if hf.eos_token_id is not None else getattr(tokenizer, "eot_id", None)
    eot = eot if eot is not None and 0 <= eot < hf.config.vocab_size else None
    return TrainedModel(folder, hf.config, tokenizer, why, eot, hf=hf)


def _open_run(folder: Path, asked: str | None, data: str | Path | None) -> TrainedModel:
    description = read_run_json(folder / "run.json")
    checkpoint, state = _choose_checkpoint(folder, description, asked)
    corpus, tokenizer, why = _corpus_of(description, data)
    config = model_of_run(description)
    if corpus is not None and corpus.vocab_size != config.vocab_size:
        raise UsageError(f"{folder}: vocab_size is {config.vocab_size:,}, but its corpus has {corpus.vocab_size:,}; restore run.json")
    eot = corpus.eot_id if corpus else description["corpus"].get("eot_id")
    if type(eot) is not int or not 0 <= eot < config.vocab_size:
        eot = None
    if description["no_cross_document"] and eot is None:
        raise UsageError(f"{folder}: no_cross_document, and the id that ends text is unknown ({why}); give the corpus with --data")
    config = replace(config, document_end=eot if description["no_cross_document"] else None)
    return TrainedModel(folder, config, tokenizer, why, eot, description, checkpoint, state, corpus=corpus)


def _choose_checkpoint(folder: Path, description: dict[str, Any], asked: str | None) -> tuple[Path, dict[str, Any]]:
    """The checkpoint to be used and its `state.json`. All of its files have been compared with their digests.

    Warns on stderr about newer checkpoints that are damaged.

    Raises:
        UsageError: there is no such checkpoint, it is damaged, or it is not the end of the run and was not asked for.
    """
    checkpoints = complete_checkpoints(folder / "checkpoints")
    if not checkpoints:
        raise UsageError(f"{folder}: has no complete checkpoint yet; continue its training with --resume")
    if asked not in (None, "newest"):
        by_name = {path.name: path for path in checkpoints}
        name = checkpoint_name(int(asked)) if asked.isdecimal() and len(asked) < 12 else asked
        if name not in by_name:
            raise UsageError(f"--checkpoint {asked}: {folder} has no such checkpoint; it has {', '.join(by_name)}")
        checkpoints = [by_name[name]]

    chosen, faults = newest_good(checkpoints, lambda checkpoint: verify(checkpoint, description.get("run_id")))
    if chosen is None:
        remedy = "copy the run again" if asked in (None, "newest") else "take another --checkpoint"
        raise UsageError(*(f"{fault}; {remedy}" for fault in faults))
    state = read_state(chosen)
    total = description["total_tokens"]
    if asked is None and state["tokens"] < total:
        at = f"{state['tokens']:,} of {total:,} tokens"
        fix = f"use --checkpoint {chosen.name} (for --against, export it), or --resume it"
        raise UsageError(*faults, f"{folder}: an unfinished run, at {at}; {fix}")
    for fault in faults:
        print_once(f"warning: skipped a damaged checkpoint: {fault}", sys.stderr)
    return chosen, state


def _corpus_of(description: dict[str, Any], data: str | Path | None) -> tuple[Corpus | None, Tokenizer | None, str]:
    """The corpus of a run and its tokenizer, or None and the reason."""
    known = description["corpus"].get("path")
    if data is None and not known:
        return None, None, "run.json does not name its corpus; give --data"
    given = Path(str(known if data is None else data))
    path = given if given.exists() or given.is_absolute() or data is not None else ROOT / given
    try:
        corpus = open_corpus(path)
        if corpus.fingerprint != description.get("corpus_fingerprint"):
            raise DataError(f"{path}: is not the corpus on which the run was trained")
    except DataError as reason:
        if data is not None:
            raise
        return None, None, f"the run's corpus cannot be opened ({reason}); give its new place with --data"
    return corpus, *tokenizer_of_corpus(corpus)
