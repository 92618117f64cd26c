"""A modern GPT on its way from transformers to a trained one of ours, and back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from data_pipeline.shards import open_corpus
from launch.trained_model.load import open_trained
from model.hf import hf_config
from tests.commands import run_script
from tests.distributed.parity import SIZES, flags
from tests.helpers import config_of, exported, generate

#: In a fresh process without a line of ours: the loss of some rows, and a greedy text.
READER = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, rows = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.no_grad():
    logits = model(rows[:, :-1]).logits
    text = model.generate(rows[:1, :4], max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
print(json.dumps([type(model).__name__, str(model.dtype), float(loss), text.tolist()]))
"""
#: The shapes of published models, with fewer blocks and this corpus's vocabulary.
PUBLISHED = {
    "SmolLM2-135M": (
        "llama",
        {"n_layer": 2, "n_head": 9, "n_kv_head": 3, "d_model": 576, "d_ff": 1536, "seq_len": 64, "tied_head": True, "rope_theta": 1e5},
    ),
    "Qwen3-0.6B": ("qwen3", {"n_layer": 2, "n_head": 16, "n_kv_head": 8, "d_head": 128, "d_model": 1024, "d_ff": 3072, "seq_len": 64}),
    "small, with a head of its own": ("llama", {**SIZES, "seq_len": 64, "rope_theta": 5e5}),
    "experts": ("qwen3_moe", {**SIZES, "seq_len": 64, "n_expert": 4}),
    "experts of mixtral": ("mixtral", {**SIZES, "seq_len": 64}),
}
SMALL = "small, with a head of its own"


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(pytest.param(SMALL, precision, marks=pytest.mark.gate) for precision in ("fp32", "bf16")),
        *(pytest.param(name, "fp32", marks=pytest.mark.long) for name in ("SmolLM2-135M", "experts of mixtral")),
        *(pytest.param(name, "bf16", marks=pytest.mark.long) for name in ("Qwen3-0.6B", "experts")),
    ],
)
def test_a_folder_of_transformers_is_trained_further_and_read_by_transformers(name, precision, two_ranks, corpus, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture, fields = PUBLISHED[name]
    config = config_of(architecture, fields, vocab_size=open_corpus(corpus).vocab_size)
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(config)))
    theirs.save_pretrained(tmp_path / "theirs")
    given = {key: str(value).lower() for key, value in {"architecture": architecture, **fields}.items()}
    run = [*flags(corpus, tmp_path, given, "stage 3", 2, 1, precision), "--init_from", str(tmp_path / "theirs")]
    run += ["--steps", "2", "--warmup_steps", "1"]
    two_ranks.train(run)
    (tmp_path / "r").rename(tmp_path / "trained")
    out = exported(tmp_path / "trained", tmp_path / "out")
    model = open_trained(tmp_path / "trained").load_model()
    back = open_trained(out).load_model()
    for (key, ours), read in zip(model.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(ours, read), key
    rows = torch.randint(0, config.vocab_size, (2, 65), generator=torch.Generator().manual_seed(2))
    read_back = open_trained(tmp_path / "theirs").load_model()
    with torch.no_grad():
        assert float(model(rows[:, :-1], rows[:, 1:]) - read_back(rows[:, :-1], rows[:, 1:])) != 0, "nothing was trained"
    done = subprocess.run(
        [sys.executable, "-c", READER, str(out), json.dumps(rows.tolist())], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    kind, dtype, loss, text = json.loads(done.stdout.splitlines()[-1])
    assert (kind, dtype) == (type(theirs).__name__, "torch.float32")
    with torch.no_grad():
        assert loss == pytest.approx(float(model(rows[:, :-1], rows[:, 1:])), abs=1e-5)
    assert text == generate(model, rows[0, :4].tolist(), 50, config.seq_len, temperature=0)
    written = (out / "model.safetensors").stat().st_size
    assert written == pytest.approx(4 * sum(p.numel() for p in theirs.parameters()), rel=0.05), "a tied head is written once"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_there_and_back_in_another_precision(dtype, tmp_path):
    """Tensor for tensor, from a folder of transformers in that precision to one of ours."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    for architecture in ("llama", "qwen3", "mixtral", "qwen3_moe"):
        config = config_of(architecture, SIZES, vocab_size=200)
        torch.manual_seed(2)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(config)))
        theirs.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).save_pretrained(tmp_path / architecture / "in")
        out = tmp_path / architecture / "out"
        done = run_script("launch/export.py", tmp_path / architecture / "in", "--out", out)
        assert done.returncode == 0, done.stderr
        before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / architecture / "in", out))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
