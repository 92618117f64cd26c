"""The memory of an update, measured on the ranks of a pool."""

from __future__ import annotations

import statistics
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.muon.optimizer import Muon
from tests.distributed.jobs import pretrain


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
