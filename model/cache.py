"""A KV cache: keeps the keys and values of previous tokens, so that the next token costs one token's work instead of the whole text's.

    python launch/generate.py runs/demo --prompt "def "

It has its own forward pass, for one text in evaluation mode; `tests/test_sampling.py` compares it with `GPT.forward`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F

from model.gpt import GPT, Block
from model.layout import document_starts

#: Parts into which `linear_of_one_row` splits a matrix; 2 to 32 are equally fast.
PARTS = 16


def linear_of_one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` for a single row, (..., in) -> (..., out), through a batched product.

    The time is that of reading the matrix. MKL's batched fp32 product reads it faster than its plain product: 2.9 times for the matrices of
    `micro`, 2.3 times for those of `gpt2`, on two cores of an AMD EPYC with torch 2.13. In bf16 it is slower.
    """
    n_out, n_in = weight.shape
    parts = math.gcd(n_out, PARTS)
    column = x.reshape(1, n_in).t()  # (in, 1) as a transposed row: with the strides of a column the product is ten times slower
    y = torch.bmm(weight.view(parts, -1, n_in), column.expand(parts, -1, -1))  # (parts, out / parts, 1)
    y = y.view(*x.shape[:-1], n_out)
    return y if bias is None else y + bias


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
        tokens, index = torch.tensor([window], device=device), torch.arange(end, device=device)  # (1, end), (end,)
        starts = torch.zeros_like(tokens) if config.document_end is None else document_starts(tokens, config.document_end)  # (1, end)
        positions = (index - starts)[:, start:]  # (1, T), T = end - start
        mask = (index >= starts[0, start:, None]) & (index <= index[start:, None])  # (T, end): what a token attends to
        one_row = end - start == 1 and (device.type, self._kept.dtype) == ("cpu", torch.float32)
        linear, grouped = linear_of_one_row if one_row else F.linear, config.n_kv_head < config.n_head
        x = model.embed(tokens[:, start:], positions)  # (1, T, C)
        rotation = model.wpe.rotation(positions, x.dtype)
        for block, (keys, values) in zip(cast("Iterable[Block]", model.h), self._kept, strict=True):
            attn, mlp = block.attn, block.mlp
            heads = attn.heads(linear(block.ln_1(x), attn.c_attn.weight, attn.c_attn.bias), rotation)
            q, keys[:, :, start:end], values[:, :, start:end] = (part.transpose(1, 2) for part in heads)  # (1, heads, T, d_head)
            y = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=grouped)
            x = x + linear(y.transpose(1, 2).flatten(2), attn.c_proj.weight, attn.c_proj.bias)
            hidden = mlp.act(linear(block.ln_2(x), mlp.c_fc.weight, mlp.c_fc.bias))
            x = x + linear(hidden, mlp.c_proj.weight, mlp.c_proj.bias)
        self._window = window
        return model.lm_head.logits(model.ln_f(x[:, -1]), linear)[0]  # (1, C) -> (V,)
