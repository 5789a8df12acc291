"""The NATS servers of the nodes: one cluster, with the accounts of gateways and workers."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mallee.runtime.bus.accounts import Passwords, authorization
from mallee.runtime.bus.broker import MAX_PAYLOAD_BYTES

_ROUTES_USER = "routes"


class Server(NamedTuple):
    """A server's place: for clients, and for the other servers."""

    host: str
    port: int
    route_port: int

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"


def configurations(
    servers: Sequence[Server], folders: Sequence[Path], *, fleet: str, passwords: Passwords
) -> list[str]:
    """The configuration of each server, which logs and stores in its folder. They hold passwords."""
    accounts = authorization(
        fleet, gateway=f'"{passwords.gateway}"', worker=f'"{passwords.worker}"'
    )
    password = secrets.token_hex(32)
    return [
        f'log_file: "{folder / "nats.log"}"\njetstream {{store_dir: "{folder / "nats"}"}}\n'
        + _configuration(each, servers, password)
        + accounts
        for each, folder in zip(servers, folders, strict=True)
    ]


def _configuration(server: Server, servers: Sequence[Server], password: str) -> str:
    routes = ", ".join(
        f'"nats-route://{_ROUTES_USER}:{password}@{each.host}:{each.route_port}"'
        for each in servers
        if each != server
    )
    alone = (
        f'listen: "{server.host}:{server.port}"\n'
        f'server_name: "mallee-{server.host}-{server.port}"\n'
        f"max_payload: {MAX_PAYLOAD_BYTES}\n"
    )
    if not routes:
        return alone  # JetStream doesn't start in a cluster without routes
    return (
        f"{alone}cluster {{\n  name: mallee\n"
        f'  listen: "{server.host}:{server.route_port}"\n'
        f"  authorization {{user: {_ROUTES_USER}, password: {password}, timeout: 5}}\n"
        f"  ping_interval: 2s\n  ping_max: 2\n  routes: [{routes}]\n}}\n"
    )
