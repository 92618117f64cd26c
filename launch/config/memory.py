"""Formulas for one training step on one rank: bytes of memory by part and phase of the step, and bytes sent.

    python launch/plan.py --preset gpt3-13b --ranks 64 --precision bf16 --memory 80GB

Not all parts are in memory at once: gradients appear while activations are freed, and the fp32 gradients of an update come after both. So
the plan has moments (`forward`, `recompute`, `backward`, `update`), each with the parts in memory then. The peak is the largest moment.
The terms follow DeepSpeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `fp16/unfused_optimizer.py`) and `model/gpt.py`;
`tests/distributed/test_memory.py` compares the model states with those of live engines, byte by byte.

Not in the plan: Python and its libraries, the CUDA context, and memory that an allocator caches. Evaluation and generation need less than
a step. Letters: N parameters, R ranks, w bytes of the working precision, B sequences, T tokens, C width, L blocks, V padded vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from launch.config.deepspeed_schema import deepspeed_schema
from launch.formats.sub_groups import sub_group_sizes
from model.accounting import LOSS_ROWS, WIDTH, model_tensors, norm_tensors, parameter_count
from model.presets import GPTConfig

FP32 = 4
#: DeepSpeed's default for `offload_param.buffer_size`, elements.
BUFFER_SIZE = 100_000_000
#: DeepSpeed's default for `offload_param.max_in_cpu`: that many of a rank's weights on NVMe are moved to host memory for good.
MAX_IN_CPU = 1_000_000_000
#: Elements that stage 0 flattens and all-reduces at a time (`deepspeed/runtime/engine.py`, MEMORY_OPT_ALLREDUCE_SIZE).
ALLREDUCE_ELEMENTS = 500_000_000


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, of that with the most. `moments` has what is on the device, `parts` also what is offloaded.

    Attributes:
        parts: bytes by part:
            weights, gradients, master_weights, optimizer_states: the model states at the end of the last backward pass, from the second
                step on.
            buffers: reduction buckets, gathered weights and copies of both, at their largest.
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
        return sum(self.parts[name] for name in ("weights", "gradients", "master_weights", "optimizer_states"))

    @property
    def peak_moment(self) -> str:
        """The moment with the largest sum."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> int:
        return sum(self.moments[self.peak_moment].values())


