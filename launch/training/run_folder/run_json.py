"""Compares the `run.json` of a run with the command that resumes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.config.flags import FIXED, INITIAL, RECORD, START, TRAINING, VALUES
from launch.config.optimizer import without_defaults
from launch.errors import UsageError
from launch.formats.metrics import model_of_run, read_run_json
from model.presets import FIELDS, SIZES

#: The kinds, as in `launch.config.flags`, of the entries of a `run.json` that are no values of the run; others are TRAINING.
_OF_STARTS = ("created", "command", "folder", "flags", "interleaved", "finished", "run_id", "resumes")
OTHER_KINDS = dict.fromkeys(_OF_STARTS, START)
#: The last two are of earlier versions.
OTHER_KINDS |= dict.fromkeys(("commit", "machine", "corpus", "histogram_every", "block_similarity"), RECORD)


def kind_of(key: str) -> str:
    """What a change of the entry `key` of a `run.json` means: `FIXED`, `TRAINING`, `INITIAL`, `RECORD` or `START`."""
    return VALUES[key].kind if key in VALUES else OTHER_KINDS.get(key, TRAINING)


def changes_numbers(key: str) -> bool:
    """Whether a change of the entry `key` of a `run.json` may change the numbers of the run."""
    return kind_of(key) not in (RECORD, START)


def resume_description(
    run: Path, description: dict[str, Any], fix: str = "give the run's own values, or another --run_name"
) -> tuple[dict[str, Any], list[str]]:
    """The content of `run.json` in the folder `run` after a resume, and the changes that the resume makes, a line for each value.

    Args:
        description: of the command that resumes the run, as `launch.training.run_folder.provenance.describe_run` returns it.
        fix: what to do about a value that a resume must not change.

    Raises:
        UsageError: `run.json` is damaged, or the run in the folder differs from `description` in a value that a resume must not change.
    """
    file = run / "run.json"
    before = read_run_json(file)
    if faults := [f"{run}: {fault}; {fix}" for fault in _other_run(before, description)]:
        raise UsageError(*faults)
    last = without_defaults({**before, "commit": commits_of(before)[-1]})
    changes = [
        f"{name}: {json.dumps(old)} -> {json.dumps(new)}"
        for key, value in without_defaults(description).items()
        if kind_of(key) not in (START, INITIAL) and (key in before or key not in VALUES)  # else an earlier version had no such value
        for name, old, new in differences(key, last.get(key), value)
    ]
    of_start = ("created", "command", "folder", "flags", "interleaved", "commit")
    resume = {key: description.get(key) for key in of_start} | {"changes": changes}
    kept = {key: before.get(key) for key in (*of_start, "run_id", "branch_from", "init_from", "finished")}
    return {**description, **kept, "resumes": [*before.get("resumes", []), resume]}, changes


def parse_change(line: str) -> tuple[str, Any, Any]:
    """The dotted key, the old and the new value of a line in `changes`; null for a value that is absent.

    Raises:
        UsageError: it is no such line.
    """
    key, _, values = line.partition(": ")
    try:
        old, end = json.JSONDecoder().raw_decode(values)
        return key, old, json.loads(values[end:].removeprefix(" -> "))
    except ValueError:
        raise UsageError(f"run.json: {json.dumps(line)[:60]} in 'changes' must be KEY: OLD -> NEW; restore run.json") from None


def starts_of(description: dict[str, Any]) -> list[dict[str, Any]]:
    """Each start of the run of a `run.json`, with its `command` and `commit`: the first, then each resume."""
    return [description, *description.get("resumes", [])]


def commits_of(description: dict[str, Any]) -> list[Any]:
    """The commits of the starts of the run of a `run.json`; None where it was not a checkout."""
    return [start.get("commit") for start in starts_of(description)]


def _other_run(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What makes `now` another run than `before`, which a resume must not change: flags with other values, and the corpus.

    Other values (length, learning rate, micro-batch, ranks, ZeRO stage, precision, how often to evaluate and to save) may change in a
    resume; the log lists the changes.
    """
    sizes = [name for name in (*SIZES, *FIELDS) if name in before["shape"] or name in now["shape"]]
    if others := [flags for flags in zip(_fixed_flags(before, sizes), _fixed_flags(now, sizes), strict=True) if flags[0] != flags[1]]:
        has, says = map(", ".join, zip(*others, strict=True))
        yield f"this run has {has}, and the command {says}"
    if before["corpus_fingerprint"] != now["corpus_fingerprint"]:
        theirs, own = before["corpus"], now["corpus"]
        yield f"--data {own.get('path')} is not the corpus of this run, {theirs.get('path')}: its text or its tokenizer is another"


def _fixed_flags(description: dict[str, Any], sizes: list[str]) -> list[str]:
    """The flags that a resume must not change, with their values."""
    model, optimizer = model_of_run(description), description["optimizer"]
    values = {name: description[name] for name, one in VALUES.items() if one.kind == FIXED and name in description}
    values |= {name: getattr(model, name) for name in sizes}
    amsgrad = bool(optimizer.get("params", {}).get("amsgrad"))  # its state differs
    return [
        *(_as_flag(name, value) for name, value in values.items()),
        f"--set optimizer.type={optimizer.get('type')}",
        f"--set optimizer.params.amsgrad={json.dumps(amsgrad)}",
    ]


def _as_flag(name: str, value: Any) -> str:
    if VALUES.get(name) and VALUES[name].flag.get("action") == "store_true":
        return f"--{name}" if value else f"no --{name}"
    return f"--{name} {str(value).lower()}"


def differences(key: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """The differences between two values of `key`: the dotted key and both values. Sections are compared key by key."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted({*before, *after})
        return [found for name in names for found in differences(f"{key}.{name}", before.get(name), after.get(name))]
    return [] if before == after else [(key, before, after)]
