"""Counts the copies of prefixes that requests share."""

from collections.abc import Sequence


class Sharing:
    """Counts copies of shared prefixes.

    A piece of text (an id of the workload) is *shared* once a second request begins with it, or one
    request has several branches on it. Its first computation is due; each token of it that a later
    request computes again, on another worker or because it was evicted, is part of a *copy*:

        copies = (unique shared tokens + tokens of them computed again) / unique shared tokens

    1.0 means that every shared prefix was computed once (also if nothing was shared), 8.0 that eight
    workers computed it. Only what a cache can hold counts: full blocks, and never a prompt's last token.
    """

    def __init__(self, id_tokens: int, block_size: int) -> None:
        self._id_tokens = id_tokens
        self._block_size = block_size
        self._seen: set[int] = set()
        self._shared: set[int] = set()
        self.unique_tokens = 0
        self.copied_tokens = 0

    @property
    def copies(self) -> float:
        if not self.unique_tokens:
            return 1.0
        return (self.unique_tokens + self.copied_tokens) / self.unique_tokens

    def begin(self, ids: Sequence[int], num_tokens: int, branches: int) -> int:
        """Note a prompt of `num_tokens`; returns how many of its first tokens earlier ones had."""
        num_ids = len(ids)
        known = _count(ids, self._seen)
        if known < num_ids:
            self._seen.update(ids[known:])
        self._share(ids, num_ids if branches > 1 else known, num_tokens)
        size = self._block_size
        return min(known * self._id_tokens, num_tokens - 1) // size * size

    def fork(self, ids: Sequence[int], num_tokens: int) -> None:
        """Text of `num_tokens` tokens is forked for the first time: what the ids name, and its own."""
        self._share(ids, len(ids), num_tokens)
        self.unique_tokens += max(0, num_tokens - len(ids) * self._id_tokens)

    def computed(self, shared_tokens: int, cached_tokens: int) -> None:
        """Of a prompt that shares `shared_tokens`, the worker had `cached_tokens`."""
        if cached_tokens < shared_tokens:
            self.copied_tokens += shared_tokens - cached_tokens

    def _share(self, ids: Sequence[int], num: int, num_tokens: int) -> None:
        """The first `num` of `ids`, which name the beginning of `num_tokens` tokens, are shared."""
        old = _count(ids, self._shared, num) if num else 0
        if old < num:
            self._shared.update(ids[old:num])
            tokens = self._id_tokens
            self.unique_tokens += min(num * tokens, num_tokens) - min(old * tokens, num_tokens)


def _count(ids: Sequence[int], known: set[int], most: int | None = None) -> int:
    """The number of leading ids in `known`. An id in it has all before it there too."""
    num = len(ids) if most is None else most
    if not num or ids[0] not in known:
        return 0
    if ids[num - 1] in known:
        return num
    low, high = 0, num - 1
    while high - low > 1:  # ids[low] is known, ids[high] is not
        middle = (low + high) // 2
        if ids[middle] in known:
            low = middle
        else:
            high = middle
    return high
