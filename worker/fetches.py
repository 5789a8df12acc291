"""Fetches and loans under way: from the step that begins them to the branch that goes on.

A branch that fetches is *fetching*: it has its room and computes nothing. What has come is committed,
the rest it computes. So a holder that is slow, gone, or lends something else costs time and nothing more.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from mallee.protocol.errors import IncompatibleCapsule, MalleeError
from mallee.protocol.messages import Prefill
from mallee.protocol.model import ModelSpec
from mallee.worker.capsules.capsule import block_keys
from mallee.worker.capsules.record import CapsuleRecord, checked_record
from mallee.worker.kv.node import Node
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.borrowing import Borrowing, CapsuleState, Lent
from mallee.worker.sched.branch import Branch, Fetch, Plan, Query
from mallee.worker.sched.scheduler import Scheduler
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.peers import Ask, Loan
from mallee.worker.transfer.values import PEER, Moved


class Model(Protocol):
    """The model whose KV it is."""

    @property
    def spec(self) -> ModelSpec: ...

    def undump(self, raw: bytes) -> Any:
        """Kept logits again. Raises CodecError."""
        ...


class Fetches:
    """Owner of what is under way to the device, and of the loans of other workers' blocks.

    `arrived` is called with a branch all of whose capsule is here, and the logits of its next token.
    """

    def __init__(
        self,
        tree: BranchTree,
        lower: LowerTiers,
        scheduler: Scheduler,
        model: Model,
        arrived: Callable[[Branch, object | None], None],
    ) -> None:
        self._tree = tree
        self._lower = lower
        self._scheduler = scheduler
        self._model = model
        self._arrived = arrived
        self._holds: Counter[Node] = Counter()
        self._loans: dict[Loan, Branch] = {}
        self.is_stalled = False  # until a block has moved there is nothing to do

    # Beginnings

    def begin(self, plan: Plan) -> None:
        """Begin what `plan` wants fetched or asked."""
        self.is_stalled = plan.is_empty and self._lower.num_moving > 0
        for fetch in plan.fetches:
            self._holds[fetch.node] += 1
            if fetch.above is None:
                self._lower.fetch(fetch.parts[0], partial(self._fetched_some, fetch))
            else:
                self._holds[fetch.above] += 1
                self._lower.fetch_all(fetch.parts, partial(self._fetched_all, fetch))
        for query in plan.queries:
            self._holds[query.node] += 1
            ask = Ask(query.holder, query.keys, self._model.spec.identity)
            self._lower.ask(ask, partial(self._lent, query))

    # Blocks

    def _fetched_some(self, fetch: Fetch, moved: Moved) -> None:
        """The first of the blocks of `fetch` have come."""
        num, is_whole = moved.num_blocks, moved.num_blocks == len(fetch.parts[0].keys)
        self._fetched(fetch, fetch.tokens[: num * self._tree.block_size], is_whole=is_whole)

    def _fetched_all(self, fetch: Fetch, is_whole: bool) -> None:
        """All of `fetch` has come, or nothing that counts: its branch goes on from where it was."""
        branch, above = fetch.branch, fetch.above
        assert above is not None, "parts of it count"
        if not is_whole and branch.phase == "fetching":
            self._tree.release(fetch.node)
            self._tree.hold(above)
            branch.node, branch.room = above, 0
        self._fetched(fetch, fetch.tokens if is_whole else fetch.tokens[:0], is_whole=is_whole)
        self._release(above)

    def _fetched(self, fetch: Fetch, tokens: Text, *, is_whole: bool) -> None:
        """Commit `tokens`, which have come of `fetch`: its branch computes the rest."""
        branch, node = fetch.branch, fetch.node
        if len(tokens):
            self._tree.commit(node, tokens)
        self._release(node)
        self.is_stalled = False
        if branch.phase != "fetching":
            return
        assert branch.attached_tokens is not None, "fetched, but never admitted"
        branch.attached_tokens += len(tokens)
        borrowing = branch.job.borrowing
        if not is_whole and borrowing is not None:
            if any(part.found.tier == PEER for part in fetch.parts):
                borrowing.lent = None  # the next holder may have it
            else:
                borrowing.skips_local = True
        self._go_on(branch, may_fetch=is_whole or borrowing is not None)

    def _go_on(self, branch: Branch, *, may_fetch: bool) -> None:
        """`branch` fetches on or computes, unless all that was wanted is here."""
        self._scheduler.fetched(branch, may_fetch=may_fetch)
        borrowing = branch.job.borrowing
        node = branch.node
        assert node is not None, "fetched, but not running"
        if not branch.num_pending or (borrowing is not None and _has_all(borrowing, node.end)):
            branch.cached_tokens = branch.attached_tokens
            state = None if borrowing is None else borrowing.state
            logits = None if state is None or branch.num_pending else state.logits
            self._arrived(branch, logits)

    # Loans

    def _lent(self, query: Query, moved: Moved) -> None:
        """A holder has answered `query`."""
        branch, loan = query.branch, moved.loan
        self._release(query.node)
        self.is_stalled = False
        borrowing = branch.job.borrowing
        if loan is not None:
            self._loans[loan] = branch
        if branch.phase != "fetching":
            return  # it is ended with the others of branches that need none
        assert borrowing is not None, "asked by a branch that borrows nothing"
        if loan is not None:
            try:
                self._take(branch, borrowing, query, loan)
            except MalleeError as error:
                self._lower.failed(error)
        self._go_on(branch, may_fetch=True)

    def _take(self, branch: Branch, borrowing: Borrowing, query: Query, loan: Loan) -> None:
        """Have `branch` use what is lent.

        Raises CodecError, IncompatibleCapsule, InvalidParameter if it can't.
        """
        size = self._tree.block_size
        if query.holder.capsule:
            record = self._checked(branch, loan)
            logits = None if record.logits is None else self._model.undump(record.logits)
            borrowing.state = CapsuleState(record.continuation, record.grammar, logits)
            text = branch.tokens[: record.num_computed]
            keys = block_keys(self._tree, text, branch.job.salt)
            borrowing.lent = Lent(
                *(loan, (*keys, *self._tree.window_keys(keys, record.num_computed))),
                num_blocks=len(keys),
                num_tokens=record.num_computed,
                is_capsule=True,
                is_foreign=record.salt != branch.job.salt,
            )
            return
        num = len(query.keys) if self._tree.windows is None else self._num_full(query)
        if self._tree.windows is not None and loan.num_blocks < len(query.keys):
            return  # without all that is read there nothing goes on
        lent = min(loan.num_blocks, num)
        borrowing.lent = Lent(loan, query.keys, lent, lent * size)

    def _num_full(self, query: Query) -> int:
        """The number of blocks of the text among the keys of `query`; the others are rows of windows."""
        return min(query.holder.num_tokens // self._tree.block_size, len(query.keys))

    def _checked(self, branch: Branch, loan: Loan) -> CapsuleRecord:
        command, spec = branch.job.command, self._model.spec
        if not isinstance(command, Prefill):
            raise IncompatibleCapsule("", [("command", "a capsule", "an answer")])
        record = checked_record(
            loan.record,
            self._tree.notation.dump(branch.tokens),
            spec,
            block_size=self._tree.block_size,
        )
        num_rows = len(self._tree.window_keys(range(record.num_blocks), record.num_computed))
        if loan.num_blocks != record.num_blocks + num_rows:
            raise IncompatibleCapsule(
                record.capsule,
                [("blocks", str(loan.num_blocks), str(record.num_blocks + num_rows))],
            )
        return record

    def end_loans(self) -> None:
        """End the loans that nothing will be read of any more."""
        for loan, branch in list(self._loans.items()):
            borrowing = branch.job.borrowing
            lent = None if borrowing is None else borrowing.lent
            is_used = branch.phase in ("fetching", "prefill") and branch.may_fetch
            if lent is None or lent.loan is not loan or not is_used:
                if lent is not None and lent.loan is loan and borrowing is not None:
                    borrowing.lent = None
                del self._loans[loan]
                self._lower.end_loan(loan)

    # Reading

    @property
    def has_news(self) -> bool:
        """Whether a step would take in the end of a move, or end a loan."""
        return self._lower.has_news or any(
            branch.phase not in ("fetching", "prefill") for branch in self._loans.values()
        )

    def holds(self) -> Counter[Node]:
        """The nodes that are held for what is under way, and how often."""
        return Counter(self._holds)

    def _release(self, node: Node) -> None:
        self._holds[node] -= 1
        if not self._holds[node]:
            del self._holds[node]
        self._tree.release(node)


def _has_all(borrowing: Borrowing, num_computed: int) -> bool:
    """Whether the KV of the capsule that is lent is here."""
    lent = borrowing.lent
    return lent is not None and lent.is_capsule and num_computed >= lent.num_tokens
