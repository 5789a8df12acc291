"""Faults of a replay: a schedule, read from JSON, played on a fleet.

A file is a list of faults, in any order:

    [{"kind": "crash",   "at_s": 5, "worker": "w1"},
     {"kind": "restart", "at_s": 9, "worker": "w1"},
     {"kind": "drain",   "at_s": 9, "worker": 2},
     {"kind": "join",    "at_s": 12, "worker": "w8"},
     {"kind": "slow",    "at_s": 3, "worker": "w0", "factor": 4, "duration_s": 2.5},
     {"kind": "outage",  "at_s": 6, "duration_s": 2}]

Workers are named as the fleet names them, or by number (2 is "w2"). Doesn't know what a fleet is made
of: `play` calls its verbs.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from mallee.protocol.errors import ConfigError


class _Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    at_s: float


class Crash(_Fault, frozen=True, tag="crash"):
    """The worker is gone in the middle of its step, with all it holds."""

    worker: str | int


class Restart(_Fault, frozen=True, tag="restart"):
    """The worker begins a new life under its old name and address, with an empty cache.

    If it still lives it crashes first.
    """

    worker: str | int


class Drain(_Fault, frozen=True, tag="drain"):
    """The worker takes nothing new, ends what it has, and leaves."""

    worker: str | int


class Join(_Fault, frozen=True, tag="join"):
    """A worker of a new name joins the fleet."""

    worker: str | int


class Slow(_Fault, frozen=True, tag="slow"):
    """Steps that the worker begins within `duration_s` take `factor` times as long."""

    worker: str | int
    factor: float
    duration_s: float


class Outage(_Fault, frozen=True, tag="outage"):
    """The broker is gone for `duration_s`: no event, lease or snapshot arrives, none is kept for later."""

    duration_s: float


Fault: TypeAlias = Crash | Restart | Drain | Join | Slow | Outage
Verb: TypeAlias = Literal["crash", "restart", "drain", "join", "slow", "broker_down", "broker_up"]

_decoder = msgspec.json.Decoder(tuple[Fault, ...])


class Action(NamedTuple):
    """One verb at one time. `factor` 1.0 ends a slow spell; `worker` is "" where none is meant."""

    at_s: float
    verb: Verb
    worker: str = ""
    factor: float = 1.0


class Faultable(Protocol):
    """A fleet that faults happen to. Every call is at the fleet's own present time."""

    def crash(self, worker: str) -> None:
        """Kill `worker`. No change if it has left already."""
        ...

    def restart(self, worker: str) -> None:
        """Begin a new life of `worker`: same name and address, younger incarnation, numbers from 0."""
        ...

    def drain(self, worker: str) -> None:
        """Let `worker` leave when it has ended what it has. No change if it is gone."""
        ...

    def join(self, worker: str) -> None:
        """A new worker."""
        ...

    def slow(self, worker: str, factor: float) -> None:
        """From its next step on `worker` takes `factor` times as long as it should."""
        ...

    def broker(self, is_up: bool) -> None:
        """Whether what is broadcast arrives."""
        ...


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
    found: list[Action] = []
    for fault in ordered:
        match fault:
            case Slow(at_s, worker, factor, duration_s):
                name = worker_name(worker)
                found.append(Action(at_s, "slow", name, factor))
                found.append(Action(at_s + duration_s, "slow", name))
            case Outage(at_s, duration_s):
                found.append(Action(at_s, "broker_down"))
                found.append(Action(at_s + duration_s, "broker_up"))
            case Crash():
                found.append(Action(fault.at_s, "crash", worker_name(fault.worker)))
            case Restart():
                found.append(Action(fault.at_s, "restart", worker_name(fault.worker)))
            case Drain():
                found.append(Action(fault.at_s, "drain", worker_name(fault.worker)))
            case Join():
                found.append(Action(fault.at_s, "join", worker_name(fault.worker)))
    return sorted(found, key=lambda action: action.at_s)  # stable: a spell may end as one begins


def play(action: Action, fleet: Faultable) -> None:
    """Apply `action` to `fleet` now."""
    match action.verb:
        case "crash":
            fleet.crash(action.worker)
        case "restart":
            fleet.restart(action.worker)
        case "drain":
            fleet.drain(action.worker)
        case "join":
            fleet.join(action.worker)
        case "slow":
            fleet.slow(action.worker, action.factor)
        case "broker_down":
            fleet.broker(False)
        case "broker_up":
            fleet.broker(True)


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
