"""Score a trained model on the windows of a corpus: what `launch/score.py` prints, as numbers."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from tqdm import tqdm

from data_pipeline.loader import Loader
from data_pipeline.shards import Corpus, Split, open_corpus
from launch.config.hardware import device_type
from launch.errors import UsageError, print_once
from launch.formats.folder_tokenizer import difference, tokenizer_of_corpus
from launch.trained_model.flags import DTYPES
from launch.trained_model.load import TrainedModel, open_trained
from model.gpt import GPT

#: Tokens of a forward pass. On a CPU the fp32 logits of 2,048 tokens and 50,304 ids take 412 MB; a GPU needs larger passes.
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}


class Estimate(NamedTuple):
    """A mean over windows, its standard error, and its 95% interval; the last two are None for a single window."""

    loss: float
    error: float | None
    interval: tuple[float, float] | None


def score(flags: argparse.Namespace) -> dict[str, Any]:
    """The score that the flags of `launch/score.py` ask for, as a JSON object. Raises UsageError, one line."""
    trained = open_trained(flags.source, checkpoint=flags.checkpoint)
    corpus, notes = _corpus(trained, flags.data, f"--data {flags.data}")
    other = None
    if flags.against is not None:
        other, others_notes = _open_other(flags.against, trained, corpus)
        notes = [*notes, *others_notes]
    for note in notes if not flags.quiet else ():
        print_once(f"note: {note}", sys.stderr)
    split: Split = getattr(corpus, flags.split)
    seq_len = trained.config.seq_len
    total = split.windows(seq_len)
    windows = min(flags.windows or total, total)
    n_bytes = corpus.manifest["splits"][split.name].get("bytes") or None  # nanoGPT's corpora do not count them
    start = time.monotonic()
    losses = _losses(trained, corpus, split, windows, flags)
    found = estimate(losses)
    compared = None if other is None else (other, _losses(other, corpus, split, windows, flags))
    seconds = time.monotonic() - start
    # The ratio of the whole split, so that a loss from a log or another program gives the same figure.
    to_bits = None if n_bytes is None else split.n_tokens / n_bytes / math.log(2)
    perplexity = math.exp(found.loss) if found.loss < 700 else None

    def scaled(value: float | None, factor: float | None) -> float | None:
        return None if value is None or factor is None else value * factor

    return {
        "model": str(trained.folder),
        "checkpoint": trained.checkpoint_name,
        "step": trained.step,
        "data": str(corpus.path),
        "split": flags.split,
        "dtype": flags.dtype,
        "seq_len": seq_len,
        "windows": windows,
        "tokens": windows * seq_len,
        "split_tokens": split.n_tokens,
        "split_bytes": n_bytes,
        "loss": found.loss,
        "loss_stderr": found.error,
        "perplexity": perplexity,
        "perplexity_stderr": scaled(found.error, perplexity),
        "bits_per_byte": scaled(found.loss, to_bits),
        "bits_per_byte_stderr": scaled(found.error, to_bits),
        "seconds": round(seconds, 2),
        "notes": notes,
        **({} if compared is None else {"against": _against(losses, *compared, to_bits)}),
    }


def _open_other(source: str, trained: TrainedModel, corpus: Corpus) -> tuple[TrainedModel, list[str]]:
    """The model of `--against`, and notes. Raises UsageError if it cannot read the windows of `trained` in `corpus`."""
    other = open_trained(source)
    _, notes = _corpus(other, corpus.path, f"--against {source}: {corpus.path}")
    if (theirs := other.config.seq_len) != (own := trained.config.seq_len):
        fix = "compare the bits per byte of the two models, each scored alone"
        raise UsageError(f"--against {source}: its context is {theirs:,} tokens, and that of {trained.folder} is {own:,}; {fix}")
    return other, notes


def _losses(trained: TrainedModel, corpus: Corpus, split: Split, windows: int, flags: argparse.Namespace) -> np.ndarray:
    """`window_losses` of a model, with a progress bar. Raises UsageError if their mean is not finite."""
    model = trained.load_model().to(torch.device(device_type()), getattr(torch, DTYPES[flags.dtype]))
    # disable=None: no bar where standard error is not a terminal
    with tqdm(total=windows, unit="window", dynamic_ncols=True, leave=False, disable=True if flags.quiet else None) as bar:
        losses = window_losses(model, corpus, split, windows, flags.batch_size, bar.update)
    if not math.isfinite(loss := losses.mean()):
        raise UsageError(f"{trained.folder}: the loss is {loss} in {flags.dtype}; try --dtype fp32, or an earlier --checkpoint")
    return losses


def _against(losses: np.ndarray, other: TrainedModel, other_losses: np.ndarray, to_bits: float | None) -> dict[str, Any]:
    """The paired difference of `losses` to those of another model on the same windows. to_bits: bits per byte of a nat per token."""
    paired, theirs = estimate(losses - other_losses), estimate(other_losses)
    return {
        "model": str(other.folder),
        "checkpoint": other.checkpoint_name,
        "step": other.step,
        "loss": theirs.loss,
        "loss_stderr": theirs.error,
        "difference": paired.loss,
        "difference_stderr": paired.error,
        "difference_interval": paired.interval,
        "difference_bits_per_byte": None if to_bits is None else paired.loss * to_bits,
    }


def _corpus(trained: TrainedModel, data: str | Path | None, where: str) -> tuple[Corpus, list[str]]:
    """The corpus, whose ids must be those of the model, and notes. where: begins messages about the corpus.

    Raises:
        UsageError: there is no corpus, or it is another tokenizer's.
    """
    run = trained.description
    if data is None:
        if trained.corpus is None:
            none = "a Hugging Face folder names no corpus; give --data DIR, a corpus with the model's tokenizer"
            raise UsageError(f"{trained.folder}: {none if run is None else trained.no_tokenizer}")
        return trained.corpus, []
    corpus, vocab_size = open_corpus(data), trained.config.vocab_size
    if run is not None and run.get("corpus_fingerprint") == corpus.fingerprint:
        return corpus, []
    if corpus.vocab_size > vocab_size:
        raise UsageError(f"{where}: has {corpus.vocab_size:,} ids, but the model has {vocab_size:,}; use the model's tokenizer")
    own, reason = tokenizer_of_corpus(corpus)
    if trained.tokenizer is None or own is None:
        return corpus, [f"cannot tell whether {data} was made with the model's tokenizer: {trained.no_tokenizer or reason}"]
    if (differs := difference(corpus, own, trained.tokenizer)) is not None:
        raise UsageError(f"{where}: was made with another tokenizer than the model's: {differs}; prepare the text again with the model's")
    return corpus, []


@torch.inference_mode()
def window_losses(
    model: GPT, corpus: Corpus, split: Split, windows: int, batch_size: int | None = None, watch: Callable[[int], Any] = lambda done: None
) -> np.ndarray:
    """The mean loss of each of `windows` windows of seq_len + 1 tokens, spread evenly over `split`: float64 (windows,), nats per token.

    A training run that evaluates as many windows computes its validation loss on the same ones. watch: called with the number of windows
    done since the last call.
    """
    device, seq_len = model.wte.weight.device, model.config.seq_len
    batch_size = batch_size or max(1, PASS_TOKENS.get(device.type, PASS_TOKENS["cpu"]) // seq_len)
    loader = Loader(split, None, seq_len, corpus.vocab_size, 0, 1, device)
    losses: list[torch.Tensor] = []
    for tokens, _ in loader.validation_batches(loader.validation_windows(windows), batch_size):
        logits = model(tokens[:, :-1])  # (B, T, V)
        for of_window, targets in zip(logits, tokens[:, 1:], strict=True):
            losses.append(F.cross_entropy(of_window.float(), targets))
        watch(len(tokens))
    return torch.stack(losses).double().cpu().numpy()


def estimate(losses: np.ndarray) -> Estimate:
    """The mean of the windows' losses and its standard error.

    Neighbouring windows of one document are correlated. The error is therefore that of batch means (Flegal and Jones, arXiv 0811.1729:
    about sqrt(n) batches of consecutive windows) if it is larger than that of independent windows. The interval is Student's, with the
    degrees of freedom of the batches, or of the windows if there are fewer than 16.
    """
    n, mean = len(losses), float(losses.mean())
    if n < 2:
        return Estimate(mean, None, None)
    error, freedom = float(losses.std(ddof=1)) / math.sqrt(n), n - 1
    batches = math.isqrt(n)
    if batches >= 4:
        means = np.array([part.mean() for part in np.array_split(losses, batches)])
        error, freedom = max(error, float(means.std(ddof=1)) / math.sqrt(batches)), batches - 1
    half = float(stats.t.ppf(0.975, freedom)) * error
    return Estimate(mean, error, (mean - half, mean + half))
