"""Jobs for test_muon: the memory of an update. For test_deepspeeds_muon: DeepSpeed's own Muon, held against the published algorithm."""

from __future__ import annotations

import math
import statistics
from typing import Any
from unittest import mock

import deepspeed
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from launch.training.deepspeed_fixes.start_up import load_extension, without_compiled_muon
from launch.training.ranks.distributed import start_ranks
from model.gpt import GPT, weight_decay_groups
from recipes.muon.optimizer import Muon
from tests.distributed.jobs import forget_engines, pretrain
from tests.distributed.reference import PublishedMuon
from tests.helpers import config_of

SIZES = {"n_layer": 3, "n_head": 2, "d_model": 64, "seq_len": 32}
VOCABULARY, STEPS, BATCH, LR, CLIPPING = 97, 10, 12, 0.02, 0.1


def model() -> GPT:
    return GPT(config_of("gpt2", SIZES, vocab_size=VOCABULARY, init_seed=3))


def batches() -> torch.Tensor:
    """(STEPS, BATCH, T + 1) token ids."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (STEPS, BATCH, SIZES["seq_len"] + 1), generator=generator)


def published(clips: bool, embeddings_are_hidden: bool) -> dict[str, torch.Tensor]:
    """The weights after training by the published algorithm, with fused queries, keys and values as one matrix, as DeepSpeed takes them."""
    own = model()
    optimizer = PublishedMuon(
        weight_decay_groups(own, 0.1),
        LR,
        (0.9, 0.95),
        1e-8,
        scale=lambda rows, columns: math.sqrt(max(1, rows / columns)),
        fused=True,
        adam_matrices=() if embeddings_are_hidden else (0, 1),
    )
    for tokens in batches():
        own(tokens[:, :-1], tokens[:, 1:]).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(own.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in own.named_parameters()}


def trained(stage: int, accumulation: int, clips: bool, dtype: str = "float32", method: str = "standard") -> dict[str, Any]:
    """Train by DeepSpeed's Muon, Newton-Schulz in `dtype`, in DeepSpeed's own choice if empty.

    Returns `tagged`, the names of the matrices that it orthogonalizes, and `distances`: of the matrices of the blocks and of the others,
    the largest distance from the published weights, over the distance of those from the start.
    """
    collectives = start_ranks()
    load_extension("FusedAdamBuilder")  # DeepSpeed itself would wait forever for a build that was killed
    without_compiled_muon()
    from deepspeed.runtime.zero.muon import original_muon

    micro = BATCH // collectives.world_size // accumulation
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING if clips else 0.0,
        "optimizer": {"type": "Muon", "params": {"lr": LR, "momentum": 0.95, "betas": [0.9, 0.95], "eps": 1e-8, "ns_method": method}},
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
    }
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        own = model()
    engine, *_ = deepspeed.initialize(model=own, model_parameters=weight_decay_groups(own, 0.1), config=config)
    chosen = mock.patch.object(original_muon, "ns_compute_dtype", return_value=getattr(torch, dtype)) if dtype else mock.MagicMock()
    with chosen:
        for tokens in batches():
            for part in tokens.chunk(collectives.world_size)[collectives.rank].chunk(accumulation):
                engine.backward(engine(part[:, :-1], part[:, 1:]))
                engine.step()
    found = {}
    for name, parameter in own.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            found[name] = parameter.detach().clone()
    tagged = [name for name, parameter in own.named_parameters() if parameter.use_muon]
    forget_engines()
    expected, start = published(clips, embeddings_are_hidden=True), dict(model().named_parameters())
    far: dict[bool, list[float]] = {True: [0.0], False: [0.0]}
    for name, weight in expected.items():
        if weight.ndim == 2:
            far[name.startswith("h.")].append(float((found[name] - weight).norm() / (weight - start[name].detach()).norm()))
    return {"tagged": tagged, "blocks": max(far[True]), "embeddings": max(far[False])}


class PeakMemory(TorchDispatchMode):
    """The most bytes of the storages, other than the known ones, that are alive after an operation."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.known, self.made, self.peak = {tensor.untyped_storage().data_ptr() for tensor in known}, dict[StorageWeakRef, int](), 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in self.known:
            self.made[StorageWeakRef(made.untyped_storage())] = made.untyped_storage().nbytes()
        self.made = {storage: size for storage, size in self.made.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.made.values()))
        return made


def peak_of_update(flags: list[str]) -> int:
    """The most bytes that an update of this project's Muon has beside the parameters, their gradients and the optimizer's state."""
    update, peaks = Muon.step, []

    def measured(optimizer: Muon) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        with PeakMemory(*parameters, *(parameter.grad for parameter in parameters), *states) as memory:
            update(optimizer)
        peaks.append(memory.peak)

    with mock.patch.object(Muon, "step", measured):
        pretrain(flags)
    # The first update makes the state. Some sub-groups have no matrix. Threads of gloo may hold the buffers of an exchange for a moment.
    return statistics.mode(peak for peak in peaks if peak)
