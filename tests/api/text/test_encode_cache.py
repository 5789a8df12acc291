"""Tokenizing by pieces: the same ids as of the whole text, from a cache that stays small."""

import json
from unittest import mock

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from mallee.api.text import encode_cache
from mallee.api.text.encode_cache import (
    LONG_CHARS,
    MAX_WORDS,
    PIECE_CHARS,
    EncodeCache,
    cut,
    is_cuttable,
)
from mallee.api.text.tokenizer import Tokenizer
from support.examples import examples

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LETTERS = "abcdefghijklmnopqrst"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS = {
    "gpt2": BYTES,
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
    "llama": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
TEXT = "The trees don't mind: 12345 of them stand there, side by side  and\n\nwait for rain. "


def made(split: object, *, words: int = 340) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = split
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([TEXT * 3], trainer)
    inner.add_special_tokens(["<|end|>"])
    return inner


INNERS = {name: made(split) for name, split in SPLITS.items()}
WORDS = ("the", " trees", " don't", "a b", "'s a", ". A", " 12")
chunks = st.sampled_from([*WORDS, "  ", "\n", "\t", "ü", "é a", "日本", "<|end|>"])
texts = st.lists(chunks | st.text(max_size=3), max_size=400).map("".join)


@pytest.mark.parametrize("name", SPLITS)
@examples(60)
@given(text=texts)
def test_the_pieces_ids_are_the_texts(name: str, text: str) -> None:
    """I17, part: whatever is in the text, the first time and from the cache."""
    text = text.encode(errors="replace").decode()
    tokenizer = Tokenizer(INNERS[name])
    assert tokenizer._cache is not None
    whole = INNERS[name].encode(text, add_special_tokens=False).ids
    for _ in range(2):
        assert tokenizer.encode(text) == whole
    tokenizer._cache.check()


@given(texts)
def test_pieces_are_the_text_and_equal_beginnings_have_equal_pieces(text: str) -> None:
    pieces = cut(text, PIECE_CHARS)
    assert "".join(pieces) == text
    assert all(len(piece) >= PIECE_CHARS for piece in pieces[:-1])
    longer = cut(text + " and more of it", PIECE_CHARS)
    assert longer[: len(pieces) - 1] == pieces[:-1]


@examples(30)
@given(turns=st.lists(texts, min_size=1, max_size=6), edit=st.integers(0, 1 << 30))
def test_turns_that_grow_and_histories_that_change_have_the_texts_ids(
    turns: list[str], edit: int
) -> None:
    """F31, part: from long pieces, short ones and words, wherever the history is changed."""
    tokenizer = Tokenizer(INNERS["llama"])
    assert tokenizer._cache is not None
    with mock.patch.object(encode_cache, "LONG_CHARS", 600):
        text = ""
        for turn in turns:
            text += turn.encode(errors="replace").decode() + " so they say"
            place = edit % len(text)
            for given_text in (text, text[:place] + "x y" + text[place:], text):
                whole = INNERS["llama"].encode(given_text, add_special_tokens=False).ids
                assert tokenizer.encode(given_text) == whole
                assert tokenizer.tokens(given_text).tolist() == whole
    tokenizer._cache.check()


def test_a_long_text_is_found_by_few_pieces() -> None:
    text = "".join(f"{TEXT}{i} and on " for i in range(400))
    whole = INNERS["gpt2"].encode(text, add_special_tokens=False).ids
    tokenizer = Tokenizer(INNERS["gpt2"])
    assert tokenizer._cache is not None
    *long, rest = cut(text, LONG_CHARS)
    num_pieces = len(long) + len(cut(rest, PIECE_CHARS)) - 1
    assert num_pieces < len(cut(text, PIECE_CHARS)) / 4
    for num_hits in (0, num_pieces):
        assert tokenizer.encode(text) == whole
        assert tokenizer._cache.num_hits == num_hits
        tokenizer._cache.check()


def test_what_a_scope_saw_is_not_tokenized_again_and_is_news_to_another() -> None:
    asked: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        asked.extend(texts)
        return [[hash(text) & 0xFFFF] for text in texts]

    cache = EncodeCache(encode)
    history = TEXT * 20
    first = cache.encode(history, "a")
    once = list(asked)
    assert len(once) == len(set(once)) < len(TEXT) / 3
    asked.clear()
    again = cache.encode(history + "and then it rained", "a")
    assert set(asked) == {" rain. and", " then", " it", " rained"}
    assert again[: len(first) - 1] == first[:-1]
    assert cache.num_hits == len(cut(history, PIECE_CHARS)) - 1
    asked.clear()
    cache.encode(history, "b")
    assert asked == once


def test_the_cache_stays_within_its_bound() -> None:
    cache = EncodeCache(lambda texts: [[0] for _ in texts], max_nbytes=24 * PIECE_CHARS)
    for i in range(50):
        cache.encode(f"text number {i} of many " * 40, f"tenant {i % 3}")
        cache.check()
        assert 0 < cache.nbytes <= 24 * PIECE_CHARS


def test_words_stay_within_their_bound_however_many_come_at_once() -> None:
    cache = EncodeCache(lambda texts: [[0] * len(text) for text in texts])
    cache.encode("short words and " + "q" * 30 + " then")
    assert cache.num_words == 4  # of one token for each letter, only the short are kept
    names = [f"{a}{b}{c}{d}" for a in LETTERS for b in LETTERS for c in LETTERS for d in LETTERS]
    assert len(names) > 2 * MAX_WORDS
    cache.encode(" ".join(names))
    cache.check()
    for i in range(6):
        cache.encode(" ".join(names[i * 20_000 : (i + 1) * 20_000]), f"tenant {i % 2}")
        cache.check()
    assert cache.num_words > 0


def with_normalizer() -> tokenizers.Tokenizer:
    inner = made(BYTES)
    inner.normalizer = normalizers.Lowercase()
    return inner


def with_token(token: AddedToken) -> tokenizers.Tokenizer:
    inner = made(BYTES)
    inner.add_tokens([token])
    return inner


PAIRS = pre_tokenizers.Split(tokenizers.Regex("[a-z]+ [a-z]+"), "isolated")
NO_REGEX = pre_tokenizers.ByteLevel(use_regex=False)


@pytest.mark.parametrize(
    "inner",
    [
        made(pre_tokenizers.Metaspace()),
        made(NO_REGEX),
        made(pre_tokenizers.Sequence([PAIRS, NO_REGEX])),
        made(pre_tokenizers.Sequence([PAIRS, BYTES])),
        with_normalizer(),
        with_token(AddedToken("side by side", lstrip=True)),
        with_token(AddedToken("<tree ")),
    ],
)
def test_others_are_tokenized_whole(inner: tokenizers.Tokenizer) -> None:
    added = [token.content for token in inner.get_added_tokens_decoder().values()]
    assert not is_cuttable(inner, added)
    text = TEXT * 9
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode(text) == inner.encode(text, add_special_tokens=False).ids


def processed(inner: tokenizers.Tokenizer, step: object) -> tokenizers.Tokenizer:
    """A copy whose post-processor is `step`."""
    made_of = {**json.loads(inner.to_str()), "post_processor": step}
    return tokenizers.Tokenizer.from_str(json.dumps(made_of))


def template(*single: str) -> dict[str, object]:
    """A post-processor that writes special tokens around "A"."""
    kinds = {"A": "Sequence", "<|end|>": "SpecialToken"}
    parts = [{kinds[part]: {"id": part, "type_id": 0}} for part in single]
    special = {"id": "<|end|>", "ids": [INNERS["llama"].token_to_id("<|end|>")]}
    return {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|end|>": {**special, "tokens": ["<|end|>"]}},
    }


OFFSETS = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


@pytest.mark.parametrize(
    "step",
    [
        None,
        OFFSETS,
        template("<|end|>", "A"),
        template("<|end|>", "<|end|>", "A", "<|end|>"),
        {"type": "Sequence", "processors": [OFFSETS, template("<|end|>", "A")]},
        template("A", "<|end|>", "A"),
    ],
)
@examples(20)
@given(text=texts)
def test_special_tokens_around_a_text_are_kept(step: object, text: str) -> None:
    """I17, part: as the library puts them, the first time and from the cache."""
    inner = processed(INNERS["llama"], step)
    tokenizer = Tokenizer(inner)
    for _ in range(2):
        assert tokenizer.encode(text, add_special_tokens=True) == inner.encode(text).ids
