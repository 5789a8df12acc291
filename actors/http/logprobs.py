"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

LOWEST: Final = -9999.0  # JSON has no minus infinity

TokenBytes: TypeAlias = Callable[[int], bytes]
"""What a token stands for; not always whole characters."""


class TokenChance(NamedTuple):
    """A drawn token, its log-probability, and those of the likeliest in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def chat_logprobs(chances: Sequence[TokenChance], token_bytes: TokenBytes) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": _text(raw), "logprob": max(logprob, LOWEST), "bytes": list(raw)}

    content = [
        {
            **entry(chance.token, chance.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in chance.top],
        }
        for chance in chances
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    chances: Sequence[TokenChance], token_bytes: TokenBytes, offset: int
) -> dict[str, Any]:
    """`logprobs` of a completion choice whose first token stands `offset` characters into its text.

    The drawn token is among `top_logprobs` even if it is none of the likeliest.
    """
    tokens = [_text(token_bytes(chance.token)) for chance in chances]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [max(chance.logprob, LOWEST) for chance in chances],
        "tokens": tokens,
        "top_logprobs": [_top(chance, token_bytes) for chance in chances],
    }


def _top(chance: TokenChance, token_bytes: TokenBytes) -> dict[str, float]:
    top: dict[str, float] = {}
    for token, logprob in (*chance.top, (chance.token, chance.logprob)):
        # Two tokens may be written alike (parts of characters): the likelier stands for both.
        top.setdefault(_text(token_bytes(token)), max(logprob, LOWEST))
    return top


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
