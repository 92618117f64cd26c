"""A checkpoint as files: its name, its `state.json`, and the check that its files are those that the run wrote. Imports no torch.

    step-00000300/
        engine/, technique-00000.pt, ...
        state.json    step, tokens, samples, val_loss, ranks, the run's id, size and digest of every file, and a digest of all this

The digests are XXH3 in 128 bits (`Digest`). They detect damage and mixed-up files, not forgery: a file that somebody
forged runs no code either, since `launch/formats/tensor_files.py` reads all of them.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from launch.errors import UsageError
from launch.formats.metrics import read_text

STATE_FILE = "state.json"
#: What is said of a checkpoint without digests, which is loaded all the same.
NO_DIGESTS = "was written before checkpoints had digests; only the sizes of its files were checked"
#: Of the files that DeepSpeed and our readers look for by pattern.
READ_SUFFIXES = (".pt", ".swp")
_NAME = re.compile(r"step-([0-9]{8,18})")
BLOCK_BYTES = 2**25
_PIECE_BYTES = 2**20
#: Threads that read blocks at the same time; reading and digesting both release the GIL.
_READERS = 4


class DamagedCheckpoint(UsageError):
    """A checkpoint that is not as its run wrote it: one line with the file and what is wrong with it."""


def checkpoint_name(step: int) -> str:
    """The folder's name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether `name` is one that `checkpoint_name` gives; `step-best` and `step-00000300.bak` are not."""
    found = _NAME.fullmatch(name)
    return found is not None and checkpoint_name(int(found[1])) == name


def complete_checkpoints(folder: Path) -> list[Path]:
    """What has a checkpoint's name in `folder`, which a run gives to complete ones only, by step. Links count, also broken ones."""
    found = (path for path in folder.glob("step-*") if is_checkpoint_name(path.name))
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


# --- state.json -----------------------------------------------------------------------------------------------------------------------


