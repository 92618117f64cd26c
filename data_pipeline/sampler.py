"""The global order of samples: a pure function of (corpus fingerprint, seed, position), also over a mixture of sources.

Position i is in epoch i // n_windows, and every epoch is a permutation of the windows, computed place by place instead of
shuffled: position 10**12 costs as much as position 0, nothing is stored, and a resumed run asks for the position it reached.
Integer arithmetic only, so the order is the same on every platform and with every numpy.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, isqrt

import numpy as np

BLOCK = 4096  # positions computed at once: 0.3 ms, or 0.07 us a sample
ROUNDS = 8
#: Parts of a mixture's weights: 0.01%.
DENOMINATOR = 10_000


class GlobalSampler:
    """Windows in the order in which a whole run, all ranks together, sees them.

    Args:
        groups: how many windows each group of shards has; they stand one group behind the other.
        weights: the share of each group, rounded to whole parts of DENOMINATOR, at least one. After every prefix of n samples the number
            from each is within 1 of its parts x n / DENOMINATOR, so within 1 + n / DENOMINATOR of its weight x n where no weight is below
            1 / DENOMINATOR. A group that has been seen whole begins its next epoch, in another order.
    """

    def __init__(self, groups: Sequence[int], seed: int, fingerprint: str, weights: Sequence[float] = (1.0,)):
        assert len(groups) == len(weights) > 0 and min(groups) > 0, (groups, weights)
        self.n_windows = sum(groups)
        self._groups = groups
        self._offsets = np.cumsum([0, *groups[:-1]])
        # A lone group's key has no number, and its order is that of a corpus without mixture.
        key = f"{fingerprint}:{seed}"
        self._keys = [key] if len(groups) == 1 else [f"{key}:{number}" for number in range(len(groups))]
        self._pattern, self._before = mixture_pattern(parts_of(weights))
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
                self._block = self._windows(number * BLOCK)
                self._block_number = number
            taken = self._block[offset : offset + count - done]
            out[done : done + len(taken)] = taken
            done += len(taken)
        return out

    def _windows(self, start: int) -> np.ndarray:
        """The windows at the BLOCK positions from `start` on."""
        if len(self._groups) == 1:
            return shuffled_positions(self._groups[0], self._keys[0], start, BLOCK)
        periods, places = np.divmod(np.arange(start, start + BLOCK, dtype=np.int64), len(self._pattern))
        groups = self._pattern[places]
        out = np.empty(BLOCK, dtype=np.int64)
        for group, (n_windows, key) in enumerate(zip(self._groups, self._keys, strict=True)):
            mine = np.flatnonzero(groups == group)
            if len(mine):
                # The group's own positions are consecutive, from the number of its samples before the first on.
                period, place = int(periods[mine[0]]), int(places[mine[0]])
                first = period * int(self._before[-1, group]) + int(self._before[place, group])
                out[mine] = self._offsets[group] + shuffled_positions(n_windows, key, first, len(mine))
        return out


def parts_of(weights: Sequence[float]) -> list[int]:
    """Weights as whole parts, at least one each, in the smallest numbers: [0.7, 0.3] is [7, 3].

    What does not come out even is rounded to DENOMINATOR parts in all, the largest remainders up.
    """
    total = sum(Fraction(weight) for weight in weights)
    exact = [Fraction(weight) / total * DENOMINATOR for weight in weights]
    parts = [max(1, int(part)) for part in exact]
    while (short := DENOMINATOR - sum(parts)) != 0:
        remainders = [exact[i] - parts[i] if short > 0 or parts[i] > 1 else DENOMINATOR for i in range(len(parts))]
        parts[remainders.index(max(remainders) if short > 0 else min(remainders))] += 1 if short > 0 else -1
    divisor = gcd(*parts)
    return [part // divisor for part in parts]


def mixture_pattern(parts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Which group each of D = sum(parts) samples is from, (D,), and how many are from each before each of them, (D + 1, groups).

    Repeated for ever, the number from group i among the first n differs from n x parts[i] / D by at most 1 - 1 / (2 k - 2) for k groups
    (Tijdeman, The chairman assignment problem, 1980): of the groups that may have the next sample without running ahead, the one
    comes that would first fall behind.
    """
    k, total = len(parts), sum(parts)
    pattern, before = np.zeros(total, dtype=np.int64), np.zeros((total + 1, k), dtype=np.int64)
    slack = 2 * max(k, 2) - 2
    counts = [0] * k
    for n in range(total):
        # In units of 1 / (slack x total): group i may come when its due (n + 1) w - count is at least 1 / slack, and must before n w -
        # count passes 1 - 1 / slack: at the n of its deadline.
        best, best_deadline = -1, Fraction(0)
        for i in range(k):
            if slack * ((n + 1) * parts[i] - counts[i] * total) >= total:
                deadline = Fraction(((counts[i] + 1) * slack - 1) * total, slack * parts[i])
                if best < 0 or deadline < best_deadline:
                    best, best_deadline = i, deadline
        assert best >= 0, (parts, n)
        pattern[n] = best
        counts[best] += 1
        before[n + 1] = counts
    assert counts == list(parts), (parts, counts)
    return pattern, before


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
