"""The named model sizes, and the training values that `"auto"` takes from them.

The JSONs of `ds_configs/` have `"auto"` where the right value depends on the model, so that one JSON serves every size. This module does
not import torch, so that `--help` is fast.

    deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --preset micro
"""

from dataclasses import dataclass

VOCAB_MULTIPLE = 128  # rows of the token embedding; keeps the head's matmul on tensor-core tiles (50,257 -> 50,304)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a GPT that do not depend on the tokenizer.

    n_layer blocks of n_head heads and width d_model (d_model / n_head per head), for sequences of at most seq_len tokens.
    Raises ValueError, with a message of one line, for an impossible shape.
    """

    n_layer: int
    n_head: int
    d_model: int
    seq_len: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_shape(self)


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelShape):
    """A shape with its vocabulary and seed: everything that `model.gpt.GPT` and its initial weights depend on.

    init_noise: the standard deviation of the noise that is added to the initial weights, in units of theirs.
    document_end: the token that ends a document, which attention then does not cross; None if each row is one text.
    """

    vocab_size: int
    init_seed: int = 0
    init_noise: float = 0.0
    document_end: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("vocab_size", self.vocab_size)
        if self.document_end is not None and not 0 <= self.document_end < self.vocab_size:
            raise ValueError(f"document_end is {self.document_end}: it must be a token, from 0 to {self.vocab_size - 1}")
        super().__post_init__()

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding: vocab_size rounded up to a multiple of 128."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True)
class Preset:
    """A shape, and the values of `"auto"` for it.

    Attributes:
        lr: peak learning rate; the schedule ends at `min_lr`.
        global_batch_size: sequences per step over all ranks.
        micro_batch_size: largest micro-batch of a rank, in sequences; smaller if ranks x micro_batch_size exceeds the global batch.
        steps, warmup_steps: optimizer steps.
    """

    shape: ModelShape
    lr: float
    global_batch_size: int
    micro_batch_size: int
    steps: int
    warmup_steps: int

    @property
    def min_lr(self) -> float:
        """The final learning rate: 10% of the peak (GPT-3, appendix B)."""
        return self.lr / 10


def check_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}: it must be a positive whole number")


def check_shape(shape: ModelShape) -> None:
    """Raises ValueError, with the value and the fix in one line, for an impossible shape."""
    for name in ("n_layer", "n_head", "d_model", "seq_len"):
        check_positive_int(name, getattr(shape, name))
    if shape.d_model % shape.n_head:
        raise ValueError(f"d_model is {shape.d_model} and n_head is {shape.n_head}: d_model must be a multiple of n_head")
    if not 0 <= shape.dropout < 1:
        raise ValueError(f"dropout is {shape.dropout}: it must be at least 0 and below 1")


# Sources. Sizes gpt2*: Radford et al. 2019, table 2, with the published checkpoints' head counts (64 wide each).
# Sizes gpt3-*, learning rates and batches in tokens: GPT-3 (arXiv 2005.14165), table 2.1; a gpt2-* takes the row of its
# nearest parameter count (large: 760M, xl: 1.3B). Two rows of that table cannot be built as printed: 1.3B has 24 heads of 128 at
# width 2,048 (here 16 x 128), 13B has width 5,140 with 40 heads of 128 (here 5,120 = 40 x 128).
# Batches: 0.5 M tokens = 512 x 1,024; 1 M = 1,024 x 1,024 = 512 x 2,048; 2 M = 1,024 x 2,048.
# Warm-up: 375 M tokens (same paper, appendix B) = 715 steps of 0.5 M, 358 of 1 M, 179 of 2 M.
# Steps: 20 tokens per parameter (Chinchilla, arXiv 2203.15556) instead of GPT-3's 300 B tokens.
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
}
