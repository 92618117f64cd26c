"""The time of a plan: published rows of others, our own measurements, and the rules of what overlaps."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import plan
from launch.config.flags import whole_number
from launch.formats.hf_folder import _config
from model.accounting import known_device, parameter_count, peak_flops
from model.presets import PRESETS, GPTConfig, shape_of
from tests.commands import run_script
from tests.helpers import explained, refusal, refusal_of, run_here

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = json.loads((ROOT / "benchmarks" / "published.json").read_text(encoding="utf-8"))
MEASURED = json.loads((ROOT / "benchmarks" / "gpu" / "utilization.json").read_text(encoding="utf-8"))


def planned(*flags: str) -> dict[str, Any]:
    """The columns of `launch/plan.py`, or the only one."""
    done = run_here(plan.main, *" ".join(flags).split(), "--json")
    assert done.returncode == 0, done.stderr
    columns = json.loads(done.stdout)["columns"]
    return columns if len(columns) > 1 else next(iter(columns.values()))


def predictions(table: dict[str, Any]) -> list[float]:
    """The rows of a published table, predicted with the MFU of its first."""
    unit, first = table["unit"], table["from"]
    at_peak = planned(table["flags"], first["flags"], "--mfu 1")["time"][unit]
    mfu = at_peak / first["published"] if unit == "days" else first["published"] / at_peak
    return [planned(table["flags"], row["flags"], f"--mfu {mfu}")["time"][unit] for row in table["rows"]]


LONG = "Megatron-LM, GPT on A100"  # 3,072 ranks


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name == LONG)) for name in PUBLISHED])
def test_one_published_row_predicts_the_others(name):
    table = PUBLISHED[name]
    page = (ROOT / "benchmarks" / "published.md").read_text(encoding="utf-8")
    for row, prediction in zip(table["rows"], predictions(table), strict=True):
        assert prediction == pytest.approx(row["published"], rel=table["within"]), row["what"]
        digits = f"{prediction:.3g} days" if table["unit"] == "days" else f"{prediction:,.0f}"
        cells = f" | {digits} | {prediction / row['published'] - 1:+.1%} |"
        assert re.search(rf"\| {re.escape(row['what'])} \|.*{re.escape(cells)}", page), cells


def test_gpt2_medium_on_the_h200_follows_from_gpt2():
    small, medium = (MEASURED[f"{preset}, bf16"][-1] for preset in ("gpt2", "gpt2-medium"))
    flags = "--recipe recipes/fused_kernels --preset gpt2-medium --global_batch_size 32 --micro_batch_size 32 --device h200"
    time = planned(flags, f"--vocab_size 50257 --mfu {small['mfu']}")["time"]
    assert time["step_seconds"] * 1e3 == pytest.approx(medium["engine"]["median_ms"], rel=0.1)


#: Median seconds of a step of `micro` on two simulated hosts of one core, at 100 and at 1,000 Mbit/s (benchmark `slow_network` in
#: benchmarks/results.md).
COMPRESSED = "--recipe recipes/one_bit_adam --set optimizer.params.freeze_step=2"
SLOW_NETWORK = {
    "fp32": {"--recipe recipes/fp32": (5.6213, 1.4031), f"{COMPRESSED} --set bf16.enabled=false": (1.1449, 0.9693)},
    "bf16": {"--recipe recipes/fp32 --set bf16.enabled=true": (2.699, 0.5999), COMPRESSED: (0.5902, 0.4143)},
}


@pytest.mark.parametrize("precision", SLOW_NETWORK)
def test_a_slow_network_takes_the_planned_seconds(precision):
    """The time of AdamW's step at 1 Gbit/s, without its planned communication, predicts the other three steps."""
    run = "--set zero_optimization.stage=0 --preset micro --vocab_size 8192 --gpus 2 --micro_batch_size 4 --global_batch_size 8"
    flags = f"{run} --tokens 20M --device h100 --interconnect"
    seconds = {
        technique: [planned(technique, f"{flags} {rate}mbit")["time"]["communication_seconds"] for rate in (100, 1000)]
        for technique in SLOW_NETWORK[precision]
    }
    adamw, compressed = SLOW_NETWORK[precision]
    without = SLOW_NETWORK[precision][adamw][1] - seconds[adamw][1]
    for technique, measured in SLOW_NETWORK[precision].items():
        for communication, step in zip(seconds[technique], measured, strict=True):
            print(technique, step, without + communication)
            assert without + communication == pytest.approx(step, rel=0.25)
    assert seconds[compressed][0] < seconds[adamw][0] / 15


