"""What is done before a GPU machine is at hand: pack the repository and the wheels that it lacks, and try all parts without it.

    python -m benchmarks.gpu pack
    python -m benchmarks.gpu rehearse --python python3.12

The rehearsal makes an environment of the packages that the machine is known to have (image.txt) and nothing else, clones the packed
repository, and runs every part there at small sizes on the CPU, without an index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.parts import BUNDLE, FOLDER, ROOT, WHEELS, WORK
from launch.training.run_folder.provenance import repository_commit

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


def pip(*arguments: str | Path, python: str = sys.executable, **options: object) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)], check=True, **options)  # type: ignore[call-overload]


def pack() -> int:
    """Bundle the repository, and fetch the wheels of carried.txt; DeepSpeed comes as source and is built. Returns the exit code."""
    if (commit := repository_commit()) is None or "+" in commit:
        print(
            f"error: {ROOT} {'has uncommitted changes' if commit else 'is not a git checkout'}; commit first: HEAD is packed",
            file=sys.stderr,
        )
        return 2
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    common: list[str | Path] = ["--quiet", "--no-deps", "-c", CONSTRAINTS]
    pip("download", *common, "--only-binary=:all:", *TARGET, "-d", WHEELS, *(name for name in names("carried.txt") if name != "deepspeed"))
    # A wheel without compiled extensions: DeepSpeed builds them where they are used.
    pip("wheel", *common, "--no-build-isolation", "-w", WHEELS, "deepspeed", env={**os.environ, "DS_BUILD_OPS": "0"})
    subprocess.run(["git", "bundle", "create", "--quiet", str(BUNDLE), "HEAD"], cwd=ROOT, check=True)
    wheels = sorted(WHEELS.glob("*.whl"))
    sizes = {file.name: file.stat().st_size for file in [*wheels, BUNDLE]}
    for name, size in sizes.items():
        print(f"{size / 2**20:7.2f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:7.2f} MiB  in all")
    return 0


def make_image(python: str) -> Path:
    """An environment that has the packages of image.txt, and those of carried.txt not; the path of its interpreter."""
    folder = WORK / "image"
    found, listed = folder / "bin" / "python3", folder / "image.txt"
    text = (FOLDER / "image.txt").read_text(encoding="utf-8")
    if not listed.exists() or listed.read_text(encoding="utf-8") != text:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"making {folder} of benchmarks/gpu/image.txt (some 6 GB on disk: torch is the CUDA build)", flush=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip("install", "--quiet", "-r", FOLDER / "image.txt", python=str(found))
        pip("uninstall", "--quiet", "--yes", *names("carried.txt"), python=str(found))
        listed.write_text(text, encoding="utf-8")
    return found


def rehearse(python: str) -> int:
    """Run every part in the machine's environment, on the CPU. Returns the exit code."""
    if code := pack():
        return code
    image = make_image(python)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        subprocess.run(["git", "clone", "--quiet", str(BUNDLE), f"{folder}/clone"], check=True)
        shutil.copytree(WHEELS, f"{folder}/clone/.gpu/wheels")
        environment = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
        environment |= {"PATH": f"{image.parent}:/usr/local/bin:/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
        return subprocess.run([str(image), "-m", "benchmarks.gpu", "--tiny"], cwd=f"{folder}/clone", env=environment).returncode
