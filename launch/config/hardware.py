"""Which device DeepSpeed will choose, and whether it computes in bf16: asked of the machine itself, before torch is imported.

python launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --set bf16.enabled=auto --explain
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import runpy
import warnings
from pathlib import Path
from typing import NamedTuple

CPUINFO = Path("/proc/cpuinfo")
DRIVER = "libcuda.so.1"
#: What /proc/cpuinfo calls bf16 arithmetic: AMX and AVX512 of x86-64 ("flags"), 64-bit Arm ("Features").
CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
#: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h.
MAJOR, MINOR = 75, 76
#: Ampere, the first with bf16 (CUDA C++ Programming Guide, "Arithmetic Instructions").
FIRST_WITH_BF16 = (8, 0)


class Bf16(NamedTuple):
    """Whether the device has bf16 arithmetic, and how that is known, in a few words."""

    found: bool
    why: str


def device_type() -> str:
    """The accelerator that DeepSpeed will choose: DS_ACCELERATOR, else "cuda" where torch can use a GPU of this machine, else "cpu"."""
    return os.environ.get("DS_ACCELERATOR") or ("cuda" if _has_rocm() or compute_capabilities() else "cpu")


def bf16_arithmetic() -> Bf16:
    """Whether the device that DeepSpeed will choose computes in bf16; of several GPUs, whether all do."""
    device = device_type()
    if device == "cpu":
        found = [flag for flag in CPU_FLAGS if flag in cpu_flags()]
        return Bf16(bool(found), f"this processor has {found[0] if found else 'no bf16 arithmetic'}")
    if device == "cuda" and (capabilities := compute_capabilities()):
        least = min(capabilities)
        found_here = least >= FIRST_WITH_BF16
        begins = "" if found_here else ", and bf16 arithmetic begins at {}.{}".format(*FIRST_WITH_BF16)
        return Bf16(found_here, "this machine has a GPU of compute capability {}.{}".format(*least) + begins)
    return Bf16(True, f"taken for granted, no '{device}' is here that could be asked")  # as torch does of every GPU of ROCm


def cpu_flags() -> set[str]:
    """What the first core can do, as Linux names it; nothing where there is no /proc/cpuinfo."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def compute_capabilities() -> list[tuple[int, int]]:
    """Of each GPU that CUDA shows this process (CUDA_VISIBLE_DEVICES counts); empty without a driver, or where torch is built without CUDA.

    Asks the driver, as torch will: no memory of a GPU is taken.
    """
    driver = _driver()
    return [
        (_ask(driver, "cuDeviceGetAttribute", MAJOR, one), _ask(driver, "cuDeviceGetAttribute", MINOR, one)) for one in _devices(driver)
    ]


def gpu_memory() -> list[int]:
    """Bytes of each GPU that CUDA shows this process, as `compute_capabilities` counts them."""
    driver = _driver()
    return [_ask(driver, "cuDeviceTotalMem_v2", one, answer=ctypes.c_size_t()) for one in _devices(driver)]


def gpu_names() -> list[str]:
    """What the driver calls each GPU that CUDA shows this process."""
    driver, names = _driver(), []
    for one in _devices(driver):
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGetName(name, len(name), one)  # type: ignore[union-attr]
        names.append(name.value.decode(errors="replace"))
    return names


def _driver() -> ctypes.CDLL | None:
    """CUDA's, ready to be asked, where there is one and torch is built for it."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    return driver if _torch_build("cuda") and not driver.cuInit(0) else None


def _devices(driver: ctypes.CDLL | None) -> list[int]:
    return [_ask(driver, "cuDeviceGet", number) for number in range(_ask(driver, "cuDeviceGetCount"))] if driver else []


def _ask(driver: ctypes.CDLL | None, function: str, *arguments: int, answer: ctypes.c_int | ctypes.c_size_t | None = None) -> int:
    answer = ctypes.c_int() if answer is None else answer
    getattr(driver, function)(ctypes.byref(answer), *arguments)
    return answer.value


def _has_rocm() -> bool:
    return os.path.exists("/dev/kfd") and bool(_torch_build("hip"))


def _torch_build(library: str) -> str | None:
    """The version of "cuda" or "hip" that the installed torch is built with, without importing it."""
    torch = importlib.util.find_spec("torch")
    return runpy.run_path(str(Path(torch.origin).with_name("version.py"))).get(library) if torch and torch.origin else None


def quiet_deepspeed() -> None:
    """DeepSpeed logs its own progress at INFO: dozens of lines a start that nobody can act on. Warnings and errors stay.

    torch's own deprecation warnings about the collectives that DeepSpeed calls go with them: they are DeepSpeed's to act on.
    One warning more: on a machine without a GPU it says at every start that a GPU may have been missed. Our log names the device.
    """
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.utils

    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.utils.logger.addFilter(_is_news)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a schedule's rate was asked for before its first step, which DeepSpeed's schedules do themselves at every start."""
    return "before it has started" not in record.getMessage()
