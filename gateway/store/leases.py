"""Holders of leases: the parts of something in the store that gateways have taken, to use without asking.

A lease is one life's of one gateway. The other gateways end it once that gateway is gone (`Peers.is_gone`),
and the gateway itself those of its former lives.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import cached_property


class Lessee:
    """This life of this gateway, and the others as holders.

    `new_key()`: what no other life has. `others()`: names of the other gateways that live; None: this one is
    alone for good. `is_gone(gateway)`: whether another one lives no more.
    """

    def __init__(
        self,
        gateway: str,
        *,
        others: Callable[[], Collection[str] | None],
        is_gone: Callable[[str], Awaitable[bool]],
        new_key: Callable[[], str],
    ) -> None:
        self._gateway = gateway
        self._others = others
        self._is_gone = is_gone
        self._new_key = new_key

    @cached_property
    def name(self) -> str:
        return f"{self._gateway}/{self._new_key()}"

    @property
    def num_gateways(self) -> int:
        """Those that live now, this one among them; 0: it is alone for good."""
        others = self._others()
        return 0 if others is None else 1 + len(others)

    async def gone(self, holders: Iterable[str]) -> set[str]:
        """Those of `holders` that use their leases no more."""
        gateways = {each: each.partition("/")[0] for each in holders if each != self.name}
        return {
            each
            for each, gateway in gateways.items()
            if gateway == self._gateway or await self._is_gone(gateway)
        }
