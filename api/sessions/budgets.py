"""Budgets of sessions: given to one and all below it, for every gateway once the client is answered."""

from mallee.api.branches.accounts import Budget, BudgetView, ResourceView
from mallee.api.branches.budgets import Budgets
from mallee.gateway.gateway import Gateway
from mallee.gateway.sessions.sessions import SessionView
from mallee.protocol.api.sessions import Resource, SessionBudget
from mallee.protocol.ids import Scope, account_of


class SessionBudgets:
    """Gives budgets to sessions."""

    def __init__(self, gateway: Gateway, budgets: Budgets) -> None:
        self._gateway = gateway
        self._budgets = budgets

    async def give(self, name: str, scope: Scope, budget: Budget, parent: str, tenant: str) -> None:
        """Bound a session, which may be new, from now on, or give its budget new limits.

        Raises BudgetSpent, InvalidParameter for more than is left above it, and as `GatewaySessions.give`.
        What runs already goes on as it began.
        """
        sessions = self._gateway.sessions
        own = await sessions.own_budget(name, scope)
        if not own or not await self._budgets.change(own, scope, budget):
            above = await sessions.budget_above(name, scope, parent)
            own = await self._made(budget, scope, above)
        await sessions.give(name, scope, own, parent=parent, tenant=tenant)

    async def fork(
        self, name: str, scope: Scope, new: str, capsule: str | None, budget: Budget
    ) -> SessionView:
        """As `GatewaySessions.fork`, with a budget of what is left of its capsule's, or the session's.

        Raises as `give`; there is no new session then.
        """
        sessions = self._gateway.sessions
        root = (await sessions.root_of_fork(name, scope, new, capsule)).capsule
        above = root if account_of(root) else await sessions.budget(name, scope)
        own = await self._made(budget, scope, above)
        return await sessions.fork(name, scope, new, root, budget=own)

    async def body(self, view: SessionView, scope: Scope) -> SessionBudget | None:
        """The session's own budget, as clients see it."""
        if not view.budget:
            return None
        shown = await self._budgets.show(view.budget, scope)
        found = shown or BudgetView(None, None, None)
        return SessionBudget(
            kept=shown is not None,
            tokens=_resource(found.tokens),
            branches=_resource(found.branches),
            wall_s=_resource(found.wall_s),
        )

    async def _made(self, budget: Budget, scope: Scope, above: str) -> str:
        """The name of a new budget, below that of `above`."""
        bound = self._budgets.bound(budget, scope, above)
        assert bound is not None
        await self._budgets.give(bound, budget)
        return self._gateway.requests.new_name(scope, bound.key)


def _resource(view: ResourceView | None) -> Resource | None:
    return None if view is None else Resource(**view._asdict())
