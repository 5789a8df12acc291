"""Branches that want to be served, in fair order: sessions by virtual time, then by rank and arrival.

The heaps have entries that are out of date. An account's virtual time only grows while it is in a heap, so
an old entry comes up too early, never too late. The entry of a branch that left, or changed its rank, is
dropped when it comes up. So nothing is searched: a change costs O(log n).

A branch stands in the queue by *claims*: its own, and one for each branch that waits for its tokens and has
another session or a higher priority. It is served by the claim that comes up first, and that claim's session
pays. Thus a producer goes as early as the best of those that wait for it, and nothing is to be updated when
virtual times change.
"""

import heapq
from typing import NamedTuple

from mallee.worker.sched.branch import Branch
from mallee.worker.sched.gates import Gates
from mallee.worker.sched.policy import Order
from mallee.worker.sched.sessions import Account

_MIN_LIMIT = 64


class Claim(NamedTuple):
    """One of `branch` to be served, for the sake of `by`: itself, or a branch that waits for its tokens."""

    rank: float  # of `by`
    ticket: int  # of `branch`
    serial: int
    branch: Branch
    by: Branch

    @property
    def payer(self) -> Account:
        """The session that pays for it."""
        return self.by.job.session

    @property
    def order(self) -> tuple[tuple[float, ...], float, int]:
        """Claims are served in this order."""
        return (self.by.job.session.order, self.rank, self.ticket)


Entry = tuple[float, int, int, Branch, Branch]
"""A claim in a heap, where thousands may be."""


class FairQueue:
    """`members` are the branches that are queued, with the serial number from which on their claims count.

    The one that was not served for longest is the first of them.
    """

    __slots__ = ("_claims", "_gates", "_num_claims", "_order", "_root", "_turns", "members")

    def __init__(self, order: Order, root: Account, gates: Gates) -> None:
        self._order = order
        self._root = root
        self._gates = gates
        self._claims: dict[Account, list[Entry]] = {}  # of each session
        self._turns: dict[Account, list[tuple[float, int, Account]]] = {}  # accounts, by parent
        self._num_claims = 0  # ever
        self.members: dict[Branch, int] = {}

    def extend(self, branches: list[Branch], step: int) -> None:
        """Queue new branches of one job, which are of one rank, by arrival, from `step` on."""
        serial, rank = self._num_claims, self._order.rank(branches[0])
        members, heap = self.members, self._heap(branches[0].job.session)
        num_before = len(heap)
        for branch in branches:
            branch.last_step = step
            members[branch] = serial
            claim = (rank, branch.ticket, serial, branch, branch)
            if num_before < len(branches):
                heap.append(claim)
            else:
                heapq.heappush(heap, claim)
        if 0 < num_before < len(branches):  # else they are in order
            heapq.heapify(heap)
        self._num_claims += len(branches)

    def push(self, branch: Branch, step: int) -> None:
        """Queue `branch`, which begins to wait in `step`."""
        assert branch not in self.members, f"branch {branch.ticket} is queued already"
        branch.last_step = step
        self.members[branch] = self._num_claims
        self._claim(branch, branch)
        if self._gates.num:
            self.claim(branch, self._gates.waiters(branch))

    def claim(self, branch: Branch, waiters: list[Branch]) -> None:
        """`branch`, which is queued here, goes by the claims of `waiters` too, where they are better."""
        rank, session = self._order.rank, branch.job.session
        for waiter in waiters:
            if waiter.job.session is not session or rank(waiter) < rank(branch):
                self._claim(branch, waiter)

    def rerank(self, branch: Branch) -> None:
        """The priority of `branch`, which is queued here, has changed.

        Some that wait for it may be better now.
        """
        self._claim(branch, branch)
        if self._gates.num:
            self.claim(branch, self._gates.waiters(branch))

    def _claim(self, branch: Branch, by: Branch) -> None:
        self._num_claims += 1
        claim = (self._order.rank(by), branch.ticket, self._num_claims, branch, by)
        heapq.heappush(self._heap(by.job.session), claim)

    def _heap(self, session: Account) -> list[Entry]:
        """The claims that `session` pays for: each of its branches makes one, the others are out of date."""
        heap = self._claims.get(session)
        if heap is None:
            heap = self._claims[session] = []
            self._give_turn(session)
        elif len(heap) > 2 * session.num_members + _MIN_LIMIT:
            heap[:] = {claim[3:]: claim for claim in heap if self._is_true(claim)}.values()
            heapq.heapify(heap)
        return heap

    def _give_turn(self, account: Account) -> None:
        parent = account.parent
        turns = self._turns.get(parent)
        if turns is None:
            turns = self._turns[parent] = []
            if parent is not self._root:
                self._give_turn(parent)
        heapq.heappush(turns, (account.level, account.number, account))

    def serve(self, branch: Branch, step: int) -> None:
        """`branch`, which is queued here, is served in `step`."""
        branch.last_step = step
        self.members[branch] = self.members.pop(branch)

    def remove(self, branch: Branch) -> None:
        """`branch` leaves the queue."""
        del self.members[branch]
        if not self.members:
            self._claims.clear()
            self._turns.clear()

    def first(self, of: Account | None = None) -> Claim | None:
        """The claim that is to be served next, of all or of a tenant's."""
        parent = of or self._root
        turns, now = self._turns.get(parent), parent.now
        while turns:
            tag, number, account = turns[0]
            level = account.tag if account.tag > now else now
            if tag < level:
                heapq.heapreplace(turns, (level, number, account))
                continue
            heap = self._claims.get(account)
            found = self.first(account) if heap is None else self._first_true(heap)
            if found is not None:
                return found
            heapq.heappop(turns)
            if heap is None:
                del self._turns[account]
            else:
                del self._claims[account]
        return None

    def _first_true(self, heap: list[Entry]) -> Claim | None:
        while heap:
            if self._is_true(heap[0]):
                return Claim._make(heap[0])
            heapq.heappop(heap)
        return None

    def _is_true(self, claim: Entry) -> bool:
        rank, _, serial, branch, by = claim
        since = self.members.get(branch)
        if since is None or serial < since or rank != self._order.rank(by):
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
