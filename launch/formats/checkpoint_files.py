"""A checkpoint on disk: its name, its `state.json`, and the check that its files are as the run wrote them.

    step-00000300/
        engine/, technique-00000.pt, ...
        state.json    step, tokens, samples, val_loss, spike_window, ranks, run_id, size and digest of every file, and a digest of all this

Digests are XXH3 (128 bits) of the XXH3s of a file's blocks, so that several blocks can be read at once. They detect damaged and mixed-up
files, not forged ones; a forged file cannot run code either, since `launch/formats/tensor_files.py` unpickles tensors only.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from launch.errors import UsageError
from launch.formats.files import read_text

STATE_FILE = "state.json"
#: The folder of what DeepSpeed writes, which it calls a tag.
ENGINE_TAG = "engine"
#: Files that DeepSpeed and our readers find by pattern, so that an extra one would be loaded.
LOADED_SUFFIXES = (".pt", ".swp")
BLOCK_BYTES = 2**25
#: Threads that read blocks of a file at once; reading and digesting release the GIL.
READERS = 4
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")  # eight digits, or more without leading zeros


#: Prefix of the name of a checkpoint while it is written, downloaded or removed.
TEMPORARY = ".tmp-"


class DamagedCheckpoint(UsageError):
    """A checkpoint that differs from what its run wrote: one line with the file and the difference."""


def checkpoint_name(step: int) -> str:
    """The folder's name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int:
    """The step in a name that `checkpoint_name` returned."""
    return int(name.removeprefix("step-"))


def is_checkpoint_name(name: str) -> bool:
    """Whether `name` is one that `checkpoint_name` returns; `step-best` and `step-00000300.bak` are not."""
    return _NAME.fullmatch(name) is not None


def checkpoint_at(given: str) -> Path:
    """The absolute path of the checkpoint of `--branch_from`.

    Links are kept as they are: the checkpoint, or the folder of checkpoints, may lie elsewhere.

    Raises:
        UsageError: it is no checkpoint of a run.
    """
    path = Path(os.path.abspath(given))
    path = path if is_checkpoint_name(path.name) else path.resolve()  # a link by another name
    if not is_checkpoint_name(path.name) or not path.is_dir():
        raise UsageError(f"--branch_from {given}: no such checkpoint; give runs/NAME/checkpoints/step-00000300")
    return path


def complete_checkpoints(folder: Path) -> list[Path]:
    """The paths in `folder` with the name of a checkpoint, by step. A run gives such a name to complete checkpoints only."""
    found = (path for path in folder.glob("step-*") if is_checkpoint_name(path.name))
    return sorted(found, key=lambda path: checkpoint_step(path.name))


def outdated(losses: dict[str, float | None], keep: int) -> list[str]:
    """The checkpoints to remove: all but the newest `keep` and the best. `losses` has their validation losses by name, oldest first."""
    finite = {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}
    best = min(finite, key=finite.__getitem__, default=None)
    return [name for name in list(losses)[:-keep] if name != best]


def what_resume_does(folder: Path) -> str:
    """The end of the message of a run that ends early: from which checkpoint in `folder` a resume continues."""
    newest = next(reversed(complete_checkpoints(folder)), None)
    return f"--resume continues from {newest.name}" if newest else "there is no checkpoint yet: --resume starts at step 0"


