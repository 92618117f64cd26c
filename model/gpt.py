"""GPT-2 (Radford et al. 2019), the one model that every recipe trains.

Written out here, and not taken from a library, because techniques have to reach into it: they replace the walk over the blocks
(`GPT.block_runner`) and nothing else. The result is GPT-2 to the bit of its mathematics: a test copies the weights into
transformers' GPT2LMHeadModel and compares logits and every gradient.

    deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --preset nano

At step 0 the loss is about ln(vocab_size): 9.01 for 8,192 tokens, 10.82 for 50,257.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from model.accounting import LOSS_ROWS
from model.presets import GPTConfig

INIT_STD = 0.02  # Radford et al. 2018, section 4.1, and GPT-2's code, for every matrix and both embeddings
BlockRunner = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor | None, float], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
HeadLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]


def generator_for(place: str) -> torch.Generator:
    """A generator on the CPU, whose numbers are a pure function of `place`."""
    digest = hashlib.sha256(place.encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big"))


@torch.no_grad()
def draw_normal(parameter: torch.Tensor, std: float, seed: int, name: str, rows: int | None = None) -> None:
    """Fills `parameter` with N(0, std^2), a pure function of (seed, name); rows from `rows` on become zero.

    Drawn in fp32 on the CPU and rounded into the parameter, so that bf16 weights are the rounding of the fp32 ones and every
    device, rank and order of construction starts from the same model. A parameter on the meta device is left alone.
    """
    if parameter.is_meta:
        return
    generator = generator_for(f"{seed}/{name}")
    rows = len(parameter) if rows is None else rows
    # torch.normal and not torch.empty or torch.randn: deepspeed.zero.Init replaces those two, and what they return is in the
    # engine's dtype whatever dtype is asked for.
    drawn = torch.normal(0.0, std, (rows, *parameter.shape[1:]), generator=generator, dtype=torch.float32, device="cpu")
    parameter[:rows].copy_(drawn)
    parameter[rows:].zero_()


class Linear(nn.Linear):
    """(..., n_in) -> (..., n_out) with bias, drawn by its own constructor.

    deepspeed.zero.Init partitions a module's parameters the moment its constructor returns: whoever initialises them later would
    write into empty tensors. This is why leaves know their name.
    """

    def __init__(self, n_in: int, n_out: int, seed: int, name: str, std: float = INIT_STD):
        super().__init__(n_in, n_out)
        draw_normal(self.weight, std, seed, f"{name}.weight")
        nn.init.zeros_(self.bias)

    def reset_parameters(self) -> None:
        """Nothing: torch's own draw would take numbers from the global generator, only to be written over."""


class Embedding(nn.Embedding):
    """int64 (...) -> (..., d_model), drawn by its own constructor. Rows from `used_rows` on are padding, and zero."""

    def __init__(self, n_rows: int, d_model: int, seed: int, name: str, used_rows: int | None = None):
        super().__init__(n_rows, d_model)
        draw_normal(self.weight, INIT_STD, seed, f"{name}.weight", used_rows)

    def reset_parameters(self) -> None:
        """Nothing, as in Linear."""


