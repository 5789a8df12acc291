"""What a user turns on a learned model. At their defaults the source is generated as it was."""

from dataclasses import dataclass, fields

from mallee.protocol.errors import ConfigError

_WHOLE = ("prefix_root", "tenants", "agents", "fork_width")
_MOST = 10_000  # of what takes memory; a slip of the keyboard would take all there is
_LEAST, _GREATEST = 1e-9, 1e9  # factors beyond make times and lengths that no number can hold
_BOUNDED = (*_WHOLE, "prefix_len", "prompt_len", "session_length")


@dataclass(frozen=True, slots=True)
class Knobs:
    """Multipliers are of what was learned, and 1 leaves it. The last five are the session model's alone.

    `prefix_len` stretches shared text, `prompt_len` text that is a request's own, `osl` answers;
    `prefix_root` gives as many disjoint families of sessions, each session wholly in one; `speedup`
    divides all times between arrivals. `tenants` independent arrival processes share the load, each
    with a forest of its own. `agents` is how many children a spawn or swarm has, `fork_width` how
    many branches a fork (None: as learned). `tool_latency` stretches tool and human waits,
    `session_length` the number of calls of a session.
    """

    prefix_len: float = 1.0
    prefix_root: int = 1
    prompt_len: float = 1.0
    osl: float = 1.0
    speedup: float = 1.0
    tenants: int = 1
    agents: int | None = None
    fork_width: int | None = None
    tool_latency: float = 1.0
    session_length: float = 1.0

    def validate(self) -> "Knobs":
        """Itself. Raises ConfigError naming the knob."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name in _WHOLE and (value < 1 or value != int(value)):
                raise ConfigError(f"{field.name}={value}: give a whole number from 1 on")
            if not 0 < value < float("inf"):
                raise ConfigError(f"{field.name}={value}: give more than 0")
            if field.name in _BOUNDED and value > _MOST:
                raise ConfigError(f"{field.name}={value}: give at most {_MOST:,}")
            if not _LEAST <= value <= _GREATEST:
                raise ConfigError(f"{field.name}={value}: give {_LEAST:g} to {_GREATEST:g}")
        return self
