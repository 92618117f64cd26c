"""What techniques do to a run besides its losses, which test_engine_follows_plain_pytorch.py compares."""

from __future__ import annotations

import json

import pytest
import torch

from data_pipeline.loader import Loader
from data_pipeline.shards import open_corpus
from launch.formats.metrics import read_metrics
from model.gpt import GPT
from model.presets import GPTConfig
from recipes.fused_kernels.technique import FUSED_BY_COMPILE
from tests.distributed.export_jobs import LIVE
from tests.distributed.parity import CHECKPOINTED, COMPILED, LR, SEED, SIZES, SMALL, flags, section, technique_flags
from tests.distributed.reference import document_by_document
from tests.helpers import losses

long = pytest.mark.long
JOBS = "tests.distributed.jobs"


@pytest.mark.parametrize("name", ["progressive_layer_drop", "random_ltd", "curriculum_learning, reshaped"])
def test_blocks_run_on_what_a_step_plans_and_in_evaluation_on_everything(name, one_rank, corpus, tmp_path):
    run = [*technique_flags(name, corpus, tmp_path, ranks=1, accumulation=3), "--eval_every", "10"]
    lines = one_rank.run(f"{JOBS}:pretrain_with", technique="WatchedBlocks", flags=run)[0]
    for line in lines[1:]:
        kept = line["kept_blocks"] if name == "progressive_layer_drop" else SIZES["n_layer"]
        length = line.get("reserved_length", line.get("seq_len", 32))
        assert (line["training_calls"], line["min_training"]) == (3 * kept, length)
        assert line["max_training"] == line.get("seq_len", 32)
    assert lines[-1]["evaluation_calls"] == SIZES["n_layer"] * lines[-1]["evaluation_passes"] > 0
    assert (lines[-1]["min_evaluation"], lines[-1]["max_evaluation"]) == (32, 32)
    assert len({(line["training_calls"], line["min_training"]) for line in lines[1:]}) > 2


@long
@pytest.mark.parametrize(
    ("name", "model", "form", "more"),
    [
        ("progressive_layer_drop, compiled", "gpt2", "stage 1", []),
        ("fused_kernels, compiled", "qwen3", "stage 3", CHECKPOINTED),
    ],
)
def test_a_run_compiles_no_more_after_its_first_steps(name, model, form, more, two_ranks, corpus, tmp_path):
    """A graph for each probability of dropped blocks would reach dynamo's limit: there is one without a scale and one with."""
    run = technique_flags(name, corpus, tmp_path, form, 2, 3, model=model) + more
    counts, _ = two_ranks.run(f"{JOBS}:pretrain_counting_compilations", flags=run)[0]
    assert 0 < counts[4] == counts[-1] and (model != "gpt2" or counts[-1] <= 3)


def test_documents_are_evaluated_one_by_one_too(two_ranks, short_documents, tmp_path):
    run = [*technique_flags("no_cross_document", short_documents, tmp_path), "--eval_every", "4", "--eval_batches", "1", "--steps", "4"]
    lines = two_ranks.train(run)
    corpus = open_corpus(short_documents)
    loader = Loader(corpus.val, None, SIZES["seq_len"], corpus.vocab_size, 0, 1, torch.device("cpu"))
    ((windows, _),) = loader.validation_batches(loader.validation_windows(12), 12)
    with torch.no_grad():
        untrained = GPT(GPTConfig(**SIZES, vocab_size=corpus.vocab_size, init_seed=SEED))
        expected = document_by_document(untrained, windows, corpus.eot_id)
    assert lines[0]["val_loss"] == pytest.approx(float(expected), abs=1e-5)
    assert json.loads((tmp_path / "r/run.json").read_text())["no_cross_document"] is True


FUSED = section("fused_kernels.attention", True)
WITHOUT_MASK = [
    ("no_cross_document", "gpt2", "stage 3", CHECKPOINTED, pytest.mark.gate),
    ("no_cross_document", "qwen3", "stage 1", CHECKPOINTED, long),
    *(("no_cross_document", "llama", stage, [*FUSED, *CHECKPOINTED], long) for stage in ("stage 0", "stage 3")),
    ("no_cross_document", "llama", "stage 3", [*COMPILED, *CHECKPOINTED], long),
    ("random_ltd, no_cross_document", "qwen3", "stage 3", CHECKPOINTED, long),
]


@pytest.mark.parametrize(("name", "model", "form", "more"), [pytest.param(*cell, marks=marks) for *cell, marks in WITHOUT_MASK])
def test_documents_of_long_rows_train_as_with_the_dense_mask(name, model, form, more, two_ranks, short_documents, tmp_path):
    lines, weights = [], []
    for job in ("pretrain_and_keep", "pretrain_and_keep_without_mask"):
        run = technique_flags(name, short_documents, tmp_path / job, form, 2, model=model) + more + ["--steps", "8"]
        assert set(two_ranks.run(f"tests.distributed.export_jobs:{job}", runs=[run])[0]) == {""}
        lines.append(read_metrics(tmp_path / job / "r/metrics.jsonl"))
        weights.append(torch.load(tmp_path / job / "r" / LIVE))
    assert losses(lines[1]) == pytest.approx(losses(lines[0]), abs=1e-5)
    assert lines[1][0]["grad_norm"] == pytest.approx(lines[0][0]["grad_norm"], rel=1e-5)
    for tensor, (key, other) in zip(weights[0].values(), weights[1].items(), strict=True):
        torch.testing.assert_close(other, tensor, atol=2e-5, rtol=0, msg=key)


