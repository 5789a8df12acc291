"""Faults of a replay: a schedule, read from JSON, played on a fleet.

A file is a list of faults, in any order:

    [{"kind": "crash",   "at_s": 5, "worker": "w1"},
     {"kind": "restart", "at_s": 9, "worker": "w1"},
     {"kind": "drain",   "at_s": 9, "worker": 2},
     {"kind": "join",    "at_s": 12, "worker": "w8"},
     {"kind": "slow",    "at_s": 3, "worker": "w0", "factor": 4, "duration_s": 2.5},
     {"kind": "outage",  "at_s": 6, "duration_s": 2}]

Workers are named as the fleet names them, or by number (2 is "w2"). Doesn't know what a fleet is made
of: an `Action` calls its verbs.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from mallee.protocol.errors import ConfigError


class Action(NamedTuple):
    """One call of a fleet at one time: the name of its method, and what it takes."""

    at_s: float
    verb: str
    args: tuple[Any, ...]

    def play(self, fleet: Any) -> None:
        """Apply it to `fleet` (as `FaultyFleet`) now."""
        getattr(fleet, self.verb)(*self.args)


class _Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    at_s: float


class _OfWorker(_Fault, frozen=True):
    worker: str | int

    def actions(self) -> list[Action]:
        """The verb is the fault's kind."""
        return [Action(self.at_s, type(self).__name__.lower(), (worker_name(self.worker),))]


class Crash(_OfWorker, frozen=True, tag="crash"):
    """The worker is gone in the middle of its step, with all it holds."""


class Restart(_OfWorker, frozen=True, tag="restart"):
    """The worker begins a new life under its old name and address, with an empty cache.

    If it still lives it crashes first.
    """


class Drain(_OfWorker, frozen=True, tag="drain"):
    """The worker takes nothing new, and leaves when every gateway has let go of it.

    A gateway does when its requests there have ended and the capsules that it keeps there are elsewhere.
    """


class Join(_OfWorker, frozen=True, tag="join"):
    """A worker of a new name joins the fleet."""


class Slow(_OfWorker, frozen=True, tag="slow"):
    """Steps that the worker begins within `duration_s` take `factor` times as long."""

    factor: float
    duration_s: float

    def actions(self) -> list[Action]:
        """Factor 1 ends the spell."""
        name = worker_name(self.worker)
        return [
            Action(self.at_s, "slow", (name, self.factor)),
            Action(self.at_s + self.duration_s, "slow", (name, 1.0)),
        ]


class Outage(_Fault, frozen=True, tag="outage"):
    """The broker is gone for `duration_s`: no event, lease or snapshot arrives, none is kept for later."""

    duration_s: float

    def actions(self) -> list[Action]:
        """Down, and up again."""
        return [
            Action(self.at_s, "broker", (False,)),
            Action(self.at_s + self.duration_s, "broker", (True,)),
        ]


Fault: TypeAlias = Crash | Restart | Drain | Join | Slow | Outage

_decoder = msgspec.json.Decoder(tuple[Fault, ...])


def worker_name(worker: str | int) -> str:
    """The name of a worker that is given by name or by number."""
    return worker if isinstance(worker, str) else f"w{worker}"


def load_faults(path: str | Path) -> tuple[Fault, ...]:
    """The faults of a file. Raises ConfigError naming the file and the field that is wrong."""
    try:
        raw = Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(f"faults {path}: {e.strerror}; give a JSON file") from e
    try:
        return parse_faults(raw)
    except ConfigError as e:
        raise ConfigError(f"faults {path}: {e}") from e


def parse_faults(raw: bytes | str) -> tuple[Fault, ...]:
    """Faults in JSON. Raises ConfigError naming the place and the remedy."""
    try:
        faults = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"{e}; give a list of objects with kind (crash, restart, drain, join, slow, outage),"
            " at_s and what that kind needs"
        ) from e
    for i, fault in enumerate(faults):
        _check_times(i, fault)
    return faults


def actions(faults: Iterable[Fault], num_engines: int) -> list[Action]:
    """The actions of `faults` on a fleet of w0 .. w<num_engines - 1> by time, equal times in order.

    Raises ConfigError for faults that can't be: of workers that are not there (any more), or spells of
    one kind that overlap.
    """
    ordered = sorted(faults, key=lambda fault: fault.at_s)
    _check_story(ordered, num_engines)
    found = [action for fault in ordered for action in fault.actions()]
    return sorted(found, key=lambda action: action.at_s)  # stable: a spell may end as one begins


def _check_times(index: int, fault: Fault) -> None:
    if not 0.0 <= fault.at_s < math.inf:
        raise ConfigError(f"fault {index}: at_s={fault.at_s}: give seconds from 0 on")
    if isinstance(fault, Slow | Outage) and not 0.0 < fault.duration_s < math.inf:
        raise ConfigError(f"fault {index}: duration_s={fault.duration_s}: give more than 0 seconds")
    if isinstance(fault, Slow) and not 0.0 < fault.factor < math.inf:
        raise ConfigError(
            f"fault {index}: factor={fault.factor}: give more than 0; 2 is half speed"
        )


def _check_story(ordered: Sequence[Fault], num_engines: int) -> None:
    """Each fault can happen after those before it."""
    known = {worker_name(i) for i in range(num_engines)}
    dead: set[str] = set()
    busy_until: dict[str, float] = {}  # by worker, "" for the broker: when its spell is over
    for fault in ordered:
        name = "" if isinstance(fault, Outage) else worker_name(fault.worker)
        place = f"{type(fault).__name__.lower()} at {fault.at_s} s"
        if isinstance(fault, Join):
            if name in known:
                raise ConfigError(f"{place}: there is a {name} already; take a name of its own")
            known.add(name)
        elif name and name not in known:
            raise ConfigError(f"{place}: no worker {name}; the fleet begins with {num_engines}")
        if isinstance(fault, Crash | Drain) and name in dead:
            raise ConfigError(
                f"{place}: {name} is dead by then; restart it first, or leave this out"
            )
        if isinstance(fault, Crash):
            dead.add(name)
        elif isinstance(fault, Restart):
            dead.discard(name)
        elif isinstance(fault, Slow | Outage):
            if fault.at_s < busy_until.get(name, 0.0):
                raise ConfigError(f"{place}: the one before it lasts until {busy_until[name]} s")
            busy_until[name] = fault.at_s + fault.duration_s
