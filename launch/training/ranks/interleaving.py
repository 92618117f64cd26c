"""Interleaves the steps of several runs on one machine, so that a slow moment of the machine affects all of them alike.

`launch/compare.py` starts the runs and lets one of them at a time make `STEPS` steps (`launch/comparison/interleaved.py`). Every rank of a
run connects to the Unix socket named by `PRETRAIN_INTERLEAVE`, sends one byte when it is ready for its next steps, and waits for one byte.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "PRETRAIN_INTERLEAVE"
#: Steps that a run makes before the next run continues: more than a second of `nano` on two cores, so that cold caches slow down few steps.
STEPS = 10


class Interleaving:
    """This rank's end of the socket. Without `PRETRAIN_INTERLEAVE` the run trains alone and never waits.

    Args:
        on_lost: called when the connection is lost, because the command that interleaves the runs has ended.
    """

    def __init__(self, on_lost: Callable[[], None]):
        self._on_lost = on_lost
        self._steps_left = 0
        self._socket: socket.socket | None = None
        if path := os.environ.get(VARIABLE):
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                self._socket.connect(path)
            except OSError:
                self._lose()

    def wait(self) -> float:
        """Wait until this run may make its next step. Returns the seconds waited."""
        if self._socket is None:
            return 0.0
        start = time.monotonic()
        if not self._steps_left:
            try:
                self._socket.sendall(b"r")
                if not self._socket.recv(1):
                    self._lose()
            except OSError:
                self._lose()
            self._steps_left = STEPS
        self._steps_left -= 1
        return time.monotonic() - start

    def _lose(self) -> None:
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        self._on_lost()


def interleaved_group() -> str | None:
    """A name shared by the runs that are interleaved with each other; None for a run that trains alone."""
    path = os.environ.get(VARIABLE)
    return Path(path).parent.name if path else None
