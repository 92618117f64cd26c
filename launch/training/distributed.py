"""The one place for torch.distributed: start-up of the ranks, and the counted collectives that everything else goes through.

DeepSpeed builds extensions just in time, which takes a minute or more in silence, and a build that is killed leaves a lock behind on which
every later start hangs for ever. Here a build has a lock of its own, which dies with its process, a line that says what is going
on, and a folder of the project's own. The one extension that DeepSpeed would build at every first start on a CPU is not built at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from launch.config.hardware import quiet_deepspeed

ROOT = Path(__file__).resolve().parents[2]


def start_ranks() -> Collectives:
    """Join the process group that the launcher describes in the environment, or a group of one without a launcher.

    Sets, where the user has not: `TORCH_EXTENSIONS_DIR` (the project's `.cache/torch_extensions`), and torch's threads to the cores
    of the host divided by its ranks.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    # Always this environment's ninja: another version (a system's, where the environment is not activated) takes what this one has built
    # for out of date, and builds it again.
    if shutil.which("ninja", path=Path(sys.executable).parent):
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if "RANK" not in os.environ:
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
    # Ranks are not bound to cores of their own. On two cores it gained nothing: two ranks made a step of `nano` in 126.7 ms free and 127.8
    # bound (medians of 4 runs each, in turns), of `micro` in 428.4 and 428.8 (3 each); blocks of 4 steps in turns within one run took 127.5
    # and 125.2, and 450 and 446. And a bound rank cannot leave a core that another job works on, for which all ranks then wait. On a host
    # of several sockets `deepspeed --bind_cores_to_rank` binds, by numactl, with the memory of the socket.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_of_host()))

    quiet_deepspeed()
    import deepspeed
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    device = torch.device(get_accelerator().device_name(int(os.environ["LOCAL_RANK"])))
    if device.type != "cpu":
        get_accelerator().set_device(device.index)
    if not comm.is_initialized():
        without_shared_memory_extension()
        deepspeed.init_distributed(auto_mpi_discovery=False)
    return Collectives(device)


def ranks_of_host() -> int:
    """How many ranks of this job run on this host, as its launcher says."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def leave_ranks() -> None:
    """Leave the process group, so that no rank ends while another still listens to it."""
    from deepspeed import comm

    comm.destroy_process_group()


def stager(device: torch.device) -> Any:
    """torch's maker of copies in the host's memory, which it keeps for the next copy of the same tensor: `stager.stage(state)`.

    Nothing of it is distributed but its place.
    """
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    pinned = device.type == "cuda"
    return DefaultStager(StagingOptions(pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def without_shared_memory_extension() -> None:
    """Keep DeepSpeed from building and starting `deepspeed_shm_comm` for CPU ranks.

    It serves tensor-parallel inference only (`inference_all_reduce`), takes half a minute to build, and every start leaves 66 MB a rank in
    /dev/shm for ever, under the name of its port: a few hundred starts fill the memory of a machine.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def without_compiled_muon() -> None:
    """Import DeepSpeed's Muon with its kernels as they are written.

    At stages 1, 2 and 3 every start imports it, to ask whether the optimizer is one; its kernels are decorated with `torch.compile`, which
    imports torch's whole compiler for them: a sixth of a start. No JSON can ask for Muon (launch/config/optimizer.py).
    """
    from deepspeed.runtime import compiler

    compile_kernel = compiler.compile
    compiler.compile = lambda: lambda kernel: kernel
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compile_kernel


def load_extension(builder_name: str) -> None:
    """Build, where it is not built yet, and load one of DeepSpeed's extensions, e.g. "CPUAdamBuilder".

    One process of the host at a time; the one that builds, of any rank, says so on stderr.
    """
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(builder_name)
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{builder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel when its process dies
        for baton in folder.rglob(f"{builder.name}/lock"):
            if _is_open_somewhere(baton):  # torch keeps it open while it builds
                continue
            print(f"Removing {baton}: the build that made it was killed", file=sys.stderr, flush=True)
            while _is_worked_in(baton.parent):  # by compilers that outlived it: two writers of one file
                time.sleep(0.2)
            baton.unlink()
        if not list(folder.rglob(f"{builder.name}.so")):
            print(f"Building DeepSpeed's extension {builder.name} into {folder} (a minute or so, once)", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(io.StringIO()):
            builder.load(verbose=False)


def _is_open_somewhere(path: Path) -> bool:
    """Whether any process of this host has `path` open."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # processes end, and other users' are not ours to read
            if descriptor.samefile(path):
                return True
    return False


def _is_worked_in(folder: Path) -> bool:
    """Whether any process of this host has `folder` as its working directory."""
    for directory in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if directory.samefile(folder):
                return True
    return False


class Collectives:
    """The ranks of the run, and what this rank sends to the others.

    `bytes_sent` grows with every collective of the engine, of the techniques and of the loop alike. It counts what this rank must put
    on the wire under the bandwidth-optimal algorithm for N ranks: all_reduce 2(N-1)/N x size; reduce_scatter, all_to_all and reduce
    (N-1)/N x input; all_gather (N-1)/N x gathered output; broadcast (N-1)/N x size, the mean over the ranks.
    """

    def __init__(self, device: torch.device):
        from deepspeed.comm import comm

        self._comm = comm
        self.device = device
        self.rank, self.world_size = comm.get_rank(), comm.get_world_size()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.bytes_sent = 0.0
        _count_collectives(comm.cdb, self)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place."""
        self._comm.all_reduce(tensor)
        return tensor

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Row i of `sent` goes to rank i, row i of `received` comes from it; both (ranks, ...)."""
        self._comm.all_to_all_single(received, sent)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Row i of `received` (ranks, ...) becomes what rank i has `sent`, (1, ...)."""
        self._comm.all_gather_into_tensor(received, sent)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._comm.barrier()

    def enter_thread(self) -> None:
        """Make this rank's device that of the calling thread, which begins with the first one."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    def wait(self) -> None:
        """Wait for this rank's own device to have done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent inside does not belong to the training step: evaluation, checkpoints."""
        before = self.bytes_sent
        try:
            yield
        finally:
            self.bytes_sent = before

    def of_each(self, value: torch.Tensor | float) -> list[float]:
        """The `value` of every rank."""
        values = torch.zeros(self.world_size, dtype=torch.float64, device=self.device)
        values[self.rank] = value
        return self.all_reduce(values).tolist()

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, of any type that pickles."""
        values: list[Any] = [None] * self.world_size
        self._comm.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return bool(self.all_reduce(torch.tensor([float(flag)], device=self.device)).item())


def _size(tensors: Any) -> int:
    """Bytes of a tensor or of all tensors of a list."""
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else sum(tensor.nbytes for tensor in tensors)


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


@dataclass(frozen=True)
class _Counted:
    """`function`, a collective of `backend`, which adds to `counter` what this rank sends by it."""

    function: Callable[..., Any]
    backend: Any
    counter: Collectives
    position: int  # of the argument that is measured
    name: str
    weight: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        measured = kwargs[self.name] if self.name in kwargs else args[self.position]
        group = next((item for item in (*args, *kwargs.values()) if isinstance(item, ProcessGroup)), None)
        ranks = self.backend.get_world_size(group=group)
        self.counter.bytes_sent += self.weight * (ranks - 1) / ranks * _size(measured)
        return self.function(*args, **kwargs)


def _count_collectives(backend: Any, counter: Collectives) -> None:
    """Count every collective that passes through `backend`, DeepSpeed's one instance that all of its modules use."""
    for name, (position, argument, weight) in _WIRE.items():
        if (function := getattr(backend, name, None)) is not None:
            bare = function.function if isinstance(function, _Counted) else function  # a former Collectives counts no more
            setattr(backend, name, _Counted(bare, backend, counter, position, argument, weight))
