"""Ends a run that hangs, and says which rank hangs and where.

In a collective every rank waits for the slowest. When one rank stops (its process or host is suspended, a file system does not answer, a
deadlock), the others wait without a message while the job's time runs out.

While it trains, each rank has a file `runs/<name>/.heartbeat/rank-00001`. A thread writes it once a second (less often with more than 100
ranks), so training never waits for the file system. It holds

    beats   number of places that the rank has entered: forward pass, backward pass, update, evaluation, ...
    ticks   number of times that the thread has woken up; it stands still if the process does not run

A rank that has not entered a new place for `--hang_timeout` reads the files of all ranks, and ends the run if

- the ticks of a rank have not changed meanwhile: its process does not run;
- or no rank has entered a new place, and none is in a place that may take long: its first forward pass, backward pass, update or evaluation
  since the start, which may compile; a checkpoint; or a wait for interleaved runs. The rank with the fewest beats is behind.

Time is counted in ticks, so that a job that was suspended as a whole continues afterwards.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from launch.errors import UsageError
from launch.formats.checkpoint_files import what_resume_does
from launch.training.engine import BACKWARD, CHECKPOINT, EVALUATION, FORWARD, UPDATE
from launch.training.observers import Observer
from launch.training.ranks.distributed import Collectives
from launch.training.ranks.interleaving import interleaved_group

#: The places of a run besides the phases of the engine, as a message names them.
START, END = "start of the step", "end of the step"
PLACES = (START, FORWARD, BACKWARD, UPDATE, END, EVALUATION, CHECKPOINT)
#: Between two ticks, in seconds; longer for many ranks, and at most a twentieth of `--hang_timeout`.
TICK_SECONDS = 1.0
#: Writes of all ranks together per second, unless a twentieth of `--hang_timeout` is shorter: hosts share the file system.
WRITES_PER_SECOND = 100
#: Name of the file with the finding of the rank that is the first to create it, without the start of the run.
VERDICT = "verdict"


class Beat(NamedTuple):
    """The content of a rank's file. step: the last completed step. may_be_long: whether `place` may take long."""

    ticks: int
    beats: int
    step: int
    place: int
    may_be_long: int


