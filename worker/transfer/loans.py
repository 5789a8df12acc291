"""Loans to peers: finds the blocks that are asked for, and holds them until the loan is over.

Blocks are found and let go by the engine's thread, and read from others beside its steps: what is held does
not change. A loan that is not read for `MAX_IDLE_S` is over. Where it is known that a capsule will be asked
for, its loans are made ahead, so that no question waits for a step.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, NamedTuple

import numpy as np

from mallee.protocol.errors import IncompatibleCapsule, InvalidParameter, LoansFull, WorkerLost
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.worker.kv.node import Node
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.watch import KVMemory, Row, Rows
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.values import Ask

MAX_LOANS: Final = 64
MAX_IDLE_S: Final = 30.0


class LendingStats(NamedTuple):
    """Loans now; loans and blocks that others have read so far."""

    open: int
    num_loans: int
    num_blocks: int


class LentCapsule(NamedTuple):
    """A capsule: its record, and `node` with its `blocks`; without one `keys` of all that lies below."""

    record: bytes
    num_tokens: int  # with KV
    node: Node | None = None
    blocks: Sequence[int] = ()
    keys: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class BlockLoan:
    """A `Loan` of blocks of this process: those on the device, then `rows` of host memory.

    `node` and `keys`, of host memory, are what is held for it. `tails`: places of a capsule's last block,
    with `KVMemory.clear` for what is not the capsule's.
    """

    record: bytes
    node: Node | None
    keys: Sequence[int]
    _memory: KVMemory
    _blocks: Sequence[int]
    _rows: Sequence[Row]
    _tails: Mapping[int, tuple[int, int, int]]
    _clock: Callable[[], float]
    _give_back: "Callable[[BlockLoan], None]"
    num_read: int = 0
    _used_at: float = 0.0
    _num_reading: int = 0
    _is_closed: bool = False
    _lock: Lock = field(default_factory=Lock)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks) + len(self._rows)

    @property
    def block_nbytes(self) -> int:
        return self._memory.block_nbytes

    def read(self, places: Sequence[int], rows: Rows) -> None:
        if not all(0 <= place < self.num_blocks for place in places):
            raise InvalidParameter("places", max(places), f"{self.num_blocks} blocks are lent")
        with self._lock:
            if self._is_closed:
                raise WorkerLost("lender", "the loan is over")
            self._num_reading += 1
        try:
            self._copy(places, rows)
        finally:
            with self._lock:
                self._used_at = self._clock()
                self.num_read += len(places)
                self._num_reading -= 1
                is_closed = self._is_closed
                is_over = is_closed and not self._num_reading
            if is_over:
                self._give_back(self)
        if is_closed:  # the next life of the worker may have written there meanwhile
            raise WorkerLost("lender", "the loan is over")

    def _copy(self, places: Sequence[int], rows: Rows) -> None:
        num = len(self._blocks)
        begin = bisect_left(places, num)
        if begin:
            self._memory.read([self._blocks[place] for place in places[:begin]], rows[:begin])
        for place, row in zip(places[begin:], rows[begin:], strict=True):
            row[:] = self._rows[place - num]
        for place, row in zip(places, rows, strict=True):
            if place in self._tails:  # the other slots have what others left in the block
                self._memory.clear(row, *self._tails[place])

    def claim(self) -> bool:
        """Whether it is open; then it is in use from now on. For one that was made ahead."""
        with self._lock:
            self._used_at = self._clock()
            return not self._is_closed

    @property
    def is_idle(self) -> bool:
        """Whether it is not read, and has not been for long. Another thread may claim it meanwhile."""
        return not self._num_reading and self._clock() - self._used_at > MAX_IDLE_S

    def close(self, *, only_idle: bool = False) -> None:
        """`only_idle`: unless a thread reads it, or has claimed it a short while ago."""
        with self._lock:
            if self._is_closed or (only_idle and not self.is_idle):
                return
            self._is_closed = True
            if self._num_reading:
                return  # the last reader gives it back
        self._give_back(self)


class Loans:
    """The loans of one engine."""

    def __init__(
        self,
        tree: BranchTree,
        lower: LowerTiers | None,
        memory: KVMemory,
        capsule: Callable[[str], LentCapsule],
        *,
        worker: WorkerId,
        incarnation: Incarnation,
        identity: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        """`capsule` raises UnknownCapsule. `identity` is that of the model, with its weights."""
        self.wake: Callable[[], None] = lambda: None
        """Called, from any thread, when `take_ended` has something to do."""
        self._tree = tree
        self._lower = lower
        self._memory = memory
        self._capsule = capsule
        self._worker = worker
        self._incarnation = incarnation
        self._identity = identity
        self._clock = clock
        self.open: set[BlockLoan] = set()
        """Those that hold blocks; to be read only."""
        self._over: deque[BlockLoan] = deque()
        self._ready: dict[BlockLoan, str] = {}  # made ahead, with their capsules
        self._ready_lock = Lock()
        self._num_loans = self._num_blocks = 0

    def lend(self, ask: Ask) -> BlockLoan | None:
        """The loan that is asked for; None: the capsule has to be brought back to the device first.

        Raises UnknownCapsule, IncompatibleCapsule, WorkerLost, LoansFull.
        """
        if (ready := self.take(ask)) is not None:
            return ready
        if len(self.open) >= MAX_LOANS:
            raise LoansFull(self._worker, len(self.open), MAX_LOANS)
        if not ask.holder.capsule:
            return self._of_keys(ask.keys)
        found = self._capsule(ask.holder.capsule)
        if found.node is not None:
            self._tree.hold(found.node)
        elif found.keys and (self._lower is None or not self._lower.hold(found.keys)):
            return None
        return self._made(found)

    def make_ready(self, capsule: str, num: int) -> None:
        """Make `num` loans of `capsule` ahead, as far as it is on the device and there is room."""
        found = self._capsule(capsule)
        if found.node is None:
            return
        for _ in range(min(num, MAX_LOANS - len(self.open))):
            self._tree.hold(found.node)
            loan = self._made(found)
            with self._ready_lock:
                self._ready[loan] = capsule

    def take(self, ask: Ask) -> BlockLoan | None:
        """The loan that is asked for, if one was made ahead. From any thread.

        Raises WorkerLost if another life is meant, IncompatibleCapsule if another model asks.
        """
        holder, identity = ask.holder, self._identity()
        if holder.incarnation != self._incarnation:
            raise WorkerLost(
                self._worker, f"life {holder.incarnation} is over, this is {self._incarnation}"
            )
        if ask.identity != identity:
            raise IncompatibleCapsule(holder.capsule, [("model", identity, ask.identity)])
        with self._ready_lock:
            for loan in [own for own, name in self._ready.items() if name == holder.capsule]:
                del self._ready[loan]
                if loan.claim():
                    return loan
        return None

    def _of_keys(self, keys: Sequence[int]) -> BlockLoan:
        """The leading ones of `keys`; of a model with side groups all of them, or none."""
        tree, lower, size = self._tree, self._lower, self._tree.block_size
        hashes = np.array(keys, dtype=np.uint64)
        num = tree.index.count_leading(hashes)
        if tree.sides:
            is_whole = tuple(keys[num:]) == tree.side_keys(keys[:num], num * size)
            num = num if is_whole and tree.find(hashes[:num]) == num else 0
        node = tree.attach(hashes[:num], "", num) if num else None
        blocks: list[int] = [] if node is None else tree.table(node)[:num].tolist()
        if node is not None:
            blocks += tree.side_rows(node, num * size)
        rest = keys[len(blocks) :]
        if not tree.sides and lower is not None:
            rest = rest[: lower.num_leading(rest)]
        if lower is None or not lower.hold(rest):
            rest = ()
        return self._made(LentCapsule(b"", 0, node, blocks, rest))

    def _made(self, found: LentCapsule) -> BlockLoan:
        """A loan of `found`, which is held for it."""
        lower, keys = self._lower, found.keys
        loan = BlockLoan(
            record=found.record,
            node=found.node,
            keys=keys,
            _memory=self._memory,
            _blocks=found.blocks,
            _rows=lower.rows(keys) if lower is not None else (),
            _tails=self._tails(found.num_tokens),
            _clock=self._clock,
            _give_back=self._give_back,
        )
        loan.claim()
        self.open.add(loan)
        self._num_loans += 1
        return loan

    def _tails(self, num_tokens: int) -> dict[int, tuple[int, int, int]]:
        """The rows of a capsule of `num_tokens` that it does not fill, by place: slots, group, part."""
        num_full, num_slots = divmod(num_tokens, self._tree.block_size)
        if not num_slots:
            return {}
        tails = {num_full: (num_slots, 0, 0)}
        for place, group, part in self._tree.side_tails(num_tokens):
            tails[num_full + 1 + place] = (num_slots, group, part)
        return tails

    def _give_back(self, loan: BlockLoan) -> None:
        """From any thread."""
        self._over.append(loan)
        self.wake()

    # Ends

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has something to do."""
        return bool(self._over) or any(loan.is_idle for loan in self.open)

    def take_ended(self) -> None:
        """Let go of what loans that are over held."""
        for loan in self.open:
            loan.close(only_idle=True)
        while self._over:
            loan = self._over.popleft()
            self.open.remove(loan)
            with self._ready_lock:
                self._ready.pop(loan, None)
            self._num_blocks += loan.num_read
            if loan.node is not None:
                self._tree.release(loan.node)
            if self._lower is not None:
                self._lower.release(loan.keys)

    def close(self) -> None:
        """End all loans, but for what is read just now."""
        for loan in list(self.open):
            loan.close()
        self.take_ended()

    def holds(self) -> Counter[Node]:
        """The nodes that are lent, and how often."""
        return Counter(loan.node for loan in self.open if loan.node is not None)

    def stats(self) -> LendingStats:
        return LendingStats(len(self.open), self._num_loans, self._num_blocks)
