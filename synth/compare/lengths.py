"""Stationarity of a model: ideal hit rates at 1, 4 and 16 times the source's length."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from mallee.synth.compare.gates import Value
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import Workload

TIMES: Final = (1, 4, 16)
WARM_UP: Final = 0.2  # of the source's requests: what comes before finds caches empty


class Maker(Protocol):
    """A model that can be measured at several lengths."""

    def generate(self, *, requests: int, seed: int) -> Workload: ...


def ideal_hit_rates(model: Maker, requests: int, seed: int, *, rule: str) -> list[float]:
    """At each of `TIMES` `requests`, the share of prompt tokens that an endless cache holds, after warm-up.

    By whole blocks, and by the last partial one under rule "ceil". One pass each; memory grows with
    distinct ids alone, except where texts are forked.
    """
    warm_up = int(WARM_UP * requests)
    rates = []
    for times in TIMES:
        workload = model.generate(requests=times * requests, seed=seed)
        if workload.has_forks:
            rates.append(_of_trace(trace_of(workload), warm_up))
        else:
            rates.append(_streamed(workload, warm_up, rule == "ceil"))
    return rates


def drift(rates: Sequence[float]) -> Value:
    """The widest difference, signed: positive where reuse grows with length."""
    low, high = int(np.argmin(rates)), int(np.argmax(rates))
    size = rates[high] - rates[low]
    return Value(size if low <= high else -size, " -> ".join(f"{rate:.3f}" for rate in rates))


def _streamed(workload: Workload, skip: int, has_ceil: bool) -> float:
    """Ids are prefix-chained: what is known of a prompt is a prefix, and its end is found by halving."""
    seen, size = set[int](), workload.id_tokens
    prompt = found = 0
    for index, request in enumerate(workload):
        ids = request.ids
        num = len(ids) if has_ceil else min(len(ids), request.input_tokens // size)
        known = _known(ids, num, seen)
        seen.update(ids[known:num])
        if index >= skip:
            prompt += request.input_tokens
            found += min(known * size, request.input_tokens)
    return found / prompt if prompt else 0.0


def _known(ids: Sequence[int], num: int, seen: set[int]) -> int:
    """Number of leading ids, of `num`, that were seen."""
    return bisect_left(range(num), True, key=lambda at: ids[at] not in seen)


def _of_trace(trace: Trace, skip: int) -> float:
    """The same of a trace in memory. Blocks are numbered by first appearance: new ones set a record."""
    most = np.maximum.accumulate(trace.blocks)
    is_old = np.append(False, trace.blocks[1:] <= most[:-1])[: len(most)]
    old_before = np.append(0, np.cumsum(is_old))
    known = np.diff(old_before[trace.starts])
    found = np.minimum(known * trace.block_size, trace.input_tokens)
    prompt = int(trace.input_tokens[skip:].sum())
    return int(found[skip:].sum()) / prompt if prompt else 0.0
