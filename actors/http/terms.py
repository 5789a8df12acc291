"""The tenant of a request, its place in the queue when every worker is busy, its share of a worker.

The tenant is the caller's. Where no keys are set and no proxy names one, clients name themselves, for their
share alone: state belongs to the caller's tenant and the cache salt (`protocol.scopes`).
"""

from typing import Final

from mallee.actors.access.access import Caller
from mallee.actors.http.schemas import AnyRequest
from mallee.protocol.errors import InvalidParameter
from mallee.router.dispatch.jobs import QueueTerms

MAX_TENANT: Final = 128  # characters; names that differ beyond are one tenant
MAX_SALT: Final = 256
MAX_PRIORITY: Final = 1000
MAX_DEADLINE_S: Final = 86_400.0
MAX_WEIGHT: Final = 1000.0


def read_terms(request: AnyRequest, caller: Caller) -> QueueTerms:
    """The terms of a request. Raises InvalidParameter."""
    tenant = caller.tenant or request.cache_salt or request.safety_identifier or request.user
    session = request.mallee.session
    if len(session) > MAX_TENANT:
        raise InvalidParameter("mallee.session", session, f"give at most {MAX_TENANT} characters")
    return QueueTerms(
        tenant[:MAX_TENANT],
        _priority(request),
        _deadline_s(request),
        session,
        _weight(request),
        1.0 if caller.weight is None else caller.weight,
    )


def checked_salt(salt: str, param: str = "cache_salt") -> str:
    """`salt`. Raises InvalidParameter if it is too long."""
    if len(salt) > MAX_SALT:
        raise InvalidParameter(param, salt, f"give at most {MAX_SALT} characters")
    return salt


def _priority(request: AnyRequest) -> int:
    param = "mallee.priority"
    value: object = request.mallee.priority
    if value is None:
        param, value = "nvext.agent_hints.priority", _hint(request.nvext, "priority")
    if value is None:
        return 0
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_PRIORITY:
        return value
    raise InvalidParameter(param, value, f"give a whole number, {-MAX_PRIORITY} to {MAX_PRIORITY}")


def _deadline_s(request: AnyRequest) -> float | None:
    value = request.mallee.deadline_s
    if value is not None and not 0.0 <= value <= MAX_DEADLINE_S:
        raise InvalidParameter("mallee.deadline_s", value, f"give 0 to {MAX_DEADLINE_S:.0f}")
    return value


def _weight(request: AnyRequest) -> float:
    """The weight of the request's session among those of its tenant, whose weight its key says."""
    value = request.mallee.weight
    if not 1 / MAX_WEIGHT <= value <= MAX_WEIGHT:
        raise InvalidParameter(
            "mallee.weight",
            value,
            f"give {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}, 1 is an equal share",
        )
    return value


def _hint(nvext: object, name: str) -> object:
    """`name` of `nvext.agent_hints`; the rest of `nvext` changes nothing here."""
    hints = nvext.get("agent_hints") if isinstance(nvext, dict) else None
    return hints.get(name) if isinstance(hints, dict) else None
