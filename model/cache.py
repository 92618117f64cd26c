"""The keys and values of what a GPT has read, kept, so that the next token costs one token's work and not the whole text's.

    python launch/generate.py runs/demo --prompt "def "

The model is as it was trained: while a pass lasts, each block's `attend` is one that adds to the kept keys and values and attends to
all of them, and on a CPU the matrices multiply few rows in another way. Training never comes here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F

from model.gpt import GPT, Block, Product

#: Up to so many rows `linear_of_few_rows` is the faster one, in fp32 on a CPU.
FEW_ROWS = 8
#: Into which a matrix is cut; 2 to 32 measured alike.
PARTS = 16


def linear_of_few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` in another order of computation: (..., in) -> (..., out), weight (out, in), bias (out,) or None.

    A row or a few against a large matrix is bound by how fast the matrix is read, and MKL's plain product reads it at a fraction of what
    its batched one does. The matrices of `micro` and `gpt2` in fp32, two cores of an AMD EPYC, torch 2.13: 2.9 and 2.3 times as fast for
    one row, 2.6 and 2.5 for four, 1.5 and 1.4 for eight. In bf16 it is slower.
    """
    n_out, n_in = weight.shape
    parts = math.gcd(n_out, PARTS)
    columns = x.reshape(-1, n_in).t()  # (in, rows)
    y = torch.bmm(weight.view(parts, -1, n_in), columns.expand(parts, -1, -1))  # (parts, out / parts, rows)
    y = y.view(n_out, -1).t()  # (rows, out)
    return (y if bias is None else y + bias).reshape(*x.shape[:-1], n_out)


class Reader:
    """A GPT that reads rows of tokens part by part, at most `seq_len` in all, and says what comes next.

    Kept are 2 n_layer rows seq_len d_model numbers: for gpt2 (124 M) in fp32 75 MB a row. `length` is how many tokens of each row have
    been read. With `config.document_end`, a row may hold several documents, as in training.
    """

    def __init__(self, model: GPT):
        self.model, self.length = model, 0
        self._linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        self._kept = torch.empty(0)
        # Of each row where its document begins, and whether it has just ended.
        self._starts, self._ended = torch.empty(0), torch.empty(0)

    def restart(self) -> None:
        """Forget everything."""
        self.length = 0

    def repeat(self, rows: int) -> None:
        """Of the one row that has been read make `rows` equal ones."""
        # (n_layer, 2, 1, n_head, seq_len, d_head) -> (n_layer, 2, rows, n_head, seq_len, d_head)
        self._kept = self._kept.repeat(1, 1, rows, 1, 1, 1)
        self._starts, self._ended = self._starts.repeat(rows), self._ended.repeat(rows)

    @torch.no_grad()
    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits (B, vocab_size) of what follows `tokens`, int64 (B, T) on the model's device, which follow what has been read.

        Raises ValueError where there are more than `seq_len` in all.
        """
        model, config = self.model, self.model.config
        B, T = tokens.shape
        end = self.length + T
        if end > config.seq_len:
            raise ValueError(f"a sequence of {end} tokens: this model has positions for {config.seq_len} (seq_len)")
        if self.length == 0:
            shape = (config.n_layer, 2, B, config.n_head, config.seq_len, config.d_model // config.n_head)
            if self._kept.shape != shape:
                self._kept = torch.empty(shape, dtype=model.wte.weight.dtype, device=tokens.device)
            self._starts = torch.zeros(B, dtype=torch.int64, device=tokens.device)
            self._ended = torch.zeros(B, dtype=torch.bool, device=tokens.device)
        index = torch.arange(self.length, end, device=tokens.device)  # (T,)
        if config.document_end is None:
            positions = index
            # The first part is causal by itself, and a single token sees all there is.
            mask = None if T == 1 or self.length == 0 else torch.arange(end, device=tokens.device) <= index[:, None]  # (T, end)
        else:
            starts = self._document_starts(tokens, index, config.document_end)  # (B, T)
            positions = index - starts
            seen = torch.arange(end, device=tokens.device)  # (end,)
            mask = ((seen >= starts[..., None]) & (seen <= index[:, None]))[:, None]  # (B, T, end) -> (B, 1, T, end)
        x = model.wte(tokens) + model.wpe(positions)  # (B, T, C)
        linear = linear_of_few_rows if B * T <= FEW_ROWS and (x.device.type, x.dtype) == ("cpu", torch.float32) else F.linear
        with self._reading(mask, linear):
            x = model.block_runner(model.h, x)
        self.length = end
        return model.lm_head.logits(model.ln_f(x[:, -1]), linear)  # (B, C) -> (B, V)

    def _document_starts(self, tokens: torch.Tensor, index: torch.Tensor, document_end: int) -> torch.Tensor:
        """`model.gpt.document_starts`, which goes on from what has been read: (B, T) -> int64 (B, T)."""
        ends = tokens == document_end
        after_end = torch.cat([self._ended[:, None], ends[:, :-1]], dim=1)
        starts = torch.where(after_end, index, self._starts[:, None]).cummax(dim=1).values
        self._starts, self._ended = starts[:, -1], ends[:, -1]
        return starts

    @contextlib.contextmanager
    def _reading(self, mask: torch.Tensor | None, linear: Product) -> Iterator[None]:
        """Inside, the blocks attend to what is kept, and their matrices multiply by `linear`."""
        blocks = list(cast("Iterable[Block]", self.model.h))
        before = [block.attn.attend for block in blocks]
        for block, kept in zip(blocks, self._kept, strict=True):
            block.attn.attend = partial(self._attend, kept, mask)
        replaced = [] if linear is F.linear else self._linears
        for module in replaced:
            module.__dict__["forward"] = lambda x, own=module: linear(x, own.weight, own.bias)
        try:
            yield
        finally:
            for block, attend in zip(blocks, before, strict=True):
                block.attn.attend = attend
            for module in replaced:
                del module.__dict__["forward"]

    def _attend(
        self, kept: torch.Tensor, mask: torch.Tensor | None, qkv: torch.Tensor, training_mask: torch.Tensor | None, dropout: float
    ) -> torch.Tensor:
        """What `model.gpt.attend` is for whole texts: qkv (B, T, 3, n_head, d_head) -> (B, T, n_head d_head).

        kept: (2, B, n_head, seq_len, d_head), of one block. mask: what a token sees, (T, end) or (B, 1, T, end); None: causality.
        """
        T = qkv.shape[1]
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # 3 x (B, n_head, T, d_head)
        end = self.length + T
        kept[0, :, :, self.length : end] = k
        kept[1, :, :, self.length : end] = v
        keys, values = kept[:, :, :, :end]  # 2 x (B, n_head, end, d_head)
        causal = mask is None and T > 1  # only the first part has no mask
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal)
        return y.transpose(1, 2).flatten(2)  # (B, n_head, T, d_head) -> (B, T, C)
