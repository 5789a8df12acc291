"""What clients give as a prompt, checked and turned into tokens."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mallee.protocol.errors import BadRequest, ContextLengthExceeded, InvalidParameter
from mallee.protocol.hashing import Tokens, as_tokens


class TextCodec(Protocol):
    """What the API needs of a tokenizer; `vocab_size` and stop ids come from the model spec."""

    @property
    def longest_token(self) -> int | None:
        """UTF-8 bytes that one token can stand for, if that is bounded."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = False, scope: str = "") -> list[int]:
        """What is remembered of `text` is used for texts of its `scope` alone."""
        ...


class Chat(Protocol):
    """What the API needs of a chat template. Both raise InvalidParameter naming `messages`."""

    def render(self, messages: Any, add_generation_prompt: bool = True) -> str: ...

    def render_continuation(self, messages: Any) -> str: ...


def _is_ids(value: Sequence[object]) -> bool:
    return bool(value) and set(map(type, value)) == {int}


class PromptReader:
    """Prompts, messages and suffixes as tokens. Stateless; safe to use from several threads.

    `scope` is whose text it is: see `TextCodec.encode`.
    """

    def __init__(
        self, codec: TextCodec, chat: Chat, vocab_size: int, *, max_model_len: int
    ) -> None:
        self._codec = codec
        self._chat = chat
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def prompts(self, prompt: Any, scope: str = "") -> list[Tokens]:
        """The prompts of a completion: a string, strings, ids, or lists of ids; none is empty."""
        if isinstance(prompt, list) and prompt and not _is_ids(prompt):
            kinds = set(map(type, prompt))
            if kinds not in ({str}, {list}):
                raise InvalidParameter(
                    "prompt", prompt, "give a string, strings, token ids, or lists of token ids"
                )
            return [self.prompt(p, f"prompt[{i}]", scope) for i, p in enumerate(prompt)]
        return [self.prompt(prompt, "prompt", scope)]

    def prompt(self, value: Any, param: str = "prompt", scope: str = "") -> Tokens:
        """One prompt, with the special tokens that the tokenizer puts at a beginning."""
        tokens = self._tokens(value, param, scope, starts=True)
        if not len(tokens):
            raise InvalidParameter(param, value, "the prompt is empty; give at least one token")
        return tokens

    def conversation(
        self, messages: Any, scope: str = "", *, add_generation_prompt: bool
    ) -> Tokens:
        """Messages, rendered with the checkpoint's template."""
        if messages is None:
            raise BadRequest("messages is required", param="messages")
        text = self._chat.render(messages, add_generation_prompt=add_generation_prompt)
        tokens = self._encode(text, scope)
        if not len(tokens):
            raise InvalidParameter("messages", messages, "they render to no token at all")
        return tokens

    def suffix(self, value: Any, param: str, scope: str = "") -> Tokens:
        """What one fork adds: a string, ids, or messages that continue a conversation."""
        if isinstance(value, dict):
            if set(value) != {"messages"}:
                raise InvalidParameter(param, value, 'an object has exactly the key "messages"')
            return self._encode(self._chat.render_continuation(value["messages"]), scope)
        return self._tokens(value, param, scope, starts=False)

    def _tokens(self, value: Any, param: str, scope: str, *, starts: bool) -> Tokens:
        if isinstance(value, str):
            return self._encode(value, scope, starts=starts)
        if value is None:
            raise BadRequest(f"{param} is required", param=param)
        if not isinstance(value, list) or (value and not _is_ids(value)):
            raise InvalidParameter(param, value, "give a string or a list of token ids")
        return self.ids(value, param)

    def _encode(self, text: str, scope: str, *, starts: bool = False) -> Tokens:
        """Raises ContextLengthExceeded without tokenizing what can't possibly fit: that takes seconds."""
        longest = self._codec.longest_token
        if longest is not None:
            at_least = len(text.encode(errors="replace")) // longest
            if at_least > self._max_model_len:
                raise ContextLengthExceeded(at_least, 0, self._max_model_len)
        return as_tokens(self._codec.encode(text, add_special_tokens=starts, scope=scope))

    def ids(self, ids: list[int], param: str) -> Tokens:
        """Token ids as an array. Raises InvalidParameter naming the first outside the vocabulary."""
        # Python ints first: a huge one would overflow an array before it could be compared.
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            i = next(i for i, t in enumerate(ids) if not 0 <= t < self._vocab_size)
            raise InvalidParameter(
                f"{param}[{i}]", ids[i], f"token ids are 0 to {self._vocab_size - 1}"
            )
        return np.array(ids, dtype="<u4")
