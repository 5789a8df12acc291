"""Weighted fair shares between tenants, and between the sessions of each, in computed tokens.

Start-time fair queueing on two levels. An account's virtual time (`tag`) is the number of tokens computed
for it, divided by its weight. Of the tenants with work the one whose time is least is served next, and of
its sessions again the one whose time is least. So sessions share the weight of their tenant, however many it
names; a session without a tenant stands among the tenants.

The accounts of one level have a common virtual time (`now`): the least of those that a step held back or,
if it held none back, the greatest of all. No account counts for less, so none banks credit: one that was
served in full, or was away, goes on at the common time. Nor is debt lost by leaving: an account that is
ahead of the common time is kept until that has caught up. Where a step held none back all are at the common
time, so that it may begin at 0 again: else it would grow, by a tiny weight at once, until floats can't
tell two of them apart.

A tenant is ahead by a grant (a step's tokens at most), and decodes by half a step more before prompts
displace them (`planner.py`); so what any two that are held back were given differs by no more than two
steps' tokens each, divided by their weights. The same holds for two sessions of a tenant.
"""

from collections.abc import Callable
from typing import TypeAlias

AccountKey: TypeAlias = tuple[str, ...]
"""A tenant's name; of a session the tenant, the salt and the session: others are never one with it."""

_MIN_LIMIT = 64
_MAX_TIME = 2.0**30
"""Later virtual times than this begin anew: beside them a token of a large weight would be lost."""


class Account:
    """An account of a session; of a tenant, with those of its sessions below; or the root, with all below.

    `now` is the virtual time of the accounts below it, `latest` the greatest of theirs. `num_members`:
    branches of a session, live sessions of a tenant; `num_running` of a session's are admitted.
    """

    __slots__ = (
        *("key", "latest", "now", "num_members", "num_running", "number", "parent"),
        *("tag", "weight"),
    )

    def __init__(self, key: AccountKey, number: int, parent: "Account | None") -> None:
        self.key = key
        self.number = number  # by first arrival; ties between tags are decided by it
        self.parent = parent or self  # of the root itself
        self.tag = 0.0
        self.weight = 1.0
        self.now = self.latest = 0.0
        self.num_members = self.num_running = 0

    @property
    def level(self) -> float:
        """Its virtual time, as far as it counts."""
        return max(self.tag, self.parent.now)

    @property
    def tenant(self) -> "Account":
        """The tenant of a session, or itself, if it has none."""
        owner = self.parent
        return self if owner.parent is owner else owner

    @property
    def order(self) -> tuple[float, int, float, int]:
        """Sessions with work are served in this order."""
        tenant = self.tenant
        return (tenant.level, tenant.number, self.level, self.number)

    def is_ahead(self, of: "Account", num_tokens: float = 0.0) -> bool:
        """Whether this session got more than another, by more than `num_tokens` of the other's."""
        if self.parent is not of.parent:
            return self.tenant.is_ahead(of.tenant, num_tokens)
        theirs, now = of.tag, of.parent.now
        if theirs < now:  # its level, without the call: a step asks for each session
            theirs = now
        return self.tag > theirs + num_tokens / of.weight

    def __repr__(self) -> str:
        return f"Account({self.key}, tag={self.tag}, weight={self.weight})"


class Sessions:
    """All accounts that have branches, and those that left and are ahead."""

    def __init__(self) -> None:
        self.root = Account((), 0, None)
        self.num_live = 0  # sessions that have branches
        self._accounts: dict[AccountKey, Account] = {}
        self._limit = _MIN_LIMIT  # accounts; with more, those that left are looked through
        self._charged: set[Account] = set()  # tenants, since the last step
        self._next_number = 0

    def join(
        self,
        key: tuple[str, str],
        weight: float,
        num_branches: int = 1,
        *,
        tenant: str = "",
        tenant_weight: float = 1.0,
    ) -> Account:
        """Branches of `key` (salt and session) arrived; weights are the last ones given.

        Without a tenant the session stands for itself, and its weight is among the tenants'.
        """
        salt, name = key
        full = (tenant, salt, name)
        session = self._accounts.get(full)
        if session is None:
            if len(self._accounts) >= self._limit:
                self._forget_those_gone()
            owner = self.root
            if tenant:
                owner = self._accounts.get((tenant,)) or self._new((tenant,), self.root)
            session = self._new(full, owner)
        if not session.num_members:
            self.num_live += 1
            session.parent.num_members += 1
        session.weight = weight
        if tenant:
            session.parent.weight = tenant_weight
        session.num_members += num_branches
        return session

    def _new(self, key: AccountKey, parent: Account) -> Account:
        self._next_number += 1
        account = self._accounts[key] = Account(key, self._next_number, parent)
        return account

    def _forget_those_gone(self) -> None:
        """Also all sessions of a tenant that is gone: none of them is ahead."""
        accounts = self._accounts.values()
        self._accounts = {a.key: a for a in accounts if a.num_members or a.tag > a.parent.now}
        self._limit = 2 * len(self._accounts) + _MIN_LIMIT

    def leave(self, session: Account) -> None:
        """A branch of `session` is over."""
        session.num_members -= 1
        if session.num_members:
            return
        self.num_live -= 1
        owner = session.parent
        owner.num_members -= 1
        if not owner.num_members:  # none of its sessions is held back
            owner.now = owner.latest
        if session.tag <= owner.now:
            del self._accounts[session.key]

    def charge(self, session: Account, num_tokens: int) -> None:
        """`num_tokens` are computed for `session`."""
        if len(self._accounts) == 1:
            return  # there is none that it could be ahead of
        account, root = session, self.root
        while account is not root:
            parent = account.parent
            tag = account.tag if account.tag > parent.now else parent.now
            account.tag = tag = tag + num_tokens / account.weight
            if tag > parent.latest:
                parent.latest = tag
            if parent is not root:
                self._charged.add(parent)
            account = parent

    def advance(self, lowest_of: Callable[[Account], float | None]) -> None:
        """A step is over; `lowest_of` tells the least level of those held back below an account, if any."""
        if len(self._accounts) == 1:
            return
        for parent in (self.root, *self._charged):
            lowest = lowest_of(parent)
            parent.now = max(parent.now, parent.latest if lowest is None else lowest)
            if lowest is None and parent.now > _MAX_TIME:
                self._begin_anew(parent)
        self._charged.clear()

    def _begin_anew(self, parent: Account) -> None:
        """All accounts below `parent` are at its time, which is 0 from now on; no queue has one of them."""
        for account in self._accounts.values():
            if account.parent is parent:
                account.tag = 0.0
        parent.now = parent.latest = 0.0

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        num_live = 0
        for key, account in self._accounts.items():
            assert account.key == key, "an account under another key"
            assert 0 <= account.num_running <= account.num_members or len(key) == 1, "runs too much"
            assert account.tag <= account.parent.latest, f"{account} is ahead of all"
            if account.num_members and len(key) > 1:
                num_live += 1
                owner = self._accounts.get(account.parent.key, self.root)
                assert owner is account.parent, f"{account} is orphaned"
        assert num_live == self.num_live, "live sessions counted wrong"
