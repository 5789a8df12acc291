"""Records of a replay: a row a request, gaps between tokens, a digest of events.

All of it in flat arrays, because a replay of a million requests has ten million gaps.
"""

import struct
from array import array
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from mallee.mocker.updates import CountedUpdate
from mallee.protocol.codec import encode
from mallee.protocol.events import EventBatch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_ROW: Final = struct.Struct("<4d10i")
_DTYPE: Final = np.dtype(
    [
        *((name, "<f8") for name in ("arrival_s", "routed_s", "first_s", "end_s")),
        *((name, "<i4") for name in ("number", "input_tokens", "output_tokens", "cached_tokens")),
        *((name, "<i4") for name in ("computed_tokens", "worker", "session", "cls")),
        *((name, "<i4") for name in ("retries", "branches")),
    ]
)


class Columns(NamedTuple):
    """Requests in the order of their ends, a column for each thing known of them: [num_requests].

    Times are virtual seconds, NaN for what never was (`first_s` also of requests that failed). `worker`
    (where its first part went), `session` and `cls` index the result's lists. `input_tokens`: the whole
    prompt, of a fork with its parent's text; `output_tokens` over all branches; `cached_tokens` of the
    prompt were there already, `computed_tokens` were computed, over all parts and again after losses.
    """

    number: Ints
    arrival_s: Floats
    routed_s: Floats
    first_s: Floats
    end_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    computed_tokens: Ints
    worker: Ints
    session: Ints
    cls: Ints
    retries: Ints
    branches: Ints

    def picked(self, rows: Ints) -> "Columns":
        """Those rows, in that order."""
        every: tuple[Any, ...] = self
        return Columns(*(column[rows] for column in every))


class Rows:
    """One row for each request that ended, packed."""

    def __init__(self) -> None:
        self._raw = bytearray()

    def __len__(self) -> int:
        return len(self._raw) // _ROW.size

    def add(self, *values: float) -> None:
        """The values in the order of the packed row."""
        self._raw += _ROW.pack(*values)

    def columns(self) -> Columns:
        rows = np.frombuffer(bytes(self._raw), dtype=_DTYPE)
        picked = {name: rows[name] for name in Columns._fields}
        wide: dict[str, Any] = {
            name: column.astype(np.float64 if column.dtype.kind == "f" else np.int64)
            for name, column in picked.items()
        }
        return Columns(**wide)


class Histogram(NamedTuple):
    """`counts[i]` values lie from `edges_s[i]` up to `edges_s[i + 1]`."""

    edges_s: Floats
    counts: Ints

    def percentile(self, share: float) -> float:
        """The value that `share` of all lie below; the middle of its bucket. NaN if there are none."""
        total = int(self.counts.sum())
        if not total:
            return float("nan")
        at = int(np.searchsorted(np.cumsum(self.counts), share * total))
        at = min(at, len(self.counts) - 1)
        return float(np.sqrt(self.edges_s[at] * self.edges_s[at + 1]))


class Gaps:
    """Seconds between tokens, weighted, in buckets of 0.2 % from a microsecond to a day."""

    _LEAST: Final = 1e-6
    _PER_E: Final = 500  # buckets while a value grows by a factor of e
    _NUM: Final = int(np.log(86_400 / _LEAST) * _PER_E) + 1
    _AT_ONCE: Final = 1 << 16

    def __init__(self) -> None:
        self._counts: Ints = np.zeros(self._NUM, dtype=np.int64)
        self._sum_s = 0.0
        self._gaps, self._weights = array("d"), array("q")

    def add(self, gap_s: float, weight: int) -> None:
        """Count `weight` gaps of `gap_s`."""
        self._gaps.append(gap_s)
        self._weights.append(weight)
        if len(self._gaps) >= self._AT_ONCE:
            self._fold()

    def _fold(self) -> None:
        gaps = np.frombuffer(self._gaps, dtype=np.float64)
        weights = np.frombuffer(self._weights, dtype=np.int64)
        self._sum_s += float(gaps @ weights)
        at = np.log(np.maximum(gaps, self._LEAST) / self._LEAST) * self._PER_E
        at = np.minimum(at, self._NUM - 1).astype(np.int64)
        sums = np.bincount(at, weights=weights, minlength=self._NUM)
        self._counts += sums.astype(np.int64)
        self._gaps, self._weights = array("d"), array("q")

    def histogram(self) -> Histogram:
        self._fold()
        edges = self._LEAST * np.exp(np.arange(self._NUM + 1) / self._PER_E)
        return Histogram(edges, self._counts)

    @property
    def mean_s(self) -> float:
        """NaN if there are none."""
        self._fold()
        total = int(self._counts.sum())
        return self._sum_s / total if total else float("nan")


_UPDATE: Final = struct.Struct("<qiii")
_OUTCOME: Final = struct.Struct("<diq")
_BUFFER_NBYTES: Final = 1 << 16


class EventLog:
    """A running hash of everything that was delivered: equal logs, equal digests."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64(seed=0)
        self._buffer = bytearray()

    def outcome(self, time_s: float, worker: int, num_steps: int) -> None:
        """Hash the end of a step or multi-step of `worker` at `time_s`."""
        self._buffer += _OUTCOME.pack(time_s, worker, num_steps)
        if len(self._buffer) > _BUFFER_NBYTES:
            self._flush()

    def update(self, number: int, update: CountedUpdate) -> None:
        """Hash an update of the request of that number."""
        self._buffer += _UPDATE.pack(number, update.branch, update.num_tokens, update.boundary)

    def events(self, batch: EventBatch) -> None:
        """Hash a worker's events."""
        self._buffer += encode(batch)

    def note(self, time_s: float, what: str) -> None:
        """Hash another occurrence, such as a fault."""
        self._buffer += _OUTCOME.pack(time_s, 0, 0) + what.encode()

    def _flush(self) -> None:
        self._hash.update(bytes(self._buffer))
        self._buffer.clear()

    def digest(self) -> str:
        """16 hexadecimal digits."""
        self._flush()
        return str(self._hash.hexdigest())
