"""Causal attention in blocks of queries, from batched matrix products, for CPUs.

torch's flash kernel for CPUs multiplies small tiles of one head after another. Without AMX, this reaches only a fraction of the speed of
one product over all heads. Here the queries are divided into blocks, and each block reads only the keys up to its own end, so most of the
scores that the causal mask hides are never computed. Dao et al., FlashAttention-2, arXiv 2307.08691, section 3.3 skips the same blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from model.gpt import with_heads
from model.layout import DocumentBounds, Mask

#: Queries of a block. Forward and backward, bf16, two cores without AMX, in blocks of 64 and of 128: 8 x 256 tokens, 6 heads of 64, 7.3 and
#: 6.8 ms, torch's flash kernel 18; 4 x 1,024 tokens, 12 heads, 112 and 111 ms, torch's 138.
QUERIES = 128
#: Up to this length the probabilities are kept for the backward pass; for longer sequences they are recomputed.
KEPT_LENGTH = 512


def blockwise_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, dropout: float) -> torch.Tensor:
    """Causal self-attention, q (B, T, n_head, d_head) -> (B, T, n_head d_head): what `model.gpt.attend` computes.

    k, v: (B, T, n_kv_head, d_head); shared heads are repeated for the batched matmuls.
    mask: None for the causal mask over whole rows.
    dropout: must be 0; `model.gpt.attend` supports other rates.
    """
    assert not dropout, "the technique leaves models with dropout to torch"
    k, v = with_heads(k, q.shape[2]), with_heads(v, q.shape[2])
    if isinstance(mask, DocumentBounds):  # of rows in one: (B, T, ., .) -> (1, B T, ., .)
        one = (part.flatten(0, 1).unsqueeze(0) for part in (q, k, v))
        return _BlockwiseAttention.apply(*one, None, mask.lengths).view(*q.shape[:2], -1)
    return _BlockwiseAttention.apply(q, k, v, mask, [q.shape[1]])


def attention_blocks(lengths: Iterable[int]) -> list[tuple[int, int, int, int]]:
    """For each block, the start and end of its queries, and of their document. lengths: of the documents, one after another."""
    found, first = [], 0
    for length in lengths:
        last = first + length
        found += [(start, min(start + QUERIES, last), first, last) for start in range(first, last, QUERIES)]
        first = last
    return found


def _probabilities(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, start: int, end: int, first: int) -> torch.Tensor:
    """The probabilities with which queries `start` to `end` attend to keys `first` to `end`, in their dtype.

    q, k (B H, T, D) -> (B H, end - start, end - first).

    Scores and softmax are in fp32, as in torch's kernels: a score of 20 in bf16 is off by up to 0.06, and its probability by 6%.
    """
    scaled = q[:, start:end].float() * (1 / math.sqrt(q.shape[2]))
    scores = torch.bmm(scaled, k[:, first:end].float().transpose(1, 2))
    if mask is None:
        hidden = torch.full((end - start, end - start), -torch.inf, device=q.device).triu_(1)
        scores[..., start - first :] += hidden  # keys before `start` are seen by all of these queries
    else:
        part = mask[:, :, start:end, :end]
        scores.view(len(part), -1, end - start, end).add_(part)  # (B H, t, end) -> (B, H, t, end) + (B, 1, t, end)
    return torch.softmax(scores, dim=-1, out=scores).to(q.dtype)


class _BlockwiseAttention(torch.autograd.Function):
    """Hand-written forward and backward: autograd would copy the gradient of every slice into a tensor of full size."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        *qkv, mask, lengths = inputs
        B, T, H, D = qkv[0].shape
        # 3 x (B, T, H, D) -> 3 x (B H, T, D), contiguous for the batched matmuls
        q, k, v = (part.transpose(1, 2).reshape(B * H, T, D) for part in qkv)
        y, kept, ctx.blocks = torch.empty_like(q), [], attention_blocks(lengths)
        for start, end, first, _ in ctx.blocks:
            p = _probabilities(q, k, mask, start, end, first)
            torch.bmm(p, v[:, first:end], out=y[:, start:end])
            if T <= KEPT_LENGTH:
                kept.append(p)
        ctx.save_for_backward(q, k, v, mask, *kept)
        return y.view(B, H, T, D).transpose(1, 2).reshape(B, T, H * D)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, *kept = ctx.saved_tensors
        BH, T, D = q.shape
        B = len(gradient)
        dy = gradient.view(B, T, -1, D).transpose(1, 2).reshape(BH, T, D)  # (B, T, H D) -> (B H, T, D)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for block, (start, end, first, last) in reversed([*enumerate(ctx.blocks)]):
            p = kept[block] if kept else _probabilities(q, k, mask, start, end, first)
            dp = torch.bmm(dy[:, start:end], v[:, first:end].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            torch.bmm(ds, k[:, first:end], out=dq[:, start:end])
            beta = int(end < last)  # a document's last block, which covers all keys, writes; the others add
            torch.baddbmm(dk[:, first:end], ds.transpose(1, 2), q[:, start:end], beta=beta, out=dk[:, first:end])
            torch.baddbmm(dv[:, first:end], p.transpose(1, 2), dy[:, start:end], beta=beta, out=dv[:, first:end])
        scale = 1 / math.sqrt(D)
        parts = (dq.mul_(scale), dk.mul_(scale), dv)
        return *(part.view(B, -1, T, D).transpose(1, 2) for part in parts), None, None  # 3 x (B, T, H, D)
