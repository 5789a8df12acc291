"""A cache of tokenized pieces of text: prompts of agents begin with the conversation so far.

A text is cut where its tokens surely end: before a space between two ASCII letters. Byte-level BPE splits
text into words by a regular expression first, in those known here a letter never shares a word with a
space after it, and a word's tokens depend on that word alone. So the pieces' tokens, one after the other,
are the text's. The cuts follow from the text before them: equal beginnings have equal pieces. New text
is made of words, most of which were seen before, too: a look in a dict is ten times cheaper.

Pieces are known within their *scope* alone (a tenant's): the time of an answer must not reveal
others' texts.
"""

import json
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tokenizers

PIECE_CHARS = 256  # at least, but for the last
PART_PIECES = 256  # tokenized at once
MAX_NBYTES = 64 << 20  # of pieces, both generations
TOKEN_NBYTES, ENTRY_NBYTES = 40, 300  # an int and its place in a list; all the rest of an entry
MAX_WORDS = 1 << 16
MAX_WORD_CHARS, MAX_WORD_TOKENS = 32, 8  # longer ones are hardly words
_CUT = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_WORD_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
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
        self._young: dict[_Key, list[int]] = {}
        self._old: dict[_Key, list[int]] = {}
        self._young_nbytes = self._old_nbytes = 0
        self._words: dict[str, dict[str, list[int]]] = {}  # by scope
        self.num_words = 0
        self.num_hits = 0  # pieces

    def encode(self, text: str, scope: str = "") -> list[int]:
        """The ids of `text`, in a list that is the caller's. Only what `scope` saw before is quicker."""
        pieces = cut(text)
        ids: list[int] = []
        # In parts: a call into the tokenizer holds the interpreter's lock while it makes its lists.
        for begin in range(0, len(pieces), PART_PIECES):
            end = begin + PART_PIECES
            ids += self._encode_part(pieces[begin:end], scope, is_last=end >= len(pieces))
        return ids

    def _encode_part(self, pieces: list[str], scope: str, *, is_last: bool) -> list[int]:
        """The ids of `pieces`; the last piece of all is hardly ever seen again, and not kept."""
        kept = pieces[:-1] if is_last else pieces
        found = [self._look_up((scope, piece)) for piece in kept]
        wanted = [piece for piece, ids in zip(kept, found, strict=True) if ids is None]
        made = self._by_words([*wanted, *pieces[len(kept) :]], scope)
        self.num_hits += len(found) - len(wanted)
        ids: list[int] = []
        fresh = iter(made)
        for piece, known in zip(kept, found, strict=True):
            if known is None:
                known = next(fresh)
                self._keep((scope, piece), known)
            ids += known
        for rest in fresh:
            ids += rest
        return ids

    def _by_words(self, texts: list[str], scope: str) -> list[list[int]]:
        """The ids of each text; words that are not known are computed in one go."""
        known = self._words.get(scope, {})
        cut_up = [_WORD_CUT.split(text) for text in texts]
        new = list(dict.fromkeys(w for words in cut_up for w in words if w not in known))
        fresh = dict(zip(new, self._encode(new), strict=True)) if new else {}
        found = []
        for words in cut_up:
            ids: list[int] = []
            for word in words:
                ids += fresh[word] if word in fresh else known[word]
            found.append(ids)
        self._keep_words(fresh, scope)
        return found

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

    def _look_up(self, key: _Key) -> list[int] | None:
        ids = self._young.get(key)
        if ids is None and (ids := self._old.get(key)) is not None:
            self._keep(key, ids)
        return ids

    def _keep(self, key: _Key, ids: list[int]) -> None:
        nbytes, most = _nbytes(key, ids), self._max_nbytes // 2
        with self._lock:
            if nbytes > most or key in self._young:
                return
            if self._young_nbytes + nbytes > most:
                self._old, self._old_nbytes = self._young, self._young_nbytes
                self._young, self._young_nbytes = {}, 0
            self._young[key] = ids
            self._young_nbytes += nbytes


def _nbytes(key: _Key, ids: list[int]) -> int:
    return ENTRY_NBYTES + sys.getsizeof(key[1]) + TOKEN_NBYTES * len(ids)


def cut(text: str) -> list[str]:
    """The pieces of `text`, at least one: each of PIECE_CHARS or a little more, but for the last."""
    pieces: list[str] = []
    begin = 0
    while (found := _CUT.search(text, begin + PIECE_CHARS)) is not None:
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
