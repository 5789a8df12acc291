"""Searches that the gateway runs: one call each, whose stream has the tree as it grows."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import msgspec

from mallee.client.calls import Call
from mallee.client.errors import StreamBroken
from mallee.client.results import event_body
from mallee.protocol.errors import InvalidParameter, nearest
from mallee.search.policies.named import POLICIES
from mallee.search.policy import Policy, SearchBudget
from mallee.search.results import SearchResult
from mallee.search.scores import Verifier

ServiceUrl: TypeAlias = Mapping[str, str]
"""`{"url": ...}`: a service of yours that values texts, of those that the operator allows."""
Where: TypeAlias = Literal["client", "gateway"]
"""The place where the policy runs: here, with a fork for each expansion, or in the gateway, by one call."""


def at_gateway(where: Where) -> bool:
    """Raises InvalidParameter for a place that is none."""
    if where not in ("client", "gateway"):
        raise InvalidParameter("where", where, 'give "client" or "gateway"')
    return where == "gateway"


def policy_of(policy: Policy | str) -> Policy:
    """A policy by its name, with its defaults. Raises InvalidParameter."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        hint = nearest(policy, POLICIES, f"there are {', '.join(POLICIES)}")
        raise InvalidParameter("policy", policy, f"no policy has the name; {hint}")
    made: Any = POLICIES[policy]()
    return cast(Policy, made)


def search_call(
    policy: Policy,
    begin: Mapping[str, Any],
    *,
    score: Any,
    seed: int,
    budget: SearchBudget | None,
    ends: Sequence[str],
    params: Mapping[str, Any],
) -> Call:
    """The call. `begin` has one of `prompt`, `messages` and `capsule`.

    Raises InvalidParameter for a policy or a score that can't be sent.
    """
    body = {
        **{"policy": _sent_policy(policy), "score": _sent_score(score), "seed": seed},
        **{"budget": msgspec.to_builtins(budget), "ends": [*ends], "stream": True},
        **begin,
        **params,
    }
    known = {name: value for name, value in body.items() if value is not None}
    return Call("POST", "/v1/search", known, cache_salt=params.get("cache_salt"))


def read_search(events: Sequence[str], url: str) -> SearchResult | None:
    """The result, if it is among the events of a stream: the others have nodes that joined the tree.

    Raises the server's error, StreamBroken.
    """
    for data in events:
        body = event_body(data, url)
        if body.get("object") == "search":
            try:
                return msgspec.convert(body, SearchResult)
            except msgspec.ValidationError as error:
                raise StreamBroken(url, f"not a search: {error}") from error
    return None


def _sent_policy(policy: Policy) -> Any:
    tag = getattr(getattr(policy, "__struct_config__", None), "tag", None)
    if tag is None:
        remedy = (
            "the gateway runs the policies of mallee.search.policies, and those installed there"
        )
        raise InvalidParameter("policy", type(policy).__name__, remedy)
    return msgspec.to_builtins(policy)


def _sent_score(score: Any) -> Any:
    if isinstance(score, Verifier):
        return msgspec.to_builtins(score)
    if callable(score):
        remedy = 'it runs here: leave where="gateway" away, or give {"url": ...} of a service'
        raise InvalidParameter("score", getattr(score, "__name__", "a function"), remedy)
    return score
