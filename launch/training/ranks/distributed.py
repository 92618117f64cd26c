"""The one place for torch.distributed: starts the ranks, and counts the bytes of all collectives."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import default_pg_timeout
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from data_pipeline.shards import raise_open_file_limit
from launch.config.deepspeed_schema import quiet_deepspeed
from launch.errors import TrainingFailed, UsageError
from launch.training.deepspeed_fixes.start_up import skip_extension_of_cpu_ranks

ROOT = Path(__file__).resolve().parents[3]
#: A smaller tensor is copied into pageable memory: pinning it takes longer than its copy.
PINNED_BYTES = 2**20


def start_ranks() -> Collectives:
    """Join the process group that the launcher describes in the environment, or a group of one without a launcher.

    Sets, where the user has not: `TORCH_EXTENSIONS_DIR` (the project's `.cache/torch_extensions`), and torch's threads to this rank's
    share of the host's cores.

    Raises:
        UsageError: another job listens on the rendezvous port.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    # Always this environment's ninja: another version, such as the system's, builds everything again.
    if shutil.which("ninja", path=Path(sys.executable).parent):
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if "RANK" not in os.environ:
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",  # a free one
        }
    quiet_deepspeed()
    device = torch.device(get_accelerator().device_name(int(os.environ["LOCAL_RANK"])))
    if device.type != "cpu":
        get_accelerator().set_device(device.index)
    if not comm.is_initialized():
        skip_extension_of_cpu_ranks()
        raise_open_file_limit()  # Gloo connects each rank with all others, by a socket each
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            torch.distributed.init_process_group(
                get_accelerator().communication_backend_name(),
                store=_store_of_this_start(),
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                timeout=default_pg_timeout,
                device_id=device if device.type == "cuda" and int(os.environ["WORLD_SIZE"]) > 1 else None,  # as DeepSpeed does
            )
        try:
            deepspeed.init_distributed(auto_mpi_discovery=False)
        except torch.distributed.DistNetworkError as reason:
            if "EADDRINUSE" not in str(reason):
                raise
            fix = "give another: deepspeed --master_port N, or MASTER_PORT=N with srun and mpirun"
            raise UsageError(f"port {os.environ['MASTER_PORT']} (MASTER_PORT) is in use on this host; {fix}") from None
    collectives = Collectives(device)
    # Ranks are not bound to cores: on two cores it made no step faster, and a bound rank cannot leave a core that another job uses. On a
    # host of several sockets `deepspeed --bind_cores_to_rank` binds them, together with the memory of the socket.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share_of_cores(collectives.cores, collectives.rank))
    return collectives


def share_of_cores(cores: Sequence[tuple[str, set[int]]], rank: int) -> int:
    """The number of threads for `rank`: each core counts as one divided by the number of ranks that may use it.

    Args:
        cores: of each rank, its host and the cores that it may use. `mpirun` and `srun` may have bound it to some.
    """
    users = Counter((host, core) for host, own in cores for core in own)
    host, own = cores[rank]
    return max(1, int(sum(Fraction(1, users[host, core]) for core in own)))


