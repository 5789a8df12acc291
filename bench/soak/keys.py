"""API keys of the clients, and what becomes of them: one is replaced, one expires, one is limited.

For a while the file of keys is broken, and the keys before it hold.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from mallee.gateway.access.keys import NewKey, digest, new_key

OWNERS: Final = ("acme", "birch", "rotated", "brief")  # keys, as clients are given them
PER_MINUTE: Final = 12  # requests of the limited key
GRACE_S: Final = 15.0  # after a change, until a gateway under faults has read it
BROKEN: Final = (0.15, 0.25)  # parts of the run
ROTATED_AT: Final = 0.4
EXPIRES_AT: Final = 0.5


class Keys:
    """The content of one file over time. Clients name a key; `token` is its secret at that moment."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._changed_at: dict[str, float] = {}  # by name
        self._made: dict[str, NewKey] = {
            "operator": new_key("operator", "operator", None),
            "limited": new_key("limited", "client", None, requests_per_minute=PER_MINUTE),
            **{name: new_key(name, "client", name) for name in OWNERS},
        }
        self._old = new_key("rotated", "client", "rotated")
        self._next, self._made["rotated"] = self._made["rotated"], self._old
        self._write()

    @property
    def secrets(self) -> list[str]:
        """Texts that may be shown nowhere."""
        tokens = [each.token for each in (*self._made.values(), self._old, self._next)]
        return [*tokens, *map(digest, tokens)]

    @property
    def ended(self) -> list[str]:
        """Secrets of keys that are withdrawn or have expired, once `play` is over."""
        return [self._old.token, self._made["brief"].token]

    def token(self, name: str) -> str:
        return self._made[name].token

    def choose(self, rng: random.Random) -> str:
        """The name of a key that has not expired."""
        return rng.choice([name for name in OWNERS if name != "brief" or not self._has_expired()])

    def may_be_refused(self, name: str, since: float) -> bool:
        """Whether a request with that key, begun at `since` of the monotonic clock, may get 401."""
        if name == "brief":  # clocks of gateways jump by hours
            return "brief" in self._changed_at
        changed_at = self._changed_at.get(name)
        return changed_at is not None and since < changed_at + GRACE_S

    async def play(self, seconds: float) -> None:
        """All that becomes of the keys in a run of so long."""
        begin, expires = (
            time.monotonic(),
            datetime.fromtimestamp(time.time() + EXPIRES_AT * seconds, UTC),
        )
        self._changed_at["brief"] = begin + EXPIRES_AT * seconds
        self._made["brief"].entry["expires"] = expires.isoformat()
        self._write()
        steps: list[tuple[float, Callable[[], None]]] = [
            (BROKEN[0], lambda: self._replace("keys: [{name: ")),
            (BROKEN[1], self._write),
            (ROTATED_AT, self._rotate),
        ]
        for part, step in steps:
            await asyncio.sleep(begin + part * seconds - time.monotonic())
            step()

    def _has_expired(self) -> bool:
        return time.monotonic() > self._changed_at.get("brief", float("inf"))

    def _rotate(self) -> None:
        self._made["rotated"] = self._next
        self._changed_at["rotated"] = time.monotonic()
        self._write()

    def _write(self) -> None:
        entries: list[dict[str, Any]] = [each.entry for each in self._made.values()]
        self._replace(yaml.safe_dump({"keys": entries}))

    def _replace(self, text: str) -> None:
        made = self.file.with_suffix(".new")
        made.touch(mode=0o600)
        made.write_text(text)
        os.replace(made, self.file)
