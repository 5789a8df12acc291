"""Admitted branches, by what they do next: draw, compute their prompt, decode.

More branches may be admitted than a step has rows for: who is left out of a step keeps its blocks and
goes on when its turn comes. Decodes are kept in the order of a batch.
"""

from collections.abc import Callable, Iterator

from mallee.worker.kv.node import Node
from mallee.worker.sched.line import Line
from mallee.worker.sched.policy import Policy
from mallee.worker.sched.sequence import Phase, Sequence
from mallee.worker.sched.sessions import Session, Sessions


class Running:
    """Owns the admitted ones. `place` says where in a batch a branch at a node belongs."""

    __slots__ = (
        *("_by_session", "_decodes", "_is_stale", "_place", "_policy"),
        *("long", "num", "prefills", "ready", "short"),
    )

    def __init__(self, policy: Policy, sessions: Sessions, place: Callable[[Node], bytes]) -> None:
        self._policy = policy
        self._place = place
        self._decodes: list[Sequence] = []
        self._is_stale = False  # _decodes has some that do not decode any more, or is out of order
        self._by_session: dict[Session, tuple[int, Sequence]] = {}
        self.ready: dict[Sequence, None] = {}
        self.prefills: dict[Sequence, None] = {}
        self.short = Line(sessions)  # prefills of which more could be computed in this step
        self.long = Line(sessions)
        self.num = 0

    def admit(self, sequence: Sequence, step: int) -> None:
        """`sequence` has a node and goes on from there."""
        assert sequence.node is not None
        self.num += 1
        sequence.session.num_running += 1
        sequence.num_admissions += 1
        sequence.room = 0
        if sequence.logits is not None:
            sequence.move(Phase.READY)
            self.ready[sequence] = None
            return
        sequence.move(Phase.PREFILL)
        sequence.place = (self._place(sequence.node), sequence.ticket)
        self.prefills[sequence] = None
        self.want_more(sequence, step)

    def want_more(self, sequence: Sequence, step: int) -> None:
        """More of the prompt of `sequence` can be computed."""
        line = self.short if sequence.is_short else self.long
        line.push(sequence, self._policy.rank(sequence))
        line.serve(sequence, step)

    def decode(self, sequence: Sequence) -> None:
        """`sequence` has drawn its first token since it was admitted."""
        assert sequence.node is not None
        self._forget(sequence)
        sequence.move(Phase.DECODE)
        sequence.place = (self._place(sequence.node), sequence.ticket)
        self._decodes.append(sequence)
        self._is_stale = True

    def remove(self, sequence: Sequence, phase: Phase) -> None:
        """`sequence` is in `phase` now, and does not run."""
        if sequence.phase is Phase.DECODE:
            self._is_stale = True
        else:
            self._forget(sequence)
        self.num -= 1
        sequence.session.num_running -= 1
        sequence.room = 0
        sequence.move(phase)

    def decodes(self) -> list[Sequence]:
        """In the order of a batch. To be read only; a later call may give a new list."""
        if self._is_stale:
            decodes = {s: None for s in self._decodes if s.phase is Phase.DECODE}  # once each
            self._decodes = sorted(decodes, key=_place)
            self._is_stale = False
            self._count()
        return self._decodes

    @property
    def by_session(self) -> dict[Session, tuple[int, Sequence]]:
        """How many decodes each session has, and which of them is the first to be left out."""
        self.decodes()
        return self._by_session

    @property
    def num_wanting(self) -> int:
        """Prompts of which more could be computed."""
        return self.short.num + self.long.num

    def reorder(self) -> None:
        """A priority has changed."""
        self._is_stale = True

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.ready
        yield from self.prefills
        yield from self.decodes()

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        groups = (self.ready, Phase.READY), (self.prefills, Phase.PREFILL)
        for group, phase in (*groups, (self.decodes(), Phase.DECODE)):
            assert all(s.phase is phase for s in group), f"a branch in {phase} is not"
        assert len(list(self)) == len(set(self)) == self.num, "running branches counted wrong"
        for line in (self.short, self.long):
            line.check()
            assert set(line) <= set(self.prefills), "more wanted of one that has all"
        for sequence in self:
            node = sequence.node
            assert node is not None, "a running branch without a node"
            if sequence.room > node.end:
                is_own = node.holders == 1 and not node.children
                assert is_own, "room in a node of others"

    def _count(self) -> None:
        groups: dict[Session, list[Sequence]] = {}
        for sequence in self._decodes:
            groups.setdefault(sequence.session, []).append(sequence)
        turn = self._policy.turn
        self._by_session = {
            session: (len(group), max(group, key=lambda s: (turn(s), s.ticket)))
            for session, group in groups.items()
        }

    def _forget(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.READY:
            del self.ready[sequence]
            return
        del self.prefills[sequence]
        if sequence.line is not None:
            sequence.line.remove(sequence)


def _place(sequence: Sequence) -> tuple[bytes, int]:
    return sequence.place
