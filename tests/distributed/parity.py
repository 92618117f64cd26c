"""What a plain PyTorch loop can repeat: forms of the engine, techniques with values that act in 30 steps, and the loop's options for each.

A technique is a row of `TECHNIQUES`; the tests of losses, precisions, overflows and resumes take it from there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from launch.config.flags import as_words
from model.gpt import GPT, BlockRunner, run_all_blocks
from recipes.curriculum_learning.technique import length_at
from recipes.progressive_layer_drop.technique import draws, keep_probabilities, theta_at
from recipes.random_ltd.technique import reserved_length
from tests.distributed.jobs import drops_block_1
from tests.distributed.reference import (
    OfEachRank,
    PublishedAdamW,
    PublishedLamb,
    PublishedMuon,
    PublishedOneBitAdam,
    PublishedOneBitLamb,
    PublishedZeroOneAdam,
    Step,
    document_by_document,
    progressive_layer_drop,
    random_ltd,
    reference_steps,
    run_all_but,
)
from tests.test_zero_one_adam import by_the_papers_rule

STEPS, BATCH, LR, WARMUP, SEED = 30, 12, 5e-4, 3, 5
#: Three blocks, so that at stages 1 and 2 the boundary between two ranks runs through a matrix of Muon's.
SIZES = {"n_layer": 3, "n_head": 4, "d_model": 64, "seq_len": 32}
#: `wide` has 4 M parameters: large enough for the fp32 norm to go wrong. The llama and the qwen3 have 2 heads of keys and values; the llama
#: has a head of its own, the qwen3 QK-norm.
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": SIZES,
    "wide": {"n_layer": 2, "n_head": 2, "d_model": 384, "seq_len": 64},
    **{name: {"architecture": name, **SIZES} for name in ("llama", "qwen3", "qwen3_moe")},
}
SMALL = {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 32}
#: fp32: above what the order of sums does (1e-6), below the smallest fault that was found (3.7e-5, a norm summed in fp32).
TOLERANCE = 5e-6
MODERN_TOLERANCE = 1e-5
#: Where ranks compress, an element whose sum is 0 to fp32 may get the other sign, which moves it by twice its tensor's scale in that step.
COMPRESSED_TOLERANCE = 3e-4
#: The norm of a mean that no rank has is an estimate.
NOT_CLIPPED = ["--set", "gradient_clipping=0"]
ON_DRIVE = {"device": "nvme", "nvme_path": "auto"}
#: Name -> (stage, what is changed in its JSON).
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in (0, 1, 2, 3)},
    **{f"stage {stage}, optimizer offloaded": (stage, {"offload_optimizer": {"device": "cpu"}}) for stage in (1, 2, 3)},
    "stage 3, all offloaded": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "stage 3, all off on a drive": (3, {"offload_optimizer": ON_DRIVE, "offload_param": {**ON_DRIVE, "buffer_size": 1_000_000}}),
}


class Technique(NamedTuple):
    """A technique, with the options of `reference_steps` that train the same.

    Attributes:
        flags: that switch it on.
        reference: the options of the plain loop.
        optimizer: the optimizer of the plain loop, and its options.
        metrics: what the line of an update must say.
        base: what it is without, from which its losses must differ; empty: it changes none.
        lr: the peak of the learning rate.
        clip: the norm to which gradients are clipped; some step must have a larger one.
        half: how far bf16 and fp16 may lead from fp32.
        job: of `tests.distributed.jobs`, and its arguments.
        shape: fields of the model that it needs.
    """

    flags: list[str]
    reference: dict[str, Any] = {}
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = {}
    metrics: Callable[[int], dict[str, float]] = lambda update: {}
    base: str = "plain"
    lr: float = LR
    clip: float = 1.0
    half: float = 3e-3
    job: dict[str, Any] = {"job": "pretrain"}
    shape: dict[str, Any] = {}

    @property
    def compresses(self) -> bool:
        return isinstance(self.optimizer, type) and issubclass(self.optimizer, OfEachRank)

    def also(self, flags: list[str], base: str, **options: Any) -> Technique:
        """With more flags, which in the plain loop are `options` of its optimizer."""
        return self._replace(flags=self.flags + flags, options=self.options | options, base=base)


def cells(every: Sequence[tuple[Any, ...]], quick: Sequence[tuple[Any, ...]], at_the_gate: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
    """All of them; what is not quick is left to `make test_all`, and of that CPU offload of the plain GPT-2 to the gate, too."""

    def mark(cell: tuple[Any, ...]) -> pytest.MarkDecorator:
        offloaded = cell[:2] == ("plain", "gpt2") and "offloaded" in cell[2]
        return pytest.mark.gate if offloaded or cell in at_the_gate else pytest.mark.long

    every = [*at_the_gate, *every]
    rest = [cell for place, cell in enumerate(every) if cell not in quick and cell not in every[:place]]
    return [*quick, *(pytest.param(*cell, marks=mark(cell)) for cell in rest)]


def section(name: str, values: dict[str, Any] | str | bool) -> list[str]:
    return ["--set", f"{name}={json.dumps(values)}"]


def optimizer(kind: str, lr: float, **params: Any) -> list[str]:
    values = {"type": kind, "params": {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto", **params}}
    return ["--lr", str(lr), *section("optimizer", values)]


def settle(variance: torch.Tensor, steps: int, beta2: float) -> torch.Tensor:
    """A tenth of the mean is the least. No row of this corpus is padding, and every position has gradients in each step."""
    return variance.clamp(min=0.1 * float(variance.mean()))


def truncated(step: int, windows: torch.Tensor) -> torch.Tensor:
    return windows[:, : length_at(step, CURRICULUM) + 1]


def reshaped(step: int, windows: torch.Tensor) -> torch.Tensor:
    """Row by row, each beginning with the last token of the one before it."""
    length, whole = length_at(step, CURRICULUM), SIZES["seq_len"]
    return torch.stack([window[start : start + length + 1] for window in windows for start in range(0, whole - length + 1, length)])


def with_z_loss(model: GPT, windows: torch.Tensor, document_end: int) -> torch.Tensor:
    """The cross-entropy of windows (B, T + 1), with the gradients of `AuxiliaryLoss` added."""
    logits = model(windows[:, :-1]).float()
    added = (0.01 * logits.logsumexp(-1) ** 2).mean()
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) + added - added.detach()


def with_balance(model: GPT, windows: torch.Tensor, document_end: int) -> torch.Tensor:
    """The cross-entropy of windows (B, T + 1), the whole batch of a step, with the gradients of the balance loss added.

    The frequencies are those of the last call with this model.
    """
    logits: list[torch.Tensor] = []
    hooks = [block.mlp.router.register_forward_hook(lambda router, x, y: logits.append(y)) for block in model.h]
    loss = model(windows[:, :-1], windows[:, 1:])
    for hook in hooks:
        hook.remove()
    probabilities = torch.stack(logits).softmax(-1)  # (n_layer, B T, n_expert)
    active, experts = model.config.n_expert_active, model.config.n_expert
    chosen = F.one_hot(probabilities.topk(active).indices, experts).sum(2).float().mean(1) / active  # (n_layer, n_expert)
    before = getattr(model, "chosen_before", torch.full_like(chosen, 1 / experts))
    model.chosen_before = chosen
    added = BALANCE * experts * (before * probabilities.mean(1)).sum()
    return loss + added - added.detach()


def without_block_1(accumulation: int) -> Callable[[int, int], BlockRunner]:
    return lambda step, micro_step: run_all_but(1) if drops_block_1(step, micro_step, accumulation) else run_all_blocks


def kept(update: int) -> dict[str, float]:
    theta = theta_at(update, **DROPS)
    keeps = zip(draws(SEED, update, SIZES["n_layer"]), keep_probabilities(theta, SIZES["n_layer"]), strict=True)
    return {"theta": theta, "kept_blocks": sum(number < p for number, p in keeps)}


#: More than usual, so that it shows in 30 steps.
BALANCE = 0.1
CHECKPOINTED = section("activation_checkpointing.number_checkpoints", 2)
#: Of one rank's micro-batch in the tests, two tiles and a shorter one, or many.
TILED = section("sequence_tiling", {"tile": 50})
COMPILED = section("fused_kernels", {"compile": True})
#: 12 steps of 4 sequences are 1,536 tokens, and 6 more of 8 are 3,072; then a step has 12.
BATCH_SIZES, BATCHES = {"min_batch_size": 4, "increment": 4, "warmup_tokens": 3072}, (4,) * 12 + (8,) * 6
CURRICULUM = {"min_difficulty": 8, "max_difficulty": 32, "schedule_type": "fixed_linear"}
CURRICULUM |= {"schedule_config": {"total_curriculum_step": 20, "difficulty_step": 8}}
DROPS = {"theta": 0.4, "gamma": 0.5}
#: Not all of the blocks; 8 to 24 tokens in the first 20 steps, then all 32.
LTD_LAYERS, LTD_SCHEDULE = [1, 2], {"min_value": 8, "max_value": 32, "schedule_config": {"require_steps": 20, "seq_per_step": 8}}
FREEZE = 10
#: Renewals until step 10 that lie 1 and 2 steps apart; exchanges of each step until 14, of every second until 18, then of every fourth.
ZERO_ONE = {"var_freeze_step": 10, "var_update_scaler": 3, "local_step_scaler": 4, "local_step_clipper": 4}
RENEWED, EXCHANGED = map(frozenset, by_the_papers_rule(*ZERO_ONE.values(), steps=STEPS))
#: wte and the head; the rows of queries, keys and values, and of gate and up.
MODERN_MUON = {"adam_matrices": (0, 13), "parts": {128: (64, 32, 32), 512: (256, 256)}}
MUON_LR, LAMB_LR = 0.01, 0.05
FREEZING: dict[str, Any] = {"options": {"freeze_step": FREEZE, "settle": settle}, "metrics": lambda update: {"compressed": update > FREEZE}}
UNCORRECTED = section("optimizer.params.bias_correction", False)
DOCUMENTS: dict[str, Any] = {"loss_of": document_by_document}

ADDED = Technique([], {"loss_of": with_z_loss}, job={"job": "pretrain_with", "technique": "AuxiliaryLoss"})
LTD = Technique(
    section("random_ltd", {"random_ltd_layer_id": LTD_LAYERS, "random_ltd_schedule": LTD_SCHEDULE}),
    {"runner_of": random_ltd(SEED, SIZES["seq_len"], LTD_LAYERS, functools.partial(reserved_length, schedule=LTD_SCHEDULE))},
    metrics=lambda update: {"reserved_length": reserved_length(update, LTD_SCHEDULE)},
)
PLD = Technique(
    section("progressive_layer_drop", DROPS), {"runner_of": progressive_layer_drop(SEED, SIZES["n_layer"], **DROPS)}, metrics=kept
)
LENGTHS = Technique(
    section("curriculum_learning", CURRICULUM), {"cut": truncated}, metrics=lambda update: {"seq_len": length_at(update, CURRICULUM)}
)
LAMB = Technique(optimizer("Lamb", LAMB_LR), optimizer=PublishedLamb, lr=LAMB_LR, half=0.05)
MUON = Technique(optimizer("Muon", MUON_LR, ns_dtype="fp32"), optimizer=PublishedMuon, lr=MUON_LR, half=5e-3)
ONE_BIT_ADAM = Technique(optimizer("OneBitAdam", LR, freeze_step=FREEZE), optimizer=PublishedOneBitAdam, half=0.05, **FREEZING)
ONE_BIT_LAMB = Technique(
    optimizer("OneBitLamb", LAMB_LR, freeze_step=FREEZE), optimizer=PublishedOneBitLamb, lr=LAMB_LR, half=0.05, **FREEZING
)
ZERO_ONE_ADAM = Technique(
    optimizer("ZeroOneAdam", LR, **ZERO_ONE),
    optimizer=PublishedZeroOneAdam,
    options={"renewed": RENEWED, "exchanged": EXCHANGED},
    metrics=lambda update: {"variance_updated": update in RENEWED, "exchanged": update in EXCHANGED},
    half=5e-3,
)
TECHNIQUES = {
    "plain": Technique([], base="", half=1e-2),
    "Adam without bias correction": Technique(UNCORRECTED, optimizer=PublishedAdamW, options={"corrects": False}),
    "a block without gradients": Technique([], job={"job": "pretrain_with", "technique": "DroppedBlock"}),
    "a loss of each token": ADDED,
    "a loss of each token, fused": ADDED.also(section("fused_kernels", {"cross_entropy": True}), "plain"),
    "activation_checkpointing": Technique(CHECKPOINTED, base=""),
    "fused_kernels": Technique(section("fused_kernels", "auto"), base=""),
    "fused_kernels, compiled": Technique(COMPILED, base=""),
    "batch_size_warmup": Technique(
        section("batch_size_warmup", BATCH_SIZES),
        {"sizes": BATCHES},
        metrics=lambda update: {"batch_size": (*BATCHES, *(BATCH for _ in range(update)))[update - 1]},
    ),
    "curriculum_learning": LENGTHS,
    "curriculum_learning, reshaped": LENGTHS.also(section("curriculum_learning.mode", "reshape"), "plain")._replace(
        reference={"cut": reshaped}
    ),
    "no_cross_document": Technique(["--no_cross_document"], DOCUMENTS),
    "no_cross_document, checkpointed": Technique(["--no_cross_document", *CHECKPOINTED], DOCUMENTS),
    "progressive_layer_drop": PLD,
    "progressive_layer_drop, checkpointed": PLD.also(CHECKPOINTED, "plain"),
    "progressive_layer_drop, compiled": PLD.also(COMPILED, "plain"),
    "random_ltd": LTD,
    "random_ltd, checkpointed": LTD.also(CHECKPOINTED, "plain"),
    "random_ltd, compiled": LTD.also(COMPILED, "plain"),
    "random_ltd, no_cross_document": LTD.also(["--no_cross_document"], "plain")._replace(reference=LTD.reference | DOCUMENTS),
    "lamb": LAMB,
    "lamb, limited": LAMB.also(
        section("optimizer.params.max_coeff", 0.3) + section("optimizer.params.min_coeff", 0.1), "lamb", limits=(0.1, 0.3)
    ),
    "lamb, uncorrected": LAMB.also(UNCORRECTED, "lamb", corrects=False),
    "mixture_of_experts": Technique(
        section("expert_balance", {"coefficient": BALANCE}), {"loss_of": with_balance}, shape={"architecture": "qwen3_moe"}
    ),
    "muon": MUON,
    "muon, original": MUON.also(
        section("optimizer.params.rate_scale", "original") + section("optimizer.params.adam_lr", MUON_LR / 4),
        "muon",
        scale=lambda rows, columns: max(1, rows / columns) ** 0.5,
        adam=0.25,
    ),
    "muon, without Nesterov": MUON.also(section("optimizer.params.nesterov", False), "muon", nesterov=False),
    "one_bit_adam": ONE_BIT_ADAM,
    "one_bit_adam, uncorrected": ONE_BIT_ADAM.also(UNCORRECTED, "one_bit_adam", corrects=False),
    "one_bit_lamb": ONE_BIT_LAMB,
    "one_bit_lamb, uncorrected": ONE_BIT_LAMB.also(UNCORRECTED, "one_bit_lamb", corrects=False),
    "sequence_tiling": Technique(TILED, base=""),
    "sequence_tiling, a loss of each token": ADDED.also(TILED, "plain"),
    "sequence_tiling, compiled": Technique(TILED + COMPILED, base=""),
    "sequence_tiling, fused and checkpointed": Technique(TILED + CHECKPOINTED + section("fused_kernels", {"cross_entropy": True}), base=""),
    "zero_one_adam": ZERO_ONE_ADAM,
    "zero_one_adam, uncorrected": ZERO_ONE_ADAM.also(UNCORRECTED, "zero_one_adam", corrects=False),
}


def expected(
    corpus: Path,
    name: str,
    model: str = "gpt2",
    ranks: int = 1,
    accumulation: int = 1,
    clip: float | None = None,
    skips: tuple[int, ...] = (),
    **options: Any,
) -> list[Step]:
    """The steps of the plain loop; each is computed once. clip: by default the technique's. options: of the optimizer, beside its own."""
    return _steps(corpus, name, model, ranks, accumulation, TECHNIQUES[name].clip if clip is None else clip, skips, **options)


