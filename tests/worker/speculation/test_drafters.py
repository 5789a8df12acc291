"""Drafts are what followed the last tokens where they were last seen; memory is bounded."""

import random
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.messages import (
    Cancel,
    Fork,
    Generate,
    Limits,
    Prefill,
    Release,
    Sampling,
    pack_tokens,
)
from mallee.worker.kv.node import Node
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
from mallee.worker.speculation.worth import MAX_PAUSE, Acceptance, StepCosts

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def followed(text: Sequence[int], last: Sequence[int], n: int) -> list[int]:
    """By brute force: what followed `last` where it was last seen in `text`, with something behind it."""
    for i in range(len(text) - NUM_MATCHED - 1, -1, -1):
        if list(text[i : i + NUM_MATCHED]) == list(last):
            return list(text[i + NUM_MATCHED : i + NUM_MATCHED + n])
    return []


@given(text=TEXTS, last=st.lists(st.integers(0, 3), min_size=3, max_size=3), n=st.integers(1, 9))
def test_a_text_is_searched_as_by_brute_force(text: list[int], last: list[int], n: int) -> None:
    """X23, part, I15, part: in sorted arrays, and in a growing index.

    There a draft may run beyond the end of the text into its own beginning.
    """
    key, expected = drafters._key(last), followed(text, last, n)
    assert IndexedText(text).after(key, n) == expected
    index, grown = GrowingIndex(1000), list[int]()
    for token in text:
        index.add(grown, token)
    assert index.after(key, n, []) == expected
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


def test_an_indexed_prompt_keeps_no_node_of_the_tree(bench: Any, branches: Any) -> None:
    """Nodes that were evicted are gone with their tokens, and the next prompt drops their indexes."""
    lookup, nodes = PromptLookup(), list[ref[Node]]()
    for i in range(3):
        branches(Prefill(f"p{i}", pack_tokens([i + 1, *range(3, 9)])))
        (branch,) = branches(Fork(f"f{i}", f"p{i}.0", (b"",), Limits(30), HOT))
        nodes.append(ref(branch.origin))
        lookup.propose(branch, 2)
        lookup.forget(branch)
        del branch
        bench.run(Cancel(f"f{i}"), Release(f"p{i}.0"))
        bench.run(Generate(f"full{i}", pack_tokens([60 - i] * 1000), Limits(1), HOT))
    assert [node() for node in nodes] == [None] * 3
    assert len(lookup._shared) == 1


# Drafts are as long as they pay, and stop where they lose


def play(rate: float, break_even: float, num_tokens: int = 3000, most: int = 5) -> Acceptance:
    """A branch that draws so many tokens, whose drafts are right at `rate`."""
    rng, acceptance, position = random.Random(4), Acceptance(), 1
    while position < num_tokens:
        length = acceptance.length(position, break_even, most)
        right = 0
        while right < length and rng.random() < rate:
            right += 1
        if length:
            acceptance.learn(length, right)
        position += right + 1
    return acceptance


def test_a_drafter_that_loses_is_turned_off_and_tried_rarely() -> None:
    """I15, part, X23, part: at break-even 0.3 one that is right once in ten times drafts next to nothing."""
    losing, winning = play(0.1, 0.3), play(0.8, 0.3)
    assert losing.num_drafted < 40
    assert winning.num_drafted > 2500
    assert winning.num_accepted / winning.num_drafted > 0.55


def test_a_drafter_that_becomes_right_is_turned_on_again() -> None:
    """I15, part: a trial that succeeds ends the pause."""
    acceptance = Acceptance()
    position, num_before = 0, 0
    for position in range(20 * MAX_PAUSE):
        length = acceptance.length(position, 0.3, 5)
        if length:
            is_right = position > 4000
            acceptance.learn(length, length if is_right else 0)
            num_before += not is_right
    assert num_before < 25
    assert acceptance.rate > 0.9
    assert acceptance.paused(position) == 0


@given(
    st.floats(0.02, 0.95), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=40)
)
def test_the_last_token_of_a_draft_is_worth_its_position(
    break_even: float, past: list[tuple[int, int]]
) -> None:
    """I15, part: rate ** length >= break-even > rate ** (length + 1), against a search."""
    acceptance = Acceptance()
    for num, right in past:
        acceptance.learn(num, min(num, right))
    rate = acceptance.rate
    expected = next(k for k in range(1, 10_000) if rate**k < break_even * (1 - 1e-12)) - 1
    assert acceptance.length(0, break_even, 1000) == pytest.approx(min(expected, 1000), abs=0)


@given(
    a=st.floats(1e-4, 1.0),
    b=st.floats(1e-6, 0.1),
    sizes=st.lists(st.integers(1, 64), min_size=8, max_size=60),
    rows=st.integers(1, 64),
)
def test_break_even_is_the_share_of_a_position_in_the_time_of_a_token(
    a: float, b: float, sizes: list[int], rows: int
) -> None:
    """I15, part: of steps that take a + b n seconds; unknown while all are alike, or take no time."""
    costs = StepCosts()
    unknown = costs.break_even(rows)
    for n in sizes:
        costs.learn(n, 0.0)
    assert costs.break_even(rows) == unknown
    for n in sizes:
        costs.learn(n, a + b * n)
    found = costs.break_even(rows)
    if max(sizes) - min(sizes) < 4:
        return
    assert found == pytest.approx(min(0.95, max(0.02, b * rows / (a + b * rows))), abs=1e-3)


def test_steps_that_take_less_the_larger_they_are_never_make_a_draft_cheaper_than_free() -> None:
    """I15, part: as measured on a machine that is busy otherwise."""
    costs = StepCosts()
    for n in (4, 8, 16):
        costs.learn(n, 1.0 / n)
    assert costs.slope == 0.0
    assert costs.seconds(400) == 0.0
