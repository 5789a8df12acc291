"""The place where the policy of a search runs."""

from typing import Literal, TypeAlias

from mallee.protocol.errors import InvalidParameter

Where: TypeAlias = Literal["client", "gateway"]
"""Here, with a fork for each expansion, or in the gateway, by one call."""


def at_gateway(where: Where) -> bool:
    """Raises InvalidParameter for a place that is none."""
    if where not in ("client", "gateway"):
        raise InvalidParameter("where", where, 'give "client" or "gateway"')
    return where == "gateway"
