"""One branch on its way through the engine, and the states it can be in.

WAITING -> RUNNING -> FINISHED         RUNNING -> WAITING when preempted
   `------------------> FINISHED       (refused, cancelled)
"""

from enum import Enum

from mallee.protocol.hashing import NO_HASHES
from mallee.worker.kv.node import Node
from mallee.worker.kv.tree import BranchTree


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_LEGAL = {
    (Phase.WAITING, Phase.RUNNING),
    (Phase.WAITING, Phase.FINISHED),
    (Phase.RUNNING, Phase.WAITING),
    (Phase.RUNNING, Phase.FINISHED),
}


class Sequence:
    """The scheduler's view of a branch: tokens after `origin`, and the node that holds their KV.

    `origin` is the node it was forked from (None: it starts at the root and may attach to any cached
    prefix). `tokens` are all tokens after the origin, prompt first. The sequence holds `origin` and,
    while running, `node`. `logits` (opaque) are set while a next token can be drawn without a pass.
    """

    __slots__ = (
        "attached_tokens",
        "hashes",
        "logits",
        "node",
        "num_admissions",
        "origin",
        "origin_len",
        "phase",
        "salt",
        "ticket",
        "tokens",
    )

    def __init__(
        self,
        ticket: int,
        tokens: list[int],
        *,
        salt: str,
        origin: Node | None = None,
        logits: object | None = None,
    ) -> None:
        self.ticket = ticket  # arrival order; ties and preemption are decided by it
        self.tokens = tokens
        self.salt = salt
        self.origin = origin
        self.origin_len = origin.end if origin else 0
        self.logits = logits
        self.node: Node | None = None
        self.phase = Phase.WAITING
        self.hashes = NO_HASHES  # of the prompt's full blocks, once the scheduler needs them
        self.attached_tokens = 0  # tokens found in the cache at the first admission
        self.num_admissions = 0

    @property
    def length(self) -> int:
        """Tokens of the whole sequence, computed or not."""
        return self.origin_len + len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed yet."""
        done = self.node.end if self.node is not None else self.origin_len
        return self.length - done

    def pending(self, n: int) -> list[int]:
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