SGD = section("optimizer", {"type": "SGD", "params": {"lr": "auto", "weight_decay": 0}})
SGD += section("zero_allow_untested_optimizer", True) + section("gradient_clipping", 0)
FP32_SUMS = section("data_types.grad_accum_dtype", "fp32")
GRADIENTS = [
    (0, "fp32", 2, []),
    pytest.param(1, "bf16", 2, FP32_SUMS, marks=long),  # DeepSpeed's BF16_Optimizer
    (2, "bf16", 2, []),
    pytest.param(3, "fp32", 2, [], marks=pytest.mark.gate),
    pytest.param(3, "fp32", 3, [], marks=long),  # a bias has 64 elements, and parts of 22
    pytest.param(1, "fp32", 2, [], marks=long),
    *(pytest.param(stage, "bf16", 3 if stage == 3 else 2, [], marks=long) for stage in (0, 3)),
    pytest.param(2, "bf16", 2, FP32_SUMS, marks=long),
]


@pytest.mark.parametrize(("stage", "precision", "ranks", "more"), GRADIENTS)
def test_twice_the_gradients_at_half_the_rate_are_the_same_run(stage, precision, ranks, more, pools, corpus, tmp_path):
    """Bit for bit, because SGD's update is the rate times the gradient, and a power of two is exact."""

    def trained(job: str, lr: float, **technique: str) -> list[tuple[float, float]]:
        run = flags(corpus, tmp_path / job, SMALL, f"stage {stage}", ranks, 2, precision)
        run += [*SGD, *more, "--lr", str(lr), "--steps", "8"]
        lines = pools.of(ranks).run(f"{JOBS}:{job}", flags=run, **technique)[0]
        return [(line["loss"], line["grad_norm"]) for line in lines]

    plain = trained("pretrain", 0.25)
    doubled = trained("pretrain_with", 0.125, technique="DoubledGradients")
    assert doubled == [(loss, 2 * norm) for loss, norm in plain]
    assert plain[-1][0] < plain[0][0] - 0.1


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=long) for stage in (2, 3))])
def test_a_planned_accumulation_trains_what_the_usual_one_trains(stage, two_ranks, corpus, tmp_path):
    """The same 16 sequences a step: 2 micro-batches of 4 on each rank, but 8 of 1 in odd steps and 1 of 8 in every third."""
    run = [*flags(corpus, tmp_path, SMALL, f"stage {stage}", 2, 1), "--steps", "6", "--global_batch_size", "16", "--micro_batch_size", "4"]
    usual = two_ranks.train([*run, "--lr", str(4 * LR)])
    planned = two_ranks.run(f"{JOBS}:pretrain_with", technique="ChangingPlan", flags=[*run, "--lr", str(4 * LR), "--run_name", "planned"])[
        0
    ]
    assert [line["tokens"] for line in planned] == [line["tokens"] for line in usual]
    assert losses(planned) == pytest.approx(losses(usual), abs=1e-5)
    assert usual[-1]["loss"] < usual[0]["loss"] - 0.1


SKIPPED = "skipped, it is compiled with its block"
ATTENTION = "attention: torch's, as without this key"
SAID = {
    ("cpu", "gpt2"): ["layer_norm: skipped, torch's", "gelu: compiled by torch.compile", "compile: skipped, on a CPU"],
    ("cuda", "gpt2"): [f"layer_norm: {SKIPPED}", f"gelu: {SKIPPED}", "compile: a block at a time"],
    ("any", "qwen3"): [*(f"{name}: {SKIPPED}" for name in FUSED_BY_COMPILE), "compile: a block at a time"],
}


@pytest.mark.parametrize(("model", "dropout"), [pytest.param(*one, marks=pytest.mark.gate) for one in (("gpt2", 0.1), ("qwen3", 0.0))])
def test_the_log_names_the_kernels_that_were_taken_and_skipped(model, dropout, one_rank, corpus, tmp_path, device):
    """With dropout, attention stays torch's."""
    run = technique_flags("fused_kernels", corpus, tmp_path, ranks=1, precision="bf16", model=model)
    lines = one_rank.train([*run, "--steps", "2", "--warmup_steps", "1", "--dropout", str(dropout)])
    assert [line["step"] for line in lines] == [1, 2]
    log = (tmp_path / "r" / "log.txt").read_text()
    for line in (
        "attention: blocks of 128 queries" if device == "cpu" and not dropout else ATTENTION,
        "cross_entropy: the gradient is written over the logits",
        *(SAID.get((device, model)) or SAID["any", model]),
    ):
        assert log.count(f"fused_kernels.{line}") == 1, line