def test_what_overlaps_is_not_added():
    """By hand, for 32 ranks and 2 micro-batches: N parameters of 2 bytes, 31/32 of them over the network for each pass over the ring."""
    flags = (
        "--preset gpt2-xl --gpus 32 --global_batch_size 256 --micro_batch_size 4 --device a100 --mfu 0.5 --vocab_size 50257 --interconnect"
    )
    slow, fast = (planned(f"{flags} {rate}") for rate in ("1gbit", "10tbit"))
    for column in slow.values():
        time = column["time"]
        assert time["communication_seconds"] == pytest.approx(8 * column["sent"] / 1e9)
        assert time["step_seconds"] == pytest.approx(
            time["arithmetic_seconds"] + time["communication_seconds"] - time["overlapped_seconds"]
        )
        assert time["gpu_hours"] == pytest.approx(24 * 32 * time["days"])
    hidden = {name: column["time"]["overlapped_seconds"] / column["time"]["arithmetic_seconds"] for name, column in slow.items()}
    assert hidden == {"ZeRO 0": 0, "ZeRO 1": 0, "ZeRO 2": pytest.approx(2 / 3), "ZeRO 3": 1}
    # On a fast network everything that can overlap does: at stage 2 all but the gather of the weights, at stage 3 all.
    N, left = parameter_count(GPTConfig(**vars(PRESETS["gpt2-xl"].shape), vocab_size=50_257)), {}
    for name, column in fast.items():
        left[name] = column["time"]["communication_seconds"] - column["time"]["overlapped_seconds"]
    assert left["ZeRO 2"] == pytest.approx(8 * 2 * N * 31 / 32 / 1e13, rel=1e-3)
    assert left["ZeRO 3"] == pytest.approx(0, abs=1e-12)


def test_exchanged_slices_are_not_hidden():
    """By hand, of a step of 32 x 131,072 tokens on 16 ranks: each sends 7/8 of queries, keys, values and results, three times."""
    flags = "--recipe recipes/activation_checkpointing --preset llama3.1-8b --gpus 16 --device h100 --mfu 0.5 --interconnect 10tbit"
    flags += " --set sequence_parallel_size=8 --set zero_optimization.stage=3 --set zero_optimization.overlap_comm=true"
    exchanged = 32 * 131_072 / 16 * 32 * (2 * 32 + 2 * 8) * 128 * 2 * 3 * 7 / 8
    for link, rate in (("", 1e13), ("--gpu_link 1tbit", 1e12)):
        time = planned(flags, link)["time"]
        assert time["communication_seconds"] - time["overlapped_seconds"] == pytest.approx(8 * exchanged / rate)
        assert time["step_seconds"] == pytest.approx(time["arithmetic_seconds"] + 8 * exchanged / rate)


def test_explain_plans_the_time_and_names_the_mfu():
    flags = ["--recipe", "recipes/zero_2", "--preset", "llama3-8b", "--tokens", "1T", "--gpus", "16", "--device", "h100"]
    page = explained(*flags)
    assert page["run"]["ranks"]["value"] == 16
    assert page["hardware"]["assumed"] == "MFU 0.468 (measured: gpt2-medium, bf16, one NVIDIA H200)"
    arithmetic = page["flops"]["run"] / 16 / (989.4e12 * MEASURED["gpt2-medium, bf16"][-1]["mfu"])
    assert page["time"]["days"] * 86_400 == pytest.approx(arithmetic)
    assert explained(*flags, "--mfu", "0.4")["hardware"]["assumed"] == "MFU 0.4 (--mfu)"
    assert explained(*flags[:4])["time"] is None


def test_the_commands_print_days_and_hide_defaults(tmp_path):
    run = [
        "--data",
        str(tmp_path),
        "--recipe",
        "recipes/zero_2",
        "--preset",
        "llama3-8b",
        "--tokens",
        "1T",
        "--gpus",
        "16",
        "--device",
        "h100",
    ]
    pages = [run_script("launch/pretrain.py", *run, "--explain", *more).stdout for more in ((), ("full",))]
    assert ["sub_group_size" in page for page in pages] == [False, True]
    pages.append(run_script("launch/plan.py", *run, "--interconnect", "400gbit").stdout)
    for page in pages:
        assert "Time of 1,000,001,765,376 tokens on 16 x H100 HBM3, 989.4 TFLOP/s in bf16\n" in page
        assert re.search(r"^  days +90\.5$|^  days +91\.4$", page, re.M), page


