"""Bodies of requests as prompts: the tokens that a pod will compute, as far as they can be known here.

Rendered as vLLM renders them: messages with the checkpoint's template, tools and all, and token ids as they
are. A body that can't be read, or that its template refuses, has no prompt: its pod may understand it, or
refuse it. Then the session keeps requests together that belong together.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from mallee.actors.front.pods.kv_events import salt_of
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import MAX_MESSAGES
from mallee.api.text.tokenizer import Tokenizer
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.hashing import NO_HASHES, Hashes, Tokens, as_tokens, block_hashes

AT_ONCE_NBYTES: Final = 16 << 10  # a body that is read without leaving the loop
TEXT_TOKEN_NBYTES: Final = 4  # without a tokenizer
MAX_TEXT_CHARS: Final = (
    1 << 21
)  # of a prompt that are looked at: more would take a second and longer
OBJECTIVE_HEADERS: Final = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
SESSION_HEADERS: Final = (
    *("x-session-id", "x-session-affinity", "session-id", "session_id", "x-dynamo-session-id"),
    *("x-claude-code-session-id", "thread-id"),
)
_OUTPUT_KEYS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_DRAWN: Final = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,9})')
_CACHED: Final = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,9})')
_NO_TOKENS: Final = as_tokens([])


class Prompt(NamedTuple):
    """A request as the router needs it. Without hashes nothing of its text is known."""

    hashes: Hashes
    num_tokens: int
    max_tokens: int | None
    affinity: int  # digest of its session or prompt cache key; 0: it has none
    objective: str
    model: str
    num_branches: int


class PromptReader:
    """Reads bodies for one model. Safe to use from several threads: only the tokenizer remembers anything."""

    def __init__(
        self, tokenizer: Tokenizer | None, chat: ChatTemplate | None, block_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._block_size = block_size

    def read(self, headers: Mapping[str, str], raw: bytes, *, adapters: Collection[str]) -> Prompt:
        """The prompt of a request. `adapters`: names of models whose blocks are a LoRA adapter's."""
        body = _object(raw)
        cache_salt = _text_at(body, "cache_salt")
        model = _text_at(body, "model")
        path = headers.get(":path", "").partition("?")[0]
        tokens = self._tokens(path, body, cache_salt)
        salt = salt_of(model if model in adapters else "", cache_salt)
        hashes = block_hashes(tokens, self._block_size, salt=salt) if len(tokens) else NO_HASHES
        limits = (body.get(key) for key in _OUTPUT_KEYS)
        most = next((n for n in limits if isinstance(n, int) and 0 < n < 1 << 31), None)
        key = _text_at(body, "prompt_cache_key") or next(
            (headers[name] for name in SESSION_HEADERS if headers.get(name)), ""
        )
        objective = next((headers[name] for name in OBJECTIVE_HEADERS if name in headers), "")
        num = body.get("n")
        affinity = xxhash.xxh3_64_intdigest(f"{cache_salt}\n{key}".encode()) if key else 0
        return Prompt(
            hashes=hashes,
            num_tokens=len(tokens) or len(raw) // TEXT_TOKEN_NBYTES,
            max_tokens=most,
            affinity=affinity,
            objective=objective,
            model=model,
            num_branches=num if isinstance(num, int) and num > 0 else 1,
        )

    def encoded(self, text: str) -> list[int] | None:
        """The tokens of a text; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.encode(text)

    def _tokens(self, path: str, body: dict[str, Any], scope: str) -> Tokens:
        """None of a body without a prompt, or with one that is not understood."""
        try:
            if "prompt" in body and "messages" not in body:
                return self._of_prompt(body.get("prompt"), scope)
            messages = _messages(path, body)
            return _NO_TOKENS if messages is None else self._of_messages(messages, body, scope)
        except (InvalidParameter, TypeError, ValueError, OverflowError, KeyError, RecursionError):
            return _NO_TOKENS

    def _of_prompt(self, prompt: Any, scope: str) -> Tokens:
        """Of several prompts, the first counts."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._encoded(prompt, scope, starts=True)
        return as_tokens(prompt) if isinstance(prompt, list) else _NO_TOKENS

    def _of_messages(self, messages: list[Any], body: dict[str, Any], scope: str) -> Tokens:
        if self._chat is None:
            return self._encoded(msgspec.json.encode(messages).decode(), scope)
        extra = body.get("chat_template_kwargs")
        variables = {
            "tools": body.get("tools"),
            "documents": body.get("documents"),
            **(extra if isinstance(extra, dict) else {}),
        }
        add_prompt = body.get("add_generation_prompt", True) is not False
        text = self._chat.render_unchecked(
            [_plain(message) for message in messages], variables, add_generation_prompt=add_prompt
        )
        return self._encoded(text, scope)

    def _encoded(self, text: str, scope: str, *, starts: bool = False) -> Tokens:
        text = text[:MAX_TEXT_CHARS]
        if self._tokenizer is not None:
            return self._tokenizer.tokens(text, add_special_tokens=starts, scope=scope)
        raw = text.encode(errors="replace")
        return np.frombuffer(raw[: len(raw) // TEXT_TOKEN_NBYTES * TEXT_TOKEN_NBYTES], "<u4")


def cached_tokens(tail: bytes) -> int | None:
    """The prompt's tokens that were cached, by the usage at the end of an answer; None: it does not say."""
    return _last(_CACHED, tail)


def drawn_tokens(tail: bytes) -> int | None:
    """The answer's tokens, by its usage; None: it does not say."""
    return _last(_DRAWN, tail)


def _last(pattern: re.Pattern[bytes], tail: bytes) -> int | None:
    found = pattern.findall(tail)
    return int(found[-1]) if found else None


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw) if raw else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the last: of deep nests
        return {}
    return body if isinstance(body, dict) else {}


def _text_at(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    return value if isinstance(value, str) else ""


def _messages(path: str, body: Mapping[str, Any]) -> list[Any] | None:
    """The conversation in a body of the chat, Responses or Messages API."""
    if path.endswith("/responses"):
        given, system = body.get("input"), body.get("instructions")
    else:
        given, system = body.get("messages"), body.get("system")
    if isinstance(given, str) and "input" in body:
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or len(given) > MAX_MESSAGES:
        return None
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *given]


def _plain(message: Any) -> dict[str, Any]:
    """A message as templates want it: content as text, arguments of tool calls as objects.

    Raises ValueError for parts that are no text.
    """
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    clean = dict(message)
    content = clean.get("content")
    if isinstance(content, list):
        clean["content"] = "\n".join(_part(part) for part in content)
    calls = clean.get("tool_calls")
    if isinstance(calls, list):
        clean["tool_calls"] = [_call(call) for call in calls]
    return clean


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError("a part of a message that is no text")


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        arguments = msgspec.json.decode(function["arguments"] or "{}")
        return {**call, "function": {**function, "arguments": arguments}}
    return call
