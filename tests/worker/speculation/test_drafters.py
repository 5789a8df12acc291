"""Drafts are what followed the last tokens where they were last seen; memory is bounded."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.messages import Fork, Generate, Limits, Prefill, Sampling, pack_tokens
from mallee.worker.sched.branch import Branch
from mallee.worker.speculation import drafters
from mallee.worker.speculation.drafters import (
    NUM_MATCHED,
    GrowingIndex,
    IndexedText,
    PromptLookup,
    SiblingLookup,
    text_of,
)

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def followed(text: Sequence[int], last: Sequence[int], n: int) -> list[int]:
    """By brute force: what followed `last` where it was last seen in `text`, with something behind it."""
    for i in range(len(text) - NUM_MATCHED - 1, -1, -1):
        if list(text[i : i + NUM_MATCHED]) == list(last):
            return list(text[i + NUM_MATCHED : i + NUM_MATCHED + n])
    return []


@given(text=TEXTS, last=st.lists(st.integers(0, 3), min_size=3, max_size=3), n=st.integers(1, 7))
def test_a_text_is_searched_as_by_brute_force(text: list[int], last: list[int], n: int) -> None:
    """X23, part, I15, part: in sorted arrays, and in a growing index."""
    key, expected = drafters._key(last), followed(text, last, n)
    assert IndexedText(text).after(key, n) == expected
    index, grown = GrowingIndex(1000), list[int]()
    for token in text:
        index.add(grown, token)
    assert index.after(key, n, []) == expected


@given(text=TEXTS, n=st.integers(1, 9))
def test_a_text_that_repeats_itself_goes_on_so(text: list[int], n: int) -> None:
    """I15, part: a draft may run beyond the end of the text into its own beginning."""
    index, grown = GrowingIndex(1000), list[int]()
    for token in text:
        index.add(grown, token)
    if len(text) < NUM_MATCHED:
        return
    draft = index.after(drafters._key(text[-NUM_MATCHED:]), n, grown)
    whole = list(text)
    for token in draft:
        # each token is what followed the same tokens at one distance before
        assert token in followed_at_any(whole)
        whole.append(token)
    assert len(draft) in (0, n)


def followed_at_any(text: Sequence[int]) -> set[int]:
    last = list(text[-NUM_MATCHED:])
    ends = range(NUM_MATCHED, len(text))
    return {text[i] for i in ends if list(text[i - NUM_MATCHED : i]) == last}


def test_an_index_forgets_what_is_old() -> None:
    """X23, part: it holds at most twice its limit, and always the last `limit` places."""
    index, text, rng = GrowingIndex(50), list[int](), random.Random(2)
    for _ in range(1000):
        index.add(text, rng.randrange(1 << 17))
        assert len(index) <= 100
    for i in range(len(text) - 40, len(text) - 3):
        assert index.after(drafters._key(text[i : i + 3]), 2, []) == text[i + 3 : i + 5]
    assert index.after(drafters._key(text[10:13]), 2, []) == []


@pytest.fixture
def branches(bench: Any) -> Callable[..., list[Branch]]:
    """The branches of a command once they have drawn."""

    def begun(*commands: Any, num_steps: int = 6) -> list[Branch]:
        bench.submit(*commands)
        for _ in range(num_steps):
            bench.step()
        names = {command.request for command in commands}
        found = [b for b in bench.engine.branches if b.job.command.request in names]
        return [branch for branch in found if branch.num_output]

    return begun


HOT = Sampling(1.0, seed=9)


def test_a_prompt_is_looked_up_across_its_capsule(branches: Any) -> None:
    """I15, part: what follows in the capsule's text, in the suffix, and in what was drawn; newest first."""
    text = [*range(1, 30)]
    branches(Prefill("p", pack_tokens(text)))
    (branch,) = branches(Fork("f", "p.0", (pack_tokens([40, 41, 5, 6, 7, 50]),), Limits(30), HOT))
    lookup = PromptLookup()
    whole = text_of(branch, 0, branch.length)
    assert whole == [*text, 40, 41, 5, 6, 7, 50, *whole[35:]]
    for context, expected in (
        ([10, 11, 12], [13, 14, 15]),
        ([5, 6, 7], [50]),  # the suffix comes after the capsule
        ([28, 29, 40], [41, 5, 6]),  # across the capsule's end
        ([60, 61, 62], []),
    ):
        branch.tokens += context
        branch.num_output += 3
        assert list(lookup.propose(branch, 3)) == expected
    branch.tokens += [1, 60, 61, 62]
    branch.num_output += 4
    assert list(lookup.propose(branch, 2)) == [1, 60]
    lookup.forget(branch)
    assert not lookup._drawn
    assert not lookup._prompts


def test_sisters_draft_for_each_other(branches: Any) -> None:
    """X23, part: branches of one prompt or capsule, of this request or another, also those that are over."""
    text = pack_tokens([*range(1, 20)])
    first, second = branches(Generate("r", text, Limits(30), HOT, 2))
    (later,) = branches(Generate("s", text, Limits(30), HOT))
    (other,) = branches(Generate("t", pack_tokens([*range(2, 20)]), Limits(30), HOT))
    (salted,) = branches(Generate("u", text, Limits(30), HOT, salt="tenant"))
    lookup = SiblingLookup()
    first.tokens += [50, 51, 52, 53, 54]
    first.num_output += 5
    lookup.read(first)
    lookup.forget(first)
    for branch in (second, later, other, salted):
        branch.tokens += [50, 51, 52]
        branch.num_output += 3
    assert list(lookup.propose(second, 4)) == [53, 54]
    assert list(lookup.propose(later, 1)) == [53]
    assert list(lookup.propose(other, 4)) == []
    assert list(lookup.propose(salted, 4)) == []


def test_families_and_prompts_are_bounded(branches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """X23, part: those used last stay."""
    monkeypatch.setattr(drafters, "MAX_FAMILIES", 2)
    monkeypatch.setattr(drafters, "MAX_SHARED", 2)
    siblings, prompts = SiblingLookup(), PromptLookup()
    for i in range(5):
        text = pack_tokens([i + 1, *range(3, 9)])
        branches(Prefill(f"p{i}", text))
        (branch,) = branches(Fork(f"f{i}", f"p{i}.0", (b"",), Limits(30), HOT))
        assert list(prompts.propose(branch, 2)) == []
        assert list(siblings.propose(branch, 2)) == []
    assert [key[1] for key in siblings._families] == ["p3.0", "p4.0"]
    assert len(prompts._shared) == 2
