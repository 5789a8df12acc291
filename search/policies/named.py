"""Policies by name, as requests give them: `{"type": "mcts", "expansions": 50}`."""

import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec

from mallee.protocol.errors import InvalidParameter, nearest
from mallee.search.policies.depth_first import DepthFirst
from mallee.search.policies.levels import Beam, BreadthFirst, DiverseTrees
from mallee.search.policies.mcts import Mcts
from mallee.search.policies.sampling import BestOfN, SelfConsistency
from mallee.search.policy import Policy

AnyPolicy: TypeAlias = (
    BestOfN | SelfConsistency | Beam | BreadthFirst | DepthFirst | Mcts | DiverseTrees
)
POLICIES: Final[Mapping[str, type[msgspec.Struct]]] = {
    "best_of_n": BestOfN,
    "self_consistency": SelfConsistency,
    "beam": Beam,
    "tot_bfs": BreadthFirst,
    "tot_dfs": DepthFirst,
    "mcts": Mcts,
    "dvts": DiverseTrees,
}
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")


def read_policy(
    given: Any, kinds: Mapping[str, type[msgspec.Struct]] = POLICIES
) -> tuple[str, Policy]:
    """The name of a policy and itself. Raises InvalidParameter, which names field and remedy."""
    name = given.get("type") if isinstance(given, dict) else None
    known = ", ".join(kinds)
    if not isinstance(name, str):
        raise InvalidParameter("policy", given, f"give an object with a type: {known}")
    kind = kinds.get(name)
    if kind is None:
        raise InvalidParameter("policy.type", name, f"give one of {known}")
    try:
        policy: Any = msgspec.convert(given, kind, strict=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        unknown = _UNKNOWN.search(message)
        field = unknown[1] if unknown else path.rstrip("`")
        near = nearest(field, kind.__struct_fields__, "leave it out")
        remedy = f"the policy has no such field; {near}" if unknown else message
        raise InvalidParameter(f"policy.{field}".rstrip("."), given.get(field), remedy) from error
    return name, policy
