"""The plain PyTorch loop that the engine is held against: no DeepSpeed, no distributed, no code of ours but the model."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from data_pipeline.sampler import shuffled_positions
from data_pipeline.shards import open_corpus
from model.gpt import GPT, BlockRunner, run_all_blocks
from recipes.progressive_layer_drop.technique import draws
from recipes.random_ltd.technique import draw_positions
from tests.helpers import config_of

#: (variance, steps, beta2) -> the variance that stays.
Settle = Callable[[torch.Tensor, int, float], torch.Tensor]


def run_all_but(index: int) -> BlockRunner:
    """A block runner that leaves one block out, whose parameters then get no gradient."""

    def run(blocks: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = x if block.index == index else block(x)
        return x

    return run


def progressive_layer_drop(seed: int, n_layer: int, theta: float, gamma: float) -> Callable[[int, int], BlockRunner]:
    """Algorithm 1 of arXiv 2010.13369, with the draws of the recipe: the block runner of (step, micro-step)."""

    def runner_of(step: int, micro_step: int) -> BlockRunner:
        theta_t = (1 - theta) * math.exp(-gamma * (step - 1)) + theta
        probability, plan = 1.0, []
        for number in draws(seed, step, n_layer):
            plan.append((number < probability, probability))
            probability -= (1 - theta_t) / n_layer

        def run(blocks: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
            for block, (runs, p) in zip(blocks, plan, strict=True):
                if runs:
                    x = x + block.attn(block.ln_1(x)) / p
                    x = x + block.mlp(block.ln_2(x)) / p
            return x

        return run

    return runner_of


def random_ltd(seed: int, seq_len: int, layers: Collection[int], length_of: Callable[[int], int]) -> Callable[[int, int], BlockRunner]:
    """Random-LTD (arXiv 2211.11586) with the draws of the recipe: the block runner of (step, micro-step).

    layers: which blocks drop tokens. length_of: how many of a window's tokens they keep at a step.
    What comes in may be whole windows or, in their order, the documents of which each consists.
    """

    def runner_of(step: int, micro_step: int) -> BlockRunner:
        kept = {layer: draw_positions(seed, step, layer, length_of(step), seq_len).tolist() for layer in layers}
        next_start = 0

        def run(blocks: torch.nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
            nonlocal next_start
            start, end = next_start, next_start + x.shape[1]
            next_start = end % seq_len
            for block in blocks:
                own = [position - start for position in kept.get(block.index, range(seq_len)) if start <= position < end]
                if own:
                    x, part = x.clone(), on_tokens(block, x, own)
                    x[:, own] = part
            return x

        return run

    return runner_of


def on_tokens(block: torch.nn.Module, x: torch.Tensor, own: list[int]) -> torch.Tensor:
    """The output of `block` for some tokens of x. Where positions are rotations, the tokens keep theirs."""
    layout = block.attn.layout
    if layout.rotation is not None:
        block.attn.layout = layout._replace(rotation=tuple(part[:, own] for part in layout.rotation))
    part = block(x[:, own])
    block.attn.layout = layout
    return part


def whole_windows(model: GPT, windows: torch.Tensor, document_end: int) -> torch.Tensor:
    """The mean loss of windows (B, T + 1), each taken for one text."""
    return model(windows[:, :-1], windows[:, 1:])


def document_by_document(model: GPT, windows: torch.Tensor, document_end: int) -> torch.Tensor:
    """The mean loss of windows (B, T + 1), cut after each `document_end`; every document is a forward pass of its own."""
    total = torch.zeros((), device=windows.device)
    for window in windows:
        lengths = (window[:-1] == document_end).nonzero()[:, 0].add(1).diff(prepend=window.new_zeros(1)).tolist()
        lengths.append(len(window) - 1 - sum(lengths))
        for tokens, targets in zip(window[:-1].split(lengths), window[1:].split(lengths), strict=True):
            if len(tokens):
                total = total + model(tokens[None], targets[None]) * len(tokens)
    return total / windows[:, 1:].numel()


class PublishedAdamW(torch.optim.Optimizer):
    """AdamW (Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, 1711.05101) in fp64, written out.

    corrects: whether the bias of the moments is corrected.
    """

    def __init__(self, params: Iterable[dict], lr: float, betas: tuple[float, float], eps: float, corrects: bool = True):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.corrects, self.steps = corrects, 0

    def state_of(self, p: torch.Tensor, count: int) -> list[torch.Tensor]:
        self.state[p] = self.state[p] or [torch.zeros_like(p, dtype=torch.float64) for _ in range(count)]
        return self.state[p]

    def direction(self, p: torch.Tensor, group: dict) -> torch.Tensor:
        """What is taken from a parameter, over the learning rate."""
        (m, v), (b1, b2) = self.state_of(p, 2), group["betas"]
        m.mul_(b1).add_((1 - b1) * p.grad.double())
        v.mul_(b2).add_((1 - b2) * p.grad.double() ** 2)
        biases = (1 - b1**self.steps, 1 - b2**self.steps) if self.corrects else (1.0, 1.0)
        return m / biases[0] / ((v / biases[1]).sqrt() + group["eps"]) + group["weight_decay"] * p.double()

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(p.double() - group["lr"] * self.direction(p, group))


class PublishedLamb(PublishedAdamW):
    """Algorithm 2 of arXiv 1904.00962. limits: of the trust ratio."""

    def __init__(self, *arguments: Any, limits: tuple[float, float] = (0.01, 10.0), **options: Any):
        super().__init__(*arguments, **options)
        self.limits = limits

    def direction(self, p: torch.Tensor, group: dict) -> torch.Tensor:
        update = super().direction(p, group)
        return (_trust_ratio(p, update, self.limits) or 1.0) * update


class PublishedMuon(PublishedAdamW):
    """https://kellerjordan.github.io/posts/muon/, beside AdamW for embeddings, the head and vectors.

    scale: the factor of the rate of (rows, columns). adam: AdamW's rate over Muon's. adam_matrices: the matrices that AdamW trains, of a
    GPT-2 wte and wpe. parts: the rows of matrices of this many rows.
    """

    def __init__(
        self,
        *arguments: Any,
        scale: Callable[[int, int], float] = lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
        adam: float = 1.0,
        nesterov: bool = True,
        adam_matrices: Collection[int] = (0, 1),
        parts: Mapping[int, tuple[int, ...]] = {192: (64, 64, 64)},
        **options: Any,
    ):
        super().__init__(*arguments, **options)
        self.scale, self.adam, self.nesterov, self.parts = scale, adam, nesterov, parts
        matrices, _ = self.param_groups
        self.hidden = {p for number, p in enumerate(matrices["params"]) if number not in adam_matrices}

    def direction(self, p: torch.Tensor, group: dict) -> torch.Tensor:
        if p not in self.hidden:
            return self.adam * super().direction(p, group)
        (average,), gradient = self.state_of(p, 1), p.grad.double()
        average.mul_(0.95).add_(0.05 * gradient)
        update = 0.05 * gradient + 0.95 * average if self.nesterov else average
        parts = update.split(self.parts.get(len(p), len(p)))
        changes = [self.scale(*part.shape) * self.iterated(part) for part in parts]
        return torch.cat(changes) + group["weight_decay"] * p.double()

    @staticmethod
    def iterated(g: torch.Tensor) -> torch.Tensor:
        x = g / g.norm()
        for _ in range(5):
            square = x.mT @ x if len(x) > len(x.mT) else x @ x.mT
            polynomial = -4.7750 * square + 2.0315 * square @ square
            x = 3.4445 * x + (x @ polynomial if len(x) > len(x.mT) else polynomial @ x)
        return x


def _trust_ratio(p: torch.Tensor, update: torch.Tensor, limits: tuple[float, float]) -> float | None:
    """The norm of the weights over that of the update, within limits; None where one of them is 0."""
    norms = float(p.double().norm()), float(update.norm())
    return min(max(norms[0] / norms[1], limits[0]), limits[1]) if all(norms) else None


class OfEachRank(torch.optim.Optimizer):
    """Base of the references whose ranks have gradients of their own, all on one process: `own`, of each rank its part of the mean.

    `enter` and `keep` must be told of each micro-batch, before and after it, in turns of the ranks, and `clip` by what all gradients are
    multiplied. `reduction`: a scale belongs to a tensor on the workers, and to a tensor's part in a chunk on the servers, of which each
    rank has one: the buffer of all tensors, each at a multiple of 8 elements, is cut into `ranks` chunks of a multiple of 32.

    clips: whether the ranks' own gradients are clipped.
    """

    def __init__(self, params: Iterable[dict], lr: float, betas: tuple[float, float], eps: float, ranks: int, clips: bool = True):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.ranks, self.clips, self.steps = ranks, clips, 0
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.sum, *self.own = (self.zeros() for _ in range(1 + ranks))
        self.reduction = PublishedAllReduce([p.numel() for p in self.parameters], ranks)

    def zeros(self) -> list[torch.Tensor]:
        return [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters]

    def enter(self, micro_step: int) -> None:
        """Before a micro-batch."""

    def keep(self, micro_step: int) -> None:
        for own, total, p in zip(self.own[micro_step % self.ranks], self.sum, self.parameters, strict=True):
            own += p.grad.double() - total
            total.copy_(p.grad)

    def clip(self, factor: float) -> None:
        if self.clips:
            torch._foreach_mul_([gradient for own in self.own for gradient in own], factor)

    def reduced(self, values: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """The compressed mean of what each rank has."""
        flat = self.reduction([[x.reshape(-1) for x in one] for one in values])
        return [mean.view_as(p) for mean, p in zip(flat, self.parameters, strict=True)]

    def forget(self) -> None:
        """The gradients of the step."""
        for tensors in (self.sum, *self.own):
            torch._foreach_zero_(tensors)


class PublishedCompressed(OfEachRank):
    """Of arXiv 2102.02888 and 2104.06069, on one process in fp64: whole gradients for `freeze_step` steps; then the variance stays, and the
    ranks compress. On one rank nothing is compressed.

    corrects: whether the moments' bias is corrected.
    """

    def __init__(self, *arguments: Any, freeze_step: int, settle: Settle, corrects: bool = True, **options: Any):
        super().__init__(*arguments, **options)
        self.freeze_step, self.settle, self.corrects = freeze_step, settle, corrects
        self.m, self.v = self.zeros(), self.zeros()

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        self.frozen = self.steps > self.freeze_step
        b1, b2 = self.param_groups[0]["betas"]
        self.last = [m.clone() for m in self.m]
        for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
            if self.steps == self.freeze_step + 1:
                v.copy_(self.settle(v, self.freeze_step, b2))
            if not self.frozen:
                v.mul_(b2).add_((1 - b2) * p.grad.double() ** 2)
            if not self.frozen or self.ranks == 1:
                m.mul_(b1).add_((1 - b1) * p.grad.double())
        if self.frozen and self.ranks > 1:
            # A rank's gradient is that of its own mean loss; what it has brought to the mean is 1 / ranks of it.
            values = [[b1 * m + (1 - b1) * self.ranks * g for m, g in zip(self.m, own, strict=True)] for own in self.own]
            divisors = self.divisors()
            mean = self.reduced([[m / divisor for m, divisor in zip(one, divisors, strict=True)] for one in values])
            self.m = [m * divisor for m, divisor in zip(mean, divisors, strict=True)]
        biases = 1 - b1**self.steps, 1 - b2 ** min(self.steps, self.freeze_step)
        bias1, bias2 = biases if self.corrects else (1.0, 1.0)
        place = itertools.count()
        for group in self.param_groups:
            for p in group["params"]:
                index = next(place)
                divisor = (self.v[index] / bias2).sqrt() + group["eps"]
                p.sub_((group["lr"] * self.step_of(index, p, self.m[index] / bias1 / divisor, divisor, group)).to(p.dtype))
        self.forget()

    def divisors(self) -> list[float] | list[torch.Tensor]:
        """What the momenta are divided by before they are compressed, and multiplied by after."""
        return [1.0] * len(self.parameters)

    def step_of(self, place: int, p: torch.Tensor, update: torch.Tensor, divisor: torch.Tensor, group: dict) -> torch.Tensor:
        """What is taken from a parameter, over the learning rate. update: m / divisor. divisor: the root of the variance, and eps."""
        raise NotImplementedError


class PublishedOneBitAdam(PublishedCompressed):
    """Algorithm 1 of arXiv 2102.02888; weight decay is decoupled."""

    def step_of(self, place: int, p: torch.Tensor, update: torch.Tensor, divisor: torch.Tensor, group: dict) -> torch.Tensor:
        return update + group["weight_decay"] * p


class PublishedOneBitLamb(PublishedCompressed):
    """Algorithm 1 of arXiv 2104.06069."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.ratios: list[float | None] = [None] * len(self.parameters)
        self.factors = [1.0] * len(self.parameters)
        self.fresh: list[torch.Tensor] = []

    def divisors(self) -> list[torch.Tensor]:
        beta2, eps = self.param_groups[0]["betas"][1], self.param_groups[0]["eps"]
        bias2 = 1 - beta2**self.freeze_step if self.corrects else 1.0
        return [(v / bias2).sqrt() + eps for v in self.v]

    def step_of(self, place: int, p: torch.Tensor, update: torch.Tensor, divisor: torch.Tensor, group: dict) -> torch.Tensor:
        whole = update + group["weight_decay"] * p.double()
        if self.frozen:
            return (self.ratios[place] or 1.0) * self.factor_of(place, update, whole, divisor, group) * whole
        ratio, mean = _trust_ratio(p, whole, (0.01, 10.0)), self.ratios[place]
        if ratio is not None:
            self.ratios[place] = ratio if mean is None else 0.9 * mean + 0.1 * ratio
        return (ratio or 1.0) * whole

    def factor_of(self, place: int, update: torch.Tensor, whole: torch.Tensor, divisor: torch.Tensor, group: dict) -> float:
        b1, b2 = group["betas"]
        if not self.fresh:
            self.fresh = [v.clone() for v in self.v]
        fresh = self.fresh[place]
        fresh.mul_(b2).add_((1 - b2) * ((self.m[place] - b1 * self.last[place]) / (1 - b1)) ** 2)
        corrected = fresh / (1 - b2**self.steps) if self.corrects else fresh
        factor = float((divisor / (corrected.sqrt() + group["eps"])).max())
        if group["weight_decay"]:
            part = min(1.0, float(update.norm() / whole.norm()))
            factor = factor * part + 1 - part
        last, factor = self.factors[place], min(max(factor, 0.5), 4.0)
        self.factors[place] = min(max(factor, 0.9 * last), 1.1 * last)
        return self.factors[place]


