"""The one interface through which a technique takes part in a run.

DeepSpeed's JSON is the switch. A section that the engine no longer knows (`progressive_layer_drop`, `curriculum_learning`, an
optimizer of the 1-bit family, ...) is taken out of the JSON and handed to the `Technique` that claims it; the training loop calls
all techniques of a run at the same fixed places and knows none of them by name. A recipe folder that needs no code of its
own has no `technique.py`.

A module `recipes/<name>/technique.py` defines exactly one subclass of `Technique`; `recipes.registry` finds it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from model.accounting import parameter_count
from model.presets import GPTConfig, ModelShape

if TYPE_CHECKING:  # this module is imported before torch is, by the validator of the configuration
    import torch

    from model.gpt import GPT


class Run(Protocol):
    """What a technique may read of the run as resolved. Batches count sequences; `steps` are steps of whole batches."""

    @property
    def shape(self) -> ModelShape: ...
    @property
    def model_config(self) -> GPTConfig: ...
    @property
    def seed(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def gradient_accumulation_steps(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def total_tokens(self) -> int: ...
    @property
    def tokens_per_step(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def zero_stage(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def engine(self) -> dict[str, Any]: ...
    @property
    def optimizer(self) -> dict[str, Any]: ...
    @property
    def scheduler(self) -> dict[str, Any]: ...
    @property
    def techniques(self) -> dict[str, dict[str, Any]]: ...


class BatchPlan(NamedTuple):
    """How one optimizer step is cut up on every rank: `accumulation` micro-batches of `micro_batch_size` sequences."""

    micro_batch_size: int
    accumulation: int


#: More steps than any run has.
FOR_EVER = 10**18
#: A step so late that no beta in use has a power left (0.999999^1e9 is 0), and that fp32 does not count on from: Adam's moments of such a
#: step have no bias to correct.
LATE_STEP = 1e9

#: What the optimizers of recipes take beside lr, betas, eps and weight_decay. amsgrad and eps_inside_sqrt are upstream's, which refused the
#: one and did nothing with the other.
ADAM_KEYS: dict[str, dict[str, Any]] = {
    "bias_correction": {"types": ["boolean"]},
    "amsgrad": {"enum": [False]},
    "eps_inside_sqrt": {"enum": [False]},
}


def adam_arguments(params: dict[str, Any]) -> tuple[float, list[float], float, float, bool]:
    """What the optimizers of recipes are all built with, beside the groups of parameters, in their order, by the JSON's `params`."""
    return params["lr"], params["betas"], params["eps"], params["weight_decay"], params.get("bias_correction", True)


