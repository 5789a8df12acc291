"""Ports of loopback for several processes."""

from mallee.runtime.addresses import free_port


def free_ports(count: int) -> list[int]:
    """Different ports that are free now, as `free_port` finds each."""
    found = dict[int, None]()
    while len(found) < count:
        found[free_port()] = None
    return list(found)
