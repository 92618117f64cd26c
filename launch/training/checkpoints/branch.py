"""Starts a run from a checkpoint of another run (`--branch_from`): its weights, optimizer state, and position in the data.

One long run at a constant rate then serves several lengths: each branch decays at another length, and equals a run that was planned with
this decay (arXiv 2405.18392, section 4). The folder of a branch holds this one checkpoint and the metrics up to it, like that of a run that
was stopped there, and is resumed.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from data_pipeline.staging import staged_folder, write_atomically
from launch.config.flags import VALUES
from launch.config.optimizer import has_rate_of_its_own, without_defaults
from launch.config.run_config import RunConfig
from launch.config.token_schedule import STABLE_DECAY
from launch.errors import UsageError
from launch.formats.checkpoint_files import STATE_FILE, checkpoint_at, state_text, verify
from launch.formats.metrics import by_step, parse_line, read_run_json, split_lines
from launch.training.run_folder.metrics_writer import METRICS_FILE
from launch.training.run_folder.run_json import differences, parse_change, resume_description, starts_of
from recipes import registry
from recipes.technique import Declaration, Techniques, planned_steps


def start_branch(config: RunConfig, run: Path, description: dict[str, Any]) -> None:
    """Make the folder `run`, which must not exist, from the checkpoint `config.branch_from`, which is not changed.

    The files of the checkpoint are linked if the file system allows it, else copied.

    Args:
        description: of this run, as `launch.training.run_folder.provenance.describe_run` returns it.

    Raises:
        UsageError: it is not a checkpoint of a run; its run differs in a value that a resume must not change, in the optimizer, the
            clipping or the techniques; or an earlier step differs in its learning rate, its tokens or a technique's metrics. Nothing is
            written.
        DataError: another process makes it.
    """
    checkpoint = checkpoint_at(str(config.branch_from))
    source = checkpoint.parent.parent
    before = read_run_json(source / "run.json")
    state = verify(checkpoint, before.get("run_id"))
    resume_description(source, description, "give the values of the run that wrote the checkpoint of --branch_from")
    kept = _metrics_up_to(source / METRICS_FILE, state["step"])
    lines = [line for _, line in kept]
    _check_decay(config, state["tokens"])
    _check_settings(config, before, description)
    _check_steps(config, lines, state["samples"])

    run_id = uuid.uuid4().hex
    try:
        with staged_folder(run, worth_keeping=lambda folder: False, resume=False, flag="--run_name") as folder:
            copy = folder / "checkpoints" / checkpoint.name
            shutil.copytree(checkpoint, copy, copy_function=_link_or_copy)
            write_atomically(copy / STATE_FILE, state_text(state, run_id, state["ranks"], state["files"]))
            write_atomically(folder / METRICS_FILE, b"".join(text + b"\n" for text, _ in kept))
            begun = {**before, "run_id": run_id, "branch_from": str(checkpoint), "finished": None}
            write_atomically(folder / "run.json", json.dumps(begun, indent=2) + "\n")
    except OSError as error:
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # the first file that could not be copied
        raise UsageError(f"{run}: --branch_from could not make it ({reason})") from None


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _metrics_up_to(file: Path, step: int) -> list[tuple[bytes, dict[str, Any]]]:
    """The valid lines of a `metrics.jsonl` up to `step`, which must be there, as text and parsed."""
    try:
        lines = [(text, parse_line(text)) for text in split_lines(file.read_bytes())]
    except OSError as reason:
        raise UsageError(f"{file}: cannot be read ({reason.strerror}); a branch begins with the metrics of the run") from None
    kept = [(text, line) for text, line in lines if line and line["step"] <= step]
    if not kept or kept[-1][1]["step"] != step:
        raise UsageError(f"{file}: has no line of step {step}, where the branch begins; take a checkpoint whose step it has")
    return kept


def _check_decay(config: RunConfig, tokens: int) -> None:
    """Refuse a checkpoint at `tokens` tokens if this run's decay begins earlier."""
    schedule, where = config.token_schedule, f"--branch_from {config.branch_from}"
    if schedule is None:
        raise UsageError(f"{where}: this run has a schedule by steps; use {STABLE_DECAY}")
    if tokens > schedule.decay_tokens:
        begin = f"the decay of this run begins at {schedule.decay_tokens:,}"
        raise UsageError(f"{where}: is at {tokens:,} tokens, and {begin}; take an earlier checkpoint, train longer, or use {STABLE_DECAY}")


