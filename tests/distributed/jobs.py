"""What the ranks of a pool are asked to do. Every function runs on all ranks at once."""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from deepspeed.utils import safe_get_full_grad
from PIL import Image

from launch.config import hardware
from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.formats.metrics import read_metrics
from launch.pretrain import train
from launch.training.checkpoints.store import CheckpointStore, check_store
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer
from launch.training.ranks.distributed import start_ranks
from launch.training.ranks.signals import StopRequest
from launch.training.run_folder import folder as run_folder
from launch.training.run_folder.folder import NoFolder, open_run_folder
from model.gpt import GPT, run_all_blocks
from recipes import registry
from recipes.gradients import set_gradient
from recipes.technique import RunForTechniques, StepWork, Technique, Techniques
from tests.distributed.reference import run_all_but

# What was imported before the ranks and commands are forked, a million objects, is no garbage: no collection looks through it again.
gc.freeze()


def threads_when_bound(cores: list[list[int]]) -> int:
    """torch's threads when the launcher has bound each rank to its `cores` and the user has not chosen a number."""
    chosen, threads = os.environ.pop("OMP_NUM_THREADS"), torch.get_num_threads()
    try:
        with mock.patch("os.sched_getaffinity", return_value=set(cores[int(os.environ["RANK"])])):
            start_ranks()
        return torch.get_num_threads()
    finally:
        os.environ["OMP_NUM_THREADS"] = chosen
        torch.set_num_threads(threads)


def pretrain(flags: list[str], observers: Sequence[Observer] = (), code: int = 0) -> list[dict[str, Any]]:
    """`launch/pretrain.py` with `flags`, in this process group; the lines of its metrics. code: with which it ends."""
    config, _ = resolve([*flags, "--quiet"])
    path = Path(config.runs_dir) / config.run_name
    if os.environ["RANK"] == "0" and (store := CheckpointStore.of(config)):
        check_store(store, path, config.resume)
    folder = open_run_folder(config, path) if os.environ["RANK"] == "0" else NoFolder()
    torch.set_float32_matmul_precision("highest")  # a job before this one may have switched TF32 on, which lasts
    try:
        assert train(config, folder, StopRequest(), observers) == code
    except UsageError:
        folder.abandon()
        raise
    finally:
        folder.close()
        forget_engines()
    return read_metrics(path / "metrics.jsonl")


def pretrain_on(processors: list[str], folder: str, flags: list[str]) -> list[dict[str, Any]] | str:
    """`pretrain` where rank i has a processor with the flag `processors[i]`, or what it is refused with."""
    cpuinfo, hardware.CPUINFO = hardware.CPUINFO, Path(folder) / f"cpuinfo-{os.environ['RANK']}"
    hardware.CPUINFO.write_text(f"flags : {processors[int(os.environ['RANK'])]}\n")
    try:
        return pretrain(flags)
    except UsageError as refused:
        return str(refused)
    finally:
        hardware.CPUINFO = cpuinfo


def forget_engines() -> None:
    """Let go of the engines of earlier jobs: stage 3 keeps them in an `lru_cache` of its coordinator's class."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    if "torch._dynamo" in sys.modules:  # it takes compiled blocks for the same at every stage
        torch._dynamo.reset()
    decisions = vars(PartitionedParameterCoordinator).get("_PartitionedParameterCoordinator__params_to_release")
    getattr(decisions, "cache_clear", lambda: None)()
    gc.collect()


class ChangingPlan(Technique):
    """Cuts the same sequences of a step into other micro-batches, in turns."""

    def on_step(self, step: int, work: StepWork) -> StepWork:
        micro_batch_size = 1 if step % 2 else 8 if step % 3 == 0 else work.micro_batch_size
        return work._replace(micro_batch_size=micro_batch_size, accumulation=8 // micro_batch_size)


class DroppedBlock(Technique):
    """Leaves block 1 out: in every third step, and in the last micro-batch of every fourth."""

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.accumulation, self.step, self.micro_step = run.gradient_accumulation_steps, 0, 0

    def prepare(self, model: GPT) -> None:
        without = run_all_but(1)

        def run(blocks: Any, x: Any) -> Any:
            dropped = drops_block_1(self.step, self.micro_step, self.accumulation)
            return (without if dropped else run_all_blocks)(blocks, x)

        model.block_runner = run

    def on_step(self, step: int, work: StepWork) -> StepWork:
        self.step, self.micro_step = step, -1
        return work

    def on_batch(self, tokens: torch.Tensor) -> torch.Tensor:
        self.micro_step += 1
        return tokens


class AuxiliaryLoss(Technique):
    """Trains 0.01 (log Z)^2 in addition, Z the normalizer of the softmax; reports the norm of the gradients."""

    def attach(self, ds_engine: Any, collectives: Any) -> None:
        self.parameters, self.norm = list(ds_engine.module.parameters()), 0.0

    def token_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.01 * logits.float().logsumexp(-1) ** 2

    def on_gradients(self) -> None:
        gradients = [safe_get_full_grad(parameter) for parameter in self.parameters]
        self.norm = math.sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in gradients))

    def metrics(self) -> dict[str, float]:
        return {"norm": self.norm}


class DoubledGradients(Technique):
    """Multiplies every gradient by two."""

    def attach(self, ds_engine: Any, collectives: Any) -> None:
        self.parameters = list(ds_engine.module.parameters())

    def on_gradients(self) -> None:
        for parameter in self.parameters:
            set_gradient(parameter, 2 * safe_get_full_grad(parameter))


def drops_block_1(step: int, micro_step: int, accumulation: int) -> bool:
    """When `DroppedBlock` leaves it out."""
    return step % 3 == 0 or (step % 4 == 0 and micro_step == accumulation - 1)


def pretrain_with(technique: str, flags: list[str]) -> list[dict[str, Any]]:
    """`pretrain` with an observer or a technique of this module, by its name, besides those that the flags switch on."""
    extra = globals()[technique]
    if issubclass(extra, Observer):
        return pretrain(flags, [extra()])
    make = registry.make_techniques
    registry.make_techniques = lambda run: Techniques([*make(run).members, extra({}, run)])
    try:
        return pretrain(flags)
    finally:
        registry.make_techniques = make


class WatchedBlocks(Observer):
    """How often blocks run and on how many tokens of a row, in the step's training and in evaluations so far, there without a scale."""

    def start(self, engine: TrainingEngine) -> None:
        self.lengths: dict[str, list[int]] = {"training": [], "evaluation": []}
        self.passes = 0

        def note(block: torch.nn.Module, inputs: Any) -> None:
            if block.training or len(inputs) == 1:
                self.lengths["training" if block.training else "evaluation"].append(inputs[0].shape[1])

        def note_pass(model: torch.nn.Module, inputs: Any) -> None:
            self.passes += not model.training

        engine.ds_engine.module.register_forward_pre_hook(note_pass)
        for block in engine.ds_engine.module.h:
            block.register_forward_pre_hook(note)

    def on_step(self, step: int) -> None:
        self.lengths["training"] = []

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {"evaluation_passes": self.passes}
        for when, lengths in self.lengths.items():
            if lengths:
                found |= {f"{when}_calls": len(lengths), f"min_{when}": min(lengths), f"max_{when}": max(lengths)}
        return found


