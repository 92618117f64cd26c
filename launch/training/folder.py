"""A run's folder: `run.json`, `metrics.jsonl`, `log.txt`, TensorBoard events, `checkpoints/`, `loss.png`; on request `histograms.jsonl`,
`blocks.jsonl`.

Everything downstream reads these files only. One process writes them: global rank 0. `metrics.jsonl` holds one object a step;
a line is on the operating system's side before the next step begins, so that a killed run loses none. What a resume cuts off
a `.jsonl` file is appended to the file of the same name with `.cut` behind it.

`finished` in `run.json` is null from the start, or a resume, until the run has reached its end; then it says when, with step and tokens.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from launch.config.flags import MUST
from launch.errors import UsageError, nearest, say
from launch.formats.checkpoint_files import complete_checkpoints
from launch.formats.metrics import parse_line, read_run_json, split_lines
from launch.training.exponents import overall
from launch.training.picture import draw_blocks, draw_exponents, draw_loss

if TYPE_CHECKING:
    from launch.config.run_config import RunConfig

#: Values that must be the same when a run is resumed: they decide what the next step computes. The rest (length, learning rate,
#: micro-batch, the cadence of evaluations and checkpoints) may change; the log says what did.
IDENTITY = ("seed", "shape", "no_cross_document", "corpus_fingerprint", "global_batch_size", "precision", "zero_stage")
#: How a run of one precision is resumed where the JSON says the other, as `"auto"` does on a machine of another kind.
SAME_PRECISION = {
    ("bf16", "fp32"): "give --set bf16.enabled=true, or another --run_name",
    ("fp32", "bf16"): "give --set bf16.enabled=false, or another --run_name",
}
#: What a resume changes without changing the run: not worth a line in the log.
INCIDENTAL = ("created", "command", "resume", "quiet", "interleaved", "finished", "run_id")
#: What a resume leaves as it was, whatever it says: its weights are those of the checkpoint.
OF_THE_START = "init_from"
LOCK_PATIENCE_SECONDS = 60.0
MAX_SECONDS = 1e12  # a line that says more, or NaN, is not a clock


def check_run_folder(runs_dir: str, run_name: str, resume: bool | str) -> Path:
    """The run's folder, which must be free (or may exist, for a resume), in a place that can be written. Creates nothing.

    Raises:
        UsageError: the name is taken, there is nothing to go on from and `resume` is `MUST`, or the folder cannot be made.
    """
    path = Path(runs_dir) / run_name
    if resume == MUST and not complete_checkpoints(path / "checkpoints"):
        raise UsageError(nothing_to_resume(path))
    if path.exists() and not resume:
        raise UsageError(f"{path}: this run exists; give another --run_name, go on with it by --resume, or remove it yourself")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: is a file, not a run folder; give another --run_name")
    if path.exists() and not (path / "run.json").exists():
        # A start that was killed leaves no more than the lock, an empty folder and a temporary run.json.
        foreign = sorted(name for name in os.listdir(path) if name not in (".lock", "checkpoints") and not name.startswith(".run.json."))
        if foreign:
            raise UsageError(f"{path}: holds {foreign[0]} but no run.json, so it is not a run folder; give another --run_name")
    above = path
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: cannot be made, {above} is {'not writable' if above.is_dir() else 'a file'}; give another --runs_dir")
    return path


def nothing_to_resume(path: Path) -> str:
    """Why `--resume=must` is refused for the run in `path`."""
    what = "has no complete checkpoint to go on from" if path.exists() else f"there is no such run{_nearest_run(path)}"
    return f"--resume=must: {path}: {what}{'' if what.endswith('?') else ';'} give another --run_name, or --resume to start at step 0"


def _nearest_run(path: Path) -> str:
    others = [run.parent.name for run in path.parent.glob("*/run.json") if run.parent != path]
    return nearest(path.name, others)


def await_port(resume: bool | str) -> None:
    """Check, as global rank 0, that the port on which the ranks are to meet is free; on a resume a predecessor that is ending may hold it.

    Raises:
        UsageError: another process listens there.
    """
    port = os.environ.get("MASTER_PORT")
    # torchrun listens on the port itself, for its ranks.
    if port is None or "RANK" not in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UsageError(f"the environment variable MASTER_PORT is {port!r}: it must be the number of a port, or not set")

    def in_use() -> str:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended job that linger there do not count
            try:
                probe.bind(("", int(port)))
            except OSError as reason:
                if reason.errno == errno.EADDRINUSE:
                    return f"port {port}, on which the ranks are to meet, is in use on this host"
        return ""

    _wait_while(in_use, resume, "give another: deepspeed --master_port N")


def _wait_while(busy: Callable[[], str], resume: bool | str, fix: str) -> None:
    """Wait for what a predecessor that is still ending holds; only a resume has a predecessor.

    busy: in words, what is held; an empty string once it is free.
    """
    patience = LOCK_PATIENCE_SECONDS if resume else 0.0
    deadline = time.monotonic() + patience
    told = False
    while held := busy():
        if time.monotonic() >= deadline:
            raise UsageError(f"{held}; {fix}")
        if not told:
            say(f"{held}; waiting up to {patience:.0f} s for it to end")
            told = True
        time.sleep(0.2)


def await_first_rank(path: Path) -> None:
    """Wait until global rank 0 of this job has the run folder to itself; called by the other ranks of its host.

    While it waits for a predecessor to end, that one may still listen on the port where this job is to meet: a rank that went ahead
    would join the wrong job.
    """
    mine = _first_rank_of(os.getppid())
    # Rank 0 gets the folder, or ends with its reason and the launcher then ends this one. A launcher that gives every rank a parent of
    # its own keeps nobody for ever.
    deadline = time.monotonic() + 1.5 * LOCK_PATIENCE_SECONDS
    while not _read_lock(path).endswith(mine) and time.monotonic() < deadline:
        time.sleep(0.05)


def _first_rank_of(launcher: int) -> str:
    return f"of launcher {launcher} on {os.uname().nodename}"


def _read_lock(path: Path) -> str:
    try:
        return (path / ".lock").read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _changes(key: str, before: Any, after: Any) -> list[str]:
    """What a reader of the log should know of two values at `key`; sections are compared key by key."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted({*before, *after})
        return [change for name in names for change in _changes(f"{key}.{name}", before.get(name), after.get(name))]
    return [] if before == after else [f"{key}: {json.dumps(before)} -> {json.dumps(after)}"]


