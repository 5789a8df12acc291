"""Grammars by llguidance over one checkpoint's tokenizer: which tokens may come next, as bits.

Doesn't know branches or steps. A grammar is compiled once, after a trial in a child process, and kept
while it is among the newest; its first mask is computed then too, so that a grammar beyond a limit is
refused and not an answer broken off.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, grammar_from

from mallee.protocol.errors import InvalidParameter
from mallee.protocol.messages import JSON_ESCAPES, JSON_SPACE, Grammar
from mallee.worker.forward import Words, num_words
from mallee.worker.model.sampling.trial import TokenizerSpec, Trial, parser_limits

MAX_CACHED: Final = 256
MAX_ERROR_CHARS: Final = 400
# From here on several threads are faster than one.
_MANY: Final = 16


class TokenMatcher:
    """One text under one grammar; a `Matcher`."""

    __slots__ = ("inner",)

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    @property
    def is_accepting(self) -> bool:
        return self.inner.is_accepting()

    @property
    def is_stopped(self) -> bool:
        return self.inner.is_stopped()

    @property
    def error(self) -> str:
        return _cut(self.inner.get_error()) if self.inner.is_error() else ""

    def advance(self, token: int) -> None:
        self.inner.consume_token(token)

    def fork(self) -> Self:
        return type(self)(self.inner.deep_copy())


class TokenGrammars:
    """`Structures` over the tokenizer.json at `path`, which is read at the first grammar."""

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._compiling = threading.Lock()
        self._lock = threading.Lock()  # of the cache: never held for long
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._limits = parser_limits()
        self._trial: Trial | None = None
        self._cache: OrderedDict[Grammar, TokenMatcher | str] = OrderedDict()  # or what is wrong

    def knows(self, grammar: Grammar) -> bool:
        return self._find(grammar) is not None

    def compile(self, grammar: Grammar) -> TokenMatcher:
        """See `Structures`. Compiles one grammar at a time; a grammar that is there is returned at once."""
        found = self._find(grammar)
        if found is None:
            grammar.validate()
            with self._compiling:
                found = self._find(grammar)  # another thread may just have compiled it
                if found is None:
                    found = self._keep(grammar, self._compile(grammar))
        if isinstance(found, str):
            raise InvalidParameter("grammar", grammar.source or grammar.kind, found)
        return found

    def fill(self, matchers: Sequence[TokenMatcher], sets: Words) -> None:
        assert sets.flags.c_contiguous, "masks are written row by row"
        if len(matchers) < _MANY:
            for i, matcher in enumerate(matchers):
                matcher.inner.unsafe_compute_mask_ptr(sets[i].ctypes.data, sets[i].nbytes)
            return
        if self._executor is None:
            self._executor = LLExecutor()
        rows = [(matcher.inner, i) for i, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(
            rows, sets.ctypes.data, sets.strides[0], len(matchers)
        )

    def close(self) -> None:
        """End the process that grammars are tried in. Idempotent."""
        with self._compiling:
            if self._trial is not None:
                self._trial.close()

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert len(self._cache) <= MAX_CACHED, "more grammars than may be kept"
        for found in self._cache.values():
            assert isinstance(found, str) or not found.error, "a grammar in the cache is broken"

    def _find(self, grammar: Grammar) -> TokenMatcher | str | None:
        with self._lock:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
            return found

    def _keep(self, grammar: Grammar, found: TokenMatcher | str) -> TokenMatcher | str:
        with self._lock:
            self._cache[grammar] = found
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return found

    def _compile(self, grammar: Grammar) -> TokenMatcher | str:
        write = _WRITERS.get(grammar.kind)
        if write is None:
            return f"no such kind of grammar: {grammar.kind}"
        try:
            text = write(grammar.source)
            tokenizer = self._read_tokenizer()
        except ValueError as error:
            return _cut(str(error))
        except RecursionError:
            return "nested too deeply"
        assert self._trial is not None, "it comes with the tokenizer"
        if refusal := self._trial.run(text):
            return _cut(refusal)
        matcher = TokenMatcher(LLMatcher(tokenizer, text, log_level=0, limits=self._limits))
        if not matcher.error:
            first = np.zeros((1, num_words(self._vocab_size)), dtype=np.int32)
            self.fill((matcher,), first)
            if not matcher.error and not first.any():
                return "no token can begin a text under it"
        return matcher.error or matcher

    def _read_tokenizer(self) -> LLTokenizer:
        """Raises ValueError: this checkpoint's answers can't be constrained, and why."""
        if self._tokenizer is None:
            if not self._path.is_file():
                raise ValueError("the model has no tokenizer.json to constrain its answers by")
            if not self._eos:
                raise ValueError("the model has no end-of-text token to end a constrained answer")
            spec = TokenizerSpec(self._tokenizer_text(), self._vocab_size, self._eos)
            self._tokenizer = spec.load()
            self._trial = Trial(spec)
        return self._tokenizer

    def _tokenizer_text(self) -> str:
        """tokenizer.json without added tokens that the model has no logits for, as Gemma 3's text
        models have none for images."""
        text = self._path.read_text(encoding="utf-8")
        content = json.loads(text)
        if not isinstance(content, dict) or not isinstance(content.get("added_tokens"), list):
            return text
        known = [token for token in content["added_tokens"] if token["id"] < self._vocab_size]
        if len(known) == len(content["added_tokens"]):
            return text
        return json.dumps({**content, "added_tokens": known})


def _json_schema(source: str) -> str:
    # Parsed here: llguidance pastes text into its own JSON as it is.
    schema = json.loads(source)
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is a JSON object or a boolean")
    return _of_schema(schema)


def _json_object(source: str) -> str:
    if source:
        raise ValueError("json_object takes no source; for a schema there is json_schema")
    return _of_schema({"type": "object"})


def _of_schema(schema: dict[str, Any] | bool) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        defaults={"whitespace_pattern": JSON_SPACE, "json_allowed_escapes": JSON_ESCAPES},
    )


def _choice(source: str) -> str:
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices:
        raise ValueError("give a list with at least one string")
    if not all(isinstance(choice, str) for choice in choices) or "" in choices:
        raise ValueError("every choice is a string that isn't empty")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _lark(source: str) -> str:
    """Also of the older notation with ::=, which is turned into Lark."""
    return grammar_from("gbnf" if "::=" in source else "lark", source)


_WRITERS: Final[dict[str, Callable[[str], str]]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "lark": _lark,
}


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."
