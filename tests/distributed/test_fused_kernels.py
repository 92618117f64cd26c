"""With each kernel, and with all of them, a run trains what it trains without: at every stage, and beside other techniques."""

from __future__ import annotations

import itertools
import json
from functools import cache

import pytest

from recipes.fused_kernels.technique import FUSED_BY_COMPILE
from tests.distributed.test_engine_follows_plain_pytorch import flags as engine_flags
from tests.distributed.test_engine_follows_plain_pytorch import largest_difference

#: 160 tokens: two blocks of queries.
SHAPE = {"n_layer": 3, "n_head": 2, "d_model": 64, "seq_len": 160}
WITHIN = {"fp32": 5e-6, "bf16": 1e-3}
long = pytest.mark.long
EVERY = dict.fromkeys(("attention", "cross_entropy", "layer_norm", "gelu", "compile"), "auto")
EARLIER = {
    "activation_checkpointing": {"number_checkpoints": 2},
    "curriculum_learning": {
        "min_difficulty": 16,
        "max_difficulty": 160,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 20, "difficulty_step": 16},
    },
    "progressive_layer_drop": {"theta": 0.3, "gamma": 0.1},
    "random_ltd": {"random_ltd_schedule": {"schedule_config": {"require_steps": 20, "seq_per_step": 16}}},
}


@pytest.fixture(scope="module")
def losses(pools, corpus, tmp_path_factory):
    """The losses of 30 steps in a form and precision, with `kernels` and other sections; each run is made once."""

    @cache
    def trained(form: str, precision: str, kernels: str = "", other: str = "", ranks: int = 2) -> list[float]:
        run = engine_flags(corpus, tmp_path_factory.mktemp("run"), SHAPE, form, ranks, 2, precision)
        if kernels:
            run += ["--set", f"fused_kernels={kernels}"]
        if other == "no_cross_document":
            run += ["--no_cross_document"]
        elif other:
            run += ["--set", f"{other}={json.dumps(EARLIER[other])}"]
        lines = pools.of(ranks).train(run)
        found = [line["loss"] for line in lines if "loss" in line]
        assert len(found) >= 30  # more where a curriculum makes steps smaller
        return found

    return trained


@long
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["attention", "cross_entropy", "gelu", "compile"])
def test_a_kernel_trains_what_the_plain_operations_train(name, precision, losses, pools, device):
    plain, fused = (losses("stage 0", precision, kernels, ranks=pools.few) for kernels in ("", json.dumps({name: True})))
    assert largest_difference(plain, fused) <= WITHIN[precision]
    if name != "compile" and (device, name) != ("cuda", "attention"):  # torch's, as without the key
        assert plain != fused, "another kernel rounds otherwise"


@pytest.mark.parametrize(
    ("form", "precision"),
    [
        pytest.param(form, precision, marks=[] if (form, precision) == ("stage 0", "bf16") else long)
        for form, precision in itertools.product((f"stage {stage}" for stage in range(4)), WITHIN)
    ],
)
def test_all_of_them_train_what_the_plain_operations_train(form, precision, losses, pools):
    plain, fused = (losses(form, precision, kernels, ranks=pools.few) for kernels in ("", json.dumps(EVERY)))
    assert largest_difference(plain, fused) <= WITHIN[precision]
    assert plain != fused


@long
@pytest.mark.parametrize("form", ["stage 0", "stage 3"])
@pytest.mark.parametrize("other", ["no_cross_document", *EARLIER])
def test_they_go_with_what_reaches_into_the_model(other, form, losses):
    plain, fused = (losses(form, "fp32", kernels, other) for kernels in ("", '"auto"'))
    assert largest_difference(plain, fused) <= WITHIN["fp32"]
    assert plain != fused


@pytest.mark.parametrize("form", [pytest.param("stage 0", marks=long), "stage 3"])
def test_compiled_blocks_train_what_plain_ones_train(form, losses, pools):
    """torch 2.11 compiles DeepSpeed's linear layers of stage 3 with gradients of zero."""
    plain, fused = (losses(form, "fp32", kernels, ranks=1) for kernels in ("", '{"compile": true}'))
    assert largest_difference(plain, fused) <= WITHIN["fp32"]


@long
@pytest.mark.parametrize("form", ["stage 0", "stage 3"])
@pytest.mark.parametrize("other", ["progressive_layer_drop", "activation_checkpointing"])
def test_compiled_blocks_go_with_stage_3_and_with_dropped_layers(other, form, losses):
    section = json.dumps(EVERY | {"compile": True})
    plain, fused = (losses(form, "fp32", kernels, other) for kernels in ("", section))
    assert largest_difference(plain, fused) <= WITHIN["fp32"]


COMPILED = "skipped, it is compiled with its block"
SAID = {
    ("cpu", "gpt2"): ["layer_norm: skipped, torch's", "gelu: compiled by torch.compile", "compile: skipped, on a CPU"],
    ("cuda", "gpt2"): [f"layer_norm: {COMPILED}", f"gelu: {COMPILED}", "compile: a block at a time"],
    ("any", "qwen3"): [*(f"{name}: {COMPILED}" for name in FUSED_BY_COMPILE), "compile: a block at a time"],
}


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_the_log_names_what_was_taken_and_what_was_skipped(architecture, one_rank, corpus, tmp_path, device):
    run = engine_flags(corpus, tmp_path, SHAPE, "stage 0", 1, 1, "bf16")
    run += ["--set", "fused_kernels=auto", "--architecture", architecture, "--steps", "2", "--warmup_steps", "1"]
    one_rank.train(run)
    log = (tmp_path / "r" / "log.txt").read_text()
    for line in (
        "attention: blocks of 128 queries" if device == "cpu" else "attention: torch's, as without this key",
        "cross_entropy: the gradient is written over the logits",
        *(SAID.get((device, architecture)) or SAID["any", architecture]),
    ):
        assert log.count(f"fused_kernels.{line}") == 1, line


def test_with_dropout_attention_stays_torchs(one_rank, corpus, tmp_path):
    run = engine_flags(corpus, tmp_path, {**SHAPE, "dropout": 0.1}, "stage 0", 1, 1, "fp32")
    lines = one_rank.train([*run, "--set", "fused_kernels=auto", "--steps", "2", "--warmup_steps", "1"])
    assert [line["step"] for line in lines] == [1, 2]
    assert "fused_kernels.attention: torch's, as without this key" in (tmp_path / "r" / "log.txt").read_text()