class RunFolder:
    """The open run folder of global rank 0.

    Args:
        path: from `check_run_folder`.
        description: what `run.json` records; on a resume it must agree with what is there in all `IDENTITY` keys.

    Raises:
        UsageError: another process is writing into this folder, or the run there is a different one. `run.json` is as it was.
    """

    def __init__(self, path: Path, description: dict[str, Any], quiet: bool = False):
        self.path = path
        self.quiet = quiet
        self._log: TextIO | None = None
        self._metrics: TextIO | None = None
        self._writer: Any = None
        self._last_line: dict[str, Any] = {}
        self.changes: list[str] = []
        self.notes: list[str] = []
        self.run_id: str | None = None
        self._before: str | None = None  # run.json, as a resume found it
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
            self._lock = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - held as long as the run
        except OSError as reason:
            raise UsageError(f"{path}: cannot be written ({reason.strerror}); give another --runs_dir") from None
        try:
            # Two writers would mix their steps.
            _wait_while(self._held, description["resume"], "stop it, or give another --run_name")
            self._description = self._compare(json.loads(json.dumps(description)))
            self.run_id = self._description.get("run_id")
            for leftover in path.glob(".*.tmp"):  # of `write_atomically`, after a kill
                leftover.unlink()
            with _writable(path):
                self._describe(finished=None)
                self._log = open(path / "log.txt", "a", encoding="utf-8")  # noqa: SIM115
                self._write_lock()
        except BaseException:
            self.close()
            raise

    def _describe(self, finished: dict[str, Any] | None) -> None:
        """Write `run.json`. finished: when, at which step and after how many tokens the run reached its end; None before."""
        write_atomically(self.path / "run.json", json.dumps({**self._description, "finished": finished}, indent=2) + "\n")

    def _held(self) -> str:
        """Take the lock; in words, who holds it if that fails."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"{self.path}: {_read_lock(self.path) or 'another process'} is still writing into this run"
        return ""

    def _write_lock(self) -> None:
        """Say who holds the lock: for a successor's message, and for the other ranks, which wait for it."""
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"process {os.getpid()} {_first_rank_of(os.getppid())}")
        self._lock.flush()

    def _compare(self, description: dict[str, Any]) -> dict[str, Any]:
        """`description` with its predecessors, when it may go on with the run that is here."""
        file = self.path / "run.json"
        if not file.exists():
            return description
        if not description["resume"]:  # made by another job since `check_run_folder` looked
            raise UsageError(f"{self.path}: this run exists; give another --run_name, or go on with it by --resume")
        before: dict[str, Any] = read_run_json(file)
        self._before = file.read_text(encoding="utf-8")
        before.setdefault("no_cross_document", False)  # a run from before there was this flag
        before.setdefault("resumes", [])
        for key, kind in {**dict.fromkeys(IDENTITY, object), "optimizer": dict, "ranks": int, "resumes": list}.items():
            if key not in before or not isinstance(before[key], kind):
                what = f"'{key}' is {json.dumps(before[key])[:40]}" if key in before else f"lacks '{key}'"
                raise UsageError(f"{file}: {what}: it cannot be told which run this is; give another --run_name")
        advice = "give the run's own value, or another --run_name"
        how = {"precision": SAME_PRECISION.get((str(before["precision"]), str(description["precision"])), advice)}
        wrong = [
            f"{self.path}: this run has {key} = {json.dumps(before[key])}, the command says {json.dumps(description[key])}; "
            + how.get(key, advice)
            for key in IDENTITY
            if before[key] != description[key]
        ]
        if before["optimizer"].get("type") != description["optimizer"]["type"]:
            wrong.append(
                f"{self.path}: this run has optimizer.type = {json.dumps(before['optimizer'].get('type'))}, the JSON says "
                f"{json.dumps(description['optimizer']['type'])}; {advice}"
            )
        if before["ranks"] != description["ranks"] and description["zero_stage"] > 0:
            wrong.append(
                f"{self.path}: this run has ranks = {before['ranks']}, this job has {description['ranks']}, and at ZeRO stage "
                f"{description['zero_stage']} the optimizer's state is partitioned over the ranks; start {before['ranks']} ranks"
            )
        if wrong:
            raise UsageError(*wrong)
        self.changes = [
            change
            for key, value in description.items()
            if key not in (*INCIDENTAL, OF_THE_START)
            for change in _changes(key, before.get(key), value)
        ]
        resume = {key: description.get(key) for key in ("created", "command", "interleaved")}
        kept = [*resume, "run_id", *([OF_THE_START] if complete_checkpoints(self.path / "checkpoints") else [])]
        return {**description, **{key: before.get(key) for key in kept}, "resumes": [*before["resumes"], resume]}

    # --- the log and the metrics --------------------------------------------------------------------------------------------------

    def log(self, line: str, silent: bool = False, always: bool = False) -> None:
        """One line into `log.txt`, and onto the terminal unless `silent` says not this one, or the run is quiet and not `always` does."""
        assert self._log is not None, "a folder that is closed"
        with _writable(self.path):
            self._log.write(time.strftime("%Y-%m-%d %H:%M:%S ") + line + "\n")
            self._log.flush()
        if always or not (silent or self.quiet):
            say(line)

    def log_start(self, lines: Iterable[str], step: int, resume: bool | str) -> None:
        """Log what is about to be trained: whether the run is resumed, `lines`, and what changed since its first start."""
        if resume and step:
            self.log(f"resuming after step {step}")
        elif resume:
            new = "" if self._before else f"; {self.path} is a new run{_nearest_run(self.path)}"
            self.log(f"no complete checkpoint to resume from: starting at step 0{new}", always=True)
        for line in lines:
            self.log(line)
        for note in self.notes:
            self.log(f"note: {note}")
        for change in self.changes:
            self.log(f"changed since this run was last started: {change}")

    def log_failure(self, config: RunConfig, reason: str) -> None:
        """Why the run could not go on: into `log.txt` (the command itself says it on the terminal), with the picture up to there."""
        self.log(f"error: {reason}", silent=True)
        self._draw(config)

    def log_end(self, config: RunConfig, state: dict[str, Any], stopped: int, sample: str | None) -> None:
        """How the run ended, and where its picture is."""
        if sample is not None:
            self.log(f"a sample after {config.prompt!r}:\n{sample}")
        picture = self._draw(config)
        if config.precision == "fp16" and (line := self._last_line):
            self.log(f"loss scale {line['loss_scale']:,.10g} at the end; {line['skipped_steps']} updates skipped for overflow")
        if stopped:
            self.log(
                f"stopped by {signal.Signals(stopped).name} after step {state['step']}; the same command with --resume goes on from there",
                always=True,
            )
        else:
            with _writable(self.path):
                self._describe({"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": state["step"], "tokens": state["tokens"]})
        loss = "" if state["val_loss"] is None else f", validation loss {state['val_loss']:.4f}"
        self.log(f"{self.path}: step {state['step']}, {state['tokens']:,} tokens{loss}; the curve is {picture}", always=True)

    def _draw(self, config: RunConfig) -> Path:
        title = f"{config.run_name}: {config.preset}, ZeRO {config.zero_stage}, {config.precision}"
        with _writable(self.path):
            return draw_loss(self.path, title, math.log(config.corpus.vocab_size))

    def open_metrics(self, step: int) -> None:
        """Cut what is beyond `step` off `metrics.jsonl` and the files beside it, since it is written again; a copy of it stays.

        `seconds_before` becomes the `seconds` of the last line that stays and has them: the clock of the run goes on from there.
        """
        from torch.utils.tensorboard import SummaryWriter

        file = self.path / "metrics.jsonl"
        with _writable(self.path):
            for name in ("histograms.jsonl", "blocks.jsonl"):
                self._cut_back(self.path / name, step)
            kept = self._cut_back(file, step)
            self._metrics = open(file, "a", encoding="utf-8")  # noqa: SIM115
            threading.excepthook = _say_no_more_of_writers
            # Purges what a killed run left there of later steps.
            self._writer = SummaryWriter(str(self.path), purge_step=step + 1 if step else 0)
        seconds = (line.get("seconds") for line in reversed(kept))
        self.seconds_before = next((one for one in seconds if type(one) in (int, float) and 0 <= one < MAX_SECONDS), 0.0)
        if step and (not kept or kept[-1]["step"] < step):  # not by a kill: a line is on the disk before its checkpoint is
            self.notes.append(f"{file} lacks the lines up to step {step}, which the checkpoint holds; the curve will have a gap")

    def _cut_back(self, file: Path, step: int) -> list[dict[str, Any]]:
        """Cut the lines beyond `step` off `file`, and damaged ones at its end; return the good ones that stay.

        At step 0 all go: a run that starts there writes its line of step 0 again. What is cut is appended to `<file>.cut`.
        """
        if not file.exists():
            return []
        texts = split_lines(file.read_bytes())
        lines = [parse_line(text) for text in texts]
        within = [line is not None and step > 0 and line["step"] <= step for line in lines]
        end = max((number for number, good in enumerate(within, 1) if good), default=0)
        stays = [good or (line is None and number < end) for number, (good, line) in enumerate(zip(within, lines, strict=True), 1)]
        if cut := [text for text, kept in zip(texts, stays, strict=True) if not kept]:
            copy = file.with_name(f"{file.name}.cut")
            with open(copy, "ab") as stream:
                stream.write(b"".join(text + b"\n" for text in cut))
                stream.flush()
                os.fsync(stream.fileno())
            self.notes.append(f"{len(cut)} line(s) beyond step {step} were cut off {file}; {copy.name} keeps them")
        if damaged := [number for number, (line, kept) in enumerate(zip(lines, stays, strict=True), 1) if kept and line is None]:
            self.notes.append(f"{file} has {len(damaged)} damaged line(s), the first is line {damaged[0]}; they stay, and are skipped")
        write_atomically(file, b"".join(text + b"\n" for text, kept in zip(texts, stays, strict=True) if kept))
        return [line for line, good in zip(lines, within, strict=True) if good and line is not None]

    def write_metrics(self, line: dict[str, Any], durable: bool = False) -> None:
        """Append one step's line, and the same numbers as TensorBoard scalars.

        Args:
            durable: a checkpoint of this step follows, which must not outlive the line: wait until the disk has it.
        """
        assert self._metrics is not None, "open_metrics comes first"
        with _writable(self.path):
            # JSON has no NaN and no infinity: a loss that is one becomes null.
            line = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()}
            self._last_line = line
            self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
            self._metrics.flush()
            if not os.fstat(self._metrics.fileno()).st_nlink:  # writing into a removed file goes on without an error
                raise FileNotFoundError(errno.ENOENT, "the file was removed while the run was writing it", self._metrics.name)
            for key, value in line.items():
                if key != "step" and isinstance(value, (int, float)):
                    self._writer.add_scalar(key, value, line["step"])
            if durable:
                os.fsync(self._metrics.fileno())
                self._writer.flush()

    def write_histograms(self, line: dict[str, Any]) -> None:
        """Append one step's histograms to `histograms.jsonl`, draw them, and say what fp16 would lose."""
        with _writable(self.path):
            self._append("histograms.jsonl", line)
            picture = draw_exponents(self.path, line)
        shares = ", ".join(
            f"{100 * overall(line, 'activation_gradients', key):.3g}% at a loss scale of {scale:,.10g}"
            for key, scale in (("fp16_zero_at_1", 1), ("fp16_zero_at_scale", line["scale"]))
        )
        self.log(f"step {line['step']}: of the activation gradients fp16 holds as zero {shares}; {picture}")

    def write_similarity(self, line: dict[str, Any]) -> None:
        """Append what each block made of its input to `blocks.jsonl`, and draw all of it."""
        with _writable(self.path):
            self._append("blocks.jsonl", line)
            draw_blocks(self.path)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with open(self.path / name, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def abandon(self) -> None:
        """Undo what a start that was refused has made here; nothing of a run that has begun."""
        if self._metrics is not None:
            return
        if self._before is not None:
            write_atomically(self.path / "run.json", self._before)
        elif not any((self.path / "checkpoints").iterdir()):
            with contextlib.suppress(OSError):  # what somebody else has put there stays, and so does the folder
                for name in ("run.json", "log.txt", ".lock"):
                    (self.path / name).unlink()
                (self.path / "checkpoints").rmdir()
                self.path.rmdir()

    def close(self) -> None:
        """Flush and close everything; the lock goes last."""
        for stream in (self._metrics, self._writer, self._log, self._lock):
            if stream is not None:
                with contextlib.suppress(OSError):  # a full disk has been reported where it was met
                    stream.close()


class NoFolder:
    """What the other ranks have in place of the run's folder: everything is said and written by global rank 0."""

    seconds_before = 0.0
    run_id = None

    def log(self, *_: Any, **__: Any) -> None:
        pass

    log_start = log_end = log_failure = open_metrics = write_metrics = write_histograms = write_similarity = abandon = close = log


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """End the process in one line, with exit code 1, where something inside cannot be written."""
    try:
        yield
    except OSError as reason:
        goes_on = (
            "the checkpoints are intact: --resume goes on from the newest"
            if complete_checkpoints(path / "checkpoints")
            else "there is no checkpoint yet"
        )
        print(
            f"error: {reason.filename or path}: could not be written ({reason.strerror}; "
            f"{free_bytes(path) / 2**20:,.0f} MiB free); {goes_on}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(1) from None


def free_bytes(path: Path) -> int:
    """Bytes that are free on the disk of `path`, which may have been removed."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free


def _say_no_more_of_writers(failed: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread hands its error on to `SummaryWriter`, where `_writable` reports it, and then raises it with a traceback."""
    if type(failed.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failed)


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a small file so that a reader, or a kill, sees the old or the new one and nothing between."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
