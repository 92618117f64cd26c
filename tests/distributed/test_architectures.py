"""A modern GPT under every technique, ZeRO stage and offload trains what a plain PyTorch loop trains; and its way to transformers and back.

The references are those of the techniques' own tests, which train GPT-2.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch

from recipes.registry import technique_classes
from tests.distributed.reference import (
    PublishedLamb,
    PublishedMuon,
    PublishedOneBitAdam,
    PublishedOneBitLamb,
    PublishedZeroOneAdam,
    document_by_document,
    progressive_layer_drop,
    random_ltd,
    reference_steps,
)
from tests.distributed.test_curriculum_learning import SECTION as CURRICULUM
from tests.distributed.test_curriculum_learning import truncated
from tests.distributed.test_engine_follows_plain_pytorch import BATCH, FORMS, LR, SEED, STEPS, WARMUP, largest_difference, losses_of
from tests.distributed.test_engine_follows_plain_pytorch import flags as engine_flags
from tests.distributed.test_no_cross_document import short_documents  # noqa: F401 (a fixture)
from tests.distributed.test_one_bit_optimizers import COMPRESSED, NOT_CLIPPED
from tests.distributed.test_progressive_layer_drop import GAMMA, THETA
from tests.distributed.test_random_ltd import LAYERS, length_of
from tests.distributed.test_random_ltd import SECTION as LTD
from tests.distributed.test_zero_one_adam import EXCHANGED, RENEWED, SCHEDULE
from tests.helpers import config_of, exported

SIZES = {"n_layer": 4, "n_head": 4, "d_model": 64, "seq_len": 32}
#: Both have 2 heads of keys and values; the llama has a head of its own, the qwen3 QK-norm.
SHAPES = {name: {"architecture": name, **SIZES} for name in ("llama", "qwen3")}
TOLERANCE = 1e-5
LAMB_LR = 0.05
MUON_LR = 0.01
FREEZE = {"freeze_step": 10}
CHECKPOINTED = ["--set", "activation_checkpointing.number_checkpoints=2"]
#: 12 steps of 4 sequences are 1,536 tokens, and 6 more of 8 are 3,072; then a step has 12.
BATCH_SIZES = {"min_batch_size": 4, "increment": 4, "warmup_tokens": 3072}


class Technique(NamedTuple):
    """How a technique is trained, and the options of its reference. tolerance: of the losses."""

    form: str
    ranks: int
    flags: list[str]
    reference: dict[str, Any] = {}
    tolerance: float = TOLERANCE


def section(name: str, values: dict[str, Any] | str) -> list[str]:
    return ["--set", f"{name}={json.dumps(values)}"]


def optimizer(kind: str, lr: float, **params: Any) -> list[str]:
    values = {"type": kind, "params": {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto", **params}}
    return ["--lr", str(lr), *section("optimizer", values)]


def compressed(kind: str, published: Any, ranks: int, params: dict[str, Any], lr: float = LR, **options: Any) -> Technique:
    """One of the optimizers that compress, in three micro-batches on each rank. On several ranks nothing is clipped: there the norm is an
    estimate."""
    adam = functools.partial(published, ranks=ranks, **options)
    clips = {"clip": 1.0} if ranks == 1 else {"clip": 1e9}
    run = optimizer(kind, lr, **params) + (NOT_CLIPPED if ranks > 1 else [])
    return Technique(
        "stage 0", ranks, run, {"lr": lr, "adam": adam, "accumulation": 3 * ranks, **clips}, COMPRESSED if ranks > 1 else TOLERANCE
    )


def settle(variance: torch.Tensor, steps: int, beta2: float) -> torch.Tensor:
    return variance.clamp(min=0.1 * float(variance.mean()))


#: wte and the head; the rows of queries, keys and values, and of gate and up.
MUON = {"adam_matrices": (0, 17), "parts": {128: (64, 32, 32), 512: (256, 256)}}
ZERO_ONE_STEPS = {"renewed": frozenset(RENEWED), "exchanged": frozenset(EXCHANGED)}
DROPS = {"theta": THETA, "gamma": GAMMA}
TECHNIQUES = {
    "activation_checkpointing": Technique("stage 3", 2, CHECKPOINTED),
    "batch_size_warmup": Technique("stage 3", 2, section("batch_size_warmup", BATCH_SIZES), {"sizes": (4,) * 12 + (8,) * 6}),
    "curriculum_learning": Technique("stage 2", 2, section("curriculum_learning", CURRICULUM), {"cut": truncated}),
    "fused_kernels": Technique("stage 2", 2, section("fused_kernels", "auto")),
    "lamb": Technique("stage 0", 2, optimizer("Lamb", LAMB_LR), {"lr": LAMB_LR, "adam": PublishedLamb}),
    "muon": Technique(
        "stage 0",
        2,
        optimizer("Muon", MUON_LR, ns_dtype="fp32"),
        {"lr": MUON_LR, "adam": functools.partial(PublishedMuon, **MUON)},
    ),
    "no_cross_document": Technique("stage 3", 2, ["--no_cross_document"], {"loss_of": document_by_document}),
    "no_cross_document, checkpointed": Technique("stage 1", 1, ["--no_cross_document", *CHECKPOINTED], {"loss_of": document_by_document}),
    "progressive_layer_drop": Technique(
        "stage 2",
        2,
        section("progressive_layer_drop", DROPS),
        {"runner_of": progressive_layer_drop(SEED, SIZES["n_layer"], **DROPS)},
    ),
    "random_ltd": Technique(
        "stage 3", 2, section("random_ltd", LTD) + CHECKPOINTED, {"runner_of": random_ltd(SEED, 32, LAYERS, length_of)}
    ),
    **{
        f"{name}, {ranks} rank(s)": technique
        for ranks in (1, 2)
        for name, technique in {
            "one_bit_adam": compressed("OneBitAdam", PublishedOneBitAdam, ranks, FREEZE, settle=settle, **FREEZE),
            "one_bit_lamb": compressed("OneBitLamb", PublishedOneBitLamb, ranks, FREEZE, LAMB_LR, settle=settle, **FREEZE),
            "zero_one_adam": compressed("ZeroOneAdam", PublishedZeroOneAdam, ranks, SCHEDULE, **ZERO_ONE_STEPS),
        }.items()
    },
}


def shape_for(architecture: str, technique: str) -> dict[str, Any]:
    return SHAPES[architecture] | ({"seq_len": 64} if technique == "curriculum_learning" else {})


def test_every_technique_is_here():
    """What needs CUDA is in its own tests."""
    recipes = {cls.__module__.split(".")[1] for cls in technique_classes() if not cls.needs_cuda}
    assert recipes == {name.split(",")[0] for name in TECHNIQUES} - {"no_cross_document"}


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param(name, architecture, marks=[] if (name, architecture) == ("random_ltd", "qwen3") else pytest.mark.long)
        for name in TECHNIQUES
        for architecture in SHAPES
    ],
)
def test_a_technique_trains_what_its_reference_trains(name, architecture, request, pools, corpus, tmp_path):
    if name.startswith("no_cross_document"):
        corpus = request.getfixturevalue("short_documents")
    technique, shape = TECHNIQUES[name], shape_for(architecture, name)
    options = {"lr": LR, **technique.reference}
    run = engine_flags(corpus, tmp_path, shape, technique.form, technique.ranks, 3, "fp32") + technique.flags
    losses = [line["loss"] for line in pools.of(technique.ranks).train(run)]
    expected = losses_of(reference_steps(corpus, shape, STEPS, BATCH, warmup=WARMUP, seed=SEED, **options))
    assert largest_difference(losses, expected) <= technique.tolerance
    assert losses[-1] < losses[0] - 0.2
    if technique.reference and len(losses) == STEPS:  # with as many tokens in each step
        plain = losses_of(reference_steps(corpus, shape, STEPS, BATCH, LR, WARMUP, SEED))
        assert largest_difference(losses, plain) > 10 * technique.tolerance, "a technique without a trace shows nothing"


QUICK = {("stage 3", 3, 2, "qwen3"), ("stage 2", 3, 1, "llama")}
CELLS = [(form, accumulation, ranks, name) for form in FORMS for accumulation, ranks in ((1, 1), (3, 1), (3, 2)) for name in SHAPES]


@functools.cache
def plain_losses(corpus: Any, architecture: str) -> list[float]:
    return losses_of(reference_steps(corpus, SHAPES[architecture], STEPS, BATCH, LR, WARMUP, SEED))


@pytest.mark.parametrize(
    ("form", "accumulation", "ranks", "architecture"),
    [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.long) for cell in CELLS],
)
def test_losses_are_those_of_plain_pytorch(form, accumulation, ranks, architecture, request, pools, corpus, tmp_path):
    if "drive" in form:
        request.getfixturevalue("drive")
    run = engine_flags(corpus, tmp_path, SHAPES[architecture], form, ranks, accumulation)
    run += ["--set", "zero_optimization.stage3_param_persistence_threshold=1000"] if form.startswith("stage 3") else []
    lines = pools.of(ranks).train(run)
    losses = [line["loss"] for line in lines]
    assert largest_difference(losses, plain_losses(corpus, architecture)) <= TOLERANCE
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.long
@pytest.mark.parametrize("architecture", SHAPES)
def test_compiled_and_checkpointed_at_stage_3_it_compiles_no_more_after_step_3(architecture, two_ranks, corpus, tmp_path):
    run = engine_flags(corpus, tmp_path, SHAPES[architecture], "stage 3", 2, 3) + CHECKPOINTED
    run += section("fused_kernels", {"compile": True})
    counts, lines = two_ranks.run("tests.distributed.jobs:pretrain_counting_compilations", flags=run)[0]
    assert largest_difference([line["loss"] for line in lines], plain_losses(corpus, architecture)) <= TOLERANCE
    assert counts[2] > 0, "nothing was compiled"
    assert counts[-1] == counts[2]


#: In a fresh process without a line of ours: the loss of some rows, and a greedy text.
READER = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, rows = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.no_grad():
    logits = model(rows[:, :-1]).logits
    text = model.generate(rows[:1, :4], max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
print(json.dumps([type(model).__name__, str(model.dtype), float(loss), text.tolist()]))
"""
#: The shapes of published models, with fewer blocks and this corpus's vocabulary.
PUBLISHED = {
    "SmolLM2-135M": (
        "llama",
        {"n_layer": 2, "n_head": 9, "n_kv_head": 3, "d_model": 576, "d_ff": 1536, "seq_len": 64, "tied_head": True, "rope_theta": 1e5},
    ),
    "Qwen3-0.6B": ("qwen3", {"n_layer": 2, "n_head": 16, "n_kv_head": 8, "d_head": 128, "d_model": 1024, "d_ff": 3072, "seq_len": 64}),
    "small, with a head of its own": ("llama", {**SIZES, "seq_len": 64, "rope_theta": 5e5}),
}
SMALL = "small, with a head of its own"


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == SMALL else pytest.mark.long) for name in PUBLISHED])
def test_a_folder_of_transformers_is_trained_further_and_read_by_transformers(name, precision, two_ranks, corpus, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from data_pipeline.shards import open_corpus
    from launch.trained_model.load import open_trained
    from model.hf import hf_config
    from tests.helpers import generate

    architecture, fields = PUBLISHED[name]
    config = config_of(architecture, fields, vocab_size=open_corpus(corpus).vocab_size)
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(config)))
    theirs.save_pretrained(tmp_path / "theirs")
    given = {key: str(value).lower() for key, value in {"architecture": architecture, **fields}.items()}
    run = [*engine_flags(corpus, tmp_path, given, "stage 3", 2, 1, precision), "--init_from", str(tmp_path / "theirs")]
    run += ["--steps", "2", "--warmup_steps", "1"]
    two_ranks.train(run)
    (tmp_path / "r").rename(tmp_path / "trained")
    out = exported(tmp_path / "trained", tmp_path / "out")
    model = open_trained(tmp_path / "trained").load_model()
    back = open_trained(out).load_model()
    for (key, ours), read in zip(model.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(ours, read), key
    rows = torch.randint(0, config.vocab_size, (2, 65), generator=torch.Generator().manual_seed(2))
    read_back = open_trained(tmp_path / "theirs").load_model()
    with torch.no_grad():
        assert float(model(rows[:, :-1], rows[:, 1:]) - read_back(rows[:, :-1], rows[:, 1:])) != 0, "nothing was trained"
    done = subprocess.run(
        [sys.executable, "-c", READER, str(out), json.dumps(rows.tolist())], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    kind, dtype, loss, text = json.loads(done.stdout.splitlines()[-1])
    assert (kind, dtype) == (type(theirs).__name__, "torch.float32")
    with torch.no_grad():
        assert loss == pytest.approx(float(model(rows[:, :-1], rows[:, 1:])), abs=1e-5)
    assert text == generate(model, rows[0, :4].tolist(), 50, config.seq_len, temperature=0)
    written = (out / "model.safetensors").stat().st_size
    assert written == pytest.approx(4 * sum(p.numel() for p in theirs.parameters()), rel=0.05), "a tied head is written once"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_there_and_back_in_another_precision(dtype, tmp_path):
    """Tensor for tensor, from a folder of transformers in that precision to one of ours."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from model.hf import hf_config
    from tests.commands import run_script

    for architecture in SHAPES:
        config = config_of(architecture, SIZES, vocab_size=200)
        torch.manual_seed(2)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(config)))
        theirs.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).save_pretrained(tmp_path / architecture / "in")
        out = tmp_path / architecture / "out"
        done = run_script("launch/export.py", tmp_path / architecture / "in", "--out", out)
        assert done.returncode == 0, done.stderr
        before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / architecture / "in", out))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