class Heartbeat(Observer):
    """Watches the ranks while they train. All ranks construct it together.

    Args:
        run: the folder of the run, which all hosts share.
        seconds: time without progress after which the run ends.
        step: completed steps of the run.
        log: writes a line to the log, as `RunFolder.log` does.

    Raises:
        UsageError: the folder cannot be written.
    """

    def __init__(self, run: Path, seconds: int, step: int, collectives: Collectives, log: Callable[..., None]):
        self.run, self.seconds, self.collectives, self._log = run, seconds, collectives, log
        self._tick = min(max(TICK_SECONDS, collectives.world_size / WRITES_PER_SECOND), seconds / 20)
        self._half = round(seconds / self._tick / 2)
        self._folder = run / ".heartbeat"
        self._beat = Beat(0, 0, step, PLACES.index(START), may_be_long=1)
        self._known: set[str] = set()  # the places that this rank has left once
        self._ended = threading.Event()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if collectives.rank == 0:
                for old in self._folder.glob(f"{VERDICT}-*"):
                    old.unlink(missing_ok=True)
            self._record = os.open(self._file(collectives.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.pwrite(self._record, _RECORD.pack(*self._beat), 0)
        except OSError as reason:
            raise UsageError(f"{self._folder}: cannot be written ({reason.strerror}); give a --runs_dir that all hosts share") from None
        # Another name in each start: NFS may show a removed file for up to a minute.
        self._verdict = self._folder / f"{VERDICT}-{collectives.gather(uuid.uuid4().hex)[0]}"
        self._processes: list[tuple[str, int]] = collectives.gather((os.uname().nodename, os.getpid()))
        self._several_hosts = len({host for host, _ in self._processes}) > 1
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()
            os.close(self._record)
        # After an exception the record stays, so that the other ranks see that this one does not run.
        with contextlib.suppress(OSError):
            self._file(self.collectives.rank).unlink()

    # --- where this rank is ---------------------------------------------------------------------------------------------------------

    def on_step(self, step: int) -> None:
        self.on_phase(START)

    def after_step(self, step: int) -> None:
        self._beat = self._beat._replace(step=step)
        self.on_phase(END)

    def on_phase(self, phase: str) -> None:
        """This rank is now in `phase`, or in START or END. Takes 2 us: the thread writes it."""
        if phase != (before := PLACES[self._beat.place]):
            self._known.add(before)
        waits = phase == START and interleaved_group() is not None
        may_be_long = waits or phase == CHECKPOINT or phase not in self._known
        self._beat = self._beat._replace(beats=self._beat.beats + 1, place=PLACES.index(phase), may_be_long=int(may_be_long))

    def _write(self, ticks: int) -> None:
        with contextlib.suppress(OSError):  # such as a full disk; the next tick tries again
            os.pwrite(self._record, _RECORD.pack(*self._beat._replace(ticks=ticks)), 0)
            if self._several_hosts:
                os.fsync(self._record)

    # --- where the others are -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        ticks = idle = 0
        beats, before = -1, None
        while not self._ended.wait(self._tick):
            self._write(ticks := ticks + 1)
            if beats != self._beat.beats:
                beats, idle, before = self._beat.beats, 0, None
                continue
            idle += 1
            if os.path.exists(self._verdict):  # False where the file system does not answer
                self._end(json.loads(self._verdict.read_text(encoding="utf-8")))
            if idle % self._half == 0:
                now = self._read()
                if before is not None and (behind := _behind(before, now, self.collectives.world_size)) is not None:
                    self._judge(behind, now)
                before = now

    def _read(self) -> dict[int, Beat]:
        """The records of all ranks, without those that have left training or whose file cannot be read."""
        found = {}
        for rank in range(self.collectives.world_size):
            with contextlib.suppress(OSError, struct.error):
                found[rank] = Beat(*_RECORD.unpack(self._file(rank).read_bytes()))
        return found

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}"

    # --- the end --------------------------------------------------------------------------------------------------------------------

    def _judge(self, behind: dict[int, str], now: dict[int, Beat]) -> None:
        """Record and print which ranks are `behind`, and end the run; unless another rank does so first."""
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
        own = self._verdict.with_name(f"{self._verdict.name}-{self.collectives.rank}")
        try:
            own.write_text(json.dumps(verdict), encoding="utf-8")
            os.link(own, self._verdict)  # atomic, and only one rank succeeds
        except FileExistsError:
            return
        except OSError:  # the disk is full, or has no links: every rank judges by itself
            pass
        print(f"error: {line}", file=sys.stderr, flush=True)
        self._end(verdict)

    def _end(self, verdict: dict[str, Any]) -> None:
        """End this process, and those of its host that are behind. Waits until the other ranks have seen the verdict too."""
        if self.collectives.rank in (verdict["behind"][:4] or [0]):  # where it hangs
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback(sys.stderr)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the collective of the main thread fails when another rank ends
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
    """The ranks for which the others wait, with the state of their processes; {} if all wait in the same place; None if none hangs.

    Args:
        before, now: the records of half a `--hang_timeout` ago, and the current ones.
        ranks: the number of ranks. If records are missing, only a process that does not run counts as hanging.
    """
    if stopped := {rank: "which does not run" for rank, beat in now.items() if rank in before and before[rank].ticks == beat.ticks}:
        return stopped
    if len(now) < ranks or any(beat.may_be_long or before.get(rank, beat).beats != beat.beats for rank, beat in now.items()):
        return None
    fewest = min(beat.beats for beat in now.values())
    behind = {rank: "which runs" for rank, beat in now.items() if beat.beats == fewest}
    return {} if len(behind) == len(now) else behind


_RECORD = struct.Struct("<5q")
