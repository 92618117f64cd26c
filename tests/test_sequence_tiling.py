"""Tiles change memory and time, and no number: values and gradients of the MLP and the loss, whole runs, and the plan of memory."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launch.config.flags import as_words
from launch.config.run_config import resolve
from model.gpt import GPT, MLP, Head
from recipes.sequence_tiling.technique import TILE, tiled_loss, tiled_mlp
from tests.distributed.memory_jobs import plan_of
from tests.distributed.parity import SHAPES, flags, section
from tests.helpers import ROOT, config_of, explained, sparse_corpus

STEPS, TILED, CLIPPED = 20, section("sequence_tiling.tile", 20), section("gradient_clipping", 0.5)
EACH, ON_HOST = (section(f"activation_checkpointing.{key}", True) for key in ("enabled", "cpu_checkpointing"))
T, C, V = 50, 16, 128


def model_of(architecture: str = "gpt2", **more: float) -> GPT:
    sizes = {"n_layer": 1, "n_head": 2, "d_model": C, "seq_len": T, **more}
    return GPT(config_of(architecture, sizes, vocab_size=V))


def passes(module: MLP | Head, forward: Callable[..., torch.Tensor], *others: torch.Tensor) -> list[torch.Tensor]:
    """The value of `forward` at x (2, T, C), and the gradients of x and of all weights."""
    torch.manual_seed(0)  # for x, and then for dropout
    x = torch.randn(2, T, C, requires_grad=True)
    module.zero_grad()
    value = forward(x, *others)
    (value * torch.linspace(1, 2, value.numel()).view_as(value)).sum().backward()
    return [value.detach(), *(leaf.grad.clone() for leaf in (x, *module.parameters()) if leaf.grad is not None)]


def some_targets() -> torch.Tensor:
    """Every third counts for nothing, and so does a whole tile."""
    targets = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(1))
    targets[:, ::3], targets[1] = -100, -100
    return targets


@pytest.mark.parametrize("tile", [7, 50, 1000])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_tiled_mlp_and_loss_are_the_whole_ones(architecture, tile):
    model, targets = model_of(architecture), some_targets()
    model.lm_head.token_losses.append(lambda logits, targets: 0.01 * logits.logsumexp(-1) ** 2)
    mlp, head = model.h[0].mlp, model.lm_head
    for found, exact in (
        (passes(mlp, functools.partial(tiled_mlp, mlp.forward, tile, False)), passes(mlp, mlp.forward)),
        (passes(head, functools.partial(tiled_loss, head.forward, tile), targets), passes(head, head.forward, targets)),
        (
            passes(head, functools.partial(tiled_loss, head.forward, tile), targets, torch.tensor(77)),
            passes(head, head.forward, targets, torch.tensor(77)),
        ),
    ):
        assert len(found) == len(exact) > 2
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tiled_loss(head.forward, tile, torch.ones(2, T, C)), head(torch.ones(2, T, C)))


def test_a_recomputed_tile_draws_the_same_dropout_again():
    mlp = model_of(dropout=0.5).h[0].mlp
    plain, tiled = passes(mlp, mlp.forward), passes(mlp, functools.partial(tiled_mlp, mlp.forward, 2 * T, True))
    assert all(map(torch.equal, plain, tiled))
    assert not torch.equal(plain[0], passes(mlp.eval(), mlp.forward)[0])


class Largest(TorchDispatchMode):
    """The number of elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **options or {})
        self.elements = max(self.elements, *(one.numel() for one in tree_leaves(result) if torch.is_tensor(one)), 0)
        return result


@pytest.mark.parametrize("part", ["mlp", "head"])
def test_nothing_of_the_size_of_all_tokens_is_made(part):
    model = model_of()
    module, others = (model.h[0].mlp, []) if part == "mlp" else (model.lm_head, [some_targets()])
    tiled = (tiled_mlp, module.forward, 10, False) if part == "mlp" else (tiled_loss, module.forward, 10)
    largest = {}
    for name, forward in (("whole", module.forward), ("tiled", functools.partial(*tiled))):
        with Largest() as seen:
            passes(module, forward, *others)
        largest[name] = seen.elements
    padded = model.config.padded_vocab_size
    assert largest["whole"] == 2 * T * (4 * C if part == "mlp" else padded)
    assert largest["tiled"] <= max(2 * T * C, padded * C)


