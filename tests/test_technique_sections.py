"""What a technique's part of the JSON may say: a mistake is one line and exit code 2, and the forms that DeepSpeed documented are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers import ROOT, explained, refusal

OPTIMIZERS = ("lamb", "one_bit_adam", "one_bit_lamb", "zero_one_adam", "muon")
#: Recipe -> where its keys are, and the flags of the run. Without a corpus, GPT-2's vocabulary is assumed.
PLACES: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(OPTIMIZERS, ("optimizer.params", ("--ranks", "2", "--steps", "400"))),
    **{
        name: (name, ("--seq_len", "128"))
        for name in ("curriculum_learning", "random_ltd", "progressive_layer_drop", "fp8", "fused_kernels", "sequence_tiling")
    },
    "batch_size_warmup": ("batch_size_warmup", ("--ranks", "2")),
    "activation_checkpointing": ("activation_checkpointing", ("--n_layer", "5")),
}
BETAS = "write two numbers from 0 to below 1"
#: Recipe -> settings, several of them separated by a space -> words of the message, without quotation marks.
REFUSED: dict[str, dict[str, str]] = {
    "lamb": {
        "max_coeff=0": "is 0; max_coeff must be above 0 and at least min_coeff",
        "max_coeff=-1": "is -1; write 0 or more",
        "min_coeff=11": "is 10; max_coeff must be above 0 and at least min_coeff",
        "min_coeff=1e7": "write 1000000 or less",
        "max_coeff=Infinity": "must be finite and below 2^63",
        'max_coeff="auto"': '"auto" has no meaning here',
        "amsgrad=true": "is true; write false",
        "lr=0": "is 0",
    },
    "one_bit_lamb": {
        "factor_max=0": "is 0; factor_max must be above 0 and at least factor_min",
        "factor_min=5": "is 4; factor_max must be above 0 and at least factor_min",
        "factor_threshold=-0.1": "is -0.1; write 0 or more",
        "coeff_beta=1": "is 1; write 0.999999 or less",
    },
    "one_bit_adam": {
        "freeze_step=400": "acts from step 401 on, but the run ends at step 400; lower it",
        "freeze_step=0": "is 0; write 1 or more",
        "freeze_step=1.5": "is 1.5; write a whole number",
        "freezestep=80": "did you mean freeze_step?",
        "betas=[-0.1,0.99]": BETAS,
        "betas=[0.9]": BETAS,
        "max_grad_norm=1": "it belongs to gradient_clipping",
        "comm_backend_name=7": "is 7; write a string",
    },
    "zero_one_adam": {
        **{
            f"{key}=0": "is 0; write 1 or more"
            for key in ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
        },
        "betas=[0.9,1.0]": BETAS,
        "freeze_step=80": "unknown key",
        "eps_inside_sqrt=true": "is true; write false",
    },
    "muon": {"momentum=1": "optimizer.params.momentum"},
    "curriculum_learning": {
        "min_difficulty=200": "min_difficulty is 200, above max_difficulty, 128",
        "max_difficulty=256": "max_difficulty is 256, above seq_len, 128",
        "min_difficulty=0": "min_difficulty is 0; write 1 or more",
        "schedule_config.difficulty_step=24": "does not divide max_difficulty, 128",
        "schedule_type=cubic": 'write one of "fixed_linear", "fixed_root", "fixed_discrete"',
        "schedule_type=fixed_root": "root_degree must be a number above 0",
        "schedule_config.root_degree=2": "has no effect with fixed_linear",
        'schedule_type=fixed_discrete schedule_config={"difficulty":[8,16],"max_step":[3,5]}': "one rising step fewer",
        'schedule_type=fixed_discrete schedule_config={"difficulty":[8,16,32],"max_step":[5,3]}': "one rising step fewer",
        'schedule_type=fixed_discrete schedule_config={"difficulty":[8,160],"max_step":[5]}': "lengths from 1 to seq_len, 128",
    },
    "random_ltd": {
        "random_ltd_layer_id=[1,4]": "random_ltd_layer_id is [1, 4]; name some of the blocks 0 to 3, each once",
        "random_ltd_layer_id=[1,2,1]": "each once",
        "random_ltd_layer_id=[1.5]": "write a list of integers",
        "model_type=encoder": 'model_type is "encoder"; write "decoder"',
        "random_ltd_schedule.min_value=256": "min_value is 256, above max_value, 128; lower it",
        "random_ltd_schedule.max_value=256": "max_value is 256, but a sequence has 128 tokens",
        "random_ltd_schedule.schedule_config.seq_per_step=48": "does not divide max_value, 128; write a divisor",
        "random_ltd_schedule.schedule_config.seq_per_step=16 random_ltd_schedule.min_value=40": "does not divide min_value, 40",
        "random_ltd_schedule.minvalue=64": "did you mean min_value?",
    },
    "progressive_layer_drop": {
        "theta=1.5": "theta is 1.5; write 1 or less",
        "gamma=-0.001": "gamma is -0.001; write 0 or more",
        "gamma=[1]": "gamma is [1]; write a number",
    },
    "batch_size_warmup": {
        "min_batch_size=3": "min_batch_size is 3, which 2 ranks cannot share evenly; write a multiple of 2",
        "min_batch_size=64": "min_batch_size is 64, above the global batch of 32; lower it, or raise --global_batch_size",
        "min_batch_size=8 increment=10": "increment is 10, which does not divide the 24 sequences from 8 to 32; write a divisor",
        "warmup_tokens=512001": "warmup_tokens is 512001, but the run has 512000; lower it, or raise --steps",
        "increments=8": "increments: unknown key; did you mean increment?",
    },
    "fp8": {"scaling=blockwise": 'is "blockwise"; write one of "tensorwise", "rowwise", "rowwise_with_gw_hp"'},
    "sequence_tiling": {"tile=0": "tile is 0; write 1 or more", "tiles=4": "tiles: unknown key; did you mean tile?"},
    "fused_kernels": {"attention=flash": 'attention is "flash"; write one of true, false, or "auto"'},
    "activation_checkpointing": {"number_checkpoints=6": "is 6, but the model has 5 blocks; write at most 5"},
}


@pytest.mark.parametrize(("recipe", "settings"), [(recipe, settings) for recipe, faults in REFUSED.items() for settings in faults])
def test_a_value_that_cannot_be_is_one_line(recipe, settings):
    place, flags = PLACES[recipe]
    words = [word for setting in settings.split() for word in ("--set", f"{place}.{setting}")]
    line = refusal("--recipe", f"recipes/{recipe}", "--data", "no/corpus", *flags, *words)
    assert REFUSED[recipe][settings] in line.replace("'", "") and place in line


STEPWISE = ("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 10}})
OTHERS: dict[str, tuple[tuple[str, Any], str]] = {
    **{
        f"{name}, schedule": (STEPWISE, "counts steps of equal size; use WarmupCosineTokens")
        for name in ("curriculum_learning", "batch_size_warmup")
    },
    "random_ltd, blocks": (("progressive_layer_drop.theta", 0.5), "both control which blocks see which tokens"),
    "lamb, stage": (("zero_optimization.stage", 1), "is 1, but Lamb takes the norms of whole tensors; write 0, or use AdamW"),
    **{
        f"{name}, stage": (("zero_optimization.stage", 2), "compresses the momentum of the whole model on every rank; write 0")
        for name in ("one_bit_adam", "one_bit_lamb", "zero_one_adam")
    },
    "one_bit_adam, sum": (("gradient_allreduce_op", "sum"), 'is "sum", so training would depend on the number of ranks'),
    "fp8, precision": (("bf16.enabled", False), "fp8 is for bf16 runs, and this run is in fp32; use the bf16 JSON of the same stage"),
    "fp8, stage": (("zero_optimization.stage", 3), 'add "activation_checkpointing": {"enabled": true}, or use stage 2'),
    "fp8, tf32": (("tf32.enabled", True), "--set tf32 is for fp32 runs, and this run is in bf16"),
    "fused_kernels, nothing": (("fused_kernels", {}), "switches no kernel on"),
    "fused_kernels, type": (
        ("fused_kernels", ["auto"]),
        'is ["auto"]; write an object with keys such as enabled, attention, cross_entropy, or "auto"',
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_does_not_go_together_is_one_line(case):
    recipe, ((key, value), words) = case.partition(",")[0], OTHERS[case]
    line = refusal("--recipe", f"recipes/{recipe}", "--data", "no/corpus", *PLACES[recipe][1], "--set", f"{key}={json.dumps(value)}")
    assert words in line.replace("'", "")


UPSTREAM = {"cuda_aware": True, "comm_backend_name": "nccl", "weight_decay": 0.01, "bias_correction": False}
LINEAR = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 15000, "difficulty_step": 8}}
SEQLEN = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 1024}
#: From DeepSpeed's documentation of its last versions that had the technique: section -> values, then words of the notes.
DOCUMENTED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "lamb": ("optimizer", {"lr": 2e-3, "weight_decay": 0.01, "max_coeff": 0.3, "min_coeff": 0.01, "amsgrad": False}, []),
    "one_bit_adam": ("optimizer", {"lr": 1e-3, "freeze_step": 100, **UPSTREAM}, ["cuda_aware has no effect here", "100 steps of Adam"]),
    "one_bit_lamb": (
        "optimizer",
        {"lr": 11e-3, "freeze_step": 100, "max_coeff": 0.3, "factor_max": 4.0, "factor_threshold": 0.1, "amsgrad": False, **UPSTREAM},
        ["comm_backend_name has no effect here"],
    ),
    # 16 renewals one step apart, 16 each 2, 4 and 8 apart, and 10 of 16: 240 + 160. The run reaches no local step.
    "zero_one_adam": (
        "optimizer",
        {
            "lr": 1e-3,
            "var_freeze_step": 100_000,
            "var_update_scaler": 16,
            "local_step_scaler": 32_678,
            "local_step_clipper": 16,
            **UPSTREAM,
        },
        ["of 400 steps of whole batches, 74 update", "the last stage of its schedule begins at step 100,001, and the run ends at step 400"],
    ),
    "curriculum_learning": ("curriculum_learning", SEQLEN | LINEAR, ["sequences of 8 to 1024 tokens"]),
    "curriculum_learning, root": (
        "curriculum_learning",
        SEQLEN | {"schedule_type": "fixed_root", "schedule_config": {**LINEAR["schedule_config"], "root_degree": 2}},
        ["sequences of 16 to 1024 tokens"],
    ),
    "curriculum_learning, discrete": (
        "curriculum_learning",
        SEQLEN | {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1, 2, 3], "max_step": [5, 10]}},
        ["min_difficulty and max_difficulty have no effect", "sequences of 1 to 3 tokens"],
    ),
    "progressive_layer_drop": ("progressive_layer_drop", {"enabled": True, "theta": 0.5, "gamma": 0.001}, ["theta falls to"]),
    "random_ltd": (
        "random_ltd",
        {
            "enabled": True,
            "total_layer_num": 24,
            "random_ltd_layer_num": 22,
            "random_ltd_layer_id": list(range(1, 23)),
            "model_mask_name": "attention_mask",
            "model_type": "decoder",
            "hidden_state_order": "seq_batch_dim",
            "random_ltd_schedule": {
                "min_value": 128,
                "max_value": 1024,
                "schedule_type": "fixed_linear",
                "schedule_config": {"require_steps": 200_000, "seq_per_step": 16},
            },
        },
        ["22 of 24 blocks see 128 of 1024 tokens at first, 1024 from step 200,001 on", "model_mask_name has no effect here"],
    ),
}


@pytest.mark.parametrize("case", DOCUMENTED)
def test_the_documented_form_is_accepted(case):
    recipe, (section, values, words) = case.partition(",")[0], DOCUMENTED[case]
    flags = ["--ranks", "2", "--steps", "400"] if section == "optimizer" else ["--seq_len", "1024", "--n_layer", "24"]
    if section == "optimizer":
        kind = json.loads((ROOT / f"ds_configs/{recipe}.json").read_text())["optimizer"]["type"]
        values = {"type": kind, "params": values}
    said = explained("--recipe", f"recipes/{recipe}", "--data", "no/corpus", *flags, "--set", f"{section}={json.dumps(values)}")
    assert said["techniques"] == [recipe]
    assert all(any(word in note for note in said["notes"]) for word in words), said["notes"]
    if section == "optimizer":
        assert said["engine"]["optimizer.params.betas"] == {"value": [0.9, 0.999], "from": f"the default of {values['type']}"}


@pytest.mark.parametrize("recipe", ["one_bit_adam", "zero_one_adam"])
def test_one_rank_is_told_that_nothing_is_compressed(recipe):
    said = explained("--recipe", f"recipes/{recipe}", "--data", "no/corpus")
    assert any("one rank sends nothing" in note for note in said["notes"])


DATA_EFFICIENCY = {
    "random_ltd is read at the top level only; move it to random_ltd": ("data_routing", {"random_ltd": {"enabled": True}}),
    "curriculum_metrics is read at the top level only; move it to curriculum_learning": (
        "data_sampling",
        {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": {"min_difficulty": 64}}}},
    ),
}


@pytest.mark.parametrize("words", DATA_EFFICIENCY)
def test_a_section_in_data_efficiency_is_told_its_place(words):
    place, section = DATA_EFFICIENCY[words]
    run = ["--deepspeed_config", "ds_configs/zero1_bf16.json", "--data", "no/corpus", "--set"]
    on, off = (f"data_efficiency={json.dumps({'enabled': True, place: {'enabled': is_on, **section}})}" for is_on in (True, False))
    assert words in refusal(*run, on).replace("'", "")
    assert explained(*run, off)["techniques"] == []
