"""The fields of a model, the architectures, and the named sizes with the training values that `"auto"` takes from them.

The JSONs of `ds_configs/` have `"auto"` where the right value depends on the model, so that one JSON serves every size. This module does
not import torch, so that `--help` is fast.

    deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --preset micro --architecture llama
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

VOCAB_MULTIPLE = 128  # rows of the token embedding; keeps the head's matmul on tensor-core tiles (50,257 -> 50,304)
MLP_MULTIPLE = 128  # the default width of a gated MLP is rounded up to it
GATED = ("swiglu",)  # MLPs whose first matrix computes a gate too


@dataclass(frozen=True)
class ModelShape:
    """The sizes and the architecture of a GPT: what does not depend on the tokenizer.

    n_layer blocks of n_head heads and width d_model, for sequences of at most seq_len tokens. The other fields are the architecture; their
    defaults are GPT-2's.

    Attributes:
        positions: "learned" (an embedding per position, added to the tokens') or "rotary" (queries and keys are rotated by an angle that
            grows with the position; Su et al., arXiv 2104.09864).
        norm: "layernorm", or "rmsnorm", which subtracts no mean and has no bias (Zhang and Sennrich, arXiv 1910.07467).
        mlp: "gelu", or "swiglu": silu(gate) x up instead of one activation (Shazeer, arXiv 2002.05202).
        n_kv_head: heads of keys and values, each shared by n_head / n_kv_head query heads (Ainslie et al., arXiv 2305.13245); 0: n_head.
        d_head: width of a head; 0: d_model / n_head.
        d_ff: width of the MLP's hidden layer; 0: 4 d_model for gelu, and for swiglu 8/3 d_model, rounded up to a multiple of 128, with
            which its three matrices have about as many parameters as gelu's two.
        n_expert: MLPs of each block, of which a router chooses n_expert_active for each token (Shazeer et al., arXiv 1701.06538); 0: one.
        n_expert_active: 0: 2, if there are experts.
        d_expert: width of an expert's hidden layer; 0: d_ff / n_expert_active. d_ff is n_expert_active x d_expert: a token is multiplied
            with as many weights as by one MLP of this width.
        qk_norm: an RMSNorm over each head's queries and keys, before the rotation (Dehghani et al., arXiv 2302.05442; Qwen3).
        bias: biases in the linear layers of the blocks, and in layernorms.
        tied_head: the head's weight is the token embedding.
        rope_theta: base of the rotary frequencies.
        norm_eps: added under the square root of every norm, for numerical stability.

    A field given as 0 is replaced by its default. Raises ValueError, with a message of one line, for an impossible shape.
    """

    n_layer: int
    n_head: int
    d_model: int
    seq_len: int
    dropout: float = 0.0
    positions: str = "learned"
    norm: str = "layernorm"
    mlp: str = "gelu"
    n_kv_head: int = 0
    d_head: int = 0
    d_ff: int = 0
    n_expert: int = 0
    n_expert_active: int = 0
    d_expert: int = 0
    qk_norm: bool = False
    bias: bool = True
    tied_head: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_sizes(self)
        hidden = -(-8 * self.d_model // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE if self.mlp in GATED else 4 * self.d_model
        self._default(n_kv_head=self.n_head, d_head=self.d_model // self.n_head)
        if self.n_expert:
            self._default(n_expert_active=2)
            self._default(d_expert=(self.d_ff or hidden) // self.n_expert_active)
            hidden = self.n_expert_active * self.d_expert
        self._default(d_ff=hidden)
        check_architecture(self)

    def _default(self, **values: int) -> None:
        for name, value in values.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)  # the class is frozen for everyone else

    def recorded(self) -> dict[str, Any]:
        """The fields that `run.json` records: all, but those of experts only if there are any; for a GPT-2 only the sizes, so that older
        files stay valid."""
        sizes = {name: getattr(self, name) for name in SIZES}
        if self.d_model % self.n_head == 0 and ModelShape(**sizes) == self:
            return sizes
        return {name: value for name, value in asdict(self).items() if self.n_expert or name not in EXPERT_FIELDS}

    @property
    def components(self) -> str:
        """The fields that differ from GPT-2's, as the end of a line: ", rotary, rmsnorm, swiglu, 2 heads of keys and values"."""
        parts = [value for name in CHOICES if (value := getattr(self, name)) != getattr(ModelShape, name)]
        parts += [f"{self.n_kv_head} heads of keys and values"] * (self.n_kv_head < self.n_head) + ["QK-norm"] * self.qk_norm
        parts += [f"{self.n_expert_active} of {self.n_expert} experts of {self.d_expert}"] * bool(self.n_expert)
        return "".join(f", {part}" for part in parts)

    @property
    def qkv_heads(self) -> tuple[int, int, int]:
        """The heads of queries, keys and values, in the order of the rows of `c_attn`."""
        return self.n_head, self.n_kv_head, self.n_kv_head

    @property
    def hidden_width(self) -> int:
        """Width of the hidden layer of the MLP, or of each expert."""
        return self.d_expert if self.n_expert else self.d_ff

    @property
    def c_fc_width(self) -> int:
        """Width of the output of the first linear layer of the MLP, or of an expert: `hidden_width`, and as much for a gate."""
        return self.hidden_width * (2 if self.mlp in GATED else 1)

    @property
    def active_c_fc_width(self) -> int:
        """`c_fc_width` of all experts that a token goes through, or of the MLP."""
        return self.c_fc_width * max(1, self.n_expert_active)

    @property
    def attention_width(self) -> int:
        """Width of the output of attention, all heads together: d_model, unless d_head was given."""
        return self.n_head * self.d_head


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelShape):
    """A shape with its vocabulary and seed: everything that `model.gpt.GPT` and its initial weights depend on.

    document_end: the token that ends a document, which attention then does not cross; None if each row is one text.
    """

    vocab_size: int
    init_seed: int = 0
    document_end: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("vocab_size", self.vocab_size)
        end = self.document_end
        if end is not None and not (type(end) is int and 0 <= end < self.vocab_size):
            raise ValueError(f"document_end is {end!r}: it must be a token, from 0 to {self.vocab_size - 1}")
        super().__post_init__()

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding: vocab_size rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True)
class Preset:
    """A shape, and the values of `"auto"` for it.

    Attributes:
        lr: peak learning rate.
        global_batch_size: sequences per step over all ranks.
        micro_batch_size: largest micro-batch of a rank, in sequences; smaller if ranks x micro_batch_size exceeds the global batch.
        steps, warmup_steps: optimizer steps.
        architecture: of the model, unless a flag names another.
        published: fields of the published model that are not those of its architecture; for that architecture only.
        vocab_size: of the published model; assumed without a corpus.
    """

    shape: ModelShape
    lr: float
    global_batch_size: int
    micro_batch_size: int
    steps: int
    warmup_steps: int
    architecture: str = "gpt2"
    published: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int = 50_257

    def fields_in(self, architecture: str) -> Mapping[str, Any]:
        """The fields that the preset sets for a model of `architecture`."""
        return self.published if architecture == self.architecture else {}


