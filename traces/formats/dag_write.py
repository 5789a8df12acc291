"""Writes a workload as aiperf's dag-jsonl: conversations of text that grow, fork and spawn.

A request that goes on from one it waits for (its prompt begins with that one's, but for `TAIL_TOKENS` at
the end) is the next turn of its conversation, or, if that has another next turn already, a fork of it.
Any other that waits begins a conversation of its own, spawned by the last it waits for: so do sub-agents,
and requests behind a compaction or a rollback, which a text that only grows can't express. Turns say only
what is new. Since answers stay in the text, which they need not in a trace, what is new is cut to make
prompts as long as they were.

Text is filler (`filler.words`), the same for equal ids as long as no answer came before. Lost: arrivals
(the player of the file decides when roots begin), and dependencies other than on the turn before, on
what starts a conversation, and on the end of a spawned one. A spawned conversation without a waiting turn
is joined by its parent's last turn, as the format wants.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO, Final

import msgspec
import numpy as np

from mallee.traces.filler import words
from mallee.traces.formats.dag_lines import Conversation, Fork, Message, Spawn, Turn
from mallee.traces.workload import NO_PARENT, Request
from mallee.traces.written import Written

TAIL_TOKENS: Final = 256
_OWN: Final = 1 << 63  # keys of text that is a request's own
_NO_DELAY: Final = (
    Turn().delay
)  # the default itself is left out of the file, an equal number is not
_encoder: Final = msgspec.json.Encoder()


@dataclass(slots=True, eq=False)
class _Line:
    """A conversation."""

    name: str
    begun_by: "tuple[_Line, int] | None"  # line and turn that start it
    is_fork: bool
    turns: list[Request] = field(default_factory=list)
    join_at: int | None = None  # turn of the line that began it
    begins: "dict[int, list[_Line]]" = field(default_factory=dict)  # by turn, what it starts
    said: list[int] = field(default_factory=list)  # tokens after each turn and its answer


def write_dag(requests: Iterable[Request], id_tokens: int, file: IO[bytes]) -> Written:
    """Write all conversations. Holds the requests, not the text."""
    plan = _Plan(id_tokens)
    num_requests = num_roots = 0
    for request in requests:
        plan.add(request)
        num_requests += 1
        num_roots += not request.wait_for and request.parent == NO_PARENT
    lost, added = plan.join()
    nbytes = extra = 0
    for line in plan.lines:
        conversation, more = _conversation(line, id_tokens)
        packed = _encoder.encode(conversation) + b"\n"
        file.write(packed)
        nbytes += len(packed)
        extra += more
    return Written(
        requests=num_requests,
        rows=len(plan.lines),
        nbytes=nbytes,
        copies=plan.copies,
        lost_waits=lost,
        lost_times=num_roots,
        restarts=plan.restarts(),
        added_waits=added,
        extra_tokens=extra,
    )


class _Plan:
    """Assigns each request to a turn of a conversation."""

    def __init__(self, id_tokens: int) -> None:
        self.lines: list[_Line] = []
        self.copies = 0
        self._size = id_tokens
        self._places: list[tuple[_Line, int]] = []  # by request
        self._names: set[str] = set()

    def add(self, request: Request) -> None:
        """The next request of the workload."""
        if request.parent != NO_PARENT:
            line = self._fork(request)
        elif not request.wait_for:
            line = self._line(request, None, is_fork=False)
        else:
            before = self._before(request)
            if before is None:
                by = self._places[max(request.wait_for)]
                line = self._line(request, by, is_fork=False)
            elif self._is_last(before):
                line = self._places[before][0]
            else:
                line = self._line(request, self._places[before], is_fork=True)
        line.turns.append(request)
        self._places.append((line, len(line.turns) - 1))

    def _fork(self, request: Request) -> _Line:
        parent = request.parent
        line, turn = self._places[parent]
        if request.branches == 1 and line.turns[turn].num_children == 1 and self._is_last(parent):
            return line
        for _ in range(request.branches - 1):
            self._line(request, (line, turn), is_fork=True).turns.append(request)
            self.copies += 1
        return self._line(request, (line, turn), is_fork=True)

    def _line(self, request: Request, by: tuple[_Line, int] | None, *, is_fork: bool) -> _Line:
        base = request.session or f"r{request.number}"
        name, count = base, 0
        while name in self._names:
            count += 1
            name = f"{base}.{request.number}" if count == 1 else f"{base}.{request.number}.{count}"
        self._names.add(name)
        line = _Line(name, by, is_fork)
        self.lines.append(line)
        if by is not None:
            by[0].begins.setdefault(by[1], []).append(line)
        return line

    def _is_last(self, number: int) -> bool:
        line, turn = self._places[number]
        return turn == len(line.turns) - 1

    def _before(self, request: Request) -> int | None:
        """The request that this one goes on from, preferably one without another next turn."""
        found = [other for other in request.wait_for if self._goes_on(request, other)]
        return max(found, key=lambda other: (self._is_last(other), other), default=None)

    def _goes_on(self, request: Request, other: int) -> bool:
        line, turn = self._places[other]
        before = line.turns[turn]
        if before.session != request.session or before.parent != NO_PARENT or request.is_reset:
            return False
        full = min(
            before.input_tokens // self._size, len(before.ids)
        )  # without a partial block's id
        if not full:
            return request.input_tokens >= before.input_tokens
        kept = max(full - TAIL_TOKENS // self._size, (full + 1) // 2)
        return len(request.ids) >= kept and request.ids[kept - 1] == before.ids[kept - 1]

    def join(self) -> tuple[int, int]:
        """Let turns wait for conversations that have to end; returns the numbers of lost and added waits."""
        lost = 0
        for line, turn in self._places:
            for other in line.turns[turn].wait_for:
                begun, last = self._places[other]
                if self._is_implied(line, turn, begun, last):
                    continue
                by = begun.begun_by
                joins = by is not None and by[0] is line and by[1] < turn and not begun.is_fork
                if joins and self._is_last(other):
                    begun.join_at = min(turn, begun.join_at or turn)
                else:
                    lost += 1
        return lost, self._join_rest()

    @staticmethod
    def _is_implied(line: _Line, turn: int, other: _Line, at: int) -> bool:
        """Whether turn `at` of `other` is before turn `turn` of `line` anyway."""
        before = (line, turn - 1)
        while True:
            if before[0] is other:
                return at <= before[1]
            if before[0].begun_by is None:
                return False
            before = before[0].begun_by

    def _join_rest(self) -> int:
        added = 0
        for line in self.lines:
            if line.begun_by is not None and not line.is_fork and line.join_at is None:
                by, turn = line.begun_by
                if turn < len(by.turns) - 1:
                    line.join_at = len(by.turns) - 1
                    added += 1
        return added

    def restarts(self) -> int:
        """Conversations that another ended with."""
        return sum(
            line.begun_by is not None
            and not line.is_fork
            and line.begun_by[1] == len(line.begun_by[0].turns) - 1
            for line in self.lines
        )


def _conversation(line: _Line, size: int) -> tuple[Conversation, int]:
    """The line of the file, and by how many tokens its prompts are too long."""
    said = 0
    if line.is_fork and line.begun_by is not None:
        by, turn = line.begun_by
        said = by.said[turn]
    extra = 0
    turns: list[Turn] = []
    for place, request in enumerate(line.turns):
        is_fork = request.parent != NO_PARENT
        wanted = request.input_tokens if is_fork else request.input_tokens - said
        new = max(1, wanted)
        extra += new - wanted
        output = max(1, request.output_tokens)
        turns.append(
            Turn(
                messages=[Message("user", _prompt(request, said, new, size))],
                max_tokens=output,
                delay=round(1000 * request.tool_wait_s, 3) if request.tool_wait_s else _NO_DELAY,
                forks=_forks(line, place),
                spawns=_spawns(line, place),
                extra=None if is_fork or request.branches == 1 else {"n": request.branches},
            )
        )
        said += new + output
        line.said.append(said)
    return Conversation(line.name, turns), extra


def _prompt(request: Request, said: int, new: int, size: int) -> str:
    """`new` words: of its ids if it begins a text, else its own."""
    parts: list[str] = []
    known = 0 if said else min(new, len(request.ids) * size)
    if known:
        ids = np.asarray(request.ids, np.int64)[: -(-known // size)]
        parts.append(words(ids.astype(np.uint64), size, known))
    if new > known:
        key = np.array([_OWN | request.number], np.uint64)
        parts.append(words(key, new - known, new - known))
    return " ".join(parts)


def _forks(line: _Line, place: int) -> list[str | Fork]:
    goes_on = place < len(line.turns) - 1
    names = [each.name for each in line.begins.get(place, ()) if each.is_fork]
    return [Fork(name, background=True) if goes_on else name for name in names]


def _spawns(line: _Line, place: int) -> list[str | Spawn]:
    """Those that the same turn waits for together."""
    groups: dict[int | None, list[str]] = {}
    for each in line.begins.get(place, ()):
        if not each.is_fork:
            groups.setdefault(each.join_at, []).append(each.name)
    found: list[str | Spawn] = []
    for join_at, names in groups.items():
        found += names if join_at is None else [Spawn(names, join_at)]
    return found
