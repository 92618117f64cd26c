"""What a training step needs on one rank: bytes of memory by part and moment, and bytes on the wire. Derived, without torch.

    python launch/plan.py --preset gpt3-13b --ranks 64 --precision bf16 --memory 80GB

Parts do not all live at once: gradients appear while activations go, and the fp32 gradients of an update come when both have gone. So
the plan has moments (`build`, `forward`, `recompute`, `backward`, `update`), each with the parts alive in it, and the peak is the largest
moment. The terms are read off DeepSpeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`, `fp16/unfused_optimizer.py`) and
`model/gpt.py`, and held against real engines by `tests/distributed/test_memory.py` and `benchmarks/memory.py`.

Not a part, because they never exceed the training step's own peak: evaluation (a training forward that saves nothing) and generation.
Letters: N parameters, R ranks, w bytes of the working precision, B sequences, T tokens, C width, L blocks, V padded vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from model.accounting import parameter_count
from model.presets import GPTConfig

MIB = 2**20
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32 = 4
#: Rows of logits that become fp32 at a time (`model.gpt.LOSS_ROWS`, which cannot be imported without torch; a test compares them).
LOSS_ROWS = 512
#: Of recipes/fused_kernels, by the same test: bytes of logits and rows in fp32 at a time (`cross_entropy.py`), queries of a block and the
#: length up to which probabilities are kept (`attention.py`).
LOGITS_BYTES, FUSED_ROWS, QUERIES, KEPT_LENGTH = 2**29, 64, 128, 512
#: Elements that stage 0 flattens and all-reduces at a time (`deepspeed/runtime/engine.py`, MEMORY_OPT_ALLREDUCE_SIZE).
ALLREDUCE_ELEMENTS = 500_000_000
#: Resident set of a rank that trains a model of a few thousand parameters on a CPU: Python, torch, DeepSpeed and what their first step
#: loads. Measured (`python benchmarks/memory.py --process`) with torch 2.13.0 and DeepSpeed 0.19.8 on Linux x86-64, two ranks: 365 to 375
#: MiB at every stage. One rank: 5 to 10 MiB less.
PROCESS = 366 * MIB
#: What torch's compiler adds to it, by the same measurement of one rank: 83 MiB with kernels that were compiled before, 96 without.
COMPILER = 90 * MIB
#: glibc, on a CPU. A block from here on is a mapping of its own, which goes back to the system when it is freed (M_MMAP_THRESHOLD adapts
#: to the largest freed block, but never beyond 32 MiB). Smaller blocks live on the heap, which does not shrink below its high-water
#: mark while anything stands above a hole.
MMAP_THRESHOLD = 32 * MIB
#: The heap's free top stays, up to M_TRIM_THRESHOLD, which is twice the threshold above.
HEAP_TOP = 2 * MMAP_THRESHOLD
#: Holes, as a share of the heap: torch asks for aligned blocks (posix_memalign), and glibc 2.36 serves an aligned request only from a
#: free block that is larger than it, so that a freed block is not taken again by its like. One of two numbers here that are fitted, to the
#: peaks of 61 runs (`benchmarks/memory.py`; with it they are predicted within 14.6%, on average within 4.7%). With fixed
#: MALLOC_MMAP_THRESHOLD_=1048576 there are no holes and no top, and a peak is the process and its live blocks.
HEAP_HOLES = 0.16

#: And of the loss's log-probabilities, where their blocks are on the heap: freed in the backward pass, they are not taken again by the
#: gradients of the logits, which are blocks of the same size. Of the blocks beyond the first two; fitted to 8 runs with 4 to 32 of them
#: (narrow models on 8 x 512, 8 x 1,024 and 8 x 2,048 tokens, `micro` on 32 x 256, each in fp32 and bf16), then predicted within 8%.
LOSS_HOLES = 0.65

# The default values of DeepSpeed's `zero_optimization` (deepspeed/runtime/zero/config.py) that decide sizes.
_DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "overlap_comm": None,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "use_multi_rank_bucket_allreduce": True,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}


@dataclass(frozen=True)
class Blocks:
    """Memory that is allocated in blocks: (bytes of one, how many). On a CPU small blocks and large ones behave differently."""

    sizes: tuple[tuple[int, int], ...] = ()

    @property
    def total(self) -> int:
        return sum(size * count for size, count in self.sizes)

    @property
    def on_heap(self) -> int:
        return sum(size * count for size, count in self.sizes if size < MMAP_THRESHOLD)

    def __add__(self, other: Blocks) -> Blocks:
        return Blocks(self.sizes + other.sizes)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank's device (on a CPU: of its process), by part. The rank that holds the most, where they differ.

    weights, gradients, master_weights, optimizer_states: the model states at the end of the last backward pass, from the second step on.
    buffers: reduction buckets, gathered weights and copies of both, at their largest. activations: of the blocks, the embedding and the
    last norm, as the forward pass leaves them, and the mask of the documents. loss_head: logits and their softmax, at most. update: what
    only the optimizer step has.
    snapshot: what the rank with the largest files copies into the host's memory for a checkpoint that is written beside training; on a CPU
    it is there from the first step on, and counts in every moment.
    process, allocator: a CPU's only; Python with its libraries, and what glibc keeps. host: offloaded states in the host's memory, and the
    buffers of what is on a drive; drive: what is there.
    moments: what is alive when, without process and allocator; peak: the largest of them, with both; peak_moment: its name.
    """

    weights: int
    gradients: int
    master_weights: int
    optimizer_states: int
    buffers: int
    activations: int
    loss_head: int
    update: int
    process: int
    allocator: int
    host: int
    drive: int
    snapshot: int
    moments: dict[str, dict[str, int]]
    peak_moment: str
    peak: int

    @property
    def model_states(self) -> int:
        return self.weights + self.gradients + self.master_weights + self.optimizer_states


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
    fused: frozenset[str] = frozenset(),
    snapshot: bool = False,
) -> MemoryPlan:
    """The plan of one rank.

    Args:
        precision: "fp32", "bf16" or "fp16".
        zero: the resolved `zero_optimization` section; only `stage` is required.
        micro_batch_size: sequences a rank takes at once, of `model.seq_len` tokens.
        checkpoints: segments of blocks that are recomputed, of which only the inputs are kept; `model.n_layer` is every block for itself,
            0 is no activation checkpointing.
        device: "cpu" or "cuda". On "cuda" bytes are those of torch's allocator (`max_memory_allocated`), without its cache and the
            CUDA context.
        optimizer_states: fp32 numbers the optimizer keeps for a parameter: 2 for Adam, 3 with amsgrad, 1 for Lion or momentum; at stage 0
            not necessarily a whole number.
        fused: what `recipes/fused_kernels` gives kernels: "attention", "cross_entropy"; "gelu" and "compile" bring torch's compiler.
        snapshot: whether checkpoints are written beside training.
    """
    stage, sizes = zero["stage"], {**_DEFAULTS, **zero}
    states = _states(model, precision, stage, sizes, ranks, accumulation, optimizer_states)
    block = _block_activations(model, precision, micro_batch_size, device, "attention" in fused)
    acts = _activations(model, precision, micro_batch_size, checkpoints, device, block)
    if "cross_entropy" in fused:
        head = _fused_loss_head(model, precision, micro_batch_size, device)
    else:
        head = _loss_head(model, precision, micro_batch_size)
    buckets, gathered, reduction = _buffers(model, precision, stage, sizes, ranks, device)
    away, host, drive = _offload(states, sizes, stage, model, precision, accumulation)
    lasting = {name: blocks for name, blocks in states.lasting.items() if name not in away}
    gradients = Blocks() if "gradients" in away else states.gradients
    carried = Blocks() if "gradients" in away and stage != 0 else states.carried
    update = Blocks() if "optimizer_states" in away else states.update
    if device == "cpu" and away:  # the host's memory is the rank's own
        lasting["host"] = host
    copied = _snapshot(states, sizes, stage) if snapshot else Blocks()
    if device == "cpu":
        lasting["snapshot"] = copied

    # Stage 3 holds its bucket always, stages 1 and 2 from the first gradient on.
    standing = {"buffers": buckets + gathered} if stage == 3 else {}
    mask = _document_mask(model, precision, micro_batch_size)
    elements = micro_batch_size * model.seq_len * model.d_model * WIDTH[precision]
    # In a block's backward pass, the gradients of the 4C-wide input and output of the GELU and of the residual stream: 9 B T C.
    in_flight = Blocks(((4 * elements, 2), (elements, 1)))
    # The tied weight's gradient: that of the head waits for that of the embedding, which is dense: one more than the sum.
    tied = Blocks(((model.padded_vocab_size * model.d_model * WIDTH[precision], 1),))
    # Stage 1 without overlap_comm reduces when the backward pass is over: what the bucket does not hold waits as it came.
    waiting = Blocks()
    if stage == 1 and not sizes["overlap_comm"]:
        waiting = Blocks(((WIDTH[precision] * max(0, parameter_count(model) - int(sizes["reduce_bucket_size"])), 1),))
    moments = {
        "build": _build(model, precision, stage, ranks) if device == "cpu" else {},
        "forward": {**lasting, "gradients": carried, **standing, "activations": acts, "loss_head": head},
        "backward": {
            **lasting,
            "gradients": (gradients if stage else states.gradients) + waiting,
            "buffers": buckets + gathered + reduction,
            "activations": block + mask + in_flight + tied,
        },
        "update": {**lasting, "gradients": gradients, **({"buffers": buckets} if stage == 3 else {}), "update": update},
    }
    if checkpoints:
        longest = -(-model.n_layer // checkpoints)
        moments["recompute"] = {
            **lasting,
            "gradients": carried,
            "buffers": buckets + gathered if stage else Blocks(),
            "activations": acts + Blocks(tuple((size, count * longest) for size, count in block.sizes)) + in_flight + tied,
        }
    totals = {name: sum(blocks.total for blocks in parts.values()) for name, parts in moments.items()}
    peak_moment = max(totals, key=totals.__getitem__)
    process, allocator = 0, 0
    if device == "cpu":
        process = PROCESS + (COMPILER if fused & {"gelu", "compile"} else 0)
        allocator = _heap_slack(moments, stage, totals[peak_moment])
        if "cross_entropy" not in fused:
            allocator += _loss_holes(model, micro_batch_size)
    everything = [blocks for parts in moments.values() for name, blocks in parts.items() if name == "buffers"]
    return MemoryPlan(
        weights=states.lasting["weights"].total,
        gradients=states.gradients.total,
        master_weights=states.lasting["master_weights"].total,
        optimizer_states=states.lasting["optimizer_states"].total,
        buffers=max((blocks.total for blocks in everything), default=0),
        activations=acts.total,
        loss_head=head.total,
        update=update.total,
        process=process,
        allocator=allocator,
        host=host.total if device == "cuda" else 0,
        drive=drive,
        snapshot=copied.total,
        moments={name: {part: blocks.total for part, blocks in parts.items() if blocks.total} for name, parts in moments.items() if parts},
        peak_moment=peak_moment,
        peak=totals[peak_moment] + process + allocator,
    )


def _heap_slack(moments: dict[str, dict[str, Blocks]], stage: int, peak: int) -> int:
    """What glibc keeps beyond the live blocks of the peak: holes, and the free top of its heap.

    At stages 1 to 3 what lasts is large, and the heap, once grown by a forward pass, is still there when the update allocates large
    blocks: its high-water mark and the most large blocks add up, whenever they were. At stage 0 gradients, master weights and optimizer
    states are small blocks themselves, and take the place of the activations before a large one comes: moments do not mix.
    """
    heap = {name: round(sum(blocks.on_heap for blocks in parts.values()) * (1 + HEAP_HOLES)) for name, parts in moments.items()}
    if "recompute" in heap:  # what the loss has freed is not taken by the activations that are made anew
        heap["recompute"] += round(moments["forward"]["loss_head"].on_heap * (1 + HEAP_HOLES))
    large = {name: sum(blocks.total - blocks.on_heap for blocks in parts.values()) for name, parts in moments.items()}
    if stage == 0:
        resident = max(heap[name] + large[name] for name in moments)
    else:
        resident = max(heap.values()) + max(large.values())
    if stage == 3:
        # zero.Init leaves the pieces of each parameter between the others' drawings; once flattened, they are holes that nothing fits.
        resident += sum(size for size, _ in moments["build"]["pieces"].sizes if size < MMAP_THRESHOLD)
    small = (size for blocks in moments["forward"].values() for size, _ in blocks.sizes if size < MMAP_THRESHOLD)
    return resident - peak + min(HEAP_TOP, 2 * max(small, default=0))


def _loss_holes(model: GPTConfig, B: int) -> int:
    """What the loss leaves on glibc's heap when its backward pass begins."""
    block = LOSS_ROWS * model.padded_vocab_size * FP32
    return round(LOSS_HOLES * block * max(0, math.ceil(B * model.seq_len / LOSS_ROWS) - 2)) if block < MMAP_THRESHOLD else 0


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
    """lasting: alive always. gradients: at the end of the last backward pass. carried: those that a forward pass finds there.
    update: what the optimizer step adds to all of these."""

    lasting: dict[str, Blocks]
    gradients: Blocks
    carried: Blocks
    update: Blocks

    @property
    def all(self) -> dict[str, Blocks]:
        return {**self.lasting, "gradients": self.gradients}


def _states(
    model: GPTConfig, precision: str, stage: int, sizes: dict[str, Any], ranks: int, accumulation: int, per_parameter: float
) -> _States:
    w, groups = WIDTH[precision], parameter_sizes(model)
    flat = [n for group in groups for n in group]

    def each(width: int, count: int = 1) -> Blocks:
        return Blocks(tuple((width * n, count) for n in flat))

    if stage == 0:
        master = Blocks() if precision == "fp32" else each(FP32)
        # A part of one is a buffer over all parameters, as for the errors of a compression.
        rest = Blocks(((round(FP32 * (per_parameter % 1) * sum(flat)), 1),))
        lasting = {"weights": each(w), "master_weights": master, "optimizer_states": each(FP32, int(per_parameter)) + rest}
        # fp32: torch's optimizer on the gradients themselves; the norm is taken in fp64, a parameter at a time. bf16, fp16:
        # FP16_UnfusedOptimizer copies every gradient to fp32 beside the one it has.
        update = Blocks(((8 * max(flat), 1),)) if precision == "fp32" else each(FP32)
        return _States(lasting, each(w), each(w) if accumulation > 1 else Blocks(), update)
    if stage == 3:
        # Every parameter is cut into R pieces of ceil(n / R); the pieces of a group are flat. Master weights are a copy at fp32 too.
        parts = [sum(-(-n // ranks) for n in group) for group in groups]
        whole = sum(parts)
        lasting = {
            "weights": Blocks(((w * whole, 1),)),
            "master_weights": Blocks(tuple((FP32 * n, 1) for n in parts)),
            "optimizer_states": Blocks(tuple((FP32 * n, int(per_parameter)) for n in parts)),
        }
        if (group := second_group(sizes, ranks)) > 1:  # a second part of whatever does not persist, from the forward pass to the update
            persists = int(sizes["stage3_param_persistence_threshold"])
            lasting["weights"] += Blocks(tuple((w * -(-n // ranks) * ranks // group, 1) for n in flat if n > persists))
        gradients = Blocks(((w * whole, 1),))  # one flat buffer, never freed
        return _States(lasting, gradients, gradients, _flat_update(parts, w))
    # Stages 1 and 2: a group's weights are flat, padded to a multiple of 2 R elements; a rank owns 1/R of it.
    padded = [-(-sum(group) // (2 * ranks)) * 2 * ranks for group in groups]
    parts = [n // ranks for n in padded]
    lasting = {
        "weights": Blocks(tuple((w * n, 1) for n in padded)),
        "master_weights": Blocks(tuple((FP32 * n, 1) for n in parts)),
        "optimizer_states": Blocks(tuple((FP32 * n, int(per_parameter)) for n in parts)),
    }
    if sizes["contiguous_gradients"]:
        # Whole gradients of all parameters that touch the rank's partition, `grads_in_partition`.
        gradients = Blocks(((w * _largest_share(groups, parts, ranks), 1),))
    else:
        gradients = each(w) if stage == 1 else Blocks(((w * _largest_share(groups, parts, ranks), 1),))
    if accumulation == 1:
        carried = Blocks()
    elif stage == 1:
        carried = each(w)  # reduced in the last micro-batch only
    else:
        carried = gradients
    return _States(lasting, gradients, carried, _flat_update(parts, w))


def second_group(zero: dict[str, Any], ranks: int) -> int:
    """Ranks of the second copy of the weights (hpZ), which is gathered in the place of the first until the update; 1: there is none."""
    return min(zero.get("zero_hpz_partition_size") or 1, ranks)


def _flat_update(parts: list[int], w: int) -> Blocks:
    """Stages 1, 2, 3, a group at a time: its gradients flattened, and where that is not fp32 yet, again in fp32."""
    largest = max(parts)
    return Blocks(((FP32 * largest, 1),) if w == FP32 else ((FP32 * largest, 1), (w * largest, 1)))


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


def _build(model: GPTConfig, precision: str, stage: int, ranks: int) -> dict[str, Blocks]:
    """A CPU's start: the model is drawn in fp32, converted a parameter at a time, and at stages 1 and 2 flattened into new memory."""
    groups = parameter_sizes(model)
    w, flat = WIDTH[precision], [n for group in groups for n in group]
    if stage == 3:  # partitioned as it is drawn, then flattened
        pieces = [w * -(-n // ranks) for n in flat]
        return {
            "pieces": Blocks(tuple((size, 1) for size in pieces)),
            "weights": Blocks(((sum(pieces), 1),)),
            "drawn": Blocks(((FP32 * max(flat), 2),)),
        }
    drawn = Blocks(tuple((FP32 * n, 1) for n in flat))
    if stage == 0:
        return {"drawn": drawn, "weights": Blocks(((w * max(flat), 1),))}
    converted = Blocks(tuple((w * n, 1) for n in flat)) if w < FP32 else Blocks()
    return {"drawn": drawn, "converted": converted, "weights": Blocks(((w * sum(groups[0]), 1), (w * sum(groups[1]), 1)))}


# --- activations -----------------------------------------------------------------------------------------------------------------------


def _block_activations(model: GPTConfig, precision: str, B: int, device: str, fused_attention: bool) -> Blocks:
    """What one block saves for its backward pass, its input excepted: 16 B T C elements, and a few numbers a token.

    Attention in blocks of queries, on a CPU: the probabilities of each block in place of statistics, if the sequence is not long.

    1 the norm's output, 3 queries, keys and values (one tensor), 1 attention's output, 1 the stream between the branches, 1 the second
    norm's output, 4 the GELU's input, 4 its output, 1 the block's output. fp32 statistics: 2 a token and norm, 1 a token and head.
    """
    w, tokens = WIDTH[precision], B * model.seq_len
    unit = tokens * model.d_model * w
    sizes = [(unit, 5), (3 * unit, 1), (4 * unit, 2), (tokens * 4, 4), (tokens * model.n_head * 4, 1)]
    if fused_attention and device == "cpu" and not model.dropout:
        sizes = [(unit, 8), (4 * unit, 2), (tokens * 4, 4)]  # queries, keys and values each in one piece
        if model.seq_len <= KEPT_LENGTH:
            ends = range(QUERIES, model.seq_len + QUERIES, QUERIES)
            met = [min(QUERIES, model.seq_len - end + QUERIES) * min(end, model.seq_len) for end in ends]  # pairs of query and key
            sizes += [(B * model.n_head * pairs * w, 1) for pairs in met]
    if model.dropout:
        # A mask for each branch: in the working precision on a CPU (noise that is multiplied), one byte an element on a GPU.
        sizes += [(unit if device == "cpu" else unit // w, 2)]
        if device == "cpu":
            # No fused attention with dropout on a CPU: everything in fp32, copies of queries, keys and values where they are not, the
            # scaled queries and keys where they are, and T x T for every head three times: softmax, mask, their product.
            copies = (unit, 2) if w == FP32 else (tokens * model.d_model * FP32, 3)
            sizes += [copies, (B * model.n_head * model.seq_len**2 * FP32, 3)]
            if w < FP32:
                sizes.remove((3 * unit, 1))  # only its copies are saved
    return Blocks(tuple(sizes))


def _activations(model: GPTConfig, precision: str, B: int, checkpoints: int, device: str, block: Blocks) -> Blocks:
    """As the forward pass leaves them: embedding, blocks, last norm. A checkpointed segment of blocks keeps its input alone."""
    unit = B * model.seq_len * model.d_model * WIDTH[precision]
    ends = Blocks(((unit, 2),)) + _document_mask(model, precision, B)  # the sum of the embeddings, the last norm's output
    if model.dropout:
        ends += Blocks(((unit if device == "cpu" else unit // WIDTH[precision], 1),))
    if checkpoints:
        return ends + Blocks(((unit, checkpoints),))
    return ends + Blocks(tuple((size, count * model.n_layer) for size, count in block.sizes))


def _document_mask(model: GPTConfig, precision: str, B: int) -> Blocks:
    """Where attention stays within documents, B T^2 elements for all blocks together, until the end of their backward pass."""
    return Blocks(((B * model.seq_len**2 * WIDTH[precision], 1),) if model.document_end is not None else ())


def _loss_head(model: GPTConfig, precision: str, B: int) -> Blocks:
    """Logits and softmax of B T tokens, 512 rows in fp32 at a time.

    Forward, at the last rows: all logits in the working precision, all log-probabilities in fp32, and these rows as fp32 unless they are.
    Backward, at its first rows: all log-probabilities, and two gradients of these rows in fp32. The larger of the two.
    """
    w, tokens, V = WIDTH[precision], B * model.seq_len, model.padded_vocab_size
    rows = min(LOSS_ROWS, tokens)
    chunks = math.ceil(tokens / LOSS_ROWS)
    forward = Blocks(((tokens * V * w, 1), (rows * V * FP32, chunks + (w < FP32))))
    backward = Blocks(((rows * V * FP32, chunks + 2),))
    return max(forward, backward, key=lambda blocks: blocks.total)


def _fused_loss_head(model: GPTConfig, precision: str, B: int, device: str) -> Blocks:
    """Logits, or a part of them, some rows of it in fp32, and the gradients of the head's two factors; of several parts summed in fp32.

    A product for the weight's gradient is fp32; on a CPU it is bf16 in bf16 (`recipes/fused_kernels/cross_entropy.py`).
    """
    w, tokens, V, C = WIDTH[precision], B * model.seq_len, model.padded_vocab_size, model.d_model
    rows = min(tokens, max(1, LOGITS_BYTES // (V * w)))
    sizes = [(rows * V * w, 1), (min(FUSED_ROWS, tokens) * V * FP32, 1), (tokens * C * w, 1)]
    sizes.append((V * C * (w if device == "cpu" and precision == "bf16" else FP32), 1))
    return Blocks((*sizes, *([(V * C * FP32, 1)] if rows < tokens else [])))


# --- buffers of the engine ---------------------------------------------------------------------------------------------------------------


def _buffers(model: GPTConfig, precision: str, stage: int, sizes: dict[str, Any], ranks: int, device: str) -> tuple[Blocks, Blocks, Blocks]:
    """Reduction buckets, gathered weights, and the copy that a reduction makes of what it sends.

    A bucket is allocated whole; on a CPU only the pages that are written count, which are no more than there are gradients.
    """
    w, flat = WIDTH[precision], [n for group in parameter_sizes(model) for n in group]
    N, bucket = sum(flat), int(sizes["reduce_bucket_size"])
    if stage == 0:
        copy = Blocks(((w * min(N, ALLREDUCE_ELEMENTS), 1),)) if ranks > 1 else Blocks()
        return Blocks(), Blocks(), copy
    # Parameters that are larger than the bucket are reduced where they are.
    bucketed = sum(n for n in flat if n <= bucket)
    # overlap_comm defaults to true at stage 3 and to false below; at stages 1 and 2 it is a second bucket.
    buckets, left = [], bucketed
    for _ in range(2 if stage < 3 and sizes["overlap_comm"] else 1):
        buckets.append((w * (bucket if device == "cuda" else min(bucket, left)), 1))
        left = max(0, left - bucket)
    largest_sent = max(min(bucket, bucketed), max((n for n in flat if n > bucket), default=0))
    # Slices of several ranks, or several tensors, are concatenated before they are sent.
    copy = Blocks(((w * largest_sent, 1),)) if ranks > 1 or stage == 3 else Blocks()
    gathered = Blocks()
    if stage == 3 and ranks > 1:
        # Whole weights, and the flat buffer of the last gather, from which they were copied.
        whole = _gathers(model, sizes)[1]
        gathered = Blocks(tuple((w * n, 1) for n in flat)) if whole > 0.98 * N else Blocks(((w * whole, 1),))
        gathered += Blocks(((w * min(int(sizes["stage3_prefetch_bucket_size"]), whole), 1),))
    return Blocks(tuple(buckets)), gathered, copy


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
) -> tuple[set[str], Blocks, int]:
    """Names of the states that are not on the device, what the host's memory holds, and bytes on a drive."""
    w, largest = WIDTH[precision], max(parameter_sizes(model)[0])
    away: set[str] = set()
    host, drive = Blocks(), 0
    section = sizes.get("offload_optimizer") or {}
    if (device := section.get("device") or "none") != "none":
        master = states.lasting["master_weights"]
        moved = master + states.lasting["optimizer_states"]
        away |= {"master_weights", "optimizer_states"} | ({"gradients"} if stage == 3 else set())
        if device == "nvme":
            # Weights, moments and fp32 gradients there; one sub-group of each in locked buffers.
            drive += moved.total + master.total
            group = min(FP32 * int(sizes.get("sub_group_size") or 10**9), max(size for size, _ in master.sizes))
            host += Blocks(((group, int(section.get("buffer_count") or 4)),)) + states.gradients
        else:
            # The fp32 gradients of the update last, beside the master weights.
            host += moved + Blocks(master.sizes)
            if stage == 3:
                host += states.gradients
            else:
                # A working-precision copy of the updated partition, a staging buffer, and what accumulates.
                host += Blocks(tuple((size * w // FP32, count) for size, count in master.sizes))
                host += Blocks(((w * largest, 1),)) + (states.gradients if accumulation > 1 else Blocks())
    section = sizes.get("offload_param") or {}
    if (device := section.get("device") or "none") != "none":
        away |= {"weights"}
        if device == "nvme":
            drive += states.lasting["weights"].total
            host += Blocks(((w * int(section.get("buffer_size") or 10**8), int(section.get("buffer_count") or 5)),))
        else:
            host += states.lasting["weights"]
    return away, host, drive


def _snapshot(states: _States, sizes: dict[str, Any], stage: int) -> Blocks:
    """What rank 0 copies for a checkpoint: the states as it has them; at stage 3 no weights, which DeepSpeed saves in fp32 only.

    What is on a drive is copied there, file by file.
    """
    names = ["weights"] if stage < 3 else []
    if (sizes.get("offload_optimizer") or {}).get("device") != "nvme":
        names += ["master_weights", "optimizer_states"]
    return Blocks(tuple(block for name in names for block in states.lasting[name].sizes))


# --- the wire ----------------------------------------------------------------------------------------------------------------------------


def bytes_sent_per_step(model: GPTConfig, precision: str, zero: dict[str, Any], ranks: int, accumulation: int = 1) -> int:
    """What a rank puts on the wire in a step, as `bytes_sent` in the metrics counts it, from the second step on.

    In the first step stage 3 learns the order of the modules and gathers more. It does so for good in a run that evaluates before its
    first step, from which it learns that no weight is used twice (measured: 15.6 MB instead of 10.6 for `nano` on two ranks).
    Scalars included: the loss with two stop flags in fp64, the norm, the overflow flag. Not included: the scales of quantized weights, 4
    bytes for up to 8,000 of them.
    """
    stage, sizes = zero["stage"], {**_DEFAULTS, **zero}
    w, share = WIDTH[precision], (ranks - 1) / ranks
    groups = parameter_sizes(model)
    flat = [n for group in groups for n in group]
    N = sum(flat)
    agreement = 24  # fp64: loss, SIGINT, SIGTERM
    if stage == 0:
        overflow = 0
        return round(share * 2 * (w * N + agreement + overflow))
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
