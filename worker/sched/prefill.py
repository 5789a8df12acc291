"""Grants parts of a step to prompts, and admits the branches that it grants them to.

In the order of the policy, in chunks, as far as the step's tokens and rows go. A prompt that does not
fit in the pool holds up those behind it: a branch that overtook it would take its room again and again. One
whose next block is under way for another branch waits for that. Under the fair policy short prompts get
up to a quarter of a step before long ones that have no better claim.
"""

from operator import attrgetter
from typing import NamedTuple

from mallee.protocol.hashing import NO_HASHES
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Branch, Chunk, FairQueue
from mallee.worker.sched.budget import StepBudget
from mallee.worker.sched.fetching import Fetching
from mallee.worker.sched.policy import Policy, SchedulerConfig
from mallee.worker.sched.running import BlockBudget, Running
from mallee.worker.sched.sessions import Sessions, Tenant
from mallee.worker.sched.waiting import Waiting


class Queues(NamedTuple):
    """The branches and blocks that a plan is made from."""

    sessions: Sessions
    waiting: Waiting
    running: Running
    room: BlockBudget


class Prompts:
    """Grants parts of steps to prompts, and moves branches from `waiting` to `running` for it."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        tree: BranchTree,
        queues: Queues,
        fetching: Fetching | None = None,
    ) -> None:
        self._config = config
        self._fetching = fetching
        self._policy = policy
        self._tree = tree
        self._sessions, self._waiting, self._running, self._blocks = queues
        waiting, running = queues.waiting, queues.running
        self._queues = (running.short, running.long, waiting.short, waiting.long)
        self._turn_tokens = max(1, config.max_step_tokens // 8)  # of one, where turns are taken

    def fill(self, budget: StepBudget, but: int = 0) -> None:
        """Use up what is left of the step, but for so many rows of one token."""
        num = self._waiting.num_to_compute + self._running.num_wanting
        if num < 2 and not but:  # no two to choose between
            if num and (only := self.head(budget)) is not None:
                self.grant(budget, only, budget.tokens)
            return
        # Some may have aged here too.
        kept = min(but, max(1, budget.rows - 1), max(1, budget.tokens // 2))
        budget.tokens -= kept
        budget.rows -= kept
        self.serve_aged(budget)
        if self._policy.is_fair:
            self._fill_short(budget)
        while (head := self.head(budget)) is not None:
            self.grant(budget, head, budget.tokens)
        budget.tokens += kept
        budget.rows += kept

    def _fill_short(self, budget: StepBudget) -> None:
        """Short prompts overtake long ones, but take no more than a quarter of a step."""
        running, waiting = self._running, self._waiting
        if not (running.short.num or waiting.short.num):
            return
        if not (running.long.num or waiting.long.num):
            return
        least = budget.tokens - max(1, self._config.max_step_tokens // 4)
        while budget.tokens > max(0, least):
            short = self._first(budget, running.short, waiting.short)
            long = self._first(budget, running.long, waiting.long)
            if short is None or long is None or self._order(short)[:2] > self._order(long)[:2]:
                return
            before = waiting.long.first()
            is_behind = before is not None and self._order(before) < self._order(short)
            if before is not None and is_behind and not self._blocks.has_room(before):
                return  # or it would never have any
            self.grant(budget, short, budget.tokens - max(0, least))

    def serve_aged(self, budget: StepBudget) -> None:
        """Give a part of the step to every prompt that has gone unserved for too long."""
        for queue in self._queues:
            while queue.num and budget.tokens > 0:
                aged = self.most_aged(queue, budget.step)
                if aged is None or not self._can_grant(budget, aged):
                    break
                self.grant(budget, aged, self.turn_tokens(budget.tokens))

    def turn_tokens(self, tokens: int) -> int:
        """The part of `tokens` that one prompt gets where prompts take turns."""
        return min(self._turn_tokens, tokens) if self._config.chunked else tokens

    def _can_grant(self, budget: StepBudget, branch: Branch) -> bool:
        if budget.is_full or (branch.phase == "waiting" and not budget.may_admit):
            return False
        return branch in budget.granted or (budget.rows > 0 and budget.chunks > 0)

    def head(self, budget: StepBudget) -> Branch | None:
        """The prompt that is to be computed next, of those that run or may be admitted."""
        return self._first(budget, *self._queues) if budget.tokens > 0 else None

    def head_of(self, budget: StepBudget, tenant: Tenant) -> Branch | None:
        """The same of those of `tenant`."""
        if budget.tokens <= 0:
            return None
        return self._first(budget, *self._queues, tenant=tenant)

    def _first(
        self, budget: StepBudget, *queues: FairQueue, tenant: Tenant | None = None
    ) -> Branch | None:
        """The prompt among `queues`, or those of `tenant` there, that is to be computed next."""
        best: Branch | None = None
        for queue in queues:
            if not queue.num:
                continue
            first = queue.first() if tenant is None else queue.first_of(tenant)
            if first is None or not self._can_grant(budget, first):
                continue
            if best is None or self._order(first) < self._order(best):
                best = first
        return best

    def _order(self, branch: Branch) -> tuple[tuple[float, ...], float, int]:
        return (self._sessions.order(branch.payer), branch.rank, branch.ticket)

    def grant(self, budget: StepBudget, branch: Branch, limit: int) -> None:
        """Plan up to `limit` more tokens of `branch`, if it can be admitted and has room."""
        if branch.phase == "waiting" and not self._try_admit(budget, branch):
            return
        fetching = self._fetching
        if fetching is not None and branch.may_fetch and fetching.try_begin(budget, branch):
            return
        have = budget.granted.get(branch, 0)
        pending = branch.num_pending
        n = min(pending - have, limit)
        if n < pending and not self._config.chunked:
            budget.is_full = True  # it runs whole or not at all
            return
        grown = self._blocks.grow(branch, have + n)
        budget.note(grown)
        if not grown.has_room:
            return
        if not have:
            budget.rows -= 1
            budget.chunks -= 1
        budget.granted[branch] = have + n
        budget.tokens -= n
        self._sessions.charge(branch.payer, n)
        assert branch.queue is not None, "it wants no more"
        branch.queue.serve(branch, budget.step)
        if have + n == pending:
            branch.queue.remove(branch)

    def _try_admit(self, budget: StepBudget, branch: Branch) -> bool:
        awaited = self._waiting.awaited(branch)
        if awaited is not None:
            self._waiting.remove(branch)
            self._waiting.hold(branch, *awaited)
            return False
        grown = self._blocks.make_room(branch)
        budget.drop(grown.preempted)
        if not grown.has_room:
            budget.may_admit = False  # no branch overtakes it
            return False
        self.admit(branch, budget.step)
        return True

    def admit(self, branch: Branch, step: int) -> None:
        """`branch` runs from now on, from the end of what is found of it."""
        self._waiting.remove(branch)
        tree, size = self._tree, self._tree.block_size
        hashes, held = NO_HASHES, 0
        if branch.logits is None:
            hashes, held = self._waiting.found(branch)
        origin = branch.origin
        if origin is not None and held * size <= origin.end:
            branch.node = origin
            tree.hold(origin)
        else:
            branch.node = tree.attach(hashes, branch.job.salt, held)
        if branch.attached_tokens is None:
            branch.attached_tokens = branch.node.end
        self._waiting.prefix_waits.depart(hashes[branch.node.end // size :], branch)
        self._running.admit(branch, step)
        self._blocks.admitted(branch)

    # Ageing

    def is_aged(self, branch: Branch, step: int) -> bool:
        """Whether `branch` is served in `step`, so that all like it are served within `ageing_steps`."""
        bound = self._config.ageing_steps
        if not bound:
            return False
        ahead = (self._running.num + self._waiting.num) // self._config.max_rows
        return step - branch.last_step >= max(1, bound - 2 - ahead)

    def have_aged(self, step: int) -> bool:
        """Whether any prompt is aged in `step`."""
        return any(self.most_aged(queue, step) is not None for queue in self._queues)

    def most_aged(self, queue: FairQueue, step: int) -> Branch | None:
        oldest = queue.oldest()
        return oldest if oldest is not None and self.is_aged(oldest, step) else None

    def chunks(self, budget: StepBudget) -> list[Chunk]:
        """The granted chunks, in the order of a batch."""
        chunks: list[Chunk] = []
        granted = [s for s in budget.granted if s not in self._blocks.failed]
        if len(granted) > 1:
            granted.sort(key=attrgetter("place"))
        for branch in granted:
            assert branch.node is not None
            n = budget.granted[branch]
            is_last = n == branch.num_pending
            chunks.append(Chunk(branch, branch.pending(n), branch.node.end, is_last))
        return chunks
