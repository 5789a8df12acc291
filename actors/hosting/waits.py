"""Commands that wait for a grammar, or behind a command that does.

A request whose grammar is compiled waits alone: of the commands after it those that name the request or a
capsule of it wait too, in order, and all others go to the engine at once.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from mallee.protocol.errors import MalleeError, Unavailable
from mallee.protocol.ids import request_of
from mallee.protocol.messages import (
    Cancel,
    Capture,
    Command,
    Delete,
    Demote,
    Fork,
    Generate,
    Inject,
    Inspect,
    Pin,
    Prefill,
    Promote,
    Release,
    Rewind,
)

MAX_HELD = 1024
"""Commands of one gateway that may wait for one worker."""

Answered: TypeAlias = Generate | Fork | Prefill


class Admitted(NamedTuple):
    """Commands for the engine now, in order; those whose grammar is to be compiled; refusals."""

    free: list[Command]
    compiling: list[Answered]
    refused: list[tuple[Answered, MalleeError]]


class Waits:
    """The waiting commands of one gateway for one worker. `is_ready` says whether a grammar is compiled."""

    def __init__(self, is_ready: Callable[[Command], bool]) -> None:
        self._is_ready = is_ready
        self._held: list[Command] = []  # in order
        self._compiling: set[int] = set()  # ids of those of `_held` whose grammar is not there yet

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, commands: Sequence[Command]) -> Admitted:
        """Take in commands that come after all before."""
        admitted = Admitted([], [], [])
        named = self._names()
        for command in commands:
            if isinstance(command, Cancel) and (held := self._ended_by(command)) is not None:
                admitted.free.extend((*self._remove(held), command, *self.release()))
                named = self._names()
                continue
            is_new = isinstance(command, Answered) and not self._is_ready(command)
            if not is_new and named.isdisjoint(_names(command)):
                admitted.free.append(command)
            elif isinstance(command, Answered) and len(self._held) >= MAX_HELD:
                admitted.refused.append((command, _full(len(self._held))))
            else:
                self._held.append(command)
                named |= _names(command)
                if is_new and isinstance(command, Answered):
                    self._compiling.add(id(command))
                    admitted.compiling.append(command)
        return admitted

    def is_compiling(self, command: Command) -> bool:
        """Whether `command` waits for its grammar."""
        return id(command) in self._compiling

    def compiled(self, command: Command) -> list[Command]:
        """The grammar of `command` is there: commands that may go to the engine now, in order."""
        self._compiling.discard(id(command))
        return self.release()

    def refuse(self, command: Command) -> list[Command]:
        """Forget `command`, which was refused: commands that may go to the engine now, in order."""
        self._held = [held for held in self._held if held is not command]
        return self.compiled(command)

    def release(self) -> list[Command]:
        """Remove and return the commands that wait for nothing any more."""
        free: list[Command] = []
        kept: list[Command] = []
        named: set[str] = set()
        for command in self._held:
            names = _names(command)
            if id(command) in self._compiling or not named.isdisjoint(names):
                kept.append(command)
                named |= names
            else:
                free.append(command)
        self._held = kept
        return free

    def _ended_by(self, cancel: Cancel) -> Answered | None:
        """The command whose request `cancel` ends as a whole, if its grammar is being compiled."""
        for held in self._held:
            if isinstance(held, Answered) and held.request == cancel.request:
                is_whole = cancel.branch is None or _num_branches(held) == 1
                return held if is_whole and id(held) in self._compiling else None
        return None

    def _remove(self, held: Answered) -> list[Command]:
        """`held` for the engine, which gets `cancel` next and answers it."""
        self._held = [each for each in self._held if each is not held]
        self._compiling.discard(id(held))
        return [replace(held, grammar=None)]

    def _names(self) -> set[str]:
        return {name for held in self._held for name in _names(held)}

    def check(self) -> None:
        """Raises AssertionError if a command waits for nothing."""
        assert self._compiling <= set(map(id, self._held)), "a grammar is compiled for no command"
        assert self._compiling or not self._held, "commands wait for nothing"


def _num_branches(command: Answered) -> int:
    """The number of branches that `command` begins."""
    match command:
        case Generate(n=n):
            return n
        case Fork(suffixes=suffixes):
            return len(suffixes)
    return 1


def _names(command: Command) -> set[str]:
    """Requests and capsules that `command` makes or needs. Commands that share none have no order."""
    match command:
        case Release(capsule=capsule):
            return {capsule, request_of(capsule)}
        case Fork(request=request, capsule=capsule):
            return {request, capsule, request_of(capsule)}
        case Prefill(request=request, capsule=capsule) if capsule:
            return {request, capsule}
        case Capture(request=request, of=of) | Inject(request=request, of=of):
            return {request, of}
        case Rewind() | Pin() | Inspect() | Demote() | Promote() | Delete():
            return {command.request, command.capsule, request_of(command.capsule)}
    return {command.request}


def _full(waiting: int) -> Unavailable:
    return Unavailable(
        f"{waiting} commands wait for grammars already, the limit is {MAX_HELD}; retry later",
        waiting=waiting,
        limit=MAX_HELD,
    )
