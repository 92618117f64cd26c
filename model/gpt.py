"""GPT-2 (Radford et al. 2019), the one model that every recipe trains.

It is not taken from a library because techniques replace parts of it, such as the loop over the blocks (`GPT.block_runner`). A test copies
the weights into transformers' GPT2LMHeadModel and compares logits and every gradient.

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
    """A CPU generator whose seed is a hash of `place`."""
    digest = hashlib.sha256(place.encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big"))


@torch.no_grad()
def draw_normal(parameter: torch.Tensor, std: float, config: GPTConfig, name: str, rows: int | None = None) -> None:
    """Fills `parameter` with N(0, std^2), a pure function of (config.init_seed, name); rows from `rows` on are set to zero.

    Noise N(0, (config.init_noise x std)^2) is added. It has its own generator: the weights without it are the same.

    The numbers are drawn in fp32 on the CPU and rounded to the parameter's dtype, so all devices, ranks and orders of construction start
    from the same model, and bf16 weights are the rounded fp32 weights. A parameter on the meta device is not changed.
    """
    if parameter.is_meta:
        return
    rows = len(parameter) if rows is None else rows

    def normal(std: float, place: str) -> torch.Tensor:
        # torch.normal, because deepspeed.zero.Init replaces torch.empty and torch.randn with versions that ignore the dtype argument.
        size, generator = (rows, *parameter.shape[1:]), generator_for(f"{config.init_seed}/{place}")
        return torch.normal(0.0, std, size, generator=generator, dtype=torch.float32, device="cpu")

    drawn = normal(std, name)
    if config.init_noise:
        drawn += normal(config.init_noise * std, f"{name}/noise")
    parameter[:rows].copy_(drawn)
    parameter[rows:].zero_()


class Linear(nn.Linear):
    """(..., n_in) -> (..., n_out) with bias, initialized by its constructor.

    deepspeed.zero.Init partitions a module's parameters when its constructor returns, so they cannot be initialized later. The constructor
    therefore needs the parameter's name, from which its values are drawn.
    """

    def __init__(self, n_in: int, n_out: int, config: GPTConfig, name: str, std: float = INIT_STD):
        super().__init__(n_in, n_out)
        draw_normal(self.weight, std, config, f"{name}.weight")
        nn.init.zeros_(self.bias)

    def reset_parameters(self) -> None:
        """Does nothing: torch's initialization would use the global generator, and be overwritten."""


class Embedding(nn.Embedding):
    """int64 (...) -> (..., d_model), initialized by its constructor. Rows from `used_rows` on are padding, and zero."""

    def __init__(self, n_rows: int, config: GPTConfig, name: str, used_rows: int | None = None):
        super().__init__(n_rows, config.d_model)
        draw_normal(self.weight, INIT_STD, config, f"{name}.weight", used_rows)

    def reset_parameters(self) -> None:
        """Does nothing, as in `Linear`."""


def attend(qkv: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> torch.Tensor:
    """Causal self-attention by torch's best kernel for the device: qkv (B, T, 3, n_head, d_head) -> (B, T, n_head d_head).

    Args:
        mask: added to the scores instead of the causal mask, (B, 1, T, T); None for the causal mask.
        dropout: probability, for the attention probabilities.
    """
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, T, 3, n_head, d_head) -> 3 x (B, n_head, T, d_head), views
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout)
    return y.transpose(1, 2).flatten(2)  # (B, n_head, T, d_head) -> (B, T, C)


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) -> (B, T, C), with one fused projection for queries, keys and values.

    Attributes:
        mask: the mask of `attend`, set by `GPT` during a forward or backward pass.
        attend: computes attention from the projections; a technique may assign another kernel.
    """

    mask: torch.Tensor | None
    attend: Attend

    def __init__(self, config: GPTConfig, name: str):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.mask = None
        self.attend = attend
        residual_std = INIT_STD / math.sqrt(2 * config.n_layer)  # the residual stream is a sum of 2 n_layer branches (GPT-2, section 2.3)
        self.c_attn = Linear(config.d_model, 3 * config.d_model, config, f"{name}.c_attn")
        self.c_proj = Linear(config.d_model, config.d_model, config, f"{name}.c_proj", residual_std)
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
        self.c_fc = Linear(config.d_model, 4 * config.d_model, config, f"{name}.c_fc")
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = Linear(4 * config.d_model, config.d_model, config, f"{name}.c_proj", residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


def add_scaled(x: torch.Tensor, branch: torch.Tensor, scale: float) -> torch.Tensor:
    """x + scale * branch, each (B, T, C)."""
    if torch.compiler.is_compiling():
        # torch.compile treats `alpha` as a constant and would recompile for every scale.
        return x + scale * branch
    return torch.add(x, branch, alpha=scale)


class Block(nn.Module):
    """One pre-LN block, (B, T, C) -> (B, T, C).

    `branch_scale` multiplies both residual branches: 1, or 1 / (keep probability) if a block runner drops blocks. A scale of 1 changes no
    bit. `index` is the number of the block, from 0.
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
    """The mean cross-entropy, fp32, of the logits x (N, C) @ weight (V, C)^T + bias (V,) for targets int64 (N,); -100 is ignored."""
    logits = F.linear(x, weight, bias)  # (N, V)
    total = sum(
        F.cross_entropy(rows.float(), row_targets, reduction="sum")  # fp32: a sum of 8,192 bf16 exponentials keeps 8 bits
        for rows, row_targets in zip(logits.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True)
    )
    return total / (targets != -100).sum()


