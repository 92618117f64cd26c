"""Text from a model, one token at a time.

    python launch/generate.py runs/demo --prompt "def "

A model is only a function from a text to the logits of the next token: a plain one, one with a KV cache (`model/cache.py`), or the engine's
partitioned one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

#: A text, at least one token -> logits (vocab_size,) of the token that follows it.
NextLogits = Callable[[list[int]], torch.Tensor]
#: The lowest temperature that divides: lower ones overflow fp32, and the likeliest token has probability 1 long before.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits.

    temperature: divides the logits; 0 takes the likeliest token. top_k: draw from the k likeliest tokens only; None: from all.
    top_p: of those, draw from the fewest likeliest whose probabilities sum to p (nucleus sampling, Holtzman et al., arXiv 1904.09751).
    no_repeat_ngram_size: no sequence of n tokens occurs twice in a text, the prompt included (Paulus et al., arXiv 1705.04304,
    section 2.5), unless no other token is left.

    Raises ValueError, one line, for values out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    no_repeat_ngram_size: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}: it must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: it must be at least 1, or left out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1, or left out")
        if self.no_repeat_ngram_size is not None and self.no_repeat_ngram_size < 1:
            raise ValueError(f"no_repeat_ngram_size is {self.no_repeat_ngram_size}: it must be at least 1, or left out")

    def pick(self, logits: torch.Tensor, text: list[int], generator: torch.Generator | None = None) -> int:
        """The token id that follows `text`, from logits fp32 (V,) on the CPU."""
        banned = repeated_by(text, self.no_repeat_ngram_size) if self.no_repeat_ngram_size else []
        if 0 < len(banned) < len(logits):
            logits = logits.index_fill(0, torch.tensor(banned), -torch.inf)
        if self.temperature == 0:
            return int(logits.argmax())
        n_ids = len(logits)
        logits, ids = logits.topk(min(self.top_k or n_ids, n_ids))  # (k,), likeliest first
        probabilities = torch.softmax(logits / max(self.temperature, MIN_TEMPERATURE), dim=0)
        if self.top_p is not None:
            before = probabilities.cumsum(0) - probabilities  # the sum of the likelier tokens
            before[0] = -1  # the likeliest is always kept, whatever the rounding
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        # By id, not by probability: where two tokens are equally likely, the rounding of the logits must not change what a draw means.
        by_id = torch.zeros(n_ids).index_copy(0, ids, probabilities)  # (V,)
        return int(torch.multinomial(by_id, 1, generator=generator))


def repeated_by(text: list[int], n: int) -> list[int]:
    """The tokens, sorted, after which the last n tokens of `text` would occur in it twice."""
    last = text[max(0, len(text) - n + 1) :]
    return sorted({text[end] for end in range(n - 1, len(text)) if text[end - n + 1 : end] == last})


def recomputed(forward: Callable[[torch.Tensor], torch.Tensor], seq_len: int) -> NextLogits:
    """The next token's logits by a forward pass over the last `seq_len` tokens, without a cache.

    forward: int64 tokens (1, T) on the CPU -> logits (1, T, vocab_size). The caller moves tokens to the device and sets the model to
    evaluation mode.
    """
    return lambda ids: forward(torch.tensor([ids[-seq_len:]], dtype=torch.int64))[0, -1]


@torch.no_grad()
def stream(
    next_logits: NextLogits,
    prompt_ids: list[int],
    n_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    end: int | None = None,
) -> Iterator[int]:
    """Yields at most `n_tokens` sampled tokens that continue `prompt_ids`; stops after the token `end`, which it yields too.

    generator: on the CPU. Raises ValueError, one line, for an empty prompt and for logits that are not finite.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty: begin with at least one token, such as the end-of-text token")
    ids = list(prompt_ids)
    for _ in range(n_tokens):
        logits = next_logits(ids).float().cpu()  # (V,)
        if not bool(logits.isfinite().all()):
            raise ValueError("the logits of the next token are not finite")
        ids.append(sampling.pick(logits, ids, generator))
        yield ids[-1]
        if ids[-1] == end:
            return
