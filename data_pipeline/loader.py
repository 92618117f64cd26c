"""This rank's share of every global batch, as int64 tensors.

The samples of a global batch do not depend on the number of ranks or on accumulation; only their assignment to ranks does: sample j belongs
to micro-step j // (world_size x micro_batch_size) and, within it, to rank (j // micro_batch_size) % world_size. There are no
worker processes: reading 8 x 257 tokens from a strided view of the memory map takes about 2 us, and the tensor is ready after 30 us.
"""

from collections.abc import Iterator

import numpy as np
import torch

from data_pipeline.errors import DataError
from data_pipeline.sampler import GlobalSampler
from data_pipeline.shards import Split


class Loader:
    """Batches of `split` for rank `rank` of `world_size`, on `device`. `sampler` orders the windows of `seq_len` + 1 tokens.

    Ranks that share rows count as one.
    """

    def __init__(
        self,
        split: Split,
        sampler: GlobalSampler | None,  # None if only validation_batches is used
        seq_len: int,
        vocab_size: int,
        rank: int,
        world_size: int,
        device: torch.device | str,
    ):
        n_windows = split.windows(seq_len)
        assert 0 <= rank < world_size, (rank, world_size)
        assert sampler is None or sampler.n_windows == n_windows, (sampler.n_windows, n_windows)
        self.split, self.sampler, self.seq_len, self.vocab_size = split, sampler, seq_len, vocab_size
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.n_windows = n_windows

    def micro_batches(self, first_sample: int, micro_batch_size: int, accumulation: int) -> Iterator[torch.Tensor]:
        """The `accumulation` micro-batches of this rank, each (micro_batch_size, seq_len + 1), of the global batch that
        starts at sample `first_sample` and holds micro_batch_size x accumulation x world_size samples."""
        assert self.sampler is not None, "this loader was made for validation"
        starts = [first_sample + (micro_step * self.world_size + self.rank) * micro_batch_size for micro_step in range(accumulation)]
        windows = [self.sampler.indices(start, micro_batch_size) for start in starts]
        for indices in windows:
            self.split.prefetch(indices, self.seq_len)
        yield from map(self._tensor, windows)

    def validation_windows(self, n_windows: int) -> np.ndarray:
        """The numbers of `n_windows` windows (at most all of the split), spread evenly over it and ascending: int64. For any world size."""
        n_windows = min(n_windows, self.n_windows)
        return np.arange(n_windows, dtype=np.int64) * self.n_windows // n_windows

    def validation_batches(self, windows: np.ndarray, micro_batch_size: int) -> Iterator[tuple[torch.Tensor, int]]:
        """(tensor, weight) pairs that cover, over all ranks, `windows`, each once.

        Every rank yields the same number of pairs, as collectives require. The weight is the number of rows, or 0 for a filler row if this
        rank has no windows left.
        """
        per_round = micro_batch_size * self.world_size
        for start in range(self.rank * micro_batch_size, -(-len(windows) // per_round) * per_round, per_round):
            mine = windows[start : start + micro_batch_size]
            yield self._tensor(mine if len(mine) else windows[:1]), len(mine)

    def _tensor(self, indices: np.ndarray) -> torch.Tensor:
        on_gpu = self.device.type == "cuda"
        # The copy from pinned memory overlaps the previous step; torch keeps the memory until the copy is done.
        tensor = torch.empty((len(indices), self.seq_len + 1), dtype=torch.int64, pin_memory=on_gpu)
        tokens = self.split.read(indices, self.seq_len, out=tensor.numpy())
        if tokens.max() >= self.vocab_size:  # takes 2 us; otherwise the embedding fails, on a GPU without naming the cause
            row, column = np.unravel_index(tokens.argmax(), tokens.shape)
            file, position = self.split.locate(int(indices[row]), self.seq_len)
            raise DataError(
                f"{file}: token id {tokens[row, column]} at token {position + column} (window {indices[row]} of {self.split.name});"
                f" allowed: 0 to {self.vocab_size - 1}; train with the vocab_size of the corpus, or prepare the corpus again"
            )
        return tensor.to(self.device, non_blocking=on_gpu)
