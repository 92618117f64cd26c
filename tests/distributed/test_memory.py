"""The plan of a step's memory and traffic is what engines really need: model states and activations within 2%, bytes sent exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data_pipeline.shards import open_corpus
from launch.config.memory import bytes_sent_per_step, memory_per_rank
from launch.config.run_config import resolve
from model.accounting import parameter_count
from model.gpt import GPT
from model.layout import Layout
from model.presets import GPTConfig
from tests.distributed.memory_jobs import PARTS
from tests.helpers import config_of

SHAPE = ["--n_layer", "3", "--n_head", "2", "--d_model", "128", "--seq_len", "32"]
STATES_WITHIN = 0.02


def flags(corpus, tmp_path, config: str, *more: str) -> list[str]:
    run = ["--deepspeed_config", f"ds_configs/{config}.json", "--data", str(corpus), "--runs_dir", str(tmp_path)]
    return [*run, "--eval_every", "0", "--save_every", "0", *more]


@pytest.mark.parametrize(("architecture", "dropout"), [("gpt2", 0.0), ("gpt2", 0.1), ("llama", 0.0), ("qwen3", 0.0)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_activations_of_a_block_are_what_autograd_saves(precision, architecture, dropout):
    sizes = {"n_layer": 3, "n_head": 4, "d_model": 64, "seq_len": 48, "dropout": dropout}
    model, B = config_of(architecture, sizes, vocab_size=100), 2
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    whole = GPT(model).to(dtype)
    block = whole.h[0]
    block.attn.layout = Layout(None, whole.wpe.rotation(torch.arange(48), dtype))
    x = torch.randn(B, 48, 64, dtype=dtype, requires_grad=True)
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = block(x)
    for known in (x, *block.parameters(), *(block.attn.layout.rotation or ())):
        saved.pop(known.untyped_storage().data_ptr(), None)
    saved[output.untyped_storage().data_ptr()] = output.untyped_storage().nbytes()  # which the next block saves
    plans = [
        memory_per_rank(replace(model, n_layer=layers), precision, {"stage": 0}, 1, B, device="cpu").parts["activations"]
        for layers in (2, 3)
    ]
    assert sum(saved.values()) == pytest.approx(plans[1] - plans[0], rel=STATES_WITHIN)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_states_are_those_of_the_engine(two_ranks, corpus, tmp_path, stage, precision, accumulation):
    batch = ["--micro_batch_size", "1", "--global_batch_size", str(2 * accumulation)]
    run = flags(corpus, tmp_path, f"zero{stage}_{precision}", *SHAPE, *batch)
    ranks = two_ranks.run("tests.distributed.memory_jobs:model_states", flags=run)
    # The plan is that of the rank that holds most; only gradients differ between ranks.
    for part in PARTS:
        measured, predicted = max(rank[part] for rank in ranks)
        assert measured == pytest.approx(predicted, rel=STATES_WITHIN, abs=4096), (part, measured, predicted)
    # What the garbage collector knows of besides: gathered weights and copies, batches.
    assert all(rank["not in a part"] <= rank["buffers"] + 4 * 2**20 for rank in ranks), ranks
    measured, predicted = (max(sum(rank[part][i] for part in PARTS) for rank in ranks) for i in (0, 1))
    assert measured == pytest.approx(predicted, rel=STATES_WITHIN)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 3)), 2])
def test_muon_keeps_one_state_of_hidden_matrices(two_ranks, corpus, tmp_path, stage):
    run = flags(corpus, tmp_path, "muon", *SHAPE, "--set", f"zero_optimization.stage={stage}", "--global_batch_size", "4")
    ranks = two_ranks.run("tests.distributed.memory_jobs:model_states", flags=run)
    for part in PARTS:
        measured, predicted = max(rank[part] for rank in ranks)
        assert measured == pytest.approx(predicted, rel=STATES_WITHIN), (part, measured, predicted)
    assert all(rank["optimizer_states"][0] < 1.6 * rank["master_weights"][0] for rank in ranks), "AdamW has 2"


@pytest.mark.parametrize("limit", [100_000, 10**9])
def test_an_update_at_stage_3_needs_memory_for_a_sub_group(two_ranks, corpus, tmp_path, limit):
    # Without weights that are gathered at the end of the step.
    keys = [f"--set=zero_optimization.{key}" for key in (f"sub_group_size={limit}", "stage3_param_persistence_threshold=0")]
    run = flags(corpus, tmp_path, "zero3_bf16", *SHAPE, *keys, "--steps", "2", "--global_batch_size", "2")
    for measured, planned in two_ranks.run("tests.distributed.memory_jobs:peak_of_update", flags=run):
        assert measured == pytest.approx(planned, rel=STATES_WITHIN)


def bytes_per_parameter(stage: int, ranks: int, precision: str) -> float:
    """Model states of one rank by the paper (arXiv 1910.02054, section 3.1), in fp32 with the master weights of stages 1 to 3."""
    weights, gradients, optimizer = (2, 2, 12) if precision != "fp32" else (4, 4, 8 if stage == 0 else 12)
    return weights / (ranks if stage >= 3 else 1) + gradients / (ranks if stage >= 2 else 1) + optimizer / (ranks if stage >= 1 else 1)


@pytest.mark.parametrize("precision", ["bf16", *(pytest.param(name, marks=pytest.mark.long) for name in ("fp32", "fp16"))])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_states_are_what_the_zero_paper_says(two_ranks, corpus, tmp_path, stage, precision):
    """At their most in a step of two micro-batches: 16 bytes a parameter, of which a stage divides its share by the ranks."""
    run = flags(corpus, tmp_path, f"zero{stage}_{precision}", *SHAPE, "--micro_batch_size", "1", "--global_batch_size", "4")
    config, _ = resolve(run, ranks=2)
    parameters = parameter_count(GPTConfig(**vars(config.shape), vocab_size=config.corpus.vocab_size))
    for states in two_ranks.run("tests.distributed.memory_jobs:largest_states", flags=run):
        assert sum(states.values()) == pytest.approx(parameters * bytes_per_parameter(stage, 2, precision), rel=0.1)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_on_the_wire_are_those_counted(two_ranks, corpus, tmp_path, stage, precision, accumulation):
    batch = ["--micro_batch_size", "1", "--global_batch_size", str(2 * accumulation), "--steps", "3", "--run_name", "r"]
    run = flags(corpus, tmp_path, f"zero{stage}_{precision}", *SHAPE, *batch)
    lines = two_ranks.train(run)
    config, _ = resolve(run, ranks=2)
    model = GPTConfig(**vars(config.shape), vocab_size=open_corpus(corpus).vocab_size)
    predicted = bytes_sent_per_step(model, precision, config.ds_config["zero_optimization"], 2, accumulation)
    assert lines[-1]["bytes_sent"] == predicted
