"""One branch on its way through the engine, and the states it can be in.

GATED <-> WAITING -> READY ------> DECODE      any but the last two -> FINISHED, FAILED
             ^  `--> PREFILL ------^  |
             `----------<-------------'        preempted: READY, PREFILL, DECODE -> WAITING
"""

from enum import Enum
from typing import TYPE_CHECKING

from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.messages import Share
from mallee.worker.kv.node import Node
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree

if TYPE_CHECKING:
    from mallee.worker.sched.line import Line
    from mallee.worker.sched.sessions import Session


class Phase(Enum):
    GATED = "gated"  # waits for tokens that another branch computes
    WAITING = "waiting"
    READY = "ready"  # admitted; its next token can be drawn without a pass
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    FAILED = "failed"


_RUNNING = frozenset((Phase.READY, Phase.PREFILL, Phase.DECODE))
_ENDS = frozenset((Phase.FINISHED, Phase.FAILED))
_LEGAL = (
    {(before, end) for before in Phase if before not in _ENDS for end in _ENDS}
    | {(phase, Phase.WAITING) for phase in _RUNNING}
    | {
        (Phase.GATED, Phase.WAITING),
        (Phase.WAITING, Phase.GATED),
        (Phase.WAITING, Phase.READY),
        (Phase.WAITING, Phase.PREFILL),
        (Phase.READY, Phase.DECODE),
        (Phase.PREFILL, Phase.DECODE),
    }
)


_NOWHERE = (b"", 0)


class Sequence:
    """The scheduler's view of a branch: tokens after `origin`, and the node that holds their KV.

    `origin` is the node it was forked from (None: it starts at the root and may attach to any cached
    prefix), `origin_len` its length. `tokens` are all tokens after the origin, prompt first. The
    sequence holds `origin` and, while running, `node`. `logits` (opaque) are set while a next token can
    be drawn without a pass.

    With a `producer` the branch continues the first `origin_len` tokens of another one that is still
    computing them: it is gated, and gets its origin when they are there.
    """

    __slots__ = (
        "attached_tokens",
        "hashes",
        "in_flight",
        "is_short",
        "last_step",
        "line",
        "logits",
        "node",
        "num_admissions",
        "origin",
        "origin_len",
        "phase",
        "place",
        "priority",
        "producer",
        "rank",
        "room",
        "salt",
        "session",
        "share",
        "ticket",
        "tokens",
    )

    def __init__(
        self,
        ticket: int,
        tokens: Text,
        salt: str,
        share: Share = Share(),  # noqa: B008 - frozen
        origin: Node | None = None,
        logits: object | None = None,
        producer: "Sequence | None" = None,
        origin_len: int = 0,
    ) -> None:
        self.ticket = ticket  # arrival order; ties are decided by it
        self.tokens = tokens
        self.salt = salt
        self.share = share
        self.priority = share.priority
        self.origin = origin
        self.origin_len = origin_len
        self.logits = logits
        self.producer = producer
        self.node: Node | None = None
        self.phase = Phase.WAITING
        self.hashes = NO_HASHES  # of the full blocks it can share, once the scheduler needs them
        self.in_flight: list[int] = []  # hashes of blocks that it computes for whoever needs them
        self.attached_tokens = 0  # tokens found in the cache at the first admission
        self.num_admissions = 0
        # The scheduler's own marks.
        self.session: Session  # from `Scheduler.add` on
        self.line: Line | None = None  # the line it stands in
        self.rank = 0.0  # under which it stands there
        self.is_short = False  # it had little to compute when it began to wait
        self.last_step = 0  # when it was last served, or began to wait
        self.room = 0  # its own node has room up to this position; 0: it has no node of its own
        self.place = _NOWHERE  # order inside a batch

    @property
    def length(self) -> int:
        """Tokens of the whole sequence, computed or not."""
        return self.origin_len + len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed yet."""
        done = self.node.end if self.node is not None else self.origin_len
        return self.length - done

    @property
    def is_running(self) -> bool:
        return self.phase in _RUNNING

    @property
    def is_over(self) -> bool:
        return self.phase in _ENDS

    def pending(self, n: int) -> Text:
        """The next n tokens to compute."""
        assert self.node is not None, "only a running sequence has a next chunk"
        start = self.node.end - self.origin_len
        return self.tokens[start : start + n]

    def move(self, phase: Phase) -> None:
        """Raises AssertionError if the state machine has no such arrow."""
        assert (self.phase, phase) in _LEGAL, f"{self.phase} -> {phase}"
        self.phase = phase

    def let_go(self, tree: BranchTree) -> None:
        """Release what the sequence holds in the tree."""
        if self.node is not None:
            tree.release(self.node)
            self.node = None
        if self.origin is not None:
            tree.release(self.origin)
            self.origin = None
        self.logits = None
        self.producer = None


def node_of(sequence: Sequence) -> Node:
    """The node that holds the KV of a branch that runs."""
    assert sequence.node is not None, "only running branches have a node"
    return sequence.node
