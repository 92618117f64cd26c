"""Techniques go together, pair by pair, or are refused with the reason, as the index of the recipes says."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from launch.config.flags import as_words
from launch.config.run_config import resolve
from launch.errors import UsageError
from recipes.curriculum_learning.technique import length_at
from recipes.progressive_layer_drop.technique import draws, keep_probabilities, theta_at
from recipes.random_ltd.technique import reserved_length
from recipes.registry import make_techniques, technique_classes
from recipes.technique import planned_steps
from tests.distributed.parity import largest_difference

STEPS, BATCH, SEED = 6, 8, 7
SHAPE = {"n_layer": 4, "n_head": 2, "d_model": 64, "seq_len": 64}
#: The modern one has one head of keys and values, a gated MLP and norms of queries and keys.
MODELS = {
    "gpt2": [],
    "qwen3": ["--architecture", "qwen3", "--n_kv_head", "1", "--d_ff", "128"],
    "qwen3_moe": ["--architecture", "qwen3_moe", "--n_kv_head", "1", "--d_expert", "64"],
}
LTD = {"min_value": 16, "max_value": 64, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 20, "seq_per_step": 16}}
CURRICULUM = {"min_difficulty": 16, "max_difficulty": 64, "schedule_type": "fixed_linear"}
CURRICULUM |= {"schedule_config": {"total_curriculum_step": 8, "difficulty_step": 16}}
#: Three renewals of the variance; exchanges after steps 4 and 6.
ZERO_ONE = {"var_freeze_step": 3, "var_update_scaler": 3, "local_step_scaler": 1, "local_step_clipper": 2}
#: Every technique with values that act in six steps.
SECTIONS = {
    "activation_checkpointing": {"number_checkpoints": 2},
    "batch_size_warmup": {"min_batch_size": 4, "increment": 2, "warmup_tokens": 1024},
    "curriculum_learning": CURRICULUM,
    "fused_kernels": {"attention": True, "cross_entropy": True},
    "lamb": {"type": "Lamb", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
    "mixture_of_experts": {"coefficient": 0.1},
    "muon": {"type": "Muon", "params": {"lr": "auto", "betas": [0.9, 0.95], "ns_dtype": "fp32"}},
    "one_bit_adam": {"type": "OneBitAdam", "params": {"lr": "auto", "betas": [0.9, 0.95], "freeze_step": 3}},
    "one_bit_lamb": {"type": "OneBitLamb", "params": {"lr": "auto", "betas": [0.9, 0.95], "freeze_step": 3}},
    "progressive_layer_drop": {"theta": 0.3, "gamma": 1.0},
    "random_ltd": {"random_ltd_schedule": LTD},
    "sequence_parallel": 2,
    "sequence_tiling": {"tile": 50},
    "zero_one_adam": {"type": "ZeroOneAdam", "params": {"lr": "auto", "betas": [0.9, 0.95], **ZERO_ONE}},
}
CLASSES = {cls.__module__.split(".")[1]: cls for cls in technique_classes()}
#: What is in the place of AdamW, and what trains the same whole gradients.
UNCOMPRESSED = {"lamb": "lamb", "muon": "muon", "one_bit_adam": None, "one_bit_lamb": "lamb", "zero_one_adam": None}
COMPRESSED = {name for name, other in UNCOMPRESSED.items() if name != other}
#: What one rank trains the same without.
ALONE = UNCOMPRESSED | {"sequence_parallel": None}
#: A JSON has one optimizer.
PAIRS = [pair for pair in itertools.combinations(SECTIONS, 2) if not set(pair) <= set(UNCOMPRESSED)]
TOGETHER = [pair for pair in PAIRS if not CLASSES[pair[0]].declaration.shared_with(CLASSES[pair[1]].declaration)]


def flags(corpus, tmp_path, run_name: str, *names: str, stage: int = 2, micro_batch_size: int = 2) -> list[str]:
    values = {**SHAPE, "data": corpus, "runs_dir": tmp_path, "run_name": run_name, "steps": STEPS, "seed": SEED, "lr": 1e-3}
    values |= {"warmup_steps": 2, "global_batch_size": BATCH, "micro_batch_size": micro_batch_size, "eval_every": 0, "save_every": 0}
    run = ["--deepspeed_config", f"ds_configs/zero{0 if set(names) & set(UNCOMPRESSED) else stage}_fp32.json"]
    run += as_words(values)
    keys = {name: "optimizer" if name in UNCOMPRESSED else CLASSES[name].declaration.section for name in names}
    return run + [text for name, key in keys.items() for text in ("--set", f"{key}={json.dumps(SECTIONS[name])}")]


def test_every_technique_is_here():
    """What only CUDA can do is held by its own tests, with the others where it can be emulated."""
    assert set(SECTIONS) == {name for name, cls in CLASSES.items() if not cls.needs_cuda}


#: The pairs whose schedules meet in one place: in the shape of the batch, in the blocks, and in the compressed optimizer.
QUICK = {
    ("batch_size_warmup", "curriculum_learning"),
    ("activation_checkpointing", "progressive_layer_drop"),
    ("curriculum_learning", "zero_one_adam"),
}


def flags_of_model(pair: tuple[str, str]) -> list[str]:
    return MODELS["gpt2" if pair in QUICK else "qwen3_moe" if "mixture_of_experts" in pair else "qwen3"]


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=[] if pair in QUICK else [pytest.mark.long], id=" and ".join(pair)) for pair in TOGETHER]
)
def test_two_techniques_both_act(pair, one_rank, two_ranks, corpus, tmp_path):
    """Each step has what both schedules say, and what was planned. Another stage on another number of ranks, cut otherwise, trains the
    same; what compresses up to the first step that it compresses, and nearly the same from there."""
    model = flags_of_model(pair)
    run = flags(corpus, tmp_path, "r", *pair) + model
    config, _ = resolve([*run, "--ranks", "2"])
    plan = list(planned_steps(config, make_techniques(config)))
    lines = two_ranks.train(run)
    assert len(lines) == len(plan)
    for line in lines:
        step = line["step"]
        length = SHAPE["seq_len"]
        if "curriculum_learning" in pair:
            length = line["seq_len"]
            assert length == length_at(step, CURRICULUM)
        if "progressive_layer_drop" in pair:
            keeps = keep_probabilities(theta_at(step, 0.3, 1.0), SHAPE["n_layer"])
            assert line["kept_blocks"] == sum(number < p for number, p in zip(draws(SEED, step, 4), keeps, strict=True))
        if "random_ltd" in pair:
            assert line["reserved_length"] == min(length, reserved_length(step, LTD))
        before = lines[step - 2]["tokens"] if step > 1 else 0
        planned = plan[step - 1]
        assert (planned.number, planned.consumed) == (step, line["tokens"])
        assert all(line[key] == value for key, value in planned.reported.items())
        assert line["tokens"] - before == line.get("batch_size", BATCH) * length
    if "batch_size_warmup" in pair:
        assert {line["batch_size"] for line in lines} >= {4, 6, 8}
    if compresses := COMPRESSED & set(pair):
        if "zero_one_adam" in pair:
            acts = [(line["variance_updated"], line["exchanged"]) for line in lines[:6]]
            assert acts == [(1, 1), (1, 1), (1, 1), (0, 1), (0, 0), (0, 1)]
        else:
            assert [line["compressed"] for line in lines] == [int(line["step"] > 3) for line in lines]
        assert lines[-1]["bytes_sent"] < lines[0]["bytes_sent"] / (25 if "sequence_parallel" not in pair else 1)
    alone = [other for name in pair if (other := ALONE.get(name, name))]
    other = one_rank.train(flags(corpus, tmp_path, "other", *alone, stage=0, micro_batch_size=4) + model)
    losses, others = ([line["loss"] for line in run] for run in (lines, other))
    same = 4 if compresses else len(lines)  # the fourth step's loss is that of three updates
    # 0/1 Adam corrects the variance of a position that came late by its own number of renewals. Where the sums have another order, one of
    # 4,096 choices of an expert in the second step is another, which was counted.
    apart = {"zero_one_adam", "curriculum_learning"} == set(pair) or "mixture_of_experts" in pair
    assert largest_difference(losses[:same], others[:same]) <= (1e-4 if apart else 1e-5)
    assert largest_difference(losses, others) <= 0.1


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in TOGETHER], ids=" and ".join)
def test_two_that_control_the_same_are_refused(pair, corpus, tmp_path):
    with pytest.raises(UsageError) as mistake:
        resolve([*flags(corpus, tmp_path, "r", *pair), "--ranks", "2"])
    (fault,) = mistake.value.faults
    assert re.search("both control (which|whether) .*; switch one of them off", fault)
    assert all(CLASSES[name].declaration.name in fault for name in pair)


def test_all_that_go_together_go_together(two_ranks, corpus, tmp_path):
    names = [name for name in SECTIONS if name == "one_bit_adam" or name not in {"random_ltd", *UNCOMPRESSED}]
    lines = two_ranks.train(flags(corpus, tmp_path, "r", *names) + MODELS["qwen3_moe"])
    found = {key: {line[key] for line in lines} for key in ("theta", "kept_blocks", "seq_len", "batch_size", "compressed")}
    assert {key: len(values) >= 2 for key, values in found.items()} == dict.fromkeys(found, True)


def test_a_fault_of_each_technique_is_a_line_of_its_own(corpus, tmp_path):
    wrong = ["batch_size_warmup.min_batch_size=64", "curriculum_learning.min_difficulty=9999", "random_ltd.random_ltd_layer_id=[99]"]
    with pytest.raises(UsageError) as mistake:
        resolve([*flags(corpus, tmp_path, "r"), *(text for setting in wrong for text in ("--set", setting))])
    assert len(mistake.value.faults) == 3
    for fault, setting in zip(mistake.value.faults, wrong, strict=True):
        assert setting.partition("=")[0] in fault
