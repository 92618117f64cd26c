"""Measures what summing the micro-batches of a step in bf16 costs."""

from __future__ import annotations

from typing import Any

import torch

from launch.config.run_config import resolve
from launch.training.engine import TrainingEngine
from launch.training.observers import Observer
from model.gpt import GPT
from tests.distributed.jobs import pretrain


class _WeightsAtTheEnd(Observer):
    def start(self, engine: TrainingEngine) -> None:
        self.engine = engine

    def after_step(self, step: int) -> None:
        self.weights = {name: tensor.detach().clone() for name, tensor in self.engine.ds_engine.module.state_dict().items()}


def errors_of_sums(flags: list[str], counts: list[int], most_groups: int) -> dict[int, dict[str, float]]:
    """After the run with `flags`, the error of K gradients summed in bf16 against their sum in fp32, for each K of `counts`.

    Each micro-batch is one sequence that the run did not train on. Each figure is a mean over at most `most_groups` disjoint groups of K.
    relative: to the norm of the sum. of_noise: to the standard error of the mean of K gradients, from the variance between sequences.
    """
    end = _WeightsAtTheEnd()
    pretrain(flags, [end])
    config = resolve(flags)[0]
    model = GPT(config.model_config).to(torch.bfloat16)
    model.load_state_dict(end.weights)
    loader = config.training_loader(end.engine.collectives)
    sums: dict[tuple[int, str], Any] = {(count, kind): None for count in counts for kind in ("bf16", "fp32")}
    squares: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    mean_square, most = 0.0, max(counts)
    for number, tokens in enumerate(loader.micro_batches(config.steps * config.global_batch_size, 1, most), 1):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # bf16
        model.zero_grad()
        wide = gradient.float()
        mean_square += float(torch.linalg.vector_norm(wide)) ** 2 / most
        for count in (count for count in counts if number <= most_groups * count):
            for kind, one in (("bf16", gradient), ("fp32", wide)):
                sums[count, kind] = one.clone() if sums[count, kind] is None else sums[count, kind].add_(one)
            if number % count == 0:
                rounded, exact = sums[count, "bf16"].double(), sums[count, "fp32"].double()
                squares[count].append((float((rounded - exact).square().sum()), float(exact.square().sum())))
                sums[count, "bf16"] = sums[count, "fp32"] = None
    variance = (mean_square - squares[most][0][1] / most**2) * most / (most - 1)
    found = {}
    for count, groups in squares.items():
        error = sum(error for error, _ in groups) / len(groups)
        norm = sum(norm for _, norm in groups) / len(groups)
        found[count] = {"relative": (error / norm) ** 0.5, "of_noise": (error / (count * variance)) ** 0.5, "groups": len(groups)}
    return found
