"""A cache of tokenized pieces of text: prompts of agents begin with the conversation so far.

A text is cut where its tokens surely end: before a space between two ASCII letters. Byte-level BPE splits
text into words by a regular expression first, in those known here a letter never shares a word with a
space after it, and a word's tokens depend on that word alone. So the pieces' tokens, one after the other,
are the text's. The cuts follow from the text before them: equal beginnings have equal pieces. What is known
of a conversation is found by long pieces, its end by short ones. New text is made of words, most of which
were seen before, too: a look in a dict is ten times cheaper.

Pieces are known within their *scope* alone (a tenant's): the time of an answer must not reveal
others' texts.
"""

import json
import re
import sys
import threading
from array import array
from collections import ChainMap
from collections.abc import Callable, MutableMapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import tokenizers

LONG_CHARS = 4096  # of a long piece at least
PIECE_CHARS = 256  # of a short one, but for the last
MAX_NBYTES = 64 << 20  # of pieces, both generations
TOKEN_NBYTES, ENTRY_NBYTES = 4, 300  # an id; all the rest of an entry
MAX_WORDS = 1 << 16
MAX_WORD_CHARS, MAX_WORD_TOKENS = 32, 8  # longer ones are hardly words
_CUT = re.compile(r" (?<=[A-Za-z] )(?=[A-Za-z])")  # the space first: `re` looks for it much faster
_WORD_CUT = re.compile(r"(?= [A-Za-z])(?<=[A-Za-z])")
_CUT_ANYWHERE = re.compile(r"[A-Za-z] [A-Za-z]|^[A-Za-z]|[A-Za-z] ?$")
_STEPS = ("ByteLevel", "Split", "Digits")
# Of Llama 3, Qwen 2 and 3 and others; they differ in how many digits are a word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|N| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NUMBERS = re.compile(r"(?<=\|)\\p\{N\}(?:\{1,3\})?(?=\|)")

Encode = Callable[[list[str]], list[list[int]]]


_Key: TypeAlias = tuple[str, str]  # scope, piece


