"""Texts of requests in a replay."""

from collections.abc import Sequence
from typing import Final

from mallee.mocker.replay.gateway.requests import (
    CapsuleRef,
    ParentState,
    PromptText,
    RequestState,
)
from mallee.mocker.texts import Texts
from mallee.protocol.hashing import Hashes
from mallee.protocol.messages import Limits
from mallee.traces.workload import NO_PARENT, Request

MAX_BRANCHES: Final = 1 << 20  # of one request
_FIRST_MADE_ID: Final = 1 << 40  # far beyond the ids of traces
_MADE_IDS: Final = 1 << 12  # at most, for the text that one request adds


class PromptTexts:
    """Texts of requests, made when they begin, and the states of parents until their last fork ends."""

    def __init__(self, texts: Texts, id_tokens: int) -> None:
        self._texts = texts
        self._id_tokens = id_tokens
        self._limits: dict[int, Limits] = {}
        self._parents: dict[int, ParentState] = {}  # by number of the request
        self._num_forks: dict[int, int] = {}  # that have not ended, by number of their parent

    def limits(self, max_tokens: int) -> Limits:
        """Limits of an answer of exactly `max_tokens`. Equal ones are the same object."""
        limits = self._limits.get(max_tokens)
        if limits is None:
            limits = self._limits[max_tokens] = Limits(max_tokens, (), True)
        return limits

    def prompt(self, ids: Sequence[int], num_tokens: int) -> PromptText:
        """A whole prompt of at least one token, the first of which `ids` name."""
        num_tokens = max(1, num_tokens)
        raw = self._texts.prompt(ids, num_tokens, self._id_tokens)
        return PromptText(raw, self._texts.hashes(raw), num_tokens)

    def hashes(self, raw: bytes) -> Hashes:
        """Hashes of the full blocks of the text with this name."""
        return self._texts.hashes(raw)

    def suffixes(self, request: Request) -> tuple[bytes, ...]:
        """Texts that the branches of a fork add to their parent's."""
        first, suffix = request.number * MAX_BRANCHES, self._texts.suffix
        return tuple(suffix(first + i, request.input_tokens) for i in range(request.branches))

    def parent(self, request: Request) -> ParentState:
        """The state that the parent of a fork left."""
        return self._parents[request.parent]

    def before(self, request: Request) -> PromptText:
        """The text that a fork continues."""
        parent = self.parent(request)
        return self.prompt(parent.ids, parent.num_tokens)

    def whole(self, request: Request, num_reported: int = 0) -> PromptText:
        """The whole prompt of `request`, without a capsule, and `num_reported` tokens of its answer.

        Siblings' prompts begin alike.
        """
        ids, num_tokens = request.ids, request.input_tokens
        if request.parent != NO_PARENT:
            parent = self.parent(request)
            ids, num_tokens = parent.ids, parent.num_tokens + request.input_tokens
        return self.prompt(ids, num_tokens + num_reported)

    def drop(self, state: RequestState) -> None:
        """Forget the texts of a request that is over."""
        for raw in state.raws:
            self._texts.drop(raw)

    def leave(self, state: RequestState, num_tokens: int) -> None:
        """Keep a request that has ended for its forks; `num_tokens` are its own, prompt and answer."""
        request = state.request
        ids: Sequence[int] = request.ids
        if request.parent != NO_PARENT:
            parent = self.parent(request)
            ids, num_tokens = parent.ids, parent.num_tokens + num_tokens
        if state.capsule is not None:
            num_tokens = state.capsule.num_tokens
        # The text beyond what the trace names gets names of its own, whole ids again.
        known = min(len(ids), (num_tokens - 1) // self._id_tokens)
        first = _FIRST_MADE_ID + request.number * _MADE_IDS
        missing = min(-(-num_tokens // self._id_tokens) - known, _MADE_IDS)
        named = (*ids[:known], *range(first, first + missing))
        self._parents[request.number] = ParentState(state.capsule, num_tokens, named)
        self._num_forks[request.number] = request.num_children

    def child_ended(self, parent: int) -> CapsuleRef | None:
        """Count a fork of `parent` as over; return the capsule to be released after the last one."""
        if parent not in self._num_forks:
            return None
        self._num_forks[parent] -= 1
        if self._num_forks[parent]:
            return None
        del self._num_forks[parent]
        return self._parents.pop(parent).capsule
