"""The GPT that every recipe trains: a GPT-2 (Radford et al. 2019), a Llama, a Qwen3 or a mixture of experts, as its
configuration says.

It is not taken from a library because techniques replace parts of it, such as the loop over the blocks (`GPT.block_runner`). A test copies
the weights into transformers' models of these names and compares logits and every gradient.

    deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --preset nano --architecture llama

Components are chosen by name when the model is built; `forward` does not depend on the choice. model/cache.py has its own forward pass, for
sampling. To add a norm:

1. Add its constructor to `NORMS`, and its parameters and what it saves for the backward pass to `NORM_SIZES` in model/presets.py; the flag
   then accepts it.
2. Add it to the table in docs/configuration.md. `launch/export.py` refuses it unless model/hf.py converts it; if it does, add a model with
   the norm to `MODELS` in tests/test_model.py, which compares it with transformers.

An MLP goes into `MLPS` and `CHOICES`; its sizes follow from `ModelShape.c_fc_width`. Experts are in model/experts.py.

At step 0 the loss is about ln(vocab_size): 9.01 for 8,192 tokens, 10.82 for 50,257.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from model.accounting import LOSS_ROWS
from model.experts import Experts
from model.layers import INIT_STD, Embedding, Linear
from model.layout import DocumentBounds, Layout, Mask, Rotation, RowPart, document_mask, document_starts, rotate, rotation_at
from model.presets import GPTConfig, ModelShape

BlockRunner = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mask | None, float], torch.Tensor]
Rotate = Callable[[torch.Tensor, torch.Tensor, Rotation | None], tuple[torch.Tensor, torch.Tensor]]
HeadLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# --- the components that an architecture names ------------------------------------------------------------------------------------------


class LearnedPositions(Embedding):
    """GPT-2's: an embedding for each position, added to the tokens'."""

    def __init__(self, config: GPTConfig, name: str):
        super().__init__(config.seq_len, config, name)

    def add_to(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add the embeddings of `positions`, (T,) or (B, T), to x (B, T, C)."""
        return x + self(positions)

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation | None:
        """None: queries and keys are not rotated."""
        return None


class RotaryPositions(nn.Module):
    """Nothing is added to the tokens' embeddings: queries and keys are rotated. No parameters, and no buffer that bf16 would round."""

    def __init__(self, config: GPTConfig, name: str):
        super().__init__()
        self.d_head, self.theta = config.d_head, config.rope_theta

    def add_to(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x (B, T, C), unchanged."""
        return x

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation | None:
        """The rotation of queries and keys at `positions`, (T,) or (B, T)."""
        return rotation_at(positions, self.d_head, self.theta, dtype)


class SwiGLU(nn.Module):
    """silu(gate) x up: (..., 2 d_ff), the gate first -> (..., d_ff)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


POSITIONS: dict[str, type[LearnedPositions | RotaryPositions]] = {"learned": LearnedPositions, "rotary": RotaryPositions}
#: Norms, of a width and the configuration.
NORMS: dict[str, Callable[[int, ModelShape], nn.Module]] = {
    "layernorm": lambda width, config: nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias),
    "rmsnorm": lambda width, config: nn.RMSNorm(width, eps=config.norm_eps),
}
#: The activation between the two linear layers of the MLP: (..., ModelShape.c_fc_width) -> (..., hidden_width).
MLPS: dict[str, Callable[[], nn.Module]] = {"gelu": lambda: nn.GELU(approximate="tanh"), "swiglu": SwiGLU}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, dropout: float) -> torch.Tensor:
    """Causal self-attention by torch's best kernel for the device: q (B, T, n_head, d_head) -> (B, T, n_head d_head).

    Args:
        k, v: (B, T, n_kv_head, d_head); each of their heads serves n_head / n_kv_head consecutive query heads.
        mask: None for the causal mask over whole rows.
        dropout: probability, for the attention probabilities.
    """
    if isinstance(mask, DocumentBounds):
        return attend_in_documents(q, k, v, mask, dropout)
    if q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # On CUDA only the flash kernel supports grouped heads, and only in bf16 or fp16 and without a mask.
        k, v = with_heads(k, q.shape[2]), with_heads(v, q.shape[2])
    grouped = k.shape[2] < q.shape[2]
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, T, heads, d_head) -> (B, heads, T, d_head), views
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, enable_gqa=grouped)
    return y.transpose(1, 2).flatten(2)  # (B, n_head, T, d_head) -> (B, T, n_head d_head)


