"""The mean of a large buffer over all ranks, sent as one bit per element: the communication of 1-bit Adam and its relatives.

Tang et al., 1-bit Adam, arXiv 2102.02888, algorithm 1 and section 4.2. Each rank adds the error of its last compression
to its buffer and compresses the sum to signs and one scale per tensor, ||c||_2 / sqrt(numel). The owner of a chunk of the buffer averages
what all ranks sent of this chunk and adds the error of its own last compression. It compresses the result again, with one scale for each
tensor's part in the chunk, and sends it to all ranks. This takes one all-to-all and one all-gather, on every backend of torch.distributed
that has both (NCCL, gloo). In a message, the scales follow the bits.

A rank sends 2 (N-1)/N x numel / 8 bytes and the scales: 1/32 of an all-reduce in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from recipes.blocks import BLOCK, block_norm, norm_of

#: The bits of a chunk fill whole fp32 numbers, so that its scales can follow them.
CHUNK_MULTIPLE = 32
#: Multiplying eight bytes of 0 or 1, as one little-endian number, by this puts their bits into the highest byte, the first one lowest.
GATHER_BITS = 0x0102040810204080


class Segment(NamedTuple):
    """Elements [start, stop) of a buffer; they belong to tensor number `tensor`, starting at its element `first`."""

    tensor: int
    first: int
    start: int
    stop: int


class CompressedAllReduce:
    """A flat fp32 buffer, and `reduce`, which replaces its content with the compressed mean over the ranks.

    Args:
        sizes: elements of each tensor in the buffer.
        collectives: the connection to the other ranks. On one rank nothing is compressed.
        device: of all buffers.

    Attributes:
        chunk: the number of elements that each rank owns, a multiple of `CHUNK_MULTIPLE`.
        buffer: (ranks x chunk,); tensors begin at multiples of 8 elements, so that no byte of signs belongs to two scales.
        views: the elements of each tensor in `buffer`, (size,).
        live: the number of first elements of each tensor that take part. With several ranks, the others are set to 0 by each `reduce`, in
            `buffer` and in the errors. A sign cannot be zero, so elements that never have a value would accumulate error instead.
        worker_error: the accumulated compression error of this rank, (ranks x chunk,); empty on one rank.
        scratch: memory of one block, fp32 (block,), which the optimizer may use between two calls.
        ranks: the number of ranks.
        server_error: the accumulated compression error of this rank's chunk of the mean, (chunk,); empty on one rank.
    """

    def __init__(self, sizes: Sequence[int], collectives: Any, device: torch.device):
        self._collectives, self.ranks = collectives, collectives.world_size
        self.live = list(sizes)
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 8) * 8)
        self._tensors = [Segment(index, 0, *ends) for index, ends in enumerate(itertools.pairwise(offsets))]
        self.chunk = -(-offsets[-1] // (self.ranks * CHUNK_MULTIPLE)) * CHUNK_MULTIPLE
        self.buffer = torch.zeros(self.ranks * self.chunk, device=device)
        self.views = [self.buffer[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)]
        several = self.ranks > 1
        self.worker_error = torch.zeros(self.buffer.numel() if several else 0, device=device)
        self.server_error = torch.zeros(self.chunk if several else 0, device=device)

        self._pieces = [self._tensors_in_chunk(rank) for rank in range(self.ranks)]
        # A message is the bits of a chunk and a scale for each tensor in it. All are as long as the longest, because a gather has one size.
        self._slots = max(map(len, self._pieces))
        shape = self.ranks, self.chunk // 8 + 4 * self._slots
        self._outgoing, self._incoming = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
        self._result = torch.zeros(1, shape[1], dtype=torch.uint8, device=device)
        # A block holds elements of one rank, or of all ranks at once: at least eight of each.
        block = max(min(BLOCK.get(device.type, BLOCK["cuda"]), self.chunk), 8 * self.ranks)
        self.scratch = torch.empty(block, device=device)
        self._negative = torch.empty(block, dtype=torch.bool, device=device)
        self._bytes = torch.empty(block // 8, dtype=torch.int32, device=device)
        # The eight signs of each possible byte, (256, 8): a set bit is a minus.
        self._signs = 1.0 - 2.0 * (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1)

    def _tensors_in_chunk(self, rank: int) -> list[Segment]:
        """The parts of tensors in the chunk of `rank`, with positions within the chunk."""
        begin, end = rank * self.chunk, (rank + 1) * self.chunk
        return [
            Segment(tensor, max(0, begin - start), max(start, begin) - begin, min(stop, end) - begin)
            for tensor, _, start, stop in self._tensors
            if start < end and stop > begin
        ]

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace the content of the buffer with its compressed mean over all ranks. All ranks must call this together."""
        if self.ranks == 1:
            return
        mine = self._pieces[self._collectives.rank]
        scales = self._compress(self._tensors, self.worker_error, self._outgoing, self.buffer)
        for slots, pieces in zip(self._scales(self._outgoing), self._pieces, strict=True):
            if pieces:
                slots[: len(pieces)] = scales[pieces[0].tensor : pieces[-1].tensor + 1]
        self._collectives.all_to_all(self._incoming, self._outgoing)

        of_ranks = (self._scales(self._incoming) / self.ranks).t().contiguous()  # (slots, ranks)
        for scales, piece in zip(of_ranks, mine, strict=False):
            for start, stop in self._blocks(piece, self.ranks):
                signs = self._expand(self._incoming[:, start // 8 : stop // 8], self._signs, self.scratch)
                self.server_error[start:stop].addmv_(signs.view(self.ranks, -1).t(), scales)
        scales = self._compress(mine, self.server_error, self._result)
        self._scales(self._result)[0, : len(mine)] = scales
        self._collectives.all_gather(self._incoming, self._result)

        scales = self._scales(self._incoming)
        for rank, (message, pieces) in enumerate(zip(self._incoming, self._pieces, strict=True)):
            chunk = self.buffer[rank * self.chunk : (rank + 1) * self.chunk]
            for slot, piece in enumerate(pieces):
                scaled_signs = self._signs * scales[rank, slot]
                for start, stop in self._blocks(piece):
                    self._expand(message[start // 8 : stop // 8], scaled_signs, chunk[start:stop])
        for segment in self._tensors:
            self._dead(segment, self.buffer).zero_()

    def _compress(
        self, segments: list[Segment], error: torch.Tensor, messages: torch.Tensor, values: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add `values` to `error`, compress the sum, and store the compression error in `error`.

        Writes the bits of all chunks into `messages`, (n, bytes), one chunk after another. Returns the scale of each segment.
        """
        scales = torch.zeros(len(segments), device=error.device)
        for scale, segment in zip(scales, segments, strict=True):
            dead, norms = self._dead(segment, error), []
            dead.zero_()
            if values is not None:
                self._dead(segment, values).zero_()
            for start, stop in self._blocks(segment):
                if values is not None:
                    error[start:stop].add_(values[start:stop])
                norms.append(block_norm(error[start:stop]))
            live = segment.stop - segment.start - dead.numel()
            scale.copy_(norm_of(norms) / max(1, live) ** 0.5)
            for start, stop in self._blocks(segment):
                block, floats, negative = error[start:stop], self.scratch[: stop - start], self._negative[: stop - start]
                torch.signbit(block, out=negative)
                row, place = divmod(start, self.chunk)
                eights = negative.view(torch.int64).mul_(GATHER_BITS).bitwise_right_shift_(56)
                messages[row, place // 8 : (place + stop - start) // 8].copy_(eights)  # the lowest byte of each
                block.sub_(torch.copysign(scale, block, out=floats))
            dead.zero_()
        return scales

    def _expand(self, packed: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the eight numbers that `table`, (256, 8), has for each byte to the beginning of `out`."""
        indices, numbers = self._bytes[: packed.numel()], out[: 8 * packed.numel()]
        indices.view(packed.shape).copy_(packed)
        torch.index_select(table, 0, indices, out=numbers.view(-1, 8))
        return numbers

    def _blocks(self, segment: Segment, rows: int = 1) -> Iterator[tuple[int, int]]:
        """The blocks of a segment, each within one chunk; `rows` blocks fit into `scratch`."""
        start, size = segment.start, self.scratch.numel() // (8 * rows) * 8
        while start < segment.stop:
            stop = min(start + size, (start // self.chunk + 1) * self.chunk, segment.stop)
            yield start, stop
            start = stop

    def _scales(self, messages: torch.Tensor) -> torch.Tensor:
        """The scales in `messages`, (n, bytes), as an fp32 view (n, slots)."""
        return messages.view(torch.float32)[:, self.chunk // 32 :]

    def _dead(self, segment: Segment, buffer: torch.Tensor) -> torch.Tensor:
        """The elements of a segment of `buffer` that do not take part, including the padding of its last byte."""
        live = segment.start + self.live[segment.tensor] - segment.first
        return buffer[max(segment.start, min(segment.stop, live)) : segment.stop]
