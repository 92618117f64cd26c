"""Parameters of a GPT, training FLOPs per token, and peak FLOP/s of devices, for MFU. Does not import torch.

python launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --preset gpt2 --explain
"""

import math
import re
from dataclasses import replace

from model.presets import NORM_SIZES, GPTConfig, ModelShape

# Rows of logits that are converted to fp32 at once: 512 x 8,192 x 4 bytes = 16 MiB, which the allocator reuses. Temporaries of 2,048 rows
# (64 MiB each) are mapped and page-faulted again in every step: 100 ms instead of 60 ms on two cores.
LOSS_ROWS = 512
#: Tokens of the longest row with a dense mask of documents. On one core, with documents of 150 and of 400 tokens, in fp32 and bf16, torch's
#: attention and that of recipes/fused_kernels take 0.5 to 1.6 times as long one document at a time at 512 tokens, 0.25 to 0.64 at 1,024.
DENSE_LENGTH = 512
#: Bytes of a number.
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}


def in_words(config: GPTConfig) -> str:
    """A model's parameters, sizes and the components that are not GPT-2's: "5.3 M parameters (4 layers, 256 wide, 128 tokens)"."""
    sizes = f"{config.n_layer} layers, {config.d_model} wide, {config.seq_len} tokens{config.components}"
    return f"{parameters_in_words(config)} ({sizes})"


def parameters_in_words(config: GPTConfig) -> str:
    """ "5.3 M parameters", with experts also how many of them a token uses."""
    return f"{parameter_count(config) / 1e6:,.1f} M parameters{active_in_words(config)}"


def active_in_words(config: GPTConfig) -> str:
    """What follows the number of parameters of a model with experts: ", 1.3 M active"."""
    return f", {parameter_count(config, active=True) / 1e6:,.1f} M active" if config.n_expert else ""


