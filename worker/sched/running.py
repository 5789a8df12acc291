"""Admitted branches, by what they do next: draw, compute their prompt, decode; and the blocks they need.

More branches may be admitted than a step has rows for: a branch left out of a step keeps its blocks and
goes on when its turn comes. Decodes are kept in the order of a batch.

Blocks are found in this order: the tree evicts cached blocks, replaceable capsules are given up, the running
branch that the order names is preempted (maybe the one that asks). It goes back to its origin, which
it holds, and computes its own tokens again; as draws depend on (seed, position) alone, its answer does not
change. It comes back only when all it has to compute fits, so every preemption is followed by progress,
and no two branches preempt each other for ever.
"""

from collections.abc import Callable, Container, Iterator
from itertools import chain
from operator import attrgetter
from typing import Protocol

from mallee.protocol.errors import PoolExhausted
from mallee.worker.kv.node import Node, Spare
from mallee.worker.kv.pool import BlocksLeaving
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Branch, Phase, node_of
from mallee.worker.sched.plan import StepBudget
from mallee.worker.sched.policy import Order, SchedulerConfig
from mallee.worker.sched.sessions import Account
from mallee.worker.sched.waiting import Waiting


class Running:
    """Owns the admitted branches. `place` says where in a batch a branch at a node belongs."""

    __slots__ = (
        *("_by_session", "_decodes", "_is_stale", "_joined", "_order", "_place", "_waiting"),
        *("fetching", "num", "num_groups", "prefills", "ready"),
    )

    def __init__(self, order: Order, waiting: Waiting, place: Callable[[Node], bytes]) -> None:
        self._order = order
        self._waiting = waiting
        self._place = place
        self._decodes: list[Branch] = []
        self._joined: list[Branch] = []  # since _decodes was made, which a plan still reads
        self._is_stale = False  # _decodes has some that do not decode any more, or is out of order
        self._by_session: dict[Account, tuple[int, Branch]] | None = {}  # None: to be counted
        self.ready: dict[Branch, None] = {}
        self.prefills: dict[Branch, None] = {}
        self.fetching: dict[Branch, None] = {}
        self.num = 0
        self.num_groups = 0  # of those, branches that compute a text for several

    def admit(self, branch: Branch, step: int) -> None:
        """`branch` has a node and goes on from there."""
        self.num += 1
        self.num_groups += len(branch.members) > 1
        branch.job.session.num_running += 1
        branch.room = 0
        branch.may_fetch = True
        if branch.job.pull is not None:
            branch.job.pull.skips_local = False
        if branch.logits is not None:
            branch.move("ready")
            self.ready[branch] = None
            return
        branch.place = (self._place(node_of(branch)), branch.ticket)
        self.compute(branch, step)

    def compute(self, branch: Branch, step: int) -> None:
        """`branch` has a prompt to compute, or what is left of one, or tokens that were injected."""
        branch.move("prefill")
        self.prefills[branch] = None
        self.want_more(branch, step)

    def want_more(self, branch: Branch, step: int) -> None:
        """More of the prompt of `branch` can be computed."""
        queue = self._waiting.queue_of(branch)
        if branch not in queue.members:
            queue.push(branch, step)

    def fetch(self, branch: Branch) -> None:
        """The next blocks of `branch`, a prompt, are on their way."""
        self._forget(branch)
        branch.move("fetching")
        self.fetching[branch] = None

    def fetched(self, branch: Branch, step: int) -> None:
        """They are there, or won't come: what is left of the prompt is computed."""
        del self.fetching[branch]
        self.compute(branch, step)

    def decode(self, branch: Branch) -> None:
        """`branch` has drawn its first token since it was admitted."""
        self._forget(branch)
        branch.move("decode")
        branch.place = (self._place(node_of(branch)), branch.ticket)
        self._joined.append(branch)
        self._is_stale = True

    def recompute(self, branch: Branch, step: int, *, is_short: bool) -> None:
        """`branch`, a decode, has more than one token to compute: as a prompt does."""
        self._is_stale = True
        branch.may_fetch = False
        branch.is_short = is_short
        self.compute(branch, step)

    def remove(self, branch: Branch, phase: Phase) -> None:
        """`branch` is in `phase` now, and does not run."""
        self._forget(branch)
        self.num -= 1
        self.num_groups -= len(branch.members) > 1
        branch.job.session.num_running -= 1
        branch.room = 0
        branch.move(phase)

    def _forget(self, branch: Branch) -> None:
        match branch.phase:
            case "decode":
                self._is_stale = True
            case "ready":
                del self.ready[branch]
            case "fetching":
                del self.fetching[branch]
            case _:
                queue = self._waiting.queue_of(branch)
                if branch in queue.members:
                    queue.remove(branch)
                del self.prefills[branch]

    def decodes(self) -> list[Branch]:
        """The branches that decode, in the order of a batch.

        To be read only; a later call may give a new list.
        """
        if self._is_stale:
            every = (*self._decodes, *self._joined)
            decodes = {s: None for s in every if s.phase == "decode"}  # once each
            self._joined = []
            self._decodes = sorted(decodes, key=attrgetter("place"))
            self._is_stale = False
            self._by_session = None
        return self._decodes

    @property
    def by_session(self) -> dict[Account, tuple[int, Branch]]:
        """The number of decodes of each session, and the one of them that is left out first."""
        decodes = self.decodes()
        if self._by_session is None:
            groups: dict[Account, list[Branch]] = {}
            for branch in decodes:
                groups.setdefault(branch.job.session, []).append(branch)
            self._by_session = {
                session: (len(group), max(group, key=lambda s: (self._order.rank(s), s.ticket)))
                for session, group in groups.items()
            }
        return self._by_session

    def reorder(self) -> None:
        """A priority has changed."""
        self._is_stale = True

    def __iter__(self) -> Iterator[Branch]:
        yield from self.ready
        yield from self.fetching
        yield from self.prefills
        yield from self.decodes()

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        groups = {
            "ready": self.ready,
            "fetching": self.fetching,
            "prefill": self.prefills,
            "decode": self.decodes(),
        }
        for phase, group in groups.items():
            assert all(s.phase == phase for s in group), f"a branch in {phase} is not"
        assert len(list(self)) == len(set(self)) == self.num, "running branches counted wrong"
        assert self.num_groups == sum(len(s.members) > 1 for s in self), "groups counted wrong"
        for queue in (self._waiting.running_short, self._waiting.running_long):
            assert queue.members.keys() <= self.prefills.keys(), "more wanted of one that has all"
        for branch in self:
            node = node_of(branch)
            if branch.room > node.end and branch.phase != "fetching":  # which holds it twice
                is_own = node.holders == 1 and not node.children
                assert is_own, "room in a node of others"


