"""Fetches the wheels that a GPU machine without a network lacks, into .gpu/wheels.

    python -m benchmarks.gpu pack

The wheels are those of carried.txt, in the versions of constraints.txt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.parts import FOLDER, ROOT, WHEELS, WORK
from launch.training.provenance import repository_commit

CONSTRAINTS = ROOT / "constraints.txt"
#: Tags of wheels that a machine with Python 3.12 on Linux x86-64 takes; manylinux up to glibc 2.28.
PLATFORMS = ("2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5", "2014", "2010", "1")
TARGET = ["--python-version", "3.12", "--implementation", "cp"] + [
    text
    for version in PLATFORMS
    for text in ("--platform", f"manylinux{'' if version.startswith('20') or version == '1' else '_'}{version}_x86_64")
]


def names(file: str) -> list[str]:
    """The requirements in one of this folder's lists."""
    lines = (FOLDER / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pip(*arguments: str | Path, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, **environment})


def pack() -> None:
    """Fetch the wheels of carried.txt for the GPU machine; DeepSpeed, of which there is only source, is built."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    common = ["--quiet", "--no-deps", "-c", CONSTRAINTS]
    pip("download", *common, "--only-binary=:all:", *TARGET, "-d", WHEELS, *(name for name in names("carried.txt") if name != "deepspeed"))
    # A wheel without compiled extensions: DeepSpeed builds them where they are used.
    pip("wheel", *common, "--no-build-isolation", "-w", WHEELS, "deepspeed", DS_BUILD_OPS="0")
    (WORK / "commit").write_text(f"{repository_commit() or ''}\n", encoding="utf-8")
    for wheel in sorted(WHEELS.glob("*.whl")):
        print(f"{wheel.stat().st_size / 2**20:7.2f} MiB  {wheel.name}")
