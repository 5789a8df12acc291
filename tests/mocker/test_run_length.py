"""K16: texts written as runs behave like the lists they stand for, and blocks are named as defined."""

import struct
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mallee.mocker.run_length import (
    ANSWER,
    OTHER,
    RunLengthTokens,
    answer_start,
    mixed,
    other_start,
    run_length_hashes,
)
from mallee.mocker.texts import Texts
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.hashing import SEED
from support.examples import examples

SIZE = 4
SALT = "mock/"
RUNS = st.lists(
    st.tuples(st.sampled_from([0, 4, 5, 9, 100, ANSWER + 7, ANSWER + 8, OTHER]), st.integers(1, 9)),
    max_size=5,
)


def spelled(runs: list[tuple[int, int]]) -> list[int]:
    return [first + i for first, num in runs for i in range(num)]


def outline(tokens: list[int]) -> RunLengthTokens:
    text = RunLengthTokens()
    text.extend(tokens)
    return text


def defined_hashes(tokens: list[int], parent: int | None = None) -> list[int]:
    """By the words of the module: one block after the other, from its tokens alone."""
    seed = xxhash.xxh3_64_intdigest(SALT.encode(), seed=SEED)
    found: list[int] = []
    for begin in range(0, len(tokens) - SIZE + 1, SIZE):
        block = tokens[begin : begin + SIZE]
        if max(block) < ANSWER:
            parent = mixed(block[-1] ^ seed)
        else:
            runs: list[list[int]] = []
            for token in block:
                if runs and sum(runs[-1]) == token:
                    runs[-1][1] += 1
                else:
                    runs.append([token, 1])
            parts = [] if parent is None else [parent]
            parts += [number for run in runs for number in run]
            raw = struct.pack(f"<{len(parts)}Q", *parts)
            parent = xxhash.xxh3_64_intdigest(raw, seed)
        found.append(parent)
    return found


@given(RUNS, st.data())
def test_blocks_are_named_as_defined(runs: list[tuple[int, int]], data: Any) -> None:
    """However the text came about, cut or grown, and wherever its hashing begins."""
    tokens = spelled(runs)
    text = outline(tokens)
    for parent in (None, 12345):
        found = run_length_hashes(text, SIZE, salt=SALT, parent=parent)
        assert found.tolist() == defined_hashes(tokens, parent)
    whole = run_length_hashes(text, SIZE, salt=SALT)
    if len(whole) > 1:
        cut = data.draw(st.integers(1, len(whole) - 1))
        rest = run_length_hashes(text[cut * SIZE :], SIZE, salt=SALT, parent=int(whole[cut - 1]))
        assert rest.tolist() == whole[cut:].tolist()


class OutlineMachine(RuleBasedStateMachine):
    """Outlines are grown, cut and read beside lists."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = Texts(SIZE, salt=SALT)
        self.text = RunLengthTokens()
        self.tokens: list[int] = []

    @rule(ids=st.lists(st.integers(0, 5), max_size=4), num=st.integers(1, 40))
    def prompt(self, ids: list[int], num: int) -> None:
        raw = self.texts.prompt(chained(ids), num, 2 * SIZE)
        text = self.texts.notation.read(raw)
        assert isinstance(text, RunLengthTokens)
        self.text, self.tokens = text, list(text)

    @rule(first=st.sampled_from([0, 8, 16, ANSWER, OTHER + 3]), num=st.integers(1, 9))
    def extend(self, first: int, num: int) -> None:
        self.text.extend(RunLengthTokens.of_run(first, num))
        self.tokens.extend(range(first, first + num))

    @rule(token=st.sampled_from([3, 4, 5, ANSWER + 1]))
    def append(self, token: int) -> None:
        self.text.append(token)
        self.tokens.append(token)

    @rule(jump=st.integers(0, 1))
    def go_on(self, jump: int) -> None:
        """The token that follows the last one, or the one after."""
        if self.tokens:
            self.append(self.tokens[-1] + 1 + jump)

    @rule(end=st.integers(0, 50))
    def cut_the_end(self, end: int) -> None:
        del self.text[end:]
        del self.tokens[end:]

    @rule(begin=st.integers(-5, 30), end=st.one_of(st.none(), st.integers(-5, 50)))
    def cut_out(self, begin: int, end: int | None) -> None:
        self.text, self.tokens = self.text[begin:end], self.tokens[begin:end]

    @rule()
    def begin_of_it(self) -> None:
        self.text, self.tokens = (
            self.text[: len(self.text) // 2],
            self.tokens[: len(self.text) // 2],
        )

    @rule(begin=st.integers(0, 20))
    def double(self, begin: int) -> None:
        self.text.extend(self.text[begin:])
        self.tokens.extend(self.tokens[begin:])

    @invariant()
    def it_is_the_list(self) -> None:
        text, tokens = self.text, self.tokens
        assert list(text) == tokens
        assert text == tokens
        assert len(text) == len(tokens)
        assert text == outline(tokens)
        assert spelled(list(text.runs())) == tokens
        for i in range(-len(tokens), len(tokens)):
            assert text[i] == tokens[i]
        with pytest.raises(IndexError):
            text[len(tokens)]
        named = self.texts.notation.hashes(text, SIZE, salt=SALT)
        assert named.tolist() == defined_hashes(tokens)


def chained(ids: list[int]) -> list[int]:
    """Ids as traces have them: each says what is before it too."""
    found, number = [], 0
    for id_ in ids:
        number = 6 * number + id_ + 1
        found.append(number)
    return found


TestOutline = OutlineMachine.TestCase
TestOutline.settings = settings(examples(100), stateful_step_count=25)


@given(
    st.lists(st.integers(0, 5), max_size=6),
    st.integers(1, 60),
    st.sampled_from([1, 2, 3, 4, 8, 12, 16]),
)
def test_a_prompt_hashes_like_its_tokens(ids: list[int], num: int, id_tokens: int) -> None:
    """Whether ids are whole blocks, parts of one, or neither; and what the ids don't name."""
    texts = Texts(SIZE, salt=SALT)
    raw = texts.prompt(chained(ids), num, id_tokens)
    tokens = list(texts.notation.read(raw))
    assert len(tokens) == num
    named = [i * id_tokens + k for i in chained(ids) for k in range(id_tokens)]
    assert tokens[: len(named)] == named[:num]
    assert all(token >= OTHER for token in tokens[len(named) :])
    assert texts.hashes(raw).tolist() == defined_hashes(tokens)
    texts.drop(raw)
    with pytest.raises(InvalidParameter, match="make it first"):
        texts.notation.read(raw)


def test_suffixes_are_the_same_for_the_same_key_only() -> None:
    texts = Texts(SIZE)
    assert texts.suffix(7, 0) == b""
    first, again, other = (texts.notation.read(texts.suffix(key, 9)) for key in (7, 7, 8))
    assert list(first) == list(again) == list(range(other_start(7), other_start(7) + 9))
    assert not set(first) & set(other)


@pytest.mark.parametrize("id_", [-1, 1 << 62])
def test_an_id_out_of_range_is_refused(id_: int) -> None:
    with pytest.raises(InvalidParameter, match="hash_ids"):
        Texts(SIZE).prompt((id_,), 8, 8)


def test_kinds_of_text_never_meet() -> None:
    keys = np.arange(1000)
    assert all(ANSWER <= answer_start(int(key)) < OTHER for key in keys)
    assert all(OTHER <= other_start(int(key)) < 1 << 64 for key in keys)
    assert len({answer_start(int(key)) for key in keys}) == 1000