class PublishedZeroOneAdam(OfEachRank):
    """Algorithm 1 of arXiv 2202.06009 on one process in fp64, whose ranks have weights of their own; what is exchanged is the way of the
    weights. On one rank nothing is compressed, and no step is alone.

    renewed, exchanged: the steps of T_v and of T_u. corrects: whether the moments' bias is corrected.
    """

    def __init__(self, *arguments: Any, renewed: Collection[int], exchanged: Collection[int], corrects: bool = True, **options: Any):
        super().__init__(*arguments, **options)
        self.renewed, self.exchanged, self.corrects, self.variance_updates = renewed, exchanged, corrects, 0
        self.v, *self.m = (self.zeros() for _ in range(1 + self.ranks))
        self.way = [self.zeros() for _ in range(self.ranks)]
        self.agreed = [p.detach().double().clone() for p in self.parameters]
        self.rates, self.last_rates = 0.0, 1e-9

    def enter(self, micro_step: int) -> None:
        for p, agreed, way in zip(self.parameters, self.agreed, self.way[micro_step % self.ranks], strict=True):
            p.data.copy_(agreed - way)

    def divisors(self, beta2: float, eps: float) -> list[torch.Tensor]:
        found = []
        for v in self.v:
            v = v / (1 - beta2**self.variance_updates) if self.corrects else v
            found.append((v if self.variance_updates == self.steps else v.clamp(min=0.1 * float(v.mean()))).sqrt() + eps)
        return found

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        (b1, b2), lr, eps = (self.param_groups[0][key] for key in ("betas", "lr", "eps"))
        if renews := self.steps in self.renewed:
            self.variance_updates += 1
            for v, p in zip(self.v, self.parameters, strict=True):
                v.mul_(b2).add_((1 - b2) * p.grad.double() ** 2)
        divisors = self.divisors(b2, eps)
        rate = lr / (1 - b1**self.steps if self.corrects else 1.0)
        self.rates += rate
        for own, ms, ways in zip(self.own, self.m, self.way, strict=True):
            for g, p, m, way, divisor in zip(own, self.parameters, ms, ways, divisors, strict=True):
                m.mul_(b1).add_((1 - b1) * (p.grad.double() if renews else self.ranks * g))
                way.add_(rate * m / divisor)
        decays = [group["weight_decay"] for group in self.param_groups for _ in group["params"]]
        torch._foreach_mul_(self.agreed, [1 - lr * decay for decay in decays])
        if renews or self.ranks == 1 or self.steps in self.exchanged:
            mean = self.way[0]
            if not renews and self.ranks > 1:
                for errors in (*self.reduction.worker_errors, self.reduction.server_errors):
                    torch._foreach_mul_(errors, min(1.0, self.rates / self.last_rates))
                mean, self.last_rates = self.reduced(self.way), self.rates
                self.m = [[way * divisor / self.rates for way, divisor in zip(mean, divisors, strict=True)] for _ in self.m]
            torch._foreach_sub_(self.agreed, mean)
            self.way, self.rates = [self.zeros() for _ in self.way], 0.0
        self.forget()


