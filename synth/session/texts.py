"""Ids of the forest's texts, made when a thread first begins with them, made anew as they are replaced."""

import numpy as np

from mallee.synth.session.forest import NO_SEGMENT, Forest
from mallee.traces.numbers import Int32s, Ints


class Texts:
    """One forest's texts over a generated trace: each segment in each family has one text at a time.

    `take` hands out ids that nobody has yet. `length` stretches segments, each by its own whole
    number of blocks.
    """

    def __init__(self, forest: Forest, length: float, rng: np.random.Generator) -> None:
        self._forest = forest
        wanted = forest.blocks * length
        self._blocks = np.floor(wanted + rng.random(len(forest))).astype(np.int64)
        self._paths: dict[tuple[int, int], Ints] = {}  # (family, segment): from the root on
        self._roots: dict[tuple[int, int], int] = {}
        self._list: list[Ints] = []
        self.next_id = 0

    def take(self, count: int) -> int:
        """The first of `count` ids in a row."""
        self.next_id += count
        return self.next_id - count

    def renew(self, rng: np.random.Generator) -> None:
        """A source's length has passed: some segments will have new texts, and all that follow them."""
        forest = self._forest
        is_new = rng.random(len(forest)) < forest.renewal
        for segment, above in enumerate(forest.above.tolist()):  # those above come first
            is_new[segment] |= above != NO_SEGMENT and is_new[above]
        for key in [key for key in self._paths if is_new[key[1]]]:
            del self._paths[key]
            self._roots.pop(key, None)

    def root(self, family: int, segment: int) -> int:
        """Number of the text that ends with `segment`; `NO_SEGMENT` has none: -1."""
        if segment == NO_SEGMENT:
            return -1
        key = family, segment
        if key not in self._roots:
            self._roots[key] = len(self._list)
            self._list.append(self._path(key))
        return self._roots[key]

    def roots(self, families: Ints, segments: Int32s) -> Ints:
        """`root` of each pair."""
        pairs = zip(families.tolist(), segments.tolist(), strict=True)
        return np.array([self.root(*pair) for pair in pairs], np.int64)

    def lengths(self, roots: Ints) -> Ints:
        """Blocks of each text; 0 of none."""
        sizes = np.array([len(path) for path in self._list] + [0], np.int64)
        return sizes[roots]  # the last is that of -1

    def flat(self) -> tuple[Ints, Ints]:
        """(starts, ids) of all texts so far."""
        starts = np.zeros(len(self._list) + 1, np.int64)
        np.cumsum([len(path) for path in self._list], out=starts[1:])
        return starts, np.concatenate([np.empty(0, np.int64), *self._list])

    def _path(self, key: tuple[int, int]) -> Ints:
        if key not in self._paths:
            family, segment = key
            above = int(self._forest.above[segment])
            head = np.empty(0, np.int64) if above == NO_SEGMENT else self._path((family, above))
            count = int(self._blocks[segment])
            first = self.take(count)
            own = np.arange(first, first + count, dtype=np.int64)
            self._paths[key] = np.concatenate([head, own])
        return self._paths[key]
