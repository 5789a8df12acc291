"""The last decisions with every candidate's price: why a request went where it went."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from mallee.protocol.ids import RequestId, WorkerId
from mallee.router.index.kernels.layout import Counts
from mallee.router.placement.fanout_pricing import Share
from mallee.router.placement.kernels import score
from mallee.router.placement.kernels.score import Floats
from mallee.router.placement.pricing import Cost, Demand
from mallee.router.placement.pulls import Pull


class Candidate(NamedTuple):
    """One worker's price in a decision. `total` is infinite where the request could not go.

    `matched_blocks` of the prompt are on its device; it is credited with `overlap_blocks`, after which the
    model can go on.
    """

    worker: WorkerId
    overlap_blocks: int
    matched_blocks: int
    cost: Cost
    total: float  # seconds; blocks in the dynamo formula
    pulled_blocks: int = 0  # beyond the overlap, from other workers


class Decision(NamedTuple):
    """One decision. `reason`: cost, warm_up, fan_out, or the policy's name."""

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
    spill: Share | None  # of a part of a fan-out
    pull: Pull | None = None  # of KV that others have


class Entry(Struct, frozen=True):
    """A decision as it was made. Most are never asked about, so names and candidates come later.

    Terms take 36 bytes a worker.
    """

    number: int
    request: RequestId
    slot: int
    reason: str
    at: float
    demand: Demand
    terms: Floats  # [NUM_TERMS, num_workers]
    names: tuple[WorkerId | None, ...]  # by slot, as they were
    share: Share | None
    pull: Pull | None = None
    matched: Counts | None = None  # as of `Offers`


def last(
    entries: Sequence[Entry],
    limit: int,
    *,
    of: RequestId | None = None,
    candidates: int = 1000,
) -> list[Decision]:
    """The last decisions, youngest first; those on `of` and on its parts (`of`-1, ..) if given."""
    found = (
        _decision(entry, candidates)
        for entry in reversed(entries)
        if of is None or entry.request == of or entry.request.startswith(f"{of}-")
    )
    return list(islice(found, max(0, limit)))


def _decision(entry: Entry, most: int) -> Decision:
    terms, names, demand = entry.terms, entry.names, entry.demand
    named = np.array([slot for slot, name in enumerate(names) if name is not None])
    order = named[np.argsort(terms[score.TERM_TOTAL, named], kind="stable")]
    shown = order[:most].tolist()
    if entry.slot not in shown:
        shown.append(entry.slot)
    worker = names[entry.slot]
    assert worker is not None, f"decision {entry.number} chose an empty slot"
    return Decision(
        number=entry.number,
        at=entry.at,
        request=entry.request,
        worker=worker,
        reason=entry.reason,
        prompt_tokens=demand.prompt_tokens,
        num_blocks=demand.num_blocks,
        rows=demand.rows,
        num_candidates=len(named),
        candidates=tuple(_candidate(entry, slot) for slot in shown),
        spill=entry.share,
        pull=entry.pull,
    )


def _candidate(entry: Entry, slot: int) -> Candidate:
    worker = entry.names[slot]
    assert worker is not None, f"slot {slot} is empty"
    overlap, pulled, *seconds, total = entry.terms[:, slot].tolist()
    matched = 0 if entry.matched is None else int(entry.matched[slot])
    return Candidate(
        worker, int(overlap), max(matched, int(overlap)), Cost(*seconds), total, int(pulled)
    )
