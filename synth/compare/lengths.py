"""Stationarity of a model: ideal hit rates at 1, 4 and 16 times the source's length."""

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from mallee.synth.compare.measures import Value
from mallee.traces.numbers import Ints
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import Request, Workload

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
            rates.append(_streamed(workload, workload.id_tokens, warm_up, rule == "ceil"))
    return rates


def drift(rates: Sequence[float]) -> Value:
    """The widest difference, signed: positive where reuse grows with length."""
    low, high = int(np.argmin(rates)), int(np.argmax(rates))
    size = rates[high] - rates[low]
    return Value(size if low <= high else -size, " -> ".join(f"{rate:.3f}" for rate in rates))


def _streamed(
    requests: Iterator[Request] | Workload, size: int, skip: int, has_ceil: bool
) -> float:
    """Ids are prefix-chained: what is known of a prompt is a prefix, and its end is found by halving."""
    seen: set[int] = set()
    prompt = found = 0
    for index, request in enumerate(requests):
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
    low, high = 0, num
    while low < high:
        middle = (low + high) // 2
        if ids[middle] in seen:
            low = middle + 1
        else:
            high = middle
    return low


def _of_trace(trace: Trace, skip: int) -> float:
    """The same of a trace in memory. Blocks are numbered by first appearance: new ones set a record."""
    most = np.maximum.accumulate(trace.blocks)
    is_old = np.empty(len(most), bool)
    is_old[:1] = False
    np.less_equal(trace.blocks[1:], most[:-1], out=is_old[1:])
    found = _sums(is_old.astype(np.int64), trace.starts) * trace.block_size
    found = np.minimum(found, trace.input_tokens)
    prompt = int(trace.input_tokens[skip:].sum())
    return int(found[skip:].sum()) / prompt if prompt else 0.0


def _sums(values: Ints, starts: Ints) -> Ints:
    totals = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=totals[1:])
    return totals[starts[1:]] - totals[starts[:-1]]
