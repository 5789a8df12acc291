"""Chooses what one step computes, within its budget of tokens and rows.

Decodes come first, one token each, then prompts (`prefill.py`). Branches whose next logits are already
there (forks of a capsule) need no pass: a step that finds some draws their first tokens and does nothing
else, so that they do not wait behind a long chunk; two such steps never follow each other while others
wait to compute.

When all decodes have room beside the prompts that wait (nearly always), nothing is compared: they all
run. When not, rows go one by one to the session whose turn it is, and in it to the branch that the
policy puts first; one left out keeps its blocks. A branch that was not served for too long goes before all.
"""

from collections.abc import Iterator
from operator import attrgetter

from mallee.worker.sched.branch import Branch, FairQueue, Plan
from mallee.worker.sched.budget import StepBudget
from mallee.worker.sched.policy import Policy, SchedulerConfig
from mallee.worker.sched.prefill import Prompts, Queues
from mallee.worker.sched.running import GROWN
from mallee.worker.sched.sessions import Session, Tenant, Turns


class Planner:
    """Plans steps: decodes here, prompts in `prompts`, within the same tokens and rows."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        queues: Queues,
        prompts: Prompts,
    ) -> None:
        self._config = config
        self._policy = policy
        self._sessions, self._waiting, self._running, self._blocks = queues
        self._prompts = prompts
        self._drew_only = False
        self._left_decodes_out = False
        self._left_out: Turns | None = None  # sessions whose decodes were left out of the last step

    def plan(self, step: int) -> Plan:
        """The next step. Room for every chunk is reserved in the tree."""
        config, running, prompts, room = self._config, self._running, self._prompts, self._blocks
        self._left_out = None
        room.begin(step)
        self._waiting.update_claims()
        may_admit = running.num == 0 or (config.continuous and not room.is_overdue)
        most = config.max_chunks or config.max_rows
        budget = StepBudget(step, config.max_step_tokens, config.max_rows, most, may_admit)
        self._admit_ready(budget)
        ready = list(running.ready)
        if ready and not (self._drew_only and self._must_compute):
            self._drew_only = True
            return Plan([], [], ready, [], [])
        self._drew_only = False
        # Prompts that can't be cut would wait for ever behind decodes: the two take turns.
        if self._policy.prefill_first or not (config.chunked or self._left_decodes_out):
            prompts.fill(budget, but=len(self._aged_decodes(running.decodes(), step)))
            decodes = self._fill_decodes(budget)
        else:
            decodes = self._fill_decodes(budget)
            prompts.fill(budget)
        if room.failed or budget.has_left_out:
            out = room.failed.keys() | room.waiting
            decodes = [s for s in decodes if s.phase == "decode" and s not in out]
            ready = list(running.ready)
        chunks = prompts.chunks(budget) if budget.granted else []
        copies = list(room.copies.values()) if room.copies else []
        failed = list(room.failed.items()) if room.failed else []
        self._sessions.close(self._lowest_held_back(), self._lowest_held_back_of)
        return Plan(decodes, chunks, ready, copies, failed, budget.begins, budget.tokens)

    @property
    def _must_compute(self) -> bool:
        return bool(self._waiting.num_to_compute or self._running.num > len(self._running.ready))

    # Steps ahead

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
        self._drew_only = self._left_decodes_out = False
        self._sessions.close(None, self._lowest_held_back_of)

    # First tokens

    def _admit_ready(self, budget: StepBudget) -> None:
        """Branches that need no pass join, while there are rows for them, or they go before others."""
        queue, running, prompts = self._waiting.ready, self._running, self._prompts
        if not queue.num or not budget.may_admit:
            return
        preempted: list[Branch] = []
        kept = 1 if self._waiting.num_to_compute else 0  # rows, for the oldest that must compute
        while len(running.ready) < self._config.max_rows:
            first = prompts.most_aged(queue, budget.step) or queue.first()
            if first is None:
                break
            has_row = running.num < self._config.max_rows - kept
            if not (has_row or prompts.is_aged(first, budget.step) or self._displaces(first)):
                break
            grown = self._blocks.make_room(first)
            preempted += grown.preempted
            if not grown.has_room:
                budget.may_admit = False
                break
            prompts.admit(first, budget.step)
            self._sessions.charge(first.job.session, 1)
        budget.drop(preempted)

    # Decodes

    def _fill_decodes(self, budget: StepBudget) -> list[Branch]:
        """One token for each decode, or for those whose turn it is."""
        decodes = all_decodes = self._running.decodes()
        if not decodes:
            self._left_decodes_out = False
            return decodes
        room = min(budget.rows, budget.tokens)
        most = min(room, self._config.max_decodes or room)
        if len(decodes) > most or self._is_contended(budget, room - len(decodes)):
            decodes = self._choose(budget, decodes, most)
        elif self._waiting.num or self._running.prefills:  # else none is held back
            for session, (num, _) in self._running.by_session.items():
                self._sessions.charge(session, num)
        step, grow = budget.step, self._blocks.grow
        for s in decodes:
            s.last_step = step
            if s.origin_len + len(s.tokens) > s.room and s.node is not None:  # else preempted
                grown = grow(s, 1)
                if grown is not GROWN:
                    budget.note(grown)
        budget.tokens -= len(decodes)
        budget.rows -= len(decodes)
        self._left_decodes_out = len(decodes) < len(all_decodes)
        return decodes

    def _is_contended(self, budget: StepBudget, left: int) -> bool:
        """Whether a prompt takes the place of a decode, though all of them fit and `left` beside them.

        Decodes go first until their session is half a step ahead of one whose prompts wait.
        """
        if left > 0 and (self._sessions.num_live == 1 or not self._policy.is_fair):
            return False
        head = self._prompts.head(budget)
        if head is None:
            return False
        if left == 0:
            return self._prompts.have_aged(budget.step) or (
                self._policy.is_fair
                and any(
                    self._goes_before(rival, last)
                    for session, (_, last) in self._running.by_session.items()
                    for rival in self._rivals(budget, head, session)
                )
            )
        most = self._config.max_step_tokens / 2
        return any(
            self._sessions.is_ahead(session, rival.payer, most)
            for session in self._running.by_session
            for rival in self._rivals(budget, head, session)
        )

    def _rivals(self, budget: StepBudget, head: Branch, session: Session) -> Iterator[Branch]:
        """The prompts that may take places of decodes of `session`: the first of all, and of its tenant."""
        yield head
        tenant = session.tenant
        if tenant.num_live > 1 and tenant is not head.payer.tenant:
            own = self._prompts.head_of(budget, tenant)
            if own is not None:
                yield own

    def _displaces(self, branch: Branch) -> bool:
        """Whether `branch`, which waits, goes before any of the decodes."""
        if not self._policy.is_fair:
            return False
        return any(self._goes_before(branch, last) for _, last in self._running.by_session.values())

    def _choose(self, budget: StepBudget, decodes: list[Branch], most: int) -> list[Branch]:
        """At most `most` of `decodes`, in their order: there is no room for all, or for prompts."""
        prompts, takes_turns = self._prompts, self._policy.is_fair and self._config.chunked
        prompts.serve_aged(budget)
        most = min(most, budget.rows, budget.tokens)
        chosen = set(self._aged_decodes(decodes, budget.step)[:most])
        left: dict[Session, list[Branch]] = {}
        for branch in sorted(decodes, key=self._turn, reverse=True):
            if branch not in chosen:
                left.setdefault(branch.job.session, []).append(branch)
        for branch in chosen:
            self._sessions.charge(branch.job.session, 1)
        turns = self._left_out = Turns(self._sessions)
        for each in left:
            turns.push(each)
        while len(chosen) < min(most, budget.rows, budget.tokens):
            if (session := turns.first()) is None:
                break
            head = prompts.head(budget) if takes_turns else None
            rivals = () if head is None else self._rivals(budget, head, session)
            first = next((r for r in rivals if self._goes_before(r, left[session][-1])), None)
            if first is not None:
                prompts.grant(budget, first, prompts.turn_tokens(budget.tokens - len(chosen)))
                continue
            chosen.add(left[session].pop())
            self._sessions.charge(session, 1)
            if not left[session]:
                turns.drop_first_of(session.tenant)
        return [s for s in decodes if s in chosen and s.phase == "decode"]

    def _turn(self, decode: Branch) -> tuple[float, int]:
        return (self._policy.turn(decode), decode.ticket)

    def _aged_decodes(self, decodes: list[Branch], step: int) -> list[Branch]:
        aged = [s for s in decodes if self._prompts.is_aged(s, step)]
        return sorted(aged, key=attrgetter("last_step", "ticket"))

    def _goes_before(self, one: Branch, decode: Branch) -> bool:
        """Whether `one`, which waits, takes the place of `decode`: equal claims change no places."""
        ours, theirs = one.payer, decode.job.session
        if ours is theirs:
            return one.rank < self._policy.turn(decode)
        return self._sessions.is_ahead(theirs, ours)

    def _lowest_held_back(self) -> float | None:
        """The least tag of the tenants that had more to do than this step has room for."""
        waiting, running = self._waiting, self._running
        left_out = None if self._left_out is None else self._left_out.first()
        if not (waiting.num_queued or running.num_wanting or left_out is not None):
            return None
        tags = [tag for queue in self._held_back if (tag := queue.lowest_tag()) is not None]
        if left_out is not None:
            tags.append(left_out.tenant.tag)
        return min(tags, default=None)

    def _lowest_held_back_of(self, tenant: Tenant) -> float | None:
        """The least tag of such sessions of `tenant`."""
        tags = [b.payer.tag for q in self._held_back if (b := q.first_of(tenant)) is not None]
        left_out = None if self._left_out is None else self._left_out.first_of(tenant)
        if left_out is not None:
            tags.append(left_out.tag)
        return min(tags, default=None)

    @property
    def _held_back(self) -> list[FairQueue]:
        """The queues that have branches, none of which got all that it wanted."""
        waiting, running = self._waiting, self._running
        queues = (waiting.ready, waiting.short, waiting.long, running.short, running.long)
        return [queue for queue in queues if queue.num]
