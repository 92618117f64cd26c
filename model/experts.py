"""A mixture of experts: a router chooses a few MLPs for each token (Shazeer et al., arXiv 1701.06538; Qwen3, arXiv 2505.09388).

    deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --preset nano --architecture qwen3_moe

Every token goes through exactly `n_expert_active` experts: none is dropped, and no expert has a capacity. The weights of all experts are
one tensor, (n_expert, out, in), with which ZeRO does as with any other weight. To choose by another rule, change `choose`; transformers
then computes something else, so do not export such a model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from model.layers import INIT_STD, Linear, draw_normal
from model.presets import GPTConfig

#: In bf16 and fp16, the rows of an expert's product are a multiple of this, unless it begins at the first row.
ROWS = 16


def choose(logits: torch.Tensor, active: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The probabilities of the experts for each token, the shares in the output of those that are chosen, and their numbers.

    logits: of the router, (N, n_expert) -> fp32 (N, n_expert), fp32 (N, active), int64 (N, active).
    """
    probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)
    shares, experts = probabilities.topk(active, dim=-1)
    return probabilities, shares / shares.sum(dim=-1, keepdim=True), experts


class Experts(nn.Module):
    """The MLP of a block with experts, (..., C) -> (..., C).

    The router's product is computed in the model's dtype, its softmax in fp32, as in transformers.

    Attributes:
        balance: that of a technique that trains the router to use all experts alike; None: nothing does.
    """

    balance: Balance | None = None

    def __init__(self, config: GPTConfig, name: str, activation: Callable[[], nn.Module]):
        super().__init__()
        self.active = config.n_expert_active
        self.router = Linear(config.d_model, config.n_expert, config, f"{name}.router")
        self.c_fc = ExpertLinear(config.d_model, config.c_fc_width, config, f"{name}.c_fc")
        self.act = activation()
        residual_std = INIT_STD / math.sqrt(2 * config.n_layer)
        self.c_proj = ExpertLinear(config.hidden_width, config.d_model, config, f"{name}.c_proj", residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)  # (..., C) -> (N, C)
        probabilities, shares, experts = choose(self.router(tokens), self.active)
        load = torch.zeros_like(probabilities[0], dtype=torch.int64)  # (n_expert,): tokens of each expert
        load.scatter_add_(0, experts.flatten(), torch.ones_like(experts).flatten())  # `bincount` would wait for CUDA
        if self.balance is not None:
            tokens = self.balance.added(tokens, probabilities, load)
        order = experts.flatten().argsort(stable=True)  # places in (N active,), those of the first expert first
        place = order.argsort()  # of each choice in that order
        rows = _Reordered.apply(tokens, order, place, self.active)  # (N active, C)
        rows = self.c_proj(self.act(self.c_fc(rows, load)), load)
        of_choices = _Reordered.apply(rows, place, order, 1).unflatten(0, experts.shape)  # (N, active, C)
        return self.dropout((of_choices * shares.to(x.dtype)[..., None]).sum(dim=1).view_as(x))


class ExpertLinear(nn.Module):
    """A linear layer of each expert, without biases, initialized by its constructor; weight: (n_expert, n_out, n_in)."""

    def __init__(self, n_in: int, n_out: int, config: GPTConfig, name: str, std: float = INIT_STD):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_expert, n_out, n_in))
        draw_normal(self.weight, std, config, f"{name}.weight")

    def forward(self, x: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
        """x (N, n_in), of which the first load[0] rows are of expert 0 -> (N, n_out). Every expert's weight gets a gradient."""
        return cast("torch.Tensor", _Grouped.apply(x, self.weight, load))


def has_one_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch multiplies all experts at once: on CUDA in bf16, and rows of whole 16 bytes at addresses that 16 divides."""
    aligned = all(side % 8 == 0 for side in weight.shape[1:]) and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned


class _Grouped(torch.autograd.Function):
    """The product of each expert's rows with its weight.

    It saves the parameter and no view of it, so that ZeRO-3 can release the gathered weights until the backward pass; and it allocates
    tensors of all rows or all experts only, whose sizes do not change from step to step.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, load)
        if has_one_kernel(x, weight):
            return F.grouped_mm(x, weight.transpose(1, 2), offs=load.cumsum(0, dtype=torch.int32))
        y = x.new_empty(len(x), weight.shape[1])
        for expert, first, _, end in _parts(load, x.dtype):
            torch.mm(x[first:end], weight[expert].t(), out=y[first:end])
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, load = ctx.saved_tensors
        if has_one_kernel(x, weight):
            gradient, ends = gradient.contiguous(), load.cumsum(0, dtype=torch.int32)
            of_weight = F.grouped_mm(gradient.t(), x, offs=ends)
            # Of an expert without rows, some kernels leave what was in memory (pytorch#172439).
            return F.grouped_mm(gradient, weight, offs=ends), of_weight.masked_fill_((load == 0)[:, None, None], 0), None
        of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
        for expert, first, start, end in _parts(load, x.dtype):
            torch.mm(gradient[first:end], weight[expert], out=of_x[first:end])
            own = F.pad(gradient[start:end], (0, 0, start - first, 0)) if first < start else gradient[first:end]
            torch.mm(own.t(), x[first:end], out=of_weight[expert])  # 0 of an expert without rows
        return of_x, of_weight, None


