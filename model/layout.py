"""The inputs of attention that all blocks of a forward pass share: the documents, and the rotation of positions.

`GPT.forward` makes a `Layout` for each pass and gives it to every attention layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model import accounting

#: Cosines and sines of the angles by which queries and keys are rotated, each (1 or B, T, 1, d_head / 2).
Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class DocumentBounds:
    """The boundaries of documents, which attention does not cross, in rows (B, T): a mask without T x T elements.

    Attributes:
        bounds: the index among the B T tokens at which each of N documents begins, and B T: int64 (N + 1,), ascending.
        row_length: T.
    """

    bounds: torch.Tensor
    row_length: int

    @classmethod
    def beginning_at(cls, starts: torch.Tensor) -> DocumentBounds:
        """starts: from `document_starts`, (B, T)."""
        rows, length = starts.shape
        first = (starts == torch.arange(length, device=starts.device)).flatten().nonzero()[:, 0]
        return cls(F.pad(first, (0, 1), value=rows * length), length)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document. Waits for the device, but only once for all blocks and their recomputation."""
        return self.bounds.diff().tolist()

    def at(self, tokens: torch.Tensor) -> DocumentBounds:
        """The documents of rows that keep only the tokens with these indices, int64 (r,), ascending. One without tokens has length 0."""
        row, start = self.bounds // self.row_length, self.bounds % self.row_length
        return DocumentBounds(row * len(tokens) + torch.searchsorted(tokens, start), len(tokens))


#: A tensor (B, 1, T, T) that is added to the scores and includes the causal mask, or the documents within which attention is causal.
Mask = torch.Tensor | DocumentBounds


class Layout(NamedTuple):
    """The layout of the rows (B, T) of a forward pass.

    Attributes:
        mask: None for the causal mask over whole rows.
        rotation: of the tokens' positions; None if positions are in the activations already.
    """

    mask: Mask | None = None
    rotation: Rotation | None = None

    def at(self, tokens: torch.Tensor) -> Layout:
        """The layout of rows that keep only the tokens with these indices, int64 (r,), ascending. They keep their positions."""
        mask, rotation = self
        if isinstance(mask, DocumentBounds):
            mask = mask.at(tokens)
        elif mask is not None:
            mask = mask.index_select(2, tokens).index_select(3, tokens)  # (B, 1, T, T) -> (B, 1, r, r)
        if rotation is not None:
            cos, sin = rotation
            rotation = cos.index_select(1, tokens), sin.index_select(1, tokens)  # (., T, 1, .) -> (., r, 1, .)
        return Layout(mask, rotation)


class RowPart(NamedTuple):
    """Part `number` of a row that is cut into `parts` equal ones, each held by another rank; by default the whole row."""

    number: int = 0
    parts: int = 1

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The own part of x (..., T), which `parts` divides: (..., T / parts), a view."""
        return x.unflatten(-1, (self.parts, -1))[..., self.number, :]


def document_starts(tokens: torch.Tensor, document_end: int) -> torch.Tensor:
    """For each token, the index in its row at which its document begins: (B, T) -> int64 (B, T). `document_end` ends a document."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    # The roll moves a row's last token to index 0, where a document begins in any case.
    return torch.where(tokens.roll(1, dims=1) == document_end, index, 0).cummax(dim=1).values


def document_mask(starts: torch.Tensor, dtype: torch.dtype) -> Mask:
    """The mask with which a token attends to its document up to itself: (B, T) -> (B, 1, T, T), 0 and -inf; of long rows `DocumentBounds`.

    Args:
        starts: from `document_starts`.
        dtype: of the queries. A boolean mask would be converted in every block, and each copy kept for the backward pass.
    """
    if starts.shape[1] > accounting.DENSE_LENGTH:
        return DocumentBounds.beginning_at(starts)
    index = torch.arange(starts.shape[1], device=starts.device)
    hidden = (index < starts.unsqueeze(-1)) | (index > index.unsqueeze(-1))  # (T,) with (B, T, 1), and with (T, 1) -> (B, T, T)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)


def rotation_at(positions: torch.Tensor, d_head: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The rotation of tokens at `positions`, (T,) or (B, T): angle position / theta^(2 i / d_head) for pair i (arXiv 2104.09864).

    The angles are computed in fp32: in bf16, position 1,025 would be position 1,024. Their cosines and sines are rounded to `dtype`, as in
    transformers.
    """
    pairs = torch.arange(0, d_head, 2, device=positions.device, dtype=torch.float32)
    angles = positions.unsqueeze(-1).float() / theta ** (pairs / d_head)  # (..., T, d_head / 2)
    angles = angles.view(-1, positions.shape[-1], 1, d_head // 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(q: torch.Tensor, k: torch.Tensor, rotation: Rotation | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys, (B, T, heads, d_head) each. Pair i is the elements i and i + d_head / 2 of a head, as in transformers."""
    if rotation is None:
        return q, k
    cos, sin = rotation

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return rotated(q), rotated(k)