def state_text(state: dict[str, Any], run_id: str | None, ranks: int, files: dict[str, dict[str, Any]]) -> str:
    """The content of `state.json`.

    Args:
        state: step, tokens, samples, val_loss.
        run_id: of the run, None where its `run.json` has none.
        ranks: how many wrote the checkpoint.
        files: `{"bytes": size, "xxh128": digest}` by path relative to the checkpoint.
    """
    whole = {**state, "ranks": ranks, "run_id": run_id, "files": dict(sorted(files.items()))}
    return json.dumps({**whole, "xxh128": _digest_of(whole)}, indent=2) + "\n"


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint.

    A checkpoint from before there were digests has neither `run_id` nor `xxh128`; its `files` hold sizes only.

    Raises:
        DamagedCheckpoint: it cannot be read, has other content than the run wrote, or belongs to another step.
    """
    file = checkpoint / STATE_FILE
    try:
        state = json.loads(read_text(file))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{file}: is missing") from None
    except (OSError, ValueError, RecursionError) as reason:
        raise DamagedCheckpoint(f"{file}: cannot be read ({' '.join(str(reason).split())[:120]})") from None
    if not isinstance(state, dict) or set(state) not in (set(_STATE), set(_STATE) | set(_SINCE_DIGESTS)):
        raise DamagedCheckpoint(f"{file}: does not have the keys of a checkpoint's state")
    for key, is_right in (_STATE | _SINCE_DIGESTS).items():
        if key in state and not is_right(state[key]):
            raise DamagedCheckpoint(f"{file}: {key} = {json.dumps(state[key])[:60]} is not a value that a run writes")
    if has_digests(state) and state["xxh128"] != _digest_of({key: value for key, value in state.items() if key != "xxh128"}):
        raise DamagedCheckpoint(f"{file}: its digest does not match its content")
    sizes = [isinstance(entry, int) for entry in state["files"].values()]
    if any(sizes) if has_digests(state) else not all(sizes):
        raise DamagedCheckpoint(f"{file}: its list of files is not one that a run writes")
    if checkpoint.name != checkpoint_name(state["step"]):
        raise DamagedCheckpoint(f"{file}: is of step {state['step']}, in a folder named {checkpoint.name}")
    return state


def has_digests(state: dict[str, Any]) -> bool:
    """Whether the checkpoint of this `read_state` was written with digests."""
    return "xxh128" in state


def file_sizes(state: dict[str, Any]) -> dict[str, int]:
    """Bytes of each file of a checkpoint, by path relative to it."""
    return {name: entry if isinstance(entry, int) else entry["bytes"] for name, entry in state["files"].items()}


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # bool is an int, so not isinstance


def _is_file_entry(value: object) -> bool:
    return _is_count(value) or (
        isinstance(value, dict) and set(value) == {"bytes", "xxh128"} and _is_count(value["bytes"]) and isinstance(value["xxh128"], str)
    )


def _is_inside(name: str) -> bool:
    return name.isascii() and name.isprintable() and not Path(name).is_absolute() and ".." not in Path(name).parts


_STATE: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "tokens", "samples"), _is_count),
    "ranks": lambda value: _is_count(value) and value > 0,
    "val_loss": lambda value: value is None or type(value) is float or (_is_count(value) and value < 2**63),
    "files": lambda value: isinstance(value, dict) and all(map(_is_file_entry, value.values())) and all(map(_is_inside, value)),
}
_SINCE_DIGESTS: dict[str, Callable[[Any], bool]] = {
    "run_id": lambda value: value is None or isinstance(value, str),
    "xxh128": lambda value: isinstance(value, str),
}


def _digest_of(state: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())


# --- the files ------------------------------------------------------------------------------------------------------------------------


class Digest:
    """The digest of a file's content, fed in order: XXH3 of the XXH3s of its blocks, which a reader can compute side by side."""

    def __init__(self) -> None:
        self.size = 0
        self._whole, self._block = xxhash.xxh3_128(), xxhash.xxh3_128()

    def update(self, data: Any) -> None:
        """Add bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            part = rest[: BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._block.update(part)
            self.size, rest = self.size + len(part), rest[len(part) :]
            if self.size % BLOCK_BYTES == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._whole.update(self._block.digest())
        self._block.reset()

    def entry(self) -> dict[str, Any]:
        """Size and digest of the whole, as `state.json` lists them; the last call."""
        if self.size % BLOCK_BYTES:
            self._end_block()
        return {"bytes": self.size, "xxh128": self._whole.hexdigest()}


def file_entry(file: Path) -> dict[str, Any]:
    """Size and digest of `file`, as `state.json` lists it; reads the whole file, several blocks at a time."""
    size, digest = file.stat().st_size, xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as stream, ThreadPoolExecutor(_READERS) as readers:
        for block in readers.map(lambda start: _block_digest(stream.fileno(), start), range(0, size, BLOCK_BYTES)):
            digest.update(block)
    return {"bytes": size, "xxh128": digest.hexdigest()}


def _block_digest(descriptor: int, start: int) -> bytes:
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    end = start + BLOCK_BYTES
    while start < end and (count := os.preadv(descriptor, [piece[: end - start]], start)):
        digest.update(piece[:count])
        start += count
    return digest.digest()


def verify(checkpoint: Path, run_id: object, share: slice = slice(None)) -> dict[str, Any]:
    """Compare a checkpoint with what its run wrote, and return its `read_state`. Without digests, only sizes are compared.

    Args:
        run_id: of the run's `run.json`; None for a run from before there were ids, whose checkpoints have none.
        share: the part of the files that is read, of their list by falling size: rank i of n takes `slice(i, None, n)`.

    Raises:
        DamagedCheckpoint: it is of another run; a file is missing, has another size or other content; or a `.pt` or `.swp` file is there
            that the run did not write.
    """
    state = read_state(checkpoint)
    if state.get("run_id") != run_id:
        raise DamagedCheckpoint(
            f"{checkpoint / STATE_FILE}: run_id is {state.get('run_id')}, and {run_id} in run.json: of another run, or edited"
        )
    listed, sizes = state["files"], file_sizes(state)
    try:
        # As its readers look: a folder in it may be a link.
        places = {(checkpoint / name).parent for name in listed}
        for file in (*checkpoint.rglob("*"), *(file for place in places for file in place.iterdir())):
            if file.suffix in READ_SUFFIXES and str(file.relative_to(checkpoint)) not in listed:
                raise DamagedCheckpoint(f"{file}: the run did not write this file")
        for name, size in sizes.items():
            found = (checkpoint / name).stat()
            if not stat.S_ISREG(found.st_mode):
                raise DamagedCheckpoint(f"{checkpoint / name}: is not a regular file")
            if found.st_size != size:
                raise DamagedCheckpoint(f"{checkpoint / name}: has {found.st_size:,} bytes, {size:,} were written")
    except OSError as reason:
        raise DamagedCheckpoint(f"{reason.filename}: cannot be read ({reason.strerror})") from None
    if has_digests(state):
        for name in sorted(sizes, key=lambda name: (-sizes[name], name))[share]:
            if fault := _content_fault(checkpoint / name, listed[name]):
                raise DamagedCheckpoint(fault)
    return state


def _content_fault(file: Path, entry: dict[str, Any]) -> str | None:
    try:
        found = file_entry(file)
    except OSError as reason:
        return f"{file}: cannot be read ({reason.strerror})"
    return None if found == entry else f"{file}: its digest is {found['xxh128']}, {entry['xxh128']} was written"


def newest_good(checkpoints: Iterable[Path], find_fault: Callable[[Path], str | None]) -> tuple[Path | None, list[str]]:
    """The newest of `checkpoints` (oldest first) without a fault, None where all have one; and the faults of those passed over."""
    passed_over: list[str] = []
    for checkpoint in reversed(list(checkpoints)):
        if (fault := find_fault(checkpoint)) is None:
            return checkpoint, passed_over
        passed_over.append(fault)
    return None, passed_over
