"""The two accounts of a broker: gateways and workers, each with the subjects that its role needs."""

import json
import secrets
from dataclasses import dataclass, field

from mallee.protocol.subjects import BusRole, Permissions, Subjects

USERS: dict[BusRole, str] = {"gateway": "gateways", "worker": "workers"}
AUTHENTICATION_S = 10  # a client whose loop loads a model may be slow to say who it is


@dataclass(frozen=True, slots=True)
class Passwords:
    """Passwords of the accounts; shown in no repr."""

    gateway: str = field(repr=False)
    worker: str = field(repr=False)

    @classmethod
    def new(cls) -> "Passwords":
        return cls(secrets.token_hex(32), secrets.token_hex(32))

    def login(self, role: BusRole) -> str:
        """`user:password`."""
        return f"{USERS[role]}:{self.gateway if role == 'gateway' else self.worker}"


def authorization(fleet: str, *, gateway: str, worker: str, store: str | None = None) -> str:
    """The block of nats-server's configuration; passwords are quoted values, or names such as `$NAME`.

    `store`: its name, if not the fleet's. Raises ConfigError if a name can't be part of a subject.
    """
    subjects = Subjects.of(fleet)
    return (
        f"authorization {{\n  timeout: {AUTHENTICATION_S}\n  users: [\n"
        + _user(USERS["gateway"], gateway, subjects.permissions("gateway", store))
        + _user(USERS["worker"], worker, subjects.permissions("worker"))
        + "  ]\n}\n"
    )


def _user(name: str, password: str, permissions: Permissions) -> str:
    return (
        f"    {{\n      user: {name}\n      password: {password}\n      permissions: {{\n"
        f"        publish: {json.dumps(permissions.publish)}\n"
        f"        subscribe: {json.dumps(permissions.subscribe)}\n"
        "        allow_responses: true\n      }\n    }\n"
    )
