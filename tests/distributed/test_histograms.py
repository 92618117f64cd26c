"""The histograms of gradient exponents count what is there, say what fp16 would make of it, and change nothing."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from launch.training.exponents import BINS, KINDS, LOWEST, overall, summary
from tests.helpers import resumed_after

SHAPE = ["--n_layer", "3", "--n_head", "2", "--d_model", "64", "--seq_len", "32", "--global_batch_size", "8", "--micro_batch_size", "2"]
LAYERS = ["embedding", "block 0", "block 1", "block 2", "final norm"]
TOKENS, WIDTH = 8 * 32, 64
BLOCK = 12 * WIDTH**2 + 13 * WIDTH


def flags(corpus, tmp_path, config: str, name: str, *more: str) -> list[str]:
    run = f"--deepspeed_config ds_configs/{config}.json --data {corpus} --runs_dir {tmp_path} --run_name {name}".split()
    return [*SHAPE, *run, "--steps", "4", "--lr", "1e-3", "--eval_every", "0", "--save_every", "0", *more]


def histograms(tmp_path, name: str) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / name / "histograms.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
def test_the_shares_are_those_of_a_conversion_to_fp16(scale):
    import torch

    from launch.training.histograms import count_exponents

    rng = np.random.default_rng(0)
    values = rng.choice([-1, 1], 20_000) * np.exp2(rng.uniform(-60, 20, 20_000)).astype(np.float32)
    values[:1000] = 0.0
    counts = count_exponents(torch.from_numpy((values * scale).astype(np.float32))).tolist()
    assert sum(counts) == len(values)
    line = summary(1, "fp16", scale, ["all"], [[counts], [counts]])
    with np.errstate(over="ignore"):
        as_fp16, scaled = values.astype(np.float16), (values * np.float32(scale)).astype(np.float16)
    found = line["weight_gradients"]["all"]
    assert found["fp16_zero_at_1"] == np.mean(as_fp16 == 0)
    assert found["fp16_zero_at_scale"] == np.mean(scaled == 0)
    assert found["zero"] == 1000
    exponents = np.floor(np.log2(np.abs(values[1000:])))
    assert found["exponents"] == {int(e): int(n) for e, n in zip(*np.unique(exponents, return_counts=True), strict=True)}


def test_the_ends_are_open_and_what_is_not_finite_is_counted_apart():
    import torch

    from launch.training.histograms import count_exponents

    counts = count_exponents(torch.tensor([1e-45, 3e38, 0.0, torch.inf, torch.nan, 1.0])).tolist()
    assert (counts[0], counts[BINS - 1], counts[-LOWEST]) == (1, 1, 1)
    assert counts[BINS:] == [1, 2]
    for dtype in (torch.bfloat16, torch.float16):
        assert sum(count_exponents(torch.ones(3, 4, dtype=dtype))) == 12


@pytest.mark.long
@pytest.mark.parametrize("config", ["zero0_fp32", "zero1_bf16", "zero2_fp32", "zero3_bf16"])
def test_every_gradient_of_all_ranks_and_micro_batches_is_counted_once(config, two_ranks, corpus, tmp_path):
    plain = two_ranks.train(flags(corpus, tmp_path, config, "plain"))
    watched = two_ranks.train(flags(corpus, tmp_path, config, "w", "--histogram_every", "2"))
    for key in ("loss", "grad_norm", "bytes_sent"):
        assert [line[key] for line in watched] == [line[key] for line in plain]
    lines = histograms(tmp_path, "w")
    assert [line["step"] for line in lines] == [2, 4]
    micro_batches = 2 * 2  # on each of two ranks
    weights = {"embedding": (1024 + 32) * WIDTH, **{f"block {i}": BLOCK for i in range(3)}, "final norm": 2 * WIDTH}
    for line in lines:
        assert (line["loss_scale"], line["scale"]) == (None, 65536.0)
        activations, parameters = (line[kind] for kind in KINDS)
        assert {name: layer["elements"] for name, layer in activations.items()} == dict.fromkeys(LAYERS, TOKENS * WIDTH)
        assert {name: layer["elements"] for name, layer in parameters.items()} == {name: micro_batches * n for name, n in weights.items()}
        for layer in (*activations.values(), *parameters.values()):
            assert sum(layer["exponents"].values()) + layer["zero"] + layer["not_finite"] == layer["elements"]
            assert layer["fp16_zero_at_scale"] <= layer["fp16_zero_at_1"]
    assert (tmp_path / "w" / "histograms.png").stat().st_size > 10_000
    assert not (tmp_path / "plain" / "histograms.jsonl").exists()
    assert "activation gradients that fp16 rounds to zero" in (tmp_path / "w" / "log.txt").read_text()


@pytest.mark.long
def test_the_counts_are_the_same_at_every_stage_and_with_recomputation(two_ranks, corpus, tmp_path):
    def first(config: str, *more: str) -> dict:
        run = flags(corpus, tmp_path, config, "".join(filter(str.isalnum, config + "".join(more))), "--histogram_every", "1", *more)
        two_ranks.train(run)
        name = run[run.index("--run_name") + 1]
        return {kind: histograms(tmp_path, name)[0][kind] for kind in KINDS}

    expected = first("zero1_fp32")
    assert first("zero0_fp32") == expected
    assert first("zero1_fp32", "--set", "activation_checkpointing.number_checkpoints=2") == expected
    at_3 = first("zero3_fp32")
    for kind in KINDS:  # stage 3 adds a bias in a sum of its own
        for name, layer in expected[kind].items():
            near = [abs(layer["exponents"].get(e, 0) - at_3[kind][name]["exponents"].get(e, 0)) for e in layer["exponents"]]
            assert sum(near) <= 0.01 * layer["elements"]


def test_in_fp16_the_runs_own_scale_is_taken_out(two_ranks, corpus, tmp_path):
    two_ranks.train(flags(corpus, tmp_path, "zero1_fp32", "fp32", "--histogram_every", "4"))
    two_ranks.train(flags(corpus, tmp_path, "zero1_fp16", "fp16", "--histogram_every", "4"))
    (in_fp32,), (in_fp16,) = histograms(tmp_path, "fp32"), histograms(tmp_path, "fp16")
    assert in_fp16["loss_scale"] == in_fp16["scale"] == 65536.0
    for kind in KINDS:
        for name in LAYERS:
            mean = [
                sum(int(exponent) * count for exponent, count in layer["exponents"].items()) / sum(layer["exponents"].values())
                for layer in (in_fp32[kind][name], in_fp16[kind][name])
            ]
            assert mean[0] == pytest.approx(mean[1], abs=0.3)
        assert overall(in_fp16, kind, "fp16_zero_at_scale") <= overall(in_fp16, kind, "fp16_zero_at_1")


@pytest.mark.long
def test_a_resumed_run_writes_its_histograms_again(one_rank, corpus, tmp_path):
    run = flags(corpus, tmp_path, "zero1_fp32", "r", "--histogram_every", "1")
    one_rank.train([*run, "--save_every", "2"])
    first = histograms(tmp_path, "r")
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step-00000004")
    one_rank.train([*run, "--save_every", "2", "--resume"])
    assert histograms(tmp_path, "r") == first and resumed_after(tmp_path / "r") == 2
    assert [line["step"] for line in first] == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step-00000004")
    one_rank.train([*run, "--save_every", "2", "--resume", "--histogram_every", "0"])
    assert histograms(tmp_path, "r") == first[:2], "what the checkpoint does not hold is gone"
