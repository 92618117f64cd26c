"""Muon's arithmetic, its share of the ranks' work, memory and bytes, and its part of the JSON.

That it trains what its author published is in test_engine_follows_plain_pytorch.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from launch.config.explain import bytes_of
from launch.config.run_config import ROOT, resolve
from launch.training.run_folder.provenance import describe_run
from launch.training.run_folder.run_json import resume_description
from model.presets import PRESETS, GPTConfig
from recipes.masters import Fragment
from recipes.muon.optimizer import Matrix, Muon, orthogonalized
from recipes.muon.technique import divided_matrices, exchanged_elements, hidden_matrices, matrices_in, shared_among_ranks
from recipes.registry import make_techniques
from tests.distributed.muon_jobs import PeakMemory
from tests.distributed.parity import section, technique_flags
from tests.distributed.reference import PublishedMuon
from tests.helpers import explained, refusal
from tests.run_folders import write_run


def alone(p: torch.nn.Parameter, **options) -> Muon:
    """Muon of one whole matrix."""
    optimizer = Muon([{"params": [p]}], 0.1, (0.9, 0.95), 1e-8, 0.0, rate_scale="original", **options)
    optimizer.matrices = {p: [Matrix(*p.shape, start=0, lengths=(p.numel(),))]}
    return optimizer


def test_newton_schulz_in_bf16_is_no_farther_than_that_of_torch():
    torch.manual_seed(1)
    errors = [0.0, 0.0]
    for _ in range(8):
        weight, gradient = torch.randn(96, 64), torch.randn(96, 64)
        exact = weight.double() - 0.1 * math.sqrt(1.5) * PublishedMuon.iterated(gradient.double())
        for which, make in enumerate((alone, lambda p: torch.optim.Muon([p], lr=0.1, weight_decay=0.0))):
            p = torch.nn.Parameter(weight.clone())
            p.grad = gradient.clone()
            make(p).step()
            errors[which] += float((p.detach().double() - exact).norm() / exact.norm())
    assert errors[0] <= errors[1]


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32)])
def test_singular_values_are_near_one_and_what_has_nearly_vanished_moves_nothing(shape):
    """As the momentum of a block that has been dropped for hundreds of steps: the squares of its elements are 0 in fp32."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for scale in (1.0, 1e-16):
        values = torch.linalg.svdvals(orthogonalized(scale * matrix, 5, torch.float32))
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.25
    for exponent in range(-45, -23):
        assert float(orthogonalized(matrix * 10.0**exponent, 5, torch.float32).abs().max()) < 1e-2


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 4), (3, 4)))])
def test_bytes_on_the_wire_are_those_planned(stage, ranks, pools, corpus, tmp_path):
    run = [*technique_flags("muon", corpus, tmp_path, f"stage {stage}", ranks), "--steps", "4"]
    config = resolve(run, ranks)[0]
    without = replace(config, optimizer={"type": "AdamW", "params": {}})
    sent = pools.of(ranks).train(run)[-1]["bytes_sent"]
    assert sent == bytes_of(config, config.model_config)
    assert sent > bytes_of(without, config.model_config) + 1000


def test_cut_matrices_have_one_owner_each_and_the_work_is_shared():
    """A tensor of 448 elements is cut at 150 and 300: inside of the third and the fourth matrix."""
    shapes, ranks = [(8, 8), (8, 8), (16, 8), (8, 16), (8, 8)], 3
    sizes = [rows * columns for rows, columns in shapes]
    ends = [0, 150, 300, 448]
    fragments = [Fragment("w", ends[rank], 7, ends[rank + 1] - ends[rank]) for rank in range(ranks)]
    held = [[list(matrices_in([fragment], {"w": shapes}))] for fragment in fragments]
    for rank, (matrices,) in enumerate(held):
        for matrix, begin in zip(matrices, accumulate(sizes, initial=0), strict=False):
            if matrix.lengths[0]:
                assert matrix.start == 7 + max(0, begin - ends[rank])
    (joined,) = shared_among_ranks(held)
    assert [matrix.lengths for matrix in joined] == [(64, 0, 0), (64, 0, 0), (22, 106, 0), (0, 44, 84), (0, 0, 64)]
    assert [matrix.owner for matrix in joined] == [None, None, 0, 1, None]
    assert exchanged_elements({"w": shapes}, stage=1, ranks=ranks) == 106  # rank 0 sends back what it got, and nothing to itself