def attend(qkv: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> torch.Tensor:
    """Causal self-attention, qkv (B, T, 3, n_head, d_head) -> (B, T, n_head d_head), by torch's best kernel for the device.

    mask: None, or what is added to the scores in place of causality alone, (B, 1, T, T). dropout: of the probabilities.
    """
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, T, 3, n_head, d_head) -> 3 x (B, n_head, T, d_head), views
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout)
    return y.transpose(1, 2).flatten(2)  # (B, n_head, T, d_head) -> (B, T, C)


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) -> (B, T, C), with one fused projection for queries, keys and values.

    `mask` is None, or what is added to the scores in place of causality alone, (B, 1, T, T): GPT puts it there for as long as a pass
    through its blocks lasts. `attend` is what computes it, from its projections on: a technique may assign a kernel of its own.
    """

    mask: torch.Tensor | None
    attend: Attend

    def __init__(self, config: GPTConfig, name: str):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.mask = None
        self.attend = attend
        residual_std = INIT_STD / math.sqrt(2 * config.n_layer)  # 2 n_layer branches add up on the residual stream (GPT-2, section 2.3)
        self.c_attn = Linear(config.d_model, 3 * config.d_model, config.init_seed, f"{name}.c_attn")
        self.c_proj = Linear(config.d_model, config.d_model, config.init_seed, f"{name}.c_proj", residual_std)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)  # (B, T, 3C) -> (B, T, 3, n_head, d_head)
        y = self.attend(qkv, self.mask, self.dropout if self.training else 0.0)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """(B, T, C) -> (B, T, 4C) -> (B, T, C), with GPT-2's tanh approximation of GELU (`gelu_new`)."""

    def __init__(self, config: GPTConfig, name: str):
        super().__init__()
        residual_std = INIT_STD / math.sqrt(2 * config.n_layer)
        self.c_fc = Linear(config.d_model, 4 * config.d_model, config.init_seed, f"{name}.c_fc")
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = Linear(4 * config.d_model, config.d_model, config.init_seed, f"{name}.c_proj", residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


def add_scaled(x: torch.Tensor, branch: torch.Tensor, scale: float) -> torch.Tensor:
    """x + scale branch, all of them (B, T, C)."""
    if torch.compiler.is_compiling():
        # torch.compile makes `alpha` a constant, and would compile anew for every scale. A factor stays an argument, and is fused.
        return x + scale * branch
    return torch.add(x, branch, alpha=scale)


class Block(nn.Module):
    """One pre-LN block, (B, T, C) -> (B, T, C).

    `branch_scale` multiplies both residual branches. It is 1 unless a block runner that drops blocks makes up for their absence
    (1 / keep probability). It costs no pass over memory, and at 1 it changes no bit.
    `index` is the block's place in the model, from 0.
    """

    def __init__(self, config: GPTConfig, index: int):
        super().__init__()
        self.index = index
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config, f"h.{index}.attn")
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config, f"h.{index}.mlp")

    def forward(self, x: torch.Tensor, branch_scale: float = 1.0) -> torch.Tensor:
        x = add_scaled(x, self.attn(self.ln_1(x)), branch_scale)
        return add_scaled(x, self.mlp(self.ln_2(x)), branch_scale)