def decouples_weight_decay(optimizer: dict[str, Any]) -> bool:
    """Whether `optimizer`, of type Adam or AdamW, does: DeepSpeed's "Adam" does too, unless "adam_w_mode" says otherwise."""
    return bool(optimizer["type"] == "AdamW" or optimizer["params"].get("adam_w_mode", True))


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`, 0 for a limit of 0: how micro-batches are chosen."""
    if limit >= number:
        return number or limit
    if limit < 1000:
        return next((size for size in range(limit, 0, -1) if number % size == 0), 0)
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return max(size for low in small for size in (low, number // low) if size <= limit)


def steps_left(first_steps: Sequence[int], step: int) -> int:
    """For how many steps from `step` on the stage lasts that it is in, of stages that begin at `first_steps`, which rise."""
    stage = bisect_right(first_steps, step)
    return first_steps[stage] - step if stage < len(first_steps) else FOR_EVER


def require_token_schedule(run: Run) -> None:
    """For techniques under which a run of the same tokens has more steps than were asked for.

    Raises:
        ValueError: the learning rate follows steps.
    """
    if run.scheduler["type"] != "WarmupCosineTokens":
        raise ValueError(f"'scheduler.type' is {run.scheduler['type']}, which counts steps of equal size; use WarmupCosineTokens")


def require_stage_0(run: Run, reason: str, state_tensors: float) -> None:
    """For optimizers that need whole tensors on every rank, for `reason`, and keep so many fp32 tensors of the parameters' size.

    Raises:
        ValueError: ZeRO leaves a rank a part of them.
    """
    if run.zero_stage:
        # fp32: 4 weights + 4 gradients; 16 bits: 2 + 2 + 4 master weights.
        stage_0 = parameter_count(run.model_config) * (8 + 4 * state_tensors)
        raise ValueError(
            f"'zero_optimization.stage' is {run.zero_stage}, but {reason}, and ZeRO leaves a rank a part of it; write 0, with which the"
            f" model states take {stage_0 / 2**30:.2f} GiB on each, or use AdamW"
        )


class Technique:
    """Base of every technique: all of it does nothing, so that a technique writes only what it changes.

    Whatever depends on time is recomputed from the global step that `on_step` gets: nothing is hidden, nothing extra to save,
    and a resumed run is the uninterrupted one. Draws come from (seed, step, layer), never from a global generator.
    """

    #: Top-level JSON sections that this technique claims.
    sections: tuple[str, ...] = ()
    #: Values of `optimizer.type` that this technique claims.
    optimizer_types: tuple[str, ...] = ()
    #: What may stand in the section (beside `enabled`), or among the optimizer's `params` (beside lr, betas, eps and weight_decay): a
    #: rule for each key, e.g. `{"types": ["integer"], "minimum": 0, "maximum": 20, "auto": True}`; `enum`, and `keys` for what is inside
    #: an object. The configuration checks the section by them before the technique is built.
    keys: dict[str, dict[str, Any]] = {}
    #: Of the optimizer that it brings: what `"auto"` means for lr, betas, eps and weight_decay, where that is not what it means for AdamW.
    auto_params: dict[str, Any] = {}
    #: Keys among these that are accepted and do nothing, with the reason: a word in the run's log where one of them asks for something.
    without_effect: dict[str, str] = {}
    #: Other documented places of the first section, by dotted path, with what makes the section of what stands there.
    other_forms: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
    #: What only one technique of a run can decide: two that have a word in common are refused.
    decides: tuple[str, ...] = ()
    #: What only CUDA can do: dotted key -> the least compute capability of the device. Where it depends on the section, `__init__` says.
    needs_cuda: dict[str, tuple[int, int]] = {}
    #: The arithmetic of the matrix products where it is not the run's precision: MFU divides by the device's peak for it.
    matmul_dtype: str = ""
    #: What the log and `--explain` should say of it, a line each; filled in by `__init__`.
    notes: tuple[str, ...] = ()
    #: What it needs and this machine does not have, a line each that begins with the key in quotes: the run can be explained here, and not
    #: trained; filled in by `__init__`.
    lacks: tuple[str, ...] = ()
    #: The optimizer step from which on its schedule stays as it is; filled in by `__init__`.
    arrives_at: int = 1
    #: The dotted key that says so, where a run that ends before is refused; empty: it is told so.
    must_arrive: str = ""
    #: Of the optimizer that it brings: what "auto" comes to among its `params`, and from what, for `--explain`; filled in by `__init__`.
    resolved: dict[str, tuple[Any, str]] = {}
    #: How many fp32 tensors of the parameters' size that optimizer keeps; 0: it brings none. For the same plan.
    state_tensors: float = 0
    #: DeepSpeed's extensions that its optimizer needs, e.g. "FusedAdamBuilder"; filled in by `prepare`.
    extensions: tuple[str, ...] = ()
    #: Into how many segments the blocks are cut of which only the inputs are kept for the backward pass; 0: all activations are kept.
    #: For the plan of the run's memory.
    checkpoints: int = 0

    @classmethod
    def name(cls) -> str:
        """What switches it on: its section, or the type of its optimizer."""
        return (*cls.sections, *cls.optimizer_types)[0]

    @classmethod
    def is_on(cls, section: dict[str, Any]) -> bool:
        """Whether a section that is there switches the technique on."""
        return bool(section.get("enabled", True))

    def __init__(self, section: dict[str, Any], run: Run):
        """Take the values of `section` (the JSON object claimed, right by `keys`) and check them against `run`.

        Raises:
            ValueError: one line for a value that cannot be with this run, with the fix; it begins with the key in quotes,
                `'section.key'`. Runs before torch is imported.
        """

    def prepare(self, model: GPT) -> None:
        """Change the model before the engine exists: kernels, wrappers, `model.block_runner`."""

    def optimizer(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """The optimizer that the engine shall drive, or None to leave the choice to others."""

    def attach(self, engine: Any, collectives: Any) -> None:
        """Bind to the engine once it exists. `collectives` is the one counted way to the other ranks."""

    def batch_plan(self, step: int) -> BatchPlan | None:
        """How `step` (from 1) is cut up, or None for the run's own plan."""

    def unchanged(self, step: int) -> int:
        """For how many steps from `step` on `batch_plan` and the rows' length surely stay as they are: the plan of a run skips these."""
        return 1

    def on_step(self, step: int) -> None:
        """Recompute the schedule for optimizer step `step` (from 1), before its first micro-batch.

        Works before there is an engine, and without torch: `--explain` asks what the schedule says at 0, 25, 50, 75 and 100% of the run.
        """

    def on_batch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Crop or reshape a micro-batch of (micro_batch_size, seq_len + 1) token ids."""
        return tokens

    def on_length(self, length: int) -> None:
        """The rows of the step have `length` tokens: after all techniques' `on_batch`, and where there is no batch, as in `--explain`."""

    def agreed_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has weights that all ranks agree on: those that are evaluated, saved and sampled from. Called by all ranks."""
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        """What belongs into the step's line of `metrics.jsonl`; before there is an engine, what follows from the schedule alone."""
        return {}

    def memory_terms(self, model: GPTConfig, device: str) -> dict[str, int]:
        """Bytes on one rank that replace terms in the plan of the run's memory: "attention" (what it saves in one block beside its inputs
        and output), "loss_head" (at its largest). `device` is "cuda" or "cpu"."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What cannot be derived from the step; saved by every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def forget_state(self, reason: str) -> None:
        """Go on without the state that a checkpoint holds and this rank cannot use, for `reason`, and say so in `notes`.

        Raises:
            ValueError: it cannot do without; with what to do instead.
        """
        raise ValueError(reason)


class Techniques(Technique):
    """All techniques of a run behind the same interface, so that the loop calls each place once."""

    def __init__(self, members: Iterable[Technique] = ()):
        self.members = tuple(members)
        self.checkpoints = max((member.checkpoints for member in self.members), default=0)
        self.state_tensors = max((member.state_tensors for member in self.members), default=0)
        self.needs_cuda = {key: capability for member in self.members for key, capability in member.needs_cuda.items()}

    @property
    def matmul_dtype(self) -> str:  # type: ignore[override]
        return next((member.matmul_dtype for member in self.members if member.matmul_dtype), "")

    @property
    def extensions(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for member in self.members for name in member.extensions)

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(note for member in self.members for note in member.notes)

    def prepare(self, model: GPT) -> None:
        for member in self.members:
            member.prepare(model)

    def optimizer(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        found = [optimizer for member in self.members if (optimizer := member.optimizer(param_groups)) is not None]
        assert len(found) <= 1, "two techniques brought an optimizer; the configuration names one"
        return found[0] if found else None

    def attach(self, engine: Any, collectives: Any) -> None:
        for member in self.members:
            member.attach(engine, collectives)

    def batch_plan(self, step: int) -> BatchPlan | None:
        plans = [plan for member in self.members if (plan := member.batch_plan(step)) is not None]
        assert len(plans) <= 1, "two techniques plan the batch; the validator refuses such a pair"
        return plans[0] if plans else None

    def on_step(self, step: int) -> None:
        for member in self.members:
            member.on_step(step)

    def on_batch(self, tokens: torch.Tensor) -> torch.Tensor:
        for member in self.members:
            tokens = member.on_batch(tokens)
        self.on_length(tokens.shape[1] - 1)
        return tokens

    def on_length(self, length: int) -> None:
        for member in self.members:
            member.on_length(length)

    @contextmanager
    def agreed_weights(self) -> Iterator[None]:
        with ExitStack() as inside:
            for member in self.members:
                inside.enter_context(member.agreed_weights())
            yield

    def metrics(self) -> dict[str, float]:
        return {key: value for member in self.members for key, value in member.metrics().items()}

    def memory_terms(self, model: GPTConfig, device: str) -> dict[str, int]:
        return {name: size for member in self.members for name, size in member.memory_terms(model, device).items()}

    def state_dict(self) -> dict[str, Any]:
        return {type(member).__name__: state for member in self.members if (state := member.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for member in self.members:
            if type(member).__name__ in state:
                member.load_state_dict(state[type(member).__name__])

    def forget_state(self, reason: str) -> None:
        for member in self.members:
            if type(member).state_dict is not Technique.state_dict:
                member.forget_state(reason)