@functools.cache
def plain(pools, corpus: Path, folder: Path, model: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    """The lines of the metrics and the last weights of one rank without tiles."""
    run = [*flags(corpus, folder / f"plain_{model}", SHAPES[model], "stage 0", 1, 1), "--steps", str(STEPS), *CLIPPED]
    return pools.of(1).run("tests.distributed.move_jobs:pretrain_keeping_weights", flags=run, steps=STEPS)[0]


#: gpt2: tied; llama: with a head of its own.
GRID = [
    *((stage, model, 2, 2, 2, "each") for stage, model in enumerate(("llama", "gpt2", "llama", "gpt2"))),
    *((stage, "gpt2", 2, 1, 1, "each on the host") for stage in (0, 2)),
    *((stage, "llama", 2, 2, 1, "nothing") for stage in (1, 3)),
    (3, "llama", 1, 2, 2, "each on the host"),
]
GATE = [(3, "gpt2", 2, 2, 2, "each")]
CHECKPOINTS = {"nothing": [], "each": EACH, "each on the host": ON_HOST}


@pytest.mark.parametrize(
    ("stage", "model", "accumulation", "ranks", "slices", "checkpointed"),
    [pytest.param(*cell, marks=pytest.mark.gate if cell in GATE else pytest.mark.long) for cell in GRID],
)
def test_a_run_is_that_of_one_rank_without_tiles(
    stage, model, accumulation, ranks, slices, checkpointed, pools, corpus, tmp_path, tmp_path_factory
):
    """In tiles of 20 of its tokens. slices: the ranks that share a row."""
    run = flags(corpus, tmp_path, SHAPES[model], f"stage {stage}", ranks // slices, accumulation)
    run += ["--steps", str(STEPS), *CLIPPED, *TILED, *CHECKPOINTS[checkpointed]]
    run += section("zero_optimization.stage3_param_persistence_threshold", 1000) if stage == 3 else []
    run += section("sequence_parallel_size", slices) if slices > 1 else []
    lines, weights = pools.of(ranks).run("tests.distributed.move_jobs:pretrain_keeping_weights", flags=run, steps=STEPS)[0]
    expected, exact = plain(pools, corpus, tmp_path_factory.getbasetemp(), model)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], abs=1e-5)
    assert lines[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-5)
    assert min(line["grad_norm"] for line in lines) > 0.5, "every step is clipped"
    for name, weight in exact.items():
        np.testing.assert_allclose(weights[name], weight, rtol=0, atol=2e-5, err_msg=name)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1


def test_the_loss_is_that_of_the_fused_kernel_where_it_is_on():
    run = ("--deepspeed_config", "ds_configs/sequence_tiling.json", "--data", "no/corpus")
    fused = explained(*run, "--set", "fused_kernels.cross_entropy=true")
    assert any("the MLPs only; the loss is that of fused_kernels.cross_entropy" in note for note in fused["notes"])
    assert not any("the MLPs only" in note for note in explained(*run, "--set", "fused_kernels.attention=true")["notes"])
    alone = explained(*run[2:], "--deepspeed_config", "ds_configs/zero1_bf16.json", "--set", "fused_kernels.cross_entropy=true")
    assert fused["memory_per_rank"]["cpu"]["loss_head"] == alone["memory_per_rank"]["cpu"]["loss_head"]


def test_the_plan_has_tiles():
    run = ("--deepspeed_config", "ds_configs/zero1_bf16.json", "--preset", "micro", "--data", "no/corpus", "--micro_batch_size", "8")
    plain, tiled = (explained(*run, *more)["memory_per_rank"] for more in ([], section("sequence_tiling.enabled", True)))
    tokens, padded, width = 8 * 256, 50_304, 384
    assert plain["cuda"]["activations"] - tiled["cuda"]["activations"] == 6 * tokens * 8 * width * 2, "of the MLP of 6 blocks nothing"
    # fp32 log-probabilities and two gradients of 512 tokens, and the sum of the weight's gradients; logits of 2,048 in bf16 and fp32.
    assert tiled["cpu"]["loss_head"] == 3 * 4 * 512 * padded + padded * width * 2
    assert tiled["cuda"]["loss_head"] == plain["cuda"]["loss_head"] == (2 + 4) * tokens * padded + 4 * 512 * padded, "of one tile"


def tokens_of_gpt2(folder: Path) -> Path:
    """A corpus with GPT-2's vocabulary, of one token."""
    manifest = sparse_corpus(folder, 1, 100_000) / "manifest.json"
    content = json.loads(manifest.read_text())
    for shard in (shard for split in content["splits"].values() for shard in split["shards"]):
        shard["sha256"] = hashlib.sha256((folder / shard["file"]).read_bytes()).hexdigest()
    manifest.write_text(json.dumps(content))
    return folder


def peak_and_plan(data: Path, runs: Path, *more: str) -> tuple[int, int]:
    """Bytes: the most that `launch/pretrain.py` had in memory in two steps of one sequence, checkpointed, and the planned peak."""
    values = {"deepspeed_config": "ds_configs/zero1_fp32.json", "data": data, "runs_dir": runs, "run_name": "r", "steps": 2, "n_head": 4}
    values |= {"micro_batch_size": 1, "global_batch_size": 1, "eval_every": 0, "save_every": 0}
    run = [*as_words(values), *EACH, *more]
    # glibc gives back what is freed at once. By default it keeps blocks below 32 MiB, which are not in a plan.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    subprocess.run([sys.executable, "launch/pretrain.py", *run, "--quiet"], cwd=ROOT, check=True, env=environment)
    lines = (runs / "r/metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["peak_memory_bytes"], plan_of(resolve([*run, "--ranks", "1"])[0]).peak


@pytest.mark.long
@pytest.mark.parametrize(("length", "tile", "limit"), [(8192, 2048, 1.6), (32_768, TILE["cpu"], 2.0)])
def test_a_long_sequence_takes_the_planned_memory(length, tile, limit, tmp_path):
    """limit: GiB resident. Python and its libraries, which a plan leaves out, are those of a run of a tiny model."""
    data = tokens_of_gpt2(tmp_path / "data")
    libraries, least = peak_and_plan(data, tmp_path / "tiny", *as_words({"n_layer": 1, "d_model": 8, "seq_len": 16}))
    size = as_words({"n_layer": 2, "d_model": 256, "seq_len": length})
    peak, planned = peak_and_plan(data, tmp_path / "long", *size, *section("sequence_tiling.tile", tile))
    print(f"{length} tokens: {peak / 2**30:.2f} GiB, {libraries / 2**30:.2f} of them libraries, planned {planned / 2**30:.2f}")
    assert peak < limit * 2**30
    assert peak - libraries + least == pytest.approx(planned, rel=0.1)
