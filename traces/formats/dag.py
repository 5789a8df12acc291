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

from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from mallee.traces.files.lines import MAX_BRANCHES, TraceFile
from mallee.traces.formats.dag_calls import Calls
from mallee.traces.formats.dag_lines import Conversation, decoder
from mallee.traces.workload import NO_PARENT, Request

ID_TOKENS: Final = 64


def read_dag(
    file: TraceFile, id_tokens: int, *, seed: int, sessions_per_hour: float, limit: int | None
) -> Iterator[Request]:
    """All calls by arrival; the file is read as a whole. Raises CodecError with line and field."""
    conversations = _Conversations(file)
    rng = np.random.default_rng(seed)
    calls: list[tuple[float, int, Request]] = []
    maker = conversations.calls(id_tokens)
    begin_s = 0.0
    for index, root in enumerate(conversations.roots()):
        calls += [(call.arrival_s, index, call) for call in maker.of(root, begin_s)]
        begin_s += float(rng.exponential(3600.0 / sessions_per_hour))
    calls.sort(key=lambda each: (each[0], each[1], each[2].number))
    if limit is not None:
        del calls[limit:]
    place = {(index, call.number): number for number, (_, index, call) in enumerate(calls)}
    children = Counter((index, call.parent) for _, index, call in calls)
    for _, index, call in calls:
        yield msgspec.structs.replace(
            call,
            number=place[index, call.number],
            wait_for=tuple(sorted(place[index, other] for other in call.wait_for)),
            parent=NO_PARENT if call.parent == NO_PARENT else place[index, call.parent],
            num_children=children[index, call.number],
        )


class _Conversations:
    """Conversations by their session id."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._found: dict[str, tuple[int, Conversation]] = {}
        for number, conversation in file.read(self._read):
            self._found[conversation.session_id] = (number, conversation)
        self._parents = self._check_starts()

    def _read(self, number: int, line: bytes) -> Conversation:
        bad, found = self._file.bad, self._file.decode(number, line, decoder)
        if found.session_id in self._found:
            what = f"session_id {found.session_id!r} is there twice"
            raise bad(number, what, "session_id")
        if found.orchestrator:
            what = "an orchestrator asks for nothing itself; write the sessions that it starts"
            raise bad(number, what, "orchestrator")
        if not found.turns:
            raise bad(number, "a session without turns", "turns")
        for place, turn in enumerate(found.turns):
            try:
                empty = not turn.messages or not [message.text() for message in turn.messages]
            except ValueError as error:
                raise bad(number, error, f"turns[{place}].messages") from error
            if empty:
                raise bad(number, "a turn without messages", f"turns[{place}].messages")
            if turn.branches > MAX_BRANCHES:
                what = f"n {turn.branches} of turn {place}: at most {MAX_BRANCHES}"
                raise bad(number, what, f"turns[{place}].extra")
            for _, at in turn.spawned(place):
                if at <= place or at > len(found.turns):
                    what = f"join_at {at} of turn {place}: give a later one of its turns"
                    raise bad(number, what, f"turns[{place}].spawns")
        return found

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
                    self._file.report(self._file.bad(number, what, "turns"), is_skipped=False)
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
                self._file.report(self._file.bad(number, what, "turns"))
            elif name not in self._parents:
                yield conversation

    def calls(self, id_tokens: int) -> Calls:
        """The builder that turns the conversations into calls."""
        return Calls(
            {name: each for name, (_, each) in self._found.items()}, self._parents, id_tokens
        )
