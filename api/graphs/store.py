"""The graphs of one gateway: those that run, and for a while those that are over."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from mallee.api.graphs.running import GraphRun
from mallee.protocol.errors import GraphRunning, Unavailable
from mallee.protocol.ids import Scope

MAX_CHARS: Final = 64 << 20  # of the texts of those that are over


class _Kept(NamedTuple):
    """A graph that is over, since when, and the size of its texts."""

    run: GraphRun
    since: float
    num_chars: int


class GraphStore:
    """Graphs by id. Belongs to one event loop; `clock` gives seconds.

    At most `max_running` run; as many that are over are remembered, for `ttl_s`.
    """

    def __init__(self, *, max_running: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._max_running = max_running
        self._ttl_s = ttl_s
        self._clock = clock
        self._running: dict[str, GraphRun] = {}
        self._over: OrderedDict[str, _Kept] = OrderedDict()
        self._num_chars = 0

    def check_room(self, name: str | None = None) -> None:
        """Raises Unavailable, and GraphRunning if the graph of that name runs."""
        if name in self._running:
            raise GraphRunning(name)
        if len(self._running) >= self._max_running:
            raise Unavailable(
                f"{len(self._running)} graphs run at this gateway, and no more may (http.max_graphs);"
                " retry when some have ended"
            )

    def add(self, run: GraphRun) -> None:
        """Add a graph that runs, in place of one of its name that is over."""
        if run.name in self._over:
            self._drop(run.name)
        self._running[run.name] = run

    def ended(self, run: GraphRun) -> None:
        """A graph is over; one that was forgotten meanwhile stays so."""
        if self._running.get(run.name) is run:
            del self._running[run.name]
            kept = _Kept(run, self._clock(), run.num_chars)
            self._over[run.name] = kept
            self._num_chars += kept.num_chars
            self._shrink()

    def find(self, name: str, scope: Scope) -> GraphRun | None:
        """None alike for one of another scope."""
        self._shrink()
        run = self._running.get(name)
        if run is None and name in self._over:
            run = self._over[name].run
        return run if run is not None and run.scope == scope else None

    def forget(self, run: GraphRun) -> None:
        self._running.pop(run.name, None)
        if run.name in self._over:
            self._drop(run.name)

    def _shrink(self) -> None:
        oldest = self._clock() - self._ttl_s
        while self._over:
            name, kept = next(iter(self._over.items()))
            is_full = len(self._over) > self._max_running or self._num_chars > MAX_CHARS
            if not is_full and kept.since >= oldest:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._num_chars -= self._over.pop(name).num_chars
