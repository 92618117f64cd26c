"""What DeepSpeed saves, copied while the training loop stands still and written while it goes on.

DeepSpeed's own decoupled writer (0.19.8) waits for the files before the next update, so that the loop stands still for all that one
forward and backward pass does not cover, and torch's `torch.distributed.checkpoint.async_save` writes a form that DeepSpeed cannot
load. So the files stay DeepSpeed's, written by its plain writer, from copies that torch's stager makes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from launch.formats.checkpoint_files import Digest
from launch.formats.tensor_files import load_tensors
from launch.training.distributed import Collectives, stager


class Snapshots(TorchCheckpointEngine):  # type: ignore[misc] # DeepSpeed has no types
    """DeepSpeed's plain writer and reader, put into `engine`.

    The writer can keep a copy of what it is to write and write that later, and digests what it writes. The reader loads tensors only.

    The copies are in the host's memory (pinned where there is a GPU), and are used again by the next snapshot: the first pays for page
    faults, which take three times as long as copying.
    """

    def __init__(self, engine: Any, collectives: Collectives):
        super().__init__(engine._config)
        self._engine, self._stager = engine, stager(collectives.device)
        self._kept: list[tuple[Any, str]] = []
        self.later = False  # whether `save` keeps what it is given for `write`
        self.written: dict[Path, dict[str, Any]] = {}  # since `take`, with size and digest as `state.json` lists them
        engine.checkpoint_engine = self

    def take(self, later: bool) -> None:
        """Begin a checkpoint, whose files are written at once or `later`."""
        self.later, self._kept, self.written = later, [], {}

    def save(self, state_dict: Any, path: str) -> None:
        """Called by DeepSpeed for each of its files."""
        if self.later:
            self._kept.append((self._stager.stage(state_dict), path))
        else:
            self._write(state_dict, path)

    def write(self) -> None:
        """Write what `save` has kept, in any thread."""
        while self._kept:
            self._write(*self._kept.pop(0))

    def _write(self, state_dict: Any, path: str) -> None:
        self.written[Path(path)] = {}
        with _DigestedFile(path) as file:
            torch.save(state_dict, file)
        self.written[Path(path)] = file.entry()

    def load(self, path: str, map_location: Any = None) -> Any:
        """Called by DeepSpeed for each of its files; on the CPU, which is all that it asks for."""
        return load_tensors(path, deepspeed_objects=True)

    def rehearsal(self, *more: Any) -> Callable[[], None]:
        """What has the memory of this rank's snapshots ready before the first one; for another thread, while training goes on.

        It copies, and nobody reads what it copied. Where it cannot, the first snapshot cannot either, and says so.

        Args:
            more: what is saved beside the engine's state.
        """
        states = self._states(*more)

        def rehearse() -> None:
            with contextlib.suppress(Exception):
                self._stager.stage(states)

        return rehearse

    def bytes(self, *more: Any) -> int:
        """Of this rank's snapshot: every storage once and whole, as torch saves it."""
        storages = [tensor.untyped_storage() for tensor in _tensors(self._states(*more))]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _states(self, *more: Any) -> list[Any]:
        """What of the engine's state this rank's files will hold."""
        engine, states = self._engine, list(more)
        if engine.save_non_zero_checkpoint:
            states.append(engine.module.state_dict())
        if engine.save_zero_checkpoint or (engine.save_non_zero_checkpoint and not engine.zero_optimization()):
            states.append(engine.optimizer.state_dict())
        return states


class _DigestedFile(io.BufferedWriter):
    """A file that is written from its first byte to its last, with the size and the digest of what it was given."""

    def __init__(self, path: str):
        super().__init__(io.FileIO(path, "wb"))
        self._digest = Digest()

    def write(self, data: Any) -> int:
        """Called by torch for each header, and for the memory of each tensor as a whole."""
        self._digest.update(data)
        return super().write(data)

    def entry(self) -> dict[str, Any]:
        """As `launch.formats.checkpoint_files.file_entry` would read it."""
        return self._digest.entry()


def _tensors(holder: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists and dictionaries."""
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, (dict, list, tuple)):
        for item in holder.values() if isinstance(holder, dict) else holder:
            yield from _tensors(item)


def room_for_snapshots(ranks: int) -> int:
    """Bytes of this host's memory that each of its `ranks` can have, less what this process takes again at the peak of its next step.

    Under a limit (cgroup v2: of a container, or of a job of Slurm or systemd), of that.
    """
    free = 1024 * _field("/proc/meminfo", "MemAvailable:")
    again = 1024 * (_field("/proc/self/status", "VmHWM:") - _field("/proc/self/status", "VmRSS:"))
    with contextlib.suppress(OSError, StopIteration):  # no cgroup v2
        free = min([free, *_left_by_limits(Path("/sys/fs/cgroup"), _own_group())])
    return free // ranks - again


def _own_group() -> str:
    return next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))


def _left_by_limits(mount: Path, group: str) -> Iterator[int]:
    """What each limit leaves under which `group` stands: its own, and those of the groups around it."""
    folder = mount / group.lstrip("/")
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError):  # seen from a container there is no such place; or "max"
            limit, used = (int((place / name).read_text()) for name in ("memory.max", "memory.current"))
            yield limit - used + _field(place / "memory.stat", "inactive_file")
        if place == mount:
            return


def _field(file: str | Path, name: str) -> int:
    """The number behind `name` at the start of a line; sizes in /proc are in KiB."""
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.split()[0] == name)