class TiedHead(nn.Module):
    """The output layer, whose weight is the token embedding: (B, T, C) -> logits or loss.

    The embedding's parameter is registered here too, so ZeRO-3, which gathers a module's parameters when the module runs, also gathers it
    for the head. `loss` computes the loss inside of this module, where the weight is gathered; a technique may assign a kernel that fuses
    it with the matmul.
    """

    padding_bias: torch.Tensor | None
    loss: HeadLoss

    def __init__(self, embedding: Embedding, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = embedding.weight
        self.loss = linear_cross_entropy
        # The bias of the matmul sets the logits of padded columns to -inf: their probability is 0, and so is the gradient of their rows.
        # Writing -inf into the logits would make the backward pass copy their whole gradient (B x T x vocab fp32).
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
    """The default block runner: all blocks in order, (B, T, C) -> (B, T, C)."""
    for block in blocks:
        x = block(x)
    return x


def document_starts(tokens: torch.Tensor, document_end: int) -> torch.Tensor:
    """For each token, the index in its row at which its document begins: (B, T) -> int64 (B, T). `document_end` ends a document."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    # The roll moves a row's last token to index 0, where a document begins in any case.
    return torch.where(tokens.roll(1, dims=1) == document_end, index, 0).cummax(dim=1).values


def document_mask(starts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The attention mask with which a token attends to its document up to itself: (B, T) -> (B, 1, T, T), 0 and -inf.

    Args:
        starts: from `document_starts`.
        dtype: of the queries. A boolean mask would be converted in every block, and each copy kept for the backward pass.
    """
    index = torch.arange(starts.shape[1], device=starts.device)
    hidden = (index < starts.unsqueeze(-1)) | (index > index.unsqueeze(-1))  # (T,) with (B, T, 1), and with (T, 1) -> (B, T, T)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf).unsqueeze(1)


class GPT(nn.Module):
    """GPT-2 with learned positions and a tied head.

    If `config.document_end` is set, a row of tokens may hold several documents. Positions start from 0 in each, and attention does not
    cross its boundaries.

    The names in `state_dict` are GPT-2's, and matrices have the (out, in) layout of nn.Linear. No technique changes either.

    `block_runner(blocks, x) -> x`, x (B, T, C), runs the blocks. Techniques that drop blocks or recompute activations assign their own.
    Evaluation uses the full model, so a runner may drop blocks only while `blocks.training`. A runner may be called with a part of the
    blocks, and again in the backward pass, so it must identify a block by `block.index` and not count calls.

    Initial weights are a pure function of (config.init_seed, parameter name), also under `deepspeed.zero.Init`: N(0, 0.02^2), divided by
    sqrt(2 n_layer) for the projections onto the residual stream; biases 0, norms 1, padded rows of the embedding 0. `config.init_noise`
    adds noise to what is drawn.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = Embedding(config.padded_vocab_size, config, "wte", config.vocab_size)
        self.wpe = Embedding(config.seq_len, config, "wpe")
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.d_model)
        self.lm_head = TiedHead(self.wte, config.vocab_size)
        self.block_runner: BlockRunner = run_all_blocks

    def used_rows(self, length: int) -> dict[torch.Tensor, int]:
        """For each embedding, the number of its first rows that sequences of `length` tokens can give gradients."""
        return {self.wte.weight: self.config.vocab_size, self.wpe.weight: length}

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The loss, or the logits.

        Args:
            tokens: int64 (B, T), T at most seq_len.
            targets: int64 (B, T), -100 is ignored; or None.

        Returns the scalar mean cross-entropy in fp32, nats per token; without targets the logits (B, T, vocab_size).
        Raises ValueError if T exceeds seq_len.
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
        """Runs the blocks with `mask` set in them, during this forward pass and its backward pass.

        A runner may recompute blocks in the backward pass, and other forward passes may have happened in between. Gradient hooks therefore
        set this pass's mask again when the backward pass enters the last block, and remove it when it leaves the first.
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
    """Parameter groups for an optimizer: `weight_decay` for matrices and embeddings, 0 for biases and norms (GPT-3, appendix B).

    Each trainable parameter is in one group; the tied weight counts once. A parameter that ZeRO-3 has partitioned is flat and has its shape
    in `ds_shape`.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            (decayed if len(shape) >= 2 else kept).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
