"""Mallee serves LLM requests that branch: fork, sample, search and retry over one shared prefix.

Knows only its version, and the names of the SDK, which it loads when one is asked for:
`from mallee import Mallee, Graph, Beam`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mallee.client import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """A name of `mallee.client`: all of them are classes. Modules are left to their own import."""
    if name[:1].isupper():
        from mallee import client

        if name in client.__all__:
            return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