class Reclaimer(Protocol):
    """Holds blocks that it can give up."""

    def reclaim(self, num_blocks: int, kept: Container[Node]) -> bool:
        """Give up so many blocks, beside those of nodes in `kept`; False if it has fewer, and keeps all."""
        ...

    def reclaim_any(self) -> bool:
        """Give up the next of what it holds, whatever that frees; False if it has nothing."""
        ...

    def num_reclaimable(self, kept: Container[Node]) -> int:
        """Blocks that it could give up, beside those of nodes in `kept`."""
        ...


class BlockBudget:
    """Blocks for running branches, from the tree, from `reclaimer`, and by preemption."""

    def __init__(
        self,
        config: SchedulerConfig,
        tree: BranchTree,
        waiting: Waiting,
        *,
        running: Running,
        reclaimer: Reclaimer,
    ) -> None:
        self._order = config.order
        self._tree = tree
        self._waiting = waiting
        self._running = running
        self._reclaimer = reclaimer
        self._spare = max(1, int(tree.pool.num_blocks * config.watermark))
        self._step_tokens = config.max_step_tokens
        own = -(-config.max_step_tokens // tree.block_size) + config.max_rows
        self._ahead = min(own, tree.pool.num_blocks // 8)
        self._budget = StepBudget(0)  # of this step, to be told what becomes of branches
        self.num_preemptions = 0
        self.is_overdue = False  # others have waited for room for too long
        self._promises: dict[Branch, int] | None = None  # blocks by running prompt, in this step
        self._num_promised = 0

    def begin(self, budget: StepBudget) -> None:
        """A new step is planned."""
        self._budget = budget
        self._promises = None

    def make_room_ahead(self) -> None:
        """Have cache leave ahead of need, so that blocks are free for a step when it is planned."""
        self._tree.evict_ahead(self._ahead)

    def forget_copies(self) -> None:
        """The copies of this step were not made: a branch that needs one asks the tree again."""
        for branch in self._budget.copies:
            branch.room = 0
        self._budget.copies.clear()

    def grow(self, branch: Branch, num_tokens: int, *, is_fetched: bool = False) -> bool:
        """Whether there is room for the next `num_tokens` of `branch`; others may have given way for it.

        Without room it waits for blocks that leave, is preempted itself, or has failed. `is_fetched`: as in
        `BranchTree.reserve`.
        """
        tree, budget = self._tree, self._budget
        while True:
            assert branch.node is not None
            try:
                node, copy = tree.reserve(branch.node, num_tokens, is_fetched=is_fetched)
                break
            except BlocksLeaving:
                budget.wait_for_room(branch)
                return False
            except PoolExhausted as error:
                lacking = error.fields["needed"] - tree.num_available
                if self._reclaim(lacking, ()):
                    continue
                victim = self._victim(branch)
                if victim is branch and self._running.num == 1:
                    if lacking <= 0 and self._let_an_origin_go(branch):
                        continue
                    budget.failed[branch] = error
                    budget.copies.pop(branch, None)  # of a part that had room
                    if self._waiting.is_queued(branch):
                        self._waiting.queue_of(branch).remove(branch)
                    return False
                self.preempt(victim)
                if victim is branch:
                    return False
        branch.node = node
        branch.room = tree.room(node, num_tokens)
        if copy is not None:
            budget.copies[branch] = copy
        if self._promises is not None and branch.phase == "prefill":
            self._promise(branch)
        return True

    def take(self, node: Node, num_tokens: int) -> Node | None:
        """A child of `node` with room for tokens that come back from below, beside what runs; None: not yet.

        The caller's hold passes to it. Raises PoolExhausted if nothing runs or waits that could make room.
        """
        tree, running = self._tree, self._running
        self._promises = None  # since the last step some may be over
        needed = -(-num_tokens // tree.block_size) + len(running.ready) + self._promised()
        needed += self._spare
        while True:
            lacking = needed - tree.num_available
            if not running.num or (lacking <= 0 and self._fits_sides(needed)):
                try:
                    return tree.reserve(node, num_tokens, is_fetched=True).node
                except BlocksLeaving:
                    return None
                except PoolExhausted as error:
                    if self._reclaim(error.fields["needed"] - tree.num_available, ()):
                        continue
                    if running.num or self._waiting.ready.members or self._waiting.num_to_compute:
                        return None
                    raise
            elif not self._reclaim(lacking, ()):
                return None

    def stretch(self, branch: Branch, num_tokens: int) -> int:
        """Room behind all of `branch`, a decode with a node of its own: for how many of `num_tokens`.

        Of free blocks alone: nothing is evicted for a draft, and no branch gives way.
        """
        if branch.room - branch.length >= num_tokens:
            return num_tokens
        tree, node, pending = self._tree, node_of(branch), branch.num_pending
        size = tree.block_size
        found = node.base + len(node.blocks) * size - branch.length
        if found < num_tokens and (free := tree.num_free_after(node)):
            found += min(-(-(num_tokens - found) // size), free) * size
            tree.reserve(node, pending + found)
        num_tokens = min(found, num_tokens)
        branch.room = tree.room(node, pending + num_tokens)
        return num_tokens

    def stretch_for_draft(self, branch: Branch, num_tokens: int) -> int:
        """The same for a draft: states are left where blocks end, as without it."""
        if self._tree.has_states:
            num_tokens = min(num_tokens, -branch.length % self._tree.block_size)
        return self.stretch(branch, num_tokens)

    def stretch_ahead(self, branch: Branch, num_tokens: int) -> bool:
        """Whether there is room for a pass after the one under way, which draws `num_tokens` of `branch`."""
        if self.stretch(branch, num_tokens) < num_tokens:
            return False
        return not num_tokens or self._tree.extend_ahead(node_of(branch))

    def spare(self, branch: Branch) -> Spare | None:
        """A block for the next token of `branch`, which has none of its own; None if there is none free."""
        node = node_of(branch)
        is_shared = node.holders > 1 or bool(node.children)
        return self._tree.spare(node) if is_shared else None

    def give_back(self, spare: Spare) -> None:
        """A block of `spare` is free again."""
        self._tree.pool.free([spare.block])

    def shrink(self, branch: Branch) -> None:
        """Give back the blocks of `branch` in which no token is committed."""
        node = node_of(branch)
        self._tree.trim(node)
        branch.room = self._tree.room(node, 0)

    def admitted(self, branch: Branch) -> None:
        """`branch` runs from now on."""
        if branch.phase == "prefill":
            self._promise(branch)

    def has_room(self, branch: Branch) -> bool:
        """Whether all that `branch` has to compute has room beside those that run, and some to spare."""
        if self._running.num == 0:
            return True  # no other branch will make room
        needed = self._needed(branch)
        return needed <= self._tree.num_available and self._fits_sides(needed)

    def make_room(self, branch: Branch) -> bool:
        """Whether there is room for all of `branch`: reclaimed, or from those that it comes before."""
        return self._reclaim_for(branch) or self._make_way(branch)

    def _reclaim_for(self, branch: Branch) -> bool:
        """Whether there is room, once what `branch` lacks is reclaimed: all of it, or nothing."""
        while not self.has_room(branch):
            lacking = self._needed(branch) - self._tree.num_available
            if not self._reclaim(lacking, self._waiting.found_nodes(branch)):
                return False
        return True

    def _reclaim(self, num_blocks: int, kept: Container[Node]) -> bool:
        """Whether blocks were reclaimed: so many, or, if none lack, some of the window groups'."""
        if num_blocks <= 0:
            return self._reclaimer.reclaim_any()
        return self._reclaimer.reclaim(num_blocks, kept)

    def _let_an_origin_go(self, asking: Branch) -> bool:
        """Have a branch that waits, or `asking`, hold its origin no longer; False if none holds one.

        Each origin keeps a window's blocks: many together may keep all of them.
        """
        waiting = self._waiting
        for branch in chain(waiting.ready.members, waiting.short.members, waiting.long.members):
            if branch.origin is not None:
                waiting.remove(branch)
                branch.let_origin_go(self._tree)
                waiting.push(branch, self._budget.step)
                return True
        if asking.origin is None:
            return False
        asking.let_origin_go(self._tree)
        return True

    def _fits_sides(self, num_blocks: int) -> bool:
        """Whether the side groups have room for what is needed of so many blocks at a time."""
        tree, running = self._tree, self._running
        if not tree.sides:
            return True
        own = -(-self._step_tokens // tree.block_size) + len(running.ready)
        num_states = self._num_states() if tree.has_states else 0
        return tree.have_room(num_blocks, len(running.prefills) + 1, own, num_states)

    def _num_states(self) -> int:
        """States that the branches that draw take in their next pass, and keep after it. O(their number).

        One whose node is its own gives up a slot for the one that it takes, once its pass is over.
        """
        num = 2 * len(self._running.ready)
        for branch in self._running.decodes():
            if branch.room <= node_of(branch).end:
                num += 1 if branch.room else 2
        return num

    def _make_way(self, branch: Branch) -> bool:
        """Preempt branches that `branch` comes before, if then it fits.

        Those are branches of its own session with a lower priority, and those of sessions that have
        several running while its own has none. Neither holds the other way round, so no two branches
        preempt each other by turns.
        """
        lower = self._lower_than(branch)
        found = sum(map(self._own_blocks, lower))
        found += self._reclaimer.num_reclaimable(self._waiting.found_nodes(branch))
        if found < self._needed(branch) - self._tree.num_available:
            return False
        while not (has_room := self._reclaim_for(branch)) and lower:
            self.preempt(lower.pop())
        return has_room

    def preempt(self, victim: Branch) -> None:
        """`victim` gives back its own blocks and waits."""
        gates, step = self._waiting.gates, self._budget.step
        self._budget.preempted(victim)
        self._running.remove(victim, "waiting")
        self._promises = None
        self._tree.release(node_of(victim))
        victim.node = None
        gates.land(victim)
        self._waiting.push(victim, step)
        for branch in gates.dropped(victim):
            branch.move("waiting")
            self._waiting.push(branch, step)
        self.num_preemptions += 1

    def _needed(self, branch: Branch) -> int:
        """Blocks to be available before `branch` is admitted."""
        own = 1
        if branch.logits is None:
            own += self._waiting.num_needed(branch)
        ready = len(self._running.ready)  # each will need a block of its own when it decodes
        return own + ready + self._promised() + self._spare

    def _promised(self) -> int:
        """Blocks that running prompts still need. Counted once a step, then kept up."""
        if self._promises is None:
            prompts = (*self._running.prefills, *self._running.fetching)
            self._promises = {s: self._lacking(s) for s in prompts}
            self._num_promised = sum(self._promises.values())
        return self._num_promised

    def _promise(self, branch: Branch) -> None:
        """Count anew the blocks that `branch`, a running prompt, still needs."""
        if self._promises is not None:
            lacking = self._lacking(branch)
            self._num_promised += lacking - self._promises.get(branch, 0)
            self._promises[branch] = lacking

    def _lacking(self, branch: Branch) -> int:
        node = branch.node
        assert node is not None
        have = max(branch.room, node.end)
        return max(0, -(-(branch.length - have) // self._tree.block_size))

    def _own_blocks(self, branch: Branch) -> int:
        """Blocks that are free when `branch` is preempted; none while it waits for a transfer or a peer."""
        node = branch.node
        if node is None or node.holders > 1 or node.children or branch.phase == "fetching":
            return 0
        return len(node.blocks)

    def _victim(self, asking: Branch) -> Branch:
        """The branch to preempt: of those with blocks to give, and `asking`."""
        running = [s for s in self._running if s is asking or self._own_blocks(s)]
        return max(running, key=self._order.victim)

    def _lower_than(self, branch: Branch) -> list[Branch]:
        """Branches that `branch` comes before, with blocks to give; the first to be preempted last."""
        lower: list[Branch] = []
        spared: set[Account] = set()
        rank = self._order.rank
        for victim in sorted(self._running, key=self._order.victim):
            if victim.job.session is branch.job.session:
                gives_way = rank(branch) < rank(victim)
            else:
                gives_way = branch.job.session.num_running == 0 and victim.job.session in spared
                spared.add(victim.job.session)  # one of each goes on
            if gives_way and self._own_blocks(victim):
                lower.append(victim)
        return lower