def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy, fp32, of the logits x (N, C) weight (V, C) + bias (V,) at targets int64 (N,), -100 where none is wanted."""
    logits = F.linear(x, weight, bias)  # (N, V)
    total = sum(
        F.cross_entropy(rows.float(), row_targets, reduction="sum")  # fp32: a sum of 8,192 bf16 exponentials keeps 8 bits
        for rows, row_targets in zip(logits.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True)
    )
    return total / (targets != -100).sum()


class TiedHead(nn.Module):
    """The output layer, whose weight is the token embedding itself: (B, T, C) -> logits or loss.

    It holds the embedding's parameter under its own name and allocates none, so that a second vocab x d_model matrix never
    exists, and ZeRO-3, which gathers what a module holds when that module runs, gathers it here too.
    The loss is computed inside, by `loss`, so that a kernel which fuses it with the matmul finds the weight gathered: a technique may
    assign one of its own.
    """

    padding_bias: torch.Tensor | None
    loss: HeadLoss

    def __init__(self, embedding: Embedding, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = embedding.weight
        self.loss = linear_cross_entropy
        # Padded columns get the logit -inf through the matmul's own bias: probability 0, hence a gradient of exactly 0 for
        # their rows. Writing -inf into the logits would make the backward pass copy their whole gradient (B x T x vocab fp32).
        bias = None
        if vocab_size < embedding.num_embeddings:
            bias = torch.zeros(embedding.num_embeddings)
            bias[vocab_size:] = -torch.inf
        self.register_buffer("padding_bias", bias, persistent=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, T, C); targets int64 (B, T) or None. Returns the scalar fp32 mean loss, or the logits (B, T, vocab_size)."""
        if targets is None:
            return self.logits(x)
        return self.loss(x.flatten(0, 1), self.weight, self._bias(x), targets.flatten())  # (B, T, C) -> (B T, C), (B, T) -> (B T)

    def logits(self, x: torch.Tensor, linear: Product = F.linear) -> torch.Tensor:
        """x (..., C) -> (..., vocab_size)."""
        return linear(x, self.weight, self._bias(x))[..., : self.vocab_size]  # (..., padded_vocab_size) -> (..., vocab_size)

    def _bias(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if self.padding_bias is None else self.padding_bias.to(x.dtype)


def run_all_blocks(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """The default block runner: every block in turn, (B, T, C) -> (B, T, C)."""
    for block in blocks:
        x = block(x)
    return x


def document_starts(tokens: torch.Tensor, document_end: int) -> torch.Tensor:
    """Where in its row the document of each token begins: (B, T) -> int64 (B, T). `document_end` is a document's last token."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    # The roll brings a row's last token before its first, where a document begins in any case: at 0.
    return torch.where(tokens.roll(1, dims=1) == document_end, index, 0).cummax(dim=1).values


def document_mask(starts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of attention so that a token sees its document up to itself: (B, T) -> (B, 1, T, T), 0 and -inf.

    starts: from `document_starts`. In the dtype of the queries, because a boolean mask is converted to it in every block, and the
    converted one kept for the backward pass: n_layer of them in place of one.
    """
    index = torch.arange(starts.shape[1], device=starts.device)
    hidden = (index < starts.unsqueeze(-1)) | (index > index.unsqueeze(-1))  # (T,) with (B, T, 1), and with (T, 1) -> (B, T, T)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)


class GPT(nn.Module):
    """GPT-2 with learned positions and a tied head.

    Where `config.document_end` is set, a row of tokens may hold several documents: each has positions from 0 on, and its logits are those
    of the document alone.

    The names in its `state_dict` are GPT-2's, the matrices have nn.Linear's (out, in) layout, and no technique changes either.

    `block_runner(blocks, x) -> x`, x (B, T, C), is the one hook: techniques that drop blocks or recompute activations assign
    their own. Evaluation wants the full model, so a runner that drops blocks does so only while `blocks.training`. One runner may
    call another with a part of the blocks, and again in the backward pass: a runner goes by `block.index`, and counts no calls.

    Weights are a pure function of (config.init_seed, parameter name): N(0, 0.02^2), the projections onto the residual stream
    divided by sqrt(2 n_layer), biases 0, norms 1, padded rows of the embedding 0. Under `deepspeed.zero.Init` too.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = Embedding(config.padded_vocab_size, config.d_model, config.init_seed, "wte", config.vocab_size)
        self.wpe = Embedding(config.seq_len, config.d_model, config.init_seed, "wpe")
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.d_model)
        self.lm_head = TiedHead(self.wte, config.vocab_size)
        self.block_runner: BlockRunner = run_all_blocks

    def used_rows(self, length: int) -> dict[torch.Tensor, int]:
        """Of the embeddings, how many rows, from the first on, can get gradients from sequences of `length` tokens."""
        return {self.wte.weight: self.config.vocab_size, self.wpe.weight: length}

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """tokens int64 (B, T), T at most seq_len; targets int64 (B, T), -100 where no loss is wanted, or None.

        Returns the scalar mean cross-entropy in fp32, nats a token; without targets the logits (B, T, vocab_size).
        Raises ValueError where T exceeds seq_len.
        """
        length = tokens.shape[1]
        if length > self.config.seq_len:
            raise ValueError(f"a sequence of {length} tokens: this model has positions for {self.config.seq_len} (seq_len)")
        positions = torch.arange(length, device=tokens.device)
        if self.config.document_end is None:
            x = self.wte(tokens) + self.wpe(positions)  # (B, T, C) + (T, C)
            x = self.block_runner(self.h, self.drop(x))
        else:
            starts = document_starts(tokens, self.config.document_end)
            x = self.wte(tokens) + self.wpe(positions - starts)  # (B, T, C) + (B, T, C)
            x = self._run_masked(self.drop(x), document_mask(starts, x.dtype))
        return self.lm_head(self.ln_f(x), targets)

    def _run_masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The block runner under `mask`, which lies with the blocks while they run: forward, and again in this pass's backward.

        A runner may compute blocks again in the backward pass, by when other forward passes may have been. So the gradient that enters the
        last block puts this pass's mask back, and the one that leaves the first takes it away.
        """

        def put(mask: torch.Tensor | None) -> None:
            for block in cast("Iterable[Block]", self.h):
                block.attn.mask = mask

        if x.requires_grad:
            x.register_hook(lambda gradient: put(None))
        put(mask)
        try:
            x = self.block_runner(self.h, x)
        finally:
            put(None)
        if x.requires_grad:
            x.register_hook(lambda gradient: put(mask))
        return x


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: `weight_decay` on matrices and embeddings, 0 on biases and norms (GPT-3, appendix B).

    Each trainable parameter once: `parameters()` counts the tied weight once. A parameter that ZeRO-3 has partitioned is flat
    (its own ndim is 1) and keeps its true shape in `ds_shape`.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            (decayed if len(shape) >= 2 else kept).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
