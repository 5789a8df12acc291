"""Admitted branches, by what they do next: draw, compute their prompt, decode.

More branches may be admitted than a step has rows for: a branch left out of a step keeps its blocks and
goes on when its turn comes. Decodes are kept in the order of a batch.
"""

from collections.abc import Callable, Collection, Container, Iterator
from operator import attrgetter
from typing import NamedTuple, Protocol

from mallee.protocol.errors import PoolExhausted
from mallee.worker.kv.node import BlockCopy, Node, Spare
from mallee.worker.kv.pool import BlocksLeaving
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Branch, FairQueue, Phase, node_of
from mallee.worker.sched.policy import URGES, Policy, SchedulerConfig
from mallee.worker.sched.sessions import Session, Sessions
from mallee.worker.sched.waiting import Waiting


class Running:
    """Owns the admitted branches. `place` says where in a batch a branch at a node belongs."""

    __slots__ = (
        *("_by_session", "_decodes", "_is_stale", "_joined", "_place", "_policy"),
        *("fetching", "long", "num", "num_groups", "prefills", "ready", "short"),
    )

    def __init__(self, policy: Policy, sessions: Sessions, place: Callable[[Node], bytes]) -> None:
        self._policy = policy
        self._place = place
        self._decodes: list[Branch] = []
        self._joined: list[Branch] = []  # since _decodes was made, which a plan still reads
        self._is_stale = False  # _decodes has some that do not decode any more, or is out of order
        self._by_session: dict[Session, tuple[int, Branch]] = {}
        self.ready: dict[Branch, None] = {}
        self.prefills: dict[Branch, None] = {}
        self.fetching: dict[Branch, None] = {}
        self.short = FairQueue(sessions)  # prefills of which more could be computed in this step
        self.long = FairQueue(sessions)
        self.num = 0
        self.num_groups = 0  # of those, branches that compute a text for several

    def admit(self, branch: Branch, step: int) -> None:
        """`branch` has a node and goes on from there."""
        assert branch.node is not None
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
        branch.move("prefill")
        branch.place = (self._place(branch.node), branch.ticket)
        self.prefills[branch] = None
        self.want_more(branch, step)

    def want_more(self, branch: Branch, step: int) -> None:
        """More of the prompt of `branch` can be computed."""
        queue = self.short if branch.is_short else self.long
        queue.push(branch, self._policy.rank(branch.claim))
        queue.serve(branch, step)

    def fetch(self, branch: Branch) -> None:
        """The next blocks of `branch`, a prompt, are on their way."""
        self._forget(branch)
        branch.move("fetching")
        self.fetching[branch] = None

    def fetched(self, branch: Branch, step: int) -> None:
        """They are there, or won't come: what is left of the prompt is computed."""
        del self.fetching[branch]
        branch.move("prefill")
        self.prefills[branch] = None
        self.want_more(branch, step)

    def decode(self, branch: Branch) -> None:
        """`branch` has drawn its first token since it was admitted."""
        assert branch.node is not None
        self._forget(branch)
        branch.move("decode")
        branch.place = (self._place(branch.node), branch.ticket)
        self._joined.append(branch)
        self._is_stale = True

    def recompute(self, branch: Branch, step: int, *, is_short: bool) -> None:
        """`branch`, a decode, has more than one token to compute: as a prompt does."""
        branch.move("prefill")
        self._is_stale = True
        self.prefills[branch] = None
        branch.may_fetch = False
        branch.is_short = is_short
        self.want_more(branch, step)

    def remove(self, branch: Branch, phase: Phase) -> None:
        """`branch` is in `phase` now, and does not run."""
        if branch.phase == "decode":
            self._is_stale = True
        else:
            self._forget(branch)
        self.num -= 1
        self.num_groups -= len(branch.members) > 1
        branch.job.session.num_running -= 1
        branch.room = 0
        branch.move(phase)

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
            self._count()
        return self._decodes

    @property
    def by_session(self) -> dict[Session, tuple[int, Branch]]:
        """The number of decodes of each session, and the one of them that is left out first."""
        self.decodes()
        return self._by_session

    @property
    def num_wanting(self) -> int:
        """Prompts of which more could be computed."""
        return self.short.num + self.long.num

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
        for queue in (self.short, self.long):
            queue.check()
            assert set(queue) <= set(self.prefills), "more wanted of one that has all"
        for branch in self:
            node = branch.node
            assert node is not None, "a running branch without a node"
            if branch.room > node.end and branch.phase != "fetching":  # which holds it twice
                is_own = node.holders == 1 and not node.children
                assert is_own, "room in a node of others"

    def _count(self) -> None:
        groups: dict[Session, list[Branch]] = {}
        for branch in self._decodes:
            groups.setdefault(branch.job.session, []).append(branch)
        turn = self._policy.turn
        self._by_session = {
            session: (len(group), max(group, key=lambda s: (turn(s), s.ticket)))
            for session, group in groups.items()
        }

    def _forget(self, branch: Branch) -> None:
        if branch.phase == "ready":
            del self.ready[branch]
            return
        if branch.phase == "fetching":
            del self.fetching[branch]
            return
        del self.prefills[branch]
        if branch.queue is not None:
            branch.queue.remove(branch)


