"""Text to tokens, and streams of tokens back to text, with the `tokenizers` library alone.

No torch and no transformers here: a gateway without a model in its process stays light.
"""

import json
import re
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from mallee.api.text.encode_cache import EncodeCache, is_cuttable
from mallee.protocol.errors import InvalidParameter, ModelNotFound, UnsupportedModel
from mallee.protocol.hashing import Tokens, as_tokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # in vocabularies that fall back to bytes
_WORD = re.compile(r"\w")  # as `single_word` sees it
_UNFINISHED = "\ufffd"  # what decoders write for bytes that are not (yet) a character


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty if there is no such file. Raises UnsupportedModel: not JSON."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}", path=str(path)) from error
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object", path=str(path))
    return found


def special_token(config: dict[str, Any], key: str) -> str | None:
    """The text of `bos_token` or the like in a tokenizer_config.json, which may be an object."""
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _byte_alphabet() -> dict[str, int]:
    """The printable character that a byte-level vocabulary writes for each byte, and the byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from several threads.

    It remembers texts, where that can't change an answer (`encode_cache`), and nothing else.
    """

    __slots__ = (
        *("_added", "_around", "_cache", "_inner", "_is_byte_level", "added_tokens"),
        *("bos_token_id", "eos_token_ids", "longest_token", "special_tokens", "vocab_size"),
    )

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self._added = frozenset(added)
        # Text and id of those that no decoded text shows.
        self.special_tokens = {str(t.content): i for i, t in added.items() if t.special}
        self.added_tokens = {str(t.content): i for i, t in added.items()}
        texts = [str(token.content) for token in added.values()]
        self._cache = EncodeCache(self._encode) if is_cuttable(inner, texts) else None
        self._around = _tokens_around(inner)
        decoder = inner.decoder.__getstate__() if inner.decoder is not None else b""
        self._is_byte_level = b'"ByteLevel"' in decoder
        vocab: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocab)
        # UTF-8 bytes that one token can stand for; None where a normalizer may shorten the text first
        self.longest_token = (
            max(len(token.encode()) for token in vocab) if inner.normalizer is None else None
        )
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The tokenizer in a Hugging Face directory.

        Ends of text are the union of generation_config.json and tokenizer_config.json.
        Raises ModelNotFound: no tokenizer.json; UnsupportedModel: it can't be read.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelNotFound(f"{path} has no tokenizer.json", path=str(path))
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise UnsupportedModel(f"{file}: {error}", path=str(file)) from error
        inner.no_padding()
        inner.no_truncation()
        config = read_json(path / "tokenizer_config.json")
        bos, eos = (special_token(config, key) for key in ("bos_token", "eos_token"))
        ends = read_json(path / "generation_config.json").get("eos_token_id")
        ids = set(ends if isinstance(ends, list) else [ends])
        ids.add(inner.token_to_id(eos) if eos is not None else None)
        return cls(
            inner,
            bos_token_id=inner.token_to_id(bos) if bos is not None else None,
            eos_token_ids=sorted(ids - {None}),
        )

    def encode(self, text: str, *, add_special_tokens: bool = False, scope: str = "") -> list[int]:
        """Token ids. Special tokens written out in `text` are taken as such.

        Texts are remembered for their `scope` alone.
        """
        found = self.tokens(text, add_special_tokens=add_special_tokens, scope=scope)
        ids: list[int] = found.tolist()
        return ids

    def tokens(self, text: str, *, add_special_tokens: bool = False, scope: str = "") -> Tokens:
        """As `encode`, without an int for each token."""
        if self._cache is None or (add_special_tokens and self._around is None):
            return as_tokens(self._encode([text], add_special_tokens=add_special_tokens)[0])
        found = self._cache.encode(text, scope)
        if add_special_tokens and self._around is not None:
            before, after = self._around
            found = before + found + after
        return as_tokens(found)

    def _encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        # The batch form lets other threads run meanwhile, encode does not: 2 MB held them up for 3 s.
        made = self._inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in made]

    def delimiters(self, among: Collection[str]) -> tuple[str, ...]:
        """Added tokens before which any text can be cut: the tokens are those of its two parts.

        Tokenizers look for added tokens first, from left to right; what is between them is normalized,
        split and tokenized by itself, with a difference at most for what begins the text. So those count
        that take no white space with them, of which no other can take a part, and that do not begin as a
        word does, which decides about others before them.
        """
        added = list(self._inner.get_added_tokens_decoder().values())
        found = []
        for token in added:
            text = str(token.content)
            if text not in among or token.lstrip or token.rstrip or token.single_word:
                continue
            if _WORD.match(text):
                continue
            if token.normalized and self._inner.normalizer is not None:
                continue
            # They look for those that are not normalized first, wherever these begin.
            others = ((str(each.content), each.normalized < token.normalized) for each in added)
            if not any(_takes_part(each, text, is_first=first) for each, first in others):
                found.append(text)
        return tuple(found)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._inner.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special_tokens
        )
        return text

    def token_text(self, token: int) -> str:
        """The token as the vocabulary writes it; "" for an id without a token."""
        written: str | None = self._inner.id_to_token(token)
        return written or ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token stands for inside a text; b"" for an id without a token."""
        written: str | None = self._inner.id_to_token(token)
        if written is None:
            return b""
        if token in self._added:
            return written.encode()
        if self._is_byte_level:
            return bytes(_BYTES[char] for char in written if char in _BYTES)
        raw = _BYTE_TOKEN.fullmatch(written)
        return bytes((int(raw[1], 16),)) if raw else written.replace("\u2581", " ").encode()

    def detokenizer(self, shown: Collection[str] = ()) -> "Detokenizer":
        """A fresh one, for one branch. Its text has the special tokens that are `shown`, and no others."""
        if self.special_tokens.keys().isdisjoint(shown):
            return Detokenizer(self._inner)
        hidden = (i for text, i in self.special_tokens.items() if text not in shown)
        return Detokenizer(self._inner, frozenset(hidden))


def _takes_part(other: str, text: str, *, is_first: bool) -> bool:
    """Whether a token may be found where `text` stands, with more before it; `is_first`: anywhere there."""
    starts = tuple(text[:n] for n in range(1, len(text)))
    if other.endswith(starts) or (text in other and text != other):
        return True
    ends = tuple(text[-n:] for n in range(1, len(text)))
    return is_first and (other in text or other.startswith(ends))


def _tokens_around(inner: tokenizers.Tokenizer) -> "tuple[array[int], array[int]] | None":
    """The special tokens that the tokenizer puts before and after any text; None: in a way not known here."""
    if inner.post_processor is None:
        return array("I"), array("I")
    step: dict[str, Any] = json.loads(inner.post_processor.__getstate__())
    steps = step["processors"] if step["type"] == "Sequence" else [step]
    steps = [each for each in steps if each["type"] != "ByteLevel"]  # which changes offsets alone
    if not steps:
        return array("I"), array("I")
    if len(steps) > 1 or steps[0]["type"] != "TemplateProcessing":
        return None
    around = array("I"), array("I")
    texts = 0
    for part in steps[0]["single"]:
        if "Sequence" in part:
            texts += 1
        else:
            special = steps[0]["special_tokens"][part["SpecialToken"]["id"]]
            around[min(texts, 1)].extend(special["ids"])
    return around if texts == 1 else None


class Detokenizer:
    """Text of one branch, as its tokens arrive: the pushes up to the last add up to `decode` of all.

    Decoders look at neighbours (a word's leading space, a character over several tokens), so each push
    decodes a short window that starts one emission back and emits what the window grew by. Text that
    ends in an unfinished character waits. One exception: where a byte-fallback vocabulary ends valid
    characters with stray bytes, `decode` spoils the whole run, and what was emitted stays.
    """

    __slots__ = ("_decoder", "_emitted", "_hidden", "_ids", "_read")

    def __init__(self, inner: tokenizers.Tokenizer, hidden: frozenset[int] | None = None) -> None:
        """`hidden`: tokens without text; by default the special ones."""
        self._decoder = inner.decode
        self._hidden = hidden
        self._ids: list[int] = []  # the window: tokens [0, _read) are emitted, the rest wait
        self._read = 0
        self._emitted = ""  # decode of the emitted part

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """Take tokens; the text that no later token can change.

        After the last ones all of it, with U+FFFD for a character that never came to its end.
        """
        hidden = self._hidden
        self._ids += tokens if hidden is None else [t for t in tokens if t not in hidden]
        if self._read == len(self._ids):
            return ""
        text = self._decode(self._ids)
        if text.endswith(_UNFINISHED) and not is_last:
            return ""
        new = text[len(self._emitted) :]
        if not is_last:
            tail = self._ids[self._read :]
            tail_text = self._decode(tail)
            if tail_text:  # a window without text would lose the next word's leading space
                self._ids, text = tail, tail_text
        self._read = len(self._ids)
        self._emitted = text
        return new

    @property
    def is_waiting(self) -> bool:
        """Whether text is held back."""
        return self._read < len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._decoder(ids, skip_special_tokens=self._hidden is None)
        return text


class StopMatcher:
    """Cuts one branch's text at the stop string that is complete first (of two, the longer).

    The result does not depend on how the text was split.
    """

    __slots__ = ("_held", "_keeps_stop", "_stops", "found", "is_stopped")

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        """`keeps_stop`: cut after the stop string. Raises InvalidParameter: an empty stop string."""
        if "" in stops:
            raise InvalidParameter("stop", list(stops), "a stop string can't be empty")
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._held = ""
        self.is_stopped = False
        self.found = ""  # the stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is certainly no part of a stop string, and whether one was matched.

        After a match nothing more comes out.
        """
        if self.is_stopped:
            return "", True
        self._held += text
        starts = ((self._held.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if matches:
            end, start = min(matches)
            self.found = self._held[start:end]
            emit, self._held = self._held[: end if self._keeps_stop else start], ""
            self.is_stopped = True
            return emit, True
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        emit, self._held = self._held[:cut], self._held[cut:]
        return emit, False

    def flush(self) -> str:
        """The text held back as the possible beginning of a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, but not all of it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
