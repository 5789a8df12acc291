"""Collects changes of the cache since the last step, in order, as wire events.

The tree writes hashes as blocks come and go; neighbours of one kind become one run (`Stored`, `Removed`).
A block stored and removed within one step leaves both marks: receivers apply them in order.
"""

import struct
from typing import TypeAlias

from mallee.protocol.events import (
    CapsuleReleased,
    CapsuleStored,
    Event,
    Removed,
    Stored,
)

_Entry: TypeAlias = CapsuleStored | CapsuleReleased | tuple[tuple[bool, int, int], list[int]]


class Journal:
    """Collects changes; `drain` hands them over and starts afresh."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def stored(self, block_hashes: list[int], group: int = 0, *, tier: int = 0) -> None:
        self._run(True, group, tier).extend(block_hashes)

    def removed(self, block_hash: int, group: int = 0, *, tier: int = 0) -> None:
        self._run(False, group, tier).append(block_hash)

    def capsule(self, event: CapsuleStored | CapsuleReleased) -> None:
        self._entries.append(event)

    def drain(self) -> tuple[Event, ...]:
        """Everything since the last drain, in order."""
        entries, self._entries = self._entries, []
        return tuple(_as_event(entry) for entry in entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _run(self, is_stored: bool, group: int, tier: int) -> list[int]:
        kind = (is_stored, group, tier)
        if self._entries:
            last = self._entries[-1]
            if isinstance(last, tuple) and last[0] == kind:
                return last[1]
        run: list[int] = []
        self._entries.append((kind, run))
        return run


def _as_event(entry: _Entry) -> Event:
    if not isinstance(entry, tuple):
        return entry
    (is_stored, group, tier), run = entry
    raw = struct.pack(f"<{len(run)}Q", *run)  # short runs: a tenth of what an array takes
    return Stored(raw, tier, group=group) if is_stored else Removed(raw, tier, group=group)