def _check_settings(config: RunConfig, before: dict[str, Any], description: dict[str, Any]) -> None:
    """Refuse a branch whose optimizer, clipping, techniques or rule for spikes differ from the continued run's."""
    their, own = without_defaults(before), without_defaults(description)
    keys = ("optimizer", "techniques", "engine", *(name for name, one in VALUES.items() if one.same_steps))
    found = [one for key in keys for one in differences(key, their.get(key), own[key])]
    # Equal rates at each step do not suffice where another rate is a multiple of them.
    fixed = {"optimizer.params.lr"} if has_rate_of_its_own(own["optimizer"]) else set()
    where = f"--branch_from {config.branch_from}"
    faults = [
        f"{where}: the run that wrote it has {key} = {json.dumps(there)}, and this run has {json.dumps(here)}; "
        f"{'leave it out' if there is None else 'give its value'}"
        for key, there, here in found
        if key in fixed or not _may_differ(key, there, here)
    ]
    changed = [(line, *parse_change(line)) for start in starts_of(before) for line in start.get("changes") or []]
    faults += [
        f"{where}: a resume of the run that wrote it changed {line}, perhaps before this checkpoint; take one of a run without that"
        for line, key, there, here in changed
        if key in fixed or not _may_differ(key, there, here)
    ]
    if faults:
        raise UsageError(*faults)


def _may_differ(key: str, there: Any, here: Any) -> bool:
    """Whether a branch may have the value `here` at the dotted `key` where the run that it continues has `there`.

    Learning rates, and values of techniques that the metrics show, are compared step by step in `_check_steps`.
    """
    section, *names = key.split(".")
    if section in VALUES:
        return {there, here} <= {None, *VALUES[section].same_steps}
    if section != "techniques":
        return key != "engine.gradient_clipping" and (section != "optimizer" or names == ["params", "lr"])
    declared = next((cls.declaration for cls in registry.technique_classes() if cls.declaration.section == names[0]), Declaration())
    rule: dict[str, Any] = {"keys": {**declared.keys, "enabled": {"auto": "reported"}}}  # without "enabled", a section is on as well
    for name in names[1:]:
        rule = rule.get("keys", {}).get(name, {})
    return declared.same_algorithm or (len(names) > 1 and _agree(there, here, rule))


def _agree(there: Any, here: Any, rule: dict[str, Any]) -> bool:
    """Whether two values of a technique's key, None where it is left out, do the same by its `rule`, or `_check_steps` compares them."""
    if "keys" in rule:
        there, here = there or {}, here or {}
        return all(_agree(there.get(key), here.get(key), rule["keys"].get(key, {})) for key in {*there, *here})
    undecided = [value in ("auto", None) for value in (there, here)]
    return there == here or (rule.get("auto") == "reported" and any(undecided)) or (bool(rule.get("auto")) and all(undecided))


def _check_steps(config: RunConfig, lines: list[dict[str, Any]], samples: int) -> None:
    """Refuse a branch if this run would make a step differently from the run that it continues.

    Optimizers are left out: their settings are compared in `_check_settings`, and in fp16 their schedules depend on the skipped steps.

    Args:
        lines: the metrics of that run.
        samples: its position in the data. `--spike_rule rewind` leaves data out, and cuts the lines that would show it.
    """
    techniques = Techniques(member for member in registry.make_techniques(config).members if member.declaration.section)
    recorded = {line["step"]: line for line in by_step(lines)}
    assert config.token_schedule is not None, "_check_decay refuses others"
    where, planned = f"--branch_from {config.branch_from}", 0
    for steps in planned_steps(config, techniques):
        if steps.number > lines[-1]["step"]:
            break
        planned += steps.work.sequences * config.data_ranks
        there = recorded.get(steps.number, {})
        for key, here in {"tokens": steps.consumed, "lr": config.token_schedule.rate(steps.consumed), **steps.reported}.items():
            if key not in there:
                raise UsageError(
                    f"{where}: the metrics of the run that wrote it lack {key} of step {steps.number}, so "
                    "the steps cannot be compared; take a checkpoint of a run with all its metrics"
                )
            if there[key] != here:
                if key == "lr":
                    fix = "give its --lr and --warmup_steps, or a checkpoint before its decay"
                else:
                    fix = '"auto" follows the length and the ranks of a run: write the values of that run'
                raise UsageError(
                    f"{where}: step {steps.number} of the run that wrote it had {key} = {there[key]}, and this run has {here} there; {fix}"
                )
    if planned != samples:
        raise UsageError(
            f"{where}: the run that wrote it left out {samples - planned:,} samples (--spike_rule rewind); take "
            "a checkpoint from before that"
        )