def _store_of_this_start() -> PrefixStore:
    """The store of `torchrun`, with keys of this start only.

    `torchrun` 2.13 keeps its store when it restarts the ranks, so they find the addresses of earlier ranks: half of the restarts failed
    ("Gloo connectFullMesh ... refused"). TORCHELASTIC_RESTART_COUNT does not tell starts apart, because a host counts only failures of its
    own ranks. So rank 0 draws a random name for the start. Every other rank greets it with a random word, accepts a name only in answer to
    that word, and confirms it; what earlier ranks left in the store is ignored.

    Raises:
        TrainingFailed: a rank did not arrive within DeepSpeed's timeout.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=default_pg_timeout)
    own, deadline = uuid.uuid4().hex, time.monotonic() + default_pg_timeout.total_seconds()

    def wait_for(whom: Callable[[], int], condition: Callable[[], bool]) -> None:
        while not condition():
            if time.monotonic() > deadline:
                raise TrainingFailed(f"rank {whom()} did not arrive within {default_pg_timeout}; look at the output of its host")
            time.sleep(max(0.02, size / 10_000))  # the store answers some 40,000 requests per second

    def read(key: str) -> str:
        return str(store.get(key), "ascii") if store.check([key]) else ""

    if rank:
        store.set(f"hello/{rank}", own)
        wait_for(lambda: 0, lambda: read(f"start/{rank}").startswith(own))
        name = read(f"start/{rank}").removeprefix(own)
        store.set(f"taken/{rank}", name)
        return PrefixStore(name, store)

    def has_taken(other: int) -> bool:
        if hello := read(f"hello/{other}"):
            store.set(f"start/{other}", hello + own)
        return read(f"taken/{other}") == own

    pending = set(range(1, size))

    def all_have_taken() -> bool:
        pending.difference_update([other for other in pending if has_taken(other)])
        return not pending

    wait_for(lambda: min(pending), all_have_taken)
    return PrefixStore(own, store)


def have_met() -> bool:
    """Whether this rank has joined the others."""
    return bool(comm.is_initialized())


def leave_ranks() -> None:
    """Leave the process group together: a launcher ends the other ranks when one has ended, and no rank may end while another listens."""
    comm.barrier()
    comm.destroy_process_group()


def stager(device: torch.device) -> Callable[[Any], Any]:
    """A function that copies the tensors of a state into host memory, which is reused for the next copy of the same tensors.

    It calls the stager inside torch's `DefaultStager`, because the latter can copy only once in torch 2.11.
    """
    on_gpu = device.type == "cuda"
    inside = StateDictStager(pin_memory=on_gpu, share_memory=False, pin_memory_min_bytes=PINNED_BYTES)

    def stage(state: Any) -> Any:
        copy = inside.stage(state, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize(device)
        return copy

    return stage


class Collectives:
    """The collectives of the ranks of the run. `bytes_sent` counts what this rank sends.

    It includes every collective of tensors (not `gather`) of the engine, the techniques and the training loop, with the bytes that the
    bandwidth-optimal algorithm sends for N ranks: all_reduce 2(N-1)/N x size; reduce_scatter, all_to_all and reduce (N-1)/N x input;
    all_gather (N-1)/N x gathered output; broadcast (N-1)/N x size, the mean over the ranks. An all_to_all of unequal parts sends all parts
    but the rank's own.

    Attributes:
        cores: of each rank, its host and the cores that it may use.
        ranks_of_host: the number of ranks on the host of this rank.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.rank, self.world_size = comm.get_rank(), comm.get_world_size()
        self.bytes_sent = 0.0
        _count_collectives(comm.comm.cdb, self)
        self.cores: list[tuple[str, set[int]]] = self.gather((socket.gethostname(), os.sched_getaffinity(0)))
        self.ranks_of_host = sum(host == socket.gethostname() for host, _ in self.cores)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place."""
        comm.all_reduce(tensor)
        return tensor

    def group(self, size: int) -> Any:
        """The process group of the `size` consecutive ranks, a divisor of all, that this rank belongs to. All ranks call this together."""
        groups = [comm.new_group([*range(first, first + size)]) for first in range(0, self.world_size, size)]
        return groups[self.rank // size]

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: list[int] | None = None,
        sent_sizes: list[int] | None = None,
        group: Any = None,
    ) -> None:
        """Row i of `sent` goes to rank i, row i of `received` comes from it; both (ranks, ...). With sizes, part i has sizes[i] rows.

        group: from `group`, without sizes; i counts its ranks.
        """
        assert group is None or not sent_sizes
        comm.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
        if sent_sizes:  # what stays here need not be 1/N of it
            self.bytes_sent += (len(sent) / self.world_size - sent_sizes[self.rank]) * sent[:1].nbytes

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Row i of `received` (ranks, ...) becomes what rank i has `sent`, (1, ...)."""
        comm.all_gather_into_tensor(received, sent)

    def barrier(self) -> None:
        """Wait for all ranks."""
        comm.barrier()

    def enter_thread(self) -> None:
        """Select this rank's device in the calling thread, where the first device is the default."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    def gather(self, value: Any, group: ProcessGroup | None = None) -> list[Any]:
        """The `value` of every rank, of any type that pickles. A thread beside the training loop uses a `group` of its own."""
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=group)
        return values

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return bool(self.all_reduce(torch.tensor([float(flag)], device=self.device)).item())


@functools.cache
def thread_group() -> ProcessGroup:
    """The process group of the threads that write checkpoints. All ranks call this together."""
    # Ranks may wait long for the one that writes most.
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(days=1))


#: Collective of DeepSpeed's backend -> (position and name of the argument that is measured, its weight in units of (N-1)/N).
_WIRE = {
    "all_reduce": (0, "tensor", 2),
    "all_reduce_coalesced": (0, "tensors", 2),
    "inference_all_reduce": (0, "tensor", 2),
    "reduce": (0, "tensor", 1),
    "reduce_scatter": (1, "input_list", 1),
    "reduce_scatter_tensor": (1, "input_tensor", 1),
    "all_gather": (0, "tensor_list", 1),
    "all_gather_into_tensor": (0, "output_tensor", 1),
    "all_gather_base": (0, "output_tensor", 1),
    "all_gather_coalesced": (0, "output_tensors", 1),
    "all_to_all_single": (1, "input", 1),
    "all_to_all": (1, "input_tensor_list", 1),
    "broadcast": (0, "tensor", 1),
}


def _count_collectives(backend: Any, counter: Collectives) -> None:
    """Count every collective of `backend`, the one instance that all modules of DeepSpeed use."""
    for name, (position, argument, weight) in _WIRE.items():
        if (function := getattr(backend, name, None)) is not None:
            uncounted = getattr(function, "uncounted", function)  # an earlier Collectives may have wrapped it
            setattr(backend, name, _counted(uncounted, backend, counter, position, argument, weight))


def _counted(function: Callable[..., Any], backend: Any, counter: Collectives, position: int, argument: str, weight: int) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        measured = kwargs[argument] if argument in kwargs else args[position]
        size = measured.nbytes if isinstance(measured, torch.Tensor) else sum(tensor.nbytes for tensor in measured)
        group = next((item for item in (*args, *kwargs.values()) if isinstance(item, ProcessGroup)), None)
        ranks = backend.get_world_size(group=group)
        counter.bytes_sent += weight * (ranks - 1) / ranks * size
        return function(*args, **kwargs)

    call.uncounted = function  # type: ignore[attr-defined]
    return call
