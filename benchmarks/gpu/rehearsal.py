"""What is done before a GPU machine is at hand: pack the repository and the wheels that it lacks, and try all parts without it.

    python -m benchmarks.gpu pack
    python -m benchmarks.gpu rehearse --python python3.12

The rehearsal makes an environment of the packages that the machine is known to have (image.txt) and nothing else, clones the packed
repository, and runs every part there at small sizes on the CPU, without an index. Each part is killed once and goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.parts import BUNDLE, FOLDER, PARTS, ROOT, WHEELS, WORK, commands
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
    missing = set(map(canonical, names("carried.txt"))) - {canonical(wheel.name.split("-")[0]) for wheel in wheels}
    if missing:
        print(f"error: no wheel of {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    return 0


def canonical(name: str) -> str:
    return name.replace("_", "-").lower()


def make_image(python: str) -> Path:
    """An environment that has the packages of image.txt, and those of carried.txt not; the path of its interpreter."""
    folder = WORK / "image"
    found, listed = folder / "bin" / "python3", folder / "image.txt"
    text = (FOLDER / "image.txt").read_text(encoding="utf-8")
    if listed.exists() and listed.read_text(encoding="utf-8") == text:
        return found
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making {folder} of benchmarks/gpu/image.txt (some 6 GB on disk: torch is the CUDA build)", flush=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip("install", "--quiet", "-r", FOLDER / "image.txt", python=str(found))
    pip("uninstall", "--quiet", "--yes", *names("carried.txt"), python=str(found))
    listed.write_text(text, encoding="utf-8")
    return found


def rehearse(python: str) -> int:
    """Run every part in the machine's environment, each killed once and then resumed. Returns the exit code."""
    try:
        version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as reason:
        version = str(reason)
    if not version.startswith("Python 3.12."):
        print(f"error: --python {python}: {version}; the GPU machine has Python 3.12", file=sys.stderr)
        return 2
    if code := pack():
        return code
    image = make_image(python)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        there = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(BUNDLE), str(there)], check=True)
        shutil.copytree(WHEELS, there / ".gpu" / "wheels")
        environment = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
        environment |= {"PATH": f"{image.parent}:/usr/local/bin:/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
        for part in PARTS:
            command = [str(image), "-m", "benchmarks.gpu", part, "--tiny"]
            records = there / ".gpu" / "tiny" / f"{part}.json"
            kill_once(command, there, environment, records, len(commands(part, tiny=True)))
            kept = records.read_text(encoding="utf-8") if records.exists() else "{}"
            code = subprocess.run(command, cwd=there, env=environment).returncode
            found = json.loads(records.read_text(encoding="utf-8")) if records.exists() else {}
            if code or found.keys() != commands(part, tiny=True).keys():
                print(f"error: {part}: exit code {code}, records of {list(found)}", file=sys.stderr)
                return 1
            again = [name for name, old in json.loads(kept).items() if part != "setup" and found[name] != old]
            if again:
                print(f"error: {part}: measured again after the interruption: {', '.join(again)}", file=sys.stderr)
                return 1
            print(f"{part}: interrupted with {len(json.loads(kept))} of {len(found)} cells, resumed, complete", flush=True)
        shutil.rmtree(WORK / "tiny", ignore_errors=True)
        shutil.copytree(there / ".gpu" / "tiny", WORK / "tiny")
    print(f"rehearsal: all {len(PARTS)} parts are complete; the records are in {WORK / 'tiny'}")
    return 0


def kill_once(command: list[str], folder: Path, environment: dict[str, str], records: Path, cells: int) -> None:
    """Start a part and kill it, with all that it started: in the middle of its second cell, or of its only one."""
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    while process.poll() is None and cells > 1 and not records.exists():
        time.sleep(0.1)
    time.sleep(5)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