def block_tensors(config: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of one block, by its name in the block, in the order of `model.gpt.Block`."""
    C, qkv = config.d_model, sum(config.qkv_heads) * config.d_head

    def linear(name: str, n_in: int, n_out: int, *experts: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (*experts, n_out, n_in)} | ({f"{name}.bias": (n_out,)} if config.bias else {})

    experts = (config.n_expert,) if config.n_expert else ()
    head_norms = {f"attn.{name}.weight": (config.d_head,) for name in ("q_norm", "k_norm")} if config.qk_norm else {}
    return {
        **norm_tensors(config, "ln_1"),
        **linear("attn.c_attn", C, qkv),
        **head_norms,
        **linear("attn.c_proj", config.attention_width, C),
        **norm_tensors(config, "ln_2"),
        **(linear("mlp.router", C, config.n_expert) if experts else {}),
        **linear("mlp.c_fc", C, config.c_fc_width, *experts),
        **linear("mlp.c_proj", config.hidden_width, C, *experts),
    }


def norm_tensors(config: ModelShape, name: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of the norm `name` of width d_model: ln_1, ln_2 or ln_f."""
    return {f"{name}.{kind}": (config.d_model,) for kind in NORM_SIZES[config.norm].parameters if kind != "bias" or config.bias}


def model_tensors(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by its name in `model.gpt.GPT` and in its order, with the padding of the vocabulary."""
    embedding = (config.padded_vocab_size, config.d_model)
    block = block_tensors(config)
    return {
        "wte.weight": embedding,
        **({"wpe.weight": (config.seq_len, config.d_model)} if config.positions == "learned" else {}),
        **{f"h.{index}.{name}": shape for index in range(config.n_layer) for name, shape in block.items()},
        **norm_tensors(config, "ln_f"),
        **({} if config.tied_head else {"lm_head.weight": embedding}),
    }


def block_parameter_count(config: ModelShape, active: bool = False) -> int:
    """Parameters of one block, or those that each token is multiplied with; of GPT-2 12 C^2 + 13 C for width C."""
    shapes = block_tensors(config).values()
    return sum(math.prod((config.n_expert_active, *shape[1:]) if active and len(shape) == 3 else shape) for shape in shapes)


def parameter_count(config: GPTConfig, active: bool = False) -> int:
    """All parameters, with a tied head counted once and the padding of the vocabulary included.

    active: of the experts, count only as many as each token goes through.

    gpt2 with 50,257 tokens: 124,475,904, which is 124,439,808 and 47 padded rows of 768.
    """
    block = block_parameter_count(config)
    outside = sum(map(math.prod, model_tensors(replace(config, n_layer=1)).values())) - block
    return outside + config.n_layer * block_parameter_count(config, active)  # a damaged run.json may say n_layer 10^9


def block_flops_per_token(config: ModelShape, seq_len: int) -> int:
    """Training FLOPs of one block per token of a row of `seq_len`: 6 N + 12 seq_len n_head d_head, for its N active parameters.

    Grouped queries reduce N only: each query head multiplies with as many keys as before.
    """
    return 6 * block_parameter_count(config, active=True) + 12 * config.attention_width * seq_len


def flops_per_token(config: GPTConfig, seq_len: int | None = None, kept_blocks: float | None = None) -> float:
    """Training FLOPs per token, forward and backward: 6 N + 12 n_layer n_head d_head seq_len (PaLM, arXiv 2204.02311, appendix B).

    N is the number of parameters without embeddings (lookups) and without padded rows; the head counts once, tied or not. As in the paper,
    attention is not halved for causality. gpt2 with 50,257 tokens at 1,024: 6 x 123,653,376 + 12 x 12 x 768 x 1,024 = 855,166,464.

    Args:
        seq_len: tokens per row, if rows are shorter than the model's seq_len.
        kept_blocks: number of blocks that are computed, if some are dropped; a mean over steps may be a fraction.
    """
    seq_len = config.seq_len if seq_len is None else seq_len
    kept_blocks = config.n_layer if kept_blocks is None else kept_blocks
    outside_blocks = config.vocab_size * config.d_model + sum(map(math.prod, norm_tensors(config, "ln_f").values()))
    return 6 * outside_blocks + kept_blocks * block_flops_per_token(config, seq_len)


# Dense peaks in TFLOP/s with fp32 accumulation, from the vendors' data sheets (half of the figure "with sparsity" if there is no other).
# The first match is used. Names are matched by whole words of torch.cuda.get_device_name, so that "A10" does not match "A100".
# For fp8, all data sheets have twice the figure of bf16.
_PEAKS: list[tuple[set[str], dict[str, float]]] = [
    # Volta, Turing: fp16 tensor cores only. V100 data sheet (2020); T4 data sheet (2019).
    ({"V100", "SXM2"}, {"fp16": 125, "fp32": 15.7}),  # "Tesla V100-SXM2-16GB"
    ({"V100", "PCIE"}, {"fp16": 112, "fp32": 14}),
    ({"T4"}, {"fp16": 65, "fp32": 8.1}),
    # A100 data sheet (2021): the same for SXM4 and PCIe. A10 data sheet (2021).
    ({"A100"}, {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ({"A10"}, {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    # L4 and L40S data sheets (2023): 242 and 733 with sparsity.
    ({"L4"}, {"fp8": 242, "bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    ({"L40S"}, {"fp8": 733, "bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    # GA102 white paper, appendix A, and Ada white paper, appendix A: fp16 with fp32 accumulation is half of the headline figure.
    ({"RTX", "3090"}, {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    ({"RTX", "4090"}, {"fp8": 330.3, "bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    # H100 data sheet (2023, 2024 for NVL), H200 data sheet (2024), GH200 data sheet (2024): 1,979, 1,513 and 1,671 with sparsity.
    ({"H100", "PCIE"}, {"fp8": 1513, "bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ({"H100", "NVL"}, {"fp8": 1671, "bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    ({"H100", "HBM3"}, {"fp8": 1979, "bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 67}),  # SXM5: "NVIDIA H100 80GB HBM3"
    ({"H200", "NVL"}, {"fp8": 1671, "bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    ({"H200"}, {"fp8": 1979, "bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 67}),
    ({"GH200"}, {"fp8": 1979, "bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 67}),
    # HGX B200 data sheet (2024), an eighth of eight: 36 PFLOP/s with sparsity.
    ({"B200"}, {"fp8": 4500, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    # AMD data sheets (2021, 2023), matrix cores. Each of MI250X's two dies is a device in torch: half of 383 and of 95.7.
    ({"MI250X"}, {"bf16": 191.5, "fp16": 191.5, "fp32": 47.85}),
    ({"MI300X"}, {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4}),
]
# Words of other products with the same number: a MIG slice, "3090 Ti", "4090 D", a laptop's "4090".
_OTHER_PRODUCTS = {"MIG", "TI", "D", "LAPTOP", "MAX"}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in FLOP/s for matmuls in `dtype` ("fp8", "bf16", "fp16", "tf32", "fp32").

    `device_name` is the result of torch.cuda.get_device_name(). Returns None if the device, or its figure for this dtype, is not in the
    table.
    """
    words = _words(device_name)
    if words & _OTHER_PRODUCTS:
        return None
    for required, peaks in _PEAKS:
        if required <= words:
            return peaks[dtype] * 1e12 if dtype in peaks else None
    return None


def known_device(text: str) -> str | None:
    """The device that `text` means in a plan, with the words of the table: "H100 HBM3" for "h100". None if there is none.

    If it means several, it is the one with the highest peak in fp16.
    """
    named = [(peaks["fp16"], required) for required, peaks in _PEAKS if any(map(str.isdigit, text)) and _words(text) <= required]
    return " ".join(sorted(max(named, key=lambda one: one[0])[1])) if named else None


def _words(device_name: str) -> set[str]:
    return set(re.split(r"[^A-Z0-9]+", device_name.upper()))


#: What `known_device` finds.
KNOWN_DEVICES = tuple("-".join(sorted(required)).lower() for required, _ in _PEAKS)
