"""The balance of a mixture of experts is the same for any ranks, micro-batches and tiles, and survives what ends or changes a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.training.run_folder.picture import draw_run
from tests.distributed.parity import BALANCE, CHECKPOINTED, LENGTHS, PLD, SHAPES, TILED, flags, section
from tests.helpers import rewind

BALANCED = section("expert_balance", {"coefficient": BALANCE})
LOOKS = ("balance_loss", "expert_load_max", "expert_load_min", "router_entropy")


def trained(pools, corpus, folder, *more: str, form: str = "stage 0", ranks: int = 1, accumulation: int = 1) -> list[dict]:
    run = flags(corpus, folder, SHAPES["qwen3_moe"], form, ranks, accumulation)
    run = [*run, *BALANCED, "--eval_every", "10", "--eval_batches", "2", *more]
    return pools.of(ranks * (2 if "sequence_parallel_size=2" in more else 1)).run("tests.distributed.jobs:pretrain", flags=run)[0]


@pytest.fixture(scope="module")
def alone(pools, corpus, tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder of a run on one rank, and the lines of its metrics."""
    folder = tmp_path_factory.mktemp("alone")
    return folder / "r", trained(pools, corpus, folder)


@pytest.mark.parametrize(
    ("form", "ranks", "accumulation", "more"),
    [
        ("stage 1", 2, 3, CHECKPOINTED),
        pytest.param("stage 3", 2, 3, CHECKPOINTED, marks=pytest.mark.long),
        pytest.param("stage 1", 4, 1, [], marks=pytest.mark.long),
        pytest.param("stage 2", 2, 2, TILED, marks=pytest.mark.long),
        pytest.param("stage 3, all offloaded", 2, 1, [], marks=pytest.mark.long),
        pytest.param("stage 1", 1, 3, ["--set", "sequence_parallel_size=2"], marks=pytest.mark.long),
        pytest.param("stage 0", 1, 1, section("fused_kernels", {"compile": True}), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_looks_are_those_of_one_rank(form, ranks, accumulation, more, alone, pools, corpus, tmp_path):
    one = alone[1]
    other = trained(pools, corpus, tmp_path, *more, form=form, ranks=ranks, accumulation=accumulation)
    for name in LOOKS:
        assert [line[name] for line in other if name in line] == pytest.approx([line[name] for line in one if name in line], rel=1e-5)
    balances = [line["balance_loss"] for line in one if "balance_loss" in line]
    assert balances[0] == pytest.approx(1, abs=1e-6), "uniform frequencies before the first step"
    assert max(balances) > 1 + 1e-4
    of_layers = [key for key in one[-1] if key.startswith("val_expert_load_max/")]
    assert of_layers == [f"val_expert_load_max/{layer}" for layer in range(3)]
    assert [line[of_layers[0]] for line in other if of_layers[0] in line] == pytest.approx(
        [line[of_layers[0]] for line in one if of_layers[0] in line], abs=0.05
    )


@pytest.mark.parametrize("technique", [pytest.param(one, marks=pytest.mark.long) for one in (PLD, LENGTHS)], ids=["dropped", "lengths"])
def test_a_resume_is_the_uninterrupted_run_whatever_layers_ran(technique, pools, corpus, tmp_path):
    more = [*technique.flags, "--save_every", "7", "--keep", "9"]
    whole = trained(pools, corpus, tmp_path, *more, form="stage 2", ranks=2)
    rewind(tmp_path / "r", 14)
    resumed = trained(pools, corpus, tmp_path, *more, "--resume", form="stage 2", ranks=2)
    for name in (*LOOKS, "loss", "val_loss", "val_router_entropy/0"):
        assert [line.get(name) for line in resumed] == [line.get(name) for line in whole], name


def test_the_picture_of_the_experts_is_drawn(alone):
    run = alone[0]
    assert (run / "experts.png").exists()
    draw_run(run)
    assert (run / "experts.png").stat().st_size > 20_000
    assert not json.loads((run / "run.json").read_text())["finished"].get("whole_val_expert_load_max/0")
