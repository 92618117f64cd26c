"""Writes the files of a checkpoint from copies in host memory, while training continues.

DeepSpeed's own decoupled writer (0.19.8) blocks the next update until its files are written. torch's `async_save`
(`torch.distributed.checkpoint`) writes a format that DeepSpeed cannot load. So torch's stager makes the copies here, and DeepSpeed's plain
writer writes them as DeepSpeed's files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch.utils._pytree import tree_leaves

from launch.formats.checkpoint_files import file_entry
from launch.formats.tensor_files import load_tensors
from launch.training.ranks.distributed import Collectives, stager
from recipes.technique import Technique

#: The share of a host's free memory that copies may take.
USABLE_MEMORY = 0.9


class Snapshots(TorchCheckpointEngine):  # type: ignore[misc] # DeepSpeed has no types
    """DeepSpeed's writer and reader of checkpoint files, installed in `ds_engine`.

    The writer either copies its input, to be written by `write_copies`, or writes it at once, and digests the files. The reader loads only
    tensors. The memory of the copies (pinned if there is a GPU) is allocated once and reused.

    Args:
        technique: its state is saved beside DeepSpeed's files, so its copy needs memory too.
        log: writes one line to the log.
    """

    def __init__(self, ds_engine: Any, technique: Technique, collectives: Collectives, log: Callable[[str], None]):
        super().__init__(ds_engine._config)
        self._ds_engine, self._technique, self._collectives, self._log = ds_engine, technique, collectives, log
        self._copy = stager(collectives.device)
        self._copies: list[tuple[Any, str]] = []
        self._entries: dict[Path, dict[str, Any]] = {}
        self._copying = False
        self._fits: bool | None = None  # whether the copies fit into host memory, once that is known
        ds_engine.checkpoint_engine = self

    def begin(self, copying: bool) -> None:
        """Begin a checkpoint. If `copying` and memory suffices, `save` keeps copies for `write_copies`; otherwise it writes at once."""
        self._copying, self._copies, self._entries = copying and self._fits is not False, [], {}

    def save(self, state_dict: Any, path: str) -> None:
        """Called by DeepSpeed for each of its files."""
        if self._copying and self._fits is None:  # only before the first copy: its memory is reused
            self._fits = self._copying = self._fit(state_dict)
        if self._copying:
            self._copies.append((self._copy(state_dict), path))
        else:
            self._write_file(state_dict, path)

    def write_copies(self) -> dict[Path, dict[str, Any]]:
        """Write the copies; any thread may call this. Returns the size and digest of all files since `begin`, for `state.json`."""
        while self._copies:
            self._write_file(*self._copies.pop(0))
        return self._entries

    def _write_file(self, state_dict: Any, path: str) -> None:
        with open(path, "wb") as file:
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())
        self._entries[Path(path)] = file_entry(Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Called by DeepSpeed for each of its files, always with the CPU as `map_location`."""
        return load_tensors(path, deepspeed_objects=True)

    def _fit(self, state_dict: Any) -> bool:
        own = self._technique.state_dict()
        states = (state_dict, self._ds_engine.optimizer.state_dict(), own)
        storages = [leaf.untyped_storage() for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor)]
        needed = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        only_rank_0_copies = self._ds_engine.zero_optimization_stage() == 0 and not own
        room = USABLE_MEMORY * free_host_memory() / (1 if only_rank_0_copies else self._collectives.ranks_of_host)
        if needed > room:
            sizes = f"{needed / 2**30:,.2f} GiB, and its share of the host's free memory is {room / 2**30:,.2f}"
            self._log(f"training will wait while checkpoints are written: the copy of a rank needs {sizes}")
        return needed <= room


def free_host_memory() -> int:
    """Bytes of memory that this process can still allocate, limited by the host or by its tightest cgroup (v2)."""
    free: int = psutil.virtual_memory().available
    with contextlib.suppress(OSError, StopIteration):  # no cgroup v2
        group = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        free = min([free, *_left_by_cgroups(Path("/sys/fs/cgroup"), group)])
    return free


def _left_by_cgroups(mount: Path, group: str) -> Iterator[int]:
    """The free bytes under the limit of `group` and of each group around it."""
    for folder in (mount / group.lstrip("/"), *(mount / group.lstrip("/")).parents):
        with contextlib.suppress(OSError, ValueError):  # a container does not see the groups around it; "max" is no limit
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            yield limit - used + _field(folder / "memory.stat", "inactive_file")
        if folder == mount:
            return


def _field(file: Path, name: str) -> int:
    """The number in the line of `file` that begins with `name`."""
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.split()[0] == name)
