"""The policies that requests may name: those that come with Mallee, and those that the operator installed.

A package names its own in the entry point group `mallee.search_policies`: a `msgspec.Struct` whose instances
are a `mallee.search.policy.Policy`, under the name that requests give. Requests never bring code.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import msgspec

from mallee.protocol.errors import ConfigError
from mallee.search.policies.named import POLICIES

GROUP: Final = "mallee.search_policies"
_METHODS: Final = ("depth", "merges", "propose", "score", "select", "stop")


def installed_policies(
    found: Iterable[EntryPoint] | None = None,
) -> Mapping[str, type[msgspec.Struct]]:
    """All policies by name; by default those of this environment. Raises ConfigError."""
    kinds = dict(POLICIES)
    for point in entry_points(group=GROUP) if found is None else found:
        if point.name in kinds:
            raise ConfigError(
                f"the search policy {point.name!r} ({point.value}) is there already; rename it"
            )
        kinds[point.name] = _loaded(point)
    return kinds


def _loaded(point: EntryPoint) -> type[msgspec.Struct]:
    try:
        kind = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the search policy {point.name!r} can't be loaded from {point.value}: {error}"
        ) from error
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    missing = [name for name in _METHODS if not hasattr(kind, name)]
    if not is_struct or missing:
        lack = "no msgspec.Struct" if not is_struct else f"without {', '.join(missing)}"
        raise ConfigError(
            f"the search policy {point.name!r} ({point.value}) is {lack}; see docs/api/search.md"
        )
    if kind.__struct_config__.tag != point.name:
        raise ConfigError(
            f"the search policy {point.name!r} ({point.value}) needs tag={point.name!r} in its class"
        )
    assert isinstance(kind, type)
    return kind
