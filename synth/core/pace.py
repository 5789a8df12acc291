"""The time a call takes on a fleet without queues, for traces and programs that do not say."""

from typing import Final

TOKEN_S: Final = 1 / 60
"""Time of a decoded token."""
BASE_S: Final = 0.05
"""Time of a call beside its decoded tokens, where its new prompt tokens are unknown."""
PREFILL_PER_S: Final = 20_000.0
"""Prompt tokens computed in a second."""


def service_s(tokens: int, output_tokens: int) -> float:
    """From the begin of a request that computes `tokens` new ones to its end."""
    return tokens / PREFILL_PER_S + output_tokens * TOKEN_S
