"""Chooses what one step computes, within its budget of tokens and rows, and admits branches for it.

Branches whose next logits are already there (forks of a capsule) need no pass: a step that finds some draws
their first tokens and does nothing else, so that they do not wait behind a long chunk; two such steps never
follow each other while others wait to compute.

Decodes come next, one token each. When all have room beside the prompts that wait (nearly always), nothing
is compared: they all run. When not, rows go one by one to the session whose turn it is, and in it to the
branch that the order puts first; one left out keeps its blocks.

Prompts share what is left, in chunks. One that does not fit in the pool holds up those behind it: a branch
that overtook it would take its room again and again. One whose next block is under way for another branch
waits for that. Short prompts get up to a quarter of a step before long ones that have no better claim. A
branch that was not served for too long goes before all.
"""

import heapq
from collections.abc import Iterator
from operator import attrgetter

from mallee.protocol.hashing import NO_HASHES
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Branch, node_of
from mallee.worker.sched.fetching import Fetching
from mallee.worker.sched.plan import Chunk, Plan, StepBudget
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.sched.queue import Claim, FairQueue
from mallee.worker.sched.running import BlockBudget, Running
from mallee.worker.sched.sessions import Account, Sessions
from mallee.worker.sched.waiting import Waiting


class Planner:
    """Plans steps, and moves branches from `waiting` to `running` for them."""

    def __init__(
        self,
        config: SchedulerConfig,
        tree: BranchTree,
        *,
        sessions: Sessions,
        waiting: Waiting,
        running: Running,
        room: BlockBudget,
        fetching: Fetching | None = None,
    ) -> None:
        self._config = config
        self._order = config.order
        self._tree = tree
        self._sessions = sessions
        self._waiting = waiting
        self._running = running
        self._blocks = room
        self._fetching = fetching
        self._turn_tokens = max(
            1, config.max_step_tokens // 8
        )  # of one prompt, where turns are taken
        self._drew_only = False
        self._left_out: set[Branch] = set()  # decodes, in the last step

    def plan(self, step: int) -> Plan:
        """The next step. Room for every chunk is reserved in the tree."""
        config, running, room = self._config, self._running, self._blocks
        may_admit = running.num == 0 or (config.continuous and not room.is_overdue)
        most = config.max_chunks or config.max_rows
        budget = StepBudget(step, config.max_step_tokens, config.max_rows, most, may_admit)
        room.begin(budget)
        if self._waiting.ready.members and may_admit:
            self._admit_ready(budget)
        ready = list(running.ready)
        if ready:
            must_compute = self._waiting.num_to_compute or running.num > len(ready)
            if not (self._drew_only and must_compute):
                self._drew_only = True
                return Plan([], [], ready, [], [])
        self._drew_only = False
        # Prompts that can't be cut would wait for ever behind decodes: the two take turns.
        if self._order.prompts_first or not (config.chunked or self._left_out):
            self._fill_prompts(budget, but=len(self._aged_decodes(running.decodes(), step)))
            decodes = self._fill_decodes(budget)
        else:
            decodes = self._fill_decodes(budget)
            self._fill_prompts(budget)
        if budget.failed or budget.has_left_out:
            out = budget.failed.keys() | budget.leaving
            decodes = [s for s in decodes if s.phase == "decode" and s not in out]
            ready = list(running.ready)
        chunks = self._chunks(budget) if budget.granted else []
        copies = list(budget.copies.values()) if budget.copies else []
        failed = list(budget.failed.items()) if budget.failed else []
        self._sessions.advance(self._lowest_held_back)
        return Plan(
            decodes=decodes,
            chunks=chunks,
            ready=ready,
            copies=copies,
            failed=failed,
            begins=budget.begins,
            tokens_left=budget.tokens,
        )

    @property
    def max_decodes(self) -> int:
        """The decodes that a step has room for."""
        most = min(self._config.max_rows, self._config.max_step_tokens)
        return min(most, self._config.max_decodes or most)

    @property
    def is_steady(self) -> bool:
        """Whether all that runs decodes, and a step has room for all of it; no branch waits."""
        running = self._running
        is_decoding = not (running.ready or running.prefills or running.fetching)
        return is_decoding and 0 < running.num <= self.max_decodes

    def decoded(self, step: int) -> None:
        """Steady steps are over, `step` is the last: make room for the tokens of their decodes."""
        grow = self._blocks.grow
        for s in self._running.decodes():
            s.last_step = step
            if s.origin_len + len(s.tokens) > s.room:
                grow(s, 1)
        self._drew_only, self._left_out = False, set()
        self._sessions.advance(self._lowest_held_back)

    # First tokens

    def _admit_ready(self, budget: StepBudget) -> None:
        """Branches that need no pass join, while there are rows for them, or they go before others."""
        queue, running = self._waiting.ready, self._running
        kept = 1 if self._waiting.num_to_compute else 0  # rows, for the oldest that must compute
        while len(running.ready) < self._config.max_rows:
            first = self._most_aged(queue, budget.step)
            if first is None:
                if (claim := queue.first()) is None:
                    break
                has_row = running.num < self._config.max_rows - kept
                if not (has_row or self._displaces(claim)):
                    break
                first = claim.branch
            if not self._blocks.make_room(first):
                budget.may_admit = False
                break
            self.admit(first, budget.step)
            self._sessions.charge(first.job.session, 1)

    def _displaces(self, claim: Claim) -> bool:
        """Whether a branch that waits goes before any of the decodes."""
        payer, rank = claim.payer, self._order.rank
        return any(
            claim.rank < rank(last) if session is payer else session.is_ahead(payer)
            for session, (_, last) in self._running.by_session.items()
        )

    # Decodes

    def _fill_decodes(self, budget: StepBudget) -> list[Branch]:
        """One token for each decode, or for those whose turn it is."""
        decodes = self._running.decodes()
        if self._left_out:
            self._left_out = set()
        if not decodes:
            return decodes
        room = min(budget.rows, budget.tokens)
        most = min(room, self._config.max_decodes or room)
        if len(decodes) > most or self._is_contended(budget, room - len(decodes)):
            every, decodes = decodes, self._choose(budget, decodes, most)
            self._left_out = set(every).difference(decodes)
        elif self._waiting.num or self._running.prefills:  # else none is held back
            for session, (num, _) in self._running.by_session.items():
                self._sessions.charge(session, num)
        step, grow = budget.step, self._blocks.grow
        for s in decodes:
            s.last_step = step
            if s.origin_len + len(s.tokens) > s.room and s.node is not None:  # else preempted
                grow(s, 1)
        budget.tokens -= len(decodes)
        budget.rows -= len(decodes)
        return decodes

    def _is_contended(self, budget: StepBudget, left: int) -> bool:
        """Whether a prompt takes the place of a decode, though all of them fit and `left` beside them.

        Decodes go first until their session is half a step ahead of one whose prompts wait.
        """
        if left > 0 and self._sessions.num_live == 1:
            return False
        head = self._first(budget, *self._waiting.prompts)
        if head is None:
            return False
        if left == 0:
            return any(
                self._most_aged(queue, budget.step) for queue in self._waiting.prompts
            ) or any(
                self._goes_before(rival, last)
                for session, (_, last) in self._running.by_session.items()
                for rival in self._rivals(budget, head, session)
            )
        most = self._config.max_step_tokens / 2
        return any(
            session.is_ahead(rival.payer, most)
            for session in self._running.by_session
            for rival in self._rivals(budget, head, session)
        )

    def _rivals(self, budget: StepBudget, head: Claim, session: Account) -> Iterator[Claim]:
        """The prompts that may take places of decodes of `session`: the first of all, and of its tenant."""
        yield head
        tenant = session.parent
        if tenant.num_members > 1 and tenant not in (self._sessions.root, head.payer.parent):
            own = self._first(budget, *self._waiting.prompts, of=tenant)
            if own is not None:
                yield own

    def _choose(self, budget: StepBudget, decodes: list[Branch], most: int) -> list[Branch]:
        """At most `most` of `decodes`, in their order: there is no room for all, or for prompts."""
        self._serve_aged(budget)
        most = min(most, budget.rows, budget.tokens)
        chosen = set(self._aged_decodes(decodes, budget.step)[:most])
        for branch in chosen:
            self._sessions.charge(branch.job.session, 1)
        left: dict[Account, list[Branch]] = {}
        turn = self._order.turn
        for branch in sorted(decodes, key=lambda s: (turn(s), s.ticket), reverse=True):
            if branch not in chosen:
                left.setdefault(branch.job.session, []).append(branch)
        turns = [(session.order, session) for session in left]
        heapq.heapify(turns)
        while turns and len(chosen) < min(most, budget.rows, budget.tokens):
            order, session = turns[0]
            if order != session.order:  # it only grows
                heapq.heapreplace(turns, (session.order, session))
                continue
            head = self._first(budget, *self._waiting.prompts) if self._config.chunked else None
            rivals = () if head is None else self._rivals(budget, head, session)
            first = next((r for r in rivals if self._goes_before(r, left[session][-1])), None)
            if first is not None:
                limit = self._one_turn(budget.tokens - len(chosen))
                self._grant(budget, first.branch, first.payer, limit)
                continue
            chosen.add(left[session].pop())
            self._sessions.charge(session, 1)
            if not left[session]:
                heapq.heappop(turns)
        return [s for s in decodes if s in chosen and s.phase == "decode"]

    def _aged_decodes(self, decodes: list[Branch], step: int) -> list[Branch]:
        aged = [s for s in decodes if self._is_aged(s, step)]
        return sorted(aged, key=attrgetter("last_step", "ticket"))

    def _goes_before(self, claim: Claim, decode: Branch) -> bool:
        """Whether a prompt takes the place of `decode`: equal claims change no places."""
        ours, theirs = claim.payer, decode.job.session
        if ours is theirs:
            return claim.rank < self._order.rank(decode)
        return theirs.is_ahead(ours)

    # Prompts

    def _fill_prompts(self, budget: StepBudget, but: int = 0) -> None:
        """Use up what is left of the step, but for so many rows of one token."""
        num = self._waiting.num_prompts
        if num < 2 and not but:  # no two to choose between
            if num and (only := self._first(budget, *self._waiting.prompts)) is not None:
                self._grant(budget, only.branch, only.payer, budget.tokens)
            return
        # Some may have aged here too.
        kept = min(but, max(1, budget.rows - 1), max(1, budget.tokens // 2))
        budget.tokens -= kept
        budget.rows -= kept
        self._serve_aged(budget)
        if self._order.is_fair:
            self._fill_short(budget)
        while (head := self._first(budget, *self._waiting.prompts)) is not None:
            self._grant(budget, head.branch, head.payer, budget.tokens)
        budget.tokens += kept
        budget.rows += kept

    def _fill_short(self, budget: StepBudget) -> None:
        """Short prompts overtake long ones, but take no more than a quarter of a step."""
        waiting = self._waiting
        if not (waiting.running_short.members or waiting.short.members):
            return
        if not (waiting.running_long.members or waiting.long.members):
            return
        least = max(0, budget.tokens - max(1, self._config.max_step_tokens // 4))
        while budget.tokens > least:
            short = self._first(budget, waiting.running_short, waiting.short)
            long = self._first(budget, waiting.running_long, waiting.long)
            if short is None or long is None or short.order[:2] > long.order[:2]:
                return
            before = waiting.long.first()
            is_behind = before is not None and before.order < short.order
            if before is not None and is_behind and not self._blocks.has_room(before.branch):
                return  # or it would never have any
            self._grant(budget, short.branch, short.payer, budget.tokens - least)

    def _first(
        self, budget: StepBudget, *queues: FairQueue, of: Account | None = None
    ) -> Claim | None:
        """The prompt among `queues`, or those of a tenant there, that is to be computed next."""
        best: Claim | None = None
        if budget.tokens > 0:
            for queue in queues:
                first = queue.first(of) if queue.members else None
                if first is None or not budget.can_grant(first.branch):
                    continue
                if best is None or first.order < best.order:
                    best = first
        return best

    def _one_turn(self, tokens: int) -> int:
        """The part of `tokens` that one prompt gets where prompts take turns."""
        return min(self._turn_tokens, tokens) if self._config.chunked else tokens

    def _grant(self, budget: StepBudget, branch: Branch, payer: Account, limit: int) -> None:
        """Plan up to `limit` more tokens of `branch`, if it can be admitted and has room."""
        if branch.phase == "waiting" and not self._try_admit(budget, branch):
            return
        fetching = self._fetching
        is_scored = branch.job.is_scoring
        may_fetch = branch.may_fetch and not is_scored
        if fetching is not None and may_fetch and fetching.try_begin(budget, branch):
            return
        have = budget.granted.get(branch, 0)
        pending = branch.num_pending
        n = min(pending - have, limit)
        if n < pending and not self._config.chunked:
            budget.is_full = True  # it runs whole or not at all
            return
        most = n
        if is_scored and self._config.chunked:  # each of its tokens has logits, as a row has
            n = min(n, budget.rows)
        if self._tree.sides:
            n = self._up_to_place(branch, have + n) - have
        is_cut = n < most
        if is_cut and n <= 0:
            self._waiting.queue_of(branch).remove(branch)  # until the chunk that it has is computed
            return
        if not self._blocks.grow(branch, have + n):
            return
        if is_scored:
            budget.rows = max(0, budget.rows - n)
        elif not have:
            budget.rows -= 1
        if not have:
            budget.chunks -= 1
        budget.granted[branch] = have + n
        budget.tokens -= n
        self._sessions.charge(payer, n)
        queue = self._waiting.queue_of(branch)
        queue.serve(branch, budget.step)
        if is_cut or have + n == pending:
            queue.remove(branch)

    def _up_to_place(self, branch: Branch, num_tokens: int) -> int:
        """So many of the next `num_tokens` of `branch` that others can go on from where they end.

        These are the places of `BranchTree.chunk`, and the next one that a branch waits for.
        """
        begin = node_of(branch).end
        awaited = self._waiting.gates.next_awaited(branch)
        if awaited is not None and begin < awaited < begin + num_tokens:
            branch.places.setdefault(awaited, "awaited")
            num_tokens = awaited - begin
        return self._tree.chunk(begin, num_tokens, branch.places)

    def _try_admit(self, budget: StepBudget, branch: Branch) -> bool:
        awaited = self._waiting.awaited(branch)
        if awaited is not None:
            self._waiting.remove(branch)
            self._waiting.hold(branch, *awaited)
            self._stop_at(budget, *awaited)
            return False
        if not self._blocks.make_room(branch):
            budget.may_admit = False  # no branch overtakes it
            return False
        self.admit(branch, budget.step)
        return True

    def _stop_at(self, budget: StepBudget, producer: Branch, num_tokens: int) -> None:
        """Have `producer` leave a state after `num_tokens`, if its chunk of this step would pass them."""
        if self._tree.sides and producer in budget.granted:
            begin = node_of(producer).end
            if 0 < num_tokens - begin < budget.granted[producer]:
                producer.places.setdefault(num_tokens, "awaited")
                num = self._tree.chunk(begin, num_tokens - begin, producer.places)
                budget.granted[producer] = num

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
        begin = branch.node.end
        if branch.attached_tokens is None:
            branch.attached_tokens = begin
        if tree.sides:
            branch.places = tree.places(hashes, begin, branch.length, branch.job.places)
        self._waiting.gates.depart(hashes[begin // size :], branch)
        self._running.admit(branch, step)
        self._blocks.admitted(branch)

    def _chunks(self, budget: StepBudget) -> list[Chunk]:
        """The granted chunks, in the order of a batch."""
        granted = [s for s in budget.granted if s not in budget.failed]
        if len(granted) > 1:
            granted.sort(key=attrgetter("place"))
        chunks: list[Chunk] = []
        for branch in granted:
            assert branch.node is not None
            n = budget.granted[branch]
            is_last = n == branch.num_pending
            chunks.append(Chunk(branch, branch.pending(n), branch.node.end, is_last))
        return chunks

    # Ageing

    def _is_aged(self, branch: Branch, step: int) -> bool:
        """Whether `branch` is served in `step`, so that all like it are served within `ageing_steps`."""
        bound = self._config.ageing_steps
        if not bound:
            return False
        ahead = (self._running.num + self._waiting.num) // self._config.max_rows
        return step - branch.last_step >= max(1, bound - 2 - ahead)

    def _most_aged(self, queue: FairQueue, step: int) -> Branch | None:
        oldest = queue.oldest
        return oldest if oldest is not None and self._is_aged(oldest, step) else None

    def _serve_aged(self, budget: StepBudget) -> None:
        """Give a part of the step to every prompt that has gone unserved for too long."""
        for queue in self._waiting.prompts:
            while queue.members and budget.tokens > 0:
                aged = self._most_aged(queue, budget.step)
                if aged is None or not budget.can_grant(aged):
                    break
                self._grant(budget, aged, aged.job.session, self._one_turn(budget.tokens))

    # Shares

    def _lowest_held_back(self, of: Account) -> float | None:
        """The least virtual time of the accounts below `of` that had more to do than this step has room for.

        Nothing in a queue got all that it wanted.
        """
        lowest = self._waiting.lowest(of)
        sessions = {branch.job.session for branch in self._left_out}
        root = self._sessions.root
        accounts = [s.tenant if of is root else s for s in sessions if of in (root, s.parent)]
        levels = [account.level for account in accounts]
        return min(levels if lowest is None else [lowest, *levels], default=None)
