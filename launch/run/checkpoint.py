"""Checkpoints: written under a temporary name, renamed when complete, so that what has a checkpoint's name is one.

    runs/<name>/checkpoints/step-00000300/
        engine/       what DeepSpeed wrote (`latest` beside it, so that its own zero_to_fp32.py works on the folder)
        state.json    step, tokens, samples, validation loss, ranks
        technique-00000.pt   per rank, only where a technique has state that cannot be derived

The newest `keep` stay, and the best by validation loss.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.run.folder import write_atomically

if TYPE_CHECKING:
    from launch.engine.distributed import Collectives
    from recipes.technique import Technique

PREFIX = "step-"
ENGINE_TAG = "engine"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(path.parent for path in folder.glob(f"{PREFIX}*/state.json"))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint."""
    return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))


class Checkpoints:
    """Writes, prunes and reads the checkpoints of one run; every method is called by all ranks together.

    Args:
        folder: `runs/<name>/checkpoints`.
        keep: how many of the newest stay.
        collectives: for barriers; global rank 0 renames and prunes.
    """

    def __init__(self, folder: Path, keep: int, collectives: Collectives):
        self.folder, self.keep, self.collectives = folder, keep, collectives

    def save(self, engine: Any, technique: Technique, state: dict[str, Any]) -> Path:
        """Write the checkpoint of `state["step"]`. A kill at any moment leaves it complete or absent."""
        final = self.folder / f"{PREFIX}{state['step']:08d}"
        if self.collectives.rank == 0:
            _remove_leftovers(self.folder)
        self.collectives.barrier()
        if final.exists():
            return final
        temporary = self.folder / f".tmp-{final.name}"
        engine.save_checkpoint(str(temporary), tag=ENGINE_TAG)
        self._save_technique(temporary, technique)
        if self.collectives.local_rank == 0:
            for path in (path for path in temporary.rglob("*") if path.is_file()):
                _sync(path)
        self.collectives.barrier()
        if self.collectives.rank == 0:
            write_atomically(temporary / "state.json", json.dumps({**state, "ranks": self.collectives.world_size}, indent=2) + "\n")
            _sync(temporary)
            os.rename(temporary, final)
            _sync(self.folder)
            self._prune()
        self.collectives.barrier()
        return final

    def load_newest(self, engine: Any, technique: Technique) -> dict[str, Any] | None:
        """Load the newest complete checkpoint into the engine and the techniques; its state, or None where there is none."""
        checkpoints = complete_checkpoints(self.folder)
        if not checkpoints:
            return None
        path, _ = engine.load_checkpoint(str(checkpoints[-1]), tag=ENGINE_TAG)
        if path is None:
            raise RuntimeError(f"{checkpoints[-1]}: DeepSpeed could not load it; remove it to resume from the one before")
        file = checkpoints[-1] / f"technique-{self.collectives.rank:05d}.pt"
        if file.exists():
            import torch

            technique.load_state_dict(torch.load(file, weights_only=True))
        return read_state(checkpoints[-1])

    def _save_technique(self, folder: Path, technique: Technique) -> None:
        if state := technique.state_dict():
            import torch

            torch.save(state, folder / f"technique-{self.collectives.rank:05d}.pt")

    def _prune(self) -> None:
        checkpoints = complete_checkpoints(self.folder)
        losses = {path: loss for path in checkpoints if (loss := read_state(path).get("val_loss")) is not None}
        best = min(losses, key=losses.get) if losses else None
        for path in checkpoints[: -self.keep]:
            if path != best:
                # Renamed first: half of a removal must not look like a checkpoint.
                trash = path.with_name(f".trash-{path.name}")
                os.rename(path, trash)
                shutil.rmtree(trash)


def _remove_leftovers(folder: Path) -> None:
    """What a kill left half-written or half-removed."""
    for path in (*folder.glob(".tmp-*"), *folder.glob(".trash-*")):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
