"""The loss of a model on the windows of a split, window by window: what `launch/score.py` prints, as numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from data_pipeline.loader import Loader
from data_pipeline.shards import Corpus, Split
from data_pipeline.tokenizer import Tokenizer
from model.gpt import GPT

#: Tokens of a pass, about: on a CPU the logits of 2,048 tokens and 50,304 ids are 412 MB; a GPU wants more at once.
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
#: Tokens that are decoded at a time to count the bytes of a text whose corpus has not counted them.
DECODED_TOKENS = 1 << 20


@dataclass(frozen=True)
class Estimate:
    """A mean loss, nats a token, and its standard error; None where one window gives none."""

    loss: float
    error: float | None

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def perplexity_error(self) -> float | None:
        """To first order: the derivative of exp is itself."""
        return None if self.error is None else self.perplexity * self.error


@torch.inference_mode()
def window_losses(
    model: GPT, corpus: Corpus, split: Split, windows: int, batch_size: int | None = None, watch: Callable[[int], None] = lambda done: None
) -> np.ndarray:
    """The mean loss of each of `windows` windows of seq_len + 1 tokens, spread evenly over `split`: float64 (windows,), nats a token.

    They are those, in their order, that training evaluates where it evaluates so many. watch: is told how many more are done.
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
    """The mean of the windows' losses, with the standard error that their spread gives.

    Neighbours of one document are alike, and the windows say less than as many independent ones would: the error is that of means of
    runs of consecutive windows (batch means, Flegal and Jones, arXiv 0811.1729: about sqrt(n) runs), where it is the larger one.
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


def training_windows(total: int, asked: int) -> np.ndarray:
    """Which of `total` windows an evaluation reads that asks for `asked` of them: `Loader.validation_batches`'s choice."""
    count = min(asked, total)
    return np.arange(count, dtype=np.int64) * total // count


def text_bytes(corpus: Corpus, split: Split, tokenizer: Tokenizer | None) -> int | None:
    """How many bytes the text of `split` has, ends of documents not counted: as its manifest says, else decoded; None: not to be known."""
    counted = corpus.manifest["splits"][split.name].get("bytes")
    if isinstance(counted, int) and counted > 0:
        return counted
    if tokenizer is None:
        return None
    total = 0
    pairs = split.windows(1)  # a token and its successor, begun at every token but the last
    for start in range(0, pairs, DECODED_TOKENS):
        rows = split.read(np.arange(start, min(start + DECODED_TOKENS, pairs)), 1)  # (pairs, 2)
        ids = rows[:, 1] if start else np.concatenate([rows[0, :1], rows[:, 1]])
        total += len(tokenizer.decode(ids[ids != corpus.eot_id] if corpus.eot_id is not None else ids).encode())
    return total or None
