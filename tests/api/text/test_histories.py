"""Conversations sent again: the same prompts as without histories, of one scope each, in bounded memory."""

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mallee.api.prompts import PromptReader, RenderedPrompt
from mallee.api.text import histories, resumable
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import Conversation, Function, Message, ToolCall
from mallee.api.text.families import FAMILIES, Family
from mallee.api.text.histories import Histories
from mallee.api.text.tokenizer import Tokenizer
from mallee.protocol.errors import ContextLengthExceeded
from support.tokenizers_made import byte_level

MARKS = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<bos>"),
)
TEXTS = st.lists(
    st.sampled_from(["the tree", " and", " ", "\n", "é", "日本", '"', "<", "x" * 40])
).map("".join)


def spaced(scheme: str) -> tokenizers.Tokenizer:
    """Words with their spaces, where the first of a text may be another token than inside of it."""
    alphabet = [chr(i) for i in range(32, 127)] + ["\u2581", "\n"]
    pieces = ["<unk>", *alphabet, "\u2581t", "\u2581\u2581", "th"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {p: i for i, p in enumerate(pieces)},
            [("\u2581", "t"), ("\u2581", "\u2581"), ("t", "h")],
            unk_token="<unk>",
        )
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    inner.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    return inner


def prepended() -> tokenizers.Tokenizer:
    """As Llama 2's: the text is changed before it is tokenized."""
    inner = spaced("never")
    inner.pre_tokenizer = None
    normalizers = tokenizers.normalizers
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return inner


def special(inner: tokenizers.Tokenizer) -> Tokenizer:
    inner.add_special_tokens(list(MARKS))
    return Tokenizer(inner)


TOKENIZERS = {
    "bytes": special(byte_level()),
    "first": special(spaced("first")),
    "always": special(spaced("always")),
    "prepended": special(prepended()),
}


@pytest.fixture(scope="module", autouse=True)
def marks_everywhere() -> Iterator[None]:
    with (
        mock.patch.multiple(resumable, MARK_CHARS=0, MARK_ITERATIONS=1),
        mock.patch.multiple(histories, MAX_REST=200, NEAR_CHARS=300, FAR_CHARS=300),
    ):
        yield


@cache
def chat_of(family: Family, name: str) -> ChatTemplate:
    special = TOKENIZERS[name].special_tokens
    return ChatTemplate(None, family=family, bos_token="<bos>", special_tokens=special)


class Both:
    """A reader with histories, and one without."""

    def __init__(
        self,
        family: Family,
        name: str = "bytes",
        *,
        max_nbytes: int = 1 << 30,
        max_model_len: int = 1 << 20,
    ) -> None:
        chat, tokenizer = chat_of(family, name), TOKENIZERS[name]
        self.histories = Histories(tokenizer, chat, max_nbytes=max_nbytes, least_chars=0)
        self.readers = [
            PromptReader(tokenizer, chat, 1 << 20, max_model_len=max_model_len) for _ in range(2)
        ]
        self.readers[0]._histories = self.histories
        self.readers[1]._histories = Histories(tokenizer, chat, least_chars=1 << 60)

    def read(self, given: Conversation, scope: str = "a", **more: Any) -> RenderedPrompt:
        more = {"add_generation_prompt": True, **more}
        found, wanted = (each.conversation(given, scope, **more) for each in self.readers)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found[1:] == wanted[1:]
        self.histories.check()
        return found


@st.composite
def message(draw: st.DrawFn, texts: st.SearchStrategy[str] = TEXTS) -> Message:
    role = draw(st.sampled_from(["user", "user", "assistant", "tool", "system"]))
    text = draw(texts)
    if role == "tool":
        return Message(role, text, tool_call_id="i", name="f")
    if role == "user" or role == "system":
        return Message(role, text)
    calls = draw(
        st.lists(texts.map(lambda t: ToolCall("i", "f", json.dumps({"x": t}))), max_size=2)
    )
    return Message(role, text, draw(st.sampled_from(["", "why", "<think>"])), tuple(calls))