def attend_in_documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: DocumentBounds, dropout: float) -> torch.Tensor:
    """`attend` without a mask: one call for each document, or one for all by the kernel for variable lengths that torch has on CUDA."""
    rows = q.shape[:2]
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))  # (B, T, heads, d_head) -> (B T, heads, d_head)
    if q.is_cuda and q.dtype != torch.float32 and not dropout and q.shape[2] % 8 == 0 and torch.cuda.get_device_capability() >= (8, 0):
        from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler, two seconds

        bounds, longest = documents.bounds.int(), max(documents.lengths)
        k, v = (with_heads(part[None], q.shape[1])[0] for part in (k, v))
        y = cast("torch.Tensor", varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0)))  # (-1, 0): causal
        y = y.flatten(1)
    else:
        # `split`, because the gradient of a slice would be as large as all tokens.
        each = zip(*(part[None].split(documents.lengths, dim=1) for part in (q, k, v)), strict=True)
        y = torch.cat([attend(q, k, v, None, dropout)[0] for q, k, v in each if q.shape[1]])
    return y.unflatten(0, rows)  # (B T, n_head d_head) -> (B, T, n_head d_head)


def with_heads(x: torch.Tensor, n_head: int) -> torch.Tensor:
    """Keys or values repeated for each query head that shares them: (B, T, n_kv_head, d_head) -> (B, T, n_head, d_head)."""
    return x if x.shape[2] == n_head else x.repeat_interleave(n_head // x.shape[2], dim=2)


# --- the model --------------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) -> (B, T, C), with one fused projection for queries, keys and values.

    Attributes:
        layout: mask and rotation of this batch, set by `GPT` during a forward or backward pass.
        attend, rotate: compute attention, and rotate queries and keys; a technique may assign other kernels.
    """

    layout: Layout
    attend: Attend
    rotate: Rotate

    def __init__(self, config: GPTConfig, name: str):
        super().__init__()
        self.qkv_heads, self.d_head = config.qkv_heads, config.d_head
        self.dropout = config.dropout
        self.layout = Layout()
        self.attend, self.rotate = attend, rotate
        residual_std = INIT_STD / math.sqrt(2 * config.n_layer)  # the residual stream is a sum of 2 n_layer branches (GPT-2, section 2.3)
        self.c_attn = Linear(config.d_model, sum(config.qkv_heads) * config.d_head, config, f"{name}.c_attn")
        self.q_norm = NORMS["rmsnorm"](config.d_head, config) if config.qk_norm else nn.Identity()
        self.k_norm = NORMS["rmsnorm"](config.d_head, config) if config.qk_norm else nn.Identity()
        self.c_proj = Linear(config.attention_width, config.d_model, config, f"{name}.c_proj", residual_std)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, rotation = self.layout
        y = self.attend(*self.heads(self.c_attn(x), rotation), mask, self.dropout if self.training else 0.0)
        return self.resid_dropout(self.c_proj(y))

    def heads(self, qkv: torch.Tensor, rotation: Rotation | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each (B, T, heads, d_head), normalized and rotated, from the output of `c_attn`."""
        q, k, v = qkv.unflatten(-1, (-1, self.d_head)).split(self.qkv_heads, dim=2)
        return *self.rotate(self.q_norm(q), self.k_norm(k), rotation), v


class MLP(nn.Module):
    """(B, T, C) -> (B, T, d_ff) -> (B, T, C). For swiglu, `c_fc` computes the gate and then the up projection."""

    def __init__(self, config: GPTConfig, name: str):
        super().__init__()
        residual_std = INIT_STD / math.sqrt(2 * config.n_layer)
        self.c_fc = Linear(config.d_model, config.c_fc_width, config, f"{name}.c_fc")
        self.act = MLPS[config.mlp]()
        self.c_proj = Linear(config.hidden_width, config.d_model, config, f"{name}.c_proj", residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


def mlp_of(config: GPTConfig, name: str) -> MLP | Experts:
    """The MLP of a block, or its experts."""
    return Experts(config, name, MLPS[config.mlp]) if config.n_expert else MLP(config, name)


def add_scaled(x: torch.Tensor, branch: torch.Tensor, scale: float) -> torch.Tensor:
    """x + scale * branch, each (B, T, C)."""
    if torch.compiler.is_compiling():
        # torch.compile treats `alpha` as a constant and would recompile for every scale.
        return x + scale * branch
    return torch.add(x, branch, alpha=scale)


class Block(nn.Module):
    """One pre-norm block, (B, T, C) -> (B, T, C).

    `branch_scale` multiplies both residual branches: 1, or 1 / (keep probability) if a block runner drops blocks. A scale of 1 is
    bit-identical to plain addition. `index` is the number of the block, from 0.
    """

    def __init__(self, config: GPTConfig, index: int):
        super().__init__()
        self.index = index
        self.ln_1 = NORMS[config.norm](config.d_model, config)
        self.attn = Attention(config, f"h.{index}.attn")
        self.ln_2 = NORMS[config.norm](config.d_model, config)
        self.mlp = mlp_of(config, f"h.{index}.mlp")

    def forward(self, x: torch.Tensor, branch_scale: float = 1.0) -> torch.Tensor:
        x = add_scaled(x, self.attn(self.ln_1(x)), branch_scale)
        return add_scaled(x, self.mlp(self.ln_2(x)), branch_scale)


def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the cross-entropies, fp32, of the logits x (N, C) @ weight (V, C)^T + bias (V,) for targets int64 (N,); -100 counts 0."""
    logits = F.linear(x, weight, bias)  # (N, V)
    return sum(
        (
            F.cross_entropy(rows.float(), row_targets, reduction="sum")  # fp32: bf16 has 8 bits, too few for a sum of 8,192 exponentials
            for rows, row_targets in zip(logits.split(LOSS_ROWS), targets.split(LOSS_ROWS), strict=True)
        ),
        start=torch.zeros((), device=x.device),
    )


class Head(nn.Module):
    """The output layer: (B, T, C) -> logits or loss. Its weight is the token embedding, or a separate one.

    A tied weight is registered here too, so ZeRO-3, which gathers a module's parameters when the module runs, also gathers it for the
    head. `loss` computes the summed loss inside of this module, where the weight is gathered; a technique may assign a kernel that fuses it
    with the matmul.

    `token_losses` are functions of logits (N, vocab_size) and targets (N,), of which -100 is ignored, that return a finite loss (N,) per
    token. In training, their mean is added to the loss that is differentiated; the value that is returned stays the cross-entropy.
    """

    padding_bias: torch.Tensor | None
    loss: HeadLoss

    def __init__(self, config: GPTConfig, embedding: Embedding):
        super().__init__()
        self.vocab_size = config.vocab_size
        self.weight = (
            embedding.weight if config.tied_head else Embedding(config.padded_vocab_size, config, "lm_head", config.vocab_size).weight
        )
        self.loss = linear_cross_entropy
        self.token_losses: list[TokenLoss] = []
        # The bias of the matmul sets the logits of padded columns to -inf: their probability is 0, and so is the gradient of their rows.
        # Writing -inf into the logits would make the backward pass copy their whole gradient (B x T x vocab fp32).
        padded = config.vocab_size < config.padded_vocab_size
        self.register_buffer("padding_bias", torch.empty(config.padded_vocab_size) if padded else None, persistent=False)
        self.hide_padding()

    def hide_padding(self) -> None:
        """Fill the bias; needed again for a model whose buffers are uninitialized."""
        if self.padding_bias is not None:
            self.padding_bias[: self.vocab_size] = 0
            self.padding_bias[self.vocab_size :] = -torch.inf

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None, counted: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, T, C); targets int64 (B, T) or None. Returns the logits (B, T, vocab_size) or the summed loss / `counted`, an fp32 scalar.

        counted: by default the number of targets that are not -100, so that the loss is their mean.
        """
        if targets is None:
            return self.logits(x)
        x, targets = x.flatten(0, 1), targets.flatten()  # (B, T, C) -> (B T, C), (B, T) -> (B T)
        counted = (targets != -100).sum() if counted is None else counted
        loss = self.loss(x, self.weight, self._bias(x), targets) / counted
        if self.training and self.token_losses:
            logits, counts = self.logits(x), targets != -100  # computed again, because a kernel of `loss` may keep none
            each = [one(logits, targets) for one in self.token_losses]
            shapes = [tuple(losses.shape) for losses in each]
            # A shape (N, 1) would be broadcast, and train N times the loss.
            assert {*shapes} == {tuple(targets.shape)}, f"token_losses returned shapes {shapes}; each must be {tuple(targets.shape)}"
            added = (sum(losses.float() for losses in each) * counts).sum() / counted
            loss = loss + (added - added.detach())
        return loss

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., vocab_size)."""
        return F.linear(x, self.weight, self._bias(x))[..., : self.vocab_size]  # (..., padded_vocab_size) -> (..., vocab_size)

    def _bias(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if self.padding_bias is None else self.padding_bias.to(x.dtype)


def run_all_blocks(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """The default block runner: all blocks in order, (B, T, C) -> (B, T, C)."""
    for block in blocks:
        x = block(x)
    return x


class GPT(nn.Module):
    """The model of a `GPTConfig`.

    If `config.document_end` is set, a row of tokens may hold several documents. Positions start from 0 in each, and attention does not
    cross its boundaries.

    The names in `state_dict` are GPT-2's for every architecture, and matrices have the (out, in) layout of nn.Linear. No technique changes
    either.

    `block_runner(blocks, x) -> x`, x (B, T, C), runs the blocks. Techniques that drop blocks or recompute activations assign their own.
    Evaluation uses the full model, so a runner may drop blocks only while `blocks.training`. A runner may be called with a part of the
    blocks, and again in the backward pass, so it must identify a block by `block.index` and not count calls.

    `row_part` is the part of each row that this rank embeds, runs through the blocks and predicts; a technique that gives a row to several
    ranks assigns another. Positions, documents and the number of targets are those of the whole row, which every rank reads.

    Initial weights are a pure function of (config.init_seed, parameter name), also under `deepspeed.zero.Init`: N(0, 0.02^2), divided by
    sqrt(2 n_layer) for the projections onto the residual stream; biases 0, norms 1, padded rows of the embedding and the head 0.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = Embedding(config.padded_vocab_size, config, "wte", config.vocab_size)
        self.wpe = POSITIONS[config.positions](config, "wpe")
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.ln_f = NORMS[config.norm](config.d_model, config)
        self.lm_head = Head(config, self.wte)
        self.block_runner: BlockRunner = run_all_blocks
        self.row_part = RowPart()

    def used_rows(self, length: int) -> dict[torch.Tensor, int]:
        """For each embedding and the head, the number of leading rows that can get gradients from sequences of `length` tokens."""
        rows = dict.fromkeys((self.wte.weight, self.lm_head.weight), self.config.vocab_size)  # one key if tied
        return rows | dict.fromkeys(self.wpe.parameters(), length)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The input of the first block: (B, T) at positions (T,) or (B, T) -> (B, T, C)."""
        return self.drop(self.wpe.add_to(self.wte(tokens), positions))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The loss, or the logits.

        Args:
            tokens: int64 (B, T), T at most seq_len.
            targets: int64 (B, T), -100 is ignored; or None.

        Returns the scalar mean cross-entropy in fp32, nats per token; without targets the logits (B, T, vocab_size). Where ranks share a
        row, what belongs to the own part: the logits, and a loss whose mean over these ranks is that of the row.
        Raises ValueError if T exceeds seq_len.
        """
        length = tokens.shape[1]
        if length > self.config.seq_len:
            raise ValueError(f"a sequence of {length} tokens: this model has positions for {self.config.seq_len} (seq_len)")
        positions, starts = torch.arange(length, device=tokens.device), None
        if self.config.document_end is not None:
            starts = document_starts(tokens, self.config.document_end)
            positions = positions - starts  # (T,) - (B, T)
        own, positions = self.row_part.of, self.row_part.of(positions)  # not `starts`: attention sees whole rows
        x = self.embed(own(tokens), positions)
        layout = Layout(None if starts is None else document_mask(starts, x.dtype), self.wpe.rotation(positions, x.dtype))
        x = self.ln_f(self._run_blocks(x, layout))
        if targets is None:
            return self.lm_head(x)
        # The ranks of a row average their losses: each divides the sum over its targets by an equal part of the row's number of targets.
        return self.lm_head(x, own(targets), (targets != -100).sum() / self.row_part.parts)

    def _run_blocks(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Runs the blocks with `layout` set in them, during this forward pass and its backward pass.

        A runner may recompute blocks in the backward pass, and other forward passes may have happened in between. Gradient hooks therefore
        set this pass's layout again when the backward pass enters the last block, and remove it when it leaves the first.
        """

        def set_layout(layout: Layout) -> None:
            for block in cast("Iterable[Block]", self.h):
                block.attn.layout = layout

        if x.requires_grad:
            x.register_hook(lambda gradient: set_layout(Layout()))
        set_layout(layout)
        try:
            x = self.block_runner(self.h, x)
        finally:
            set_layout(Layout())
        if x.requires_grad:
            x.register_hook(lambda gradient: set_layout(layout))
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