def check_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}: it must be a positive whole number")


def check_sizes(shape: ModelShape) -> None:
    """Raises ValueError, with the value and the fix in one line, for impossible sizes."""
    for name in ("n_layer", "n_head", "d_model", "seq_len"):
        check_positive_int(name, getattr(shape, name))
    for name in ("n_kv_head", "d_head", "d_ff", *EXPERT_FIELDS):
        if getattr(shape, name) != 0:
            check_positive_int(name, getattr(shape, name))
    if shape.d_head == 0 and shape.d_model % shape.n_head:
        raise ValueError(f"d_model is {shape.d_model} and n_head is {shape.n_head}: d_model must be a multiple of n_head")
    if not 0 <= shape.dropout < 1:
        raise ValueError(f"dropout is {shape.dropout}: it must be at least 0 and below 1")


def check_architecture(shape: ModelShape) -> None:
    """Raises ValueError, with the value and the fix in one line, for fields that are unknown or do not fit together."""
    for name, known in CHOICES.items():
        if getattr(shape, name) not in known:
            raise ValueError(f"{name} is {getattr(shape, name)!r}: it must be {' or '.join(known)}")
    for name in ("qk_norm", "bias", "tied_head"):
        if not isinstance(getattr(shape, name), bool):
            raise ValueError(f"{name} is {getattr(shape, name)!r}: it must be true or false")
    for name in ("rope_theta", "norm_eps"):
        value = getattr(shape, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}: it must be a number above 0")
    if shape.n_head % shape.n_kv_head:
        raise ValueError(f"n_head is {shape.n_head} and n_kv_head is {shape.n_kv_head}: n_head must be a multiple of n_kv_head")
    experts, active, width = (getattr(shape, name) for name in EXPERT_FIELDS)
    if experts < active or (width and not experts):
        given = f"n_expert is {experts}, n_expert_active {active}, d_expert {width}"
        raise ValueError(f"{given}: n_expert must be at least n_expert_active, and 2 or more for experts")
    if active == 1:
        raise ValueError("n_expert_active is 1: the share of one expert is 1, so the router would not learn; give 2 or more")
    if experts and shape.d_ff != active * width:
        raise ValueError(f"d_ff is {shape.d_ff}, n_expert_active x d_expert {active} x {width}: d_ff must be this product, or be left out")
    if experts and shape.bias:
        raise ValueError(f"n_expert is {experts}: experts have no biases; add --bias false, or use --architecture qwen3_moe")
    if shape.positions == "rotary" and shape.d_head % 2:
        raise ValueError(f"d_head is {shape.d_head}: rotary positions rotate pairs, so it must be even; change d_model, n_head or d_head")


