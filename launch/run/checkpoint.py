"""Checkpoints: written under a temporary name, renamed when complete, so that what has a checkpoint's name is one.

    runs/<name>/checkpoints/step-00000300/
        engine/       what DeepSpeed wrote (`latest` beside it, so that its own zero_to_fp32.py works on the folder)
        state.json    step, tokens, samples, validation loss, ranks, and the size of every file
        technique-00000.pt   per rank, only where a technique has state that cannot be derived

The newest `keep` stay, and the best by validation loss.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.run.errors import UsageError
from launch.run.folder import write_atomically

if TYPE_CHECKING:
    from launch.engine.distributed import Collectives
    from recipes.technique import Technique

PREFIX = "step-"
ENGINE_TAG = "engine"
#: Of an optimizer's groups of parameters: what the JSON sets and no state depends on (amsgrad and momentum have some), beside the learning
#: rate, which follows the schedule.
SETTINGS = ("betas", "eps", "weight_decay", "dampening", "alpha", "lr_decay")


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(path.parent for path in folder.glob(f"{PREFIX}*/state.json"))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The `state.json` of a checkpoint.

    Raises:
        UsageError: somebody has damaged it since.
    """
    try:
        return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise UsageError(f"{checkpoint}: state.json cannot be read ({reason}); {_REMEDY}") from None


#: What to do about a checkpoint that cannot be loaded.
_REMEDY = "remove this checkpoint to resume from the one before"


def check_files(checkpoint: Path) -> None:
    """Compare the files of a complete checkpoint with the sizes noted when it was written.

    Raises:
        UsageError: one is missing, or has another size.
    """
    for name, size in read_state(checkpoint)["files"].items():
        file = checkpoint / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            fault = "is missing" if found is None else f"has {found:,} bytes, {size:,} were written"
            raise UsageError(f"{checkpoint}: {name} {fault}; {_REMEDY}")


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
        """Write the checkpoint of `state["step"]`. A kill at any moment leaves it complete or absent.

        Raises:
            SystemExit: it cannot be written (exit code 1, one line from each rank that could not); the older ones are as they were.
        """
        final = self.folder / f"{PREFIX}{state['step']:08d}"
        temporary = self.folder / f".tmp-{final.name}"
        complete = final in complete_checkpoints(self.folder)
        self.collectives.barrier()  # all ranks have looked before anything changes
        if complete:
            return final
        with self._ending_on_failure(
            f"{final}: could not be written", "{free} MiB are free; the older checkpoints are intact: --resume goes on from them"
        ):
            if self.collectives.rank == 0:
                _remove_leftovers(self.folder)
                if final.exists():  # without a state.json: somebody took files away
                    _remove(final)
            self.collectives.barrier()
            with technique.agreed_weights():
                engine.save_checkpoint(str(temporary), tag=ENGINE_TAG)
            self._save_technique(temporary, technique)
            self.collectives.barrier()
            if self.collectives.local_rank == 0:
                for path in temporary.rglob("*"):
                    _sync(path)
            self.collectives.barrier()
            if self.collectives.rank == 0:
                files = {str(path.relative_to(temporary)): path.stat().st_size for path in temporary.rglob("*") if path.is_file()}
                complete_state = {**state, "ranks": self.collectives.world_size, "files": dict(sorted(files.items()))}
                write_atomically(temporary / "state.json", json.dumps(complete_state, indent=2) + "\n")
                _sync(temporary)
                os.rename(temporary, final)
                _sync(self.folder)
                self._prune()
            self.collectives.barrier()
        return final

    def newest(self) -> Path | None:
        """The newest complete checkpoint, None where there is none."""
        return next(reversed(complete_checkpoints(self.folder)), None)

    def load_newest(self, engine: Any, technique: Technique) -> dict[str, Any] | None:
        """Load the newest complete checkpoint into the engine and the techniques; its state, or None where there is none.

        Another number of ranks cannot use the ranks' own states: the techniques that have some go on without.

        Raises:
            UsageError: a file of it is missing or has lost bytes, or a technique cannot go on without what other ranks have saved.
            SystemExit: its bytes are not what was written (exit code 1, one line from each rank that saw it).
        """
        newest = self.newest()
        if newest is None:
            return None
        check_files(newest)  # by every rank, so that all of them end on what any of them would
        state = read_state(newest)
        others = state["ranks"] != self.collectives.world_size
        if others and any(newest.glob("technique-*.pt")):
            try:
                technique.forget_state(f"written by {state['ranks']} rank(s), and this job has {self.collectives.world_size}")
            except ValueError as reason:
                raise UsageError(f"{newest}: a technique's state belongs to its rank, {reason}; start {state['ranks']} ranks") from None
        with self._ending_on_failure(f"{newest}: could not be loaded", _REMEDY):
            with _own_settings(engine):
                path, _ = engine.load_checkpoint(str(newest), tag=ENGINE_TAG)
            if path is None:
                raise RuntimeError("DeepSpeed found nothing in it")
            if not others and (file := newest / self._technique_file()).exists():
                import torch

                technique.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
        return state

    @contextlib.contextmanager
    def _ending_on_failure(self, failure: str, remedy: str) -> Iterator[None]:
        """Say in one line why this rank could not go on, and end it; the launcher ends the others.

        Nobody can wait for them here: they may stand in a collective of the engine that this rank will never enter.
        """
        try:
            yield
        except Exception as reason:
            text = " ".join(str(reason).split())
            free = shutil.disk_usage(self.folder).free // 2**20  # torch does not say that a disk is full
            line = f"error: {failure} by rank {self.collectives.rank} ({type(reason).__name__}: {text[:200]}); {remedy.format(free=free)}"
            print(line, file=sys.stderr, flush=True)
            raise SystemExit(1) from None

    def _technique_file(self) -> str:
        return f"technique-{self.collectives.rank:05d}.pt"

    def _save_technique(self, folder: Path, technique: Technique) -> None:
        if state := technique.state_dict():
            import torch

            torch.save(state, folder / self._technique_file())

    def _prune(self) -> None:
        checkpoints = complete_checkpoints(self.folder)
        losses = {path: loss for path in checkpoints if (loss := read_state(path).get("val_loss")) is not None and math.isfinite(loss)}
        best = min(losses, key=losses.__getitem__) if losses else None
        for path in checkpoints[: -self.keep]:
            if path != best:
                _remove(path)


@contextlib.contextmanager
def _own_settings(engine: Any) -> Iterator[None]:
    """Keep the optimizer's settings, which torch takes from the checkpoint together with its state, those of this run's configuration."""
    asked = [{key: group[key] for key in SETTINGS if key in group} for group in engine.optimizer.param_groups]
    yield
    for group, settings in zip(engine.optimizer.param_groups, asked, strict=True):
        group.update(settings)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. Renamed first: half of a removal must not look like one."""
    trash = checkpoint.with_name(f".trash-{checkpoint.name}")
    os.rename(checkpoint, trash)
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