class PublishedAllReduce:
    """The compressed mean of arXiv 2102.02888 over `ranks` lists of flat tensors, in fp64, all ranks on one process."""

    def __init__(self, sizes: Sequence[int], ranks: int):
        self.sizes, self.ranks = list(sizes), ranks
        starts = list(itertools.accumulate((-(-size // 8) * 8 for size in sizes), initial=0))
        chunk = -(-starts[-1] // (32 * ranks)) * 32
        #: For each tensor the parts of it that lie in different chunks, as slices of the tensor.
        self.parts = [
            [
                slice(max(0, rank * chunk - start), min(size, (rank + 1) * chunk - start))
                for rank in range(ranks)
                if start < (rank + 1) * chunk and start + size > rank * chunk
            ]
            for start, size in zip(starts, sizes, strict=False)
        ]
        options: dict[str, Any] = {"dtype": torch.float64, "device": os.environ["DS_ACCELERATOR"]}
        self.worker_errors = [[torch.zeros(size, **options) for size in sizes] for _ in range(ranks)]
        self.server_errors = [torch.zeros(size, **options) for size in sizes]
        #: Of the last round: each rank's (sign, scale) of each tensor; each part's of the result.
        self.sent: list[list[tuple[torch.Tensor, float]]] = []

    def __call__(self, values: list[list[torch.Tensor]], live: Sequence[int] | None = None) -> list[torch.Tensor]:
        """values: of each rank, its tensors. live: how many elements of each take part, from the first on; the rest is 0."""
        live, self.sent, results = live or self.sizes, [], []
        for errors in (*self.worker_errors, self.server_errors):
            for error, n in zip(errors, live, strict=True):
                error[n:] = 0
        for errors, tensors in zip(self.worker_errors, values, strict=True):
            self.sent.append([_published(error[:n], tensor[:n]) for error, tensor, n in zip(errors, tensors, live, strict=True)])
        for tensor, n in enumerate(live):
            mean = sum(sign * scale for sign, scale in (rank[tensor] for rank in self.sent)) / self.ranks
            result = torch.zeros_like(self.server_errors[tensor])
            for part in self.parts[tensor]:
                here = slice(part.start, min(part.stop, n))
                if here.start < here.stop:
                    sign, scale = _published(self.server_errors[tensor][here], mean[here])
                    result[here] = sign * scale
            results.append(result)
        return results


def _published(error: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Sign and scale of values + error; what they leave out becomes the error."""
    c = values + error
    scale = float(c.norm()) / math.sqrt(c.numel())
    sign = torch.where(c < 0, -1.0, 1.0).double()
    error.copy_(c - scale * sign)
    return sign, scale


class Step(NamedTuple):
    """What the reference saw in a step."""

    loss: float
    norm: float  # of the gradients, before clipping


def reference_steps(
    corpus_path: Path,
    shape: dict,
    steps: int,
    batch: int,
    lr: float,
    warmup: int,
    seed: int,
    clip: float = 1.0,
    accumulation: int = 1,
    runner_of: Callable[[int, int], BlockRunner] = lambda step, micro_step: run_all_blocks,
    skips: Collection[int] = (),
    loss_of: Callable[[GPT, torch.Tensor, int], torch.Tensor] = whole_windows,
    adam: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    cut: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, windows: windows,
    sizes: Sequence[int] = (),
) -> list[Step]:
    """`steps` steps in fp32 over the whole global batch, or more with as many tokens, the gradient norm taken in fp64.

    shape: sizes of the model, maybe fields, and maybe its "architecture".
    accumulation: into how many micro-batches the global batch is cut; of meaning only where runners differ between them.
    runner_of: the block runner of (step, micro-step).
    A parameter without a gradient has the gradient 0, and Adam steps it.
    skips: steps whose update is not made; the learning rate goes on.
    cut: what is trained on of the (step, windows (B, T + 1)).
    sizes: the sequences of each of the first steps; from there on, `batch`.
    loss_of: the mean loss of (model, micro-batch, the id that ends a document).

    It computes where the ranks of the tests do.
    """
    corpus, device = open_corpus(corpus_path), os.environ["DS_ACCELERATOR"]
    length = shape["seq_len"]
    data = np.concatenate(
        [np.fromfile(corpus.path / shard["file"], dtype=corpus.manifest["dtype"]) for shard in corpus.manifest["splits"]["train"]["shards"]]
    )
    fields = {name: value for name, value in shape.items() if name != "architecture"}
    model = GPT(config_of(shape.get("architecture", "gpt2"), fields, vocab_size=corpus.vocab_size, init_seed=seed)).to(device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = adam(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95), eps=1e-8
    )
    seen: list[Step] = []
    drawn, consumed, total, warmup_tokens = 0, 0, steps * batch * length, warmup * batch * length
    while consumed < total:
        step = len(seen) + 1
        size = sizes[step - 1] if step <= len(sizes) else batch
        order = shuffled_positions((len(data) - 1) // length, f"{corpus.fingerprint}:{seed}", drawn, size)
        drawn += size
        rows = [data[i * length : i * length + length + 1] for i in order]
        tokens = cut(step, torch.from_numpy(np.stack(rows).astype(np.int64)).to(device))
        consumed += tokens[:, 1:].numel()
        if consumed < warmup_tokens:
            rate = lr * consumed / warmup_tokens
        else:
            rate = 0.1 * lr + 0.9 * lr * (1 + math.cos(math.pi * min(1, (consumed - warmup_tokens) / (total - warmup_tokens)))) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        mean = 0.0
        for micro_step, micro_batch in enumerate(tokens.chunk(accumulation)):
            model.block_runner = runner_of(step, micro_step)
            if isinstance(optimizer, OfEachRank):
                optimizer.enter(micro_step)
            loss = loss_of(model, micro_batch, corpus.eot_id) / accumulation
            loss.backward()
            if isinstance(optimizer, OfEachRank):
                optimizer.keep(micro_step)
            mean += loss.item()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1.0, clip / (norm + 1e-6))
        if isinstance(optimizer, OfEachRank):
            optimizer.clip(min(1.0, clip / (norm + 1e-6)))
        if step not in skips:
            optimizer.step()
        optimizer.zero_grad()
        seen.append(Step(mean, norm))
    return seen
