"""SIGTERM, Ctrl-C, SIGUSR1 and SIGUSR2 stop the run after the current step, on all ranks, with a checkpoint.

SIGUSR1 and SIGUSR2, which a batch system sends shortly before the time limit, also ask for a restart: the exit code is
`launch.errors.REQUEUE` instead of 128 + n.

A launcher does not signal all ranks at once: `deepspeed` signals its first rank, waits until it has ended, and then signals the next. So
the ranks agree to stop in the reduction that every step makes anyway.

The command `deepspeed` leaves its ranks running when it is killed. So every rank watches its launchers, and stops when one has ended.

The exit code of `deepspeed` 0.19.8 (tests/distributed/test_signals.py):

    the signal goes to                   `deepspeed` ends with
    a rank                               143
    the command `deepspeed`, its group   killed by the signal, which a shell shows as 143, or 130 for Ctrl-C; the ranks end after it
    `deepspeed.launcher.launch`          1

SIGUSR1 and SIGUSR2 end `deepspeed` and `torchrun` themselves. Send them to a rank: `deepspeed` then ends with `REQUEUE`.

`deepspeed.launcher.launch` kills a rank that has not ended 30 seconds after a signal. If a step and a checkpoint (two, if one is being
written) take longer, signal a rank or the command `deepspeed`, which have no such limit.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from pathlib import Path

from launch.errors import REQUEUE, print_once

#: The signals for which a run stops after its step. If ranks got different ones, the first in this order counts: `deepspeed` sends SIGTERM
#: when it gets Ctrl-C, and a batch system sends it when the time that SIGUSR1 has announced is over.
STOPPING = (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
#: Signals that are handled like another one. SIGHUP comes from a terminal that closes, unless `nohup` has set it to be ignored.
LIKE = {signal.SIGUSR2: signal.SIGUSR1, signal.SIGHUP: signal.SIGTERM}
LAUNCHER_CHECK_SECONDS = 0.5


class StopRequest:
    """Records the signal that stops this process; `poll` returns it.

    Before `defer` is called, a signal ends the process at once with its exit code. So does a second Ctrl-C at any time.

    Signals are handled in a thread, because Python runs handlers between two instructions of the main thread, which may be waiting in a
    collective.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._deferred = False
        self._interrupts = 0
        self._launchers = _launchers()
        arrived, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in (*STOPPING, *LIKE):
            if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:
                signal.signal(number, lambda number, frame: None)  # Python writes to `wakeup` as well
        threading.Thread(target=self._watch, args=(arrived,), name="signals", daemon=True).start()

    def _watch(self, arrived: int) -> None:
        while True:
            ready, _, _ = select.select([arrived], [], [], LAUNCHER_CHECK_SECONDS)
            for number in os.read(arrived, 64) if ready else b"":
                if number in (*STOPPING, *LIKE):
                    self._on_signal(number)
            self._check_launchers()

    def _check_launchers(self) -> None:
        if self._launchers and _launchers() != self._launchers:
            self._launchers = ()
            self._on_signal(signal.SIGTERM)

    def _on_signal(self, number: int) -> None:
        like = int(LIKE.get(signal.Signals(number), number))
        if not self._deferred:
            with contextlib.suppress(OSError):  # nobody reads standard error
                print_once(f"stopped by {signal.Signals(number).name} before the first step", sys.stderr)
            os._exit(exit_code(like))
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= 2:
            os._exit(128 + signal.SIGINT)
        if not self._signal:
            # The first signal counts: after a Ctrl-C the launcher sends SIGTERM.
            self._signal = like
            print_once("stopping after this step, with a checkpoint (Ctrl-C once more: at once)", sys.stderr)

    def request(self) -> None:
        """Stop as on SIGTERM, for a reason that has been printed."""
        self._signal = self._signal or int(signal.SIGTERM)

    def defer(self) -> None:
        """From now on a signal stops the run after its step."""
        self._deferred = True

    def poll(self) -> int:
        """The number of the signal that stops this process, 0 for none."""
        self._check_launchers()  # takes 30 us; the thread checks twice a second, and steps may be shorter
        return self._signal


def exit_code(number: int) -> int:
    """The exit code of a run that signal `number` has stopped."""
    return REQUEUE if number == signal.SIGUSR1 else 128 + number


def _launchers() -> tuple[int, ...]:
    """Process ids of the launchers above this rank: DeepSpeed's per-host launcher, and the `deepspeed` command if it started that one.

    Empty under other launchers, which end their ranks themselves.
    """
    parent = os.getppid()
    if b"deepspeed.launcher.launch" not in _read(f"/proc/{parent}/cmdline"):
        return ()
    # The fields after the command's name, which is in parentheses and may hold anything: state, parent, ...
    fields = _read(f"/proc/{parent}/stat").rpartition(b")")[2].split()
    grandparent = int(fields[1]) if len(fields) > 1 else 0
    return (parent, grandparent) if b"deepspeed" in _read(f"/proc/{grandparent}/cmdline") else (parent,)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
