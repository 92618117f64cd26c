"""What is exported is the model that was trained: any stage, offload, precision and recipe, read by transformers in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, exported, recipe_flags

JOB = "tests.distributed.export_jobs:pretrain_and_keep"
#: 64 tokens of context; two ranks do not share most tensors evenly (35 and 105 elements of a bias).
TINY = ["--n_layer", "2", "--n_head", "5", "--d_model", "35", "--seq_len", "64", "--global_batch_size", "4", "--micro_batch_size", "1"]
GRID = [f"zero{stage}_{precision}" for stage in range(4) for precision in ("fp32", "bf16", "fp16")]
QUICK = ["zero0_bf16", "zero3_fp32", "zero_one_adam"]
#: Of the JSONs that ship, those that train on two ranks on a CPU; zero_infinity builds async_io first.
RECIPES = [
    *("activation_checkpointing", "batch_size_warmup", "curriculum_learning", "fused_kernels", "gradient_accumulation", "lamb"),
    *("one_bit_adam", "one_bit_lamb", "progressive_layer_drop", "random_ltd", "zero_3_param_offload", "zero_offload"),
]
#: In a fresh process, without a line of ours: each folder by transformers, against logits and greedy text computed by nobody else's code
#: but this project's model with the live engine's weights.
READER = """
import json, sys, torch
from transformers import AutoModelForCausalLM
for folder, expected in json.loads(sys.argv[1]):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model).__name__ == "GPT2LMHeadModel" and model.dtype == torch.float32
    assert model.lm_head.weight is model.transformer.wte.weight
    expected = torch.load(expected)
    with torch.no_grad():
        difference = (model(expected["tokens"]).logits - expected["logits"]).abs().max()
        text = model.generate(expected["tokens"][:1, :4], max_new_tokens=50, do_sample=False, eos_token_id=None)[0]
    print(json.dumps([float(difference), text.tolist() == expected["text"]]))
