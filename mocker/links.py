"""The links over which mocked engines lend each other KV, and the way to the engines at their other ends."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol, TypeAlias

from mallee.protocol.errors import ConfigError, MalleeError
from mallee.protocol.messages import Holder
from mallee.worker.transfer.values import Ask, Loan

TOKEN_NBYTES: Final = (2 << 20) // 16  # 32 layers, 8 KV heads of 128, keys and values in bf16

Told: TypeAlias = Callable[[Loan | MalleeError], None]


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """The link between two workers: the pulls of one from the other go over it one after another.

    A question takes the latency, and as long as the lender takes to come to it; then a pull takes its bytes'
    time. The defaults are the router's (`router.config.SpillModel`): an 8B model with 8 KV heads in bf16,
    25 GB/s.
    """

    bytes_s: float = 25e9
    latency_s: float = 2e-3
    token_nbytes: int = TOKEN_NBYTES

    def validate(self) -> "LinkConfig":
        """Itself. Raises ConfigError naming what is out of range."""
        if not 0.0 < self.bytes_s < inf:
            raise ConfigError(f"bytes_s={self.bytes_s}: give bytes per second above 0")
        if not 0.0 <= self.latency_s < inf:
            raise ConfigError(f"latency_s={self.latency_s}: give 0 or more seconds")
        if self.token_nbytes < 1:
            raise ConfigError(f"token_nbytes={self.token_nbytes}: give at least 1")
        return self

    @property
    def token_s(self) -> float:
        """Seconds for one token, once the first is there."""
        return self.token_nbytes / self.bytes_s


class Peers(Protocol):
    """The engines that one may borrow from."""

    @property
    def link(self) -> LinkConfig:
        """That to each of them."""
        ...

    def ask(self, ask: Ask, told: Told) -> None:
        """Have `told` called with the answer, later."""
        ...

    def left_at(self, holder: Holder) -> float:
        """The end of that life of the holder; infinite while it goes on."""
        ...

    def pulled(self, num_blocks: int, *, is_first: bool, is_broken: bool) -> None:
        """Count blocks that came; `is_first`: of their loan. `is_broken`: its lender was lost meanwhile."""
        ...
