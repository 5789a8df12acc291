"""Budgets of sessions: given to one and all below it, and known to every gateway before the client is."""

from typing import Final

from mallee.api.branches.accounts import Budget, BudgetView, ResourceView
from mallee.api.branches.budgets import Budgets
from mallee.gateway.gateway import Gateway
from mallee.gateway.sessions.sessions import SessionView
from mallee.protocol.api.sessions import Resource, SessionBudget
from mallee.protocol.codec import encode
from mallee.protocol.errors import MalleeError, Unavailable
from mallee.protocol.gateways.session_notes import SessionNote, decode_session_note
from mallee.protocol.ids import Scope, account_of

_KIND: Final = "session.budget"
_DONE: Final = b"\x01"
_AGAIN: Final = "a session's budget has to be known to every gateway, and {}; send this again"


class SessionBudgets:
    """One gateway's side: it gives budgets to sessions, and hears of those that others give."""

    def __init__(self, gateway: Gateway, budgets: Budgets) -> None:
        self._gateway = gateway
        self._budgets = budgets
        gateway.records.share(_KIND, self._hear)

    async def give(self, name: str, scope: Scope, budget: Budget, parent: str, tenant: str) -> None:
        """Bound a session, which may be new, from now on, or give its budget new limits.

        Raises BudgetSpent, InvalidParameter for more than is left above it, and Unavailable: not every
        gateway has heard of it. What runs already goes on as it began.
        """
        self._check_up()
        sessions = self._gateway.sessions
        own = sessions.own_budget(name, scope)
        if not own or not await self._budgets.change(own, scope, budget):
            above = sessions.budget_above(name, scope, parent)
            own = await self._made(budget, scope, above)
        note = sessions.give(name, scope, own, parent=parent, tenant=tenant)
        await self._tell_all(note)

    async def fork(
        self, name: str, scope: Scope, new: str, capsule: str | None, budget: Budget
    ) -> SessionView:
        """As `GatewaySessions.fork`, with a budget of what is left of its capsule's, or the session's.

        Raises as `give`; there is no new session then.
        """
        self._check_up()
        sessions = self._gateway.sessions
        root = sessions.root_of_fork(name, scope, new, capsule).capsule
        above = root if account_of(root) else sessions.budget(name, scope)
        own = await self._made(budget, scope, above)
        view, note = sessions.fork(name, scope, new, root, budget=own)
        try:
            await self._tell_all(note)
        except MalleeError:
            await sessions.close(new, scope)
            raise
        return view

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

    def _check_up(self) -> None:
        if not self._gateway.records.is_up:
            raise Unavailable(_AGAIN.format("the broker is away"))

    async def _tell_all(self, note: SessionNote) -> None:
        given = encode(note)
        asking = self._gateway.records.gather(_KIND, note.budget, note.scope, given=given)
        if not (await asking)[1]:
            raise Unavailable(_AGAIN.format("one does not answer"))

    async def _hear(self, name: str, scope: Scope, given: bytes) -> bytes | None:
        note = decode_session_note(given)
        if (note.budget, note.scope) == (name, scope):
            self._gateway.sessions.hear(note)
        return _DONE


def _resource(view: ResourceView | None) -> Resource | None:
    return None if view is None else Resource(**view._asdict())