class NormSize(NamedTuple):
    """What a norm needs.

    Attributes:
        parameters: their names; a bias is there only if the model has biases.
        statistics: numbers per row that it keeps for the backward pass.
        fp32_copies: whether it also keeps its input and result in fp32 on a CPU, where it is not fused.
    """

    parameters: tuple[str, ...]
    statistics: int
    fp32_copies: bool


NORM_SIZES = {"layernorm": NormSize(("weight", "bias"), 2, False), "rmsnorm": NormSize(("weight",), 1, True)}
#: The values of the fields that name a component. `model/gpt.py` maps each name to its constructor.
CHOICES = {"positions": ("learned", "rotary"), "norm": tuple(NORM_SIZES), "mlp": ("gelu", "swiglu")}
_MODERN = {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
#: A small number of experts, which each preset may change.
_EXPERTS = {"n_expert": 8, "n_expert_active": 2}
#: The forms that transformers reads -> the fields that differ from the defaults of `ModelShape`. llama has the constants of Llama 3, qwen3
#: those of Qwen3, whose models of up to 4 B parameters are tied; mixtral and qwen3_moe are both with experts.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {**_MODERN, "tied_head": False, "rope_theta": 500_000.0, "norm_eps": 1e-5},
    "qwen3": {**_MODERN, "qk_norm": True, "rope_theta": 1_000_000.0, "norm_eps": 1e-6},
    "mixtral": {**_MODERN, **_EXPERTS, "tied_head": False, "rope_theta": 1_000_000.0, "norm_eps": 1e-5},
    "qwen3_moe": {**_MODERN, **_EXPERTS, "qk_norm": True, "tied_head": False, "rope_theta": 1_000_000.0, "norm_eps": 1e-6},
}
#: The models of these forms, in a sentence.
MODELS_IN_WORDS = "GPT-2, Llama, Qwen3, Mixtral or Qwen3-MoE"
#: The fields of `ModelShape` that a preset sets, and those that are an architecture.
SIZES = ("n_layer", "n_head", "d_model", "seq_len", "dropout")
EXPERT_FIELDS = ("n_expert", "n_expert_active", "d_expert")
FIELDS = tuple(field.name for field in fields(ModelShape) if field.name not in SIZES)


def shared_heads(n_head: int) -> int:
    """The heads of keys and values of llama and qwen3: the smallest divisor of n_head that is at least n_head / 4 and at
    least 2 (1 if n_head is 1). 32: 8, 12: 3, 4: 2."""
    return next(heads for heads in range(1, n_head + 1) if n_head % heads == 0 and heads >= max(n_head / 4, min(2, n_head)))


def shape_of(sizes: ModelShape, architecture: str, given: Mapping[str, Any]) -> ModelShape:
    """The model of a preset in an architecture. Values that are `given` override those of both.

    Args:
        sizes: those of the preset.
        architecture: a key of `ARCHITECTURES`.

    Raises:
        ValueError: the values are impossible together; one line.
    """
    values = {name: getattr(sizes, name) for name in SIZES}
    values |= ARCHITECTURES[architecture] | dict(given)
    if architecture != "gpt2" and "n_kv_head" not in given:
        values["n_kv_head"] = shared_heads(values["n_head"])
    return ModelShape(**values)


