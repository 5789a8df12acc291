"""The rule by which a branch waits for a transfer: its next blocks are fetched where that is cheaper.

From the worker's own lower tiers first, then from other workers that hold them, one holder after another. A
holder is asked for a loan, which names what it has, and blocks come of that. A branch that waits is
*fetching*: it has its room and computes nothing. What has come is committed, the rest it computes. So a
holder that is slow, gone, or lends something else costs time and nothing more. A long text comes in several
fetches, so that waiters follow; with windows all comes that is needed to go on, or nothing that counts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from mallee.protocol.errors import MalleeError
from mallee.protocol.hashing import Hashes
from mallee.protocol.messages import Holder
from mallee.worker.kv.node import Node
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Branch, Lent, Pull, node_of
from mallee.worker.sched.plan import StepBudget
from mallee.worker.sched.running import BlockBudget, Running
from mallee.worker.sched.waiting import Waiting
from mallee.worker.transfer.lower import MAX_FETCH_BLOCKS, LowerTiers, Part
from mallee.worker.transfer.values import PEER, Ask, Loan, Moved, Place


class CapsuleReader(Protocol):
    """Reads capsules that other workers lend."""

    def identity(self) -> str:
        """That of the model, with the weights."""
        ...

    def opened(self, branch: Branch, loan: Loan) -> Lent:
        """The capsule that is lent for `branch`, whose job has its state from now on.

        Raises CodecError, IncompatibleCapsule, InvalidParameter if it is of no use.
        """
        ...


@dataclass(slots=True, eq=False)
class _Fetch:
    """The next tokens of `branch` on their way to `node`, which is held until then.

    With windows (`above`) all of them come or none: then `branch` goes on from `above`, the end of what it
    had, which is held too. `num_blocks` are on their way, rows of windows too; some from a peer: `is_lent`.
    """

    branch: Branch
    node: Node
    tokens: Text
    above: Node | None
    num_blocks: int
    is_lent: bool


class Fetching:
    """Begins transfers for prompts that run, and owns those under way and the loans of others' blocks."""

    def __init__(
        self,
        tree: BranchTree,
        lower: LowerTiers,
        reader: CapsuleReader,
        go_on: Callable[[Branch], None],
        *,
        waiting: Waiting,
        running: Running,
        room: BlockBudget,
    ) -> None:
        """`go_on` is called with a branch that need not wait any more."""
        self._tree = tree
        self._lower = lower
        self._reader = reader
        self._went_on = go_on
        self._waiting = waiting
        self._running = running
        self._room = room
        self._under_way: set[_Fetch] = set()
        self.loans: dict[Loan, Branch] = {}
        """Those of others, with the branch that each is for; to be read only."""
        self.arrived: list[tuple[Branch, object | None]] = []
        """Branches of which all is here, with the logits of their next tokens, for their owner to take."""

    def try_begin(self, budget: StepBudget, branch: Branch) -> bool:
        """Whether the next blocks of `branch` are fetched, or asked for; it computes nothing meanwhile."""
        pull = branch.job.pull
        is_at_block = node_of(branch).end % self._tree.block_size == 0
        if is_at_block and branch not in budget.granted:
            if pull is not None and (holder := pull.next_capsule()) is not None:
                self._ask(budget, branch, Ask(holder, (), self._reader.identity()))
                return True
            is_tried = not self._lower.is_empty and not _skips_local(branch)
            if is_tried and self._try_fetch(budget, branch, None):
                return True
            if pull is not None and (
                (pull.lent is not None and self._try_fetch(budget, branch, pull.lent))
                or self._try_ask(budget, branch, pull)
            ):
                return True
        branch.may_fetch = False
        return False

    # Blocks

    def _try_fetch(self, budget: StepBudget, branch: Branch, lent: Lent | None) -> bool:
        """Whether blocks come that lie below here (None) or, if they don't, are lent."""
        find = self._all if self._tree.sides else self._next
        end, parts = find(branch, lent)
        if not parts:
            return False
        if self._lower.is_cheaper(parts, end - node_of(branch).end):
            self._fetch(budget, branch, parts, end)
            return True
        if (pull := branch.job.pull) is not None:
            if lent is None:
                pull.skips_local = True  # a peer may be quicker
            else:
                pull.give_up()
        return False

    def _text(self, branch: Branch) -> tuple[Hashes | Sequence[int], int]:
        """Keys of the blocks that may be fetched of its text, and the position where its tokens end."""
        lent = None if branch.job.pull is None else branch.job.pull.lent
        if lent is not None and lent.is_capsule:
            return lent.keys[: lent.num_blocks], lent.num_tokens
        return self._waiting.hashes(branch), branch.length

    def _next(self, branch: Branch, lent: Lent | None) -> tuple[int, list[Part]]:
        """The next run of blocks from one place, and the position where it ends."""
        size, lower, (keys, last) = self._tree.block_size, self._lower, self._text(branch)
        begin = node_of(branch).end // size
        if lent is None:
            part = lower.find(keys, begin)
            return (0, []) if part is None else (min((begin + len(part.at)) * size, last), [part])
        skips_local = _skips_local(branch)
        end, most = begin, min(lent.num_blocks, begin + MAX_FETCH_BLOCKS)
        while end < most and (end == begin or skips_local or lower.tier(int(keys[end])) is None):
            end += 1
        places = range(begin, end)
        source = Place(PEER, tuple(places), lent.loan, lent.is_foreign)
        parts = [Part(source, range(len(places)))] if places else []
        return min(end * size, lent.num_tokens), parts

    def _all(self, branch: Branch, lent: Lent | None) -> tuple[int, list[Part]]:
        """All blocks and rows up to where every group of layers can go on, and that position."""
        above, size = node_of(branch), self._tree.block_size
        keys, begin = self._text(branch)[0], above.end // size
        end = self._local_end(branch) if lent is None else lent.num_tokens
        if end <= above.end:
            return 0, []
        wanted = [int(key) for key in keys[begin : -(-end // size)]]
        wanted += self._tree.side_keys(keys, end, begin)
        parts = [] if _skips_local(branch) else self._lower.parts(wanted)
        if lent is not None:
            below = {key for part in parts for key in part.source.ids}
            places = {key: place for place, key in enumerate(lent.keys)}
            at = [i for i, key in enumerate(wanted) if key not in below and key in places]
            ids = tuple(places[wanted[i]] for i in at)
            source = Place(PEER, ids, lent.loan, lent.is_foreign)
            parts += [Part(source, at)] if at else []
        is_whole = sum(len(part.at) for part in parts) == len(wanted)
        return end, parts if is_whole else []

    def _local_end(self, branch: Branch) -> int:
        """The position up to which all lies below, that is then needed to go on; 0: nothing."""
        size, tree, (keys, last) = self._tree.block_size, self._tree, self._text(branch)
        begin = node_of(branch).end // size
        held = tree.index.count_leading(np.asarray(keys, np.uint64))

        def is_below(key: int) -> bool:
            return self._lower.tier(key) is not None

        end = max(begin, held)
        while end < len(keys) and is_below(int(keys[end])):
            end += 1
        while end > begin:
            if all(map(is_below, tree.side_keys(keys, min(end * size, last), begin))):
                break
            end -= 1
        tree.offload_path([int(key) for key in keys[begin : min(held, end)]], begin)
        return min(end * size, last) if end > begin else 0

    def _fetch(self, budget: StepBudget, branch: Branch, parts: Sequence[Part], end: int) -> None:
        """Have `parts`, which are of the tokens up to `end`, come, if there is room for them."""
        tree, size, above = self._tree, self._tree.block_size, None
        begin = node_of(branch).end
        if tree.sides:
            above = node_of(branch)
            tree.hold(above)

        def room() -> list[int] | None:
            if not self._room.grow(branch, end - begin, is_fetched=bool(tree.sides)):
                return None
            node = node_of(branch)
            blocks = node.blocks[(begin - node.base) // size : -(-(end - node.base) // size)]
            return blocks + tree.side_rows(node, end, begin // size)

        def ended(num_blocks: int) -> None:
            self._fetched(fetch, num_blocks)

        if not self._lower.fetch(parts, room, ended):
            if above is not None:
                tree.release(above)
            return
        fetch = _Fetch(
            branch,
            node_of(branch),
            branch.pending(end - begin),
            above,
            num_blocks=sum(len(part.at) for part in parts),
            is_lent=parts[-1].source.tier == PEER,
        )
        tree.hold(fetch.node)
        self._under_way.add(fetch)
        self._wait(budget, branch)

    def _fetched(self, fetch: _Fetch, num_blocks: int) -> None:
        """The first of the blocks of `fetch` have come: commit them, and compute the rest."""
        tree, branch, node, above = self._tree, fetch.branch, fetch.node, fetch.above
        is_whole, waits = num_blocks == fetch.num_blocks, branch.phase == "fetching"
        tokens = fetch.tokens[: num_blocks * tree.block_size]
        if above is not None and not is_whole:
            tokens = fetch.tokens[:0]
            if waits:
                tree.release(node)
                tree.hold(above)
                branch.node, branch.room = above, 0
        if len(tokens):
            tree.commit(node, tokens, reason="branching")
        self._under_way.remove(fetch)
        tree.release(node)
        if above is not None:
            tree.release(above)
        if not waits:
            return
        assert branch.attached_tokens is not None, "fetched, but never admitted"
        branch.attached_tokens += len(tokens)
        pull = branch.job.pull
        if not is_whole and pull is None:
            branch.may_fetch = False
        elif not is_whole and pull is not None:
            if fetch.is_lent:
                pull.lent = None  # the next holder may have it
            else:
                pull.skips_local = True
        self._go_on(branch)

    def _wait(self, budget: StepBudget, branch: Branch) -> None:
        budget.begins = True
        self._running.fetch(branch)

    def _go_on(self, branch: Branch) -> None:
        """`branch` fetches on or computes, unless all that was wanted is here."""
        self._went_on(branch)
        pull = branch.job.pull
        lent = None if pull is None else pull.lent
        has_all = lent is not None and lent.is_capsule and node_of(branch).end >= lent.num_tokens
        if not branch.num_pending or has_all:
            branch.cached_tokens = branch.attached_tokens
            state = None if pull is None or branch.num_pending else pull.state
            self.arrived.append((branch, None if state is None else state.logits))

    # Loans

    def _try_ask(self, budget: StepBudget, branch: Branch, pull: Pull) -> bool:
        """Whether a holder is asked for blocks by their keys: the next one that is worth it."""
        size, (keys, _) = self._tree.block_size, self._text(branch)
        begin = node_of(branch).end // size
        pull.lent = None
        while (holder := pull.next_holder()) is not None:
            num = self._num_asked(branch, holder)
            if num <= begin:
                continue
            part = Part(Place(PEER, tuple(range(begin, num))), ())
            if self._lower.is_cheaper([part], (num - begin) * size):
                own = [int(key) for key in keys[:num]]
                asked = (*own, *self._tree.side_keys(keys, num * size))
                self._ask(budget, branch, Ask(holder, asked, self._reader.identity()))
                return True
        return False

    def _ask(self, budget: StepBudget, branch: Branch, ask: Ask) -> None:
        """Ask a holder for blocks: of the capsule that it names, or the keys."""
        self._lower.ask(ask, partial(self._answered, branch, ask))
        self._wait(budget, branch)

    def _answered(self, branch: Branch, ask: Ask, moved: Moved) -> None:
        """A holder has answered."""
        loan = moved.loan
        if loan is not None:
            self.loans[loan] = branch
        if branch.phase != "fetching":
            return  # it is ended with the others of branches that need none
        if loan is not None:
            pull = branch.job.pull
            assert pull is not None, "asked for nothing"
            try:
                pull.lent = self._opened(branch, ask, loan)
            except MalleeError as error:
                self._lower.failed(error)
        self._go_on(branch)

    def _opened(self, branch: Branch, ask: Ask, loan: Loan) -> Lent | None:
        """The use that `branch` has of `loan`. Raises as `CapsuleReader.opened`."""
        if ask.holder.capsule:
            return self._reader.opened(branch, loan)
        if self._tree.sides and loan.num_blocks < len(ask.keys):
            return None  # without all that is read there nothing goes on
        num = min(loan.num_blocks, self._num_asked(branch, ask.holder))
        return Lent(loan, ask.keys, num, num * self._tree.block_size)

    def _num_asked(self, branch: Branch, holder: Holder) -> int:
        """The number of blocks of its text that `branch` asks `holder` for: it may have more of it."""
        return min(holder.num_tokens // self._tree.block_size, len(self._text(branch)[0]))

    def end_loans(self) -> None:
        """End the loans that nothing will be read of any more."""
        for loan, branch in list(self.loans.items()):
            pull = branch.job.pull
            if pull is not None and pull.lent is not None and pull.lent.loan is loan:
                if branch.phase in ("fetching", "prefill") and branch.may_fetch:
                    continue
                pull.lent = None
            del self.loans[loan]
            loan.close()

    @property
    def has_loan_to_end(self) -> bool:
        """Whether a branch that had one is over."""
        return any(branch.phase not in ("fetching", "prefill") for branch in self.loans.values())

    def close(self) -> None:
        """End all loans."""
        for loan in self.loans:
            loan.close()

    def holds(self) -> Counter[Node]:
        """The nodes that are held for what is under way, and how often."""
        ends = [(fetch.node, fetch.above) for fetch in self._under_way]
        return Counter(node for each in ends for node in each if node is not None)


def _skips_local(branch: Branch) -> bool:
    return branch.job.pull is not None and branch.job.pull.skips_local
