"""A fleet of recorded agent sessions (Claude Code), begun at random times.

The file has one session a line, its calls in order, sub-agents inside; the README of the traces has the
format. What the file does not have is assumed, as follows. Sessions begin by a Poisson process. Pauses
are cut, since people leave for the night. Equal `tool_tokens` share the tools' text, equal (`tool_tokens`,
`system_tokens`) tools and system prompt; sessions share nothing else. A call waits for the last call of
its line (session or sub-agent) that had ended when it began, and for sub-agents that had ended; a
sub-agent begins after the call before it. What is left of the pause is the tool's or the person's time.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from mallee.traces.files.lines import MAX_ID_TOKENS, MAX_MS, MAX_TOKENS, TraceFile
from mallee.traces.workload import Request, Runs

ROUNDING_S: Final = 1.5  # times were cut to whole seconds, of begin and end

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_MAX_S: Final = MAX_MS / 1000
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=_MAX_S)]
_Time: TypeAlias = Annotated[float, msgspec.Meta(ge=-_MAX_S, le=_MAX_S)]
_Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]  # they count in the session
_Run: TypeAlias = tuple[_Id, _Count]


class Call(msgspec.Struct, tag_field="k", tag="r"):
    """One request of a session. `t` seconds after the session's (the sub-agent's) begin."""

    t: _Time
    n_in: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = msgspec.field(name="in")
    n_out: _Count = msgspec.field(name="out")
    h: list[_Run]
    api: _Seconds = 0.0


class SubAgent(msgspec.Struct, tag_field="k", tag="sub"):
    """A line of calls of its own, inside a session."""

    t: _Time
    requests: list[Call]
    tool_tokens: _Count = 0
    system_tokens: _Count = 0
    sub_type: str = ""


class Session(msgspec.Struct):
    """One recorded session."""

    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_ID_TOKENS)]
    requests: list[Call | SubAgent]
    tool_tokens: _Count = 0
    system_tokens: _Count = 0


decoder: Final = msgspec.json.Decoder(Session)


class _Line(NamedTuple):
    """Calls of a session or of one sub-agent of it."""

    calls: Sequence[Call]
    begin_s: float  # when its t = 0 is, in the session
    tool_tokens: int
    system_tokens: int
    cls: str


class _Item(NamedTuple):
    """A call with what follows for it."""

    begin_s: float  # in the session, as recorded
    line: int
    call: Call

    @property
    def end_s(self) -> float:
        return self.begin_s + self.call.api


class _Mapped(NamedTuple):
    """Ids of a session from `first` up to `end` stand for the fleet's from `to` on."""

    first: int
    end: int
    to: int


class Texts:
    """Gives the ids of sessions, each with its own, numbers that hold in the whole fleet."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._next = 0
        self._shared: dict[tuple[int, ...], int] = {}

    def _take(self, count: int) -> int:
        self._next += count
        return self._next - count

    def _region(self, key: tuple[int, ...], count: int) -> int:
        """First id of a text that all sessions with the same `key` share."""
        if key not in self._shared:
            self._shared[key] = self._take(count)
        return self._shared[key]

    def map_session(self, lines: Sequence[_Line]) -> tuple[list[_Mapped], int]:
        """The mapping of each thread's first ids, and the offset of all other ids.

        A line that begins like an earlier one of its session is not mapped again: ids are chained, so
        what it shares with that line is mapped, and what follows has to be its own.
        """
        mapped: list[_Mapped] = []
        for line in lines:
            begin = line.calls[0].h if line.calls else []
            if not begin or any(e.first <= begin[0][0] < e.end for e in mapped):
                continue
            tools = line.tool_tokens // self._block_size
            both = (line.tool_tokens + line.system_tokens) // self._block_size
            key = (line.tool_tokens, line.system_tokens)
            mapped += _map(begin, 0, tools, self._region(key[:1], tools))
            mapped += _map(begin, tools, both, self._region(key, both - tools))
        top = max((a + n for line in lines for call in line.calls for a, n in call.h), default=0)
        return sorted(mapped), self._take(top)


def _map(runs: Sequence[_Run], begin: int, end: int, to: int) -> Iterator[_Mapped]:
    """The ids at places `begin` up to `end` of the text in `runs` stand for `to ..`."""
    at = 0
    for first, count in runs:
        low, high = max(at, begin), min(at + count, end)
        if low < high:
            yield _Mapped(first + low - at, first + high - at, to + low - begin)
        at += count


def translate(runs: Sequence[_Run], mapped: Sequence[_Mapped], base: int) -> Runs:
    """The fleet's ids of a session's `runs`."""
    found: list[tuple[int, int]] = []
    for first, count in runs:
        end = first + count
        for entry in mapped:
            if first < entry.end and entry.first < end:
                if first < entry.first:
                    _add(found, base + first, entry.first - first)
                low = max(first, entry.first)
                _add(found, entry.to + low - entry.first, min(end, entry.end) - low)
                first = min(end, entry.end)
        _add(found, base + first, end - first)
    return Runs(found)


def _add(runs: list[tuple[int, int]], first: int, count: int) -> None:
    """Append a run, or make the last one longer."""
    if not count:
        return
    if runs and runs[-1][0] + runs[-1][1] == first:
        runs[-1] = (runs[-1][0], runs[-1][1] + count)
    else:
        runs.append((first, count))


def read_sessions(
    file: TraceFile, block_size: int, *, seed: int, sessions_per_hour: float, max_gap_s: float
) -> Iterator[Request]:
    """The fleet's requests by arrival. Holds only the sessions under way. Raises CodecError."""
    rng = np.random.default_rng(seed)
    texts = Texts(block_size)
    ready: list[tuple[float, int, int, Request]] = []  # (arrival, session, place in it)
    numbers = _Numbers()
    begin_s = 0.0
    known: set[str] = set()

    def read(number: int, line: bytes) -> Session:
        session = _read(file, number, line, block_size)
        if session.id in known:
            raise file.bad(number, f"id {session.id!r} is there twice", "id")
        known.add(session.id)
        return session

    for index, (_, session) in enumerate(file.read(read)):
        for place, request in enumerate(_requests(session, texts, begin_s, max_gap_s)):
            heapq.heappush(ready, (request.arrival_s, index, place, request))
        begin_s += float(rng.exponential(3600.0 / sessions_per_hour))
        while ready and ready[0][0] <= begin_s:
            yield numbers.give(*heapq.heappop(ready)[1:])
    while ready:
        yield numbers.give(*heapq.heappop(ready)[1:])


