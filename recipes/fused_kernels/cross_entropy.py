"""The output layer and its loss in one kernel, which writes the gradient of the logits over the logits.

The plain head keeps the logits in the working precision and their log-softmax in fp32, and computes the gradients of both. In 16 bits this
takes 14 bytes per logit: 2.9 GB for 4,096 tokens and a vocabulary of 50,304. But the gradient of a cross-entropy is known as soon as its
softmax is. So the forward pass can write it over the logits, a few rows at a time, and compute the gradients of x and the weight. This
takes 2 bytes per logit, for as many tokens at a time as `LOGITS_BYTES` allows. Liger-Kernel's fused linear cross-entropy (Hsu et al., arXiv
2410.10989, section 3.2) has the same idea, but its parts are so small that their products leave a GPU half idle. It also sums the parts in
16 bits, and waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

#: Bytes of logits in memory at a time. The gradients of several parts are summed in fp32, so parts should be few.
LOGITS_BYTES = 2**29
#: Columns of fp16 logits that are converted to fp32 at a time on a CPU: 5,336 x 2,048 x 4 bytes = 44 MB.
COLUMNS = 2048
#: Rows that are converted to fp32 at a time: 64 x 8,192 x 4 bytes = 2 MB stay in a CPU's cache from one pass to the next.
ROWS = 64
#: A smaller probability has lost bits in fp32, or is 0; its logarithm is then computed from the logits.
SMALLEST = 1e-37
IGNORED = -100  # as in torch.nn.functional.cross_entropy
#: Returns the fp32 sum of the cross-entropies of logits (N, V) at targets (N,), and overwrites the logits with the gradient of that sum.
Kernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _counted(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each row counts, and the column of its target, 0 for an ignored row: (N,) -> (N, 1), (N, 1)."""
    counts = targets != IGNORED
    return counts.unsqueeze(1), torch.where(counts, targets, 0).unsqueeze(1)


def in_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A `Kernel` of plain torch operations for CPUs, a few rows at a time."""
    wide = torch.empty(min(ROWS, len(logits)), logits.shape[1], device=logits.device)  # fp32
    total = torch.zeros((), device=logits.device)
    every_row_counts = bool((targets != IGNORED).all())
    for narrow, row_targets in zip(logits.split(ROWS), targets.split(ROWS), strict=True):
        z, counts, column = wide[: len(narrow)], *_counted(row_targets)
        torch.softmax(z.copy_(narrow), dim=1, out=z)
        p = z.gather(1, column)
        losses = -p.log()
        if bool((p < SMALLEST).any()):
            again = narrow.float()
            losses = again.logsumexp(1, keepdim=True) - again.gather(1, column)
        total += (losses * counts).sum()
        z.scatter_add_(1, column, torch.full_like(p, -1.0))
        narrow.copy_(z if every_row_counts else z.mul_(counts))
    return total


def write_gradient(logits: torch.Tensor, counts: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Overwrite logits (N, V) with the gradient of their summed cross-entropy; return their logsumexp, fp32 (N, 1).

    counts, column: from `_counted`.
    """
    z = logits.float()
    log_sum = z.logsumexp(1, keepdim=True)
    is_target = torch.arange(logits.shape[1], device=logits.device) == column  # (N, V), never in memory
    logits.copy_(((z - log_sum).exp() - is_target.float()) * counts)
    return log_sum


def in_one(logits: torch.Tensor, targets: torch.Tensor, write: Callable[..., torch.Tensor] = write_gradient) -> torch.Tensor:
    """A `Kernel` for GPUs. write: `write_gradient`, compiled by torch.compile into one kernel.

    The targets' logits are read before, outside it: torch.compile makes two kernels if another operation reads what is overwritten.
    """
    counts, column = _counted(targets)
    of_targets = logits.gather(1, column).float()
    log_sum = write(logits, counts, column)
    return ((log_sum - of_targets) * counts).sum()


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, kernel: Kernel = in_rows
) -> torch.Tensor:
    """`model.gpt.linear_cross_entropy`, computed with `kernel`. The backward pass can run only once."""
    with_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(x, weight, bias, targets, with_gradients, kernel)


def _weight_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """gradient.T @ x, (N, V), (N, C) -> (V, C), in fp32; but in bf16 for bf16 on a CPU, where torch cannot return fp32.

    In fp16, a sum over many rows can exceed 65,504 although it is in range after the multiplication by 1/N. bf16 has the range of fp32; its
    products are summed in fp32 and rounded once.
    """
    if x.is_cuda:
        return torch.mm(gradient.t(), x, out_dtype=torch.float32)
    if x.dtype != torch.float16:
        return torch.mm(gradient.t(), x)
    result, wide = torch.empty(gradient.shape[1], x.shape[1]), x.float()
    for rows, columns in zip(result.split(COLUMNS), gradient.split(COLUMNS, dim=1), strict=True):
        torch.mm(columns.float().t(), wide, out=rows)
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses of all rows. The gradients are of the sum too, because those of the mean, 1/N of it, would underflow in fp16.

    The gradient of the weight stays in fp32 until the backward pass has multiplied it by 1/N and the loss scale.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        with_gradients: bool,
        kernel: Kernel,
    ) -> torch.Tensor:
        total = torch.zeros((), device=x.device)
        rows = max(1, LOGITS_BYTES // (len(weight) * x.element_size()))
        parts = list(zip(x.split(rows), targets.split(rows), strict=True))
        dx = torch.empty_like(x) if with_gradients else None
        dweight = torch.zeros_like(weight, dtype=torch.float32) if with_gradients and len(parts) > 1 else None
        for index, (part, part_targets) in enumerate(parts):
            logits = F.linear(part, weight, bias)  # (rows, V)
            total += kernel(logits, part_targets)
            if dx is not None:
                torch.mm(logits, weight, out=dx[index * rows : index * rows + len(part)])
                of_part = _weight_gradient(logits, part)
                dweight = of_part if dweight is None else dweight.add_(of_part)
        if dx is not None and dweight is not None:
            ctx.gradients = dx, dweight
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dweight = ctx.gradients
        del ctx.gradients  # scaled in place, so they can be used only once
        scale = scale.view(1, 1)  # CUDA would round a scale without dimensions to the dtype of dx first
        return dx.mul_(scale), dweight.mul_(scale).to(dx.dtype), None, None, None, None
