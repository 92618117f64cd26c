"""Text from a model, one token at a time, on one rank or on many in step.

It knows the model only as a function from tokens to logits, so that the engine's partitioned one serves as well as a plain one.

    deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --sample_tokens 200     # at the end of a run
"""

from collections.abc import Callable

import torch


@torch.no_grad()
def generate(
    forward: Callable[[torch.Tensor], torch.Tensor],
    prompt_ids: list[int],
    n_tokens: int,
    seq_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """`prompt_ids` followed by `n_tokens` sampled ids.

    forward: int64 tokens (1, T) on the CPU -> logits (1, T, vocab_size), T at most seq_len; moving tokens to the device and
    setting the model to evaluation are the caller's. Beyond seq_len the window slides.
    temperature: divides the logits; 0 takes the likeliest token. top_k: only the k likeliest are drawn from; None, all.
    generator: a CPU generator, seeded alike on every rank.

    Every rank calls `forward` exactly n_tokens times with the same lengths, and nothing ends early: ZeRO-3 gathers weights in
    each call, and a rank that stopped would leave the others waiting.
    Raises ValueError, one line, for values that make no sense.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty: begin with at least one token (the end-of-text token will do)")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: it must be 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}: it must be at least 1, or left out")
    ids = list(prompt_ids)
    for _ in range(n_tokens):
        window = torch.tensor([ids[-seq_len:]], dtype=torch.int64)  # (1, T)
        logits = forward(window)[0, -1].float().cpu()  # (1, T, V) -> (V,)
        ids.append(_pick(logits, temperature, top_k, generator))
    return ids


def _pick(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> int:
    """One token id from logits (V,)."""
    if temperature == 0:
        return int(logits.argmax())
    logits, ids = logits.topk(min(top_k or len(logits), len(logits)))  # (k,), likeliest first
    probabilities = torch.softmax(logits / temperature, dim=0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