def test_at_stage_3_the_matrices_of_all_tensors_are_spread_over_the_ranks():
    ranks, tensors = 4, 3
    quarters = [Matrix(8, 8, 0, (16,)), Matrix(8, 32, 0, (64,)), Matrix(32, 8, 0, (64,))]
    owners = [matrix.owner for of_tensor in shared_among_ranks([[quarters] * tensors] * ranks) for matrix in of_tensor]
    assert set(owners) == set(range(ranks))
    work = [
        sum(quarters[number % 3].rows * quarters[number % 3].columns * 8 for number, own in enumerate(owners) if own == rank)
        for rank in range(ranks)
    ]
    assert max(work) <= 1.5 * sum(work) / ranks


@pytest.mark.parametrize(("ranks", "work", "bytes_sent"), [(16, 1.2, 8.3), (64, 2.2, 12.7)])
def test_the_page_has_the_largest_shares_at_stage_3(ranks, work, bytes_sent):
    parts = hidden_matrices(GPTConfig(**vars(PRESETS["gpt2"].shape), vocab_size=50_257))
    matrices = divided_matrices(parts, 3, ranks)
    assert len(matrices) == 72 and all(matrix.owner is not None for matrix in matrices)
    done = [sum(m.rows * m.columns * min(m.rows, m.columns) for m in matrices if m.owner == rank) for rank in range(ranks)]
    sent = [
        sum(sum(m.lengths) - m.lengths[rank] if m.owner == rank else m.lengths[rank] for m in matrices)
        / sum(m.lengths[rank] for m in matrices)
        for rank in range(ranks)
    ]
    assert sum(sent) / ranks <= 2  # fp32 numbers per parameter
    assert (round(max(done) / (sum(done) / ranks), 1), round(4 * max(sent), 1)) == (work, bytes_sent)
    page = " ".join((ROOT / "recipes/muon/README.md").read_text().split())
    assert all(f"{number}" in page.partition("**With ZeRO.**")[2].partition("**Run.**")[0] for number in (work, bytes_sent))


def test_at_stage_3_on_three_ranks_each_holds_one_of_queries_keys_and_values():
    parts = hidden_matrices(GPTConfig(**vars(PRESETS["gpt2"].shape), vocab_size=50_257))
    whole = [matrix for matrix in divided_matrices(parts, 3, 3) if matrix.owner is None]
    assert [(matrix.rows, matrix.columns) for matrix in whole] == [(768, 768)] * 36
    assert {tuple(map(bool, matrix.lengths)) for matrix in whole} == {(True, False, False), (False, True, False), (False, False, True)}


def test_adams_step_count_follows_the_parameter_to_its_device(monkeypatch):
    """`torch.load` reads checkpoints into CPU memory, and torch moves a state's `step` only for its own fused optimizers."""
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    parameter = torch.nn.Parameter(torch.zeros(4, device="meta"))
    parameter.grad = torch.zeros(4, device="meta")
    optimizer = Muon([{"params": [parameter]}], **options)
    optimizer.matrices = {}
    moments = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: {"step": torch.tensor(3.0), **moments}}, "param_groups": groups})
    used = []
    monkeypatch.setattr("recipes.optimizers.adamw", lambda *lists, **_: used.extend(lists[5]))
    optimizer.step()
    assert [step.device for step in used] == [parameter.device]


def test_its_limits_are_said():
    assert "optimizer.params.momentum" in refusal("--recipe", "recipes/muon", "--set", "optimizer.params.momentum=1")
    stage_1 = ["--recipe", "recipes/muon", "--set", "zero_optimization.stage=1"]
    for name in ("fp32", "float32", "torch.float32"):
        assert "data_types.grad_accum_dtype" in refusal(*stage_1, "--set", f'data_types.grad_accum_dtype="{name}"')
    low = ["--set", "bf16.bf16_master_weights_and_grads=true", "--set", "bf16.bf16_optimizer_states=true"]
    assert "bf16.bf16_master_weights_and_grads" in refusal(*stage_1, *low)
    offload = 'zero_optimization.offload_optimizer={"device": "cpu"}'
    assert "offload" in refusal(*stage_1, "--set", offload)