def test_a_number_of_tokens_may_have_a_suffix():
    tokens = whole_number(1, 10**18)
    assert [tokens(text) for text in ("1T", "1.4T", "300B", "2e9", "17")] == [10**12, 14 * 10**11, 3 * 10**11, 2 * 10**9, 17]
    for text in ("1.5", "1X", "0.0001K", "1t", "T"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            tokens(text)


def test_recomputed_activations_take_time():
    flags = "--preset gpt2 --gpus 8 --device a100 --mfu 0.5 --vocab_size 50257 --recipe recipes/zero_1"
    plain, recomputed = (planned(flags, more) for more in ("", "--set activation_checkpointing.enabled=true"))
    assert 1.2 < recomputed["time"]["step_seconds"] / plain["time"]["step_seconds"] < 4 / 3


def test_what_cannot_be_planned_is_refused():
    assert "name it too, for example --device h100" in refusal("--recipe", "recipes/zero_1", "--mfu", "0.4")
    assert "is no known device; known are cuda, cpu" in refusal("--recipe", "recipes/zero_1", "--device", "h1000")
    assert "it has no bf16" in refusal_of(plan.main, "--device", "v100")
    assert "write 100mbit, 25gbit or 3.2tbit" in refusal_of(plan.main, "--device", "h100", "--interconnect", "400")
    for device in ((), ("--device", "cpu")):
        assert "--tokens 1,000,000 plans the time on a GPU; name one" in refusal_of(plan.main, "--tokens", "1M", *device)
    assert "a recipe has its own" in refusal_of(plan.main, "--recipe", "recipes/zero_1", "--precision", "fp32")


def test_a_device_is_found_by_its_name():
    named = {name: peak_flops(known_device(name) or "", "fp16") for name in ("h100", "H100-PCIe", "a100", "h200", "rtx 4090", "4090")}
    assert named == {"h100": 989.4e12, "H100-PCIe": 756e12, "a100": 312e12, "h200": 989.4e12, "rtx 4090": 165.2e12, "4090": 165.2e12}
    assert [known_device(name) for name in ("", "rtx", "nvl", "h1000")] == [None] * 4


#: config.json of huggyllama/llama-7b, meta-llama/Meta-Llama-3-8B, meta-llama/Llama-3.1-8B, Qwen/Qwen3-8B and Qwen/Qwen3-0.6B, and their
#: parameters.
LLAMA = {"model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}
QWEN3 |= {"vocab_size": 151936, "max_position_embeddings": 40960}
MODELS = {
    "llama-7b": (
        LLAMA | {"intermediate_size": 11008, "rms_norm_eps": 1e-6, "vocab_size": 32000, "max_position_embeddings": 2048},
        6_738_415_616,
    ),
    "llama3-8b": (
        {**LLAMA, "intermediate_size": 14336, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_key_value_heads": 8}
        | {"vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False},
        8_030_261_248,
    ),
    # Without its rope_scaling.
    "llama3.1-8b": (
        {**LLAMA, "intermediate_size": 14336, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_key_value_heads": 8}
        | {"vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False},
        8_030_261_248,
    ),
    "qwen3-8b": (
        {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"tie_word_embeddings": False},
        8_190_735_360,
    ),
    "qwen3-0.6b": (
        {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
        | {"tie_word_embeddings": True},
        596_049_920,
    ),
}


@pytest.mark.parametrize("preset", MODELS)
def test_published_models_have_their_shape_and_parameters(preset):
    content, parameters = MODELS[preset]
    values = PRESETS[preset]
    shape = shape_of(values.shape, values.architecture, values.published)
    model = GPTConfig(**vars(shape), vocab_size=values.vocab_size)
    assert model == replace(_config(content), seq_len=shape.seq_len)
    assert shape.seq_len <= content["max_position_embeddings"]
    assert parameter_count(model) == parameters
    # 20 tokens per parameter.
    assert values.steps * values.global_batch_size * shape.seq_len / parameters == pytest.approx(20, rel=0.002)


def test_a_published_model_can_be_changed(tmp_path):
    flags = ["--recipe", "recipes/zero_1", "--data", str(tmp_path), "--preset", "qwen3-0.6b"]
    page = explained(*flags, "--d_ff", "1024")
    assert page["run"]["architecture"] == {"value": "qwen3", "from": "preset qwen3-0.6b"}
    assert page["run"]["d_head"] == {"value": 128, "from": "preset qwen3-0.6b"}
    assert page["run"]["d_ff"] == {"value": 1024, "from": "--d_ff"}
    assert page["model"]["vocab_size"] == 151_936
    other = explained(*flags, "--architecture", "llama")["run"]
    assert (other["d_head"]["value"], other["d_head"]["from"]) == (64, "architecture llama")


def test_many_sums_in_bf16_are_noted(tmp_path):
    flags = ["--recipe", "recipes/zero_1", "--data", str(tmp_path), "--micro_batch_size", "1", "--global_batch_size"]
    assert not explained(*flags, "256")["notes"]
    (note,) = explained(*flags, "257")["notes"]
    assert note.startswith("the gradients of 257 micro-batches are summed in bf16")
    for change in ("data_types.grad_accum_dtype=fp32", "bf16.enabled=false"):
        assert not explained(*flags, "257", "--set", change)["notes"]
