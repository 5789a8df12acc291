"""The last decisions with every candidate's price, for whoever asks why a request went where it went."""

from typing import NamedTuple, TypeAlias

import numpy as np

from mallee.protocol.ids import RequestId, WorkerId
from mallee.router.placement.kernels import score
from mallee.router.placement.kernels.score import Floats
from mallee.router.placement.pricing import Ask, Cost, How, Prices


class Candidate(NamedTuple):
    """One worker as a decision saw it. `total` is infinite where the request could not go."""

    worker: WorkerId
    overlap_blocks: int
    cost: Cost
    total: float  # seconds; blocks in the dynamo formula


class Spill(NamedTuple):
    """Why rows of a fan-out are where they are: stay, migrate or recompute, and what each would take."""

    how: How
    prices: Prices


class Decision(NamedTuple):
    """One decision. `reason`: cost, capsule, pin, warm_up, fan_out, or the policy's name."""

    number: int
    at: float  # on the router's clock
    request: RequestId
    worker: WorkerId
    reason: str
    prompt_tokens: int
    num_blocks: int
    rows: int
    num_candidates: int
    candidates: tuple[Candidate, ...]  # the cheapest first; the chosen one is among them
    spill: Spill | None  # of a part of a fan-out


class Entry(NamedTuple):
    """What a decision was about, beside its terms."""

    request: RequestId
    slot: int
    reason: str
    at: float
    ask: Ask
    names: tuple[WorkerId | None, ...]  # by slot, as they were
    spill: Spill | None


# A plain tuple is made in a third of the time, and most decisions are never asked about.
_Raw: TypeAlias = tuple[RequestId, int, str, float, Ask, tuple[WorkerId | None, ...], Spill | None]


class DecisionLog:
    """The last `size` decisions over at most `num_workers` workers.

    Terms are written in place by the kernel: 24 bytes a worker and decision.
    """

    def __init__(self, size: int, num_workers: int) -> None:
        self.size = size
        # One place more: terms of a request that is refused are written, too, but not kept.
        self._places = size + 1
        terms = np.zeros((self._places, score.NUM_TERMS, num_workers), dtype=np.float32)
        self._by_place = list(terms)
        self._entries: list[_Raw | None] = [None] * self._places
        self._count = 0

    def terms(self) -> Floats:
        """Where the next decision's terms go: [NUM_TERMS, num_workers]. `add` keeps them."""
        return self._by_place[self._count % self._places]

    def add(self, entry: _Raw) -> int:
        """The decision (an `Entry`) whose terms were just written is kept; returns its number."""
        number = self._count
        self._entries[number % self._places] = entry
        self._count = number + 1
        return number

    def find(self, request: RequestId, candidates: int = 1000) -> Decision | None:
        """The last decision on `request`, if it is still kept."""
        for number in self._numbers():
            raw = self._entries[number % self._places]
            if raw is not None and raw[0] == request:
                return self._decision(number, Entry(*raw), candidates)
        return None

    def last(
        self, limit: int, *, of: RequestId | None = None, candidates: int = 1000
    ) -> list[Decision]:
        """The last decisions, youngest first; those on `of` and on its parts (`of`-1, ..) if given."""
        found: list[Decision] = []
        for number in self._numbers():
            raw = self._entries[number % self._places]
            assert raw is not None, f"decision {number} was not kept"
            if len(found) >= limit:
                break
            if of is None or raw[0] == of or raw[0].startswith(f"{of}-"):
                found.append(self._decision(number, Entry(*raw), candidates))
        return found

    def check(self) -> None:
        """Raises AssertionError if a decision that should be kept is not."""
        for number in self._numbers():
            assert self._entries[number % self._places] is not None, f"decision {number} is missing"

    def _numbers(self) -> range:
        return range(self._count - 1, max(0, self._count - self.size) - 1, -1)

    def _decision(self, number: int, entry: Entry, most: int) -> Decision:
        terms, names = self._by_place[number % self._places], entry.names
        named = np.array([slot for slot, name in enumerate(names) if name is not None])
        order = named[np.argsort(terms[score.TOTAL, named], kind="stable")]
        shown = order[:most].tolist()
        if entry.slot not in shown:
            shown.append(entry.slot)
        worker = names[entry.slot]
        assert worker is not None, f"decision {number} chose an empty slot"
        return Decision(
            number,
            entry.at,
            entry.request,
            worker,
            entry.reason,
            entry.ask.prompt_tokens,
            entry.ask.num_blocks,
            entry.ask.rows,
            len(named),
            tuple(_candidate(terms, slot, names[slot]) for slot in shown),
            entry.spill,
        )


def _candidate(terms: Floats, slot: int, worker: WorkerId | None) -> Candidate:
    assert worker is not None, f"slot {slot} is empty"
    overlap, queued, prefill, decode, fetch, total = terms[:, slot].tolist()
    return Candidate(worker, int(overlap), Cost(queued, prefill, decode, fetch), total)
