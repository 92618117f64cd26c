"""The global order of samples: a pure function of (corpus fingerprint, seed, position).

Position i is in epoch i // n_windows, and every epoch is a permutation of the windows, computed place by place instead of
shuffled: position 10**12 costs as much as position 0, nothing is stored, and a resumed run asks for the position it reached.
Integer arithmetic only, so the order is the same on every platform and with every numpy.
"""

import hashlib
from math import isqrt

import numpy as np

BLOCK = 4096  # positions computed at once: 0.3 ms, or 0.07 us a sample
ROUNDS = 8


class GlobalSampler:
    """Windows in the order in which a whole run, all ranks together, sees them."""

    def __init__(self, n_windows: int, seed: int, fingerprint: str):
        assert n_windows > 0, n_windows
        self.n_windows = n_windows
        self._key = f"{fingerprint}:{seed}"
        self._block_number = -1
        self._block = np.empty(0, dtype=np.int64)

    def indices(self, start: int, count: int) -> np.ndarray:
        """The windows at positions start, ..., start + count - 1: int64 of shape (count,), each in [0, n_windows)."""
        assert start >= 0, start
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            number, offset = divmod(start + done, BLOCK)
            if number != self._block_number:
                self._block = shuffled_positions(self.n_windows, self._key, number * BLOCK, BLOCK)
                self._block_number = number
            taken = self._block[offset : offset + count - done]
            out[done : done + len(taken)] = taken
            done += len(taken)
        return out


def shuffled_positions(n: int, key: str, start: int, count: int) -> np.ndarray:
    """Positions start, ..., start + count - 1 of the endless sequence of permutations of range(n): int64 of shape (count,).

    A Feistel network over a grid of a x b >= n places, where a and b are near sqrt(n) (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002, section 4): each round adds to one coordinate a keyed hash of the other, which is a
    permutation of the grid. Places from n on are sent through again until they land below n (cycle walking), which leaves a
    permutation of range(n); fewer than a of the a x b places need that.
    """
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    epochs, places = np.divmod(np.arange(start, start + count, dtype=np.uint64), np.uint64(n))
    first, last = int(epochs[0]), int(epochs[-1])
    digests = b"".join(hashlib.shake_256(f"{key}:{epoch}".encode()).digest(8 * ROUNDS) for epoch in range(first, last + 1))
    round_keys = np.frombuffer(digests, dtype="<u8").reshape(-1, ROUNDS).astype(np.uint64)  # (epochs, ROUNDS)
    rows = (epochs - np.uint64(first)).astype(np.intp)
    walking = np.arange(count)
    while walking.size:
        keys = round_keys[rows[walking]]  # (walking, ROUNDS)
        x, y = np.divmod(places[walking], np.uint64(b))
        for i in range(0, ROUNDS, 2):
            x = (x + _hash(y + keys[:, i])) % np.uint64(a)
            y = (y + _hash(x + keys[:, i + 1])) % np.uint64(b)
        places[walking] = x * np.uint64(b) + y
        walking = walking[places[walking] >= n]
    return places.astype(np.int64)


def _hash(values: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer (Steele, Lea and Flood, 2014), halved so that adding a coordinate cannot wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31))) >> np.uint64(1)
