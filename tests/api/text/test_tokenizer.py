"""Tokens to text and back, stop strings, and texts that were cut anywhere."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mallee.api.text.cuts import TokenCut, find_cut
from mallee.api.text.tokenizer import Detokenizer, StopMatcher, Tokenizer
from mallee.protocol.errors import InvalidParameter, ModelNotFound
from support.tokenizers_made import byte_level, metaspace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    byte_level().save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    return path


BYTES = Tokenizer(byte_level())
SPACES = Tokenizer(metaspace())


@st.composite
def splits(draw: st.DrawFn, vocab_size: int) -> list[list[int]]:
    ids = st.integers(min_value=0, max_value=vocab_size - 1)
    return draw(st.lists(st.lists(ids, max_size=4), max_size=12))


def joined(detokenizer: Detokenizer, chunks: list[list[int]]) -> str:
    return "".join([detokenizer.push(chunk) for chunk in chunks]) + detokenizer.push(
        (), is_last=True
    )


@given(splits(BYTES.vocab_size))
def test_chosen_special_tokens_may_be_shown(chunks: list[list[int]]) -> None:
    """I4, part: marks of calls that are special tokens stand in the text, others don't."""
    ids = [*chain(*chunks)]
    shown = joined(BYTES.detokenizer(["<|im_end|>"]), chunks)
    assert shown == BYTES.decode([i for i in ids if i != 0], skip_special_tokens=False)
    assert joined(BYTES.detokenizer(["<tool_call>"]), chunks) == BYTES.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTES, SPACES])
@given(data=st.data())
def test_pushes_add_up_to_the_decoding_of_all_tokens(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    chunks = data.draw(splits(tokenizer.vocab_size))
    assert joined(tokenizer.detokenizer(), chunks) == tokenizer.decode([*chain(*chunks)])


@given(st.text(max_size=30))
def test_text_streamed_token_by_token_comes_back_and_no_half_character_shows(text: str) -> None:
    detokenizer = BYTES.detokenizer()
    seen = ""
    for token in BYTES.encode(text):
        seen += detokenizer.push([token])
        assert text.startswith(seen)
    assert seen + detokenizer.push((), is_last=True) == text


def test_a_directory_gives_tokens_and_ends_or_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("the tree")) == "the tree"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1, 7))
    assert tokenizer.encode("<|im_end|>") == [1]
    assert tokenizer.special_tokens == {"<|im_start|>": 0, "<|im_end|>": 1}
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def first_cut(text: str, stops: list[str]) -> int | None:
    found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    return min(found)[1] if found else None


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_stops_cut_where_find_on_the_whole_text_says(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = "".join([matcher.push(chunk)[0] for chunk in chunks])
    is_stopped = matcher.is_stopped
    out += matcher.flush()
    text = "".join(chunks)
    cut = first_cut(text, stops)
    assert is_stopped == (cut is not None)
    assert out == text[:cut]


def test_a_possible_stop_is_held_back_and_an_impossible_one_is_not() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("so E") == ("so ", False)
    assert matcher.push("x EN") == ("Ex ", False)
    assert matcher.push("D more") == ("", True)
    assert matcher.push("more") == ("", True)
    with pytest.raises(InvalidParameter):
        StopMatcher([""])


@pytest.mark.parametrize(("keeps", "wanted"), [(False, "ab"), (True, "abEND")])
@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_a_stop_string_may_be_kept(keeps: bool, wanted: str, size: int) -> None:
    """I5: of two that are complete at once the longer is cut, or kept."""
    text, found = "abENDcd", ""
    matcher = StopMatcher(["END", "ND"], keeps_stop=keeps)
    for start in range(0, len(text), size):
        found += matcher.push(text[start : start + size])[0]
    assert found == wanted


def test_token_bytes_of_a_vocabulary_that_falls_back_to_bytes() -> None:
    vocab = {"<unk>": 0, "\u2581hi": 1, "<0xC3>": 2, "<0xA9>": 3, "é": 4, "<s>": 5}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    inner.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    inner.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(inner)
    found = [tokenizer.token_bytes(i) for i in (1, 2, 3, 4, 5, 99)]
    assert found == [b" hi", b"\xc3", b"\xa9", "é".encode(), b"<s>", b""]


WORDS = ["the tree", " the root", " leaf", "é", "木", ", ", "Obser", "vation:", "x"]


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    text = tokenizer.detokenizer()
    return text.push(tokens, is_last=True)


@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=40).map("".join),
    st.integers(0, 60),
    st.booleans(),
)
def test_a_cut_has_the_text_to_the_last_character(text: str, hidden: int, is_whole: bool) -> None:
    """F28, part: cut at any character, also inside tokens and words."""
    tokens = BYTES.encode(text)
    hidden = min(hidden, len(text))
    cut = find_cut(BYTES, tokens, hidden, is_whole=is_whole)
    assert cut is not None
    seen = text[: len(text) - hidden]
    assert text_of(BYTES, [*tokens[: cut.num_tokens], *cut.residue]) == seen
    if cut.residue:  # no more whole tokens would have fitted
        longer = text_of(BYTES, tokens[: cut.num_tokens + 1])
        assert len(longer) > len(seen) or longer.endswith("\ufffd")


def test_a_cut_far_from_the_end_is_found() -> None:
    tokens = BYTES.encode("x" * 1000)
    cut = find_cut(BYTES, tokens, 900, is_whole=False)
    assert cut is not None
    assert text_of(BYTES, [*tokens[: cut.num_tokens], *cut.residue]) == "x" * 100


def test_tokens_without_text_after_the_cut_are_not_taken() -> None:
    """F28, part: special tokens are in no text."""
    end = BYTES.encode("<|im_end|>")
    tokens = [*BYTES.encode("the tree"), *end, *BYTES.encode("leaf")]
    num = len(BYTES.encode("the tree"))
    assert find_cut(BYTES, tokens, 4, is_whole=True) == TokenCut(num, [])


@pytest.mark.parametrize("hidden", range(9))
def test_what_no_tokens_can_write_has_no_cut(hidden: int) -> None:
    """F28, part: a wrong text is never told, where words lose their leading space."""
    ids = [SPACES._inner.token_to_id(p) for p in ("a", "\u2581a", "\u2581bc", "ab", "\u2581", "c")]
    text = text_of(SPACES, ids)
    cut = find_cut(SPACES, ids, hidden, is_whole=True)
    if cut is not None:
        own = [*ids[: cut.num_tokens], *cut.residue]
        assert text_of(SPACES, own) == text[: len(text) - hidden]


def test_marks_of_calls_that_are_shown_are_text_of_their_own_tokens() -> None:
    """F28, part: a stop string behind a call whose marks are special tokens cuts there, and not earlier."""
    tokens = BYTES.encode("the tree<|im_start|>the root<|im_end|> leaf")
    shown = ["<|im_start|>", "<|im_end|>"]
    kept = "the tree<|im_start|>the root"
    cut = find_cut(BYTES, tokens, len("<|im_end|> leaf"), is_whole=True, shown=shown)
    assert cut == TokenCut(len(BYTES.encode(kept)), [])
    inside = find_cut(BYTES, tokens, len("im_end|> leaf"), is_whole=True, shown=shown)
    assert inside is not None
    text = BYTES.detokenizer(shown)
    ids = [*tokens[: inside.num_tokens], *inside.residue]
    assert text.push(ids, is_last=True) == kept + "<|"
