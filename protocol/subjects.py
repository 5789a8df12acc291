"""NATS subjects, under one root per fleet so that fleets can share a broker.

A host is a process with one worker, whose name it then has, or with many.

mallee.{fleet}.events.{worker}               EventBatch, published by the worker
mallee.{fleet}.lease.{host}                  Leases, published by the host every lease period
mallee.{fleet}.host.{host}                   request by a gateway: a HostAsk (`protocol.events`)
mallee.{fleet}.bookings.{gateway}            BookingBatch, published by the gateway
mallee.{fleet}.bookings_snapshot.{gateway}   request by another, answered with a BookingSnapshot
mallee.{store}.peers.{gateway}               request by another gateway for what this one alone has
mallee.{fleet}.queues.{gateway}              QueueDepth, published by the gateway for worker processes
mallee.{fleet}.inbox.>                       answers to requests, which gateways alone make

What gateways keep is in streams of JetStream, `KV_mallee_{store}_{bucket}`, as NATS's key-value has them. The
store has the fleet's name, or one of its own that fleets share.

A broker's account for gateways and one for workers need no more than `Subjects.permissions`.
"""

import re
from typing import Final, Literal, NamedTuple, TypeAlias

from mallee.protocol.errors import ConfigError

BusRole: TypeAlias = Literal["gateway", "worker"]

BUCKETS: Final = (
    *("answers", "budgets", "conversations", "events", "items", "quotas", "responses", "sessions"),
    *("sessions_closed", "texts"),
)
"""The buckets of the gateways' store."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]+")


def check_token(name: str, what: str) -> str:
    """`name`, if it can be one token of a subject. Raises ConfigError naming the bad value."""
    if not _TOKEN.fullmatch(name):
        raise ConfigError(
            f"{what}={name!r}: use letters, digits, '-' and '_' only", what=what, value=name
        )
    return name


class Permissions(NamedTuple):
    """Subjects that a role publishes to and subscribes to; answers to requests come on top."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


class Subjects(NamedTuple):
    """The subjects of one fleet. Build with `Subjects.of(fleet)`."""

    root: str

    @classmethod
    def of(cls, fleet: str) -> "Subjects":
        """Raises ConfigError if `fleet` can't be part of a subject."""
        return cls(f"mallee.{check_token(fleet, 'fleet')}")

    def events(self, worker: str = "*") -> str:
        return f"{self.root}.events.{worker}"

    def lease(self, host: str = "*") -> str:
        return f"{self.root}.lease.{host}"

    def host(self, host: str = "*") -> str:
        return f"{self.root}.host.{host}"

    def bookings(self, gateway: str = "*") -> str:
        return f"{self.root}.bookings.{gateway}"

    def bookings_snapshot(self, gateway: str = "*") -> str:
        return f"{self.root}.bookings_snapshot.{gateway}"

    def queues(self, gateway: str = "*") -> str:
        return f"{self.root}.queues.{gateway}"

    def peers(self, gateway: str = "*") -> str:
        return f"{self.root}.peers.{gateway}"

    def bucket(self, name: str) -> str:
        """The name of a bucket at the broker."""
        assert name in BUCKETS, f"{name}: gateways may use {BUCKETS} alone"
        return f"{self.root.replace('.', '_')}_{name}"

    def _kept(self, bucket: str) -> tuple[str, ...]:
        """Subjects to make, read, write and follow a bucket."""
        stream, api = f"KV_{bucket}", "$JS.API"
        return (
            f"$KV.{bucket}.>",
            *(f"{api}.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE", "INFO", "PURGE")),
            *(f"{api}.STREAM.MSG.GET.{stream}", f"{api}.DIRECT.GET.{stream}.>"),
            *(f"{api}.CONSUMER.*.{stream}", f"{api}.CONSUMER.*.{stream}.>"),
        )

    def inbox(self) -> str:
        """The prefix of subjects for answers."""
        return f"{self.root}.inbox"

    def permissions(self, role: BusRole, store: str | None = None) -> Permissions:
        """The least that a gateway or a worker process can do with. `store`: its name, if not the fleet's.

        Workers neither hear prompts (texts of capsules) nor speak for gateways, and gateways not for
        workers. Members of one role are not kept apart.
        """
        if role == "worker":
            return Permissions((self.events(), self.lease()), (self.host(), self.queues()))
        named = self if store is None else Subjects.of(store)
        shared = (self.bookings(), self.bookings_snapshot(), named.peers())
        kept = [each for name in BUCKETS for each in self._kept(named.bucket(name))]
        return Permissions(
            publish=(self.host(), *shared, self.queues(), "$JS.API.INFO", "$JS.FC.>", *kept),
            subscribe=(*shared, self.events(), self.lease(), f"{self.inbox()}.>"),
        )