def _parts(load: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int, int, int]]:
    """Each expert, the first row of its product, and the first of its rows and their end, from the last expert to the first.

    In bf16 and fp16 a product begins up to `ROWS` - 1 rows early, in rows that the next ones overwrite, so that few sizes occur: on a CPU,
    oneDNN compiles a kernel of about 1 MB for each size, which took a third of a step.
    """
    ends, rows = load.cumsum(0).tolist(), 1 if dtype == torch.float32 else ROWS
    for expert, (start, end) in reversed(list(enumerate(itertools.pairwise([0, *ends])))):
        yield expert, max(0, end - -(-(end - start) // rows) * rows), start, end


class _Reordered(torch.autograd.Function):
    """x[order // copies] for x (N, C), a permutation `order` of N copies rows, and `place`, its inverse.

    Torch's own gradient of an index adds up rows one by one, in an order that CUDA does not fix.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, place: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return gradient[place].unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None


class Balance:
    """The balance loss of one layer, and what its router did in this step.

    The loss of a token is the sum over experts of weight x probability. A technique sets the weights from the choices in earlier steps, so
    the loss is a plain mean over tokens, whatever the ranks, micro-batches and tiles, as the cross-entropy is. With the frequencies of the
    micro-batch itself as weights it is the loss of Fedus et al., arXiv 2101.03961, section 2.2; with those of the global batch, of Qiu et
    al., arXiv 2501.11873.

    Its gradient enters where the backward pass reaches the layer, and only there is the load counted, so that a layer that is recomputed
    counts once, and one that is dropped does not. Without a backward pass, the forward pass counts.

    Attributes:
        scale: fp32 (): the gradient of the model's loss with respect to the sum of the tokens' losses, set before the backward pass.
        weight: fp32 (n_expert,), set before each step.
        trained, evaluated: fp64 (2 n_expert + 1,): sums over tokens of choices, probabilities, and entropy in nats, with a backward pass
            and without.
    """

    def __init__(self, scale: torch.Tensor, weight: torch.Tensor, trained: torch.Tensor, evaluated: torch.Tensor):
        self.scale, self.weight, self.trained, self.evaluated = scale, weight, trained, evaluated

    def added(self, tokens: torch.Tensor, probabilities: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
        """tokens (N, C), unchanged, whose backward pass also goes through the balance loss of `probabilities` (N, n_expert)."""
        with torch.no_grad():
            entropy = -torch.special.xlogy(probabilities, probabilities).sum()
            sums = torch.cat([load, probabilities.sum(dim=0), entropy[None]])
        if not torch.is_grad_enabled():
            self.evaluated += sums
            return tokens
        return cast("torch.Tensor", _Added.apply(tokens, (probabilities @ self.weight).sum(), self, sums))


class _Added(torch.autograd.Function):
    """tokens, beside which the gradient of a loss begins."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, loss: torch.Tensor, balance: Balance, sums: torch.Tensor) -> torch.Tensor:
        ctx.balance, ctx.sums = balance, sums
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        ctx.balance.trained += ctx.sums
        return gradient, ctx.balance.scale.clone(), None, None
