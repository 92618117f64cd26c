"""Ends a run that hangs, and says which rank hangs and where.

In a collective every rank waits for the slowest. So when one rank stops, because its process or host was suspended, a file system does not
answer or a program deadlocks, the others wait without a message, and the batch system goes on counting.

Each rank has a file `runs/<name>/.heartbeat/rank-00001` while it trains. A thread of the rank writes it once a second, so training never
waits for the file system, and what a file says is at most a second old. It holds

    beats   how often the rank has entered another place: the forward pass, the backward pass, the update, an evaluation, ...
    ticks   how often the thread has woken up: whether the process of the rank runs

A rank that has not entered another place for `--hang_timeout` looks at the files of all ranks, and ends the run if

- the ticks of a rank have not changed meanwhile: its process does not run;
- or no rank has entered another place, and none is where that may take long: in its first forward pass, backward pass, update or evaluation
  since the start, which may compile, in a checkpoint, or where it waits for the runs that it is interleaved with. The rank with the fewest
  beats is behind.

Time is counted in ticks, so that a job that was suspended as a whole and continues does not end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from launch.errors import UsageError
from launch.formats.checkpoint_files import what_resume_does
from launch.training.distributed import Collectives
from launch.training.engine import TrainingEngine
from launch.training.interleaving import interleaved_group
from launch.training.observers import Observer

#: The places of a step, as a message names them.
START, FORWARD, BACKWARD, UPDATE, END = "start of the step", "forward pass", "backward pass", "update", "end of the step"
EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
PLACES = (START, FORWARD, BACKWARD, UPDATE, END, EVALUATION, CHECKPOINT)
#: Between two ticks at most, in seconds; 20 ticks make a shorter `--hang_timeout`.
TICK_SECONDS = 1.0
#: The file in the folder with what one rank has found; the first to make it judges.
VERDICT = "verdict"


class Beat(NamedTuple):
    """What a rank says of itself. `step`: those that it has completed; `may_be_long`: whether `place` may take long."""

    ticks: int
    beats: int
    step: int
    place: int
    may_be_long: int


class Heartbeat(Observer):
    """Watches the ranks while they train. All ranks make it together.

    Args:
        run: the folder of the run, which all hosts share.
        seconds: without progress, after which the run ends.
        step: the steps that the run has made.
        log: writes a line to the log, as `RunFolder.log` does.

    Raises:
        UsageError: the folder cannot be written.
    """

    def __init__(self, run: Path, seconds: int, step: int, collectives: Collectives, log: Callable[..., None]):
        self.run, self.seconds, self.collectives, self._log = run, seconds, collectives, log
        self._tick = min(TICK_SECONDS, seconds / 20)
        self._half = round(seconds / self._tick / 2)
        self._folder = run / ".heartbeat"
        self._beat = Beat(0, 0, step, PLACES.index(START), may_be_long=1)
        self._known: set[str] = set()  # the places that this rank has left once
        self._left = threading.Event()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if collectives.rank == 0:
                (self._folder / VERDICT).unlink(missing_ok=True)
            self._record = os.open(self._file(collectives.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.pwrite(self._record, _RECORD.pack(*self._beat), 0)
        except OSError as reason:
            raise UsageError(f"{self._folder}: cannot be written ({reason.strerror}); give a --runs_dir that all hosts share") from None
        self._processes: list[tuple[str, int]] = collectives.gather((os.uname().nodename, os.getpid()))
        self._several_hosts = len({host for host, _ in self._processes}) > 1
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._left.set()
            self._thread.join()
            os.close(self._record)
            with contextlib.suppress(OSError):
                self._file(self.collectives.rank).unlink()

    # --- where this rank is ---------------------------------------------------------------------------------------------------------

    def start(self, engine: TrainingEngine) -> None:
        engine.enter = self.enter

    def on_step(self, step: int) -> None:
        self.enter(START)

    def after_step(self, step: int) -> None:
        self._beat = self._beat._replace(step=step)
        self.enter(END)

    def enter(self, place: str) -> None:
        """This rank is now in `place`. Takes 2 us: the thread writes it."""
        if place != (before := PLACES[self._beat.place]):
            self._known.add(before)
        waits = place == START and interleaved_group() is not None
        may_be_long = waits or place == CHECKPOINT or place not in self._known
        self._beat = self._beat._replace(beats=self._beat.beats + 1, place=PLACES.index(place), may_be_long=int(may_be_long))

    def _write(self, ticks: int) -> None:
        with contextlib.suppress(OSError):  # such as a full disk; the next tick tries again
            os.pwrite(self._record, _RECORD.pack(*self._beat._replace(ticks=ticks)), 0)
            if self._several_hosts:
                os.fsync(self._record)

    # --- where the others are -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        ticks = idle = 0
        beats, before = -1, None
        while not self._left.wait(self._tick):
            self._write(ticks := ticks + 1)
            if beats != self._beat.beats:
                beats, idle, before = self._beat.beats, 0, None
                continue
            idle += 1
            if os.path.exists(self._folder / VERDICT):  # False where the file system does not answer
                self._end(json.loads((self._folder / VERDICT).read_text(encoding="utf-8")))
            if idle % self._half == 0:
                now = self._read()
                if before is not None and (behind := _behind(before, now, self.collectives.world_size)) is not None:
                    self._judge(behind, now)
                before = now

    def _read(self) -> dict[int, Beat]:
        """What every rank says of itself. One that has left, or whose file cannot be read, is left out."""
        found = {}
        for rank in range(self.collectives.world_size):
            with contextlib.suppress(OSError, struct.error):
                found[rank] = Beat(*_RECORD.unpack(self._file(rank).read_bytes()))
        return found

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}"

    # --- the end --------------------------------------------------------------------------------------------------------------------

    def _judge(self, behind: dict[int, str], now: dict[int, Beat]) -> None:
        """Write down and print which ranks are `behind`, and end; unless another rank does so first."""
        first = min(behind, default=self.collectives.rank)
        if behind:
            host, process = self._processes[first]
            others = f" and {len(behind) - 1} more have" if len(behind) > 1 else " has"
            what, whose = f"rank {first} ({host}, process {process}, {behind[first]}){others} made no progress", "the rank is"
        else:
            what, whose = "no rank has made progress", "all ranks are"
        place = PLACES[now[first].place]
        where = f"{'at' if place in (START, END) else 'in'} the {place}"
        step = max(beat.step for beat in now.values())  # a rank that has stopped may have made a step after its last record
        end = f"the run ends; {what_resume_does(self.run / 'checkpoints')}"
        line = f"{what} for {self.seconds} s: the last step was {step}, and {whose} {where}; {end}"
        verdict = {"line": line, "behind": list(behind)}
        own = self._folder / f"{VERDICT}-{self.collectives.rank}"
        try:
            own.write_text(json.dumps(verdict), encoding="utf-8")
            os.link(own, self._folder / VERDICT)  # whole, and made by one rank alone
        except FileExistsError:
            return
        except OSError:  # the disk is full, or has no links: every rank judges by itself
            pass
        print(f"error: {line}", file=sys.stderr, flush=True)
        self._end(verdict)

    def _end(self, verdict: dict[str, Any]) -> None:
        """End this process, and those of its host that are behind. Waits until the other ranks have seen the verdict too."""
        sys.excepthook = lambda *_: None  # the collective of the main thread fails when another rank ends
        with contextlib.suppress(Exception, SystemExit):
            self._log(f"error: {verdict['line']}", silent=True)
        time.sleep(3 * self._tick)
        for rank in verdict["behind"]:
            host, process = self._processes[rank]
            with contextlib.suppress(OSError, psutil.Error):
                if rank != self.collectives.rank and host == os.uname().nodename and psutil.Process(process).ppid() == os.getppid():
                    os.kill(process, signal.SIGKILL)  # SIGTERM waits until a stopped process continues
        os._exit(1)


def _behind(before: dict[int, Beat], now: dict[int, Beat], ranks: int) -> dict[int, str] | None:
    """The ranks for which the others wait, with what their processes do; empty if all ranks wait in the same place; None if none hangs.

    Args:
        before, now: what the ranks said of themselves half of `--hang_timeout` ago, and what they say.
        ranks: their number. While one of them has left, or its file cannot be read, only a process that does not run hangs.
    """
    if stopped := {rank: "which does not run" for rank, beat in now.items() if rank in before and before[rank].ticks == beat.ticks}:
        return stopped
    if len(now) < ranks or any(beat.may_be_long or before.get(rank, beat).beats != beat.beats for rank, beat in now.items()):
        return None
    fewest = min(beat.beats for beat in now.values())
    behind = {rank: "which runs" for rank, beat in now.items() if beat.beats == fewest}
    return {} if len(behind) == len(now) else behind


_RECORD = struct.Struct("<5q")
