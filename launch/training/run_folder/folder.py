"""The folder of a run: `run.json`, `metrics.jsonl`, `log.txt`, TensorBoard events, `checkpoints/`, `loss.png`.

All later analysis reads these files only. Global rank 0 writes them. `finished` in `run.json` is null until the run has reached its end;
then it holds the time, the step and the tokens.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data_pipeline.staging import remove_abandoned, remove_unfinished, write_atomically
from launch.config.explain import learning_rate
from launch.config.flags import MUST
from launch.config.run_config import ROOT, SCRATCH, RunConfig
from launch.errors import UsageError, print_once
from launch.formats.checkpoint_files import checkpoint_name, complete_checkpoints, what_resume_does
from launch.formats.files import refuse_links
from launch.formats.metrics import evaluated_losses
from launch.training.checkpoints.branch import start_branch
from launch.training.run_folder.metrics_writer import MetricsWriter
from launch.training.run_folder.provenance import describe_run
from launch.training.run_folder.run_json import resume_description

#: Files that a killed or refused start may leave in a folder that has no run.json yet.
BEFORE_RUN_JSON = (".lock", "log.txt", "checkpoints", SCRATCH)
#: How long a resume waits for the previous job to end. A rank of it that lost its job ends after `--hang_timeout`, by default 300 s.
WAIT_SECONDS = 360.0
#: The least time between two pictures while a run trains: drawing one takes a second of a core.
PICTURE_SECONDS = 10.0


def check_run_folder(runs_dir: str, run_name: str, resume: bool | str, stored: bool = False) -> Path:
    """The path of the run folder. It must not exist yet, except on a resume. Creates nothing.

    stored: the run may have checkpoints in a store, which `launch.training.checkpoints.store.check_store` looks at.

    Raises:
        UsageError: the name is in use, `resume` is `MUST` and there is no checkpoint, or a file in the folder is a link.
    """
    path = Path(runs_dir) / run_name
    if resume == MUST and not stored and not complete_checkpoints(path / "checkpoints"):
        raise UsageError(nothing_to_resume(path))
    if path.exists() and not resume:
        raise UsageError(f"{path}: this run exists; give another --run_name, continue it with --resume {path}, or remove it yourself")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: is a file, not a run folder; give another --run_name")
    if path.exists() and not (path / "run.json").exists():
        foreign = sorted(name for name in os.listdir(path) if name not in BEFORE_RUN_JSON and not name.startswith(".run.json."))
        if foreign:
            raise UsageError(f"{path}: holds {foreign[0]} but no run.json, so it is not a run folder; give another --run_name")
    refuse_links(path)
    return path


def nothing_to_resume(path: Path) -> str:
    """The error message of `--resume=must` if the run in `path` has no checkpoint."""
    what = "has no complete checkpoint" if path.exists() else "no such run"
    return f"--resume=must: {path}: {what}; give another --run_name, or --resume to start at step 0"


def open_run_folder(config: RunConfig, path: Path) -> RunFolder:
    """The run's folder, from `check_run_folder`. A run that branches from another one (`--branch_from`) gets its checkpoint first.

    Raises:
        UsageError: see `RunFolder` and `launch.training.checkpoints.branch.start_branch`.
    """
    description = describe_run(config)
    # Of killed branches; --runs_dir may also hold a corpus whose preparation can be continued.
    remove_abandoned(path.parent, worth_keeping=lambda partial: not (partial / "checkpoints").is_dir())
    if branches := config.branch_from is not None and not path.exists():
        start_branch(config, path, description)
    return RunFolder(path, description, config.quiet, branches)


class RunFolder:
    """The run folder of global rank 0, locked against other jobs.

    Args:
        path: from `check_run_folder`.
        description: the content of `run.json`, from `launch.training.run_folder.provenance.describe_run`.
        branched: this process has just made the folder (`launch/training/checkpoints/branch.py`).

    Raises:
        UsageError: the folder cannot be written, another process writes to it, it holds a different run, or its run has finished and the
            learning rate or the optimizer has changed. `run.json` is unchanged.
    """

    def __init__(self, path: Path, description: dict[str, Any], quiet: bool = False, branched: bool = False):
        self.path, self.quiet, self._branched = path, quiet, branched
        self._metrics: MetricsWriter | None = None
        self._drawing: subprocess.Popen[bytes] | None = None
        self._drawn = time.monotonic()
        self.print: Callable[[str], Any] = print_once  # a progress bar replaces it, to print above itself
        self._new_parents = [parent for parent in path.absolute().parents if not parent.exists()]
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        except OSError as reason:
            raise UsageError(f"{path}: cannot be written ({reason.strerror}); give another --runs_dir") from None
        try:
            self._take_lock(bool(description["resume"]))
            self._description = self._command = json.loads(json.dumps(description))
            self._changes: list[str] = []
            self._is_new = not (path / "run.json").exists()
            if not self._is_new:
                if not description["resume"] and not branched:  # another job has made it since `check_run_folder`
                    raise UsageError(f"{path}: this run exists; give another --run_name, or continue it with --resume")
                self._description, self._changes = resume_description(path, self._description)
                self._refuse_unused_settings(description["total_tokens"])
            with _one_line_on_os_error(path):
                self._log = open(path / "log.txt", "a", encoding="utf-8")  # noqa: SIM115 - a refused resume leaves no log
                self._lock.truncate(0)
                # For the message of another job, and for hosts that compare whether they see this file.
                self._lock.write(f"process {os.getpid()} on {os.uname().nodename}\n{uuid.uuid4().hex}\n")
                self._lock.flush()
                os.fsync(self._lock.fileno())
        except BaseException:
            self.close()
            raise
        self.run_id: str | None = self._description.get("run_id")

    def _refuse_unused_settings(self, total_tokens: int) -> None:
        """Raise UsageError if a setting of the optimizer has changed and the run has no step left that would use it."""
        unused = next((change for change in self._changes if change.startswith(("lr:", "optimizer."))), None)
        finished = self._description.get("finished")
        if unused is None or not finished or finished["tokens"] < total_tokens:
            return
        if (self.path / "checkpoints" / checkpoint_name(finished["step"])).exists():  # else a resume repeats the last steps
            why = f"has finished, so no step would be trained with {unused}"
            raise UsageError(f"{self.path}: this run {why}; give another --run_name, or a longer run")

    def _take_lock(self, resume: bool) -> None:
        """Lock the folder. A resume waits for the lock, because the ranks of a killed job end some seconds after it.

        Raises:
            UsageError: another process has the lock, or the file system has no locks.
        """
        deadline, reported = time.monotonic() + (WAIT_SECONDS if resume else 0.0), False
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the kernel when this process ends
                return
            except BlockingIOError:
                other = (self.path / ".lock").read_text(encoding="utf-8").partition("\n")[0] or "another process"
                held = f"{self.path}: {other} is still writing into this run"
            except OSError as reason:
                fix = "mount it with flock (Lustre: -o flock), or give another --runs_dir"
                raise UsageError(f"{self.path}: its file system does not lock files ({reason.strerror}); {fix}") from None
            if time.monotonic() >= deadline:
                raise UsageError(f"{held}; wait until it has ended, or stop it")
            if not reported:
                print_once(f"{held}; waiting up to {WAIT_SECONDS:.0f} s")
                reported = True
            time.sleep(0.2)

    def begin(self, step: int) -> None:
        """Write `run.json` and open the metrics. The run starts or continues after `step`; later steps are removed from the metrics.

        Call it again after a rewind.
        """
        if step == 0:  # a resume without a checkpoint begins with the weights of its own command
            self._description["init_from"] = self._command.get("init_from")
        with _one_line_on_os_error(self.path):
            remove_unfinished(self.path)
            self._write_run_json(finished=None)
            if self._metrics:
                self._metrics.close()
            self._metrics = MetricsWriter(self.path, step, self._description.get("engine", {}), self.run_id)
        for note in self._metrics.notes:
            self.log(f"note: {note}")

    @property
    def seconds_before(self) -> float:
        """The duration of the run before this start, in seconds."""
        return self._metrics.seconds_before if self._metrics else 0.0

    def _write_run_json(self, finished: dict[str, Any] | None) -> None:
        write_atomically(self.path / "run.json", json.dumps({**self._description, "finished": finished}, indent=2) + "\n")

    # --- the log --------------------------------------------------------------------------------------------------------------------

    def log(self, line: str, silent: bool = False, always: bool = False) -> None:
        """Write one line to `log.txt` and to the terminal. Not to the terminal if `silent`, or if the run is quiet and not `always`."""
        with _one_line_on_os_error(self.path):
            self._log.write(time.strftime("%Y-%m-%d %H:%M:%S ") + line + "\n")
            self._log.flush()
        if always or not (silent or self.quiet):
            self.print(line)

    def log_start(self, config: RunConfig, lines: Iterable[str], state: dict[str, Any]) -> None:
        """Log whether the run is resumed, then `lines`, then the changes since the last start, and whether the learning rate jumps."""
        step = state["step"]
        if self._branched:
            self.log(f"branched from {self._description['branch_from']}")
        if step:
            ended = state["tokens"] >= config.total_tokens
            self.log(f"resuming after step {step}" + ", the last one; --steps with a larger number trains further" * ended)
        elif config.resume:
            new = f"; {self.path} is a new run" if self._is_new else ""
            self.log(f"no complete checkpoint to resume from: starting at step 0{new}", always=True)
        for line in lines:
            self.log(line)
        for change in self._changes:
            self.log(f"changed since this run was last started: {change}")
        before = self._metrics.lr_before if self._metrics else None
        if before is None or state["tokens"] >= config.total_tokens:
            return
        rate = learning_rate(config)
        if not math.isclose(rate(step, state["tokens"]), before, rel_tol=1e-6):
            after = rate(step + 1, state["tokens"] + config.tokens_per_step)
            self.log(
                f"warning: the learning rate goes from {before:.2e} (step {step}) to {after:.2e}, because this start has another schedule, "
                "rate, warm-up or length; for another length without a jump, --branch_from a checkpoint before the decay",
                always=True,
            )

    def log_failure(self, reason: str) -> None:
        """Log why the run failed and draw its loss. The command prints `reason` itself."""
        self.log(f"error: {reason}", silent=True)
        self._draw_loss()

    def log_end(self, state: dict[str, Any], whole: dict[str, float], stop_signal: int) -> None:
        """Log how the run ended and draw its loss.

        whole: the losses on the whole validation split, if it was evaluated. stop_signal: the signal that stopped the run, 0 at its end.
        """
        if stop_signal:
            name = signal.Signals(stop_signal).name
            self.log(f"stopped by {name} after step {state['step']}; --resume {self.path} continues from there", always=True)
        else:
            ended = {"step": state["step"], "tokens": state["tokens"]}
            ended |= {f"whole_{name}": loss if math.isfinite(loss) else None for name, loss in whole.items()}  # JSON has no NaN
            with _one_line_on_os_error(self.path):
                before = self._description.get("finished") or {}  # of the run that is resumed
                kept = before if before.get("step") == state["step"] else {}  # no step was made: `whole_val_loss` still holds
                self._write_run_json({**kept, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **ended})
        picture = self._draw_loss()
        loss = "" if state["val_loss"] is None else f", validation loss {state['val_loss']:.4f}"
        if whole:
            loss += f", of the whole validation split {evaluated_losses(whole).removeprefix('validation ')}"
        self.log(f"{self.path}: step {state['step']}, {state['tokens']:,} tokens{loss}; the curve is {picture}", always=True)

    def _draw_loss(self) -> Path:
        from launch.training.run_folder.picture import draw_run  # imports matplotlib, which a start need not wait for

        if self._drawing:
            self._drawing.kill()
            self._drawing.wait()
        with _one_line_on_os_error(self.path):
            remove_unfinished(self.path)
            draw_run(self.path)
        return self.path / "loss.png"

    def _draw_loss_beside_training(self) -> None:
        """Draw the loss in a process of lowest priority, so that training does not wait; none within `PICTURE_SECONDS` of the last one.

        Interleaved runs draw at their end only, because their step times are compared.
        """
        drawing = self._drawing and self._drawing.poll() is None
        if drawing or time.monotonic() - self._drawn < PICTURE_SECONDS or self._command.get("interleaved"):
            return
        self._drawn = time.monotonic()
        command = ["nice", "-n", "19", sys.executable, "-m", "launch.training.run_folder.picture", str(self.path.absolute())]
        with contextlib.suppress(OSError):  # at the latest, the end of the run reports it
            self._drawing = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )

    # --- numbers --------------------------------------------------------------------------------------------------------------------

    def write_metrics(self, line: dict[str, Any], durable: bool = False) -> None:
        """Append the line of one step to `metrics.jsonl` and the monitors; see `MetricsWriter.write`."""
        assert self._metrics is not None, "begin comes first"
        with _one_line_on_os_error(self.path):
            self._metrics.write(line, durable)
        if "val_loss" in line:
            self._draw_loss_beside_training()

    # --- the end --------------------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Remove the folder if the start was refused before `begin`, unless it had checkpoints."""
        if self._metrics is None and (self._branched or (self._is_new and not any((self.path / "checkpoints").iterdir()))):
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run is there
                for parent in self._new_parents:
                    parent.rmdir()

    def close(self) -> None:
        """Close all files; the lock is released last."""
        for stream in (self._metrics, vars(self).get("_log"), self._lock):
            if stream is not None:
                with contextlib.suppress(OSError):  # a full disk was reported by the write that met it
                    stream.close()


class NoFolder:
    """Replaces `RunFolder` on the other ranks. All methods do nothing."""

    seconds_before = 0.0
    run_id = None
    print: Callable[[str], Any] = print_once

    def log(self, *_: Any, **__: Any) -> None:
        pass

    log_start = log_end = log_failure = begin = write_metrics = abandon = close = log


@contextlib.contextmanager
def _one_line_on_os_error(path: Path) -> Iterator[None]:
    """If a file cannot be written in the body, for example because the disk is full, print one line and exit with code 1."""
    try:
        yield
    except OSError as reason:
        why = f"{reason.strerror}; {free_bytes(path) / 2**20:,.0f} MiB free"
        fault = f"error: {os.fsdecode(reason.filename or path)}: could not be written ({why}); {what_resume_does(path / 'checkpoints')}"
        print(fault, file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, which may have been removed."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free