SCHEMAS: tuple[dict[str, Any], ...] = ({}, {"a": 1}, {"a": True})
FUNCTIONS = [(), *((Function("f", "does", schema),) for schema in SCHEMAS)]
ODD = [
    "\ue000",
    "\\ue0001\\ue001",
    "\ue0001\ue001",
    "\ue001",
]  # as the marks that hide special tokens
SPECIAL_TEXTS = st.one_of(
    *(TEXTS, TEXTS, TEXTS),
    st.lists(st.sampled_from([*MARKS, "99", "the tree", "x" * 70]), max_size=3).map("".join),
    st.sampled_from([*ODD, "tree"]),
)
# So many messages of an earlier conversation stay (from the end), others follow; and with what else.
turns = st.lists(
    st.tuples(
        st.integers(0, 5),  # which earlier one
        st.sampled_from([0, 0, 0, 1, 2, 9]),
        st.lists(message(SPECIAL_TEXTS), min_size=1, max_size=4),
        st.sampled_from([0, 0, 0, 0, 1, 2, 3]),
        st.sampled_from("aaab"),
        st.sampled_from(["", "", "So", " the tree", "<|im_end|>", ODD[0]]),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
@given(
    name=st.sampled_from([*TOKENIZERS]),
    turns=turns,
    max_nbytes=st.sampled_from([1 << 30, 60_000]),
    data=st.data(),
)
def test_prompts_are_those_of_the_whole_conversations(
    family: Family, name: str, turns: list[Any], max_nbytes: int, data: st.DataObject
) -> None:
    """F31, part: of conversations that grow, fork and are edited, with other functions, by others."""
    both = Both(family, name, max_nbytes=max_nbytes)
    given = [[Message("system", "You are the tree."), Message("user", "Who are you?")]]
    for which, dropped, more, functions, scope, begun in turns:
        before = given[which % len(given)]
        messages = [*before[: max(0, len(before) - dropped)], *more]
        if data.draw(st.integers(0, 4)) == 0:
            i = data.draw(st.integers(0, len(messages) - 1))
            messages[i] = replace(messages[i], text=messages[i].text + "!")
        given.append(messages)
        variables = {"enable_thinking": False} if which == 1 else {}
        # As they come from a request: equal, but others.
        fresh = [Message(*(getattr(m, f) for f in m.__slots__)) for m in messages]
        both.read(
            Conversation(fresh, FUNCTIONS[functions], variables),
            scope,
            begun=begun,
            add_generation_prompt=which != 2 or bool(begun),
        )


def talk(num: int, *, words: int = 30) -> list[Message]:
    roles = ("user", "assistant")
    return [Message(roles[i % 2], f"{i} " + "the tree and " * words) for i in range(num)]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
def test_only_what_is_new_is_tokenized(family: Family, name: str) -> None:
    """F31, part: the last messages, whatever came before them."""
    both = Both(family, name)
    both.read(Conversation(talk(20)))
    seen: list[str] = []
    tokens = Tokenizer.tokens

    def noted(self: Tokenizer, text: str, **more: Any) -> Any:
        seen.append(text)
        return tokens(self, text, **more)

    more = [*talk(20), Message("assistant", "So it is."), Message("user", "Go on.")]
    with mock.patch.object(Tokenizer, "tokens", noted):
        both.histories.prompt(
            Conversation(more), "a", add_generation_prompt=True, max_tokens=1 << 20
        )
    assert both.histories.num_resumed == 1
    assert 0 < sum(map(len, seen)) < 2500
    assert any("Go on." in text for text in seen)


def test_special_tokens_in_texts_and_branches_make_nothing_new() -> None:
    """F31, part: a conversation about templates is known as any other."""
    both = Both(FAMILIES[0])
    about = [*talk(20), Message("user", "Why <|eot_id|> and <|im_end|>?"), *talk(4)]
    both.read(Conversation(about))
    for i in range(4):  # branches of it are known by what they share
        both.read(Conversation([*about, Message("user", f"And <|eot_id|> {i}?")]))
        both.read(Conversation([*about, Message("user", f"And <|eot_id|> {i}?"), *talk(1)]))
    assert both.histories.num_resumed == 8


def test_a_conversation_is_news_to_another_scope() -> None:
    both = Both(FAMILIES[0])
    both.read(Conversation(talk(20)), "a")
    both.read(Conversation(talk(20)), "b")
    assert both.histories.num_resumed == 0
    assert both.histories.memory.nbytes_of("a") == both.histories.memory.nbytes_of("b") > 0
    both.read(Conversation(talk(20)), "b")
    assert both.histories.num_resumed == 1


def test_the_scope_with_most_loses_its_oldest_first() -> None:
    both = Both(FAMILIES[0], max_nbytes=200_000)
    both.read(Conversation(talk(8)), "small")
    kept = both.histories.memory.nbytes_of("small")
    for i in range(20):
        both.read(Conversation([Message("user", f"{i}"), *talk(16)]), "large")
    assert both.histories.memory.nbytes_of("small") == kept
    assert 0 < both.histories.memory.nbytes <= 200_000
    assert both.histories.num_resumed == 0
    both.read(Conversation(talk(9)), "small")
    both.read(Conversation([Message("user", "19"), *talk(17)]), "large")
    assert both.histories.num_resumed == 2


def test_all_that_is_held_is_counted() -> None:
    """Functions, and arguments, whose small values take much more than their text."""
    arguments = json.dumps({"x": [[]] * 20_000})
    message = Message("assistant", tool_calls=(ToolCall("i", "f", arguments),))
    schema = {"x": [[] for _ in range(20_000)]}
    both = Both(FAMILIES[-1])
    both.read(Conversation([*talk(2), message, *talk(2)], FUNCTIONS[1]), "first")
    before = both.histories.memory.nbytes
    tracemalloc.start()
    found = Conversation([*talk(2), message, *talk(2)], [Function("f", "does", schema)])
    both.histories.prompt(found, "a", add_generation_prompt=True, max_tokens=1 << 20)
    del found
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.8 * held < both.histories.memory.nbytes - before < 1.5 * held


def test_what_grows_beyond_the_window_is_refused_as_ever() -> None:
    both = Both(FAMILIES[0], max_model_len=8000)
    both.read(Conversation(talk(20)))
    more = Conversation([*talk(20), Message("user", "x " * 100_000)])
    errors = []
    for reader in both.readers:
        with pytest.raises(ContextLengthExceeded) as caught:
            reader.conversation(more, "a", add_generation_prompt=True)
        errors.append(caught.value.message)
    assert errors[0] == errors[1]


SpecialToken = partial(tokenizers.AddedToken, special=True)


@pytest.mark.parametrize(
    ("token", "others", "cuts"),
    [
        (SpecialToken("<cut>"), [], True),
        (SpecialToken("<cut>", lstrip=True), [], False),
        (SpecialToken("<cut>", rstrip=True), [], False),
        (SpecialToken("<cut>", single_word=True), [], False),
        (SpecialToken("<cutting>"), [], True),
        (SpecialToken("<<"), [], False),
        # Of others that may take a part of it.
        *((SpecialToken("<cut>"), [other], False) for other in ("<cut>s", "a<cut>", "x<c", "<")),
        # One before it may have to be a word of its own.
        (SpecialToken("cut"), [SpecialToken("yes", single_word=True)], False),
    ],
)
def test_a_text_is_cut_where_a_token_surely_is(
    token: tokenizers.AddedToken, others: list[Any], cuts: bool
) -> None:
    inner = byte_level()
    inner.add_special_tokens([token, *others])
    found = Tokenizer(inner)
    assert (str(token.content) in found.delimiters(found.added_tokens)) == cuts


@pytest.mark.parametrize("other", ["ut", "t>s"])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_tokens_that_are_not_normalized_are_found_before_others(
    other: str, is_normalized: bool
) -> None:
    """Inside of them, too: then the text before is a part of what comes."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {"o": 0, "<": 1, "o<": 2, "<unk>": 3}, [("o", "<")], unk_token="<unk>"
        )
    )
    inner.add_tokens([tokenizers.AddedToken("<cut>", normalized=is_normalized)])
    inner.add_special_tokens([tokenizers.AddedToken(other, normalized=False)])
    found = Tokenizer(inner)
    whole = found.encode("o<cut>s")
    parts = found.encode("o") + found.encode("<cut>s")
    assert (whole == parts) == (not is_normalized)
    assert found.delimiters(["<cut>"]) == (() if is_normalized else ("<cut>",))
