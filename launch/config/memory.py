"""What a training step needs on one rank: bytes of memory by part and moment, and bytes on the wire, by formula.

    python launch/plan.py --preset gpt3-13b --ranks 64 --precision bf16 --memory 80GB

Not all parts are alive at once: gradients appear while activations are freed, and the fp32 gradients of an update come after both. So
the plan has moments (`forward`, `recompute`, `backward`, `update`), each with the parts alive in it, and the peak is the largest moment.
The terms follow DeepSpeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `fp16/unfused_optimizer.py`) and `model/gpt.py`;
`tests/distributed/test_memory.py` compares the model states with those of live engines, byte by byte.

Not in the plan: Python and its libraries, the CUDA context, and what an allocator keeps. Evaluation and generation need less than a step.
Letters: N parameters, R ranks, w bytes of the working precision, B sequences, T tokens, C width, L blocks, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.config.engine_schema import engine_schema
from model.accounting import LOSS_ROWS, parameter_count
from model.presets import GPTConfig

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32 = 4
#: Elements that stage 0 flattens and all-reduces at a time (`deepspeed/runtime/engine.py`, MEMORY_OPT_ALLREDUCE_SIZE).
ALLREDUCE_ELEMENTS = 500_000_000


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank's device; the rank that holds the most, where they differ.

    parts, by name. weights, gradients, master_weights, optimizer_states: the model states at the end of the last backward pass, from the
    second step on. buffers: reduction buckets, gathered weights and copies of both, at their largest. activations: of the blocks, the
    embedding and the last norm, as the forward pass leaves them, and the mask of the documents. loss_head: logits and their softmax, at
    most. update: what only the optimizer step has. host: offloaded states in the host's memory, and the buffers of what is offloaded to
    NVMe (a CPU has them among its `moments`). drive: bytes on NVMe. snapshot: what the rank with the largest files copies into the host's
    memory for a checkpoint that is written during training; on a CPU it is in every moment.
    moments: the parts that are alive together, by moment.
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
) -> MemoryPlan:
    """The plan of one rank.

    Args:
        precision: "fp32", "bf16" or "fp16".
        zero: the resolved `zero_optimization` section; only `stage` is required.
        micro_batch_size: sequences a rank takes at once, of `model.seq_len` tokens.
        checkpoints: segments of blocks that are recomputed, of which only the inputs are kept; `model.n_layer` is each block by itself,
            0 is no activation checkpointing.
        device: "cpu" or "cuda". On "cuda" bytes are those of torch's allocator (`max_memory_allocated`).
        optimizer_states: fp32 numbers the optimizer keeps for a parameter: 2 for Adam, 3 with amsgrad, 1 for momentum; at stage 0 not
            necessarily a whole number.
        terms: `Technique.memory_terms`.
        snapshot: whether checkpoints are written during training.
    """
    stage, sizes, terms = zero["stage"], _with_defaults(zero), terms or {}
    states = _states(model, precision, stage, sizes, ranks, accumulation, optimizer_states)
    block = _block_activations(model, precision, micro_batch_size, device, terms.get("attention"))
    activations = _activations(model, precision, micro_batch_size, checkpoints, device, block)
    head = terms.get("loss_head", _loss_head(model, precision, micro_batch_size))
    buckets, gathered, reduction = _buffers(model, precision, stage, sizes, ranks, device)
    away, host, drive = _offload(states, sizes, stage, model, precision, accumulation)
    lasting = {name: size for name, size in states.lasting.items() if name not in away}
    gradients = 0 if "gradients" in away else states.gradients
    carried = 0 if "gradients" in away and stage != 0 else states.carried
    update = 0 if "optimizer_states" in away else states.update
    copied = _snapshot(states, sizes, stage) if snapshot else 0
    if device == "cpu":  # whose memory is the host's
        lasting |= {"host": host, "snapshot": copied}

    mask = _document_mask(model, precision, micro_batch_size)
    unit = micro_batch_size * model.seq_len * model.d_model * WIDTH[precision]
    # In a block's backward pass, the gradients of the 4C-wide input and output of the GELU and of the residual stream; and the tied
    # weight's gradient: that of the head waits for that of the embedding, which is dense.
    in_flight = 9 * unit + model.padded_vocab_size * model.d_model * WIDTH[precision]
    # Stage 1 without overlap_comm reduces when the backward pass is over: what exceeds the bucket waits.
    waiting = 0
    if stage == 1 and not sizes["overlap_comm"]:
        waiting = WIDTH[precision] * max(0, parameter_count(model) - int(sizes["reduce_bucket_size"]))
    # Stage 3 holds its bucket always, stages 1 and 2 from the first gradient on.
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
            "gradients": (gradients if stage else states.gradients) + waiting,
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
        "host": host if device == "cuda" else 0,
        "drive": drive,
        "snapshot": copied,
    }
    return MemoryPlan(parts, moments)


def _with_defaults(zero: dict[str, Any]) -> dict[str, Any]:
    """`zero_optimization` with DeepSpeed's defaults for what it leaves out."""
    return {key: rule.get("default") for key, rule in engine_schema().keys["zero_optimization"]["keys"].items()} | zero


