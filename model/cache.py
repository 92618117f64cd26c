"""A KV cache: keeps the keys and values of previous tokens, so that the next token costs one token's work instead of the whole text's.

    python launch/generate.py runs/demo --prompt "def "

It has its own forward pass, for one text in evaluation mode; `tests/test_sampling.py` compares it with `GPT.forward`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F

from model.gpt import GPT, Block
from model.layout import document_starts

#: Tokens that are computed at a time, so that the mask of a long text has at most this times its length elements.
PIECE = 1024


class KVCache:
    """The logits of the token that follows a text: a `model.sampling.NextLogits`.

    A call computes only the tokens after the prefix that its text shares with the text of the last call. Beyond `seq_len` tokens, the
    window and its positions move with every token, so the whole window is recomputed.

    The cache holds 2 n_layer seq_len n_kv_head d_head numbers: 75 MB for gpt2 (124 M) in fp32. Rotary keys are kept rotated.
    """

    def __init__(self, model: GPT):
        config, weight = model.config, model.wte.weight
        shape = (config.n_layer, 2, 1, config.n_kv_head, config.seq_len, config.d_head)
        self._model, self._window = model, list[int]()
        self._kept = torch.empty(shape, dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> torch.Tensor:
        """ids: the text, at least one token -> logits (vocab_size,)."""
        window, model, config = ids[-self._model.config.seq_len :], self._model, self._model.config
        shared = min(len(window) - 1, len(self._window))  # the last token is always computed
        start = next((i for i in range(shared) if window[i] != self._window[i]), shared)
        end, device = len(window), self._kept.device
        for stop in range(start + PIECE, end, PIECE):
            self(window[:stop])
            start = stop
        tokens, index = torch.tensor([window], device=device), torch.arange(end, device=device)  # (1, end), (end,)
        starts = torch.zeros_like(tokens) if config.document_end is None else document_starts(tokens, config.document_end)  # (1, end)
        positions = (index - starts)[:, start:]  # (1, T), T = end - start
        mask = (index >= starts[0, start:, None]) & (index <= index[start:, None])  # (T, end): what a token attends to
        grouped = config.n_kv_head < config.n_head
        x = model.embed(tokens[:, start:], positions)  # (1, T, C)
        rotation = model.wpe.rotation(positions, x.dtype)
        for block, (keys, values) in zip(cast("Iterable[Block]", model.h), self._kept, strict=True):
            attn = block.attn
            heads = attn.heads(attn.c_attn(block.ln_1(x)), rotation)
            q, keys[:, :, start:end], values[:, :, start:end] = (part.transpose(1, 2) for part in heads)  # (1, heads, T, d_head)
            y = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=grouped)
            x = x + attn.c_proj(y.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.ln_2(x))
        self._window = window
        return model.lm_head(model.ln_f(x[:, -1]))[0]  # (1, C) -> (V,)