# Blocks for the branches that run, and the branches that give way when there are none left.
#
# In this order: the tree evicts cached blocks, replaceable capsules are given up, the running branch with
# the greatest urge to go is preempted (maybe the one that asks). It goes back to its origin, which it
# holds, and computes its own tokens again; as draws depend on (seed, position) alone, its answer does not
# change. It comes back only when all it has to compute fits, so every preemption is followed by progress,
# and no two branches preempt each other for ever.


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


class Grown(NamedTuple):
    """Whether a branch has the room that it asked for, and the branches that gave way for it.

    `must_wait`: it will have some once blocks that are on their way down have left.
    """

    has_room: bool
    preempted: Collection[Branch] = ()
    must_wait: bool = False


GROWN, _NO_ROOM = Grown(True), Grown(False)


class BlockBudget:
    """Blocks for running branches, from the tree, from `reclaimer`, and by preemption."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        tree: BranchTree,
        *,
        waiting: Waiting,
        running: Running,
        reclaimer: Reclaimer,
    ) -> None:
        self._policy = policy
        self._urge = URGES[config.victims]
        self._tree = tree
        self._waiting = waiting
        self._running = running
        self._reclaimer = reclaimer
        self._spare = max(1, int(tree.pool.num_blocks * config.watermark))
        self._step_tokens = config.max_step_tokens
        own = -(-config.max_step_tokens // tree.block_size) + config.max_rows
        self._ahead = min(own, tree.pool.num_blocks // 8)
        self._step = 0
        self.copies: dict[Branch, BlockCopy] = {}  # that this step's branches need
        self.failed: dict[Branch, PoolExhausted] = {}
        self.waiting: set[Branch] = set()  # for blocks that are leaving, in this step
        self.num_preemptions = 0
        self.is_overdue = False  # others have waited for room for too long
        self._promises: dict[Branch, int] | None = None  # blocks by running prompt, in this step
        self._num_promised = 0

    @property
    def block_size(self) -> int:
        return self._tree.block_size

    @property
    def num_free(self) -> int:
        """Blocks without an owner, with nothing cached in them."""
        return self._tree.num_free

    def begin(self, step: int) -> None:
        """A new step is planned."""
        self._step = step
        self.copies = {}
        self.failed = {}
        self.waiting = set()
        self._promises = None

    def make_room_ahead(self) -> None:
        """Have cache leave ahead of need, so that blocks are free for a step when it is planned."""
        self._tree.evict_ahead(self._ahead)

    def forget_copies(self) -> None:
        """The copies of this step were not made: a branch that needs one asks the tree again."""
        for branch in self.copies:
            branch.room = 0
        self.copies = {}

    def grow(self, branch: Branch, num_tokens: int, *, is_fetched: bool = False) -> Grown:
        """Room for the next `num_tokens` of `branch`; without it waits, is preempted, or has failed.

        `is_fetched`: as in `BranchTree.reserve`.
        """
        tree = self._tree
        preempted: tuple[Branch, ...] = ()
        while True:
            assert branch.node is not None
            try:
                node, copy = tree.reserve(branch.node, num_tokens, is_fetched=is_fetched)
                break
            except BlocksLeaving:
                self.waiting.add(branch)
                return Grown(False, preempted, must_wait=True)
            except PoolExhausted as error:
                lacking = error.fields["needed"] - tree.num_available
                if self._reclaim(lacking, ()):
                    continue
                victim = self._victim(branch)
                if victim is branch and self._running.num == 1:
                    if lacking <= 0 and self._loosen(branch):
                        continue
                    self.failed[branch] = error
                    self.copies.pop(branch, None)  # of a part that had room
                    if branch.queue is not None:
                        branch.queue.remove(branch)
                    return Grown(False, preempted)
                self.preempt(victim)
                preempted += (victim,)
                if victim is branch:
                    return Grown(False, preempted)
        branch.node = node
        branch.room = tree.room(node, num_tokens)
        if copy is not None:
            self.copies[branch] = copy
        if self._promises is not None and branch.phase == "prefill":
            self._promise(branch)
        return Grown(True, preempted) if preempted else GROWN

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
            if not running.num or (lacking <= 0 and self._fits_windows(needed)):
                try:
                    return tree.reserve(node, num_tokens, is_fetched=True).node
                except BlocksLeaving:
                    return None
                except PoolExhausted as error:
                    if self._reclaim(error.fields["needed"] - tree.num_available, ()):
                        continue
                    if running.num or self._waiting.num_queued:
                        return None
                    raise
            elif not self._reclaim(lacking, ()):
                return None

    def stretch(self, branch: Branch, num_tokens: int) -> int:
        """Room for tokens behind all of `branch`, which has a node of its own: for how many of `num_tokens`.

        Of free blocks alone: nothing is evicted for a draft, and no branch gives way.
        """
        size, found = self._tree.block_size, branch.room - branch.length
        if found < num_tokens and (free := self._tree.num_free):
            more = min(-(-(num_tokens - found) // size), free) * size
            self._tree.reserve(node_of(branch), branch.num_pending + found + more)
            branch.room += more
            found += more
        return min(found, num_tokens)

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
        branch.room = node.base + len(node.blocks) * self._tree.block_size

    def admitted(self, branch: Branch) -> None:
        """`branch` runs from now on."""
        if branch.phase == "prefill":
            self._promise(branch)

    def has_room(self, branch: Branch) -> bool:
        """Whether all that `branch` has to compute has room beside those that run, and some to spare."""
        if self._running.num == 0:
            return True  # no other branch will make room
        needed = self._needed(branch)
        return needed <= self._tree.num_available and self._fits_windows(needed)

    def make_room(self, branch: Branch) -> Grown:
        """Room for all that `branch` has to compute, reclaimed or from those that it comes before."""
        return GROWN if self._reclaim_for(branch) else self._make_way(branch)

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

    def _loosen(self, asking: Branch) -> bool:
        """Have a branch that waits, or `asking`, hold its origin no longer; False if none holds one.

        Each origin keeps a window's blocks: many together may keep all of them.
        """
        waiting = self._waiting
        for branch in (*waiting.ready, *waiting.short, *waiting.long):
            if branch.origin is not None:
                waiting.remove(branch)
                branch.let_origin_go(self._tree)
                waiting.push(branch, self._step)
                return True
        if asking.origin is None:
            return False
        asking.let_origin_go(self._tree)
        return True

    def _fits_windows(self, num_blocks: int) -> bool:
        """Whether the window groups have room for what is needed of so many blocks at a time."""
        computing = len(self._running.prefills) + 1
        own = -(-self._step_tokens // self.block_size) + len(self._running.ready)
        return self._tree.have_room(num_blocks, computing, own)

    def _make_way(self, branch: Branch) -> Grown:
        """Preempt branches that `branch` comes before, if then it fits.

        Those are branches of its own session with a lower priority, and those of sessions that have
        several running while its own has none. Neither holds the other way round, so no two branches
        preempt each other by turns.
        """
        if not self._policy.is_fair:
            return _NO_ROOM
        lower = self._lower_than(branch)
        found = sum(map(self._own_blocks, lower))
        found += self._reclaimer.num_reclaimable(self._waiting.found_nodes(branch))
        if found < self._needed(branch) - self._tree.num_available:
            return _NO_ROOM
        preempted: list[Branch] = []
        while not (has_room := self._reclaim_for(branch)) and lower:
            preempted.append(lower.pop())
            self.preempt(preempted[-1])
        return Grown(has_room, preempted)

    def preempt(self, victim: Branch) -> None:
        """`victim` gives back its own blocks and waits."""
        assert victim.node is not None
        self._running.remove(victim, "waiting")
        self._promises = None
        self.copies.pop(victim, None)
        self.failed.pop(victim, None)
        self._tree.release(victim.node)
        victim.node = None
        self._waiting.prefix_waits.land(victim)
        self._waiting.push(victim, self._step)
        for branch in self._waiting.prefix_waits.dropped(victim):
            branch.move("waiting")
            self._waiting.push(branch, self._step)
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
        """Blocks that are free when `branch` is preempted."""
        node = branch.node
        if node is None or node.holders > 1 or node.children:
            return 0
        return len(node.blocks)

    def _victim(self, asking: Branch) -> Branch:
        """The branch to preempt: of those with blocks to give, and `asking`."""
        running = [s for s in self._running if s is asking or self._own_blocks(s)]
        return max(running, key=self._urge)

    def _lower_than(self, branch: Branch) -> list[Branch]:
        """Branches that `branch` comes before, with blocks to give; the greatest urge to go last."""
        lower: list[Branch] = []
        spared: set[Session] = set()
        for victim in sorted(self._running, key=self._urge):
            if victim.job.session is branch.job.session:
                gives_way = victim.priority < branch.priority
            else:
                gives_way = branch.job.session.num_running == 0 and victim.job.session in spared
                spared.add(victim.job.session)  # one of each goes on
            if gives_way and self._own_blocks(victim):
                lower.append(victim)
        return lower