def state_text(state: dict[str, Any], run_id: str | None, ranks: int, files: dict[str, dict[str, Any]]) -> str:
    """The content of `state.json`.

    Args:
        state: step, tokens, samples, val_loss, spike_window.
        run_id: from the run's `run.json`.
        ranks: how many ranks wrote the checkpoint.
        files: the `file_entry` of each file, by path relative to the checkpoint.
    """
    whole = {**state, "ranks": ranks, "run_id": run_id, "files": dict(sorted(files.items()))}
    return json.dumps({**whole, "xxh128": _digest_of(whole)}, indent=2) + "\n"


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint, without its own digest.

    Raises:
        DamagedCheckpoint: it cannot be read, its content was changed, or it belongs to another step.
    """
    file = checkpoint / STATE_FILE
    try:
        state = json.loads(read_text(file))
        intact = state.pop("xxh128") == _digest_of(state)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{file}: is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        raise DamagedCheckpoint(f"{file}: cannot be read ({' '.join(str(reason).split())[:120]})") from None
    if not intact:
        raise DamagedCheckpoint(f"{file}: its digest does not match its content")
    if not all(map(_is_inside, state["files"])):
        raise DamagedCheckpoint(f"{file}: lists a file outside of the checkpoint")
    if checkpoint.name != checkpoint_name(state["step"]):
        raise DamagedCheckpoint(f"{file}: is of step {state['step']}, in a folder named {checkpoint.name}")
    return state


def _is_inside(name: str) -> bool:
    return name.isascii() and name.isprintable() and not Path(name).is_absolute() and ".." not in Path(name).parts


def _digest_of(state: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())


def file_entry(file: Path) -> dict[str, Any]:
    """Size and digest of `file`, as `state.json` lists them. Reads the whole file, several blocks at once."""
    size, blocks = file.stat().st_size, xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as stream, ThreadPoolExecutor(READERS) as readers:
        for digest in readers.map(lambda start: _block_digest(stream.fileno(), start), range(0, size, BLOCK_BYTES)):
            blocks.update(digest)
    return {"bytes": size, "xxh128": blocks.hexdigest()}


def _block_digest(descriptor: int, start: int) -> bytes:
    digest, piece, end = xxhash.xxh3_128(), memoryview(bytearray(2**20)), start + BLOCK_BYTES
    while start < end and (count := os.preadv(descriptor, [piece[: end - start]], start)):
        digest.update(piece[:count])
        start += count
    return digest.digest()


def verify(checkpoint: Path, run_id: object, share: slice = slice(None)) -> dict[str, Any]:
    """Compare a checkpoint with what its run wrote, and return its `read_state`.

    Args:
        run_id: from the run's `run.json`.
        share: the files that this process digests, of all files in descending order of size: `slice(i, None, n)` for rank i of n.

    Raises:
        DamagedCheckpoint: it is of another run; a file is missing, has another size or other content; or there is a `.pt` or `.swp` file
            that the run did not write.
    """
    state = read_state(checkpoint)
    if state["run_id"] != run_id:
        raise DamagedCheckpoint(f"{checkpoint / STATE_FILE}: of another run: run_id is {state['run_id']}, in run.json {run_id}")
    listed = state["files"]
    for folder, _, names in os.walk(checkpoint, followlinks=True):
        for file in (Path(folder, name) for name in names):
            if file.suffix in LOADED_SUFFIXES and str(file.relative_to(checkpoint)) not in listed:
                raise DamagedCheckpoint(f"{file}: the run did not write this file")
    try:
        for name, entry in listed.items():
            found = os.stat(checkpoint / name)
            if not stat.S_ISREG(found.st_mode):  # reading a pipe may block forever
                raise DamagedCheckpoint(f"{checkpoint / name}: is not a regular file")
            if found.st_size != entry["bytes"]:
                raise DamagedCheckpoint(f"{checkpoint / name}: has {found.st_size:,} bytes, {entry['bytes']:,} were written")
        for name in sorted(listed, key=lambda name: (-listed[name]["bytes"], name))[share]:
            if file_entry(checkpoint / name) != listed[name]:
                raise DamagedCheckpoint(f"{checkpoint / name}: its digest is not the one that was written")
    except OSError as reason:
        raise DamagedCheckpoint(f"{reason.filename or checkpoint}: cannot be read ({reason.strerror})") from None
    return state


def newest_good(checkpoints: Iterable[Path], check: Callable[[Path], object]) -> tuple[Path | None, list[str]]:
    """The newest of `checkpoints` (oldest first) for which `check` does not raise DamagedCheckpoint, and the faults of newer ones."""
    faults: list[str] = []
    for checkpoint in reversed(list(checkpoints)):
        try:
            check(checkpoint)
            return checkpoint, faults
        except DamagedCheckpoint as fault:
            faults.append(str(fault))
    return None, faults
