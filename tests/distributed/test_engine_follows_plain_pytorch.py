"""Every ZeRO stage, offload, technique and architecture, on one and more ranks, trains what a plain PyTorch loop trains.

Pair by pair, not in every combination. In fp32 within what the order of sums does; in TF32, bf16 and fp16 within what their rounding does.
On the CPU, or with --device cuda on GPUs (a rank needs one of its own).
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from recipes.registry import technique_classes
from tests.distributed.parity import (
    COMPRESSED_TOLERANCE,
    FORMS,
    MODERN_TOLERANCE,
    NOT_CLIPPED,
    SHAPES,
    STEPS,
    TECHNIQUES,
    TOLERANCE,
    cells,
    expected,
    largest_difference,
    losses_of,
    section,
    technique_flags,
)
from tests.distributed.ranks import Ranks

#: bf16 keeps 8 bits: the order of sums moves the loss by up to 1.3e-3, rounding by 4e-3, an uncorrected fault by 4.8e-2. fp16 keeps 11.
HALF_STAGES = 3e-3
#: What replaces the optimizer and needs whole tensors.
AT_STAGE_0 = ("lamb", "one_bit", "zero_one")


@pytest.fixture
def data(request: pytest.FixtureRequest, name: str, form: str) -> Path:
    """The corpus of a technique; skips a form that this machine lacks."""
    if "drive" in form:
        request.getfixturevalue("drive")
    return request.getfixturevalue("short_documents" if "no_cross_document" in name else "corpus")


def test_every_technique_is_here():
    """What needs CUDA, or ranks that share rows, is in its own tests."""
    recipes = {cls.__module__.split(".")[1] for cls in technique_classes() if not cls.needs_cuda}
    assert recipes - {"sequence_parallel"} <= set(TECHNIQUES)


STAGES, OFFLOADED = list(FORMS)[:4], list(FORMS)[4:8]


def stages_of(name: str) -> list[str]:
    return STAGES[:1] if name.startswith(AT_STAGE_0) else STAGES


#: (technique, model, form, micro-batches on each rank, ranks)
QUICK = [
    ("plain", "llama", "stage 2", 3, 1),
    ("a loss of each token", "gpt2", "stage 3", 1, 2),
    ("batch_size_warmup", "gpt2", "stage 2", 1, 2),
    ("curriculum_learning, reshaped", "gpt2", "stage 0", 1, 2),
    ("no_cross_document", "gpt2", "stage 0", 1, 2),
    ("progressive_layer_drop", "gpt2", "stage 3", 1, 2),
    ("mixture_of_experts", "gpt2", "stage 2", 3, 2),
    ("muon", "gpt2", "stage 3", 1, 2),
    ("zero_one_adam", "gpt2", "stage 0", 1, 2),
]
AT_THE_GATE = [
    ("mixture_of_experts", "gpt2", "stage 3", 1, 2),
    ("one_bit_lamb", "gpt2", "stage 0", 1, 2),
    ("plain", "wide", "stage 0", 1, 1),
    ("plain", "wide", "stage 3", 1, 2),
    ("a loss of each token, fused", "gpt2", "stage 0", 3, 2),
    ("lamb, limited", "gpt2", "stage 0", 1, 2),
    ("muon, original", "gpt2", "stage 0", 1, 1),
    ("one_bit_adam, uncorrected", "gpt2", "stage 0", 1, 1),
    ("muon", "gpt2", "stage 2", 1, 2),
    ("random_ltd, checkpointed", "qwen3", "stage 3", 1, 2),
]
#: The engine in every form with a GPT-2, and with experts at each stage and with all offloaded; the other models at each stage, and with
#: each offload here or in `HALF`. A technique does the same at every stage: it is in a modern model at stage 2, and a variant of it at the
#: last stage.
EVERY = [
    *(("plain", "gpt2", form, 3, 2) for form in FORMS),
    *(("mixture_of_experts", "gpt2", form, 3, 2) for form in (*STAGES, OFFLOADED[-1])),
    *(("plain", "gpt2", form, 1, 1) for form in ("stage 1", "stage 3", OFFLOADED[-1])),
    *(("plain", model, stage, 3, 2) for model in ("llama", "qwen3") for stage in ("stage 0", "stage 1", "stage 3")),
    *(("plain", model, form, 3, 2) for form, model in zip(OFFLOADED, ("llama", "qwen3", "llama", "qwen3"), strict=True)),
    *((name, "qwen3", stages_of(name)[-2:][0], 3, 2) for name in TECHNIQUES if "," not in name and name != "mixture_of_experts"),
    *((name, "gpt2", stages_of(name)[-1], 1, 2 if name.startswith(AT_STAGE_0) else 1) for name in TECHNIQUES if "," in name),
    *(("muon", "gpt2", stage, 3, 2) for stage in ("stage 0", "stage 1")),
    ("mixture_of_experts", "gpt2", "stage 3", 1, 4),
    ("a loss of each token", "gpt2", "stage 3", 3, 2),
    *((name, "gpt2", "stage 0", 1, 4) for name in ("one_bit_adam", "zero_one_adam")),
]


@pytest.mark.usefixtures("measured_text")
@pytest.mark.parametrize(("name", "model", "form", "accumulation", "ranks"), cells(EVERY, QUICK, AT_THE_GATE))
def test_losses_and_norms_are_those_of_plain_pytorch(name, model, form, accumulation, ranks, data, pools, tmp_path):
    """Where ranks compress, nothing is clipped, because there the norm is an estimate."""
    technique = TECHNIQUES[name]
    compressed = technique.compresses and ranks > 1
    run = technique_flags(name, data, tmp_path, form, ranks, accumulation, model=model) + (NOT_CLIPPED if compressed else [])
    run += section("zero_optimization.stage3_param_persistence_threshold", 1000) if form.startswith("stage 3") else []
    arguments = {key: value for key, value in technique.job.items() if key != "job"}
    lines = pools.of(ranks).run(f"tests.distributed.jobs:{technique.job['job']}", flags=run, **arguments)[0]
    clip = {"clip": 1e9 if compressed else technique.clip}
    at = {"ranks": ranks, "accumulation": accumulation} if technique.compresses or arguments else {}
    steps = expected(data, name, model, **at, **clip)
    losses, reference = [line["loss"] for line in lines], losses_of(steps)
    exact = MODERN_TOLERANCE if "architecture" in SHAPES[model] | technique.shape else TOLERANCE
    assert largest_difference(losses[:4], reference[:4]) <= exact
    assert largest_difference(losses, reference) <= (COMPRESSED_TOLERANCE if compressed else exact)
    assert lines[0]["grad_norm"] == pytest.approx(steps[0].norm, rel=1e-5)
    if "norm" in lines[0]:  # of the gradients that a technique sees
        assert [line["norm"] for line in lines] == pytest.approx([step.norm for step in steps], rel=1e-4)
    for line in lines:
        acts = technique.metrics(line["step"]) | ({"compressed": 0, "exchanged": 0} if ranks == 1 else {})
        assert all(line[key] == value for key, value in acts.items() if key in line)
    assert losses[-1] < losses[0] - 0.2
    assert compressed or any(step.norm > technique.clip for step in steps), "what is clipped must show"
    if technique.base and len(losses) == STEPS:  # with as many tokens in each step
        without = losses_of(expected(data, technique.base, technique.shape.get("architecture", model), **clip))
        assert largest_difference(reference, without) > 100 * exact, "a technique without a trace shows nothing"
    if compressed:
        assert largest_difference(reference, losses_of(expected(data, name, model, **clip))) > 10 * COMPRESSED_TOLERANCE, "so must bits"


#: Of the techniques those whose arithmetic is in the precision; at stage 2 those with gradients or a loss of their own.
HALF = [
    *(("plain", "wide", form, "bf16") for form in FORMS if form not in OFFLOADED),
    *(("plain", model, form, "bf16") for form, model in zip(OFFLOADED, ("qwen3", "llama", "qwen3", "llama"), strict=True)),
    *(("plain", model, stage, "fp16") for stage, model in zip(STAGES, ("wide", "llama", "qwen3", "wide"), strict=True)),
    *(("muon", "gpt2", stage, "bf16") for stage in STAGES),
    *((name, "gpt2", "stage 2", "bf16") for name in ("a block without gradients", "a loss of each token", "mixture_of_experts")),
    *((name, "gpt2", "stage 0", "bf16") for name in ("Adam without bias correction", "lamb", "one_bit_lamb", "zero_one_adam")),
    *((name, "gpt2", "stage 0", "bf16") for name in ("fused_kernels", "no_cross_document", "progressive_layer_drop")),
    *((name, "gpt2", "stage 0", "bf16") for name in ("random_ltd", "sequence_tiling")),
    *((name, "gpt2", "stage 0", "fp16") for name in ("lamb", "mixture_of_experts", "muon", "one_bit_adam", "zero_one_adam")),
]
QUICK_HALF = [("one_bit_adam", "gpt2", "stage 0", "bf16")]


@functools.cache
def half(ranks: Ranks, name: str, model: str, form: str, precision: str, data: Path, folder: Path) -> list[float]:
    """The losses of a run with three micro-batches, which is trained once."""
    job = TECHNIQUES[name].job
    run = technique_flags(name, data, Path(tempfile.mkdtemp(dir=folder)), form, 2, 3, precision, model)
    arguments = {key: value for key, value in job.items() if key != "job"}
    return [line["loss"] for line in ranks.run(f"tests.distributed.jobs:{job['job']}", flags=run, **arguments)[0]]


@pytest.mark.parametrize(("name", "model", "form", "precision"), cells(HALF, QUICK_HALF, [("muon", "gpt2", "stage 0", "bf16")]))
def test_in_half_precision_the_stages_agree_and_follow_fp32(name, model, form, precision, data, two_ranks, tmp_path_factory):
    technique = TECHNIQUES[name]
    run = functools.partial(half, two_ranks, name, model, precision=precision, data=data, folder=tmp_path_factory.getbasetemp())
    losses = run(form)
    at = {"ranks": 2, "accumulation": 3} if technique.compresses or len(technique.job) > 1 else {}
    reference = losses_of(expected(data, name, model, **at))
    assert largest_difference(losses, reference) <= technique.half
    if technique.base and not technique.compresses and len(losses) == STEPS:
        assert largest_difference(losses_of(expected(data, technique.base, model)), reference) > technique.half, "it must show"
    if form != "stage 0":
        assert largest_difference(losses, run("stage 0")) <= HALF_STAGES


OVERFLOWS = (4, 9, 15, 16)


@pytest.mark.parametrize(
    ("name", "form", "ranks"),
    cells(
        [("plain", form, 2) for form in FORMS]
        + [("plain", "stage 0", 1), ("plain", "stage 3", 1)]
        + [(name, "stage 0", 2) for name in ("lamb", "one_bit_lamb", "zero_one_adam")],
        [("plain", "stage 2", 2), ("one_bit_adam", "stage 0", 2)],
        [("plain", "stage 3", 2)],
    ),
)
def test_in_fp16_an_overflow_on_one_rank_is_skipped_by_all(name, form, ranks, data, pools, tmp_path):
    """From a scale of 2^16; the last rank's first micro-batch overflows. What a schedule of updates was due to do is done a step later."""
    technique, job = TECHNIQUES[name], {"overflows": OVERFLOWS, "rank": ranks - 1, "micro_step": 0}
    run = technique_flags(name, data, tmp_path, form, ranks, 3, "fp16")
    results = pools.of(ranks).run("tests.distributed.failure_jobs:fp16_run", flags=run, **job)
    assert len({result["digest"] for result in results}) == 1, "the weights are the same on all ranks"
    lines = results[0]["lines"]
    assert [line["step"] for line in lines if line["overflow"]] == list(OVERFLOWS)
    for line in lines:
        before, skipped = (sum(step < at for step in OVERFLOWS) for at in (line["step"], line["step"] + 1))
        assert (line["loss_scale"], line["skipped_steps"]) == (2.0 ** (16 - before), skipped)
        acts = technique.metrics(line["step"] - before)
        assert line["overflow"] or all(line[key] == value for key, value in acts.items())
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2
    if not technique.compresses:
        steps = expected(data, name, skips=OVERFLOWS)
        clean = [(line, step) for line, step in zip(lines, steps, strict=True) if not line["overflow"]]
        assert max(abs(line["loss"] - step.loss) for line, step in clean) <= technique.half
        # Clipping acts at the right norm: the norm before it is that of fp32, and above the limit of 1 for some steps.
        assert [line["grad_norm"] for line, _ in clean] == pytest.approx([step.norm for _, step in clean], rel=technique.half * 2)
        assert any(step.norm > 1.0 for _, step in clean)
        assert largest_difference(losses_of(steps), losses_of(expected(data, name))) > technique.half, "skipped steps must show"


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "form"), [("plain", "stage 0"), ("plain", "stage 3")])
def test_in_tf32_the_losses_follow_fp32(name, form, data, one_rank, tmp_path):
    """TF32 keeps 11 bits of what is multiplied."""
    run = technique_flags(name, data, tmp_path, form, 1, model="wide") + section("tf32.enabled", True)
    losses = [line["loss"] for line in one_rank.train(run)]
    assert 1e-6 < largest_difference(losses, losses_of(expected(data, name, "wide"))) <= 1e-2
