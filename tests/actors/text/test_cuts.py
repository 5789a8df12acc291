"""The tokens of texts that were cut anywhere: exactly the text, with as many of its own tokens as fit."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.actors.text.cuts import TokenCut, find_cut
from mallee.actors.text.tokenizer import Tokenizer
from support.tokenizers_made import byte_level, metaspace

BYTES, SPACES = Tokenizer(byte_level()), Tokenizer(metaspace())
WORDS = ["the tree", " the root", " leaf", "é", "木", ", ", "Obser", "vation:", "x"]


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    text = tokenizer.detokenizer()
    return text.push(tokens) + text.flush()


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
    assert text.push(ids) + text.flush() == kept + "<|"
