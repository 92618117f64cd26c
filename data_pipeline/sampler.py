"""The global order of samples: a pure function of (corpus fingerprint, window length, seed, position), also over a mixture.

Without a mixture, position i is in epoch i // n_windows; in a mixture each group counts its own epochs. Every epoch is a permutation of the
windows, computed position by position: position 10**12 costs as much as position 0, nothing is stored, and a resumed run continues at its
position. It uses integer arithmetic only, so the order is the same on every platform and with every version of numpy.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from heapq import heappop, heappush
from math import gcd, isqrt, lcm

import numpy as np

BLOCK = 4096  # positions computed at once: 0.3 ms, or 0.07 us per sample
ROUNDS = 8
#: Maximum number of parts that the weights of a mixture are divided into; one part is 0.01%.
DENOMINATOR = 10_000


class GlobalSampler:
    """The order in which a run reads the windows, over all ranks.

    Args:
        groups: the number of windows of each group of shards. Windows are numbered group by group.
        weights: the weight of each group, converted to whole parts (`parts_of`). The conversion is exact if the weights are fractions of up
            to DENOMINATOR parts, such as 0.7 and 0.3, or one third and two thirds; otherwise they are rounded to 1 / DENOMINATOR. Among the
            first n samples, for every n, the number from each group is within 1 of n x its parts / all parts. When all windows of a group
            have been used, its next epoch begins in another order.
    """

    def __init__(self, groups: Sequence[int], seed: int, fingerprint: str, weights: Sequence[float] = (1.0,)):
        assert len(groups) == len(weights) > 0 and min(groups) > 0, (groups, weights)
        self.n_windows = sum(groups)
        self._groups = groups
        self._offsets = np.cumsum([0, *groups[:-1]])
        # The key of a single group has no number, so its order is that of a corpus without mixture.
        key = f"{fingerprint}:{seed}"
        self._keys = [key] if len(groups) == 1 else [f"{key}:{number}" for number in range(len(groups))]
        self._parts = parts_of(weights)
        self._pattern, self._before = mixture_pattern(self._parts)
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
        periods, places = np.divmod(np.arange(start, start + BLOCK, dtype=np.int64), len(self._pattern))
        groups = self._pattern[places]
        out = np.empty(BLOCK, dtype=np.int64)
        for group, (n_windows, key) in enumerate(zip(self._groups, self._keys, strict=True)):
            mine = np.flatnonzero(groups == group)
            if len(mine):
                # The group's positions are consecutive, starting from the number of its samples before.
                first = int(periods[mine[0]]) * self._parts[group] + int(self._before[places[mine[0]]])
                out[mine] = self._offsets[group] + shuffled_positions(n_windows, key, first, len(mine))
        return out


def parts_of(weights: Sequence[float]) -> list[int]:
    """Weights as whole parts, at least one each, in lowest terms: [0.7, 0.3] is [7, 3], [1/3, 2/3] is [1, 2].

    Weights whose nearest fractions have no common denominator up to DENOMINATOR are rounded to DENOMINATOR parts by largest remainders.
    """
    total = sum(Fraction(weight) for weight in weights)
    shares = [Fraction(weight) / total for weight in weights]
    # The nearest fraction is at least as close as rounding to DENOMINATOR parts.
    nearest = [share.limit_denominator(DENOMINATOR) for share in shares]
    common = lcm(*(share.denominator for share in nearest))
    if common <= DENOMINATOR and sum(nearest) == 1 and min(nearest) > 0:
        return [int(share * common) for share in nearest]
    parts = [max(1, int(share * DENOMINATOR)) for share in shares]
    remainders = sorted(range(len(parts)), key=lambda i: shares[i] * DENOMINATOR - parts[i], reverse=True)
    for i in remainders[: max(0, DENOMINATOR - sum(parts))]:
        parts[i] += 1
    while sum(parts) > DENOMINATOR:  # parts that were raised to one are taken from the largest, where it matters least
        parts[parts.index(max(parts))] -= 1
    divisor = gcd(*parts)
    return [part // divisor for part in parts]


def mixture_pattern(parts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The group of each of D = sum(parts) samples, and the number of samples from that group before it: both int64, (D,).

    The next sample is from the group with the earliest deadline, among the groups that are not ahead. With the pattern repeated, the number
    from group i among the first n differs from n x parts[i] / D by at most 1 - 1 / (2 k - 2) for k groups (Tijdeman, "The chairman
    assignment problem", Discrete Mathematics 32, 1980). After D samples every group has exactly its share, and the pattern repeats.
    """
    k, total = len(parts), sum(parts)
    slack = max(1, 2 * k - 2)
    # Sample j of a group of weight w = part / D may be the n-th from n w - (j - 1) >= 1 / slack on, and its deadline is the last n with
    # (n - 1) w - (j - 1) <= 1 - 1 / slack.
    windows = sorted(
        (-((-(slack * (j - 1) + 1) * total) // (slack * part)), (slack * j - 1) * total // (slack * part) + 1, group, j - 1)
        for group, part in enumerate(parts)
        for j in range(1, part + 1)
    )
    pattern, before = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    ready: list[tuple[int, int, int]] = []  # by deadline, then by group, so that ties are ordered too
    released = 0
    for n in range(1, total + 1):
        while released < total and windows[released][0] <= n:
            heappush(ready, windows[released][1:])
            released += 1
        deadline, pattern[n - 1], before[n - 1] = heappop(ready)
        assert deadline >= n, (parts, n)
    return pattern, before


def shuffled_positions(n: int, key: str, start: int, count: int) -> np.ndarray:
    """Positions start, ..., start + count - 1 of the endless sequence of permutations of range(n): int64 of shape (count,).

    A Feistel network over a grid of a x b >= n places, where a and b are near sqrt(n) (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002, section 4): each round adds to one coordinate a keyed hash of the other, which is a
    permutation of the grid. Places from n on are mapped again until they are below n (cycle walking), which gives a permutation of
    range(n); fewer than a of the a x b places need that.
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
