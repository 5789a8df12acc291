"""Progress of one job with the holders of its text's KV: those still to be asked, and the loan it has."""

from collections.abc import Sequence
from typing import NamedTuple

from mallee.protocol.messages import Continuation, Grammar, Holder
from mallee.worker.transfer.peers import Loan


class CapsuleState(NamedTuple):
    """A capsule's state beside its text and its KV; `logits` are opaque."""

    continuation: Continuation | None
    grammar: Grammar | None
    logits: object | None


class Lent(NamedTuple):
    """A loan of the KV of the first `num_tokens` of a job's text.

    `keys` are those of its blocks by place, under the salt of this job: `num_blocks` of the text, the last
    one partial if the tokens end inside it, then rows of windows that are read after it. `is_capsule`: it
    ends where the capsule's KV does.
    """

    loan: Loan
    keys: tuple[int, ...]
    num_blocks: int
    num_tokens: int
    is_capsule: bool = False
    is_foreign: bool = False  # as in `Peer`


class Borrowing:
    """One job's. `lent` is the loan it has now; `state` what a holder told of the capsule that it is."""

    __slots__ = ("_holders", "lent", "skips_local", "state")

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = list(holders)
        self.lent: Lent | None = None
        self.state: CapsuleState | None = None
        self.skips_local = False  # what lies below here did not come, or is dear

    def next_capsule(self) -> Holder | None:
        """The next holder that names a capsule, while none has told its state; it is asked once."""
        if self.state is not None or self.lent is not None:
            return None
        for i, holder in enumerate(self._holders):
            if holder.capsule:
                return self._holders.pop(i)
        return None

    def next_holder(self) -> Holder | None:
        """The next one; it is asked once."""
        return self._holders.pop(0) if self._holders else None

    def give_up(self) -> None:
        """Nothing more is borrowed."""
        self._holders = []
        self.lent = None
