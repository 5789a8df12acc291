"""Branches that want to be served, in fair order: sessions by virtual time, then by rank and arrival.

Heaps whose entries may be out of date: an account's virtual time only grows while it is in one, so an old
entry comes up too early, never too late; and one of a branch that left, or changed its rank, is dropped when
it comes up. So nothing is searched: O(log n) a change.

A branch stands in the queue by *claims*: its own, and one for each branch that waits for its tokens and has
the better claim. It is served by the first that comes up, whose session pays. Thus a producer goes as early
as the best of those that wait for it, and nothing is to be updated when virtual times change.
"""

import heapq
from typing import TypeAlias

from mallee.worker.sched.branch import Branch
from mallee.worker.sched.gates import Gates
from mallee.worker.sched.policy import Order
from mallee.worker.sched.sessions import Account

Claim: TypeAlias = tuple[float, int, int, Branch, Branch]
"""The rank of the last branch, the number of the one that is served for it, a serial number, the two."""

_MIN_LIMIT = 64


class FairQueue:
    """`members` are the branches that are queued; the one that was not served for longest is first."""

    __slots__ = (
        "_claims",
        "_gates",
        "_limit",
        "_num_claims",
        "_order",
        "_root",
        "_turns",
        "members",
    )

    def __init__(self, order: Order, root: Account, gates: Gates) -> None:
        self._order = order
        self._root = root
        self._gates = gates
        self._claims: dict[Account, list[Claim]] = {}  # of each session
        self._turns: dict[Account, list[tuple[float, int, Account]]] = {}  # accounts, by parent
        self._num_claims = 0  # ever
        self._limit = _MIN_LIMIT  # of that number, when claims out of date are dropped
        self.members: dict[Branch, None] = {}

    def extend(self, branches: list[Branch], step: int) -> None:
        """Queue new branches of one job, which are of one rank, by arrival, from `step` on."""
        serial, rank = self._num_claims, self._order.rank(branches[0])
        for branch in branches:
            branch.entry = serial
            branch.last_step = step
        claims = [(rank, branch.ticket, serial, branch, branch) for branch in branches]
        heap = self._heap(branches[0].job.session)
        if not heap:
            heap.extend(claims)  # in order already
        elif len(heap) < len(claims):
            heap.extend(claims)
            heapq.heapify(heap)
        else:
            for claim in claims:
                heapq.heappush(heap, claim)
        self._num_claims += len(branches)
        self.members.update(dict.fromkeys(branches))

    def push(self, branch: Branch, step: int) -> None:
        """Queue `branch`, which begins to wait in `step`."""
        assert branch not in self.members, f"branch {branch.ticket} is queued already"
        branch.entry = self._num_claims
        branch.last_step = step
        self.members[branch] = None
        self._claim(branch, branch)
        self.claim(branch, self._gates.waiters(branch))

    def claim(self, branch: Branch, waiters: list[Branch]) -> None:
        """`branch`, which is queued here, goes by the claims of `waiters` too, where they are better."""
        rank, session = self._order.rank, branch.job.session
        for waiter in waiters:
            if waiter.job.session is not session or rank(waiter) < rank(branch):
                self._claim(branch, waiter)

    def rerank(self, branch: Branch) -> None:
        """The priority of `branch`, which is queued here, has changed."""
        self._claim(branch, branch)

    def _claim(self, branch: Branch, by: Branch) -> None:
        self._num_claims += 1
        claim = (self._order.rank(by), branch.ticket, self._num_claims, branch, by)
        heapq.heappush(self._heap(by.job.session), claim)

    def _heap(self, session: Account) -> list[Claim]:
        if self._num_claims > self._limit:
            self._drop_untrue()
        heap = self._claims.get(session)
        if heap is None:
            heap = self._claims[session] = []
            self._give_turn(session)
        return heap

    def _give_turn(self, account: Account) -> None:
        parent = account.parent
        turns = self._turns.get(parent)
        if turns is None:
            turns = self._turns[parent] = []
            if parent is not self._root:
                self._give_turn(parent)
        heapq.heappush(turns, (account.level, account.number, account))

    def _drop_untrue(self) -> None:
        num = 0
        for heap in self._claims.values():
            heap[:] = [claim for claim in heap if self._is_true(claim)]
            heapq.heapify(heap)
            num += len(heap)
        self._limit = self._num_claims + num + _MIN_LIMIT

    def serve(self, branch: Branch, step: int) -> None:
        """`branch`, which is queued here, is served in `step`."""
        branch.last_step = step
        del self.members[branch]
        self.members[branch] = None

    def remove(self, branch: Branch) -> None:
        """`branch` leaves the queue."""
        del self.members[branch]
        if not self.members:
            self._claims.clear()
            self._turns.clear()

    def first(self, of: Account | None = None) -> Branch | None:
        """The branch to be served next, of all or of a tenant's; it gets its claim's payer and rank."""
        turns = self._turns.get(of or self._root)
        while turns:
            tag, number, account = turns[0]
            level = account.level
            if tag < level:
                heapq.heapreplace(turns, (level, number, account))
                continue
            heap = self._claims.get(account)
            found = self.first(account) if heap is None else self._first_true(heap)
            if found is not None:
                return found
            heapq.heappop(turns)
            del (self._turns if heap is None else self._claims)[account]
        return None

    def _first_true(self, heap: list[Claim]) -> Branch | None:
        while heap:
            claim = heap[0]
            if self._is_true(claim):
                _, _, _, branch, by = claim
                branch.payer, branch.rank = by.job.session, claim[0]
                return branch
            heapq.heappop(heap)
        return None

    def _is_true(self, claim: Claim) -> bool:
        rank, _, serial, branch, by = claim
        if serial < branch.entry or branch not in self.members or rank != self._order.rank(by):
            return False
        return by is branch or self._gates.waits(by, branch)

    @property
    def oldest(self) -> Branch | None:
        """The branch that has not been served for longest."""
        return next(iter(self.members), None)

    def lowest(self, of: Account) -> float | None:
        """The least virtual time of the accounts below `of` that have branches here."""
        return None if self.first(of) is None else self._turns[of][0][0]

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        claims = [claim for heap in self._claims.values() for claim in heap if self._is_true(claim)]
        assert {c[3] for c in claims if c[3] is c[4]} == set(self.members), "a claim is lost"
        listed = [account for turns in self._turns.values() for _, _, account in turns]
        assert set(listed) - self._turns.keys() == set(self._claims), "a session is lost"
        for parent, turns in self._turns.items():
            assert parent is self._root or parent in listed, "a tenant is lost"
            assert all(tag <= account.level for tag, _, account in turns), "a tag shrank"
