"""KV that moves from worker to worker.

A move takes the link's latency and the bytes' time, beside the workers' computing; then the
command goes in with a supply: what has moved is not computed. A move whose source dies before it is
over moves nothing, and the prompt is computed at its destination. Room for what is under way is not
reserved: it is taken when the command is admitted.
"""

from dataclasses import dataclass
from typing import NamedTuple

from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.fleet.workers import Fleet, Worker
from mallee.mocker.tiers import TOKEN_NBYTES
from mallee.protocol.errors import ConfigError
from mallee.protocol.messages import Generate, Prefill


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """The link over which KV moves between workers; each pull has one of its own.

    The defaults are the router's (`router.placement.fanouts`): an 8B model with 8 KV heads in bf16, 25 GB/s.
    """

    bytes_s: float = 25e9
    latency_s: float = 2e-3
    token_nbytes: int = TOKEN_NBYTES

    def validate(self) -> "LinkConfig":
        """Itself. Raises ConfigError naming what is out of range."""
        if not 0.0 < self.bytes_s < float("inf"):
            raise ConfigError(f"bytes_s={self.bytes_s}: give bytes per second above 0")
        if not 0.0 <= self.latency_s < float("inf"):
            raise ConfigError(f"latency_s={self.latency_s}: give 0 or more seconds")
        if self.token_nbytes < 1:
            raise ConfigError(f"token_nbytes={self.token_nbytes}: give at least 1")
        return self

    @property
    def token_s(self) -> float:
        """Seconds for one token, once the first is there."""
        return self.token_nbytes / self.bytes_s

    def pull_s(self, num_tokens: int) -> float:
        """Seconds until so many tokens are there; none take none."""
        return self.latency_s + num_tokens * self.token_s if num_tokens else 0.0


class _Transfer(NamedTuple):
    worker: Worker
    command: Prefill | Generate
    num_tokens: int
    source: Worker | None


class Transfers:
    """All moves of one replay. Each has a link of its own: they don't slow one another.

    `num_broken` counts those whose source died meanwhile.
    """

    def __init__(self, clock: Clock, fleet: Fleet, link: LinkConfig) -> None:
        self.link = link.validate()
        self._clock = clock
        self._fleet = fleet
        self.num_moves = self.num_tokens = self.num_broken = 0

    def send(
        self,
        worker: Worker,
        command: Prefill | Generate,
        *,
        num_tokens: int,
        missing: int,
        source: Worker | None = None,
    ) -> float:
        """Send `command` to `worker` once the KV of its prompt's first `num_tokens` is there.

        `missing` of them have to move. Returns when. Nothing is sent if that life is over by then.
        """
        at = self._clock.now + self.link.pull_s(missing)
        if missing:
            self.num_moves += 1
            self.num_tokens += missing
        self._clock.at(at, self._arrive, _Transfer(worker, command, num_tokens, source))
        return at

    def _arrive(self, move: _Transfer) -> None:
        worker, command, num_tokens, source = move
        if not worker.is_alive:
            return
        if source is None or source.is_alive:
            worker.engine.supply(command.request, num_tokens)
        else:
            self.num_broken += 1
        self._fleet.send(worker, command)

    @property
    def nbytes(self) -> int:
        """Bytes that moved."""
        return self.num_tokens * self.link.token_nbytes
