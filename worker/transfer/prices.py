"""Prices of fetching blocks and of computing them, in seconds: measured as the engine goes on."""

from typing import Final

from mallee.worker.transfer.values import DISK, HOST, PEER

_WEIGHT: Final = 0.2  # of a new measurement
LATENCY_S: Final = {HOST: 2e-4, DISK: 5e-3, PEER: 3e-3}


class MeasuredPrices:
    """Moving averages of what moves and prompts took; a tier that was never measured costs its latency.

    Without `__slots__`: a class that mypyc compiles can't inherit them from one that it doesn't.
    """

    def __init__(self, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes
        self._byte_s = {HOST: 0.0, DISK: 0.0, PEER: 0.0}
        self._token_s = 0.0

    def fetch_s(self, tier: int, num_blocks: int) -> float:
        """Seconds to bring so many blocks from `tier` to the device."""
        return LATENCY_S[tier] + num_blocks * self._block_nbytes * self._byte_s[tier]

    def compute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens of a prompt; 0 while that is not known."""
        return num_tokens * self._token_s

    def moved(self, tier: int, num_blocks: int, seconds: float) -> None:
        """So many blocks came from `tier`."""
        if num_blocks and self._block_nbytes:
            seconds -= min(LATENCY_S[tier], seconds / 2)
            each_s, known_s = seconds / (num_blocks * self._block_nbytes), self._byte_s[tier]
            self._byte_s[tier] = each_s if not known_s else known_s + _WEIGHT * (each_s - known_s)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of prompts alone computed so many tokens."""
        if seconds <= 0:
            return  # on a clock that stands still in a step
        each_s = seconds / num_tokens
        self._token_s = (
            each_s if not self._token_s else self._token_s + _WEIGHT * (each_s - self._token_s)
        )
