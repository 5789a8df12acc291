"""NATS subjects, under one root per fleet so that fleets can share a broker.

mallee.{fleet}.events.{worker}               EventBatch, published by the worker
mallee.{fleet}.lease.{worker}                Lease, published by the worker every lease period
mallee.{fleet}.snapshot.{worker}             request by a gateway, answered with a Snapshot
mallee.{fleet}.bookings.{gateway}            BookingBatch, published by the gateway
mallee.{fleet}.bookings_snapshot.{gateway}   request by another, answered with a BookingSnapshot
"""

import re
from typing import NamedTuple

from mallee.protocol.errors import ConfigError

_TOKEN = re.compile(r"[A-Za-z0-9_-]+")


def check_token(name: str, what: str) -> str:
    """`name`, if it can be one token of a subject. Raises ConfigError naming the bad value."""
    if not _TOKEN.fullmatch(name):
        raise ConfigError(
            f"{what}={name!r}: use letters, digits, '-' and '_' only", what=what, value=name
        )
    return name


class Subjects(NamedTuple):
    """The subjects of one fleet. Build with `Subjects.of(fleet)`."""

    root: str

    @classmethod
    def of(cls, fleet: str) -> "Subjects":
        """Raises ConfigError if `fleet` can't be part of a subject."""
        return cls(f"mallee.{check_token(fleet, 'fleet')}")

    def events(self, worker: str = "*") -> str:
        return f"{self.root}.events.{worker}"

    def lease(self, worker: str = "*") -> str:
        return f"{self.root}.lease.{worker}"

    def snapshot(self, worker: str) -> str:
        return f"{self.root}.snapshot.{worker}"

    def bookings(self, gateway: str = "*") -> str:
        return f"{self.root}.bookings.{gateway}"

    def bookings_snapshot(self, gateway: str) -> str:
        return f"{self.root}.bookings_snapshot.{gateway}"
