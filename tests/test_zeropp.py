"""ZeRO++'s part of the JSON: "auto" is a host's ranks, what cannot work is one line, and what it sends and keeps is planned."""

from __future__ import annotations

from functools import partial

import pytest

from tests import helpers

ZERO = "zero_optimization"
RUN = ("--preset", "gpt2", "--global_batch_size", "64", "--data", "no/corpus", "--recipe", "recipes/zeropp")
explained, refusal = partial(helpers.explained, *RUN), partial(helpers.refusal, *RUN)


@pytest.mark.parametrize(
    ("ranks", "local", "size", "origin"),
    [
        (16, None, 8, "auto: 8 ranks per host"),
        (12, None, 6, "auto: 8 ranks per host"),
        (8, None, 1, "auto: off below stage 3 and on one host"),
        (1, None, 1, "auto: off below stage 3 and on one host"),
        (16, "4", 4, "auto: 4 ranks per host"),
        (4, "4", 1, "auto: off below stage 3 and on one host"),
    ],
)
def test_auto_is_the_ranks_of_a_host(ranks, local, size, origin, monkeypatch):
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_SIZE", local)
    said = explained("--ranks", str(ranks), "--global_batch_size", "48")
    assert said["engine"][f"{ZERO}.zero_hpz_partition_size"] == {"value": size, "from": origin}


def test_below_stage_3_auto_is_off():
    said = helpers.explained(
        *("--deepspeed_config", "ds_configs/zero1_bf16.json", "--ranks", "16", "--global_batch_size", "16", "--data", "no/corpus"),
        *("--set", f"{ZERO}.zero_hpz_partition_size=auto"),
    )
    assert said["engine"][f"{ZERO}.zero_hpz_partition_size"] == {"value": 1, "from": "auto: off below stage 3 and on one host"}


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ((f"{ZERO}.zero_quantized_nontrainable_weights=true",), 16, "is for frozen weights"),
        ((f"{ZERO}.zero_hpz_partition_size=6",), 16, 'is 6, which does not divide 16 ranks; write a divisor, or "auto"'),
        ((), 64, "needs a multiple of 8 x 64 ranks of weights in each tensor, and ln_1.weight has 768; change the model's sizes"),
    ],
)
def test_a_bad_value_is_one_line(changes, ranks, words):
    assert words in refusal("--ranks", str(ranks), *(text for change in changes for text in ("--set", change)))


def test_what_is_sent_and_kept_is_planned():
    """124 M parameters on two hosts of 8 ranks, a micro-batch of 4: bytes a parameter, of which 15/16 or 7/8 goes to others."""
    said = {
        name: explained("--ranks", "16", *(text for change in changes for text in ("--set", f"{ZERO}.{change}")))
        for name, changes in {
            "both": (),
            "int8": ("zero_hpz_partition_size=1",),
            "copy": ("zero_quantized_weights=false",),
            "plain": ("zero_hpz_partition_size=1", "zero_quantized_weights=false"),
        }.items()
    }
    sent = {name: plan["bytes_sent_per_step"] / said["plain"]["model"]["parameters"] for name, plan in said.items()}
    # Each weight is gathered twice, but what of the last blocks stays from the forward to the backward pass.
    again = (sent["plain"] - 2 * 2 * 15 / 16) / (2 * 15 / 16)
    assert 0 < again <= 1
    assert sent["int8"] == pytest.approx(15 / 16 * (2 + 1 + again), rel=0.01)
    assert sent["copy"] == pytest.approx(15 / 16 * (2 + 2) + 7 / 8 * 2 * again, rel=0.01)
    assert sent["both"] == pytest.approx(15 / 16 * (2 + 1) + 7 / 8 * again, rel=0.01)
    weights = {name: plan["memory_per_rank"]["cuda"]["weights"] / plan["model"]["parameters"] for name, plan in said.items()}
    assert weights["plain"] == weights["int8"] == pytest.approx(2 / 16, rel=0.01)
    assert weights["copy"] == weights["both"] == pytest.approx(2 / 16 + 2 / 8, rel=0.01)


def test_it_is_explained_anywhere_and_trained_on_cuda(corpus, tmp_path, monkeypatch):
    assert explained("--ranks", "16")["needs"][0].endswith(f"'{ZERO}.zero_quantized_weights' needs CUDA")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    line = helpers.refused_start(tmp_path / "runs", "--recipe", "recipes/zeropp", "--data", corpus)
    assert f"'{ZERO}.zero_quantized_weights' needs CUDA, and this is a cpu; leave it out" in line
