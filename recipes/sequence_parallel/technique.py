"""Sequence parallelism (Ulysses): consecutive ranks read the same rows, and each holds its slice of the sequence.

    deepspeed --num_gpus 2 launch/pretrain.py --recipe recipes/sequence_parallel

Jacobs et al., DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models, arXiv 2309.14509,
section 3. Before attention, an all-to-all exchanges slices of the sequence for heads; after it, another exchanges them back. The embedding,
the MLPs and the head see (B, T / N, C), and attention sees (B, T, C / N).

`RunForTechniques.data_rank` gives the ranks of a row the same tokens. DeepSpeed is told nothing: for it, all ranks have data of their own,
so ZeRO, checkpoints and clipping are those of any run. Its own ways divide the gradient by N once more at stage 3 (DeepSpeed#5248, #6582).
The loss of a rank is N x (sum over its own targets) / (targets of the whole rows), by `GPT.forward`, so the mean over all ranks, which ZeRO
takes, is the mean over all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch

from model.gpt import Attend, with_heads
from model.layout import Mask, RowPart
from recipes.technique import SEQUENCE_PARALLEL, Declaration, RunForTechniques, StepWork, Technique, divisors

#: Exchanges part i of (N, ...) with rank i of the group.
Exchange = Callable[[torch.Tensor], torch.Tensor]


class _Exchanged(torch.autograd.Function):
    """`exchange`, whose transpose is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange(gradient), None


def exchanging(attend: Attend, exchange: Exchange, ranks: int) -> Attend:
    """`attend` on whole rows and a share of the heads, for ranks that each have a slice of the row.

    The returned function gets q (B, T / ranks, n_head, d_head), k and v, with a mask of the whole rows, and returns (B, T / ranks, n_head
    d_head). `ranks` divides n_head. Heads of keys and values are repeated until `ranks` divides them too.
    """

    def attend_slices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, dropout: float) -> torch.Tensor:
        shared = math.lcm(k.shape[2], ranks)
        parts = [x.unflatten(2, (ranks, -1)) for x in (q, with_heads(k, shared), with_heads(v, shared))]  # (B, T / N, N, heads / N, d_head)
        sent = torch.cat(parts, dim=3).movedim(2, 0)  # (N, B, T / N, all heads / N, d_head): part i has the heads of rank i
        rows = _Exchanged.apply(sent, exchange).movedim(0, 1).flatten(1, 2)  # part i is slice i of the row: (B, T, all heads / N, d_head)
        q, k, v = rows.split([part.shape[3] for part in parts], dim=2)
        y = attend(q, k, v, mask, dropout)  # (B, T, n_head / N d_head)
        slices = y.unflatten(1, (ranks, -1)).movedim(1, 0)  # (N, B, T / N, n_head / N d_head): part i is slice i of the row
        return _Exchanged.apply(slices, exchange).movedim(0, 2).flatten(2)  # part i has the heads of rank i: (B, T / N, n_head d_head)

    # A compiled block is cut here: DeepSpeed's collectives cannot be traced.
    return cast("Attend", torch.compiler.disable(attend_slices))


class SequenceParallel(Technique):
    """DeepSpeed's documented `"sequence_parallel_size": N`: N consecutive ranks share each row. N divides the ranks, n_head and seq_len."""

    declaration = Declaration(
        section=SEQUENCE_PARALLEL,
        is_number=True,
        # Random-LTD would draw other tokens for each slice. 0/1 Adam has other weights on each rank between two exchanges.
        exclusive=("which tokens of a row a rank has", "whether the ranks of a row have the same weights"),
        same_algorithm=True,
    )

    def __init__(self, section: int, run: RunForTechniques):
        self.run, self.ranks = run, section
        sizes = {name: getattr(run.shape, name) for name in ("n_head", "seq_len")}
        if math.gcd(*sizes.values()) % section:
            allowed = ", ".join(map(str, sorted(divisors(math.gcd(run.ranks, *sizes.values())))))
            which = ", ".join(f"{name}, {size}" for name, size in sizes.items() if size % section)
            raise ValueError(f"'sequence_parallel_size' is {section}, which does not divide {which}; write one of {allowed}")
        groups = f"{run.data_ranks} group{'s' * (run.data_ranks > 1)} of data"
        self.notes = (f"{run.ranks} ranks: {groups} x {section} slices of a sequence of {run.shape.seq_len:,} tokens",)

    def on_step(self, step: int, work: StepWork) -> StepWork:
        if work.seq_len % self.ranks:
            what = f"does not divide rows of {work.seq_len} tokens, which step {step} has"
            raise ValueError(f"'sequence_parallel_size' is {self.ranks}, which {what}; change the lengths to multiples of it")
        return work

    def attach(self, ds_engine: Any, collectives: Any) -> None:
        group = collectives.group(self.ranks)

        def exchange(parts: torch.Tensor) -> torch.Tensor:
            sent = parts.contiguous()
            received = torch.empty_like(sent)
            collectives.all_to_all(received, sent, group=group)
            return received

        model = ds_engine.module
        model.row_part = RowPart(collectives.rank % self.ranks, self.ranks)
        for block in model.h:
            block.attn.attend = exchanging(block.attn.attend, exchange, self.ranks)

    def bytes_sent_in_blocks(self, steps: int) -> int:
        """Those of queries, keys, values and results: forward and backward, and once more where blocks are recomputed."""
        shape, run = self.run.shape, self.run
        heads = 2 * shape.n_head + 2 * math.lcm(shape.n_kv_head, self.ranks)
        width = 4 if run.precision == "fp32" else 2
        passes = 3 if "activation_checkpointing" in run.techniques else 2
        of_a_token = passes * shape.n_layer * heads * shape.d_head * width * (self.ranks - 1) / self.ranks
        return round(of_a_token * run.total_tokens / run.ranks / steps)
