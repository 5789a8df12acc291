"""The knobs of generation. At their defaults a model generates what it learned."""

from dataclasses import dataclass, fields
from typing import Final

from mallee.protocol.errors import ConfigError

_MOST: Final = 10_000  # of what takes memory
_LEAST, _GREATEST = 1e-9, 1e9  # factors beyond overflow times and lengths


@dataclass(frozen=True, slots=True)
class Knobs:
    """Multipliers of what was learned; 1 leaves it.

    `prefix_len` stretches shared text, `prompt_len` a request's own text, `osl` answers; `prefix_root`
    makes as many disjoint families of sessions, each session wholly in one; `speedup` divides all times
    between arrivals.
    """

    prefix_len: float = 1.0
    prefix_root: int = 1
    prompt_len: float = 1.0
    osl: float = 1.0
    speedup: float = 1.0

    def validate(self, requests: int = 1) -> "Knobs":
        """Return the knobs, for so many requests. Raises ConfigError naming the first thing out of range."""
        if requests < 1:
            raise ConfigError(f"requests={requests}: give at least one")
        for field in fields(self):
            value = getattr(self, field.name)
            is_whole = field.name == "prefix_root"
            if is_whole and (value < 1 or value != int(value)):
                raise ConfigError(f"{field.name}={value}: give a whole number from 1 on")
            if not 0 < value < float("inf"):
                raise ConfigError(f"{field.name}={value}: give more than 0")
            if field.name.startswith("pr") and value > _MOST:
                raise ConfigError(f"{field.name}={value}: give at most {_MOST:,}")
            if not _LEAST <= value <= _GREATEST:
                raise ConfigError(f"{field.name}={value}: give {_LEAST:g} to {_GREATEST:g}")
        return self


AS_LEARNED: Final = Knobs()
