"""Weighted fair shares between tenants, and between the sessions of each, in computed tokens.

Start-time fair queueing on two levels: each tenant has a tag, the tokens computed for it divided by its
weight, and the tenant with work and the lowest tag is served next; of its sessions again the one with the
lowest tag. So sessions share the weight of their tenant, however many it names; a session without a
tenant is the only one of its own.

A tenant is ahead by a grant (a step's tokens at most), and decodes by half a step more before prompts
displace them (`planner.py`); so what any two that are held back were given differs by no more than two
steps' tokens each, divided by their weights. The same holds for two sessions of a tenant. No account banks
credit: one that is served in full, or was away, is moved up to the least served of those held back. Nor
is debt lost by leaving: an account that comes back goes on from its tag. A step that holds none back
settles all accounts, one that holds no session of a tenant back those of its sessions.
"""

import heapq
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

AccountKey: TypeAlias = tuple[str, ...]
"""A tenant's name; of a session the tenant, the salt and the session: others are never one with it."""

_MIN_LIMIT = 64


class Tenant:
    """The account of `num_live` sessions with branches. `floor`: no session's tag that counts is below it."""

    __slots__ = ("floor", "highest", "key", "left", "num_live", "number", "tag", "weight")

    def __init__(self, key: AccountKey, number: int, tag: float) -> None:
        self.key = key
        self.number = number  # by first arrival; ties between tags are decided by it
        self.tag = tag
        self.weight = 1.0
        self.num_live = 0
        self.floor = self.highest = 0.0  # of its sessions' tags
        self.left: Debts[Session] = Debts()

    def __repr__(self) -> str:
        return f"Tenant({self.key}, tag={self.tag}, weight={self.weight})"


class Session:
    """One account of a tenant. `num_running` of its `num_members` branches are admitted."""

    __slots__ = ("key", "num_members", "num_running", "number", "tag", "tenant", "weight")

    def __init__(self, key: AccountKey, number: int, tenant: Tenant) -> None:
        self.key = key
        self.number = number
        self.tenant = tenant
        self.tag = tenant.floor  # stays there while it is alone
        self.weight = 1.0
        self.num_members = 0
        self.num_running = 0

    def __repr__(self) -> str:
        return f"Session({self.key}, tag={self.tag}, weight={self.weight}, {self.tenant})"


_Account = TypeVar("_Account", Tenant, Session)


class Debts(Generic[_Account]):
    """Accounts that left with a debt, until it is paid."""

    __slots__ = ("_accounts", "_limit")

    def __init__(self) -> None:
        self._accounts: dict[AccountKey, _Account] = {}
        self._limit = _MIN_LIMIT

    def __len__(self) -> int:
        return len(self._accounts)

    def __contains__(self, key: AccountKey) -> bool:
        return key in self._accounts

    def pop(self, key: AccountKey) -> _Account | None:
        return self._accounts.pop(key, None)

    def keep(self, account: _Account, floor: float) -> None:
        """Remember `account` if its tag is above `floor`."""
        if account.tag <= floor:
            return
        self._accounts[account.key] = account
        if len(self._accounts) > self._limit:
            self._accounts = {k: a for k, a in self._accounts.items() if a.tag > floor}
            self._limit = 2 * len(self._accounts) + _MIN_LIMIT

    def clear(self) -> None:
        self._accounts.clear()


