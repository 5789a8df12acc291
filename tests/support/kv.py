"""Workers of a fleet in this process whose KV others read over real sockets."""

from mallee.actors.hosting.host import Host
from mallee.actors.kv_transfer.server import KvServer
from mallee.protocol.ids import WorkerId
from mallee.runtime.addresses import socket_path
from mallee.runtime.transport.greeting import Secret
from mallee.runtime.transport.listener import Listener
from support.live_fleet import LiveFleet
from support.waiting import until


class ServedKv:
    """The KV of one host behind a listener of its own; commands go as the fleet's do."""

    def __init__(self, host: Host, secret: Secret, node: str) -> None:
        self.host = host
        self.server = KvServer(host, secret)
        self.listener = Listener(self.server, node=node)

    @classmethod
    async def of(cls, fleet: LiveFleet, secret: Secret, node: str = "") -> "ServedKv":
        """Of the worker that came last; every router knows it."""
        *_, host = fleet.hosts.values()
        found = cls(host, secret, node)
        await found.listener.listen_unix(socket_path(host.name))
        host.address, host.serves_kv = str(found.listener.address), True
        fleet.hosts[host.address] = host  # links that are opening use the old one
        (name,) = host.workers
        await until(lambda: all(cls._is_known(router, name) for router in fleet.routers))
        return found

    @staticmethod
    def _is_known(router: object, name: WorkerId) -> bool:
        """Whether a router knows where its KV is read, and at what price it reads others'."""
        member = router._fleet.members.get(name)  # type: ignore[attr-defined]
        if member is None or not member.is_lending:
            return False
        load = member.lease.load
        return load is not None and load.fetch is not None
