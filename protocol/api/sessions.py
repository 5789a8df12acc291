"""Bodies of sessions, their budgets and their records."""

from typing import Annotated, Literal

from msgspec import Meta

from mallee.protocol.api.capsules import Tier
from mallee.protocol.api.shared import OMITTED, AnyRequest, Body, BudgetFields, Page, SessionName


class SessionForkRequest(AnyRequest, frozen=True, kw_only=True):
    """`session` names the new one."""

    session: SessionName = ""
    capsule: Annotated[
        str | None,
        Meta(description="One of its capsules, where the new one begins; by default the newest."),
    ] = None
    budget: BudgetFields | None = None


class SessionRequest(AnyRequest, frozen=True, kw_only=True):
    """The budget of a session, and of all below it."""

    budget: BudgetFields | None = None
    parent: Annotated[SessionName, Meta(description="The session that a new one is below.")] = ""


# Answers


class Session(Body, frozen=True, kw_only=True):
    """`running`: requests of this gateway. `capsules` are those that are remembered."""

    id: str
    object: Literal["session"] = "session"
    parent: str | None
    created: int
    last_used: int
    capsules: int
    running: int


class SessionList(Page[Session], frozen=True, kw_only=True):
    """Sessions, by name."""


class SessionNode(Body, frozen=True, kw_only=True):
    """A capsule of a session. `is_root`: another session's. Not `held`: no worker is known to have it."""

    capsule: str
    parent: str | None
    request: str
    tokens: int
    created: int
    is_root: bool
    held: bool
    worker: str | None
    pinned: bool = OMITTED
    tier: Tier = OMITTED


class Resource(Body, frozen=True, kw_only=True):
    """`reserved`: for what runs below or at other gateways; what that doesn't use returns."""

    limit: float
    used: float
    reserved: float
    left: float


class SessionBudget(Body, frozen=True, kw_only=True):
    """null: not bounded by it. Not `kept`: the gateway that kept it is gone, or can't be asked."""

    kept: bool
    tokens: Resource | None
    branches: Resource | None
    wall_s: Resource | None


class BoundSession(Session, frozen=True, kw_only=True):
    """`budget`: the session's own."""

    budget: SessionBudget | None


class SessionTree(BoundSession, frozen=True, kw_only=True):
    """Nodes are in the order in which they were left. `children`: sessions whose parent it is."""

    children: list[str]
    nodes: list[SessionNode]


class SessionFork(BoundSession, frozen=True, kw_only=True):
    capsule: str


class SessionClosed(Body, frozen=True, kw_only=True):
    """`released` capsules; `left` ones whose workers are silent; `cancelled` requests of all gateways."""

    id: str
    object: Literal["session.closed"] = "session.closed"
    closed: bool = True
    released: int
    left: int
    cancelled: int


class RecordDeleted(Body, frozen=True, kw_only=True):
    session: str
    object: Literal["session.record.deleted"] = "session.record.deleted"
    deleted: bool = True