class Sessions:
    """The accounts of all tenants and sessions that have branches, and of those that left with a debt."""

    def __init__(self) -> None:
        self._live: dict[AccountKey, Session] = {}
        self._tenants: dict[AccountKey, Tenant] = {}  # with live sessions
        self._left: Debts[Tenant] = Debts()
        self._floor = 0.0  # no tenant's tag that counts is below it
        self._charged: set[Tenant] = set()  # since the last step, of those with several sessions
        self._has_charged = False
        self._next_number = 0

    def join(
        self,
        key: tuple[str, str],
        weight: float,
        num_branches: int = 1,
        *,
        tenant: str = "",
        tenant_weight: float = 1.0,
    ) -> Session:
        """Branches of `key` (salt and session) arrived; weights are the last ones given.

        Without a tenant the session stands for itself, and its weight is among the tenants'.
        """
        full = (tenant, *key)
        session = self._live.get(full)
        if session is None:
            owner = self._join_tenant((tenant,) if tenant else full)
            session = owner.left.pop(full) or Session(full, self._number(), owner)
            session.tag = max(session.tag, owner.floor)
            owner.num_live += 1
            self._live[full] = session
        session.weight = weight
        session.tenant.weight = tenant_weight if tenant else weight
        session.num_members += num_branches
        return session

    def _join_tenant(self, key: AccountKey) -> Tenant:
        tenant = self._tenants.get(key)
        if tenant is None:
            tenant = self._left.pop(key) or Tenant(key, self._number(), self._floor)
            tenant.tag = max(tenant.tag, self._floor)
            self._tenants[key] = tenant
        return tenant

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def leave(self, session: Session) -> None:
        """A branch of `session` is over."""
        session.num_members -= 1
        if session.num_members:
            return
        tenant = session.tenant
        del self._live[session.key]
        tenant.num_live -= 1
        if tenant.num_live:
            tenant.left.keep(session, tenant.floor)
            return
        tenant.left.clear()  # none of its sessions is held back
        del self._tenants[tenant.key]
        self._left.keep(tenant, self._floor)

    @property
    def num_live(self) -> int:
        """Sessions that have branches."""
        return len(self._live)

    def charge(self, session: Session, num_tokens: int) -> None:
        """`num_tokens` are computed for `session`."""
        tenant = session.tenant
        tenant.tag = max(tenant.tag, self._floor) + num_tokens / tenant.weight
        self._has_charged = True
        if tenant.num_live > 1:
            session.tag = max(session.tag, tenant.floor) + num_tokens / session.weight
            tenant.highest = max(tenant.highest, session.tag)
            self._charged.add(tenant)

    def level(self, session: Session) -> tuple[float, float]:
        """The tags that count, of its tenant and its own: never below those that are held back."""
        tenant = session.tenant
        if tenant.tag < self._floor:
            tenant.tag = self._floor
        if session.tag < tenant.floor:
            session.tag = tenant.floor
        return tenant.tag, session.tag

    def order(self, session: Session) -> tuple[float, int, float, int]:
        """Sessions with work are served in this order."""
        of_tenant, own = self.level(session)
        return (of_tenant, session.tenant.number, own, session.number)

    def is_ahead(self, session: Session, of: Session, num_tokens: float = 0.0) -> bool:
        """Whether `session` got more than another, by more than `num_tokens` of the other's."""
        (tenant_tag, tag), (other_tenant_tag, other_tag) = self.level(session), self.level(of)
        if session.tenant is of.tenant:
            return tag > other_tag + num_tokens / of.weight
        return tenant_tag > other_tenant_tag + num_tokens / of.tenant.weight

    def close(self, lowest: float | None, lowest_of: Callable[[Tenant], float | None]) -> None:
        """A step is over; `lowest` is the least tag of the tenants held back, None if none was.

        `lowest_of` tells the same of the sessions of a tenant.
        """
        if lowest is None:
            if self._has_charged:
                self._settle()
            return
        self._floor = max(self._floor, lowest)
        for tenant in self._charged:
            own = lowest_of(tenant)
            tenant.floor = max(tenant.floor, tenant.highest if own is None else own)
        self._charged.clear()

    def _settle(self) -> None:
        self._has_charged = False
        self._charged.clear()
        self._left.clear()
        self._floor = 0.0
        for tenant in self._tenants.values():
            tenant.tag = tenant.floor = tenant.highest = 0.0
            tenant.left.clear()
        for session in self._live.values():
            session.tag = 0.0

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        for key, session in self._live.items():
            assert session.key == key, "a session under another key"
            assert session.num_members > 0, f"{session} has no branches"
            assert 0 <= session.num_running <= session.num_members, f"{session} runs too much"
            assert key not in session.tenant.left, "a session is twice there"
            assert self._tenants.get(session.tenant.key) is session.tenant, f"{session} is orphaned"
        for key, tenant in self._tenants.items():
            assert key not in self._left, "a tenant is twice there"
            assert tenant.num_live > 0, f"{tenant} has no sessions"
        assert sum(t.num_live for t in self._tenants.values()) == len(self._live), "counted wrong"


class Turns:
    """Sessions with work, the next to be served first.

    Heaps whose entries may be out of date: a tag only grows while its session is here, so an entry with an
    old one comes up too early, never too late. So nothing is searched: O(log n) a change.
    """

    __slots__ = ("_by_tenant", "_order", "_sessions")

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._order: list[tuple[float, int, Tenant]] = []
        self._by_tenant: dict[Tenant, list[tuple[float, int, Session]]] = {}

    def push(self, session: Session) -> None:
        """`session`, which is not here, has work."""
        of_tenant, own = self._sessions.level(session)
        tenant = session.tenant
        heap = self._by_tenant.get(tenant)
        if heap is None:
            heap = self._by_tenant[tenant] = []
            heapq.heappush(self._order, (of_tenant, tenant.number, tenant))
        heapq.heappush(heap, (own, session.number, session))

    def first(self) -> Session | None:
        """The session that is to be served next."""
        while self._order:
            tag, number, tenant = self._order[0]
            if tag < tenant.tag:
                heapq.heapreplace(self._order, (tenant.tag, number, tenant))
                continue
            session = self.first_of(tenant)
            if session is not None:
                return session
            heapq.heappop(self._order)
            del self._by_tenant[tenant]
        return None

    def first_of(self, tenant: Tenant) -> Session | None:
        """The session of `tenant` that is to be served next."""
        heap = self._by_tenant.get(tenant)
        while heap:
            tag, number, session = heap[0]
            if tag >= session.tag:
                return session
            heapq.heapreplace(heap, (session.tag, number, session))
        return None

    def drop_first_of(self, tenant: Tenant) -> None:
        """The session that was told last as the first of `tenant` has no work any more."""
        heapq.heappop(self._by_tenant[tenant])

    def clear(self) -> None:
        self._order.clear()
        self._by_tenant.clear()

    def check(self, expected: set[Session]) -> None:
        """Raise AssertionError unless these sessions are here, each once, and no tag shrank."""
        entries = [entry for heap in self._by_tenant.values() for entry in heap]
        assert len(entries) == len(expected), "a session is lost"
        assert {session for _, _, session in entries} == expected, "a session is lost"
        assert all(tag <= session.tag for tag, _, session in entries), "a tag shrank"
        assert {tenant for _, _, tenant in self._order} == set(self._by_tenant), "a tenant is lost"
        assert all(tag <= tenant.tag for tag, _, tenant in self._order), "a tenant's tag shrank"
