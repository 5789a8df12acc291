"""Who goes first, and who gives way: the choices a scheduler makes, as small objects.

    fair                sessions by share, in a session the highest priority, then the oldest
    fcfs                the oldest first, decodes before prompts; shares and priorities count for nothing
    prefill_first       as fcfs, but prompts before decodes: first tokens soon, later ones unevenly
    decode_round_robin  as fcfs, but decodes take turns when not all have room in a step

Victims, when blocks run out (the shared part of a victim's text is never lost):

    least_due           of the session most over its share the lowest priority, then the youngest
    youngest            the youngest, whatever its priority
    oldest_decode       the oldest of those that decode (the order of vLLM's and Dynamo's simulators)
"""

from typing import Protocol, TypeAlias

from mallee.worker.sched.config import PolicyName, VictimName
from mallee.worker.sched.sequence import Phase, Sequence

Urge: TypeAlias = tuple[float, float, int]


class Policy(Protocol):
    """`is_fair`: sessions have accounts; else all branches are of one. Lower ranks go first."""

    is_fair: bool
    prefill_first: bool

    def rank(self, sequence: Sequence) -> float:
        """Among the branches of a session that wait or compute a prompt. Then arrival decides."""
        ...

    def turn(self, sequence: Sequence) -> float:
        """Among the decodes of a session, when not all have room in a step. Then arrival decides."""
        ...


class VictimOrder(Protocol):
    """The running branch with the greatest urge to go is preempted."""

    def urge(self, sequence: Sequence) -> Urge: ...


class _Fair:
    is_fair = True
    prefill_first = False

    def rank(self, sequence: Sequence) -> float:
        return -sequence.priority

    def turn(self, sequence: Sequence) -> float:
        return -sequence.priority


class _Fcfs:
    is_fair = False
    prefill_first = False

    def rank(self, sequence: Sequence) -> float:
        return 0.0

    def turn(self, sequence: Sequence) -> float:
        return 0.0


class _PrefillFirst(_Fcfs):
    prefill_first = True


class _DecodeRoundRobin(_Fcfs):
    def turn(self, sequence: Sequence) -> float:
        return float(sequence.last_step)


class _LeastDue:
    def urge(self, sequence: Sequence) -> Urge:
        return (sequence.session.tag, -sequence.priority, sequence.ticket)


class _Youngest:
    def urge(self, sequence: Sequence) -> Urge:
        return (0.0, 0.0, sequence.ticket)


class _OldestDecode:
    def urge(self, sequence: Sequence) -> Urge:
        return (float(sequence.phase is Phase.DECODE), 0.0, -sequence.ticket)


_POLICIES: dict[PolicyName, Policy] = {
    "fair": _Fair(),
    "fcfs": _Fcfs(),
    "prefill_first": _PrefillFirst(),
    "decode_round_robin": _DecodeRoundRobin(),
}
_VICTIMS: dict[VictimName, VictimOrder] = {
    "least_due": _LeastDue(),
    "youngest": _Youngest(),
    "oldest_decode": _OldestDecode(),
}


def policy_named(name: PolicyName) -> Policy:
    return _POLICIES[name]


def victims_named(name: VictimName) -> VictimOrder:
    return _VICTIMS[name]
