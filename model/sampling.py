"""Samples text from a model, one token at a time.

    python launch/generate.py runs/demo --prompt "def "

A model is given as a function from a text to the logits of the next token, such as a KV cache (`model/cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

#: A text, at least one token -> logits (vocab_size,) of the token that follows it.
NextLogits = Callable[[list[int]], torch.Tensor]


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled from its logits.

    Args:
        temperature: divides the logits; 0 selects the most likely token.
        top_k: sample from the k most likely tokens; None for all.
        top_p: of those, sample from the smallest set of most likely tokens whose probabilities sum to p (nucleus sampling, Holtzman et al.,
            arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def pick(self, logits: torch.Tensor, generator: torch.Generator | None = None) -> int:
        """Samples the next token from its logits, fp32 (V,) on the CPU."""
        if self.temperature == 0:
            return int(logits.argmax())
        n_ids = len(logits)
        logits, ids = logits.topk(min(self.top_k or n_ids, n_ids))  # (k,), most likely first
        probabilities = torch.softmax(logits / self.temperature, dim=0)
        if self.top_p is not None:
            before = probabilities.cumsum(0) - probabilities  # sum over more likely tokens
            before[0] = -1  # the most likely token is always kept
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        # Ordered by id: ordered by probability, rounding of the logits could exchange two equally likely tokens.
        by_id = torch.zeros(n_ids).index_copy(0, ids, probabilities)  # (V,)
        return int(torch.multinomial(by_id, 1, generator=generator))


@torch.no_grad()
def stream(
    next_logits: NextLogits,
    prompt_ids: list[int],
    n_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    end: int | None = None,
) -> Iterator[int]:
    """Yields at most `n_tokens` sampled tokens that continue `prompt_ids`; stops after the token `end`, which is yielded too.

    Args:
        generator: on the CPU.

    Raises:
        ValueError: the prompt is empty; the message is one line.
        FloatingPointError: the logits are not finite; the message is one line.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty: begin with at least one token, such as the end-of-text token")
    ids = list(prompt_ids)
    for _ in range(n_tokens):
        logits = next_logits(ids).float().cpu()  # (V,)
        if not bool(logits.isfinite().all()):
            raise FloatingPointError("the logits of the next token are not finite")
        ids.append(sampling.pick(logits, generator))
        yield ids[-1]
        if ids[-1] == end:
            return
