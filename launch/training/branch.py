"""Starts a run from a checkpoint of another run (`--branch_from`): its weights, optimizer state, and position in the data.

A long run with a constant rate then serves several lengths: each branch decays at a length of its own, and is the run that decayed there
from its start (arXiv 2405.18392, section 4). A branch is a folder that holds this one checkpoint and the metrics up to it, as a run's
folder does that was stopped there. From then on it is resumed.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from launch.config.run_config import RunConfig
from launch.config.token_schedule import STABLE_DECAY, token_schedule
from launch.errors import UsageError
from launch.formats.checkpoint_files import STATE_FILE, DamagedCheckpoint, is_checkpoint_name, read_state, state_text
from launch.formats.files import write_atomically
from launch.formats.metrics import parse_line, read_run_json, split_lines
from launch.training.metrics_writer import METRICS_FILE
from launch.training.run_json import resume_description


def start_branch(config: RunConfig, run: Path, description: dict[str, Any]) -> None:
    """Make the folder `run`, which does not exist, from the checkpoint `config.branch_from`, which is not changed.

    The files of the checkpoint are linked where the file system allows it, and copied elsewhere.

    Args:
        description: of this run, as `launch.training.provenance.describe_run` returns it.

    Raises:
        UsageError: it is no checkpoint of a run, the run that wrote it is another one than `config`, or the rates of the two differ up to
            it. Nothing is written then.
    """
    checkpoint = Path(str(config.branch_from)).resolve()
    source = checkpoint.parent.parent
    if not is_checkpoint_name(checkpoint.name) or not checkpoint.is_dir():
        raise UsageError(f"--branch_from {config.branch_from}: no such checkpoint; give runs/NAME/checkpoints/step-00000300")
    before, state = read_run_json(source / "run.json"), read_state(checkpoint)
    if state["run_id"] != before.get("run_id"):
        raise DamagedCheckpoint(f"--branch_from {checkpoint}: of another run than {source / 'run.json'}")
    resume_description(source, description)
    _check_rates(config, before, state["tokens"])

    temporary, run_id = run.with_name(f".{run.name}.branch-{os.getpid()}"), uuid.uuid4().hex
    try:
        copy = temporary / "checkpoints" / checkpoint.name
        shutil.copytree(checkpoint, copy, copy_function=_link_or_copy)
        write_atomically(copy / STATE_FILE, state_text(_of_run(state), run_id, state["ranks"], state["files"]))
        lines = split_lines((source / METRICS_FILE).read_bytes())
        kept = [text for text in lines if (line := parse_line(text)) and line["step"] <= state["step"]]
        write_atomically(temporary / METRICS_FILE, b"".join(text + b"\n" for text in kept))
        begun = {**before, "run_id": run_id, "branch_from": str(checkpoint), "finished": None}
        write_atomically(temporary / "run.json", json.dumps(begun, indent=2) + "\n")
        os.rename(temporary, run)
    except OSError as reason:
        raise UsageError(f"{reason.filename or run}: --branch_from could not make the run ({reason.strerror})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _of_run(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in ("ranks", "run_id", "files")}


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _check_rates(config: RunConfig, before: dict[str, Any], tokens: int) -> None:
    """Refuse a branch after `tokens` tokens of a run if its learning rate up to there is not the one that this run has."""
    theirs = token_schedule(before["scheduler"], before["lr"], before["global_batch_size"] * before["shape"]["seq_len"])
    where = f"--branch_from {config.branch_from}"
    for schedule, whose in ((theirs, "the run that wrote it"), (config.token_schedule, "this run")):
        if schedule is None:
            raise UsageError(f"{where}: {whose} has a schedule by steps; use {STABLE_DECAY}")
        if tokens > schedule.decay_tokens:
            raise UsageError(
                f"{where}: is at {tokens:,} tokens, and the decay of {whose} begins at {schedule.decay_tokens:,}; take an earlier "
                f"checkpoint, train longer, or use {STABLE_DECAY}"
            )
    assert theirs is not None and config.token_schedule is not None
    there, here = theirs.rate(tokens), config.token_schedule.rate(tokens)
    if there != here:
        raise UsageError(f"{where}: has a learning rate of {there:g}, and this run {here:g} there; give its --lr and --warmup_steps")