class EncodeCache:
    """Token ids by scope and piece of text: those used last, `max_nbytes` of them.

    Two generations instead of an exact order of use: when the young one is full it becomes the old one,
    and what is used again moves on. Safe to use from several threads, which may compute a piece twice.
    """

    def __init__(self, encode: Encode, *, max_nbytes: int = MAX_NBYTES) -> None:
        """`encode(texts)` gives the ids of each."""
        self._encode = encode
        self._max_nbytes = max_nbytes
        self._lock = threading.Lock()  # for changes
        self._young: dict[_Key, array[int]] = {}
        self._old: dict[_Key, array[int]] = {}
        self._young_nbytes = self._old_nbytes = 0
        self._words: dict[str, dict[str, list[int]]] = {}  # by scope
        self.num_words = 0
        self.num_hits = 0  # pieces

    def encode(self, text: str, scope: str = "") -> "array[int]":
        """The ids of `text`, of 32 bits, the caller's own. Only what `scope` saw before is quicker."""
        ids = array("I")
        *long, rest = cut(text, LONG_CHARS)
        # One by one: a call into the tokenizer holds the interpreter's lock while it makes its lists.
        for piece in long:
            key = scope, piece
            known = self._look_up(key)
            if known is None:
                known = self._by_pieces(piece, scope, keeps=False)
                self._keep(key, known)
            else:
                self.num_hits += 1
            ids += known
        ids += self._by_pieces(rest, scope, keeps=True)
        return ids

    def _by_pieces(self, text: str, scope: str, *, keeps: bool) -> "array[int]":
        """The ids of `text`. Its last piece is hardly ever seen again, and not kept."""
        *pieces, rest = cut(text, PIECE_CHARS)
        found = [self._look_up((scope, piece)) for piece in pieces]
        wanted = [piece for piece, ids in zip(pieces, found, strict=True) if ids is None]
        self.num_hits += len(found) - len(wanted)
        *made, last = self._by_words([*wanted, rest], scope)
        fresh = iter(made)
        ids = array("I")
        for piece, known in zip(pieces, found, strict=True):
            if known is None:
                known = next(fresh)
                if keeps:
                    self._keep((scope, piece), known)
            ids += known
        ids += last
        return ids

    def _by_words(self, texts: list[str], scope: str) -> "list[array[int]]":
        """The ids of each text; words that are not known are computed in one go."""
        known: MutableMapping[str, list[int]] = self._words.get(scope, {})
        cut_up = [_WORD_CUT.split(text) for text in texts]
        new = [word for word in dict.fromkeys(chain(*cut_up)) if word not in known]
        if new:
            fresh = dict(zip(new, self._encode(new), strict=True))
            self._keep_words(fresh, scope)
            known = ChainMap(fresh, known)
        ids = [chain.from_iterable(map(known.__getitem__, words)) for words in cut_up]
        return [array("I", each) for each in ids]

    def _keep_words(self, fresh: dict[str, list[int]], scope: str) -> None:
        short = {
            word: ids
            for word, ids in fresh.items()
            if len(word) <= MAX_WORD_CHARS and len(ids) <= MAX_WORD_TOKENS
        }
        if not short or len(short) > MAX_WORDS:
            return
        with self._lock:
            if self.num_words + len(short) > MAX_WORDS:
                self._words, self.num_words = {}, 0  # others may still be reading the old ones
            known = self._words.setdefault(scope, {})
            before = len(known)
            known.update(short)
            self.num_words += len(known) - before

    @property
    def nbytes(self) -> int:
        """Of pieces, estimated."""
        return self._young_nbytes + self._old_nbytes

    def check(self) -> None:
        """Raises AssertionError if bytes or words don't add up or are too many."""
        for nbytes, pieces in ((self._young_nbytes, self._young), (self._old_nbytes, self._old)):
            assert nbytes == sum(_nbytes(key, ids) for key, ids in pieces.items())
            assert nbytes <= self._max_nbytes // 2, f"{nbytes} bytes"
        assert self.num_words == sum(map(len, self._words.values())), "words don't add up"
        assert self.num_words <= MAX_WORDS, f"{self.num_words} words"

    def _look_up(self, key: _Key) -> "array[int] | None":
        ids = self._young.get(key)
        if ids is None and (ids := self._old.get(key)) is not None:
            self._keep(key, ids)
        return ids

    def _keep(self, key: _Key, ids: "array[int]") -> None:
        nbytes, most = _nbytes(key, ids), self._max_nbytes // 2
        with self._lock:
            if nbytes > most or key in self._young:
                return
            if self._young_nbytes + nbytes > most:
                self._old, self._old_nbytes = self._young, self._young_nbytes
                self._young, self._young_nbytes = {}, 0
            self._young[key] = ids
            self._young_nbytes += nbytes


def _nbytes(key: _Key, ids: "array[int]") -> int:
    return ENTRY_NBYTES + sys.getsizeof(key[1]) + TOKEN_NBYTES * len(ids)


def cut(text: str, num_chars: int) -> list[str]:
    """The pieces of `text`, at least one: each of `num_chars` or a little more, but for the last."""
    pieces: list[str] = []
    begin = 0
    while (found := _CUT.search(text, begin + num_chars)) is not None:
        pieces.append(text[begin : found.start()])
        begin = found.start()
    pieces.append(text[begin:])
    return pieces


def is_cuttable(inner: tokenizers.Tokenizer, added: Sequence[str]) -> bool:
    """Whether texts may be cut: byte-level BPE over words, whose `added` tokens are no words.

    Others look at neighbours (SentencePiece), change the text first, or split it in a way that is not
    known here.
    """
    model, before = inner.model, inner.pre_tokenizer
    if inner.normalizer is not None or before is None:
        return False
    if not isinstance(model, tokenizers.models.BPE) or model.dropout:
        return False
    splits = _splits_words(json.loads(before.__getstate__()))
    return splits and not any(map(_CUT_ANYWHERE.search, added))


def _splits_words(step: dict[str, Any]) -> bool:
    """Whether a step before the model ends words where this module cuts."""
    match step["type"]:
        case "ByteLevel":
            return bool(step["use_regex"])
        case "Split":
            pattern: str = step["pattern"].get("Regex", "")
            return step["behavior"] == "Isolated" and _NUMBERS.sub("N", pattern) == _WORDS
        case "Sequence":
            steps = step["pretokenizers"]
            known = all(each["type"] in _STEPS for each in steps)
            # Others that split might split across our cuts.
            splits = [_splits_words(each) for each in steps if each["type"] == "Split"]
            return known and all(splits) and any(map(_splits_words, steps))
    return False