def memory_per_rank(
    model: GPTConfig,
    precision: str,
    zero: dict[str, Any],
    ranks: int,
    micro_batch_size: int,
    accumulation: int = 1,
    checkpoints: int = 0,
    device: str = "cpu",
    optimizer_states: float = 2,
    terms: Mapping[str, int] | None = None,
    snapshot: bool = False,
    own_group: Collection[str] = (),
    added_losses: int = 0,
) -> MemoryPlan:
    """The memory plan of one rank.

    Args:
        precision: "fp32", "bf16" or "fp16".
        zero: the resolved `zero_optimization` section; only `stage` is required.
        micro_batch_size: sequences of `model.seq_len` tokens per rank and micro-batch.
        checkpoints: the number of segments of blocks that are recomputed from their inputs; `model.n_layer` for every block by itself, 0
            for no activation checkpointing.
        device: "cpu" or "cuda". On "cuda", bytes are those of torch's allocator (`max_memory_allocated`).
        optimizer_states: fp32 numbers that the optimizer keeps per parameter, on average: 2 for Adam, 3 with amsgrad, 1 for momentum.
        terms: `Technique.memory_terms`.
        snapshot: whether checkpoints are written during training.
        own_group: `Technique.own_group`.
        added_losses: the number of techniques with `Technique.token_losses`.
    """
    stage, sizes, terms = zero["stage"], _with_defaults(zero), terms or {}
    states = _states(model, precision, stage, sizes, ranks, accumulation, optimizer_states, own_group)
    block = _block_activations(model, precision, micro_batch_size, device, terms.get("attention"))
    activations = _activations(model, precision, micro_batch_size, checkpoints, device, block)
    head = terms.get("loss_head", _loss_head(model, precision, micro_batch_size))
    # Logits and their gradients, in the run's precision and in fp32.
    width = WIDTH[precision] + FP32 * (WIDTH[precision] < FP32)
    head += added_losses * 2 * width * micro_batch_size * model.seq_len * model.padded_vocab_size
    buckets, gathered, reduction = _buffers(model, precision, stage, sizes, ranks, device)
    away, host, drive = _offload(states, sizes, stage, model, precision, accumulation)
    unit = micro_batch_size * model.seq_len * model.d_model * WIDTH[precision]
    if checkpoints and "checkpoints" in terms:
        moved = unit * checkpoints - terms["checkpoints"]
        activations, host = activations - moved, host + moved
    lasting = {name: size for name, size in states.lasting.items() if name not in away}
    gradients = 0 if "gradients" in away else states.gradients
    carried = 0 if "gradients" in away else states.carried
    update = 0 if "optimizer_states" in away else states.update + terms.get("update", 0)
    copied = _snapshot(states, sizes, stage) if snapshot else 0
    if device == "cpu":  # its memory is the host's
        lasting |= {"host": host, "snapshot": copied}

    mask = _document_mask(model, precision, micro_batch_size)
    # In the backward pass of a block: the gradients of the input and output of the MLP's activation, of the residual stream, and of a tied
    # weight. The head's gradient of that weight is kept until it is added to the embedding's, which is dense.
    in_flight = unit + micro_batch_size * model.seq_len * (model.c_fc_width + model.d_ff) * WIDTH[precision]
    if model.tied_head:
        in_flight += model.padded_vocab_size * model.d_model * WIDTH[precision]
    # Stage 1 without overlap_comm reduces after the backward pass. Until then, gradients beyond the bucket stay in memory.
    waiting = 0
    if stage == 1 and not sizes["overlap_comm"]:
        waiting = WIDTH[precision] * max(0, parameter_count(model) - int(sizes["reduce_bucket_size"]))
    # Stage 3 always holds its bucket; stages 1 and 2 hold it from the first gradient on.
    moments = {
        "forward": {
            **lasting,
            "gradients": carried,
            "buffers": buckets + gathered if stage == 3 else 0,
            "activations": activations,
            "loss_head": head,
        },
        "backward": {
            **lasting,
            "gradients": gradients + waiting,
            "buffers": buckets + gathered + reduction,
            "activations": block + mask + in_flight,
        },
        "update": {**lasting, "gradients": gradients, "buffers": buckets if stage == 3 else 0, "update": update},
    }
    if checkpoints:
        moments["recompute"] = {
            **lasting,
            "gradients": carried,
            "buffers": buckets + gathered if stage else 0,
            "activations": activations + block * -(-model.n_layer // checkpoints) + in_flight,
        }
    parts = {
        **states.lasting,
        "gradients": states.gradients,
        "buffers": max(alive.get("buffers", 0) for alive in moments.values()),
        "update": update,
        "loss_head": head,
        "activations": activations,
        "host": host,
        "drive": drive,
        "snapshot": copied,
    }
    return MemoryPlan(parts, moments)


def _with_defaults(zero: dict[str, Any]) -> dict[str, Any]:
    """`zero` with DeepSpeed's defaults for missing keys."""
    return {key: rule.get("default") for key, rule in deepspeed_schema().keys["zero_optimization"]["keys"].items()} | zero


# --- the model's parameters, in the order in which the engine flattens them ------------------------------------------------------------


def parameter_sizes(model: GPTConfig, own_group: Collection[str] = ()) -> list[list[int]]:
    """The sizes of all parameters in the two groups of `weight_decay_groups`: with weight decay (matrices, embeddings), and without.

    Each group is divided into the parameters whose names are in `own_group`, and the others.
    """
    groups: dict[tuple[bool, bool], list[int]] = {}
    for name, shape in model_tensors(model).items():
        groups.setdefault((len(shape) < 2, name not in own_group), []).append(math.prod(shape))
    return [groups[key] for key in sorted(groups)]


@dataclass(frozen=True)
class _States:
    """lasting: always in memory. gradients: at the end of the last backward pass. carried: gradients at the start of a forward pass.
    update: added by the optimizer step. largest_master: bytes of the largest tensor of master weights."""

    lasting: dict[str, int]
    gradients: int
    carried: int
    update: int
    largest_master: int


def _states(
    model: GPTConfig,
    precision: str,
    stage: int,
    sizes: dict[str, Any],
    ranks: int,
    accumulation: int,
    per_parameter: float,
    own_group: Collection[str],
) -> _States:
    w, groups = WIDTH[precision], parameter_sizes(model, own_group)
    flat = [n for group in groups for n in group]
    N = sum(flat)
    if stage == 0:
        lasting = {
            "weights": w * N,
            "master_weights": 0 if precision == "fp32" else FP32 * N,
            "optimizer_states": round(FP32 * per_parameter * N),
        }
        # fp32: torch's optimizer uses the gradients as they are. bf16, fp16: FP16_UnfusedOptimizer copies every gradient to fp32.
        update = 0 if precision == "fp32" else FP32 * N
        return _States(lasting, w * N, w * N if accumulation > 1 else 0, update, FP32 * max(flat))
    if stage == 3:
        # Every parameter is divided into R pieces of ceil(n / R); the pieces of a group are flattened. fp32 runs have master weights too.
        parts = [sum(-(-n // ranks) for n in group) for group in groups]
        weights = w * sum(parts)
        if (group := second_group(sizes, ranks)) > 1:  # a second copy of what does not persist, from the forward pass to the update
            persists = int(sizes["stage3_param_persistence_threshold"])
            weights += sum(w * -(-n // ranks) * ranks // group for n in flat if n > persists)
        gradients = carried = w * sum(parts)  # one flat buffer, never freed
    else:
        # The weights of a group are flattened and padded to a multiple of 2 R elements; each rank owns 1/R of them.
        padded = [-(-sum(group) // (2 * ranks)) * 2 * ranks for group in groups]
        parts = [n // ranks for n in padded]
        weights = w * sum(padded)
        # The whole gradients of all parameters that overlap the rank's partition (`grads_in_partition`), or of all parameters.
        gradients = w * (N if stage == 1 and not sizes["contiguous_gradients"] else _largest_share(groups, parts, ranks))
        carried = 0 if accumulation == 1 else w * N if stage == 1 else gradients  # stage 1 reduces in the last micro-batch only
    lasting = {
        "weights": weights,
        "master_weights": FP32 * sum(parts),
        "optimizer_states": round(FP32 * per_parameter * sum(parts)),
    }
    # One group, or at stage 3 one sub-group, at a time: its gradients flattened, and a copy in fp32 if they are not fp32.
    largest, norm = max(parts), 0
    if stage == 3:
        limit = int(sizes["sub_group_size"])
        largest = max(size for group in groups for size in sub_group_sizes(group, ranks, limit))
        norm = 8 * -(-max(flat) // ranks)  # before the update, in fp64, one parameter at a time
    update = max(norm, largest * (FP32 if w == FP32 else FP32 + w))
    return _States(lasting, gradients, carried, update, FP32 * largest)


def second_group(zero: dict[str, Any], ranks: int) -> int:
    """The number of ranks in ZeRO++'s secondary partition of the weights (hpZ); 1 if there is none."""
    return min(zero.get("zero_hpz_partition_size") or 1, ranks)


def _largest_share(groups: list[list[int]], parts: list[int], ranks: int) -> int:
    """Elements of all parameters that overlap a rank's partitions, for the rank with the most."""
    shares = [0] * ranks
    for group, part in zip(groups, parts, strict=True):
        end = 0
        for n in group:
            start, end = end, end + n
            for rank in range(start // part, min(-(-end // part), ranks)):
                shares[rank] += n
    return max(shares)


# --- activations -----------------------------------------------------------------------------------------------------------------------


def _block_activations(model: GPTConfig, precision: str, B: int, device: str, attention: int | None) -> int:
    """Bytes that one block saves for its backward pass, without its input. GPT-2: 16 B T C elements, and a few numbers per token.

    The 16 are: 1 output of the first norm, 3 queries, keys and values, 1 output of attention, 1 residual stream between the branches, 1
    output of the second norm, 4 input of the GELU, 4 its output, 1 output of the block. Rotation and QK-norm make other queries and keys of
    those; swiglu has an input of 2 d_ff, and saves silu of its gate too. Attention saves 1 fp32 number per token and head, or `attention`
    bytes if given.
    """
    w, tokens = WIDTH[precision], B * model.seq_len
    unit = tokens * model.d_model * w
    q, k, v = (heads * model.d_head for heads in model.qkv_heads)
    elements = 4 * model.d_model + (q + k + v) + q + model.c_fc_width + model.d_ff
    if model.positions == "rotary" or model.qk_norm:
        elements += q + k
    if model.mlp == "swiglu":
        elements += model.d_ff
    if model.norm == "rmsnorm" and device == "cpu" and precision != "fp32":
        elements -= model.d_model  # of the residual stream, only the norm's fp32 copy is saved
    if device == "cuda" and k < q and (precision == "fp32" or model.document_end is not None):
        elements += 2 * q  # `model.gpt.attend` repeats keys and values
    size = tokens * elements * w + (tokens * model.n_head * FP32 if attention is None else attention)
    size += 2 * _norm_activations(model.norm, precision, tokens, model.d_model, device)
    if model.qk_norm:
        size += sum(_norm_activations("rmsnorm", precision, tokens * width // model.d_head, model.d_head, device) for width in (q, k))
    if model.dropout and device == "cpu":
        # A mask in the working precision for each branch. Attention with dropout is not fused on a CPU: it saves fp32 copies of queries,
        # keys and values instead of one tensor, and three tensors of T x T per head: the softmax, the mask and their product.
        size += 2 * unit + 3 * tokens * q * (FP32 - w) + 3 * B * model.n_head * model.seq_len**2 * FP32
    elif model.dropout:
        size += 2 * unit // w  # one byte per element
    return size


def _norm_activations(norm: str, precision: str, rows: int, width: int, device: str) -> int:
    """Bytes that a norm saves beside its input and output: fp32 statistics; RMSNorm, on a CPU, also its input and result in fp32."""
    if norm == "layernorm":
        return 2 * rows * FP32
    assert norm == "rmsnorm", norm
    copies = (1 if precision == "fp32" else 2) if device == "cpu" else 0
    return rows * FP32 * (1 + copies * width)


def _activations(model: GPTConfig, precision: str, B: int, checkpoints: int, device: str, block: int) -> int:
    """Bytes after the forward pass: embedding, blocks, last norm. A checkpointed segment of blocks keeps only its input."""
    unit = B * model.seq_len * model.d_model * WIDTH[precision]
    ends = 2 * unit + _document_mask(model, precision, B)  # the sum of the embeddings, the last norm's output
    if model.dropout:
        ends += unit if device == "cpu" else unit // WIDTH[precision]
    return ends + (unit * checkpoints if checkpoints else block * model.n_layer)


def _document_mask(model: GPTConfig, precision: str, B: int) -> int:
    """If attention stays within documents: B T^2 elements, shared by all blocks until the end of their backward pass."""
    return B * model.seq_len**2 * WIDTH[precision] if model.document_end is not None else 0


def _loss_head(model: GPTConfig, precision: str, B: int) -> int:
    """Logits and softmax of B T tokens, `LOSS_ROWS` rows in fp32 at a time: the larger of the forward and the backward pass.

    The forward pass needs most at its last rows: all logits in the working precision, all log-probabilities in fp32, and an fp32 copy of
    these rows if they are not fp32. The backward pass needs most at its first rows: all log-probabilities, and two fp32 gradients of these
    rows.
    """
    w, tokens, V = WIDTH[precision], B * model.seq_len, model.padded_vocab_size
    rows = min(LOSS_ROWS, tokens)
    chunks = -(-tokens // LOSS_ROWS)
    return max(tokens * V * w + rows * V * FP32 * (chunks + (w < FP32)), rows * V * FP32 * (chunks + 2))


# --- buffers of the engine ---------------------------------------------------------------------------------------------------------------


def _buffers(model: GPTConfig, precision: str, stage: int, sizes: dict[str, Any], ranks: int, device: str) -> tuple[int, int, int]:
    """Bytes of the reduction buckets, of the gathered weights, and of the copy that a reduction sends.

    A bucket is allocated as a whole. On a CPU only the written pages count, which are at most the size of the gradients.
    """
    w, flat = WIDTH[precision], [n for group in parameter_sizes(model) for n in group]
    N, bucket = sum(flat), int(sizes["reduce_bucket_size"])
    if stage == 0:
        return 0, 0, w * min(N, ALLREDUCE_ELEMENTS) if ranks > 1 else 0
    # Parameters larger than the bucket are reduced in place.
    bucketed = sum(n for n in flat if n <= bucket)
    # overlap_comm is true by default at stage 3, else false. At stages 1 and 2 it adds a second bucket.
    number = 2 if stage < 3 and sizes["overlap_comm"] else 1
    buckets = w * (number * bucket if device == "cuda" else min(number * bucket, bucketed))
    largest_sent = max(min(bucket, bucketed), max((n for n in flat if n > bucket), default=0))
    # Slices of several ranks, or several tensors, are concatenated before they are sent.
    copy = w * largest_sent if ranks > 1 or stage == 3 else 0
    gathered = 0
    if stage == 3 and ranks > 1:
        # The whole weights, and the flat buffer of the last gather, from which they are copied.
        whole = _gathers(model, sizes)[1]
        gathered = w * (N if whole > 0.98 * N else whole) + w * min(int(sizes["stage3_prefetch_bucket_size"]), whole)
    return buckets, gathered, copy


def _gathers(model: GPTConfig, sizes: dict[str, Any]) -> tuple[int, int]:
    """Stage 3: elements gathered in a forward and backward pass, and the maximum that is gathered at the same time.

    Replays `PartitionedParameterCoordinator` over the modules in their order. The weights of a module are gathered unless they already
    are. The prefetcher then goes through the following modules until it has requested a bucket of weights. After a module, its weights are
    released, unless they persist, are used again within `stage3_max_reuse_distance` elements, or are part of the prefetcher's bucket. The
    result is exact without prefetching. With prefetching it is up to 15% too large if not all weights are kept, because the engine never
    changes its first decisions.
    """
    elements = {name.removesuffix(".weight"): math.prod(shape) for name, shape in model_tensors(model).items() if name.endswith(".weight")}
    elements["ln_f"] = sum(map(math.prod, norm_tensors(model, "ln_f").values()))
    order = list(elements) + (["wte"] if model.tied_head else [])  # a tied head's weight is the embedding's
    order += order[::-1]
    prefetch, reuse = int(sizes["stage3_prefetch_bucket_size"]), int(sizes["stage3_max_reuse_distance"])
    threshold, most = int(sizes["stage3_param_persistence_threshold"]), int(sizes["stage3_max_live_parameters"])
    persistent = {name for name, n in elements.items() if n <= threshold}
    whole, counted_on = set(persistent), dict.fromkeys(elements, -1)
    gathered = fetched = largest = ahead = 0  # `fetched`: elements gathered and not released
    for step, name in enumerate(order):
        if name not in whole:
            whole.add(name)
            gathered, fetched = gathered + elements[name], fetched + elements[name]
        if counted_on[name] < step:  # the prefetcher has not passed this place
            ahead, counted_on[name] = step + 1, step
        quota, asked = min(most - fetched, prefetch), 0
        while prefetch and ahead < len(order) and asked < quota:
            following = order[ahead]
            counted_on[following] = ahead
            if following not in whole:
                whole.add(following)
                asked += elements[following]
            ahead += 1
        gathered, fetched = gathered + asked, fetched + asked
        largest = max(largest, sum(elements[other] for other in whole))
        distance, again = 0, False
        for other in order[step + 1 :]:
            if distance >= reuse or again:
                break
            again, distance = other == name, distance + elements[other]
        if not (again or name in persistent or counted_on[name] > step + 1):
            whole.discard(name)
            fetched -= elements[name]
    return gathered, largest


def _offload(
    states: _States, sizes: dict[str, Any], stage: int, model: GPTConfig, precision: str, accumulation: int
) -> tuple[set[str], int, int]:
    """The names of the states that are not on the device, bytes in host memory, and bytes on NVMe."""
    w, largest = WIDTH[precision], max(parameter_sizes(model)[0])
    away: set[str] = set()
    host, drive = 0, 0
    section = sizes.get("offload_optimizer") or {}
    if (device := section.get("device") or "none") != "none":
        master = states.lasting["master_weights"]
        moved = master + states.lasting["optimizer_states"]
        away |= {"master_weights", "optimizer_states"} | ({"gradients"} if stage == 3 else set())
        if device == "nvme":
            # Weights, moments and fp32 gradients are on NVMe; one sub-group of each is in page-locked buffers.
            drive += moved + master
            host += states.largest_master * int(section.get("buffer_count") or 4) + states.gradients
        else:
            # The fp32 gradients of the update stay in memory, with the master weights.
            host += moved + master
            if stage == 3:
                host += states.gradients
            else:
                # A copy of the updated partition in the working precision, a staging buffer, and the accumulated gradients.
                host += master * w // FP32 + w * largest + (states.gradients if accumulation > 1 else 0)
    section = sizes.get("offload_param") or {}
    if (device := section.get("device") or "none") != "none":
        away |= {"weights"}
        if device == "nvme":
            drive += states.lasting["weights"]
            host += w * int(section.get("buffer_size") or BUFFER_SIZE) * int(section.get("buffer_count") or 5)
            kept = section.get("max_in_cpu")  # moved back from the drive for good (DeepSpeed's stage3.py, _move_to_flat_buffer)
            host += min(states.lasting["weights"], w * (MAX_IN_CPU if kept is None else int(kept)))
        else:
            host += states.lasting["weights"]
    return away, host, drive


def _snapshot(states: _States, sizes: dict[str, Any], stage: int) -> int:
    """Bytes that rank 0 copies for a checkpoint: its states, at stage 3 without the weights, which DeepSpeed saves in fp32 only.

    States on NVMe are copied on NVMe, file by file.
    """
    names = ["weights"] if stage < 3 else []
    if (sizes.get("offload_optimizer") or {}).get("device") != "nvme":
        names += ["master_weights", "optimizer_states"]
    return sum(states.lasting[name] for name in names)


# --- bytes sent --------------------------------------------------------------------------------------------------------------------------


def bytes_sent_per_step(
    model: GPTConfig, precision: str, zero: dict[str, Any], ranks: int, accumulation: int = 1, own_group: Collection[str] = ()
) -> int:
    """Bytes that a rank sends per step from the second step on, counted as `bytes_sent` in the metrics.

    In the first step, stage 3 records the order of the modules and gathers more. Scalars are included: the loss with three stop flags in
    fp64, the norm, the overflow flag. The scales of quantized weights, 4 bytes for up to 8,000 of them, are not.
    """
    stage, sizes = zero["stage"], _with_defaults(zero)
    w, share = WIDTH[precision], (ranks - 1) / ranks
    groups = parameter_sizes(model, own_group)
    flat = [n for group in groups for n in group]
    N = sum(flat)
    loss_and_signals = 32  # fp64: loss, SIGINT, SIGUSR1, SIGTERM
    if stage == 0:
        return round(share * 2 * (w * N + loss_and_signals))
    if stage in (1, 2):
        padded = sum(-(-sum(group) // (2 * ranks)) * 2 * ranks for group in groups)
        # The gradients are all-reduced, although each rank keeps only its part, unless each slice is reduced to its owner. Stage 2
        # reduces in every micro-batch, since it keeps no other gradients; stage 1 in the last one only.
        to_owner = sizes["reduce_scatter"] and not sizes["use_multi_rank_bucket_allreduce"]
        gradients = (1 if to_owner else 2) * w * N * (accumulation if stage == 2 else 1)
        overflow = 1 if precision != "fp32" else 0
        return round(share * (gradients + w * padded + 2 * (loss_and_signals + 4 * len(groups) + overflow)))
    pieces = [-(-n // ranks) * ranks for n in flat]
    persistent = sum(-(-n // ranks) * ranks for n in flat if n <= int(sizes["stage3_param_persistence_threshold"]))
    gradients = w * sum(pieces) * accumulation  # reduce-scattered in every micro-batch
    # Weights that do not persist are gathered in every micro-batch, as int8 if quantized; those that persist, after the update.
    gathered, g = _gathers(model, sizes)[0] * accumulation, 1 if sizes.get("zero_quantized_weights") else w
    sent = share * (gradients + w * persistent + 2 * (loss_and_signals + 8 * len(groups)))
    if (group := second_group(sizes, ranks)) == 1:
        return round(sent + share * g * gathered)
    first = sum(pieces) - persistent  # once from all ranks, and then from the group that has the second copy
    return round(sent + g * (share * first + (group - 1) / group * (gathered - first)))
