"""Each row of the decision table, and each reason for which less was there than could have been."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import RequestId, Scope
from mallee.router.dispatch.jobs import Messages
from mallee.router.dispatch.verdicts import (
    Asked,
    RecentPrompts,
    Verdict,
    anthropic_reason,
    judge_fork,
    judge_prompt,
)

SIZE = 4
EARLIER = list(range(20))


def asked(tokens: list[int], **more: Any) -> Asked:
    scope = Scope(more.pop("scope", "ann"))
    return Asked(as_tokens(tokens), scope, weights=more.pop("weights", "base"), **more)


def judged(first: Asked | None, second: Asked, cached: int, **more: Any) -> Verdict:
    recent = RecentPrompts(SIZE)
    if first is not None:
        assert recent.take(RequestId("r0"), first) is None
    likeness = recent.take(RequestId("r1"), second)
    recent.check()
    return judge_prompt(second, likeness, cached_tokens=cached, block_size=SIZE, **more)


@pytest.mark.parametrize(
    ("second", "cached", "verb", "reason", "same", "missed"),
    [
        (EARLIER, 16, "exact", None, 20, 0),
        ([*EARLIER, 1, 2, 3], 20, "append", None, 20, 0),
        ([*EARLIER, 1, 2], 8, "append", "evicted", 20, 12),  # what was lost is told beside it
        (EARLIER[:13], 12, "truncate", None, 13, 0),
        ([*EARLIER[:10], 60, 61, 62, 63, 59, 58], 8, "fork", "input_changed", 10, 8),
    ],
)
def test_a_prompt_after_an_earlier_one_has_its_row(
    second: list[int], cached: int, verb: str, reason: str | None, same: int, missed: int
) -> None:
    """F9: exact, append, truncate, fork."""
    verdict = judged(asked(EARLIER), asked(second), cached)
    assert (verdict.verb, verdict.reason, verdict.missed_tokens) == (verb, reason, missed)
    assert verdict.likeness is not None
    assert (verdict.likeness.request, verdict.likeness.same_tokens) == ("r0", same)


def test_more_messages_are_a_message_append_even_if_they_render_otherwise() -> None:
    """F9: message-append."""
    first = asked([*EARLIER, 60], messages=Messages((1, 2)))
    second = asked([*EARLIER, 50, 51, 52], messages=Messages((1, 2, 3, 4)))
    assert judged(first, second, 20).verb == "message-append"


@pytest.mark.parametrize(
    ("branches", "is_cut", "is_gone", "verb"),
    [
        (1, False, False, "restore"),
        (1, True, False, "truncate"),
        (4, False, False, "fork"),
        (1, False, True, "rebuild"),
    ],
)
def test_a_fork_of_a_capsule_has_its_row(
    branches: int, is_cut: bool, is_gone: bool, verb: str
) -> None:
    """F9: restore, truncate, fork, rebuild."""
    cached, missed = (0, 20) if is_gone else (20, 0)
    verdict = judge_fork(
        branches, is_cut=is_cut, is_recomputed=is_gone, cached_tokens=cached, missed_tokens=missed
    )
    assert verdict.verb == verb
    assert verdict.reason == ("capsule_computed_again" if is_gone else None)


def test_a_rebuild_says_why() -> None:
    """F9, X18: rebuild, with each of its reasons."""
    new = asked(EARLIER, weights="v1")
    owned = {"owner": "acme"}
    for first, second, more, reason in (
        (None, asked(EARLIER), {}, "never_seen"),
        (asked([9, 8, 7, 6, 5]), asked(EARLIER), {}, "never_seen"),
        (asked(EARLIER), asked(EARLIER), {}, "evicted"),
        (asked(EARLIER), asked(EARLIER), {"held_elsewhere": True}, "elsewhere"),
        (asked(EARLIER), new, {}, "model_changed"),
        (
            asked(EARLIER, scope="acme/1", **owned),
            asked(EARLIER, scope="acme/2", **owned),
            {},
            "prompt_cache_key_changed",
        ),
    ):
        verdict = judged(first, second, 0, **more)
        assert (verdict.verb, verdict.reason) == ("rebuild", reason)
    assert anthropic_reason(judged(asked(EARLIER), new, 0)) == "model_changed"


def test_nothing_is_told_of_other_scopes() -> None:
    """Another tenant's prompt, and another salt's of callers without a key, were never seen."""
    for one, other in (
        ({"scope": "ann"}, {"scope": "bob"}),
        ({"scope": "acme", "owner": "acme"}, {"scope": "evil", "owner": "evil"}),
        ({"scope": "acme", "owner": "acme"}, {"scope": "bob"}),
    ):
        verdict = judged(asked(EARLIER, **one), asked(EARLIER, **other), 0)
        assert (verdict.reason, verdict.likeness) == ("never_seen", None)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [((1, 2, 3), (9, 2, 3), "system_changed"), ((1, 2, 3), (1, 9, 3), "messages_changed")],
)
def test_the_first_message_that_differs_is_named_in_anthropics_words(
    first: tuple[int, ...], second: tuple[int, ...], reason: str
) -> None:
    verdict = judged(
        asked(EARLIER, messages=Messages(first, True)),
        asked([*EARLIER[:6], *range(40, 55)], messages=Messages(second, True)),
        4,
    )
    assert anthropic_reason(verdict) == reason


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=40)),
        max_size=12,
    ),
    st.integers(2_000, 80_000),
)
def test_the_likeness_is_the_longest_in_the_scope(
    prompts: list[tuple[int, list[int]]], room: int
) -> None:
    """Against brute force, while nothing had to be forgotten; the bound holds in any case."""
    recent = RecentPrompts(2, room)
    kept: list[tuple[int, list[int]]] = []
    for i, (scope, tokens) in enumerate(prompts):
        found = recent.take(RequestId(str(i)), asked(tokens, scope=str(scope)))
        recent.check()
        if 3_000 * len(kept) < room // 2:  # more than they need
            best = max((_same(tokens, t) for s, t in kept if s == scope), default=0)
            assert (0 if found is None else found.same_tokens // 2) == best // 2
        kept.append((scope, tokens))


def _same(one: list[int], other: list[int]) -> int:
    n = min(len(one), len(other))
    differs = np.array(one[:n]) != np.array(other[:n])
    return int(differs.argmax()) if differs.any() else n


def test_a_changed_line_in_the_first_block_is_the_reason_of_a_miss() -> None:
    changed = Messages((1, 2), has_system=True, changed="Date: Tuesday")
    new = asked([9, 8, 7, 6, 5], messages=changed)
    verdict = judge_prompt(new, None, cached_tokens=0, block_size=4)
    assert (verdict.reason, verdict.changed_line) == ("input_changed", "Date: Tuesday")
    assert anthropic_reason(verdict) == "system_changed"
    there = judge_prompt(new, None, cached_tokens=4, block_size=4)
    assert (there.reason, there.changed_line, anthropic_reason(there)) == (None, "", None)
