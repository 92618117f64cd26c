"""fp8: in bf16 alone, where the matrices fit, at the stages that gain from it; emulated, it trains as bf16 does, under the same names."""

from __future__ import annotations

import logging
import sys
from functools import partial
from importlib import metadata

import pytest
import torch

from launch.config.run_config import resolve
from model.gpt import GPT
from model.presets import ARCHITECTURES
from recipes.fp8.technique import SCALINGS
from recipes.registry import make_techniques
from tests import helpers

RUN = ("--data", "no/corpus", "--recipe", "recipes/fp8")
explained, refusal = partial(helpers.explained, *RUN), partial(helpers.refusal, *RUN)
EMULATED = "fp8.emulate=true"
DENSE = [name for name, fields in ARCHITECTURES.items() if "n_expert" not in fields]  # with experts it is refused
TINY = ("--n_layer", "4", "--n_head", "2", "--d_model", "64", "--seq_len", "32", "--global_batch_size", "16", "--micro_batch_size", "4")


def test_stage_3_is_accepted_where_nothing_gathered_is_kept():
    assert explained("--set", "zero_optimization.stage=3", "--set", "activation_checkpointing.enabled=true")


def test_it_is_explained_anywhere_and_emulated_on_any_device():
    said = explained()
    assert said["needs"][0].endswith("'fp8' needs CUDA and compute capability 8.9 or higher")
    assert said["notes"] == ["fp8: tensorwise scaling in the 4 linear layers of each block; embeddings, attention and head stay bf16"]
    emulated = explained("--set", EMULATED)
    assert emulated["needs"] == []
    assert emulated["notes"] == [f"{said['notes'][0]}; emulated, and slower than bf16"]


def test_a_torchao_that_cannot_be_imported_leaves_logging_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    techniques = make_techniques(resolve([*RUN, "--explain", "--set", EMULATED])[0])
    with pytest.raises(ImportError):
        techniques.prepare(GPT(resolve([*RUN, *TINY, "--explain"])[0].model_config))
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize(
    ("found", "words"), [(None, "which is not installed"), ("0.9.1+cpu", "and 0.9.1+cpu is installed"), ("0.18.0", None)]
)
def test_a_missing_torchao_is_one_line(found, words, monkeypatch):
    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError
        return found

    monkeypatch.setattr("recipes.fp8.technique.version", version)
    lacks = explained()["lacks"][1:]  # after the corpus
    if words is None:
        assert lacks == []
    else:
        (line,) = lacks
        assert line.endswith(f"'fp8' needs torchao 0.17 or later, {words}; pip install -e \".[fp8]\" -c constraints.txt")


def test_it_is_refused_before_the_runs_folder_is_made(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    line = helpers.refused_start(tmp_path / "runs", "--recipe", "recipes/fp8", "--data", corpus)
    assert "'fp8' needs " in line


@pytest.mark.parametrize(("change", "dtype"), [("fp8.enabled=true", "fp8"), (EMULATED, ""), ("fp8.enabled=false", "")])
def test_mfu_is_of_the_peak_of_fp8_unless_emulated(change, dtype):
    assert make_techniques(resolve([*RUN, "--explain", "--set", change])[0]).matmul_dtype == dtype


@pytest.fixture(scope="module")
def torchao():
    """For tests of what torchao does; imported where it is used, because it takes seconds."""
    if explained()["lacks"][1:]:
        pytest.skip('torchao is not installed (pip install -e ".[fp8]" -c constraints.txt)')


@pytest.mark.parametrize("architecture", DENSE)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_names_weights_and_draws_stay_and_products_are_rounded(scaling, architecture, torchao):
    config = resolve([*RUN, *TINY, "--architecture", architecture, "--explain", "--set", EMULATED, "--set", f"fp8.scaling={scaling}"])[0]
    plain, rounded = (GPT(config.model_config).bfloat16() for _ in range(2))
    weights = dict(rounded.named_parameters())
    make_techniques(config).prepare(rounded)
    assert list(rounded.state_dict()) == list(plain.state_dict())
    assert all(weights[name] is parameter for name, parameter in rounded.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), rounded.state_dict().values(), strict=True))
    tokens = torch.arange(2 * 31).view(2, 31)  # 62 tokens, no multiple of 16
    losses = [model(tokens, tokens) for model in (plain, rounded)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() != losses[1].item()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=0.01)
    for name, parameter in plain.named_parameters():
        error = (parameter.grad.float() - weights[name].grad.float()).norm() / parameter.grad.float().norm()
        assert error < 0.15, name
    head = dict(rounded.named_modules())["lm_head"]
    assert type(head).__module__ == "model.gpt"
    assert sum("float8" in type(module).__module__ for module in rounded.modules()) == 4 * config.shape.n_layer


ALL = (
    'progressive_layer_drop={"theta": 0.5, "gamma": 0.1}',
    'curriculum_learning={"min_difficulty": 8, "max_difficulty": 32, "schedule_type": "fixed_linear", "schedule_config":'
    ' {"total_curriculum_step": 8, "difficulty_step": 8}}',
)
CHECKPOINTED = ("activation_checkpointing.enabled=true",)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "changes", "architecture"),
    [(0, (), "gpt2"), (1, (), "llama"), (2, ALL, "qwen3"), (3, CHECKPOINTED, "gpt2"), (3, CHECKPOINTED, "qwen3")],
    ids=["stage 0", "stage 1", "stage 2, with blocks and tokens left out", "stage 3, checkpointed", "stage 3, checkpointed, qwen3"],
)
def test_emulated_it_trains_as_bf16(stage, changes, architecture, torchao, two_ranks, corpus, tmp_path):
    run = ["--deepspeed_config", f"ds_configs/zero{stage}_bf16.json", *TINY, "--data", str(corpus), "--runs_dir", str(tmp_path)]
    run += ["--architecture", architecture]
    run += ["--steps", "12", "--lr", "1e-3", "--warmup_steps", "2", "--eval_every", "6", "--save_every", "0"]
    run += [text for change in changes for text in ("--set", change)]
    plain, rounded = (
        two_ranks.train([*run, "--run_name", name, *more])
        for name, more in (("plain", ()), ("rounded", ("--set", 'fp8={"emulate": true}')))
    )
    for key in ("loss", "val_loss"):
        both = [[line[key] for line in lines if key in line] for lines in (plain, rounded)]
        assert both[1] == pytest.approx(both[0], abs=0.02)
        assert both[1] != both[0]
    assert plain[-1]["val_loss"] < plain[0]["val_loss"] - 0.1


@pytest.mark.cuda
@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_tensor_cores_round_as_the_emulation_does(scaling, torchao, one_rank, corpus, tmp_path):
    """Of micro-batches of 31 tokens, which are padded."""
    run = ["--recipe", "recipes/fp8", "--set", f"fp8.scaling={scaling}", *TINY, "--data", str(corpus), "--runs_dir", str(tmp_path)]
    run += ["--seq_len", "31", "--micro_batch_size", "1"]
    run += ["--steps", "12", "--lr", "1e-3", "--warmup_steps", "2", "--eval_every", "6", "--save_every", "0"]
    helpers.skip_unless_the_device_can(resolve([*run, "--explain"])[0])
    real, emulated = (one_rank.train([*run, "--run_name", name, *more]) for name, more in (("real", ()), ("emulated", ("--set", EMULATED))))
    assert [line["loss"] for line in real[1:]] == pytest.approx([line["loss"] for line in emulated[1:]], abs=0.01)
