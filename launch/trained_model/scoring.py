"""Score a trained model on the windows of a corpus: what `launch/score.py` prints, as numbers."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from data_pipeline.loader import Loader
from data_pipeline.shards import Corpus, Split, open_corpus
from data_pipeline.tokenizer import Tokenizer
from launch.config.hardware import device_type
from launch.errors import UsageError, print_once
from launch.formats.folder_tokenizer import difference, tokenizer_of_corpus
from launch.trained_model.flags import DTYPES
from launch.trained_model.load import TrainedModel, open_trained
from model.gpt import GPT

#: Tokens of a forward pass. On a CPU the fp32 logits of 2,048 tokens and 50,304 ids take 412 MB; a GPU needs larger passes.
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
#: Tokens decoded at a time to count the bytes of a text whose corpus has not counted them.
DECODED_TOKENS = 1 << 20


class Estimate(NamedTuple):
    """A mean loss, nats per token, and its standard error, which is None for a single window."""

    loss: float
    error: float | None


def score(flags: argparse.Namespace) -> dict[str, Any]:
    """The score that the flags of `launch/score.py` ask for, as a JSON object. Raises UsageError, one line."""
    trained = open_trained(flags.source, checkpoint=flags.checkpoint)
    corpus, notes = _corpus(trained, flags.data)
    for note in notes if not flags.quiet else ():
        print_once(f"note: {note}", sys.stderr)
    split: Split = getattr(corpus, flags.split)
    seq_len, device = trained.config.seq_len, torch.device(device_type())
    total = split.windows(seq_len)
    windows = min(flags.windows or total, total)
    model = trained.load_model().to(device, getattr(torch, DTYPES[flags.dtype]))
    start = time.monotonic()
    # disable=None: no bar where standard error is not a terminal
    with tqdm(total=windows, unit="window", dynamic_ncols=True, leave=False, disable=True if flags.quiet else None) as bar:
        losses = window_losses(model, corpus, split, windows, flags.batch_size, bar.update)
    seconds = time.monotonic() - start
    found = estimate(losses)
    if not math.isfinite(found.loss):
        raise UsageError(f"{trained.folder}: the loss is {found.loss} in {flags.dtype}; try --dtype fp32, or an earlier --checkpoint")
    n_bytes = text_bytes(corpus, split, tokenizer_of_corpus(corpus)[0])
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
    }


def _corpus(trained: TrainedModel, data: str | None) -> tuple[Corpus, list[str]]:
    """The corpus, whose ids must be those of the model, and notes. Raises UsageError without a corpus, or for another tokenizer's."""
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
        raise UsageError(f"--data {data}: has {corpus.vocab_size:,} ids, but the model {vocab_size:,}; use the model's tokenizer")
    if trained.tokenizer is None and run is not None:
        raise UsageError(f"--data {data}: is not the run's corpus, and the run's tokenizer cannot be loaded: {trained.no_tokenizer}")
    own, reason = tokenizer_of_corpus(corpus)
    if trained.tokenizer is None or own is None:
        return corpus, [f"whether {data} was made with the model's tokenizer is unknown: {trained.no_tokenizer or reason}"]
    if (differs := difference(corpus, own, trained.tokenizer)) is not None:
        raise UsageError(
            f"--data {data}: was made with another tokenizer than the model's: {differs}; prepare the text again with --tokenizer and the"
            " model's tokenizer"
        )
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
    for tokens, _ in loader.validation_batches(windows, batch_size):
        logits = model(tokens[:, :-1])  # (B, T, V)
        for of_window, targets in zip(logits, tokens[:, 1:], strict=True):
            losses.append(F.cross_entropy(of_window.float(), targets))
        watch(len(tokens))
    return torch.stack(losses).double().cpu().numpy()


def estimate(losses: np.ndarray) -> Estimate:
    """The mean of the windows' losses and its standard error.

    Neighbouring windows of one document are correlated. The error is therefore that of batch means (Flegal and Jones, arXiv 0811.1729:
    about sqrt(n) batches of consecutive windows) if it is larger than that of independent windows.
    """
    n = len(losses)
    if n < 2:
        return Estimate(float(losses.mean()), None)
    error = float(losses.std(ddof=1)) / math.sqrt(n)
    batches = math.isqrt(n)
    if batches >= 4:
        means = np.array([part.mean() for part in np.array_split(losses, batches)])
        error = max(error, float(means.std(ddof=1)) / math.sqrt(batches))
    return Estimate(float(losses.mean()), error)


def text_bytes(corpus: Corpus, split: Split, tokenizer: Tokenizer | None) -> int | None:
    """The bytes of the text of `split`, without ends of documents: from its manifest, otherwise decoded; None without a tokenizer."""
    counted = corpus.manifest["splits"][split.name].get("bytes")
    if isinstance(counted, int) and counted > 0:
        return counted
    if tokenizer is None:
        return None
    total = 0
    pairs = split.windows(1)  # one begins at every token but the last
    for start in range(0, pairs, DECODED_TOKENS):
        rows = split.read(np.arange(start, min(start + DECODED_TOKENS, pairs)), 1)  # (pairs, 2)
        ids = rows[:, 1] if start else np.concatenate([rows[0, :1], rows[:, 1]])
        total += len(tokenizer.decode(ids[ids != corpus.eot_id] if corpus.eot_id is not None else ids).encode())
    return total or None
