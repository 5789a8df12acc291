"""Holders of leases of gateways that are nothing but names."""

from collections.abc import Callable, Set

from mallee.gateway.store.leases import Lessee


def lessee(name: str, living: Set[str], new_key: Callable[[], str]) -> Lessee:
    """Gateway `name`, which knows at once who of the others is gone."""

    async def is_gone(gateway: str) -> bool:
        return gateway not in living

    return Lessee(name, others=lambda: living - {name}, is_gone=is_gone, new_key=new_key)
