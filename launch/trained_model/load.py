"""A trained model from a run folder or a Hugging Face folder, for whoever wants to use it: one process, no engine.

trained = load_trained("runs/first")
trained.model(tokens)
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import DataError
from data_pipeline.shards import Corpus, open_corpus
from data_pipeline.tokenizer import Tokenizer
from launch.config.run_config import ROOT
from launch.errors import UsageError, say
from launch.formats.checkpoint_files import (
    DamagedCheckpoint,
    checkpoint_name,
    complete_checkpoints,
    newest_good,
    read_state,
    verify,
)
from launch.formats.folder_tokenizer import tokenizer_of_corpus, tokenizer_of_folder
from launch.formats.hf_folder import CONFIG_FILE, HFFolder, open_hf_folder
from launch.formats.metrics import read_run_json
from launch.formats.safetensors_file import is_finite
from launch.trained_model.flags import DTYPES
from launch.trained_model.plain import PLAIN_FILE
from model.accounting import parameter_count
from model.presets import GPTConfig

if TYPE_CHECKING:
    import torch

    from model.gpt import GPT


@dataclass(frozen=True)
class Source:
    """What `open_trained` found: all that can be known without torch.

    Attributes:
        folder: as given.
        config: the model's.
        tokenizer: None where the folder (or, of a run, the corpus) brings none; `no_tokenizer` says why.
        eot_id: the token that ends a text, None where none does.
        description: the `run.json` of a run, else None.
        checkpoint, state: the run's checkpoint and its `state.json`, else None.
        hf: the Hugging Face folder, else None.
        corpus: of a run, the corpus that it was trained on, where it is still there.
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
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def checkpoint_name(self) -> str | None:
        return self.checkpoint.name if self.checkpoint else None

    @property
    def step(self) -> int | None:
        """Of the checkpoint."""
        return int(self.state["step"]) if self.state else None

    def load(self) -> Trained:
        """Read the weights. Raises UsageError, one line, for files that are not what they should be."""
        return _load(self)


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode, with what belongs to it.

    Attributes:
        model: a plain GPT on the CPU: of a run in fp32, of a Hugging Face folder in the folder's dtype.
        config, tokenizer, eot_id, description, folder: as in `Source`.
        name: of the folder.
        source: where it came from.
    """

    model: GPT
    config: GPTConfig
    tokenizer: Tokenizer | None
    eot_id: int | None
    name: str
    description: dict[str, Any] | None
    folder: Path
    source: Source


def load_trained(
    source: str | Path, *, checkpoint: str | None = None, data: str | Path | None = None, allow_pickle: bool = False
) -> Trained:
    """The model in a run folder or a Hugging Face folder.

    Args:
        source: `runs/<name>`, or a folder of GPT2LMHeadModel in safetensors, such as `launch/export.py` writes and GPT-2's published ones.
        checkpoint: of a run, the name of one (`step-00000300`), or "newest". None: the newest, which must be the end of the run.
        data: where the corpus of a run is now, for its tokenizer; None: where it was.
        allow_pickle: of a Hugging Face folder without safetensors, read `pytorch_model.bin`. No code of its runs.

    Raises:
        UsageError: one line: neither of the two, an unfinished run, files that are missing, damaged or of another model, weights
            that are not finite.
    """
    return open_trained(source, checkpoint=checkpoint, data=data, allow_pickle=allow_pickle).load()


def open_trained(
    source: str | Path, *, checkpoint: str | None = None, data: str | Path | None = None, allow_pickle: bool = False
) -> Source:
    """What `load_trained` does before it reads weights; imports no torch. Arguments and errors are its own."""
    folder = Path(source)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "no such folder"
        raise UsageError(f"{folder}: {found}; give a run folder, such as runs/first, or a Hugging Face folder of GPT2LMHeadModel")
    if (folder / "run.json").exists():
        return _open_run(folder, checkpoint, data)
    if checkpoint is not None:
        raise UsageError(f"--checkpoint {checkpoint}: {folder} is not a run folder; leave it out")
    if (folder / PLAIN_FILE).exists():
        raise UsageError(f"{folder}: holds {PLAIN_FILE} alone, which is for other programs; give the run, or export it as hf")
    if not (folder / CONFIG_FILE).exists():
        raise UsageError(
            f"{folder}: holds neither run.json nor {CONFIG_FILE}; give a run folder, such as runs/first, or a Hugging Face folder"
        )
    if data is not None:
        raise UsageError(f"--data {data}: is of a run, and {folder} brings its own tokenizer; leave it out")
    hf = open_hf_folder(folder, allow_pickle=allow_pickle)
    tokenizer, why = tokenizer_of_folder(hf)
    eot = hf.eos_token_id if hf.eos_token_id is not None else getattr(tokenizer, "eot_id", None)
    return Source(folder, hf.config, tokenizer, why, eot, hf=hf)


def _open_run(folder: Path, asked: str | None, data: str | Path | None) -> Source:
    description = read_description(folder)
    checkpoint, state = choose_checkpoint(folder, description, asked)
    corpus, tokenizer, why = _corpus_of(description, data)
    # Every tokenizer of ours, and GPT-2's, has the end of text last; where the corpus is gone no more is known.
    vocab_size = description["corpus"]["vocab_size"]
    if corpus is not None and corpus.vocab_size != vocab_size:
        raise UsageError(f"{folder / 'run.json'}: vocab_size is {vocab_size:,}, its corpus has {corpus.vocab_size:,}; it was changed")
    eot = corpus.eot_id if corpus else description["corpus"].get("eot_id", vocab_size - 1)
    config = GPTConfig(
        **description["shape"],
        vocab_size=vocab_size,
        init_seed=description.get("seed", 0),
        document_end=eot if description.get("no_cross_document") else None,
    )
    written = sum(entry["bytes"] for entry in state["files"].values())
    # Before the memory is taken, where it is much: the engine's files hold 16 bits of each parameter at least.
    if parameter_count(config) * 2 > max(written, 2**30):
        raise UsageError(
            f"{folder / 'run.json'}: says {parameter_count(config):,} parameters, and the files of {checkpoint.name} are of"
            f" {written:,} bytes; it was changed since the run wrote it"
        )
    return Source(folder, config, tokenizer, why, eot, description, checkpoint, state, corpus=corpus)


def read_description(folder: Path) -> dict[str, Any]:
    """The `run.json` of a run. Raises UsageError where it is none from which a model can be built."""
    file = folder / "run.json"
    try:
        description = read_run_json(file)
        corpus = description["corpus"]
        GPTConfig(**description["shape"], vocab_size=corpus["vocab_size"])
    except UsageError:
        raise
    except (KeyError, TypeError, AttributeError) as reason:
        raise UsageError(f"{file}: says no model ({type(reason).__name__}: {reason}); it is not the run.json of a run") from None
    except ValueError as reason:
        raise UsageError(f"{file}: says no model ({reason}); it is not the run.json of a run") from None
    for said, kinds in ((description, _DESCRIPTION), (corpus, _CORPUS)):
        for key, kind in kinds.items():
            value = said.get(key)
            if value is not None and (type(value) is not kind or (isinstance(value, int) and value < 0)):
                word = {int: "a whole number", str: "a text", dict: "an object", list: "a list"}[kind]
                raise UsageError(f"{file}: {key} is {json.dumps(value)[:60]}, must be {word}; it was changed since the run wrote it")
    if description.get("precision") not in (None, *DTYPES):
        raise UsageError(f"{file}: precision is {description['precision']!r}, must be one of {', '.join(DTYPES)}; it was changed")
    return dict(description)


#: What is read of a run.json and its corpus, of which an older one may lack some.
_DESCRIPTION: dict[str, type] = {
    **dict.fromkeys(("total_tokens", "global_batch_size", "micro_batch_size", "eval_batches", "ranks", "seed"), int),
    **dict.fromkeys(("techniques", "optimizer", "machine", "versions"), dict),
    **dict.fromkeys(("corpus_fingerprint", "precision"), str),
    "command": list,
}
_CORPUS: dict[str, type] = {"vocab_size": int, "eot_id": int, "path": str, "sources": list}


def choose_checkpoint(folder: Path, description: dict[str, Any], asked: str | None) -> tuple[Path, dict[str, Any]]:
    """The checkpoint to be used and its `state.json`. All its files have been read and are as the run wrote them.

    Warns on stderr of newer checkpoints that are damaged.

    Raises:
        UsageError: there is none, none of the name asked for, it is damaged, or the newest good one is not the end of the run and was not
            asked for.
    """
    checkpoints = complete_checkpoints(folder / "checkpoints")
    if not checkpoints:
        raise UsageError(f"{folder}: has no complete checkpoint, its training has not come so far; go on with it by --resume")
    if asked not in (None, "newest"):
        named = {path.name: path for path in checkpoints}
        name = checkpoint_name(int(asked)) if asked.isdecimal() and len(asked) < 12 else asked
        if name not in named:
            raise UsageError(f"--checkpoint {asked}: no complete one of {folder}; it has {', '.join(named)}")
        checkpoints = [named[name]]

    def find_fault(checkpoint: Path) -> str | None:
        try:
            verify(checkpoint, description.get("run_id"))
        except DamagedCheckpoint as reason:
            return str(reason)
        return None

    chosen, faults = newest_good(checkpoints, find_fault)
    if chosen is None:
        remedy = "copy the run again" if asked in (None, "newest") else "take another --checkpoint"
        raise UsageError(*(f"{fault}; {remedy}" for fault in faults))
    state = read_state(chosen)
    total = description.get("total_tokens")
    if asked is None and isinstance(total, int) and state["tokens"] < total:
        which = "newest good checkpoint" if faults else "newest checkpoint"
        raise UsageError(
            *faults,
            f"{folder}: an unfinished run, its {which} has {state['tokens']:,} of {total:,} tokens; go on with it by"
            f" --resume, or use it as it is: --checkpoint {chosen.name}",
        )
    for fault in faults:
        say(f"warning: passed over a checkpoint: {fault}", sys.stderr)
    return chosen, state


def _corpus_of(description: dict[str, Any], data: str | Path | None) -> tuple[Corpus | None, Tokenizer | None, str]:
    """The corpus of a run with its tokenizer; why there is none."""
    known = description["corpus"].get("path")
    if data is None and not known:
        return None, None, "run.json does not say what it was trained on; --data says where the corpus is"
    given = Path(str(known if data is None else data))
    path = given if given.exists() or given.is_absolute() or data is not None else ROOT / given
    try:
        corpus = open_corpus(path)
    except DataError as reason:
        if data is not None:
            raise
        return None, None, f"its corpus is not where it was ({reason}); --data says where it is now"
    if corpus.fingerprint != description.get("corpus_fingerprint"):
        if data is not None:
            raise UsageError(f"--data {data}: is not the corpus that the run was trained on; prepare that one again")
        return None, None, f"{path} is not the corpus any more that it was trained on; --data says where that is now"
    return corpus, *tokenizer_of_corpus(corpus)


def empty_model(config: GPTConfig, dtype: torch.dtype) -> GPT:
    """A GPT in evaluation mode whose weights are whatever the memory holds; it takes the size of the weights, and no more."""
    import torch

    from model.gpt import GPT, TiedHead

    with torch.device("meta"):
        model = GPT(config)
    model.to(dtype).to_empty(device="cpu")
    model.lm_head = TiedHead(model.wte, config.vocab_size)  # tied anew, with its mask of padded columns
    return model.eval().requires_grad_(False)


def _load(source: Source) -> Trained:
    import torch

    if source.hf is not None:
        model = empty_model(source.config, source.hf.dtype)
        source.hf.fill(model)
    else:
        from launch.trained_model.checkpoint_weights import fill_from_checkpoint

        assert source.checkpoint is not None and source.state is not None, "a run has a checkpoint"
        model = empty_model(source.config, torch.float32)
        model.requires_grad_(True)  # the groups of the optimizer are those of what is trained
        fill_from_checkpoint(model, source.checkpoint, source.state["ranks"])
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            if not is_finite(parameter):
                raise UsageError(f"{source.checkpoint}: {name} holds values that are not finite; take an earlier --checkpoint")
    return Trained(model, source.config, source.tokenizer, source.eot_id, source.name, source.description, source.folder, source)
