"""Activation checkpointing changes memory and time, and no number: at every stage, with dropout, offload and dropped blocks."""

from __future__ import annotations

import itertools

import pytest

from launch.config.explain import explain
from launch.config.run_config import resolve
from recipes.activation_checkpointing.technique import ActivationCheckpointing
from recipes.registry import make_techniques
from recipes.technique import segment_bounds

SHAPE = ["--n_layer", "5", "--n_head", "2", "--d_model", "64", "--seq_len", "32", "--global_batch_size", "8", "--micro_batch_size", "2"]
EACH = "activation_checkpointing.enabled=true"
TWO = "activation_checkpointing.number_checkpoints=2"
ON_HOST = "activation_checkpointing.cpu_checkpointing=true"


def flags(corpus, tmp_path, config: str, name: str, *more: str, sets: tuple[str, ...] = ()) -> list[str]:
    run = ["--deepspeed_config", f"ds_configs/{config}.json", *SHAPE, "--data", str(corpus), "--runs_dir", str(tmp_path)]
    run += ["--run_name", name, "--steps", "4", "--lr", "1e-3", "--warmup_steps", "1", "--eval_every", "2", "--save_every", "0", *more]
    return [*run, *(part for change in sets for part in ("--set", change))]


@pytest.mark.parametrize(("segments", "n_layer"), itertools.combinations_with_replacement((1, 2, 5, 12, 48), 2))
def test_segments_are_consecutive_and_alike(n_layer, segments):
    bounds = segment_bounds(n_layer, segments)
    assert [bounds[0][0], bounds[-1][1]] == [0, n_layer]
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(bounds))
    lengths = [end - start for start, end in bounds]
    assert len(lengths) == segments
    assert 0 <= lengths[0] - lengths[-1] <= 1


def test_the_bounds_of_the_docstring():
    assert segment_bounds(12, 5) == [(0, 3), (3, 6), (6, 8), (8, 10), (10, 12)]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param("zero0_fp32", marks=pytest.mark.gate),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("zero1_bf16", "zero2_fp32", "zero3_bf16")),
    ],
)
def test_losses_are_those_without_it(config, two_ranks, corpus, tmp_path):
    """With dropout, whose masks the recomputation must draw again; bit for bit, in training and in evaluation."""

    def train(name: str, *sets: str) -> list[tuple]:
        run = flags(corpus, tmp_path, config, name, "--dropout", "0.1", sets=sets)
        lines = two_ranks.train(run)
        return [(line.get("loss"), line.get("grad_norm"), line.get("val_loss")) for line in lines]

    plain = train("plain")
    assert plain[-1][0] < plain[1][0]
    assert train("each", EACH) == plain
    assert train("two", TWO) == plain
    assert train("on_host", ON_HOST, TWO) == plain


def sections(corpus, tmp_path, *sets: str):
    return resolve(flags(corpus, tmp_path, "zero1_bf16", "r", sets=sets), ranks=2)[0]


@pytest.mark.parametrize(
    ("changes", "checkpoints"),
    [
        ((EACH,), 5),
        ((TWO,), 2),
        ((ON_HOST,), 5),
        ((TWO, "activation_checkpointing.enabled=false"), 0),
        (("activation_checkpointing.partition_activations=false", "activation_checkpointing.number_checkpoints=null"), 0),
        ((), 0),
    ],
)
def test_it_is_on_where_the_section_asks_for_something(changes, checkpoints, corpus, tmp_path):
    config = sections(corpus, tmp_path, *changes)
    assert make_techniques(config).checkpointed_segments == checkpoints
    assert "activation_checkpointing" not in config.ds_config
    assert config.notes == ()


def test_keys_without_effect_do_not_switch_it_on(corpus, tmp_path):
    config = sections(corpus, tmp_path, "activation_checkpointing.profile=true", "activation_checkpointing.partition_activations=true")
    assert make_techniques(config).checkpointed_segments == 0
    assert sum("has no effect here" in note for note in config.notes) == 2


def test_checkpoints_on_the_host_are_planned_there(corpus, tmp_path):
    on_device, on_host = (explain(sections(corpus, tmp_path / name, one)) for name, one in (("device", EACH), ("host", ON_HOST)))
    gpu, other = (one["memory_per_rank"]["cuda"] for one in (on_device, on_host))
    inputs = 5 * 2 * 32 * 64 * 2  # of five blocks: 2 sequences of 32 tokens of width 64 in bf16
    assert other["host"] - gpu["host"] == gpu["activations"] - other["activations"] == inputs
    assert other["peak"] <= gpu["peak"]
    assert on_device["memory_per_rank"]["cpu"] == on_host["memory_per_rank"]["cpu"]


@pytest.mark.parametrize("key", ActivationCheckpointing.declaration.ignored)
def test_a_documented_key_without_effect_is_accepted_with_a_word(key, corpus, tmp_path):
    config = sections(corpus, tmp_path, EACH, f"activation_checkpointing.{key}=true")
    (note,) = config.notes
    assert f"activation_checkpointing.{key} has no effect here and is left out: " in note
