"""Muon in plain torch: momentum whose matrices are orthogonalized, beside AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from recipes.optimizers import fused_adamw

#: a, b, c of the quintic iteration a x + (b x x^T + c (x x^T)^2) x (Jordan et al., https://kellerjordan.github.io/posts/muon/).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: A smaller norm counts as this, so that the update vanishes with the matrix: below it, squares underflow in fp32, and the norm is 0.
LEAST_NORM = 1e-18
#: The factor of the learning rate for an update of (rows, columns).
#:
#: - `original` keeps the change of each output independent of the shape (Jordan et al.).
#: - `match_rms_adamw` gives the elements of the update the root mean square that AdamW's have, about 0.2, so that AdamW's learning rate and
#:   weight decay serve Muon too (Liu et al., arXiv 2502.16982, section 2.2).
RATE_SCALES = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def orthogonalized(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """`matrix` (rows, columns) with singular values near 1 (0.7 to 1.2 after five steps), in fp32, by Newton-Schulz steps in `dtype`.

    Or several, each by itself: (matrices, rows, columns).
    """
    (a, b, c), add_product = COEFFICIENTS, torch.addmm if matrix.dim() == 2 else torch.baddbmm
    wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    # The usual epsilon, added to the norm, would distort the small gradients of queries and keys.
    x = (wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp_min(LEAST_NORM)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT  # (rows, rows), the shorter side
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.to(matrix.dtype)
    return x if matrix.shape[-2] <= matrix.shape[-1] else x.mT


class Matrix(NamedTuple):
    """A matrix (rows, columns) to orthogonalize, and where a tensor of the optimizer holds this rank's part of it.

    The part has `lengths[rank]` elements and begins at element `start` of the tensor. The parts of all ranks, in order, are the matrix.
    owner: the rank that orthogonalizes a matrix that is cut among ranks; None for a whole one, which each rank that has it orthogonalizes.
    """

    rows: int
    columns: int
    start: int
    lengths: tuple[int, ...]
    owner: int | None = None


class Muon(torch.optim.Optimizer):
    """Jordan et al., https://kellerjordan.github.io/posts/muon/.

    Weight decay is decoupled in both parts. A missing gradient counts as zero.

    Args:
        adam_rate: AdamW's learning rate divided by `lr`.
        momentum: the decay rate of the gradients' moving average.
        nesterov: whether the update averages the gradient into the momentum once more.
        ns_steps, ns_dtype: of the Newton-Schulz iteration.
        rate_scale: a key of `RATE_SCALES`.
        in_batches: whether whole matrices of one shape that lie side by side, such as those of experts, are orthogonalized together.

    Attributes:
        matrices: tensor that Muon updates -> its matrices, in the same order on all ranks; AdamW updates the other tensors. Must be set
            before the first step.
        rank: of this process, an index of `Matrix.lengths`.
        collectives: of the ranks among which matrices are cut.
    """

    matrices: dict[torch.Tensor, list[Matrix]]
    rank: int = 0
    collectives: Any = None

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_rate: float = 1.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        rate_scale: str = "match_rms_adamw",
        in_batches: bool = False,
    ):
        super().__init__(param_groups, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._adam_rate, self._momentum, self._nesterov = adam_rate, momentum, nesterov
        self._ns_steps, self._ns_dtype, self._scale = ns_steps, ns_dtype, RATE_SCALES[rate_scale]
        self._in_batches = in_batches

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters with their gradients. If matrices are cut, all ranks call this together."""
        for group in self.param_groups:
            others = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if parameter in self.matrices:
                    self._muon(parameter, group)
                else:
                    others.append(parameter)
            self._adamw(others, group)

    def _muon(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter, requires_grad=False)
        gradient, average, weights = gradient.reshape(-1), state["momentum"].view(-1), parameter.view(-1)
        average.lerp_(gradient, 1 - self._momentum)
        weights.mul_(1 - group["lr"] * group["weight_decay"])

        def held(matrix: Matrix, tensor: torch.Tensor) -> torch.Tensor:
            return tensor[matrix.start : matrix.start + matrix.lengths[self.rank]]

        def direction(matrix: Matrix) -> torch.Tensor:
            own = held(matrix, average)
            return torch.lerp(held(matrix, gradient), own, self._momentum) if self._nesterov else own

        def move(matrix: Matrix, change: torch.Tensor) -> None:
            held(matrix, weights).sub_(change, alpha=group["lr"] * self._scale(matrix.rows, matrix.columns))

        matrices = self.matrices[parameter]
        whole = [matrix for matrix in matrices if matrix.owner is None and matrix.lengths[self.rank]]
        for matrix in _joined(whole, self.rank) if self._in_batches else whole:
            move(matrix, self._orthogonalized(direction(matrix), matrix))
        for some in _rounds([matrix for matrix in matrices if matrix.owner is not None]):
            # Each rank sends its parts to the owners, which orthogonalize one matrix each, and send the parts back.
            sent = torch.cat([direction(matrix) for matrix in some.values()])
            mine = some.get(self.rank)
            owned = sent.new_empty(mine.rows * mine.columns if mine else 0)
            sizes = [some[rank].lengths[self.rank] if rank in some else 0 for rank in range(self.collectives.world_size)]
            own_sizes = list(mine.lengths) if mine else [0] * self.collectives.world_size
            self.collectives.all_to_all(owned, sent, own_sizes, sizes)
            if mine:
                owned = self._orthogonalized(owned, mine)
            self.collectives.all_to_all(sent, owned, sizes, own_sizes)
            for matrix, change in zip(some.values(), sent.split([matrix.lengths[self.rank] for matrix in some.values()]), strict=True):
                move(matrix, change)
            del sent, owned, change  # or this round's buffers would stay until the next round has made its own

    def _orthogonalized(self, flat: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        sides = matrix.rows, matrix.columns
        matrices = flat.view(sides if flat.numel() == math.prod(sides) else (-1, *sides))
        return orthogonalized(matrices, self._ns_steps, self._ns_dtype).reshape(-1)

    def _adamw(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter, requires_grad=False) for _ in range(2))
            state["step"] = state["step"].to(parameter.device)  # `load_state_dict` may leave it on the CPU, but fused needs it here
        fused_adamw(parameters, states, [state["step"] for state in states], group, group["lr"] * self._adam_rate)


def _joined(matrices: list[Matrix], rank: int) -> list[Matrix]:
    """The whole matrices; several of one shape that lie side by side as one, with no more elements than the largest matrix."""
    most, joined = max((matrix.lengths[rank] for matrix in matrices), default=0), list[Matrix]()
    for matrix in matrices:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.rows, last.columns) == (matrix.rows, matrix.columns)
            and last.start + last.lengths[rank] == matrix.start
            and last.lengths[rank] + matrix.lengths[rank] <= most
        ):
            joined[-1] = last._replace(lengths=tuple(map(sum, zip(last.lengths, matrix.lengths, strict=True))))
        else:
            joined.append(matrix)
    return joined


def _rounds(matrices: list[Matrix]) -> Iterator[dict[int, Matrix]]:
    """Yields rounds of matrices by owner, in the order of the ranks, at most one per owner and round."""
    owned: dict[int, list[Matrix]] = {}
    for matrix in matrices:
        assert matrix.owner is not None
        owned.setdefault(matrix.owner, []).append(matrix)
    for number in range(max(map(len, owned.values()), default=0)):
        yield {owner: owned[owner][number] for owner in sorted(owned) if number < len(owned[owner])}
