"""A run is resumed on other ranks, at another ZeRO stage, with or without CPU offload, in another precision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launch.formats.checkpoint_files import complete_checkpoints, read_state
from launch.formats.metrics import read_metrics
from tests.conftest import Pools

JOB, LOADED = "tests.distributed.jobs:pretrain", "tests.distributed.move_jobs:loaded"
#: 35 and 105 elements of a bias, which two and four ranks do not share evenly; sub-groups of a few parameters at stage 3.
SHAPE = ["--n_layer", "2", "--n_head", "5", "--d_model", "35", "--seq_len", "32", "--global_batch_size", "4", "--eval_every", "0"]
SAVED, STEPS = 3, 23
CPU = 'zero_optimization.offload_optimizer={"device": "cpu"}'


class Layout(NamedTuple):
    stage: int
    ranks: int
    offload: bool = False
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return f"stage{self.stage}-{self.ranks}ranks-{self.precision}" + ("-offload" if self.offload else "")

    def flags(self) -> list[str]:
        found = ["--deepspeed_config", f"ds_configs/zero{self.stage}_{self.precision}.json"]
        if self.offload:
            found += ["--set", CPU]
        if self.stage == 3:
            found += ["--set", "zero_optimization.sub_group_size=9000", "--set", "zero_optimization.stage3_param_persistence_threshold=100"]
        return found


class Runs:
    """Runs of a module, each trained once without a move: to `STEPS` steps, with a checkpoint after `SAVED`."""

    def __init__(self, pools: Pools, corpus: Path, folder: Path):
        self._pools, self._corpus, self._folder = pools, corpus, folder
        self._losses: dict[str, list[float]] = {}
        self._held: dict[str, dict[str, Any]] = {}

    def flags(self, layout: Layout, runs: Path, *more: str) -> list[str]:
        where = ["--data", str(self._corpus), "--runs_dir", str(runs), "--run_name", "r"]
        return [*layout.flags(), *SHAPE, *where, "--steps", str(STEPS), "--lr", "1e-3", "--save_every", "3", "--keep", "99", *more]

    def unmoved(self, layout: Layout, *more: str) -> tuple[Path, list[float]]:
        """A folder with the run, rewound to its checkpoint, and the losses of all steps."""
        key = " ".join([layout.name, *more])
        runs = self._folder / key.replace("/", "_")[:100]
        if key not in self._losses:
            lines = self._pools.of(layout.ranks).run(JOB, flags=self.flags(layout, runs, *more))[0]
            self._losses[key] = [line["loss"] for line in lines]
            rewind(runs / "r", SAVED)
        return runs, self._losses[key]

    def held(self, layout: Layout, *more: str) -> dict[str, Any]:
        """What the ranks hold after DeepSpeed itself has loaded the checkpoint."""
        key = " ".join([layout.name, *more])
        runs, _ = self.unmoved(layout, *more)
        if key not in self._held:
            self._held[key] = self.load(layout, runs, *more)
            assert not any("written by" in line for line in self._held[key]["log"])
        return self._held[key]

    def load(self, layout: Layout, runs: Path, *more: str) -> dict[str, Any]:
        return self._pools.of(layout.ranks).run(LOADED, flags=[*self.flags(layout, runs, *more), "--resume"])[0]

    def moved(self, before: Layout, tmp_path: Path, *more: str) -> Path:
        """A copy of the unmoved run, rewound."""
        runs, _ = self.unmoved(before, *more)
        return Path(shutil.copytree(runs, tmp_path / "moved"))

    def train(self, layout: Layout, runs: Path, *more: str) -> list[float]:
        lines = self._pools.of(layout.ranks).run(JOB, flags=[*self.flags(layout, runs, *more), "--resume"])[0]
        return [line["loss"] for line in lines]


def rewind(run: Path, step: int) -> None:
    for checkpoint in complete_checkpoints(run / "checkpoints"):
        if read_state(checkpoint)["step"] > step:
            shutil.rmtree(checkpoint)


@pytest.fixture(scope="module")
def runs(pools, corpus, tmp_path_factory) -> Runs:
    return Runs(pools, corpus, tmp_path_factory.mktemp("moves"))


def content_of(checkpoint: Path) -> dict[str, bytes]:
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in sorted(checkpoint.rglob("*")) if path.is_file()}


L = Layout
MOVES = [
    (L(3, 2), L(3, 1)),
    (L(2, 2), L(3, 4)),
    (L(3, 4), L(1, 2)),
    (L(0, 1), L(3, 2)),
]


@pytest.mark.parametrize(("before", "after"), MOVES, ids=lambda layout: layout.name)
def test_a_moved_run_goes_on_as_the_unmoved_one(before, after, runs, tmp_path):
    """Weights, moments and steps are those that DeepSpeed itself loads where nothing has changed, bit for bit."""
    folder = runs.moved(before, tmp_path)
    checkpoint = folder / "r" / "checkpoints" / f"step-{SAVED:08d}"
    written = content_of(checkpoint)
    found, expected = runs.load(after, folder), runs.held(before)
    assert found["content"] == expected["content"]
    assert (found["steps"], found["counters"]) == (expected["steps"], expected["counters"])
    losses = runs.train(after, folder)
    assert losses == pytest.approx(runs.unmoved(before)[1], abs=1e-5)
    assert content_of(checkpoint) == written
    assert "resumed step-00000003, written by" in (folder / "r" / "log.txt").read_text()