# Sources. Sizes gpt2*: Radford et al. 2019, table 2, with the published checkpoints' head counts (64 wide each).
# Sizes gpt3-*, learning rates and batches in tokens: GPT-3 (arXiv 2005.14165), table 2.1; a gpt2-* takes the row of its
# nearest parameter count (large: 760M, xl: 1.3B). Two rows of that table cannot be built as printed: 1.3B has 24 heads of 128 at
# width 2,048 (here 16 x 128), 13B has width 5,140 with 40 heads of 128 (here 5,120 = 40 x 128).
# Batches: 0.5 M tokens = 512 x 1,024; 1 M = 1,024 x 1,024 = 512 x 2,048; 2 M = 1,024 x 2,048.
# Warm-up: 375 M tokens (same paper, appendix B) = 715 steps of 0.5 M, 358 of 1 M, 179 of 2 M.
# Steps: 20 tokens per parameter (Chinchilla, arXiv 2203.15556) instead of GPT-3's 300 B tokens.
# Shapes llama*, qwen3*: config.json of huggyllama/llama-7b, meta-llama/Meta-Llama-3-8B, Qwen/Qwen3-8B and Qwen/Qwen3-0.6B; qwen3 at the
# 4,096 tokens of most of its pretraining (arXiv 2505.09388, section 3.2). Rates and batches: LLaMA (arXiv 2302.13971, table 2 and section
# 2.2), Llama 3 (arXiv 2407.21783, table 3; LLaMA's batch and warm-up); Qwen's are not published, so GPT-3's row of the nearest count.
# llama3.1-8b: the shape of meta-llama/Llama-3.1-8B and its batch in tokens. Its positions beyond 8,192 were stretched (rope_scaling of the
# kind "llama3"), which `RotaryPositions` does not do: the same rope_theta, and no stretching.
# Shapes of experts: config.json of mistralai/Mixtral-8x7B-v0.1 and Qwen/Qwen3-30B-A3B; moe-7b-a1b has the sizes, rate, batch and warm-up of
# OLMoE-1B-7B (arXiv 2409.02060), in Qwen3's form. Mixtral's training is not published: LLaMA's rate. Steps: 20 tokens per active
# parameter.
# nano and micro are for minutes on two cores with the 8k vocabulary; they are narrower than all rows of that table, so rates are higher.
PRESETS: dict[str, Preset] = {
    # 8 x 128 = 1,024 tokens per step; 1,000 steps = 1.0 M tokens, a third of the corpus, two minutes on two cores
    "nano": Preset(ModelShape(4, 4, 256, 128), lr=2e-3, global_batch_size=8, micro_batch_size=8, steps=1_000, warmup_steps=100),
    # 8 x 256 = 2,048 tokens per step; 1,000 steps = 2.0 M tokens
    "micro": Preset(ModelShape(6, 6, 384, 256), lr=1.5e-3, global_batch_size=8, micro_batch_size=8, steps=1_000, warmup_steps=100),
    # 20 x 124 M = 2.49 B tokens
    "gpt2": Preset(ModelShape(12, 12, 768, 1024), 6e-4, global_batch_size=512, micro_batch_size=8, steps=4_750, warmup_steps=715),
    # 20 x 355 M = 7.1 B
    "gpt2-medium": Preset(ModelShape(24, 16, 1024, 1024), 3e-4, global_batch_size=512, micro_batch_size=8, steps=13_540, warmup_steps=715),
    # 20 x 774 M = 15.5 B
    "gpt2-large": Preset(ModelShape(36, 20, 1280, 1024), 2.5e-4, global_batch_size=512, micro_batch_size=4, steps=29_530, warmup_steps=715),
    # 20 x 1,558 M = 31.2 B
    "gpt2-xl": Preset(ModelShape(48, 25, 1600, 1024), 2e-4, global_batch_size=1024, micro_batch_size=4, steps=29_710, warmup_steps=358),
    # 20 x 1,316 M = 26.3 B
    "gpt3-1.3b": Preset(ModelShape(24, 16, 2048, 2048), 2e-4, global_batch_size=512, micro_batch_size=4, steps=25_100, warmup_steps=358),
    # 20 x 2,652 M = 53.0 B
    "gpt3-2.7b": Preset(ModelShape(32, 32, 2560, 2048), 1.6e-4, global_batch_size=512, micro_batch_size=2, steps=50_580, warmup_steps=358),
    # 20 x 6,658 M = 133 B
    "gpt3-6.7b": Preset(ModelShape(32, 32, 4096, 2048), 1.2e-4, global_batch_size=1024, micro_batch_size=2, steps=63_500, warmup_steps=179),
    # 20 x 12,853 M = 257 B
    "gpt3-13b": Preset(ModelShape(40, 40, 5120, 2048), 1e-4, global_batch_size=1024, micro_batch_size=1, steps=122_580, warmup_steps=179),
    # 20 x 6,738 M = 135 B
    "llama-7b": Preset(
        ModelShape(32, 32, 4096, 2048),
        lr=3e-4,
        global_batch_size=2048,
        micro_batch_size=2,
        steps=32_130,
        warmup_steps=2_000,
        architecture="llama",
        published={"n_kv_head": 32, "d_ff": 11_008, "rope_theta": 10_000.0, "norm_eps": 1e-6},
        vocab_size=32_000,
    ),
    # 20 x 8,030 M = 161 B
    "llama3-8b": Preset(
        ModelShape(32, 32, 4096, 8192),
        lr=3e-4,
        global_batch_size=512,
        micro_batch_size=1,
        steps=38_290,
        warmup_steps=2_000,
        architecture="llama",
        published={"n_kv_head": 8, "d_ff": 14_336},
        vocab_size=128_256,
    ),
    # 20 x 8,030 M = 161 B; 32 x 131,072 tokens are llama3-8b's batch of 512 x 8,192
    "llama3.1-8b": Preset(
        ModelShape(32, 32, 4096, 131_072),
        lr=3e-4,
        global_batch_size=32,
        micro_batch_size=1,
        steps=38_290,
        warmup_steps=2_000,
        architecture="llama",
        published={"n_kv_head": 8, "d_ff": 14_336},
        vocab_size=128_256,
    ),
    # 20 x 1,282 M active = 25.6 B
    "moe-7b-a1b": Preset(
        ModelShape(16, 16, 2048, 4096),
        lr=4e-4,
        global_batch_size=1024,
        micro_batch_size=2,
        steps=6_110,
        warmup_steps=2_500,
        architecture="qwen3_moe",
        published={"n_kv_head": 16, "n_expert": 64, "n_expert_active": 8, "d_expert": 1_024},
        vocab_size=50_304,
    ),
    # 20 x 12.9 B active = 258 B
    "mixtral-8x7b": Preset(
        ModelShape(32, 32, 4096, 32_768),
        lr=3e-4,
        global_batch_size=128,
        micro_batch_size=1,
        steps=61_520,
        warmup_steps=2_000,
        architecture="mixtral",
        published={"n_kv_head": 8, "d_expert": 14_336},
        vocab_size=32_000,
    ),
    # 20 x 3.35 B active = 67 B
    "qwen3-30b-a3b": Preset(
        ModelShape(48, 32, 2048, 4096),
        lr=1.6e-4,
        global_batch_size=512,
        micro_batch_size=1,
        steps=31_950,
        warmup_steps=358,
        architecture="qwen3_moe",
        published={"n_kv_head": 4, "d_head": 128, "n_expert": 128, "n_expert_active": 8, "d_expert": 768},
        vocab_size=151_936,
    ),
    # 20 x 8,191 M = 164 B
    "qwen3-8b": Preset(
        ModelShape(36, 32, 4096, 4096),
        lr=1.2e-4,
        global_batch_size=512,
        micro_batch_size=1,
        steps=78_120,
        warmup_steps=179,
        architecture="qwen3",
        published={"n_kv_head": 8, "d_head": 128, "d_ff": 12_288, "tied_head": False},
        vocab_size=151_936,
    ),
    # 20 x 596 M = 11.9 B
    "qwen3-0.6b": Preset(
        ModelShape(28, 16, 1024, 4096),
        lr=2.5e-4,
        global_batch_size=128,
        micro_batch_size=4,
        steps=22_740,
        warmup_steps=715,
        architecture="qwen3",
        published={"n_kv_head": 8, "d_head": 128, "d_ff": 3_072},
        vocab_size=151_936,
    ),
}