"""


def flags(corpus: Path, runs: Path, name: str, *more: str) -> list[str]:
    file = ROOT / "ds_configs" / f"{name}.json"
    run = ["--deepspeed_config", f"ds_configs/{name}.json", *recipe_flags(file), *TINY, "--data", str(corpus), "--runs_dir", str(runs)]
    return [*run, "--run_name", name, "--steps", "4", "--lr", "1e-2", "--eval_every", "0", "--save_every", "0", *more]


def expectation(run: Path, model_config: Any) -> Path:
    """What the live engine's weights make of some tokens, in fp32, in a file."""
    import torch

    from model.gpt import GPT
    from tests.helpers import generate

    model = GPT(model_config).eval()
    live = torch.load(run / "live.pt")
    model.load_state_dict({**live, "lm_head.weight": live["wte.weight"]})
    tokens = torch.randint(0, model_config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = model(tokens)
    text = generate(model, tokens[0, :4].tolist(), 50, 64, temperature=0)
    torch.save({"tokens": tokens, "logits": logits, "text": text}, run / "expected.pt")
    return run / "expected.pt"


def check(two_ranks: Any, corpus: Path, tmp_path: Path, names: list[str]) -> None:
    """Train each, export it, read it elsewhere: the live engine's own numbers, bit for bit, and its text."""
    import torch

    from launch.trained_model.load import open_trained

    refused = two_ranks.run(JOB, runs=[flags(corpus, tmp_path, name) for name in names])[0]
    assert refused == [""] * len(names)
    pairs = []
    for name in names:
        trained = open_trained(tmp_path / name)
        live = torch.load(tmp_path / name / "live.pt")
        for key, parameter in trained.load_model().named_parameters():
            assert torch.equal(parameter, live[key]), f"{name}: {key}"
        out = exported(tmp_path / name, tmp_path / "exported" / name)
        pairs.append((str(out), str(expectation(tmp_path / name, trained.config))))
    done = subprocess.run([sys.executable, "-c", READER, json.dumps(pairs)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, (difference, same_text) in zip(names, map(json.loads, done.stdout.splitlines()), strict=True):
        assert difference < 1e-5, name
        assert same_text, name


def test_the_exported_model_is_that_of_the_live_engine(two_ranks, corpus, tmp_path):
    check(two_ranks, corpus, tmp_path, QUICK)


@pytest.mark.long
def test_of_every_stage_and_precision(two_ranks, corpus, tmp_path):
    check(two_ranks, corpus, tmp_path, GRID)


@pytest.mark.long
def test_of_every_recipe(two_ranks, corpus, tmp_path):
    check(two_ranks, corpus, tmp_path, RECIPES)


@pytest.mark.long
def test_of_weights_and_optimizer_on_a_drive(drive, two_ranks, corpus, tmp_path):
    # c_fc and c_proj are large enough for the drive (1 MiB of fp32), biases and norms are not; several sub-groups, each a file of its own.
    sizes = ["--d_model", "512", "--n_head", "4", "--set", "zero_optimization.sub_group_size=1000000"]
    run = [*flags(corpus, tmp_path, "zero_infinity", *sizes), "--set", "zero_optimization.offload_param.buffer_size=2000000"]
    assert two_ranks.run(JOB, runs=[run])[0] == [""]
    import torch

    from launch.trained_model.load import open_trained

    live = torch.load(tmp_path / "zero_infinity" / "live.pt")
    assert list((tmp_path / "zero_infinity").rglob("offloaded_tensors/rank01/*.swp"))
    for key, parameter in open_trained(tmp_path / "zero_infinity").load_model().named_parameters():
        assert torch.equal(parameter, live[key]), key


@pytest.mark.long
def test_there_and_back_nothing_changes(two_ranks, corpus, tmp_path):
    """Exported, taken as a start, trained by steps of nothing, exported: the same bytes, at each stage in bf16 too."""
    assert two_ranks.run(JOB, runs=[flags(corpus, tmp_path, "zero1_bf16")])[0] == [""]
    first = exported(tmp_path / "zero1_bf16", tmp_path / "first")
    weights = (first / "model.safetensors").read_bytes()
    names = ["zero0_bf16", "zero1_bf16", "zero3_bf16", "zero3_fp32", "zero_offload"]
    still = ["--init_from", str(first), "--lr", "1e-30", "--seed", "9"]
    runs = [flags(corpus, tmp_path / "back", name, *still) for name in names]
    assert two_ranks.run(JOB, runs=runs)[0] == [""] * len(names)
    for name in names:
        again = exported(tmp_path / "back" / name, tmp_path / "again" / name)
        assert (again / "model.safetensors").read_bytes() == weights, name
        assert (again / "config.json").read_bytes() == (first / "config.json").read_bytes()
    assert json.loads((tmp_path / "back" / names[0] / "run.json").read_text())["init_from"] == str(first)


def test_a_start_from_what_is_no_model_is_refused_at_every_stage(two_ranks, corpus, tmp_path):
    """A head of its own, and a weight that is not finite; by every rank, so that none waits for another."""
    from safetensors.torch import load_file, save_file

    assert two_ranks.run(JOB, runs=[flags(corpus, tmp_path, "zero1_fp32")])[0] == [""]
    folder = exported(tmp_path / "zero1_fp32", tmp_path / "folder")
    weights = load_file(folder / "model.safetensors")

    def refusals() -> list[list[str]]:
        """Of each rank, of stages 1 and 3; a refused run's name is free again."""
        save_file(weights, folder / "model.safetensors")
        starts = [flags(corpus, tmp_path / "refused", f"zero{stage}_fp32", "--init_from", str(folder)) for stage in (1, 3)]
        refused = two_ranks.run(JOB, runs=starts)
        assert not (tmp_path / "refused").exists()
        return refused

    weights["lm_head.weight"] = weights["transformer.wte.weight"] + 1
    assert all("lm_head.weight is not the token embedding" in reason for refused in refusals() for reason in refused)
    del weights["lm_head.weight"]
    weights["transformer.h.1.attn.c_proj.bias"][7] = float("nan")
    (*of_first, at_stage_3) = [reason for refused in refusals() for reason in refused]
    assert all("h.1.attn.c_proj.bias contains NaN or Inf" in reason for reason in of_first)
    assert "rank 0" in at_stage_3