@functools.cache
def _steps(
    corpus: Path, name: str, model: str, ranks: int, accumulation: int, clip: float, skips: tuple[int, ...], **options: Any
) -> list[Step]:
    technique = TECHNIQUES[name]
    more, own = dict(technique.reference), technique.options | options
    if technique.optimizer is PublishedMuon and "architecture" in SHAPES[model]:
        own |= MODERN_MUON
    if technique.compresses:
        own["ranks"] = ranks
        more["accumulation"] = ranks * accumulation
    if technique.job.get("technique") == "DroppedBlock":
        more |= {"accumulation": accumulation, "runner_of": without_block_1(accumulation)}
    adam = functools.partial(technique.optimizer, **own)
    return reference_steps(
        corpus, SHAPES[model] | technique.shape, STEPS, BATCH, technique.lr, WARMUP, SEED, clip=clip, skips=skips, adam=adam, **more
    )


def flags(corpus, tmp_path, shape: dict, form: str, ranks: int, accumulation: int, precision: str = "fp32") -> list[str]:
    """A run of `STEPS` steps in a form of the engine."""
    stage, changes = FORMS[form]
    values = {
        "deepspeed_config": f"ds_configs/zero{stage}_{precision}.json",
        **shape,
        "data": corpus,
        "runs_dir": tmp_path,
        "run_name": "r",
        "steps": STEPS,
        "global_batch_size": BATCH,
        "micro_batch_size": BATCH // ranks // accumulation,
        "lr": LR,
        "warmup_steps": WARMUP,
        "seed": SEED,
        "eval_every": 0,
        "save_every": 0,
    }
    return as_words(values) + [word for key, value in changes.items() for word in section(f"zero_optimization.{key}", value)]


def technique_flags(
    name: str, corpus, tmp_path, form: str = "stage 0", ranks: int = 2, accumulation: int = 1, precision: str = "fp32", model: str = "gpt2"
) -> list[str]:
    """A run with a technique."""
    technique = TECHNIQUES[name]
    run = flags(corpus, tmp_path, SHAPES[model] | technique.shape, form, ranks, accumulation, precision)
    return run + section("gradient_clipping", technique.clip) + technique.flags


def largest_difference(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def losses_of(steps: list[Step]) -> list[float]:
    return [step.loss for step in steps]
