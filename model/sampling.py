"""Text from a model, one token at a time, on one rank or on many in step.

It knows the model only as a function from texts to the logits of what comes next, so that the engine's partitioned one serves as well as
a plain one, and one that keeps what it has read as well as one that does not.

    deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --sample_tokens 200     # at the end of a run
    python launch/generate.py runs/demo --prompt "def "
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from model.gpt import GPT

#: Texts of equal length -> logits (texts, vocab_size) of the token that follows each.
NextLogits = Callable[[Sequence[list[int]]], torch.Tensor]
#: Temperatures below are this one: logits divided by less leave fp32, and the likeliest token is all that is left long before.
COLDEST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits.

    temperature: divides the logits; 0 takes the likeliest token. top_k: only the k likeliest are drawn from; None, all.
    top_p: of those, the fewest likeliest whose probabilities sum up to p (nucleus sampling, Holtzman et al., arXiv 1904.09751).
    no_repeat_ngram_size: no n tokens in a row occur twice in a text, the prompt included (Paulus et al., arXiv 1705.04304,
    section 2.5); for a token that has no choice left, the rule is off.

    Raises ValueError, one line, for values that make no sense.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    no_repeat_ngram_size: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}: it must be 0 (the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: it must be at least 1, or left out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1, or left out")
        if self.no_repeat_ngram_size is not None and self.no_repeat_ngram_size < 1:
            raise ValueError(f"no_repeat_ngram_size is {self.no_repeat_ngram_size}: it must be at least 1, or left out")

    def pick(self, logits: torch.Tensor, banned: Sequence[int] = (), generator: torch.Generator | None = None) -> int:
        """One token id, not one of `banned`, from logits fp32 (V,) on the CPU."""
        if 0 < len(banned) < len(logits):
            logits = logits.index_fill(0, torch.tensor(banned), -torch.inf)
        if self.temperature == 0:
            return int(logits.argmax())
        n_ids = len(logits)
        logits, ids = logits.topk(min(self.top_k or n_ids, n_ids))  # (k,), likeliest first
        probabilities = torch.softmax(logits / max(self.temperature, COLDEST), dim=0)
        if self.top_p is not None:
            likelier = probabilities.cumsum(0) - probabilities  # than this one, in sum: below p for those that are needed to reach it
            likelier[0] = -1  # the likeliest is always one of them, whatever a rounding made of its own difference, and of a tiny top_p
            probabilities = probabilities.masked_fill(likelier >= self.top_p, 0)
        # In the order of ids and not of probabilities: where two are alike, a rounding of the logits would change which one a draw means.
        of_ids = torch.zeros(n_ids).index_copy(0, ids, probabilities)  # (V,)
        return int(torch.multinomial(of_ids, 1, generator=generator))


class Followers:
    """The tokens that would repeat n tokens of a text: those that have followed its last n - 1 before."""

    def __init__(self, size: int, ids: list[int]):
        self._size, self._ids = size, ids
        self._after: dict[tuple[int, ...], set[int]] = {}
        for end in range(size, len(ids) + 1):
            self._note(end)

    def _note(self, end: int) -> None:
        *before, last = self._ids[end - self._size : end]
        self._after.setdefault(tuple(before), set()).add(last)

    def grown(self) -> None:
        """The text has one token more."""
        if len(self._ids) >= self._size:
            self._note(len(self._ids))

    def banned(self) -> list[int]:
        """What may not follow now."""
        last = self._ids[len(self._ids) - self._size + 1 :]
        return sorted(self._after.get(tuple(last), ())) if len(last) == self._size - 1 else []


def window_start(length: int, seq_len: int, slide: int = 1) -> int:
    """Where the window of a model with `seq_len` positions begins in a text of `length` tokens: it moves by `slide` at a time."""
    return -(-max(0, length - seq_len) // slide) * slide


class Recomputing:
    """The next token's logits by a pass over the whole window, for every token anew.

    forward: int64 tokens (B, T) on the CPU -> logits (B, T, vocab_size), T at most seq_len; moving tokens to the device and setting the
    model to evaluation are the caller's.
    """

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], seq_len: int, slide: int = 1):
        self._forward, self._seq_len, self._slide = forward, seq_len, slide

    def __call__(self, texts: Sequence[list[int]]) -> torch.Tensor:
        start = window_start(len(texts[0]), self._seq_len, self._slide)
        return self._forward(torch.tensor([ids[start:] for ids in texts], dtype=torch.int64))[:, -1]  # (B, T, V) -> (B, V)


class Cached:
    """The same, but what has been read is kept, for as long as the window does not move; positions are learned ones, which move with it.

    Calls belong together: their texts are those of the call before with one token more, or others from the beginning on.
    """

    def __init__(self, model: GPT, slide: int = 1):
        from model.cache import Reader

        self._reader, self._seq_len, self._slide = Reader(model), model.config.seq_len, slide
        self._device = model.wte.weight.device
        self._start = self._rows = 0

    def __call__(self, texts: Sequence[list[int]]) -> torch.Tensor:
        reader, length, rows = self._reader, len(texts[0]), len(texts)
        start = window_start(length, self._seq_len, self._slide)
        read = self._start + reader.length
        if start != self._start or rows != self._rows or read != length - 1:
            reader.restart()
            self._start, self._rows, read = start, rows, start
        # Several samples of one prompt: it is read once.
        once = reader.length == 0 and rows > 1 and all(ids == texts[0] for ids in texts[1:])
        tokens = torch.tensor([ids[read:] for ids in (texts[:1] if once else texts)], dtype=torch.int64)
        logits = reader.read(tokens.to(self._device))
        if once:
            reader.repeat(rows)
            logits = logits.expand(rows, -1)
        return logits


@torch.no_grad()
def stream(
    next_logits: NextLogits,
    prompt_ids: list[int],
    n_tokens: int,
    sampling: Sampling,
    generators: Sequence[torch.Generator | None] = (None,),
    end: int | None = None,
) -> Iterator[list[int | None]]:
    """Texts that begin with `prompt_ids`, one for each of `generators` (on the CPU), at the same time: yields the next token of each.

    A text that has drawn `end`, which is yielded, has None from then on, and when all have, it is over; else after `n_tokens`. A text
    depends on its own generator alone, not on how many others there are (but for the rounding of larger matrix products).
    Raises ValueError, one line, for a prompt without tokens, and for logits that are not finite: nothing can be drawn from them.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty: begin with at least one token (the end-of-text token will do)")
    texts = [list(prompt_ids) for _ in generators]
    followers = [Followers(sampling.no_repeat_ngram_size, ids) if sampling.no_repeat_ngram_size else None for ids in texts]
    going = [True] * len(texts)
    for _ in range(n_tokens):
        logits = next_logits(texts).float().cpu()  # (B, V)
        if not bool(logits[going].isfinite().all()):
            raise ValueError("the logits of the next token are not finite")
        drawn: list[int | None] = []
        for row, (ids, seen, generator) in enumerate(zip(texts, followers, generators, strict=True)):
            if going[row]:
                ids.append(sampling.pick(logits[row], seen.banned() if seen else (), generator))
                if seen:
                    seen.grown()
                drawn.append(ids[-1])
                going[row] = ids[-1] != end
            else:
                ids.append(ids[-1])  # its row goes on in the batch, and nobody reads it
                drawn.append(None)
        yield drawn
        if not any(going):
            return


def generate(
    forward: Callable[[torch.Tensor], torch.Tensor],
    prompt_ids: list[int],
    n_tokens: int,
    seq_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """`prompt_ids` followed by `n_tokens` sampled ids; `forward` as in `Recomputing`, the window slides beyond seq_len.

    generator: a CPU generator, seeded alike on every rank.

    Every rank calls `forward` exactly n_tokens times with the same lengths, and nothing ends early: ZeRO-3 gathers weights in
    each call, and a rank that stopped would leave the others waiting.
    Raises ValueError, one line, for values that make no sense.
    """
    drawn = stream(Recomputing(forward, seq_len), prompt_ids, n_tokens, Sampling(temperature, top_k), [generator])
    return [*prompt_ids, *(token for tokens in drawn for token in tokens if token is not None)]
