"""What the tests share: a small real corpus, and pools of real ranks that are started once."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Two cores and two ranks: one thread each, so that neither waits for the other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
#: The sha256 of the text of `corpus` with Python 3.11.7.
MEASURED_TEXT = "7ea10d3633289482d62c72c0963e29b32350d162ba3b0ed60a8d697ce54764d7"


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
    return prepared(source, out / "tokens", "--tokenizer", "bpe:1024")


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of documents of 4 to 60 bytes, which are its tokens: several in every window."""
    out = tmp_path_factory.mktemp("short")
    source = out / "text"
    source.mkdir()
    for number in range(900):
        # The first word decides the others, so that what stood before the document says nothing of it.
        words = ["one", "three", "five", "sevens"][number % 4 : number % 4 + 1] * (1 + number * 7 % 9)
        (source / f"{number}.txt").write_text(f"{number}{' '.join(words)}.", encoding="utf-8")
    return prepared(source, out / "tokens", "--tokenizer", "bytes")


def prepared(source: Path, out: Path, *flags: str) -> Path:
    """A corpus made by the real command."""
    command = [sys.executable, "data_pipeline/prepare.py", "--source", source, "--out", out, *flags]
    subprocess.run([*command, "--val_fraction", "0.15", "--quiet"], cwd=ROOT, check=True)
    return out


@pytest.fixture
def measured_text(corpus: Path) -> None:
    """For tests whose bounds depend on the text of `corpus`: skips them where the standard library is not the one of Python 3.11.7."""
    text = b"".join(file.read_bytes() for file in sorted((corpus.parent / "text").iterdir()))
    if hashlib.sha256(text).hexdigest() != MEASURED_TEXT:
        pytest.skip("the bounds were measured on the standard library of Python 3.11.7")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="where the ranks train: cpu (default) or cuda, a GPU each")


def pytest_configure(config: pytest.Config) -> None:
    """DeepSpeed's accelerator, in this process and in all that it starts. Refuses a TMPDIR in which torch.compile fails on a CPU."""
    if " " in tempfile.gettempdir():
        raise pytest.UsageError(f"the folder for temporary files is {tempfile.gettempdir()!r}; set TMPDIR to one without a space")
    os.environ["DS_ACCELERATOR"] = config.getoption("--device")


class Pools:
    """Pools of ranks by size, each started when it is first asked for and kept for the whole session."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._exit = contextlib.ExitStack()
        self._pools: dict[int, Any] = {}

    def of(self, size: int) -> Any:
        """The pool of `size` ranks."""
        from tests.distributed.ranks import Ranks

        if size not in self._pools:
            self._pools[size] = self._exit.enter_context(Ranks(size, self.device))
        return self._pools[size]

    def close(self) -> None:
        self._exit.close()


@pytest.fixture(scope="session")
def pools(device):
    """All pools of ranks."""
    every = Pools(device)
    yield every
    every.close()


@pytest.fixture(scope="session")
def one_rank(pools):
    """A pool of one rank."""
    return pools.of(1)


@pytest.fixture(scope="session")
def two_ranks(pools):
    """A pool of two ranks."""
    return pools.of(2)


@pytest.fixture(scope="session")
def device(pytestconfig) -> str:
    """Where the ranks train, "cpu" or "cuda": pytest's option --device."""
    return pytestconfig.getoption("--device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what runs on a GPU only. What only the gate runs is long."""
    gc.freeze()  # what the tests import, a million objects, is no garbage: no collection looks through it again
    for item in items:
        if item.get_closest_marker("gate"):
            item.add_marker("long")
    if config.getoption("--device") == "cpu":
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="runs on a GPU (pytest --device cuda)"))


def on_this_machine(expression: str) -> bool:
    """The value of an expression about DeepSpeed's accelerator `accelerator`, asked in a process of its own."""
    code = f"from deepspeed.accelerator import get_accelerator; accelerator = get_accelerator(); print(bool({expression}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1] == "True"


@pytest.fixture(scope="session")
def has_libaio() -> bool:
    """Whether DeepSpeed's async_io can be built here, with which it offloads to a drive."""
    return on_this_machine("accelerator.create_op_builder('AsyncIOBuilder').is_compatible()")


@pytest.fixture
def fixed_nano(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset `nano` of known values: tuning the real one changes none of the arithmetic that a test expects."""
    from model.presets import PRESETS, ModelShape, Preset

    shape = ModelShape(n_layer=4, n_head=4, d_model=256, seq_len=128)
    preset = Preset(shape, lr=3e-3, global_batch_size=16, micro_batch_size=16, steps=300, warmup_steps=30)
    monkeypatch.setitem(PRESETS, "nano", preset)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A function that gives this process a processor of which Linux names these flags."""
    from launch.config import hardware

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