class WatchedPicture(Observer):
    """Before each step, waits for a whole `loss.png` of the last evaluation; its pictures are of the steps `drawn_before`."""

    def start(self, engine: TrainingEngine) -> None:
        self.file = Path(engine.config.runs_dir) / engine.config.run_name / "loss.png"
        self.eval_every, self.seen, self.drawn_before = engine.config.eval_every, 0, 0.0

    def on_step(self, step: int) -> None:
        if (step - 1) % self.eval_every == 0 and os.environ["RANK"] == "0":
            deadline = time.monotonic() + 60.0
            while not self.file.exists() or self.file.stat().st_mtime_ns == self.seen or self._draws():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            self.seen, self.drawn_before = self.file.stat().st_mtime_ns, self.drawn_before + 1
            with Image.open(self.file) as picture:
                picture.verify()

    def _draws(self) -> bool:
        living = (one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE)
        return any("launch.training.run_folder.picture" in one.cmdline() for one in living)

    def metrics(self) -> dict[str, float]:
        return {"drawn_before": self.drawn_before}


def pretrain_watching_the_picture(flags: list[str]) -> list[dict[str, Any]]:
    """`pretrain` where every evaluation draws."""
    with mock.patch.object(run_folder, "PICTURE_SECONDS", 0.0):
        return pretrain(flags, [WatchedPicture()])


class CountedCompilations(Observer):
    """How many graphs torch.compile has made after each step, in this process and since the run began."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.before = self._graphs()

    def after_step(self, step: int) -> None:
        self.counts.append(self._graphs() - self.before)

    @staticmethod
    def _graphs() -> int:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])


def pretrain_counting_compilations(flags: list[str]) -> tuple[list[int], list[dict[str, Any]]]:
    """`pretrain`, and what `CountedCompilations` counts in it."""
    observer = CountedCompilations()
    lines = pretrain(flags, [observer])
    return observer.counts, lines


class WatchedErrors(Technique):
    """The largest momentum and error among rows of embeddings that cannot have a gradient; the largest error of all, and weight."""

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.length, self.ds_engine = run.shape.seq_len, None

    def prepare(self, model: Any) -> None:
        self.model = model

    def attach(self, ds_engine: Any, collectives: Any) -> None:
        self.ds_engine = ds_engine

    def on_step(self, step: int, work: StepWork) -> StepWork:
        self.length = work.seq_len
        return work

    def metrics(self) -> dict[str, float]:
        if self.ds_engine is None:
            return {}
        adam = getattr(self.ds_engine.optimizer, "optimizer", self.ds_engine.optimizer)
        reduction, config = adam.reduction, self.model.config
        dead = {0: config.vocab_size * config.d_model, 1: self.length * config.d_model}
        found = {"dead_values": 0.0, "dead_errors": 0.0}
        for place, first in dead.items():
            segment = reduction._tensors[place]
            found["dead_values"] = max(found["dead_values"], _largest(reduction.buffer[segment.start + first : segment.stop]))
            found["dead_errors"] = max(found["dead_errors"], _largest(reduction.worker_error[segment.start + first : segment.stop]))
        return {**found, "errors": _largest(reduction.worker_error), "largest_weight": max(map(_largest, self.model.parameters()))}


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
