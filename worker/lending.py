"""Lends blocks of this worker: finds what is asked for, and holds it until the loan is over.

Blocks are found and let go by the engine's thread, and read from others beside its steps: what is held does
not change. A loan that is not read for `MAX_IDLE_S` is over. Where it is known that a capsule will be asked
for, its loans are made ahead, so that no question waits for a step.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from threading import Lock
from typing import Final, NamedTuple

import numpy as np

from mallee.protocol.codec import encode
from mallee.protocol.errors import IncompatibleCapsule, InvalidParameter, LoansFull, WorkerLost
from mallee.protocol.ids import CapsuleId, Incarnation, WorkerId
from mallee.worker.capsules.capsule import Capsule, copy_of
from mallee.worker.capsules.disk_records import DiskRecords
from mallee.worker.capsules.registry import CapsuleRegistry
from mallee.worker.forward import Forward
from mallee.worker.kv.node import Node
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.watch import KVMemory, Row, Rows
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.peers import Ask

MAX_LOANS: Final = 64
MAX_IDLE_S: Final = 30.0


class LendingStats(NamedTuple):
    """Loans now; loans and blocks that others have read so far."""

    open: int
    num_loans: int
    num_blocks: int


class _Place(NamedTuple):
    """A block that is lent: on the device, or its bytes in host memory."""

    block: int
    row: Row | None = None


class _Tail(NamedTuple):
    """A row of a capsule's last block, of which only the first `num_slots` token slots are the capsule's."""

    num_slots: int
    group: int = 0  # of windows; 0: the full one
    part: int = 0


class BlockLoan:
    """A `Loan` of blocks of this process."""

    __slots__ = (
        *("_clock", "_give_back", "_is_closed", "_lock", "_memory", "_num_reading", "_places"),
        *("_tails", "_used_at", "keys", "node", "num_read", "record"),
    )

    def __init__(
        self,
        memory: KVMemory,
        places: Sequence[_Place],
        clock: Callable[[], float],
        give_back: "Callable[[BlockLoan], None]",
        *,
        record: bytes = b"",
        node: Node | None = None,
        keys: Sequence[int] = (),
        tails: Mapping[int, _Tail] | None = None,
    ) -> None:
        """`tails` by place. `node` and `keys`, of host memory, are what is held for it."""
        self.record = record
        self.node = node
        self.keys = keys
        self.num_read = 0
        self._memory = memory
        self._places = places
        self._tails = tails or {}
        self._clock = clock
        self._give_back = give_back
        self._lock = Lock()
        self._num_reading = 0
        self._is_closed = False
        self._used_at = clock()

    @property
    def num_blocks(self) -> int:
        return len(self._places)

    @property
    def block_nbytes(self) -> int:
        return self._memory.block_nbytes

    def read(self, places: Sequence[int], rows: Rows) -> None:
        if not all(0 <= place < len(self._places) for place in places):
            raise InvalidParameter("places", max(places), f"{len(self._places)} blocks are lent")
        with self._lock:
            if self._is_closed:
                raise WorkerLost("lender", "the loan is over")
            self._num_reading += 1
        try:
            self._copy([self._places[place] for place in places], rows)
            for place, row in zip(places, rows, strict=True):
                if place in self._tails:  # the other slots have what others left in the block
                    self._memory.clear(row, *self._tails[place])
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

    def _copy(self, places: Sequence[_Place], rows: Rows) -> None:
        """Those that follow one another on the device pass at once."""
        assert len(places) == len(rows), f"{len(places)} blocks for {len(rows)} rows"
        begin = 0
        for own, group in groupby(places, key=lambda place: place.row is None):
            part = list(group)
            there = rows[begin : begin + len(part)]
            if own:
                self._memory.read([place.block for place in part], there)
            else:
                for place, row in zip(part, there, strict=True):
                    row[:] = place.row
            begin += len(part)

    def claim(self) -> bool:
        """Whether it is open; then it is in use from now on. For one that was made ahead."""
        with self._lock:
            self._used_at = self._clock()
            return not self._is_closed

    def is_idle(self, now: float) -> bool:
        """Whether it is not read, and has not been for long."""
        with self._lock:
            return self._is_idle(now)

    def close_if_idle(self, now: float) -> None:
        """End the loan, unless a thread reads it or has claimed it a short while ago."""
        with self._lock:
            if self._is_closed or not self._is_idle(now):
                return
            self._is_closed = True
        self._give_back(self)

    def _is_idle(self, now: float) -> bool:
        return not self._num_reading and now - self._used_at > MAX_IDLE_S

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
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
        capsules: CapsuleRegistry,
        records: DiskRecords,
        lower: LowerTiers | None,
        forward: Forward,
        *,
        worker: WorkerId,
        incarnation: Incarnation,
        clock: Callable[[], float],
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Called, from any thread, when `settle` has something to do."""
        self._tree = tree
        self._capsules = capsules
        self._records = records
        self._lower = lower
        self._forward = forward
        self._worker = worker
        self._incarnation = incarnation
        self._clock = clock
        self._open: set[BlockLoan] = set()
        self._over: deque[BlockLoan] = deque()
        self._ready: dict[str, deque[BlockLoan]] = {}  # by capsule, made ahead
        self._ready_lock = Lock()
        self._num_loans = self._num_blocks = 0

    def lend(self, ask: Ask) -> BlockLoan | None:
        """The loan that is asked for; None: the capsule has to be brought back to the device first.

        Raises UnknownCapsule, IncompatibleCapsule, WorkerLost, LoansFull.
        """
        if (ready := self.take(ask)) is not None:
            return ready
        holder = ask.holder
        self._check(ask)
        if len(self._open) >= MAX_LOANS:
            raise LoansFull(self._worker, len(self._open), MAX_LOANS)
        loan = self._of_capsule(holder.capsule) if holder.capsule else self._of_keys(ask.keys)
        if loan is not None:
            self._open.add(loan)
            self._num_loans += 1
        return loan

    def make_ready(self, capsule: str, num: int) -> None:
        """Make `num` loans of `capsule` ahead, as far as it is on the device and there is room."""
        found = self._capsules.peek(CapsuleId(capsule))
        num = min(num, MAX_LOANS - len(self._open))
        if found is None or found.node is None or num <= 0:
            return
        loans = self._of_node(found, found.node, num)
        self._open.update(loans)
        self._num_loans += num
        with self._ready_lock:
            self._ready.setdefault(capsule, deque()).extend(loans)

    def take(self, ask: Ask) -> BlockLoan | None:
        """The loan that is asked for, if one was made ahead. From any thread.

        Raises IncompatibleCapsule, WorkerLost.
        """
        capsule = ask.holder.capsule
        if capsule not in self._ready:
            return None
        self._check(ask)
        with self._ready_lock:
            ready = self._ready.get(capsule, deque())
            while ready:
                if (loan := ready.popleft()).claim():
                    return loan
            self._ready.pop(capsule, None)
        return None

    def _check(self, ask: Ask) -> None:
        """Raises WorkerLost if another life is meant, IncompatibleCapsule if another model asks."""
        holder, identity = ask.holder, self._forward.spec.identity
        if holder.incarnation != self._incarnation:
            raise WorkerLost(
                self._worker, f"life {holder.incarnation} is over, this is {self._incarnation}"
            )
        if ask.identity != identity:
            raise IncompatibleCapsule(holder.capsule, [("model", identity, ask.identity)])

    def _of_capsule(self, name: str) -> BlockLoan | None:
        capsule = self._capsules.get(name)
        node, below = capsule.node, capsule.below
        if node is None and below is not None and below.all_keys:
            keys = below.all_keys
            record = encode(self._records.record(capsule))
            if self._lower is None or (rows := self._lower.lend(keys)) is None:
                return None
            tails = self._tails(len(below.tokens))
            places = [_Place(-1, row) for row in rows]
            return self._made(places, record=record, keys=keys, tails=tails)
        if node is None:  # it has no KV
            return self._made([], record=encode(self._records.record(capsule)))
        (loan,) = self._of_node(capsule, node, 1)
        return loan

    def _of_node(self, capsule: Capsule, node: Node, num: int) -> list[BlockLoan]:
        """`num` loans of `capsule`, which is `node` on the device."""
        copy = copy_of(self._tree, node)
        record = encode(self._records.record(capsule, copy))
        places, tails = [_Place(b) for b in copy.blocks], self._tails(node.end)
        for _ in range(num):
            self._tree.hold(node)
        return [self._made(places, record=record, node=node, tails=tails) for _ in range(num)]

    def _tails(self, num_tokens: int) -> dict[int, _Tail]:
        """The rows of a capsule of `num_tokens` that it does not fill, by place."""
        num_full, num_slots = divmod(num_tokens, self._tree.block_size)
        if not num_slots:
            return {}
        tails = {num_full: _Tail(num_slots)}
        if self._tree.windows is not None:
            for place, group, part in self._tree.windows.last_rows_after(num_tokens):
                tails[num_full + 1 + place] = _Tail(num_slots, group, part)
        return tails

    def _of_keys(self, keys: Sequence[int]) -> BlockLoan:
        """The leading ones of `keys`; of a model with windows all of them, or none."""
        tree, lower, size = self._tree, self._lower, self._tree.block_size
        hashes = np.array(keys, dtype=np.uint64)
        num = tree.index.count_leading(hashes)
        if tree.windows is not None:
            rows = list(tree.window_keys(keys[:num], num * size))
            if not num or list(keys[num:]) != rows or tree.find(hashes[:num]) < num:
                return self._of_host(keys)
            held = tree.attach(hashes[:num], "", num)
            blocks = [*tree.table(held)[:num].tolist(), *tree.windows.rows_after(held, num * size)]
            return self._made([_Place(b) for b in blocks], node=held)
        node = tree.attach(hashes[:num], "", num) if num else None
        places = [] if node is None else [_Place(b) for b in tree.table(node)[:num].tolist()]
        more = () if lower is None else keys[num : num + lower.num_leading(keys[num:])]
        if lower is not None and more:
            places += [_Place(-1, row) for row in lower.lend(more) or ()]
        return self._made(places, node=node, keys=more)

    def _of_host(self, keys: Sequence[int]) -> BlockLoan:
        """All of `keys` from host memory, or nothing."""
        lower = self._lower
        if lower is None or (rows := lower.lend(keys)) is None:
            return self._made([])
        return self._made([_Place(-1, row) for row in rows], keys=keys)

    def _made(
        self,
        places: Sequence[_Place],
        *,
        record: bytes = b"",
        node: Node | None = None,
        keys: Sequence[int] = (),
        tails: Mapping[int, _Tail] | None = None,
    ) -> BlockLoan:
        memory = self._forward.memory
        return BlockLoan(
            *(memory, places, self._clock, self._give_back),
            record=record,
            node=node,
            keys=keys,
            tails=tails,
        )

    def _give_back(self, loan: BlockLoan) -> None:
        """From any thread."""
        self._over.append(loan)
        self.wake()

    # Ends

    @property
    def has_news(self) -> bool:
        """Whether `settle` has something to do."""
        if not self._open:
            return False
        now = self._clock()
        return bool(self._over) or any(loan.is_idle(now) for loan in self._open)

    def settle(self) -> None:
        """Let go of what loans that are over held."""
        if not self._open:
            return
        now = self._clock()
        for loan in self._open:
            loan.close_if_idle(now)
        if self._over and self._ready:
            self._forget_ready()
        while self._over:
            loan = self._over.popleft()
            self._open.remove(loan)
            self._num_blocks += loan.num_read
            if loan.node is not None:
                self._tree.release(loan.node)
            if loan.keys:
                assert self._lower is not None, "nothing lies in host memory"
                self._lower.release(loan.keys)

    def _forget_ready(self) -> None:
        """Those that nobody took in time are ready no more."""
        over = set(self._over)
        with self._ready_lock:
            for capsule, loans in list(self._ready.items()):
                left = deque(loan for loan in loans if loan not in over)
                if left:
                    self._ready[capsule] = left
                else:
                    del self._ready[capsule]

    def close(self) -> None:
        """End all loans, but for what is read just now."""
        for loan in list(self._open):
            loan.close()
        self.settle()

    def holds(self) -> Counter[Node]:
        """The nodes that are lent, and how often."""
        return Counter(loan.node for loan in self._open if loan.node is not None)

    def stats(self) -> LendingStats:
        return LendingStats(len(self._open), self._num_loans, self._num_blocks)
