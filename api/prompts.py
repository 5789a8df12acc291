"""Clients' prompts, messages and suffixes, checked and turned into tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import (
    MAX_MARKS,
    Conversation,
    Mark,
    digest_of,
    read_messages,
)
from mallee.api.text.histories import END_CHARS, Histories
from mallee.api.text.specials import Rendering
from mallee.api.text.tokenizer import Tokenizer
from mallee.protocol.errors import BadRequest, ContextLengthExceeded, InvalidParameter
from mallee.protocol.hashing import Tokens, as_tokens

_OTHER: Final = "\uffff"  # a text that goes on otherwise; no text has this non-character


class RenderedPrompt(NamedTuple):
    """A conversation as tokens, and the end of its text, before the answer if that is begun.

    `digests`: of its messages; of the rest of a conversation none. `places`: of marks, by its tokens.
    """

    tokens: Tokens
    end: str
    digests: tuple[int, ...] = ()
    places: tuple[int, ...] = ()


def _is_ids(value: Sequence[object]) -> bool:
    return bool(value) and set(map(type, value)) == {int}


class PromptReader:
    """Prompts, messages and suffixes as tokens. Safe to use from several threads.

    Texts and conversations are remembered for their `scope` (a tenant's) alone: see `Tokenizer.encode` and
    `Histories`.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat: ChatTemplate, vocab_size: int, *, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._histories = Histories(tokenizer, chat)
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

    def text(self, value: Any, scope: str = "", *, starts: bool) -> Tokens:
        """The tokens of a text, which may be none; `starts` as the tokenizer begins texts."""
        if value is None:
            raise BadRequest("prompt is required", param="prompt")
        if not isinstance(value, str):
            raise InvalidParameter("prompt", value, "give a string")
        return self._encode(value, scope, starts=starts)

    def conversation(
        self,
        conversation: Conversation,
        scope: str = "",
        *,
        add_generation_prompt: bool,
        starts: bool = False,
        begun: str = "",
    ) -> RenderedPrompt:
        """A conversation, rendered with its template, which writes its special tokens itself.

        `begun`: the beginning of the answer, which goes on.
        """
        if not starts:
            prompt = self._histories.prompt(
                conversation,
                scope,
                add_generation_prompt=add_generation_prompt,
                begun=begun,
                max_tokens=self._max_model_len,
            )
            if prompt is not None:
                return RenderedPrompt(*prompt)
        found = self._chat.render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            max_tokens=self._max_model_len,
        )
        whole = found.plus(self._chat.plain(begun)) if begun else found
        tokens = self._rendered(whole, scope, starts=starts)
        if not len(tokens):
            num = len(conversation.messages)
            raise InvalidParameter("messages", num, "they render to no token at all")
        digests = tuple(map(digest_of, conversation.messages))
        return RenderedPrompt(tokens, found.pieces[-1][-END_CHARS:], digests)

    def marked(
        self, prompt: RenderedPrompt, conversation: Conversation, marks: Sequence[Mark], scope: str
    ) -> RenderedPrompt:
        """The prompt of a conversation with the places of `marks`, the last few, in it.

        Each is where it parts from that of the same conversation with another text from the mark on.
        """
        places = []
        for at, num_chars in marks[-MAX_MARKS:]:
            messages = [*conversation.messages]
            if at < len(messages):  # else the first one's text was moved behind the others
                text = messages[at].text[:num_chars] + _OTHER
                messages[at] = replace(messages[at], text=text)
            found = self.rendering(
                replace(conversation, messages=messages), add_generation_prompt=False
            )
            num = next((i for i, piece in enumerate(found.pieces) if _OTHER in piece), None)
            if num is None:
                continue  # the template leaves the text out
            pieces = (*found.pieces[:num], found.pieces[num].partition(_OTHER)[0])
            tokens = self._rendered(Rendering(pieces), scope)
            most = min(len(tokens), len(prompt.tokens))
            differs = np.flatnonzero(tokens[:most] != prompt.tokens[:most])
            places.append(int(differs[0]) if len(differs) else most)
        return prompt._replace(places=tuple(places))

    def rendering(self, conversation: Conversation, *, add_generation_prompt: bool) -> Rendering:
        """A conversation as text. Raises InvalidParameter."""
        return self._chat.render(conversation, add_generation_prompt=add_generation_prompt)

    def rest(self, rendering: Rendering, begin: int, scope: str = "") -> RenderedPrompt:
        """The tokens of a rendering's text from character `begin` on, where a token begins."""
        pieces: list[str] = []
        for piece in rendering.pieces:
            pieces.append(piece[max(begin, 0) :])
            begin -= len(piece)
        pieces = [piece for piece in pieces if piece] or [""]
        return RenderedPrompt(
            self._rendered(Rendering(tuple(pieces)), scope), pieces[-1][-END_CHARS:]
        )

    def suffix(self, value: Any, param: str, scope: str = "") -> Tokens:
        """The suffix of one fork: a string, ids, or messages that continue a conversation."""
        if isinstance(value, dict):
            if set(value) != {"messages"}:
                raise InvalidParameter(param, value, 'an object has exactly the key "messages"')
            messages = read_messages(value["messages"], f"{param}.messages")
            found = self._chat.render_continuation(messages, max_tokens=self._max_model_len)
            return self._rendered(found, scope)
        return self._tokens(value, param, scope, starts=False)

    def _tokens(self, value: Any, param: str, scope: str, *, starts: bool) -> Tokens:
        if isinstance(value, str):
            return self._encode(value, scope, starts=starts)
        if value is None:
            raise BadRequest(f"{param} is required", param=param)
        if isinstance(value, list) and len(value) > self._max_model_len:
            raise ContextLengthExceeded(len(value), 0, self._max_model_len)
        if not isinstance(value, list) or (value and not _is_ids(value)):
            raise InvalidParameter(param, value, "give a string or a list of token ids")
        return self.ids(value, param)

    def _rendered(self, rendering: Rendering, scope: str, *, starts: bool = False) -> Tokens:
        """The pieces' tokens; those of one that comes again are known. Raises ContextLengthExceeded early."""
        first, *more = rendering.pieces
        if not more:
            return self._encode(first, scope, starts=starts)
        self._check_length(rendering.text)
        known: dict[str, Tokens] = {}
        found = [self._tokenizer.tokens(first, add_special_tokens=starts, scope=scope)]
        num = len(found[0])
        for piece in more:
            if piece not in known:
                known[piece] = self._tokenizer.tokens(piece, scope=scope)
            found.append(known[piece])
            num += len(known[piece])
            if num > self._max_model_len:
                raise ContextLengthExceeded(num, 0, self._max_model_len)
        return np.concatenate(found)

    def _encode(self, text: str, scope: str, *, starts: bool = False) -> Tokens:
        self._check_length(text)
        return self._tokenizer.tokens(text, add_special_tokens=starts, scope=scope)

    def _check_length(self, text: str) -> None:
        """Raises ContextLengthExceeded without tokenizing what can't possibly fit: that takes seconds."""
        longest = self._tokenizer.longest_token
        if longest is not None:
            at_least = len(text.encode(errors="replace")) // longest
            if at_least > self._max_model_len:
                raise ContextLengthExceeded(at_least, 0, self._max_model_len)

    def ids(self, ids: Sequence[int], param: str) -> Tokens:
        """Token ids as an array. Raises InvalidParameter naming the first outside the vocabulary."""
        # Python ints first: a huge one would overflow an array before it could be compared.
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            i = next(i for i, t in enumerate(ids) if not 0 <= t < self._vocab_size)
            raise InvalidParameter(
                f"{param}[{i}]", ids[i], f"token ids are 0 to {self._vocab_size - 1}"
            )
        return as_tokens(ids)
