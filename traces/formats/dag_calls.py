"""Conversations of a dag-jsonl file as calls that wait for each other and name their text."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from mallee.traces.formats.dag_lines import Conversation
from mallee.traces.workload import NO_PARENT, Request, compact

ANSWER_TOKENS: Final = 256  # where a turn has no max_tokens
_WORD: Final = re.compile(r"\w+|[^\w\s]")
_ANSWER: Final = "\0"  # begins words that no message has


class Texts:
    """Ids of texts, block by block; equal text has equal ids."""

    def __init__(self, block_words: int) -> None:
        self._size = block_words
        self._ids: dict[tuple[int, str], int] = {}  # by id before and words of the block

    def ids(self, words: Sequence[str], last: int = -1) -> list[int]:
        """Ids of the full blocks of `words`, which come behind block `last`."""
        found: list[int] = []
        for at in range(0, len(words) - self._size + 1, self._size):
            key = last, " ".join(words[at : at + self._size])
            last = self._ids.setdefault(key, len(self._ids))
            found.append(last)
        return found


class _Frame:
    """A conversation under way."""

    def __init__(self, conversation: Conversation, waits: set[int], parent: int, cls: str) -> None:
        self.name = conversation.session_id
        self.turns = conversation.turns
        self.is_isolated = conversation.is_isolated
        self.before = conversation.pre_session_spawns  # to be started before the first turn
        self.cls = cls
        self.turn = 0
        self.last = NO_PARENT  # its last call
        self.waits = waits  # of its next turn
        self.parent = parent  # the call that the next turn forks, or NO_PARENT
        self.is_forked = parent != NO_PARENT  # turns to come fork the turn before
        self.joins: dict[int, list[str]] = {}  # by turn, which conversations have to end before it
        self.ids: list[int] = []  # of the full blocks of its text
        self.rest: list[str] = []  # words behind them
        self.tokens = 0


class Calls:
    """Makes the calls of one root after the other; equal text has equal ids."""

    def __init__(
        self, conversations: Mapping[str, Conversation], parents: Mapping[str, str], id_tokens: int
    ) -> None:
        """`parents` maps a conversation to the one that starts it."""
        self._conversations = conversations
        self._parents = parents
        self._size = id_tokens
        self._texts = Texts(id_tokens)
        self._begun: set[str] = set()

    def of(self, root: Conversation, begin_s: float) -> list[Request]:
        """The calls of `root` and of all that it starts, each after those it waits for.

        Numbers are places in this list. Arrivals are as if calls took no time.
        """
        calls: list[Request] = []
        ends: dict[str, int] = {}  # last calls of conversations that are over
        frames = [_Frame(root, set(), NO_PARENT, "turn")]
        while frames:
            frame = frames[-1]
            if frame.before:
                frames += self._started(frame.before, frame.name, set(), NO_PARENT, "sub-agent")
                frame.before = []
            elif frame.turn == len(frame.turns):
                ends[frame.name] = frame.last
                frames.pop()
            else:
                frame.waits |= {ends[name] for name in frame.joins.get(frame.turn, ())}
                calls.append(self._call(frame, calls, root.session_id, begin_s))
                frames += self._children(frame, len(calls) - 1)
        return calls

    def _call(self, frame: _Frame, calls: list[Request], session: str, begin_s: float) -> Request:
        turn = frame.turns[frame.turn]
        words = [word for message in turn.messages for word in words_of(message.text())]
        before = [calls[other].arrival_s for other in {*frame.waits, frame.parent} - {NO_PARENT}]
        delay_s = turn.delay / 1000
        output = turn.max_tokens or ANSWER_TOKENS
        is_fork = frame.parent != NO_PARENT
        if not is_fork:
            self._say(frame, words)
        call = Request(
            number=len(calls),
            arrival_s=max(before, default=begin_s) + delay_s,
            ids=() if is_fork else compact(frame.ids),
            input_tokens=len(words) if is_fork else max(1, frame.tokens),
            output_tokens=output,
            session=session,
            cls=frame.cls,
            wait_for=tuple(sorted(frame.waits - {frame.parent})),
            parent=frame.parent,
            branches=turn.branches,
            tool_wait_s=delay_s,
            name=f"{frame.name}:{frame.turn}",
        )
        if frame.is_isolated:
            frame.ids, frame.rest, frame.tokens = [], [], 0
        elif not is_fork:
            self._say(frame, [_ANSWER + call.name] + [_ANSWER] * (output - 1))
        return call

    def _say(self, frame: _Frame, words: list[str]) -> None:
        """Add `words` to what the conversation has."""
        frame.tokens += len(words)
        rest = frame.rest + words
        frame.ids += self._texts.ids(rest, frame.ids[-1] if frame.ids else -1)
        frame.rest = rest[len(rest) - len(rest) % self._size :]

    def _children(self, frame: _Frame, place: int) -> list[_Frame]:
        """Start the conversations behind the call at `place`; its own goes on with the next turn."""
        turn = frame.turns[frame.turn]
        forked = self._started(turn.forked(), frame.name, set(), place, "fork")
        frame.is_forked |= bool(forked)
        spawned: list[_Frame] = []
        for child, at in turn.spawned(frame.turn):
            started = self._started([child], frame.name, {place}, NO_PARENT, "sub-agent")
            if started and at < len(frame.turns):
                frame.joins.setdefault(at, []).append(child)
            spawned += started
        frame.turn += 1
        frame.last = place
        goes_on = frame.is_forked and not frame.is_isolated
        frame.parent = place if goes_on else NO_PARENT
        frame.waits = {place}
        return [*spawned, *forked]

    def _started(
        self, names: Sequence[str], by: str, waits: set[int], parent: int, cls: str
    ) -> list[_Frame]:
        """Conversations that begin, of those that `by` may start."""
        frames: list[_Frame] = []
        for name in names:
            if self._parents.get(name) == by and name not in self._begun:
                self._begun.add(name)
                frames.append(_Frame(self._conversations[name], set(waits), parent, cls))
        return frames[::-1]


def words_of(text: str) -> list[str]:
    """Words and marks."""
    if text.replace(" ", "").isalnum():  # many times faster
        return text.split()
    return _WORD.findall(text)