# --- the model's parameters, in the order in which the engine flattens them ------------------------------------------------------------


def parameter_sizes(model: GPTConfig) -> tuple[list[int], list[int]]:
    """Elements of every parameter: those with weight decay (matrices, embeddings) and those without, as `weight_decay_groups` has them."""
    C = model.d_model
    matrices = [3 * C * C, C * C, 4 * C * C, 4 * C * C]  # c_attn, attn.c_proj, c_fc, mlp.c_proj
    vectors = [C, C, 3 * C, C, C, C, 4 * C, C]  # ln_1 weight and bias, their biases with ln_2 between
    decayed = [model.padded_vocab_size * C, model.seq_len * C, *(matrices * model.n_layer)]
    return decayed, [*(vectors * model.n_layer), C, C]


@dataclass(frozen=True)
class _States:
    """lasting: alive always. gradients: at the end of the last backward pass. carried: gradients that a forward pass starts with.
    update: what the optimizer step adds to all of these. largest_master: bytes of the largest tensor of master weights."""

    lasting: dict[str, int]
    gradients: int
    carried: int
    update: int
    largest_master: int


def _states(
    model: GPTConfig, precision: str, stage: int, sizes: dict[str, Any], ranks: int, accumulation: int, per_parameter: float
) -> _States:
    w, groups = WIDTH[precision], parameter_sizes(model)
    flat = [n for group in groups for n in group]
    N = sum(flat)
    if stage == 0:
        lasting = {
            "weights": w * N,
            "master_weights": 0 if precision == "fp32" else FP32 * N,
            "optimizer_states": round(FP32 * per_parameter * N),
        }
        # fp32: torch's optimizer on the gradients themselves; the norm is taken in fp64, a parameter at a time. bf16, fp16:
        # FP16_UnfusedOptimizer copies every gradient to fp32.
        update = 8 * max(flat) if precision == "fp32" else FP32 * N
        return _States(lasting, w * N, w * N if accumulation > 1 else 0, update, FP32 * max(flat))
    if stage == 3:
        # Every parameter is cut into R pieces of ceil(n / R); the pieces of a group are flat. Master weights are a copy at fp32 too.
        parts = [sum(-(-n // ranks) for n in group) for group in groups]
        weights = w * sum(parts)
        if (group := second_group(sizes, ranks)) > 1:  # a second part of whatever does not persist, from the forward pass to the update
            persists = int(sizes["stage3_param_persistence_threshold"])
            weights += sum(w * -(-n // ranks) * ranks // group for n in flat if n > persists)
        gradients = carried = w * sum(parts)  # one flat buffer, never freed
    else:
        # A group's weights are flat, padded to a multiple of 2 R elements; a rank owns 1/R of it.
        padded = [-(-sum(group) // (2 * ranks)) * 2 * ranks for group in groups]
        parts = [n // ranks for n in padded]
        weights = w * sum(padded)
        # Whole gradients of all parameters that touch the rank's partition, `grads_in_partition`; or of all parameters.
        gradients = w * (N if stage == 1 and not sizes["contiguous_gradients"] else _largest_share(groups, parts, ranks))
        carried = 0 if accumulation == 1 else w * N if stage == 1 else gradients  # stage 1 reduces in the last micro-batch only
    lasting = {
        "weights": weights,
        "master_weights": FP32 * sum(parts),
        "optimizer_states": FP32 * int(per_parameter) * sum(parts),
    }
    # A group at a time: its gradients flattened, and again in fp32 if they are not fp32 yet.
    update = max(parts) * (FP32 if w == FP32 else FP32 + w)
    return _States(lasting, gradients, carried, update, FP32 * max(parts))


def second_group(zero: dict[str, Any], ranks: int) -> int:
    """Ranks of the second partition of the weights (hpZ), from which they are gathered until the update; 1: there is none."""
    return min(zero.get("zero_hpz_partition_size") or 1, ranks)


def _largest_share(groups: tuple[list[int], list[int]], parts: list[int], ranks: int) -> int:
    """Elements of the parameters that touch a rank's partitions, of the rank that has most."""
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
    """What one block saves for its backward pass, its input excepted: 16 B T C elements, and a few numbers a token.

    1 the norm's output, 3 queries, keys and values, 1 attention's output, 1 the stream between the branches, 1 the second norm's output,
    4 the GELU's input, 4 its output, 1 the block's output. fp32 statistics: 2 a token and norm, 1 a token and head for attention, or
    `attention` bytes if given.
    """
    w, tokens = WIDTH[precision], B * model.seq_len
    unit = tokens * model.d_model * w
    size = 16 * unit + 4 * tokens * FP32 + (tokens * model.n_head * FP32 if attention is None else attention)
    if model.dropout and device == "cpu":
        # A mask in the working precision for each branch. Attention with dropout is not fused on a CPU: it saves copies of queries, keys
        # and values in fp32 in the place of one tensor, and T x T for every head three times: softmax, mask, their product.
        size += 2 * unit + 3 * (tokens * model.d_model * FP32 - unit) + 3 * B * model.n_head * model.seq_len**2 * FP32
    elif model.dropout:
        size += 2 * unit // w  # a byte an element
    return size


def _activations(model: GPTConfig, precision: str, B: int, checkpoints: int, device: str, block: int) -> int:
    """As the forward pass leaves them: embedding, blocks, last norm. A checkpointed segment of blocks keeps only its input."""
    unit = B * model.seq_len * model.d_model * WIDTH[precision]
    ends = 2 * unit + _document_mask(model, precision, B)  # the sum of the embeddings, the last norm's output
    if model.dropout:
        ends += unit if device == "cpu" else unit // WIDTH[precision]
    return ends + (unit * checkpoints if checkpoints else block * model.n_layer)


def _document_mask(model: GPTConfig, precision: str, B: int) -> int:
    """Where attention stays within documents, B T^2 elements for all blocks together, until the end of their backward pass."""
    return B * model.seq_len**2 * WIDTH[precision] if model.document_end is not None else 0


def _loss_head(model: GPTConfig, precision: str, B: int) -> int:
    """Logits and softmax of B T tokens, `LOSS_ROWS` rows in fp32 at a time; the larger of forward and backward pass.

    Forward, at the last rows: all logits in the working precision, all log-probabilities in fp32, and these rows as fp32 unless they are.
    Backward, at its first rows: all log-probabilities, and two gradients of these rows in fp32.
    """
    w, tokens, V = WIDTH[precision], B * model.seq_len, model.padded_vocab_size
    rows = min(LOSS_ROWS, tokens)
    chunks = -(-tokens // LOSS_ROWS)
    return max(tokens * V * w + rows * V * FP32 * (chunks + (w < FP32)), rows * V * FP32 * (chunks + 2))


# --- buffers of the engine ---------------------------------------------------------------------------------------------------------------


def _buffers(model: GPTConfig, precision: str, stage: int, sizes: dict[str, Any], ranks: int, device: str) -> tuple[int, int, int]:
    """Reduction buckets, gathered weights, and the copy that a reduction makes of what it sends.

    A bucket is allocated whole; on a CPU only the pages that are written count, which are no more than there are gradients.
    """
    w, flat = WIDTH[precision], [n for group in parameter_sizes(model) for n in group]
    N, bucket = sum(flat), int(sizes["reduce_bucket_size"])
    if stage == 0:
        return 0, 0, w * min(N, ALLREDUCE_ELEMENTS) if ranks > 1 else 0
    # Parameters that are larger than the bucket are reduced where they are.
    bucketed = sum(n for n in flat if n <= bucket)
    # overlap_comm defaults to true at stage 3 and to false below; at stages 1 and 2 it is a second bucket.
    number = 2 if stage < 3 and sizes["overlap_comm"] else 1
    buckets = w * (number * bucket if device == "cuda" else min(number * bucket, bucketed))
    largest_sent = max(min(bucket, bucketed), max((n for n in flat if n > bucket), default=0))
    # Slices of several ranks, or several tensors, are concatenated before they are sent.
    copy = w * largest_sent if ranks > 1 or stage == 3 else 0
    gathered = 0
    if stage == 3 and ranks > 1:
        # Whole weights, and the flat buffer of the last gather, from which they were copied.
        whole = _gathers(model, sizes)[1]
        gathered = w * (N if whole > 0.98 * N else whole) + w * min(int(sizes["stage3_prefetch_bucket_size"]), whole)
    return buckets, gathered, copy


def _gathers(model: GPTConfig, sizes: dict[str, Any]) -> tuple[int, int]:
    """Stage 3: elements gathered in a forward and backward pass, and the most that are there whole at once.

    Replays `PartitionedParameterCoordinator` over the modules in their order: a module's weights are gathered unless they are there; the
    prefetcher walks on through the trace until it has asked for its bucket; after a module its weights go, unless they persist, are used
    again within `stage3_max_reuse_distance` elements, or the prefetcher has counted on them. Without prefetching it is exact; with it,
    where not all weights are kept, up to 15% too many (the engine keeps its first decisions for ever).
    """
    C, V = model.d_model, model.padded_vocab_size
    elements = {"wte": V * C, "wpe": model.seq_len * C, "ln_f": 2 * C}
    modules = ["wte", "wpe"]
    for layer in range(model.n_layer):
        block = {"ln_1": C, "c_attn": 3 * C * C, "c_proj": C * C, "ln_2": C, "c_fc": 4 * C * C, "mlp": 4 * C * C}
        elements |= {f"{layer}.{name}": n for name, n in block.items()}
        modules += [f"{layer}.{name}" for name in block]
    order = [*modules, "ln_f", "wte"]  # the head's weight is the embedding's
    order += order[::-1]
    prefetch, reuse = int(sizes["stage3_prefetch_bucket_size"]), int(sizes["stage3_max_reuse_distance"])
    threshold, most = int(sizes["stage3_param_persistence_threshold"]), int(sizes["stage3_max_live_parameters"])
    persistent = {name for name, n in elements.items() if n <= threshold}
    whole, counted_on = set(persistent), dict.fromkeys(elements, -1)
    gathered = fetched = largest = ahead = 0  # `fetched`: elements that came and have not gone
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
    """Names of the states that are not on the device, what the host's memory holds, and bytes on NVMe."""
    w, largest = WIDTH[precision], max(parameter_sizes(model)[0])
    away: set[str] = set()
    host, drive = 0, 0
    section = sizes.get("offload_optimizer") or {}
    if (device := section.get("device") or "none") != "none":
        master = states.lasting["master_weights"]
        moved = master + states.lasting["optimizer_states"]
        away |= {"master_weights", "optimizer_states"} | ({"gradients"} if stage == 3 else set())
        if device == "nvme":
            # Weights, moments and fp32 gradients there; one sub-group of each in locked buffers.
            drive += moved + master
            group = min(FP32 * int(sizes.get("sub_group_size") or 10**9), states.largest_master)
            host += group * int(section.get("buffer_count") or 4) + states.gradients
        else:
            # The fp32 gradients of the update stay, beside the master weights.
            host += moved + master
            if stage == 3:
                host += states.gradients
            else:
                # A working-precision copy of the updated partition, a staging buffer, and what accumulates.
                host += master * w // FP32 + w * largest + (states.gradients if accumulation > 1 else 0)
    section = sizes.get("offload_param") or {}
    if (device := section.get("device") or "none") != "none":
        away |= {"weights"}
        if device == "nvme":
            drive += states.lasting["weights"]
            host += w * int(section.get("buffer_size") or 10**8) * int(section.get("buffer_count") or 5)
        else:
            host += states.lasting["weights"]
    return away, host, drive


def _snapshot(states: _States, sizes: dict[str, Any], stage: int) -> int:
    """What rank 0 copies for a checkpoint: the states as it has them; at stage 3 no weights, which DeepSpeed saves in fp32 only.

    What is on NVMe is copied there, file by file.
    """
    names = ["weights"] if stage < 3 else []
    if (sizes.get("offload_optimizer") or {}).get("device") != "nvme":
        names += ["master_weights", "optimizer_states"]
    return sum(states.lasting[name] for name in names)


# --- the wire ----------------------------------------------------------------------------------------------------------------------------


def bytes_sent_per_step(model: GPTConfig, precision: str, zero: dict[str, Any], ranks: int, accumulation: int = 1) -> int:
    """What a rank puts on the wire in a step, as `bytes_sent` in the metrics counts it, from the second step on.

    In the first step stage 3 learns the order of the modules and gathers more. It does so for good in a run that evaluates before its
    first step, from which it learns that no weight is used twice (measured: 15.6 MB instead of 10.6 for `nano` on two ranks).
    Scalars included: the loss with two stop flags in fp64, the norm, the overflow flag. Not included: the scales of quantized weights, 4
    bytes for up to 8,000 of them.
    """
    stage, sizes = zero["stage"], _with_defaults(zero)
    w, share = WIDTH[precision], (ranks - 1) / ranks
    groups = parameter_sizes(model)
    flat = [n for group in groups for n in group]
    N = sum(flat)
    agreement = 24  # fp64: loss, SIGINT, SIGTERM
    if stage == 0:
        return round(share * 2 * (w * N + agreement))
    if stage in (1, 2):
        padded = sum(-(-sum(group) // (2 * ranks)) * 2 * ranks for group in groups)
        # The gradients are all-reduced, although a rank keeps its part only, unless each slice is reduced to its owner. Stage 2
        # does so for every micro-batch, since it keeps no others; stage 1 for the last one.
        to_owner = sizes["reduce_scatter"] and not sizes["use_multi_rank_bucket_allreduce"]
        gradients = (1 if to_owner else 2) * w * N * (accumulation if stage == 2 else 1)
        overflow = 1 if precision != "fp32" else 0
        return round(share * (gradients + w * padded + 2 * (agreement + 8 + overflow)))
    pieces = [-(-n // ranks) * ranks for n in flat]
    persistent = sum(-(-n // ranks) * ranks for n in flat if n <= int(sizes["stage3_param_persistence_threshold"]))
    gradients = w * sum(pieces) * accumulation  # reduce-scattered in every micro-batch
    # In every micro-batch the weights that do not persist are gathered, as int8 if quantized; those that persist after the update.
    gathered, g = _gathers(model, sizes)[0] * accumulation, 1 if sizes.get("zero_quantized_weights") else w
    sent = share * (gradients + w * persistent + 2 * (agreement + 8 * len(groups)))
    if (group := second_group(sizes, ranks)) == 1:
        return round(sent + share * g * gathered)
    first = sum(pieces) - persistent  # once from all ranks, and then from the group that has the second copy
    return round(sent + g * (share * first + (group - 1) / group * (gathered - first)))