def test_its_defaults_are_explained():
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.004, "warmup_num_steps": 2}}
    for more, peak in ((), 0.002), (("--set", f"scheduler={json.dumps(warmup)}"), 0.004):
        values = explained("--recipe", "recipes/muon", "--preset", "nano", "--set", "optimizer.params.ns_steps=4", *more)["engine"]
        assert values["optimizer.params.nesterov"] == {"value": True, "from": "the default of Muon"}
        assert values["optimizer.params.ns_steps"] == {"value": 4, "from": "--set"}
        assert values["optimizer.params.ns_dtype"]["value"] == "bf16"
        assert values["optimizer.params.rate_scale"]["value"] == "match_rms_adamw"
        assert values["optimizer.params.adam_lr"] == {"value": peak, "from": "lr, the default of Muon"}


def test_a_resume_of_a_run_without_recorded_defaults_changes_nothing(corpus, tmp_path):
    def described(*more: str) -> dict:
        return describe_run(resolve([*technique_flags("muon", corpus, tmp_path, ranks=1), *more], ranks=1)[0])

    before = described()
    for key in ("nesterov", "ns_steps", "rate_scale", "adam_lr"):
        del before["optimizer"]["params"][key]
    write_run(tmp_path / "r", before, [])
    assert resume_description(tmp_path / "r", described())[1] == []
    assert resume_description(tmp_path / "r", described("--set", "optimizer.params.nesterov=true"))[1] == []
    changes = resume_description(tmp_path / "r", described("--set", "optimizer.params.nesterov=false"))[1]
    assert changes == ["optimizer.params.nesterov: null -> false"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hidden_matrices_have_no_second_moment_in_the_plan(stage):
    page = explained("--recipe", "recipes/muon", "--set", f"zero_optimization.stage={stage}", "--preset", "gpt2")
    other = explained("--deepspeed_config", f"ds_configs/zero{stage}_bf16.json", "--preset", "gpt2")
    states = [one["memory_per_rank"]["cpu"]["optimizer_states"] for one in (other, page)]
    assert states[0] - states[1] == pytest.approx(4 * 12 * 12 * 768**2, rel=1e-3)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_memory_of_the_iterations_is_in_the_plan(name, dtype):
    planned = [
        explained(*config, "--preset", "nano")["memory_per_rank"]["cpu"]["update"]
        for config in (
            ("--recipe", "recipes/muon", "--set", f"optimizer.params.ns_dtype={name}"),
            ("--deepspeed_config", "ds_configs/zero0_bf16.json"),
        )
    ]
    measured = []
    for shape in ((1024, 256), (256, 1024)):  # the largest matrices
        p = torch.nn.Parameter(torch.randn(shape))
        p.grad = torch.randn(shape)
        optimizer = alone(p, ns_dtype=dtype)
        optimizer.step()
        with PeakMemory(p, p.grad, optimizer.state[p]["momentum"]) as memory:
            optimizer.step()
        measured.append(memory.peak)
    assert planned[0] - planned[1] == pytest.approx(max(measured), rel=0.02)


@pytest.mark.parametrize("name", [pytest.param("bf16", marks=pytest.mark.gate), pytest.param("fp32", marks=pytest.mark.long)])
def test_the_memory_of_cut_matrices_is_in_the_plan(name, two_ranks, corpus, tmp_path):
    run = technique_flags("muon", corpus, tmp_path, "stage 3") + section("optimizer.params.ns_dtype", name)
    config, _ = resolve(run, ranks=2)
    planned = make_techniques(config).memory_terms(config.model_config, "cpu")["update"]
    assert max(two_ranks.run("tests.distributed.muon_jobs:peak_of_update", flags=run)) == pytest.approx(planned, rel=0.02)