class _Numbers:
    """Requests get their numbers in the order in which they leave."""

    def __init__(self) -> None:
        self._next = 0
        self._given: dict[tuple[int, int], int] = {}

    def give(self, session: int, place: int, request: Request) -> Request:
        number = self._next
        self._next += 1
        self._given[session, place] = number
        waits = tuple(sorted(self._given[session, other] for other in request.wait_for))
        return msgspec.structs.replace(request, number=number, wait_for=waits)


def _read(file: TraceFile, number: int, line: bytes, block_size: int) -> Session:
    session = file.decode(number, line, decoder)
    if session.block_size != block_size:
        what = f"block_size {session.block_size}, but {block_size} on the first line"
        raise file.bad(number, what, "block_size")
    for entry in session.requests:
        for call in [entry] if isinstance(entry, Call) else entry.requests:
            count = sum(n for _, n in call.h)
            if count > -(-call.n_in // block_size):
                what = f"h has {count} ids of {block_size} tokens for in={call.n_in}"
                raise file.bad(number, f"{what} (call at t={call.t})", "h")
    return session


def _lines_of(session: Session) -> list[_Line]:
    own = [entry for entry in session.requests if isinstance(entry, Call)]
    lines = [_Line(own, 0.0, session.tool_tokens, session.system_tokens, "turn")]
    for entry in session.requests:
        if isinstance(entry, SubAgent):
            tokens = entry.tool_tokens, entry.system_tokens
            lines.append(_Line(entry.requests, entry.t, *tokens, "sub-agent"))
    return lines


def _requests(session: Session, texts: Texts, begin_s: float, max_gap_s: float) -> list[Request]:
    """The session's requests by arrival; numbers and `wait_for` are places in this list."""
    lines = _lines_of(session)
    mapped, base = texts.map_session(lines)
    items = sorted(
        (
            _Item(line.begin_s + call.t, index, call)
            for index, line in enumerate(lines)
            for call in line.calls
        ),
        key=lambda item: (item.begin_s, item.line),
    )
    requests: list[Request] = []
    at_s, last_s = begin_s, items[0].begin_s if items else 0.0
    for place, (item, waits) in enumerate(zip(items, _waits(items), strict=True)):
        at_s += min(max_gap_s, item.begin_s - last_s)
        last_s = item.begin_s
        ended_s = max((items[other].end_s for other in waits), default=item.begin_s)
        requests.append(
            Request(
                number=place,
                arrival_s=at_s,
                ids=translate(item.call.h, mapped, base),
                input_tokens=item.call.n_in,
                output_tokens=max(1, item.call.n_out),  # 0: cut off, but it was to be an answer
                session=session.id,
                cls=lines[item.line].cls,
                wait_for=waits,
                tool_wait_s=min(max_gap_s, max(0.0, item.begin_s - ended_s)),
            )
        )
    return requests


def _waits(items: Sequence[_Item]) -> Iterator[tuple[int, ...]]:
    """The items that each item waits for: the last of its line that had ended, and ended sub-agents.

    A sub-agent's first call waits for the session's last call that had ended; sub-agents are waited
    for once, by the session's first call after their end.
    """
    final = {item.line: place for place, item in enumerate(items)}
    before: dict[int, list[int]] = {0: []}  # places of each line so far
    for place, item in enumerate(items):
        had_ended = item.begin_s + ROUNDING_S
        own = before.get(item.line, before[0])
        last = next((i for i in reversed(own) if items[i].end_s <= had_ended), None)
        waits = set() if last is None else {last}
        if item.line == 0:
            known = items[own[-1]].begin_s + ROUNDING_S if own else -1.0
            ended = (final[line] for line in before if line and final[line] < place)
            waits |= {i for i in ended if known < items[i].end_s <= had_ended}
        before.setdefault(item.line, []).append(place)
        yield tuple(sorted(waits))
