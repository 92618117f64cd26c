"""A run's folder: `run.json`, `metrics.jsonl`, `log.txt`, TensorBoard events, `checkpoints/`, `loss.png`.

Everything downstream reads these files only. One process writes them: global rank 0. `metrics.jsonl` holds one object a step;
a line is on the operating system's side before the next step begins, so that a killed run loses none.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from launch.run.errors import UsageError, say
from launch.run.metrics import read_metrics
from launch.run.picture import draw_loss
from model.accounting import parameter_count

if TYPE_CHECKING:
    from launch.engine.engine import Engine
    from launch.engine.evaluation import Evaluation
    from launch.engine.meter import Meter
    from launch.run.config import RunConfig

#: Values that must be the same when a run is resumed: they decide what the next step computes. Length, learning rate and the
#: cadence of evaluations and checkpoints may change; the log says so.
IDENTITY = ("seed", "shape", "corpus_fingerprint", "global_batch_size", "precision", "zero_stage", "ranks", "micro_batch_size")
LOCK_PATIENCE_SECONDS = 60.0


def check_run_folder(runs_dir: str, run_name: str, resume: bool) -> Path:
    """The run's folder, which must be free (or exist, for a resume), in a place that can be written. Creates nothing.

    Raises:
        UsageError: the name is taken, or the folder cannot be made.
    """
    path = Path(runs_dir) / run_name
    if path.exists() and not resume:
        raise UsageError(f"{path}: this run exists; give another --run_name, go on with it by --resume, or remove it yourself")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: is a file, not a run folder; give another --run_name")
    above = path
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: cannot be made, {above} is {'not writable' if above.is_dir() else 'a file'}; give another --runs_dir")
    return path


class RunFolder:
    """The open run folder of global rank 0.

    Args:
        path: from `check_run_folder`.
        description: what `run.json` records; on a resume it must agree with what is there in all `IDENTITY` keys.

    Raises:
        UsageError: another process is writing into this folder, or the run there is a different one.
    """

    def __init__(self, path: Path, description: dict[str, Any], quiet: bool = False):
        self.path = path
        self.quiet = quiet
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
            self._lock = open(path / ".lock", "a+")  # noqa: SIM115 - held as long as the run
        except OSError as reason:
            raise UsageError(f"{path}: cannot be written ({reason.strerror}); give another --runs_dir") from None
        self._acquire_lock()
        self._describe(description)
        self._log = open(path / "log.txt", "a", encoding="utf-8")  # noqa: SIM115
        self._metrics: TextIO | None = None
        self._writer: Any = None

    def _acquire_lock(self) -> None:
        """Wait for a predecessor that is still ending: two writers would mix their steps."""
        deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
        told = False
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                self._lock.seek(0)
                holder = self._lock.read().strip() or "another process"
                if time.monotonic() > deadline:
                    raise UsageError(f"{self.path}: {holder} is still writing into this run; stop it, or give another --run_name") from None
                if not told:
                    say(f"{self.path}: {holder} is still writing into this run; waiting up to {LOCK_PATIENCE_SECONDS:.0f} s for it to end")
                    told = True
                time.sleep(0.2)

    def _describe(self, description: dict[str, Any]) -> None:
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        self._lock.flush()
        file = self.path / "run.json"
        description = json.loads(json.dumps(description))
        if file.exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            wrong = [
                f"{self.path}: this run has {key} = {json.dumps(before.get(key))}, the command says {json.dumps(description[key])}; "
                "give the run's own value, or another --run_name"
                for key in IDENTITY
                if before.get(key) != description[key]
            ]
            if wrong:
                raise UsageError(*wrong)
            description["resumed_from"] = [*before.get("resumed_from", []), before.get("created")]
        write_atomically(file, json.dumps(description, indent=2) + "\n")

    # --- the log and the metrics --------------------------------------------------------------------------------------------------

    def log(self, line: str, silent: bool = False) -> None:
        """One line into `log.txt`, and onto the terminal unless the run is quiet or `silent` says not this one."""
        self._log.write(time.strftime("%Y-%m-%d %H:%M:%S ") + line + "\n")
        self._log.flush()
        if not silent and not self.quiet:
            say(line)

    def log_start(self, config: RunConfig, engine: Engine, meter: Meter, state: dict[str, Any], evaluation: Evaluation) -> None:
        """What is about to be trained, in a few lines."""
        shape, model = config.shape, engine.model_config
        self.log(
            f"{self.path}: {parameter_count(model) / 1e6:.1f} M parameters ({shape.n_layer} layers, {shape.d_model} wide, "
            f"{shape.seq_len} tokens), ZeRO {config.zero_stage}, {config.precision}, {config.ranks} rank(s) on {meter.device_name}"
        )
        self.log(
            f"{config.micro_batch_size} sequences x {config.gradient_accumulation_steps} accumulation x {config.ranks} rank(s) x "
            f"{shape.seq_len} tokens = {config.tokens_per_step:,} tokens a step, {config.steps:,} steps, {config.total_tokens:,} tokens "
            f"({config.total_tokens / config.corpus.train.n_tokens:.2f} epochs); {evaluation.windows} validation sequences"
        )
        if meter.peak_flops is None:
            self.log(f"no peak FLOP/s is known for '{meter.device_name}' in {config.precision}: mfu is left out of the metrics")
        if engine.corrections:
            self.log(f"corrected faults of this DeepSpeed: {', '.join(engine.corrections)} (launch/engine/corrections.py)")
        if config.resume:
            self.log(
                f"resuming after step {state['step']}" if state["step"] else "no complete checkpoint to resume from: starting at step 0"
            )

    def log_end(self, config: RunConfig, state: dict[str, Any], stopped: int, sample: str | None) -> None:
        """How the run ended, and where its picture is."""
        if sample is not None:
            self.log(f"a sample after {config.prompt!r}:\n{sample}")
        picture = draw_loss(
            self.path,
            f"{config.run_name}: {config.preset}, ZeRO {config.zero_stage}, {config.precision}",
            math.log(config.corpus.vocab_size),
        )
        if stopped:
            self.log(
                f"stopped by {signal.Signals(stopped).name} after step {state['step']}; the same command with --resume goes on from there"
            )
        loss = "" if state["val_loss"] is None else f", validation loss {state['val_loss']:.4f}"
        self.log(f"{self.path}: step {state['step']}, {state['tokens']:,} tokens{loss}; the curve is {picture}")

    def open_metrics(self, step: int) -> None:
        """Cut `metrics.jsonl` back to `step`: later lines are written again, and a torn last line is dropped.

        `seconds_before` becomes the `seconds` of the last line that stays: the clock of the run goes on from there.
        """
        from torch.utils.tensorboard import SummaryWriter

        file = self.path / "metrics.jsonl"
        # A run that starts at step 0 writes its line of step 0 again.
        kept = [line for line in read_metrics(file) if line["step"] <= step] if step and file.exists() else []
        write_atomically(file, "".join(json.dumps(line) + "\n" for line in kept))
        self._metrics = open(file, "a", encoding="utf-8")  # noqa: SIM115
        self._writer = SummaryWriter(str(self.path), purge_step=step + 1 if kept else None)
        self.seconds_before = kept[-1]["seconds"] if kept else 0.0

    def write_metrics(self, line: dict[str, Any]) -> None:
        """Append one step's line, and the same numbers as TensorBoard scalars."""
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        for key, value in line.items():
            if key != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, line["step"])

    def close(self) -> None:
        """Flush and close everything; the lock goes last."""
        for stream in (self._metrics, self._writer, self._log, self._lock):
            if stream is not None:
                stream.close()


class NoFolder:
    """What the other ranks have in place of the run's folder: everything is said and written by global rank 0."""

    seconds_before = 0.0

    def log(self, *_: Any, **__: Any) -> None:
        pass

    log_start = log_end = open_metrics = write_metrics = close = log


def write_atomically(file: Path, text: str) -> None:
    """Write a small file so that a reader, or a kill, sees the old or the new one and nothing between."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
