"""Weighted fair shares between sessions, in computed tokens.

Start-time fair queueing: each session has a tag, the tokens computed for it divided by its weight, and
the session with work and the lowest tag is served next. A session is ahead by a grant (a step's tokens at
most), and decodes by half a step more before prompts displace them (`planner.py`); so what any two that
are held back were given differs by no more than two steps' tokens each, divided by their weights. No session
banks credit: one that is served in full, or was away, is moved up to the least served of those
held back. Nor is debt lost by leaving: a session that comes back goes on from its tag. A step that holds
no session back settles all accounts.
"""

from typing import TypeAlias

SessionKey: TypeAlias = tuple[str, str]
"""(salt, session): sessions of different tenants or models are never one."""

_MIN_LIMIT = 64


class Session:
    """One account. `num_running` of its `num_members` branches are admitted."""

    __slots__ = ("key", "num_members", "num_running", "number", "tag", "weight")

    def __init__(self, key: SessionKey, number: int, tag: float) -> None:
        self.key = key
        self.number = number  # by first arrival; ties between tags are decided by it
        self.tag = tag
        self.weight = 1.0
        self.num_members = 0
        self.num_running = 0

    def __repr__(self) -> str:
        return f"Session({self.key}, tag={self.tag}, weight={self.weight})"


class Sessions:
    """The accounts of all sessions that have branches, and of those that left with a debt."""

    def __init__(self) -> None:
        self._live: dict[SessionKey, Session] = {}
        self._left: dict[SessionKey, Session] = {}
        self._floor = 0.0  # no tag that counts is below it
        self._has_charged = False
        self._next_number = 0
        self._limit = _MIN_LIMIT

    def join(self, key: SessionKey, weight: float, num_branches: int = 1) -> Session:
        """Branches of `key` arrived; the session's weight is the last one given."""
        session = self._live.get(key)
        if session is None:
            session = self._left.pop(key, None)
            if session is None:
                self._next_number += 1
                session = Session(key, self._next_number, self._floor)
            self._live[key] = session
            session.tag = max(session.tag, self._floor)
        session.weight = weight
        session.num_members += num_branches
        return session

    def leave(self, session: Session) -> None:
        """A branch of `session` is over."""
        session.num_members -= 1
        if session.num_members:
            return
        del self._live[session.key]
        if session.tag > self._floor:
            self._left[session.key] = session
            if len(self._left) > self._limit:
                self._forget()

    @property
    def num_live(self) -> int:
        """Sessions that have branches."""
        return len(self._live)

    def charge(self, session: Session, num_tokens: int) -> None:
        """`num_tokens` are computed for `session`."""
        session.tag = max(session.tag, self._floor) + num_tokens / session.weight
        self._has_charged = True

    def level(self, session: Session) -> float:
        """The tag that counts: never below those that are held back."""
        if session.tag < self._floor:
            session.tag = self._floor
        return session.tag

    def close(self, lowest: float | None) -> None:
        """A step is over; `lowest` is the least tag of the sessions held back, None if none was."""
        if lowest is not None:
            self._floor = max(self._floor, lowest)
        elif self._has_charged:
            self._has_charged = False
            self._left.clear()
            self._floor = 0.0
            for session in self._live.values():
                session.tag = 0.0

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        for key, session in self._live.items():
            assert session.key == key, "a session under another key"
            assert session.num_members > 0, f"{session} has no branches"
            assert 0 <= session.num_running <= session.num_members, f"{session} runs too much"
        assert all(session.num_members == 0 for session in self._left.values()), "it never left"
        assert not self._live.keys() & self._left.keys(), "a session is twice there"

    def _forget(self) -> None:
        """Drop those that would come back without a debt."""
        self._left = {k: s for k, s in self._left.items() if s.tag > self._floor}
        self._limit = 2 * len(self._left) + _MIN_LIMIT
