"""Has the next blocks of prompts fetched, where that is cheaper than computing them.

From the worker's own lower tiers first, then from other workers that hold them, one holder after another.
What does not arrive is computed. A long text comes in several fetches, so that waiters follow.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from mallee.protocol.hashing import Hashes
from mallee.protocol.messages import Holder
from mallee.worker.kv.node import Node
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.windows import Windows
from mallee.worker.sched.borrowing import Borrowing, Lent
from mallee.worker.sched.branch import Branch, Fetch, Query, node_of
from mallee.worker.sched.budget import StepBudget
from mallee.worker.sched.running import BlockBudget, Running
from mallee.worker.sched.waiting import Waiting
from mallee.worker.transfer.lower import MAX_FETCH_BLOCKS, Found, LowerTiers, Part
from mallee.worker.transfer.values import PEER


class Fetching:
    """Begins fetches for prompts that run."""

    def __init__(
        self,
        tree: BranchTree,
        lower: LowerTiers,
        *,
        waiting: Waiting,
        running: Running,
        room: BlockBudget,
    ) -> None:
        self._tree = tree
        self._lower = lower
        self._waiting = waiting
        self._running = running
        self._room = room

    def try_begin(self, budget: StepBudget, branch: Branch) -> bool:
        """Whether the next blocks of `branch` are fetched, or asked for; it computes nothing meanwhile."""
        borrowing, windows = branch.job.borrowing, self._tree.windows
        is_there = borrowing is not None or not self._lower.is_empty
        if is_there and self._is_at_block(branch) and branch not in budget.granted:
            capsule = None if borrowing is None else borrowing.next_capsule()
            if capsule is not None:
                self._ask(budget, branch, capsule, ())
                return True
            if windows is None:
                is_coming = self._try_next(budget, branch)
            else:
                is_coming = self._try_all(budget, branch, windows)
            if is_coming or (borrowing is not None and self._try_ask(budget, branch, borrowing)):
                return True
        branch.may_fetch = False
        return False

    def _is_at_block(self, branch: Branch) -> bool:
        return node_of(branch).end % self._tree.block_size == 0

    def _keys(self, branch: Branch) -> Hashes | Sequence[int]:
        """Keys of the blocks that may be fetched of its text."""
        borrowing = branch.job.borrowing
        if borrowing is not None and borrowing.lent is not None and borrowing.lent.is_capsule:
            return borrowing.lent.keys[: borrowing.lent.num_blocks]
        return branch.job.keys or self._waiting.hashes(branch)

    def _end(self, branch: Branch) -> int:
        """The position up to which its tokens may be fetched."""
        borrowing = branch.job.borrowing
        if borrowing is not None and borrowing.lent is not None and borrowing.lent.is_capsule:
            return borrowing.lent.num_tokens
        return branch.length

    # With layers of full attention alone

    def _try_next(self, budget: StepBudget, branch: Branch) -> bool:
        """Fetch the next run of blocks from one place."""
        node, size, lower = node_of(branch), self._tree.block_size, self._lower
        keys, begin = self._keys(branch), node.end // size
        borrowing = branch.job.borrowing
        if borrowing is None or not borrowing.skips_local:
            found = lower.find(keys, begin)
            if found is not None:
                num_tokens = min(found.num_blocks * size, self._end(branch) - node.end)
                if lower.is_cheaper((found,), num_tokens):
                    wanted = tuple(int(key) for key in keys[begin : begin + found.num_blocks])
                    return self._fetch(budget, branch, Part(found, wanted, ()), num_tokens)
                if borrowing is None:
                    return False
                borrowing.skips_local = True  # a peer may be quicker
        lent = None if borrowing is None else borrowing.lent
        if borrowing is None or lent is None or begin >= lent.num_blocks:
            return False
        left = Found(PEER, lent.num_blocks - begin)
        if not lower.is_cheaper((left,), lent.num_tokens - node.end):
            self._give_up(borrowing)
            return False
        end = begin + 1
        most = min(lent.num_blocks, begin + MAX_FETCH_BLOCKS)
        while end < most and (borrowing.skips_local or lower.find(keys, end) is None):
            end += 1
        num_tokens = min(end * size, lent.num_tokens) - node.end
        found = Found(PEER, end - begin)
        places = tuple(range(begin, end))
        part = Part(found, places, (), lent.loan, lent.is_foreign)
        return self._fetch(budget, branch, part, num_tokens)

    def _fetch(self, budget: StepBudget, branch: Branch, part: Part, num_tokens: int) -> bool:
        """Make room for `part`, whose blocks are not known yet, and have it come."""
        lower, tree, size = self._lower, self._tree, self._tree.block_size
        lower.claim(part.found, part.keys)  # room for it may be made at its expense
        grown = self._room.grow(branch, num_tokens)
        budget.note(grown)
        if not grown.has_room:
            lower.unclaim(part.found, part.keys)
            return True
        node = node_of(branch)
        tree.hold(node)
        own = (node.end - node.base) // size
        part = part._replace(blocks=tuple(node.blocks[own : own + part.found.num_blocks]))
        budget.fetches += (Fetch(branch, node, branch.pending(num_tokens), (part,)),)
        self._running.fetch(branch)
        return True

    # With windows

    def _try_all(self, budget: StepBudget, branch: Branch, windows: Windows) -> bool:
        """Fetch all up to where every group of layers can go on, at once."""
        borrowing = branch.job.borrowing
        if borrowing is None or not borrowing.skips_local:
            end = self._local_end(branch, windows)
            if end and self._try_up_to(budget, branch, windows, end=end):
                return True
        lent = None if borrowing is None else borrowing.lent
        if lent is None or lent.num_tokens <= node_of(branch).end:
            return False
        return self._try_up_to(budget, branch, windows, end=lent.num_tokens, lent=lent)

    def _local_end(self, branch: Branch, windows: Windows) -> int:
        """The position up to which all lies below, that is then needed to go on; 0: nothing."""
        above, size, tree, lower = node_of(branch), self._tree.block_size, self._tree, self._lower
        keys, last = self._keys(branch), self._end(branch)
        begin = above.end // size
        held = tree.index.count_leading(np.asarray(keys, np.uint64))

        def read_after(num_blocks: int) -> Iterable[int]:
            return windows.keys_after(keys, min(num_blocks * size, last), begin)

        num = lower.find_resumable(keys, begin, held, read_after)
        if (
            begin < held and num
        ):  # but its windows were given up: it comes back with them, by host memory
            own = [int(key) for key in keys[begin : min(held, begin + num)]]
            tree.offload(own, tree.blocks_of(own, begin))
        return min((begin + num) * size, last) if num else 0

    def _try_up_to(
        self,
        budget: StepBudget,
        branch: Branch,
        windows: Windows,
        *,
        end: int,
        lent: Lent | None = None,
    ) -> bool:
        """Fetch what is needed to go on at `end`: what does not lie below comes from `lent`, if given."""
        above, size, lower = node_of(branch), self._tree.block_size, self._lower
        keys, begin = self._keys(branch), above.end // size
        num = -(-end // size) - begin
        wanted = [int(key) for key in keys[begin : begin + num]]
        wanted += windows.keys_after(keys, end, begin)
        if lent is None:
            parts = lower.parts(wanted, range(len(wanted)))
        else:
            parts = self._parts_with(branch, lent, wanted)
        is_here = sum(len(part.keys) for part in parts) == len(wanted)
        if not is_here or not lower.is_cheaper([part.found for part in parts], end - above.end):
            if lent is not None:
                self._give_up(branch.job.borrowing)
            return False
        for part in parts:
            lower.claim(part.found, part.keys)  # room for it may be made at its expense
        self._tree.hold(above)
        grown = self._room.grow(branch, end - above.end, is_fetched=True)
        budget.note(grown)
        if not grown.has_room:
            self._tree.release(above)
            for part in parts:
                lower.unclaim(part.found, part.keys)
            return True
        node = node_of(branch)
        self._tree.hold(node)
        blocks = [*node.blocks[:num], *windows.rows_after(node, end, begin)]
        parts = [part._replace(blocks=tuple(blocks[i] for i in part.blocks)) for part in parts]
        tokens = branch.pending(end - above.end)
        budget.fetches += (Fetch(branch, node, tokens, parts, above),)
        self._running.fetch(branch)
        return True

    def _parts_with(self, branch: Branch, lent: Lent, wanted: Sequence[int]) -> list[Part]:
        """`wanted` by where it lies: below, as far as that is to be tried, and else in `lent`."""
        borrowing, parts = branch.job.borrowing, list[Part]()
        if borrowing is None or not borrowing.skips_local:
            parts = self._lower.parts(wanted, range(len(wanted)))
        below = {key for part in parts for key in part.keys}
        places = {key: place for place, key in enumerate(lent.keys)}
        others = [i for i, key in enumerate(wanted) if key not in below and key in places]
        if others:
            own = tuple(places[wanted[i]] for i in others)
            found = Found(PEER, len(own))
            parts.append(Part(found, own, tuple(others), lent.loan, lent.is_foreign))
        return parts

    # Holders

    def _try_ask(self, budget: StepBudget, branch: Branch, borrowing: Borrowing) -> bool:
        """Whether a holder is asked for blocks by their keys: the next one that is worth it."""
        size, node = self._tree.block_size, node_of(branch)
        begin = node.end // size
        borrowing.lent = None
        while (holder := borrowing.next_holder()) is not None:
            keys = self._keys(branch)
            num = min(holder.num_tokens // size, len(keys))
            if num <= begin or holder.capsule:
                continue
            if self._lower.is_cheaper((Found(PEER, num - begin),), (num - begin) * size):
                self._ask(budget, branch, holder, self._asked(keys, num))
                return True
        return False

    def _asked(self, keys: Hashes | Sequence[int], num_blocks: int) -> tuple[int, ...]:
        """Keys of the first `num_blocks`, and of the rows of windows that are read after them."""
        asked = [int(key) for key in keys[:num_blocks]]
        asked += self._tree.window_keys(keys, num_blocks * self._tree.block_size)
        return tuple(asked)

    def _ask(
        self, budget: StepBudget, branch: Branch, holder: Holder, keys: tuple[int, ...]
    ) -> None:
        node: Node = node_of(branch)
        self._tree.hold(node)
        budget.queries += (Query(branch, node, holder, keys),)
        self._running.fetch(branch)

    def _give_up(self, borrowing: Borrowing | None) -> None:
        """Computing is cheaper."""
        if borrowing is not None:
            borrowing.give_up()
