"""aiperf's dag-jsonl: conversations as text, with sessions that they fork and spawn.

A turn's messages are appended to what its conversation has, and so is the answer. A conversation that
is forked begins with its parent's text up to there, a spawned one with nothing; where the spawn has a
later turn to join, that turn waits for the spawned one's end.

The file has text and no tokens: a token is counted for each word and each mark, none for roles and tool
calls. It has no times but delays, and no answers: roots begin by a Poisson process, and an answer is
`max_tokens` of text of its own. Requests that go on from a fork, on either side of it, are
forks themselves, so that both sides share what was before. Orchestrators, and sessions that are started
from two places, can't be read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from mallee.protocol.errors import CodecError
from mallee.traces.files.lines import (
    MAX_BRANCHES,
    bad_line,
    decode_line,
    raise_or_count,
    read_lines,
)
from mallee.traces.files.problems import Problems
from mallee.traces.formats.dag_calls import Call, Calls
from mallee.traces.formats.dag_lines import Conversation, decoder
from mallee.traces.workload import NO_PARENT, Request

ID_TOKENS: Final = 64


def read_dag(
    path: Path,
    id_tokens: int,
    *,
    seed: int,
    sessions_per_hour: float,
    limit: int | None = None,
    problems: Problems | None = None,
) -> Iterator[Request]:
    """All calls by arrival; the file is read as a whole. Raises CodecError with line and field."""
    file = _File(path, problems)
    rng = np.random.default_rng(seed)
    calls: list[tuple[float, int, int, Call]] = []
    maker = file.calls(id_tokens)
    begin_s = 0.0
    for index, root in enumerate(file.roots()):
        for place, call in enumerate(maker.of(root, begin_s)):
            calls.append((call.arrival_s, index, place, call))
        begin_s += float(rng.exponential(3600.0 / sessions_per_hour))
    calls.sort(key=lambda each: each[:3])
    if limit is not None:
        del calls[limit:]
    yield from _numbered(calls)


def _numbered(calls: list[tuple[float, int, int, Call]]) -> Iterator[Request]:
    place = {(index, at): number for number, (_, index, at, _) in enumerate(calls)}
    children: dict[tuple[int, int], int] = {}
    for _, index, _, call in calls:
        if call.parent != NO_PARENT:
            key = (index, call.parent)
            children[key] = children.get(key, 0) + 1
    for number, (arrival_s, index, at, call) in enumerate(calls):
        yield Request(
            number=number,
            arrival_s=arrival_s,
            ids=call.ids,
            input_tokens=call.input_tokens,
            output_tokens=call.output_tokens,
            session=call.session,
            cls=call.cls,
            wait_for=tuple(sorted(place[index, other] for other in call.waits)),
            tool_wait_s=call.delay_s,
            branches=call.branches,
            parent=NO_PARENT if call.parent == NO_PARENT else place[index, call.parent],
            num_children=children.get((index, at), 0),
            name=call.name,
        )


class _File:
    """Conversations by their session id."""

    def __init__(self, path: Path, problems: Problems | None) -> None:
        self._path = path
        self._problems = problems
        self._found: dict[str, tuple[int, Conversation]] = {}
        for number, conversation in read_lines(path, self._read, problems):
            self._found[conversation.session_id] = (number, conversation)
        self._parents = self._check_starts()

    def _read(self, number: int, line: bytes) -> Conversation:
        found = decode_line(self._path, number, line, decoder)
        if found.session_id in self._found:
            what = f"session_id {found.session_id!r} is there twice"
            raise self._bad(number, what, "session_id")
        if found.orchestrator:
            what = "an orchestrator asks for nothing itself; write the sessions that it starts"
            raise self._bad(number, what, "orchestrator")
        if not found.turns:
            raise self._bad(number, "a session without turns", "turns")
        for place, turn in enumerate(found.turns):
            try:
                empty = not turn.messages or not [message.text() for message in turn.messages]
            except ValueError as error:
                raise self._bad(number, error, f"turns[{place}].messages") from error
            if empty:
                raise self._bad(number, "a turn without messages", f"turns[{place}].messages")
            if turn.branches > MAX_BRANCHES:
                what = f"n {turn.branches} of turn {place}: at most {MAX_BRANCHES}"
                raise self._bad(number, what, f"turns[{place}].extra")
            for _, at in turn.spawned(place):
                if at <= place or at > len(found.turns):
                    what = f"join_at {at} of turn {place}: give a later one of its turns"
                    raise self._bad(number, what, f"turns[{place}].spawns")
        return found

    def _bad(self, number: int, what: object, field: str) -> CodecError:
        return bad_line(self._path, number, what, field=field)

    def _check_starts(self) -> dict[str, str]:
        """The parent of each session that is not a root; impossible starts are dropped."""
        parents: dict[str, str] = {}
        for number, conversation in self._found.values():
            own = conversation.session_id
            for child in conversation.started():
                what = ""
                if child not in self._found:
                    what = f"session {child!r} is not in the file"
                elif child in parents:
                    what = f"session {child!r} is started twice, by {parents[child]!r} and {own!r}"
                if what:
                    raise_or_count(
                        self._bad(number, what, "turns"), self._problems, is_skipped=False
                    )
                else:
                    parents[child] = own
        return parents

    def roots(self) -> Iterator[Conversation]:
        """Sessions without a parent. Those behind a circle are reported and left out."""
        for name, (number, conversation) in self._found.items():
            seen = {name}
            above = self._parents.get(name)
            while above is not None and above not in seen:
                seen.add(above)
                above = self._parents.get(above)
            if above is not None:
                what = f"session {name!r} is started, in a circle, by itself"
                raise_or_count(self._bad(number, what, "turns"), self._problems)
            elif name not in self._parents:
                yield conversation

    def calls(self, id_tokens: int) -> Calls:
        """The builder that turns the conversations into calls."""
        return Calls(
            {name: each for name, (_, each) in self._found.items()}, self._parents, id_tokens
        )
