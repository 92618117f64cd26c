"""The interface through which a technique takes part in a run.

The JSON is the switch. A section or key that a technique declares (`progressive_layer_drop`, an optimizer of the 1-bit family,
`sequence_parallel_size`, ...) is taken out of the JSON, so that DeepSpeed does not act on it, and passed to this `Technique`. The training
loop calls all techniques of a run at the same places and names none of them. A recipe that needs no code of its own has no `technique.py`.

A module `recipes/<name>/technique.py` defines exactly one subclass of `Technique`; `recipes.registry` finds it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from model.presets import GPTConfig, ModelShape

if TYPE_CHECKING:  # the commands import this module before they parse --help
    import torch

    from model.gpt import GPT


#: DeepSpeed's key for the number of consecutive ranks that read the same rows.
SEQUENCE_PARALLEL = "sequence_parallel_size"


def ranks_in_words(number: int, ranks_per_row: int = 1) -> str:
    """ "4 ranks", or "4 groups of 2 ranks" where each group reads the same rows."""
    plural = "s" * (number != 1)
    return f"{number} rank{plural}" if ranks_per_row == 1 else f"{number} group{plural} of {ranks_per_row} ranks"


@dataclass(frozen=True)
class RunForTechniques:
    """The part of the resolved run that techniques may read. Batch sizes are in sequences; `steps` assumes whole batches in every step."""

    shape: ModelShape
    seed: int
    ranks: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    steps: int
    total_tokens: int
    warmup_steps: int
    ds_config: dict[str, Any]  # the JSON for DeepSpeed without optimizer, scheduler and our own sections; no "auto"
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    techniques: dict[str, Any]  # our own sections, by name

    @property
    def model_config(self) -> GPTConfig:
        """The model that is trained, with the vocabulary of the corpus."""
        raise NotImplementedError

    @property
    def token_schedule(self) -> object | None:
        """The learning rate by tokens; None with a schedule of DeepSpeed, by steps."""
        raise NotImplementedError

    @property
    def ranks_per_row(self) -> int:
        """The number of consecutive ranks that read the same rows, of which each holds a part."""
        return self.techniques.get(SEQUENCE_PARALLEL, 1)

    @property
    def data_ranks(self) -> int:
        """The ranks, or groups of ranks, that read different rows."""
        return self.ranks // self.ranks_per_row

    @property
    def ranks_in_words(self) -> str:
        """What the batch is shared by, in words."""
        return ranks_in_words(self.data_ranks, self.ranks_per_row)

    def data_rank(self, rank: int) -> int:
        """The number of `rank` among those that read different rows; the ranks of a row have the same."""
        return rank // self.ranks_per_row

    @property
    def zero_stage(self) -> int:
        return self.ds_config["zero_optimization"]["stage"]

    @property
    def precision(self) -> str:
        """`fp16`, `bf16` or `fp32`."""
        return next((name for name in ("fp16", "bf16") if self.ds_config.get(name, {}).get("enabled")), "fp32")

    def offload(self, key: str) -> str:
        """Where `offload_optimizer` or `offload_param` puts its tensors: "none", "cpu" or "nvme"."""
        return (self.ds_config["zero_optimization"].get(key) or {}).get("device") or "none"


class StepWork(NamedTuple):
    """The work of one optimizer step on every data rank. The length of the run and its FLOPs follow from it.

    Attributes:
        micro_batch_size: sequences of a micro-batch.
        accumulation: micro-batches of the step.
        seq_len: tokens of a row.
        rows_per_sequence: number of rows that each sequence is cut into.
        equivalent_blocks: how many whole blocks have the FLOPs of the blocks that run; None if no technique skips any.
    """

    micro_batch_size: int
    accumulation: int
    seq_len: int
    rows_per_sequence: int = 1
    equivalent_blocks: float | None = None

    @property
    def sequences(self) -> int:
        """Sequences of the step, of one data rank."""
        return self.micro_batch_size * self.accumulation

    @property
    def tokens(self) -> int:
        """Tokens of the step, of one data rank."""
        return self.sequences * self.rows_per_sequence * self.seq_len


def step_without_techniques(run: RunForTechniques) -> StepWork:
    """The step of a run without techniques."""
    return StepWork(run.micro_batch_size, run.gradient_accumulation_steps, run.shape.seq_len)


@dataclass(frozen=True)
class Declaration:
    """How the JSON switches a technique on and what it can be combined with. It is read before the technique is built.

    Attributes:
        section: the top-level section of the JSON that the technique reads.
        is_number: the section is not an object but a number, and off if it is 1.
        optimizer_type: the value of `optimizer.type`; the technique then reads `optimizer.params`. Exactly one of the two is set.
        keys: a rule for each key of the section (beside `enabled`), or of `params` (beside lr, betas, eps and weight_decay):
            `{"types": ["integer"], "minimum": 0, "maximum": 20, "auto": True}`; also `enum`, and `keys` for the keys of an object. The
            configuration checks the section by these rules before the technique is built. `"default"`: the value of a key that is left
            out, if the key can be neither null nor "auto"; not for the keys of an object. `"auto": "reported"`: `metrics` shows before
            `attach` what the value does, and a branch of a run may change it if the metrics before the branch are the same. For
            `params`, also `same_as`: the name of the key whose value is the default.
        ignored: keys that are accepted without effect -> the reason, which is logged if the key is used.
        auto_params: for an optimizer, what `"auto"` means for lr, betas, eps and weight_decay where it differs from AdamW's values.
        other_places: other places where DeepSpeed documents the section, as dotted paths; a section there is refused.
        exclusive: things that only one technique of a run can control. Two techniques that share an entry are refused.
        changes_tokens: the technique changes the number of tokens of a step. `on_step` of such techniques is called first.
        same_algorithm: the technique changes only memory and arithmetic, as ZeRO and the precision do. A branch of a run may change it.
        off_without_values: a section without `enabled` is off if all values are false or null, except those of `ignored`; usually it is on.
    """

    section: str = ""
    is_number: bool = False
    optimizer_type: str = ""
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    auto_params: dict[str, Any] = field(default_factory=dict)
    other_places: tuple[str, ...] = ()
    exclusive: tuple[str, ...] = ()
    changes_tokens: bool = False
    same_algorithm: bool = False
    off_without_values: bool = False

    def __post_init__(self) -> None:
        for key, rule in self.keys.items():
            takes_none = bool(rule.get("auto")) or "null" in rule.get("types", ())
            assert "default" not in rule or not takes_none, f'{self.name}.{key}: null and "auto" count as left out; leave out its default'

    @property
    def name(self) -> str:
        """The section, or the type of the optimizer."""
        return self.section or self.optimizer_type

    def is_on(self, section: Any) -> bool:
        """Whether `section` switches the technique on."""
        if self.is_number:
            return section not in (None, 1)
        values = (value for key, value in section.items() if key not in self.ignored)
        return bool(section.get("enabled", any(values) if self.off_without_values else True))

    def shared_with(self, other: Declaration) -> str:
        """What both techniques control, so that they cannot be in one run; empty if they can."""
        shared = set(self.exclusive) & set(other.exclusive)
        if self.optimizer_type and other.optimizer_type:
            shared = {"the optimizer"}
        return ", ".join(sorted(shared))


#: DeepSpeed's names of fp32.
FP32_NAMES = ("fp32", "float32", "float", "torch.float32")


def segment_bounds(n_layer: int, segments: int) -> list[tuple[int, int]]:
    """Start and end of each of `segments` consecutive segments of `n_layer` blocks, whose lengths differ by at most one, longer first.

    12 blocks in 5: (0, 3), (3, 6), (6, 8), (8, 10), (10, 12).
    """
    least, longer = divmod(n_layer, segments)
    starts = [index * least + min(index, longer) for index in range(segments + 1)]
    return list(pairwise(starts))


def divisors(number: int) -> set[int]:
    """The divisors of a positive number."""
    return {divisor for low in range(1, math.isqrt(number) + 1) if number % low == 0 for divisor in (low, number // low)}


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`, 0 for a limit of 0: how micro-batches are chosen."""
    if limit >= number:
        return number or limit
    return max((size for size in divisors(number) if size <= limit), default=0)


