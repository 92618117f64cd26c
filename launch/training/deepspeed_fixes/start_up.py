"""What DeepSpeed builds and compiles at a start.

DeepSpeed builds its extensions just in time, which takes a minute or more without a message, and a killed build leaves a lock file on
which later starts wait forever. Here a line announces a build, and an flock, which ends with its process, protects it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import deepspeed.ops
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler


def skip_extension_of_cpu_ranks() -> None:
    """Do not build the extension that DeepSpeed builds at the first start on a CPU: only tensor-parallel inference uses it.

    It takes half a minute, and every start leaves 66 MB per rank in /dev/shm: a few hundred starts fill the memory of a machine.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def without_compiled_muon() -> None:
    """Import DeepSpeed's Muon without compiling its kernels.

    Every start at stages 1, 2 and 3 imports it for an `isinstance`. Its kernels are decorated with `torch.compile`, which imports torch's
    compiler: a sixth of the time of a start. No configuration can select DeepSpeed's Muon; docs/deepspeed-faults.md says why recipes/muon
    replaces it.
    """
    compile_kernel = compiler.compile
    compiler.compile = lambda: lambda kernel: kernel
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compile_kernel


def load_extension(builder_name: str) -> None:
    """Load one of DeepSpeed's extensions, e.g. "CPUAdamBuilder".

    Builds it first if it is not built yet, in one process of all hosts that share `TORCH_EXTENSIONS_DIR`.
    """
    _read_cpu_once()
    if architectures := os.environ.get("TORCH_CUDA_ARCH_LIST"):  # DeepSpeed 0.19.8 cannot read the letter of "9.0a"
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(\d+\.\d+)[af]", r"\1", architectures)
    builder = get_accelerator().create_op_builder(builder_name)
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{builder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when its process ends
        for left_behind in folder.rglob(f"{builder.name}/lock"):  # torch's own lock: its process has ended, or it would hold ours
            print(f"Removing {left_behind}: the build that made it was killed", file=sys.stderr, flush=True)
            left_behind.unlink()
        if not list(folder.rglob(f"{builder.name}.so")):
            print(f"Building DeepSpeed's extension {builder.name} into {folder} (a minute or so, once)", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(io.StringIO()):
            builder.load(verbose=False)


@functools.cache
def _read_cpu_once() -> None:
    """Cache py-cpuinfo's result, which takes a second. DeepSpeed asks for it twice per extension, one rank after another."""
    with contextlib.suppress(Exception):  # not installed, or an unknown CPU: DeepSpeed works without it
        cpuinfo: Any = importlib.import_module("cpuinfo")
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
        cpuinfo.get_cpu_info()
