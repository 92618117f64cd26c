"""The device that DeepSpeed will choose, and whether it computes in bf16.

    python launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --set bf16.enabled=auto --explain

torch is imported inside the functions, so that `--help` of the commands does not wait for it. No function allocates GPU memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
#: Exists where the driver is loaded.
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
#: Whether the user has chosen the device; `quiet_deepspeed` may set the variable later.
DEVICE_IS_CHOSEN = "DS_ACCELERATOR" in os.environ
#: What /proc/cpuinfo calls bf16 arithmetic: AMX and AVX512 of x86-64 ("flags"), 64-bit Arm ("Features").
CPU_BF16 = ("amx_bf16", "avx512_bf16", "bf16")
#: Ampere, the first with bf16 (CUDA C++ Programming Guide, "Arithmetic Instructions").
FIRST_WITH_BF16 = (8, 0)


def device_type() -> str:
    """The accelerator that DeepSpeed will choose: DS_ACCELERATOR, else "cuda" where torch can use a GPU, else "cpu"."""
    import torch  # seconds to import, which --help does without

    return os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")


def unused_gpus() -> str:
    """An error message if a run would train on the CPU although this host has NVIDIA GPUs; else empty.

    It is also empty if the user asks for the CPU, by DS_ACCELERATOR or an empty CUDA_VISIBLE_DEVICES.
    """
    import torch  # as above

    asks_for_cpu = DEVICE_IS_CHOSEN or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if asks_for_cpu or torch.accelerator.is_available() or not NVIDIA_DRIVER.exists():
        return ""
    return (
        f"this host has a driver for NVIDIA GPUs, but torch {torch.__version__} finds none; install the build of torch for the driver's "
        "CUDA, ask the scheduler for GPUs, or set DS_ACCELERATOR=cpu to train on the CPU"
    )


def gpus() -> list[Any]:
    """torch's properties of each GPU that this process may use (CUDA_VISIBLE_DEVICES counts): `name`, `major`, `minor`, `total_memory`."""
    import torch  # as above

    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]


def bf16_arithmetic() -> tuple[bool, str]:
    """Whether the device that DeepSpeed will choose computes in bf16 (of several GPUs, whether all do), and the reason in a few words."""
    device = device_type()
    if device == "cpu":
        found = [name for name in CPU_BF16 if name in cpu_instructions()]
        return bool(found), f"this processor has {found[0] if found else 'no bf16 arithmetic'}"
    if device == "cuda" and (found_gpus := gpus()):
        least = min((gpu.major, gpu.minor) for gpu in found_gpus)
        has_bf16 = least >= FIRST_WITH_BF16
        needed = "" if has_bf16 else ", bf16 arithmetic needs {}.{}".format(*FIRST_WITH_BF16)
        return has_bf16, "this machine has a GPU of compute capability {}.{}".format(*least) + needed
    return True, f"assumed, no '{device}' device was found to check"


def cpu_instructions() -> list[str]:
    """The instruction sets of the processor on which the speed and the rounding of its arithmetic depend, as in /proc/cpuinfo."""
    flags = cpuinfo_field("flags", "Features").split()
    return [name for name in ("avx2", "avx512f", *CPU_BF16) if name in flags]


def cpuinfo_field(*names: str) -> str:
    """The value of the first line of /proc/cpuinfo that begins with one of `names`; empty without that file."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
