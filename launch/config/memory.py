"""The memory of one training step on one rank, as a list of terms, and the bytes that a rank sends.

    python launch/plan.py --preset gpt3-13b --ranks 64 --precision bf16 --memory 80GB

Not all parts are in memory at once: gradients appear while activations are freed, and the fp32 gradients of an update come after both. So
each `Term` names the moments of the step in which it is in memory. The peak is the largest moment. To plan for something new, such as the
activations of a group of ranks or the weights of experts, add a function to `TERMS`.

The terms follow DeepSpeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `fp16/unfused_optimizer.py`) and `model/gpt.py`;
`tests/distributed/test_memory.py` compares the model states with those of live engines, byte by byte.

Not in the plan: Python and its libraries, the CUDA context, and memory that an allocator caches. Evaluation and generation need less than
a step. Letters: N parameters, R ranks, w bytes of the working precision, B sequences, T tokens, C width, L blocks, V padded vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from launch.config.deepspeed_schema import BUFFER_SIZE, MAX_IN_CPU, deepspeed_schema
from launch.config.optimizer import state_tensors
from launch.formats.sub_groups import sub_group_sizes
from model import accounting
from model.accounting import LOSS_ROWS, WIDTH, model_tensors
from model.presets import NORM_SIZES, GPTConfig
from recipes import registry
from recipes.technique import FP32_NAMES, Techniques, segment_bounds

if TYPE_CHECKING:  # it imports this module
    from launch.config.run_config import RunConfig

FP32 = 4
#: Elements that stage 0 flattens and all-reduces at a time (`deepspeed/runtime/engine.py`, MEMORY_OPT_ALLREDUCE_SIZE).
ALLREDUCE_ELEMENTS = 500_000_000
#: Of a step, in their order. "backward" is that of the first block, "reduce" that of the embeddings, after which stage 1 reduces.
MOMENTS = ("forward", "recompute", "backward", "reduce", "update")
#: The moment of which `MemoryPlan.parts` has the bytes, instead of the moment with the most.
SHOWN_IN = {"activations": "forward", "gradients": "update"}
STATES = ("weights", "gradients", "master_weights", "optimizer_states")


class Term(NamedTuple):
    """`size` bytes of a part, which are in memory during `moments`. Several terms may have the same part."""

    part: str
    size: int
    moments: tuple[str, ...] = MOMENTS


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, of that with the most. `moments` has what is on the device, `parts` also what is offloaded.

    Attributes:
        parts: bytes by part:
            weights, gradients, master_weights, optimizer_states: the model states at the end of the last backward pass, from the second
                step on.
            buffers: reduction buckets, gathered weights (at most, see `gathered_weights`) and copies of both, at their largest.
            activations: those of the blocks, the embedding and the last norm after the forward pass, and the document mask.
            loss_head: logits and their softmax, at their largest.
            update: memory that only the optimizer step needs.
            host: offloaded states in host memory, and the buffers for offload to NVMe. On a CPU these are included in `moments`.
            drive: bytes on NVMe.
            snapshot: the copy in host memory of a checkpoint that is written during training, of the rank with the largest files. On a
                CPU it is in every moment.
        moments: moment -> the parts that are in memory together, with their bytes.
    """

    parts: dict[str, int]
    moments: dict[str, dict[str, int]]

    @property
    def model_states(self) -> int:
        return sum(self.parts[name] for name in STATES)

    @property
    def peak_moment(self) -> str:
        """The moment with the largest sum."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> int:
        return sum(self.moments[self.peak_moment].values())


def memory_per_rank(run: RunConfig, model: GPTConfig, device: str, checkpoints: int = 0) -> MemoryPlan:
    """The memory plan of one rank.

    Args:
        device: "cpu" or "cuda". On "cuda", bytes are those of torch's allocator (`max_memory_allocated`).
        checkpoints: the number of segments of blocks that are recomputed from their inputs; `model.n_layer` for every block by itself, 0
            for no activation checkpointing.
    """
    sizes = MemorySizes(run, model, device, checkpoints)
    found: dict[str, dict[str, int]] = {moment: {} for moment in MOMENTS if checkpoints or moment != "recompute"}
    for part, size, during in (term for terms in TERMS for term in terms(sizes)):
        for moment, parts in found.items():
            parts[part] = parts.get(part, 0) + size * (moment in during)
    names = {name: None for parts in found.values() for name in parts}
    shown = {name: found[SHOWN_IN[name]][name] if name in SHOWN_IN else max(parts[name] for parts in found.values()) for name in names}
    elsewhere = sizes.offloaded | {"drive"} | ({"host", "snapshot"} if device == "cuda" else set())
    return MemoryPlan(
        shown, {moment: {name: size for name, size in parts.items() if name not in elsewhere} for moment, parts in found.items()}
    )


@dataclass(frozen=True)
class MemorySizes:
    """What the terms of one rank are computed from.

    w: bytes of the working precision. tokens: B T, those of a micro-batch that this rank has; where P ranks share each row, B T / P.
    unit: bytes of (tokens, C).
    """

    run: RunConfig
    model: GPTConfig
    device: str
    checkpoints: int

    @cached_property
    def techniques(self) -> Techniques:
        return registry.make_techniques(self.run)

    @cached_property
    def zero(self) -> dict[str, Any]:
        """The section `zero_optimization`, with DeepSpeed's defaults for missing keys."""
        keys = deepspeed_schema().keys["zero_optimization"]["keys"]
        return {key: rule.get("default") for key, rule in keys.items()} | self.run.ds_config["zero_optimization"]

    @property
    def stage(self) -> int:
        return self.run.zero_stage

    @property
    def w(self) -> int:
        return WIDTH[self.run.precision]

    @property
    def sum_width(self) -> int:
        """Bytes of an element of the micro-batches' summed gradient. Stages 1 and 2 ignore the key if the optimizer is offloaded."""
        asked = (self.run.ds_config.get("data_types") or {}).get("grad_accum_dtype") in FP32_NAMES
        return FP32 if asked and not (self.offloads_optimizer and self.stage < 3) else self.w

    @property
    def has_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed uses its `BF16_Optimizer` (`runtime/bf16_optimizer.py`), which keeps all sums on every rank."""
        return self.stage == 1 and self.run.precision == "bf16" and self.sum_width == FP32

    @property
    def tokens(self) -> int:
        return self.run.micro_batch_size * self.model.seq_len // self.run.ranks_per_row

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Elements of a token's queries, keys and values that attention gets: those of all heads, of which a rank has its share."""
        shared = math.lcm(self.model.n_kv_head, self.run.ranks_per_row)  # `exchanging` repeats keys and values
        return self.model.attention_width, shared * self.model.d_head, shared * self.model.d_head

    @property
    def documents(self) -> str:
        """How attention stays within documents (`model.layout.document_mask`, `model.gpt.attend_in_documents`)."""
        if self.model.document_end is None:
            return ""
        if self.model.seq_len <= accounting.DENSE_LENGTH:
            return "in a mask"
        return "one by one" if self.device == "cpu" or self.run.precision == "fp32" or self.model.dropout else "in one call"

    @property
    def tile(self) -> int:
        """Tokens that an MLP and the head have in memory at a time."""
        return min(self.replaced.get("tile", self.tokens), self.tokens)

    @property
    def tiled(self) -> bool:
        """Whether a technique recomputes them, so that a block saves nothing of its MLP."""
        return "tile" in self.replaced

    @property
    def unit(self) -> int:
        return self.tokens * self.model.d_model * self.w

    @cached_property
    def replaced(self) -> dict[str, int]:
        """The terms of the techniques."""
        return self.techniques.memory_terms(self.model, self.device)

    @cached_property
    def groups(self) -> list[list[int]]:
        return parameter_sizes(self.model, self.techniques.planned_apart)

    @cached_property
    def flat(self) -> list[int]:
        """The sizes of all parameters."""
        return [n for group in self.groups for n in group]

    @property
    def owned(self) -> list[int]:
        """Elements of each group that this rank updates.

        Stages 1 and 2 flatten the weights of a group, pad them to a multiple of 2 R and divide them; stage 3 divides every parameter into R
        pieces of ceil(n / R).
        """
        ranks = self.run.ranks
        if self.stage == 3:
            return [sum(-(-n // ranks) for n in group) for group in self.groups]
        return [-(-sum(group) // (2 * ranks)) * 2 if self.stage else sum(group) for group in self.groups]

    @property
    def sub_groups(self) -> list[int]:
        """Stage 3: the elements of each sub-group that this rank updates."""
        limit = int(self.zero["sub_group_size"])
        return [size for group in self.groups for size in sub_group_sizes(group, self.run.ranks, limit)]

    @property
    def largest_owned(self) -> int:
        """Elements that an update at stages 1 to 3 converts at a time: those of a group, or at stage 3 of a sub-group."""
        return max(self.owned if self.stage < 3 else self.sub_groups)

    @property
    def offloaded(self) -> set[str]:
        """The parts that are not on the device."""
        states = {"master_weights", "optimizer_states"} | ({"gradients"} if self.stage == 3 else set())
        return (states if self.offloads_optimizer else set()) | ({"weights"} if self.run.offload("offload_param") != "none" else set())

    @property
    def offloads_optimizer(self) -> bool:
        return self.run.offload("offload_optimizer") != "none"


def parameter_sizes(model: GPTConfig, planned_apart: Collection[str] = ()) -> list[list[int]]:
    """The sizes of all parameters in the two groups of `weight_decay_groups`: with weight decay (matrices, embeddings), and without.

    Each group is in the order in which the engine flattens it, and is divided into the parameters whose names are in
    `planned_apart`, and the others.
    """
    groups: dict[tuple[bool, bool], list[int]] = {}
    for name, shape in model_tensors(model).items():
        groups.setdefault((len(shape) < 2, name not in planned_apart), []).append(math.prod(shape))
    return [groups[key] for key in sorted(groups)]


# --- model states ----------------------------------------------------------------------------------------------------------------------


def _model_states(sizes: MemorySizes) -> Iterator[Term]:
    run, stage, w, whole = sizes.run, sizes.stage, sizes.w, sizes.sum_width * sum(sizes.flat)
    owned, accumulates = sum(sizes.owned), run.gradient_accumulation_steps > 1
    weights = w * owned * (run.ranks if stage in (1, 2) else 1)
    if stage == 3 and (group := hpz_ranks(sizes.zero, run.ranks)) > 1:
        # A second copy of what does not persist, from the forward pass to the update.
        persists = int(sizes.zero["stage3_param_persistence_threshold"])
        weights += sum(w * -(-n // run.ranks) * run.ranks // group for n in sizes.flat if n > persists)
    waiting = 0
    if stage == 3:
        gradients = carried = sizes.sum_width * owned  # one flat buffer, never freed
    elif sizes.has_bf16_optimizer:
        gradients = carried = FP32 * owned * run.ranks + w * sum(sizes.flat)  # the sums, and those of a micro-batch, which are never freed
    else:
        # The whole gradients of all parameters that overlap the rank's partition, or of all parameters.
        shared = stage == 2 or (stage == 1 and sizes.zero["contiguous_gradients"])
        gradients = sizes.sum_width * owned if sizes.sum_width > w else w * _largest_share(sizes) if shared else whole
        carried = 0 if not accumulates else gradients if stage == 2 else whole  # stages 0 and 1 reduce in the last micro-batch only
    if stage == 1 and not sizes.zero["overlap_comm"] and not sizes.has_bf16_optimizer:
        # They are reduced after the backward pass. Until then, gradients beyond the bucket stay in memory.
        waiting = max(0, whole - sizes.sum_width * int(sizes.zero["reduce_bucket_size"]))
    yield Term("weights", weights)
    yield Term("gradients", carried, ("forward", "recompute"))
    yield Term("gradients", gradients + waiting, ("backward", "reduce"))
    yield Term("gradients", gradients, ("update",))
    yield Term("master_weights", 0 if stage == 0 and run.precision == "fp32" else FP32 * owned)
    per_parameter = sizes.techniques.optimizer_tensors or state_tensors(run.optimizer)
    yield Term("optimizer_states", round(FP32 * per_parameter * owned))


def _update(sizes: MemorySizes) -> Iterator[Term]:
    w, halves = sizes.w, sizes.run.precision != "fp32"
    if sizes.offloads_optimizer:
        size = 0
    elif sizes.stage == 0:
        # fp32: torch's optimizer uses the gradients as they are. bf16, fp16: FP16_UnfusedOptimizer copies every gradient to fp32.
        size = FP32 * sum(sizes.flat) if halves else 0
    else:
        # One group or sub-group at a time: its gradients flattened, and a copy in fp32 if they are not fp32. fp32 sums of halves are not
        # copied, and at stages 1 and 2 are flat already. Before, the norm in fp64 of a rank's part of one parameter at a time.
        wide = halves and sizes.sum_width == FP32
        size = 0 if wide and sizes.stage < 3 else sizes.largest_owned * (FP32 + w * (halves and not wide))
        groups = zip(sizes.groups, sizes.owned, strict=True)
        part = -(-max(sizes.flat) // sizes.run.ranks) if sizes.stage == 3 else max(min(max(group), owned) for group, owned in groups)
        size = size if sizes.has_bf16_optimizer else max(size, 8 * part)
    yield Term("update", size + sizes.replaced.get("update", 0) * (not sizes.offloads_optimizer), ("update",))


def hpz_ranks(zero: dict[str, Any], ranks: int) -> int:
    """The number of ranks in ZeRO++'s secondary partition of the weights (hpZ); 1 if there is none."""
    return min(zero.get("zero_hpz_partition_size") or 1, ranks)


def _largest_share(sizes: MemorySizes) -> int:
    """Elements of all parameters that overlap a rank's partitions, for the rank with the most."""
    ranks = sizes.run.ranks
    shares = [0] * ranks
    for group, part in zip(sizes.groups, sizes.owned, strict=True):
        end = 0
        for n in group:
            start, end = end, end + n
            for owner in range(start // part, min(-(-end // part), ranks)):
                shares[owner] += n
    return max(shares)


def _elsewhere(sizes: MemorySizes) -> Iterator[Term]:
    """What is in host memory and on NVMe: offloaded states with their buffers, checkpointed activations, the copy for a checkpoint."""
    w, zero, size = sizes.w, sizes.zero, {part: size for part, size, _ in _model_states(sizes)}
    states = size["master_weights"] + size["optimizer_states"]
    # Rank 0 copies its states, at stage 3 without the weights, which DeepSpeed saves in fp32 only. NVMe is copied file by file.
    copied = size["weights"] if sizes.stage < 3 else 0
    host = drive = 0
    section = zero.get("offload_optimizer") or {}
    if sizes.run.offload("offload_optimizer") == "nvme":
        # Weights, moments and fp32 gradients are on NVMe; one sub-group of each is in page-locked buffers.
        drive = states + size["master_weights"]
        host = FP32 * sizes.largest_owned * int(section.get("buffer_count") or 4) + size["gradients"]
    else:
        copied += states
    if sizes.run.offload("offload_optimizer") == "cpu":
        # The fp32 gradients of the update stay in memory, with the master weights. At stages 1 and 2 also a copy of the updated partition
        # in the working precision, a staging buffer, and the accumulated gradients.
        host = states + size["master_weights"]
        accumulated = size["gradients"] if sizes.stage == 3 or sizes.run.gradient_accumulation_steps > 1 else 0
        host += accumulated + (0 if sizes.stage == 3 else size["master_weights"] * w // FP32 + w * max(sizes.flat))
    section = zero.get("offload_param") or {}
    if sizes.run.offload("offload_param") == "nvme":
        drive += size["weights"]
        host += w * int(section.get("buffer_size") or BUFFER_SIZE) * int(section.get("buffer_count") or 5)
        kept = section.get("max_in_cpu")  # moved back from the drive for good (DeepSpeed's stage3.py, _move_to_flat_buffer)
        host += min(size["weights"], w * (MAX_IN_CPU if kept is None else int(kept)))
    elif sizes.run.offload("offload_param") == "cpu":
        host += size["weights"]
    yield Term("host", host + _checkpoints_on_host(sizes))
    yield Term("drive", drive)
    yield Term("snapshot", copied if sizes.run.saves_beside_training else 0)


# --- activations -----------------------------------------------------------------------------------------------------------------------


def _activations(sizes: MemorySizes) -> Iterator[Term]:
    """The embedding, the blocks and the last norm. A checkpointed segment of blocks keeps only its input."""
    model, block = sizes.model, _block_activations(sizes)
    mask = _document_mask(sizes)
    saved = 2 * sizes.unit + mask  # the sum of the embeddings, the last norm's output
    if model.dropout:
        saved += sizes.unit if sizes.device == "cpu" else sizes.unit // sizes.w
    saved += sizes.unit * sizes.checkpoints - _checkpoints_on_host(sizes) if sizes.checkpoints else block * model.n_layer
    # In the backward pass of a block: the gradients of the input and output of the MLP's activation, and what the MLP of a tile saves only
    # now; or those of attention's output and of queries, keys and values, when three tensors of the block are not needed any more. And the
    # gradients of the residual stream, and of a tied weight. The head's gradient of that weight is kept until it is added to the
    # embedding's, which is dense.
    of_mlp = sizes.tile * (model.active_c_fc_width + model.d_ff + (_mlp_elements(model) if sizes.tiled else 0))
    of_attention = sizes.tokens * (sizes.qkv_widths[0] + sum(sizes.qkv_widths) - 3 * model.d_model)
    in_flight = sizes.unit + max(of_mlp, of_attention) * sizes.w
    if model.tied_head:
        in_flight += model.padded_vocab_size * model.d_model * sizes.w
    yield Term("activations", saved, ("forward",))
    if sizes.checkpoints:
        yield Term("activations", saved + block * -(-model.n_layer // sizes.checkpoints) + in_flight, ("recompute",))
    yield Term("activations", block + mask + in_flight, ("backward",))


def _document_mask(sizes: MemorySizes) -> int:
    """Bytes of the mask if attention stays within documents: B T^2, on every rank, shared by all blocks until their backward passes end."""
    return sizes.run.micro_batch_size * sizes.model.seq_len**2 * sizes.w if sizes.documents == "in a mask" else 0


def _checkpoints_on_host(sizes: MemorySizes) -> int:
    """Bytes of the inputs of checkpointed segments that are not on the device."""
    inputs = sizes.unit * sizes.checkpoints
    return inputs - sizes.replaced.get("checkpoints", inputs)


def _mlp_elements(model: GPTConfig) -> int:
    """Elements that an MLP saves for a token, without its input: of GPT-2 8 C, of a swiglu 4 d_ff; of each expert also its input and
    output."""
    of_experts = 2 * model.n_expert_active * model.d_model
    return model.active_c_fc_width + model.d_ff * (2 if model.mlp == "swiglu" else 1) + of_experts


def _block_activations(sizes: MemorySizes) -> int:
    """Bytes that one block saves for its backward pass, without its input. GPT-2: 16 B T C elements, and a few numbers per token.

    The 16 are: 1 output of the first norm, 3 queries, keys and values, 1 output of attention, 1 residual stream between the branches, 1
    output of the second norm, 4 input of the GELU, 4 its output, 1 output of the block. Rotation and QK-norm make other queries and keys of
    those; swiglu has an input of 2 d_ff, and saves silu of its gate too. Attention saves 1 fp32 number per token and head, or the bytes
    that a technique states. Ranks that share a row save these as they are exchanged, the output once more, and the input of QK-norm.
    """
    model, device, w, tokens, halves = sizes.model, sizes.device, sizes.w, sizes.tokens, sizes.run.precision != "fp32"
    q, k, v = (heads * model.d_head for heads in model.qkv_heads)
    elements = 4 * model.d_model + sum(sizes.qkv_widths) + q + (0 if sizes.tiled else _mlp_elements(model))
    if sizes.run.ranks_per_row > 1:
        # On a CPU, attention with dropout saves no output, and QK-norm saves fp32 copies of its input only.
        elements += q * (device == "cuda" or not model.dropout) + (q + k + v) * (model.qk_norm and (device == "cuda" or not halves))
    elif model.positions == "rotary" or model.qk_norm:
        elements += q + k
    if NORM_SIZES[model.norm].fp32_copies and device == "cpu" and halves:
        elements -= model.d_model  # of the residual stream, only the norm's fp32 copy is saved
    if device == "cuda" and sizes.qkv_widths[1] < q and (not halves or model.document_end is not None):
        elements += 2 * q  # `model.gpt.attend` repeats keys and values
    if sizes.documents == "one by one" and "attention" not in sizes.replaced and sizes.run.ranks_per_row == 1:
        elements += q  # the output of each document, and that of all of them
    size = tokens * elements * w + sizes.replaced.get("attention", tokens * model.n_head * FP32)
    if model.n_expert and not sizes.tiled:
        # The router's probabilities; of each choice its share, normalized and not, and three int64: the expert, and two places in an order.
        size += tokens * (FP32 * (model.n_expert + 1) + model.n_expert_active * (2 * FP32 + w * halves + 3 * 8))

    def norm(name: str, rows: int, width: int) -> int:
        """Beside input and output: fp32 statistics; on a CPU also fp32 copies of the input and, if it is not fp32, of the result."""
        copies = NORM_SIZES[name].fp32_copies * (1 + halves) if device == "cpu" else 0
        return rows * FP32 * (NORM_SIZES[name].statistics + copies * width)

    size += 2 * norm(model.norm, tokens, model.d_model)
    if model.qk_norm:
        size += sum(norm("rmsnorm", tokens * width // model.d_head, model.d_head) for width in (q, k))
    branches = 1 if sizes.tiled else 2
    if model.dropout and device == "cpu":
        # A mask in the working precision for each branch. Attention with dropout is not fused on a CPU: it saves fp32 copies of queries,
        # keys and values instead of one tensor, and three tensors of T x T per head: the softmax, the mask and their product.
        size += branches * sizes.unit + 3 * tokens * q * (FP32 - w) + 3 * tokens * model.n_head * model.seq_len * FP32
    elif model.dropout:
        size += branches * sizes.unit // w  # one byte per element
    return size


def _loss_head(sizes: MemorySizes) -> Iterator[Term]:
    """Logits and softmax of a rank's tokens, `LOSS_ROWS` rows in fp32 at a time: the larger of the forward and the backward pass.

    The forward pass needs most at its last rows: all logits in the working precision, all log-probabilities in fp32, and an fp32 copy of
    these rows if they are not fp32. The backward pass needs most at its first rows: all log-probabilities, and two fp32 gradients of these
    rows. Each added loss of a technique has logits and their gradients, in the working precision and in fp32. Of several tiles, the sum of
    the weight's gradients is there beside that of a tile.
    """
    w, V, halves = sizes.w, sizes.model.padded_vocab_size, sizes.w < FP32
    tokens = sizes.tokens if "loss_head" in sizes.replaced else sizes.tile
    row, chunks = min(LOSS_ROWS, tokens) * V * FP32, -(-tokens // LOSS_ROWS)
    summed = V * sizes.model.d_model * w if tokens < sizes.tokens else 0
    of_tile = max(tokens * V * w + row * (chunks + halves), row * (chunks + 2), tokens * V * w + summed)
    size = sizes.replaced.get("loss_head", of_tile + summed)
    added = len(sizes.techniques.added_losses) * 2 * (w + FP32 * halves) * tokens * V
    yield Term("loss_head", size + added, ("forward",))


# --- buffers of the engine ---------------------------------------------------------------------------------------------------------------


def _buffers(sizes: MemorySizes) -> Iterator[Term]:
    """The reduction buckets, the gathered weights, and the copy that a reduction sends.

    A bucket is allocated as a whole. On a CPU only the written pages count, which are at most the size of the gradients; those of the
    embeddings come last, after the blocks'.
    """
    stage, w, ranks = sizes.stage, sizes.w, sizes.run.ranks
    if stage == 0 or sizes.has_bf16_optimizer:
        copies = FP32 + w if sizes.has_bf16_optimizer else w  # the sums of all groups, and what is sent
        yield Term("buffers", copies * min(sum(sizes.flat), ALLREDUCE_ELEMENTS) if ranks > 1 else 0, ("backward",))
        return
    bucket = int(sizes.zero["reduce_bucket_size"])
    bucketed = sum(n for n in sizes.flat if n <= bucket)  # larger parameters are reduced in place
    # overlap_comm is true by default at stage 3, else false. At stages 1 and 2 it adds a second bucket.
    elements = 2 * bucket if stage < 3 and sizes.zero["overlap_comm"] else bucket
    # Stage 3 always holds its bucket; stages 1 and 2 hold it from the first gradient on.
    embeddings = sum(math.prod(shape) for name, shape in model_tensors(sizes.model).items() if name in ("wte.weight", "wpe.weight"))
    for moment in MOMENTS if stage == 3 else ("recompute", "backward", "reduce"):
        pages = bucketed if stage == 3 or moment == "reduce" else max(0, bucketed - embeddings)
        written = elements if sizes.device == "cuda" else min(elements, pages)
        yield Term("buffers", (sizes.sum_width if stage == 1 else w) * written, (moment,))
    # Slices of several ranks, or several tensors, are concatenated before they are sent.
    largest_sent = max(min(bucket, bucketed), max((n for n in sizes.flat if n > bucket), default=0))
    after = stage == 1 and not sizes.zero["overlap_comm"]
    yield Term("buffers", w * largest_sent if ranks > 1 or stage == 3 else 0, ("reduce",) if after else ("backward", "reduce"))
    if stage == 3 and ranks > 1:
        # The whole weights, and the flat buffer of the last gather, from which they are copied.
        live = gathered_weights(sizes)[1]
        yield Term("buffers", w * (live + min(int(sizes.zero["stage3_prefetch_bucket_size"]), live)), ("forward", "recompute", "backward"))


def gathered_weights(sizes: MemorySizes) -> tuple[int, int]:
    """Stage 3: elements that are gathered in a forward and backward pass, and elements that are gathered at the same time; upper bounds.

    A weight stays gathered if fewer than `stage3_max_reuse_distance` elements are used before it is used again. (It also stays if the
    search for weights to gather ahead comes by, which is not counted here; nor is the recomputation of tiles, which gathers more.) Weights
    are gathered ahead until `stage3_max_live_parameters` are there; the module that passes a limit is gathered whole. Both are exact for
    models of less than half of the reuse distance; with `stage3_prefetch_bucket_size` 0, the elements in a pass were within 1% of two
    ranks, and with recomputed blocks within 3%.
    """
    zero, model = sizes.zero, sizes.model
    distance, ahead = int(zero["stage3_max_reuse_distance"]), int(zero["stage3_prefetch_bucket_size"])
    persists = int(zero["stage3_param_persistence_threshold"])
    modules: dict[str, list[int]] = {}  # the sizes of the parameters of each
    for name, shape in model_tensors(model).items():
        modules.setdefault(name.rpartition(".")[0], []).append(math.prod(shape))
    in_a_pass, end, used = 0, 0, dict[str, int]()  # the end of each module's last use, in elements used so far
    for name in _uses([*modules], model, sizes.techniques.checkpointed_segments):
        if end - used.get(name, -distance) >= distance:
            in_a_pass += sum(n for n in modules[name] if n > persists)
        end += sum(modules[name])
        used[name] = end
    largest = max(sizes.flat)
    live = largest + max(distance // 2 + largest, int(zero["stage3_max_live_parameters"]) if ahead else 0)
    return in_a_pass, min(sum(sizes.flat), sum(n for n in sizes.flat if n <= persists) + live)


def _uses(names: list[str], model: GPTConfig, checkpoints: int) -> Iterator[str]:
    """The modules in the order in which a forward and backward pass use them, with `checkpoints` recomputed segments of blocks.

    names: of the modules with parameters, in the model's order.
    """
    blocks = [[name for name in names if name.startswith(f"h.{index}.")] for index in range(model.n_layer)]
    begin, end = names.index(blocks[0][0]), names.index(blocks[-1][-1]) + 1
    head = [*names[end:], *["wte"] * model.tied_head]
    yield from (*names[:end], *head, *reversed(head))
    for first, last in reversed(segment_bounds(model.n_layer, checkpoints or 1)):
        segment = [name for block in blocks[first:last] for name in block]
        yield from (*segment * bool(checkpoints), *reversed(segment))
    yield from reversed(names[:begin])


#: The functions that yield the terms of a rank.
TERMS: tuple[Callable[[MemorySizes], Iterator[Term]], ...] = (_model_states, _buffers, _update, _loss_head, _activations, _elsewhere)


# --- bytes sent --------------------------------------------------------------------------------------------------------------------------


def bytes_sent_per_step(run: RunConfig, model: GPTConfig, accumulation: int) -> int:
    """Bytes that a rank sends per step of `accumulation` micro-batches, from the second step on, counted as `bytes_sent` in the metrics.

    At stage 3 an upper bound, see `gathered_weights`. In the first step, stage 3 records the order of the modules and gathers more.
    Scalars are included: the loss with three stop flags in fp64, the norm, the overflow flag. The scales of quantized weights, 4 bytes for
    up to 8,000 of them, are not.
    """
    sizes = MemorySizes(run, model, "cuda", 0)
    stage, zero, w, ranks, share = sizes.stage, sizes.zero, sizes.w, run.ranks, (run.ranks - 1) / run.ranks
    whole, padded = sum(sizes.flat), ranks * sum(sizes.owned)
    loss_and_signals = 32  # fp64: loss, SIGINT, SIGUSR1, SIGTERM
    if stage == 0:
        return round(share * 2 * (w * whole + loss_and_signals))
    if sizes.has_bf16_optimizer:
        return round(share * (3 * w * padded + 2 * loss_and_signals))  # all-reduced in bf16; the weights
    if stage in (1, 2):
        # The gradients are all-reduced, although each rank keeps only its part, unless each slice is reduced to its owner. Stage 2
        # reduces in every micro-batch, since it keeps no other gradients; stage 1 in the last one only.
        to_owner = zero["reduce_scatter"] and not zero["use_multi_rank_bucket_allreduce"]
        gradients = (1 if to_owner else 2) * w * whole * (accumulation if stage == 2 else 1)
        overflow = 1 if run.precision != "fp32" else 0
        return round(share * (gradients + w * padded + 2 * (loss_and_signals + 4 * len(sizes.groups) + overflow)))
    persistent = sum(-(-n // ranks) * ranks for n in sizes.flat if n <= int(zero["stage3_param_persistence_threshold"]))
    gradients = w * padded * accumulation  # reduce-scattered in every micro-batch
    # Weights that do not persist are gathered in every micro-batch, as int8 if quantized; those that persist, after the update.
    gathered, g = gathered_weights(sizes)[0] * accumulation, 1 if zero.get("zero_quantized_weights") else w
    norms = (FP32 if sizes.offloads_optimizer else 8) * len(sizes.sub_groups)
    sent = share * (gradients + w * persistent + 2 * (loss_and_signals + norms + (run.precision == "fp16")))
    if (group := hpz_ranks(zero, ranks)) == 1:
        return round(sent + share * g * gathered)
    first = padded - persistent  # once from all ranks, and then from the group that has the second copy
    return round(sent + g * (share * first + (group - 1) / group * (gathered - first)))
