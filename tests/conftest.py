"""What the tests share: a small real corpus, and pools of real ranks that are started once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # the tests of CUDA paths set their own
# Two cores and two ranks: one thread each, so that neither waits for the other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of a few packages of the standard library, 1,024 ids, made by the real command."""
    import asyncio
    import json

    out = tmp_path_factory.mktemp("corpus")
    source = out / "text"
    source.mkdir()
    for package in (asyncio, json):
        for file in sorted(Path(package.__file__).parent.glob("*.py")):
            (source / f"{package.__name__}_{file.name}").write_bytes(file.read_bytes())
    command = [sys.executable, "data_pipeline/prepare.py", "--source", source, "--out", out / "tokens", "--tokenizer", "bpe:1024"]
    subprocess.run([*command, "--val_fraction", "0.15", "--quiet"], cwd=ROOT, check=True)
    return out / "tokens"


class Pools:
    """Pools of ranks by device and size, each started when it is first asked for and kept for the whole session."""

    def __init__(self) -> None:
        self._exit = contextlib.ExitStack()
        self._pools: dict[tuple[str, int], Any] = {}

    def of(self, size: int, device: str = "cpu") -> Any:
        from tests.distributed.ranks import Ranks

        if (device, size) not in self._pools:
            self._pools[device, size] = self._exit.enter_context(Ranks(size, device))
        return self._pools[device, size]

    def close(self) -> None:
        self._exit.close()


@pytest.fixture(scope="session")
def pools():
    """All pools of ranks."""
    every = Pools()
    yield every
    every.close()


@pytest.fixture(scope="session")
def one_rank(pools):
    """A pool of one rank, on the CPU."""
    return pools.of(1)


@pytest.fixture(scope="session")
def two_ranks(pools):
    """A pool of two ranks, on the CPU."""
    return pools.of(2)


def gpus() -> int:
    """How many CUDA GPUs this machine has."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `device` runs on the CPU, and on CUDA where there is a GPU."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)], scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are: a rank needs one of its own."""
    for item in items:
        if item.get_closest_marker("cuda"):
            needed = item.callspec.params.get("ranks", 1) if hasattr(item, "callspec") else 1
            if gpus() < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), this machine has {gpus()}"))


def on_this_machine(expression: str) -> bool:
    """The value of an expression about DeepSpeed's accelerator `accelerator`, asked in a process of its own: this one imports no torch."""
    code = f"from deepspeed.accelerator import get_accelerator; accelerator = get_accelerator(); print(bool({expression}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1] == "True"


@pytest.fixture(scope="session")
def has_fp16() -> bool:
    """Whether this machine's processor or GPU computes in fp16, as DeepSpeed sees it."""
    return on_this_machine("accelerator.is_fp16_supported()")


@pytest.fixture(scope="session")
def has_libaio() -> bool:
    """Whether DeepSpeed's async_io can be built here, with which it offloads to a drive."""
    return on_this_machine("accelerator.create_op_builder('AsyncIOBuilder').is_compatible()")


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A function that gives this process a processor of which Linux names these flags."""
    from launch.run import hardware

    def become(*flags: str, name: str = "flags") -> None:
        (tmp_path / "cpuinfo").write_text(
            f"processor\t: 0\nmodel name\t: Some 5\n{name}\t\t: fpu {' '.join(flags)} sse\nbugs\t\t: none\n\n" * 2
        )
        monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    return become


@pytest.fixture
def drive(has_libaio) -> None:
    """For tests that offload to a drive."""
    if not has_libaio:
        pytest.skip("libaio with its headers is not installed (apt install libaio-dev)")
