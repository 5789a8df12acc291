"""K26: what is written down while a replay runs: copies of prefixes, gaps, the log's digest, times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.records import EventLog, Gaps
from mallee.mocker.replay.sharing import Sharing
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.events import CapsuleReleased, CapsuleStored, Cleared, EventBatch, Stored

paths = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12)


def chained(path: list[int]) -> list[int]:
    """Ids that name their path: equal id, equal text up to there."""
    ids, name = [], 0
    for step in path:
        name = name * 4 + step + 1
        ids.append(name)
    return ids


@given(paths)
def test_shared_text_is_what_two_prompts_begin_with(prompts: list[list[int]]) -> None:
    """Against sets of all prefixes."""
    sharing = Sharing(id_tokens=4, block_size=4)
    seen: set[int] = set()
    shared: set[int] = set()
    for path in prompts:
        ids = chained(path)
        known = sum(1 for name in ids if name in seen)
        tokens = 4 * len(ids) + 1
        assert sharing.begin(ids, tokens, 1) == 4 * known
        shared |= seen.intersection(ids)
        seen.update(ids)
        assert sharing.unique_tokens == 4 * len(shared)


@given(
    st.lists(st.tuples(st.floats(2e-6, 1e3), st.integers(1, 50)), min_size=1, max_size=40),
    st.sampled_from([0.01, 0.5, 0.9, 0.99]),
)
def test_gaps_know_percentiles_to_a_fifth_of_a_percent(
    values: list[tuple[float, int]], share: float
) -> None:
    gaps = Gaps()
    for gap, weight in values:
        gaps.add(gap, weight)
    every = np.repeat([gap for gap, _ in values], [weight for _, weight in values])
    expected = np.sort(every)[max(0, int(np.ceil(share * len(every))) - 1)]
    assert gaps.histogram().percentile(share) == pytest.approx(expected, rel=2.1e-3)
    assert gaps.mean_s == pytest.approx(every.mean())


def test_what_is_too_short_or_too_long_for_a_bucket_is_in_the_last_one() -> None:
    gaps = Gaps()
    gaps.add(0.0, 3)
    gaps.add(1e9, 2)
    counts = gaps.histogram().counts
    assert (counts[0], counts[-1], counts.sum()) == (3, 2, 5)
    assert np.isnan(Gaps().histogram().percentile(0.5))


def _log(order: tuple[int, ...] = (0, 1, 2)) -> str:
    log = EventLog()
    parts = [
        lambda: log.outcome(1.5, 3, 7),
        lambda: log.update(9, CountedUpdate("r9", 0, 4, None, 0, 0, None, 12, None)),
        lambda: log.events(
            EventBatch(
                "w0",
                1,
                0,
                (Stored(b"12345678"), CapsuleStored("c", 4, b""), CapsuleReleased("c"), Cleared()),
            )
        ),
    ]
    for i in order:
        parts[i]()
    return log.digest()


def test_the_digest_sees_what_was_delivered_and_in_which_order() -> None:
    assert _log() == _log()
    assert len({_log(order) for order in [(0, 1, 2), (1, 0, 2), (0, 1), (0, 2, 1), ()]}) == 5
    assert len(_log()) == 16


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_acts_run_at_their_times_in_the_order_they_were_added(plan: list[tuple[int, bool]]) -> None:
    """Those put last come after all others of their time, and acts may add acts of their own time."""
    clock = Clock()
    ran: list[tuple[int, bool, int]] = []
    for i, (time, is_last) in enumerate(plan):
        put = clock.at_last if is_last else clock.at
        put(float(time), ran.append, (time, is_last, i))
    clock.run()
    assert ran == sorted((time, is_last, i) for i, (time, is_last) in enumerate(plan))
    assert clock.num_events == len(plan)
    seen: list[str] = []
    clock.at(9.0, lambda x: clock.at(9.0, seen.append, x), "late")
    clock.at(9.0, seen.append, "soon")
    clock.run()
    assert seen == ["soon", "late"]
    with pytest.raises(AssertionError, match="is over"):
        clock.at(0.5, print, None)


def test_what_is_forked_is_counted_once_however_it_came_to_be_shared() -> None:
    """Its prompt may be shared already, by several branches or by a prompt that began like it."""
    sharing = Sharing(id_tokens=4, block_size=4)
    sharing.begin([1, 2], 8, branches=3)
    sharing.fork([1, 2], 8 + 5)  # prompt and answer
    assert sharing.unique_tokens == 8 + 5
    sharing.begin([1, 2, 3], 12, branches=1)
    assert sharing.unique_tokens == 8 + 5
    sharing.fork([1, 2, 3], 12)
    assert sharing.unique_tokens == 8 + 5 + 4
    sharing.fork((), 7)  # a fork's own text
    assert sharing.unique_tokens == 8 + 5 + 4 + 7