def without_auto(section: dict[str, Any]) -> dict[str, Any]:
    """The values of a section that are not `"auto"`; a technique takes its own for those, and for keys that are left out."""
    return {key: value for key, value in section.items() if value != "auto"}


class Technique:
    """Base of every technique. Methods do nothing here, except `token_losses` and `discard_state`, which raise; a technique overrides
    those that it needs.

    Schedules are functions of the global step that `on_step` gets, so that there is nothing to save and a resumed run continues exactly.
    Random draws depend on (seed, step, layer), never on a global generator or the rank.
    """

    declaration = Declaration()
    #: Lines for the log and `--explain`.
    notes: tuple[str, ...] = ()
    #: Packages that training needs and this machine lacks: lines that begin with the key in quotes. `--explain` works without them.
    missing_packages: tuple[str, ...] = ()
    #: First steps of the stages of its schedule, ascending. Within a stage the tokens of a step do not change; in the last stage nothing
    #: changes. Empty: the schedule has no stages.
    stages: Sequence[int] = ()
    #: Dotted key to blame if the run ends before the last stage begins; empty: a note instead of an error.
    schedule_key: str = ""
    #: The resolved value of each "auto" among the optimizer's `params`: key -> (value, reason), for `--explain`.
    resolved_params: dict[str, tuple[Any, str]] = {}
    #: Dotted key -> the least compute capability of the device that it needs.
    needs_cuda: dict[str, tuple[int, int]] = {}
    #: For the plan of memory: fp32 tensors of the parameters' size that its optimizer keeps; 0: it has no optimizer.
    optimizer_tensors: float = 0
    #: For the plan: names of the parameters that its optimizer separates from the others of their group if ZeRO divides them.
    planned_apart: frozenset[str] = frozenset()
    #: For plans: segments of blocks whose inputs alone are kept for the backward pass; 0: all activations are kept.
    checkpointed_segments: int = 0
    #: Whether all ranks have the same state, which a run with another number of ranks therefore keeps.
    state_is_common: bool = False
    #: For the MFU: the arithmetic of the matrix products; empty: that of the run.
    matmul_dtype: str = ""

    def __init__(self, section: Any, run: RunForTechniques):
        """Read `section`, which follows the rules of `declaration.keys`, and check its values against `run`.

        Raises:
            ValueError: a value does not fit this run: one line that begins with the key in quotes, `'section.key'`, and names the fix.
        """

    def prepare(self, model: GPT) -> None:
        """Change the model before the engine is built: kernels, wrappers, `model.block_runner`."""

    def optimizer(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """Return the run's optimizer, or None if another technique, torch or DeepSpeed provides it."""

    def attach(self, ds_engine: Any, collectives: Any) -> None:
        """Called with DeepSpeed's engine once it is built. `collectives` communicates with the other ranks and counts the bytes of
        tensors.

        It has `rank`, `world_size`, `all_reduce(tensor)` (a sum, in place), `all_gather(received, sent)` with (ranks, ...) received and (1,
        ...) sent, `all_to_all(received, sent, received_sizes=None, sent_sizes=None, group=None)`, both (ranks, ...); with sizes, part i has
        sizes[i] rows, `gather(value)` and `any(flag)` for Python values, and `group(size)`, the `size` consecutive ranks that this one
        belongs to, for `all_to_all`.
        """

    def on_step(self, step: int, work: StepWork) -> StepWork:
        """Compute the schedule of optimizer step `step` (from 1), before its first micro-batch.

        `work` comes from the techniques before this one. Return it, changed if this technique changes the batch, the length of the rows or
        the blocks that run. Steps come in any order, and before `attach` when a run is explained.
        """
        return work

    def on_batch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Crop or reshape a micro-batch of (micro_batch_size, seq_len + 1) token ids to the rows of the step's `StepWork`."""
        return tokens

    def token_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a loss (N,) per token, whose mean is trained in addition to the cross-entropy.

        logits (N, vocab_size), in the run's precision, and targets int64 (N,), -100 for "no target", are those of a micro-batch, or of a
        tile of one, then again when it is recomputed. It is called in training only. The loss that is logged stays the cross-entropy. The
        logits are computed a second time. The memory plan counts them, an fp32 copy and the gradients of both; a function that keeps more
        tensors of this size needs more.
        """
        raise NotImplementedError

    def on_gradients(self) -> None:
        """Read or change the gradients of the step, after the last backward pass and before clipping. All ranks call this together.

        `deepspeed.utils.safe_get_full_grad(parameter)` of the engine's parameters works at every stage and with offload to
        CPU memory or NVMe. In fp16 the gradients are multiplied by `ds_engine.optimizer.loss_scale`.
        `recipes.gradients.set_gradient` changes them at every stage, but with an offloaded optimizer, `grad_norm` and clipping use the norm
        from before. Where an optimizer of the 1-bit family exchanges the momentum instead, the gradients are the rank's own.
        """

    def common_weights(self) -> AbstractContextManager[None]:
        """A context in which the model has weights that all ranks share: the weights that are evaluated, saved and sampled from."""
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        """Values for the step's line in `metrics.jsonl`; before `attach`, those that follow from the schedule alone."""
        return {}

    def evaluation_metrics(self) -> dict[str, float]:
        """Values for the line of an evaluation, which has just ended. All ranks call this together."""
        return {}

    def bytes_sent(self, base: int, steps: int) -> int:
        """Mean bytes that a rank sends per step, over a run of `steps` steps. `base`: those of DeepSpeed's own communication."""
        return base

    def bytes_sent_in_blocks(self, steps: int) -> int:
        """Mean bytes per step that a rank sends within its blocks, which wait for them. They are not in `bytes_sent`."""
        return 0

    def memory_terms(self, model: GPTConfig, device: str) -> dict[str, int]:
        """Bytes on one rank that replace terms of the memory plan, or are added to it.

        "attention": what one block saves besides its inputs and output. "loss_head": its peak. "checkpoints": the inputs of checkpointed
        segments on the device; the rest of them is in the host's memory. "update": what the optimizer step needs besides copies of the
        gradients; it is added. "tile": the tokens (no bytes) that the MLPs and the head have in memory at a time and recompute. `device` is
        "cuda" or "cpu".
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State that cannot be computed from the step. Every rank saves its own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, or, if the state is common, on any."""

    def discard_state(self, reason: str) -> None:
        """Continue without the state in a checkpoint, which this rank cannot use for `reason`, and add a note.

        Raises:
            ValueError: the technique cannot continue without it; the message is `reason`.
        """
        raise ValueError(reason)


class Techniques(Technique):
    """All techniques of a run, combined into one `Technique`."""

    def __init__(self, members: Iterable[Technique] = ()):
        self.members = tuple(sorted(members, key=lambda member: not member.declaration.changes_tokens))
        self.needs_cuda = {key: capability for member in self.members for key, capability in member.needs_cuda.items()}
        self.planned_apart = frozenset[str]().union(*(member.planned_apart for member in self.members))
        #: The methods `token_losses` of the members that have one.
        self.added_losses = [member.token_losses for member in self.members if type(member).token_losses is not Technique.token_losses]
        # At most one member states each of these.
        self.optimizer_tensors = sum(member.optimizer_tensors for member in self.members)
        self.checkpointed_segments = sum(member.checkpointed_segments for member in self.members)
        self.matmul_dtype = "".join(member.matmul_dtype for member in self.members)

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(note for member in self.members for note in member.notes)

    def prepare(self, model: GPT) -> None:
        for member in self.members:
            member.prepare(model)
        model.lm_head.token_losses += self.added_losses

    def optimizer(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        found = [optimizer for member in self.members if (optimizer := member.optimizer(param_groups)) is not None]
        assert len(found) <= 1, "the configuration names one optimizer"
        return found[0] if found else None

    def attach(self, ds_engine: Any, collectives: Any) -> None:
        for member in self.members:
            member.attach(ds_engine, collectives)

    def on_step(self, step: int, work: StepWork) -> StepWork:
        for member in self.members:
            before, work = work, member.on_step(step, work)
            assert member.declaration.changes_tokens or work.tokens == before.tokens, (
                f"{type(member).__name__}.on_step changes the tokens of step {step} from {before.tokens} to {work.tokens}; write"
                " changes_tokens=True in its Declaration"
            )
        self._rows = work.micro_batch_size * work.rows_per_sequence, work.seq_len + 1
        return work

    def on_batch(self, tokens: torch.Tensor) -> torch.Tensor:
        for member in self.members:
            tokens = member.on_batch(tokens)
        assert tokens.shape == self._rows, f"a technique made rows of {tuple(tokens.shape)}, and the step has {self._rows}"
        return tokens

    def on_gradients(self) -> None:
        for member in self.members:
            member.on_gradients()

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        with ExitStack() as inside:
            for member in self.members:
                inside.enter_context(member.common_weights())
            yield

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for member in self.members:
            found = dict(**found, **member.metrics())  # no name may occur twice
        return found

    def evaluation_metrics(self) -> dict[str, float]:
        return {name: value for member in self.members for name, value in member.evaluation_metrics().items()}

    def bytes_sent(self, base: int, steps: int) -> int:
        for member in self.members:
            base = member.bytes_sent(base, steps)
        return base

    def bytes_sent_in_blocks(self, steps: int) -> int:
        return sum(member.bytes_sent_in_blocks(steps) for member in self.members)

    def memory_terms(self, model: GPTConfig, device: str) -> dict[str, int]:
        return {name: size for member in self.members for name, size in member.memory_terms(model, device).items()}

    def state_dict(self) -> dict[str, Any]:
        return {type(member).__name__: state for member in self.members if (state := member.state_dict())}

    def load_common_state(self, state: dict[str, Any]) -> None:
        """Load the part of a state of another rank that all ranks have in common."""
        common = {type(member).__name__ for member in self.members if member.state_is_common}
        self.load_state_dict({name: of_member for name, of_member in state.items() if name in common})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for member in self.members:
            if type(member).__name__ in state:
                member.load_state_dict(state[type(member).__name__])

    def discard_state(self, reason: str) -> None:
        for member in self.members:
            if type(member).state_dict is not Technique.state_dict and not member.state_is_common:
                member.discard_state(reason)


class Steps(NamedTuple):
    """Consecutive steps with the same number of tokens."""

    number: int  # of the first step, from 1
    repeats: int
    tokens: int  # of each step, over all ranks
    consumed: int  # tokens of the run after these steps
    work: StepWork  # of the first step
    reported: dict[str, float]  # the techniques' metrics in the first step


def planned_steps(run: RunForTechniques, techniques: Techniques, stride: int = 1) -> Iterator[Steps]:
    """The steps of `run` by the techniques' `on_step`, from 1 until the run's tokens are consumed.

    The length of a run is fixed in tokens, and techniques may use fewer tokens in a step than a whole batch has.

    stride: the largest number of steps to yield at once.
    """
    changing = [member for member in techniques.members if member.declaration.changes_tokens]
    number, consumed = 1, 0
    while consumed < run.total_tokens:
        work = techniques.on_step(number, step_without_techniques(run))
        tokens = work.tokens * run.data_ranks
        repeats = min(stride, -(-(run.total_tokens - consumed) // tokens))
        for member in changing:
            stage = bisect_right(member.stages, number)
            if not member.stages or stage < len(member.stages):
                repeats = min(repeats, member.stages[stage] - number if member.stages else 1)
        consumed += repeats * tokens
        yield Steps(number, repeats, tokens, consumed, work, techniques.metrics())
        number += repeats
