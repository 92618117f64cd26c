"""ZeRO++: the second copy of the weights changes no number, int8 weights few, and both send what was planned. Four ranks, as two hosts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch.config.explain import bytes_of
from launch.config.run_config import resolve
from tests.helpers import resumed_after

SHAPE = ["--n_layer", "3", "--n_head", "2", "--d_model", "64", "--seq_len", "32", "--global_batch_size", "16", "--micro_batch_size", "2"]
#: Everything but biases and norms is gathered.
GATHERED = "zero_optimization.stage3_param_persistence_threshold=1000"
PAIRS = "zero_optimization.zero_hpz_partition_size=2"
INT8 = "zero_optimization.zero_quantized_weights=true"
OFFLOAD = ("zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_param.device=cpu")
MUON = 'optimizer={"type": "Muon", "params": {"lr": "auto", "weight_decay": 0.1, "ns_dtype": "fp32"}}'


def flags(corpus: Path, runs: Path, name: str, *changes: str, precision: str = "fp32", more: tuple[str, ...] = ()) -> list[str]:
    run = ["--deepspeed_config", f"ds_configs/zero3_{precision}.json", *SHAPE, "--data", str(corpus), "--runs_dir", str(runs)]
    run += ["--run_name", name, "--steps", "6", "--lr", "1e-3", "--warmup_steps", "2", "--save_every", "0", *more]
    return run + [text for change in (GATHERED, *changes) for text in ("--set", change)]


def trained(pools, run: list[str]) -> list[dict]:
    return pools.of(4).run("tests.distributed.zeropp_jobs:zeropp_run", flags=run)[0]


def numbers(lines: list[dict]) -> list[tuple]:
    return [(line.get("loss"), line.get("grad_norm"), line.get("val_loss")) for line in lines]


@pytest.mark.parametrize(
    ("precision", "changes", "architecture"),
    [
        *(("fp32", (), architecture) for architecture in ("gpt2", "qwen3_moe")),
        ("fp32", OFFLOAD, "gpt2"),
        ("bf16", (MUON,), "gpt2"),
    ],
    ids=str,
)
@pytest.mark.long
def test_the_second_copy_changes_no_bit(precision, changes, architecture, pools, corpus, tmp_path):
    """In training and in evaluations between, of which each update makes the copy out of date."""
    more = ("--eval_every", "3", "--architecture", architecture)
    plain, paired = (
        trained(pools, flags(corpus, tmp_path, name, *changes, *own, precision=precision, more=more))
        for name, own in (("plain", ()), ("paired", (PAIRS,)))
    )
    assert numbers(paired) == numbers(plain)
    assert plain[-1]["loss"] < plain[1]["loss"]
    assert paired[-1]["bytes_sent"] < plain[-1]["bytes_sent"]


@pytest.mark.long
def test_a_resumed_run_gathers_the_weights_of_its_checkpoint(pools, corpus, tmp_path):
    """Not the copy that was made of the initial ones (DeepSpeed#7606)."""
    more = ("--eval_every", "3", "--save_every", "3")
    whole = trained(pools, flags(corpus, tmp_path, "r", PAIRS, more=more))
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step-00000006")
    assert numbers(trained(pools, flags(corpus, tmp_path, "r", PAIRS, more=(*more, "--resume")))) == numbers(whole)
    assert resumed_after(tmp_path / "r") == 3


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        *(pytest.param(*case, marks=pytest.mark.long) for case in (((PAIRS,), 0.0), ((INT8,), 0.01))),
        pytest.param((PAIRS, INT8), 0.01, marks=pytest.mark.gate),
    ],
    ids=["second copy", "int8", "both"],
)
def test_bytes_on_the_wire_are_those_planned(changes, scales, pools, corpus, tmp_path):
    """Two micro-batches a step; without the scales of int8, at most 1%."""
    run = flags(corpus, tmp_path, "r", *changes, precision="bf16", more=("--eval_every", "0"))
    config = resolve(run, ranks=4)[0]
    planned = bytes_of(config, config.model_config)
    assert planned <= trained(pools, run)[-1]["bytes_sent"] <= planned * (1 + scales)


@pytest.mark.parametrize(("architecture", "changes"), [("qwen3", (MUON,)), ("qwen3_moe", ())], ids=str)
@pytest.mark.long
def test_int8_weights_train_to_nearly_the_same_loss(architecture, changes, pools, corpus, tmp_path):
    more = ("--eval_every", "3", "--architecture", architecture)
    plain, quantized = (
        trained(pools, flags(corpus, tmp_path, name, *changes, *own, precision="bf16", more=more))
        for name, own in (("plain", ()), ("quantized", (PAIRS, INT8)))
    )
    assert [line["loss"] for line in quantized[1:]] == pytest.approx([line["loss"] for line in plain[1:]], abs=0.02)
    assert numbers(quantized) != numbers(plain)


@pytest.mark.cuda
@pytest.mark.parametrize("ranks", [2])
def test_the_kernels_train_to_nearly_the_same_loss(ranks, pools, corpus, tmp_path):
    plain, quantized = (
        pools.of(ranks).train(flags(corpus, tmp_path, name, *own, precision="bf16", more=("--eval_every", "3")))
        for name, own in (("plain", ()), ("quantized", (INT8,)))
    )
    assert [line["loss"] for line in quantized[1:]] == pytest.approx([line["loss"] for line in plain[1:]], abs=0.02)
    assert numbers(quantized) != numbers(plain)
    assert quantized[-1]["bytes_sent"] < plain[-1]["bytes_sent"]
