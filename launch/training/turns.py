"""Turns: several runs on one machine of which, at any moment, one makes steps, so that what disturbs the machine hits all of them alike.

`launch/compare.py` starts control and recipe side by side and gives each in turn leave for some steps, over a socket of the run that the
environment variable `PRETRAIN_TURNS` names. Every rank of the run listens there. Its clock stands still while it waits: `seconds` in the
metrics is the run's own time.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "PRETRAIN_TURNS"
#: Steps of a turn: more than a second of `nano` on two cores, so that what the change of turns costs (caches, a wait) is in few of them.
STEPS = 10
READY, GO = b"r", b"g"


class Turns:
    """This rank's place in the turns; without `PRETRAIN_TURNS` nobody else makes steps, and it always has the turn.

    Args:
        on_end: called when nobody gives turns any more, which a run that takes them must not outlive.
    """

    def __init__(self, on_end: Callable[[], None]):
        self._on_end = on_end
        self._left = 0  # steps of this turn
        self._socket: socket.socket | None = None
        if path := os.environ.get(VARIABLE):
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                self._socket.connect(path)
            except OSError:
                self._end()

    def wait(self) -> float:
        """Call before a step: returns when this run may make it, with the seconds that it waited."""
        if self._socket is None:
            return 0.0
        start = time.monotonic()
        if not self._left:
            try:
                self._socket.sendall(READY)
                if self._socket.recv(1) != GO:
                    self._end()
            except OSError:
                self._end()
            self._left = STEPS
        self._left -= 1
        return time.monotonic() - start

    def _end(self) -> None:
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        self._on_end()


def circle() -> str | None:
    """A name that the runs which take turns with each other have in common; None for a run alone."""
    path = os.environ.get(VARIABLE)
    return Path(path).parent.name if path else None
