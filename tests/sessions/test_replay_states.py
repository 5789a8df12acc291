"""Random sessions of many branches that run beside each other, and their replays one by one."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from bench.doubles.forward import MockForward
from bench.doubles.structures import MockStructures
from mallee.protocol.messages import Fork, Generate, Grammar, Limits, Prefill, Sampling, pack_tokens
from mallee.sessions.record import Got, frame, read
from mallee.sessions.session import RecordedSession
from support.lending import record_of
from support.recording import bad, replay_engine, replayed
from support.session_driver import SPEC, SessionDriver

EOS_SPEC = replace(SPEC, eos_token_ids=(2, 9))
GRAMMARS = (
    None,
    Grammar("json_object"),
    Grammar("choice", "[[5,6,7,8],[5,6,9,9,9],[40,41]]"),
    Grammar("regex", "4"),
)


def forward() -> MockForward:
    return MockForward(EOS_SPEC, num_blocks=2048, block_size=4)


def structures() -> MockStructures:
    return MockStructures(EOS_SPEC.vocab_size, EOS_SPEC.eos_token_ids)


def again(raw: bytes) -> Any:
    return replayed(raw, forward(), structures())


@st.composite
def sessions(draw: st.DrawFn) -> SessionDriver:
    """A session after up to 25 things that its client did."""
    driver = SessionDriver(replay_engine(forward(), structures()), EOS_SPEC)
    tokens = st.lists(st.integers(0, 63), min_size=1, max_size=9)

    def options() -> dict[str, Any]:
        sampling = Sampling(
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
        )
        limits = Limits(draw(st.integers(1, 12)), stop_token_ids=(3,))
        return {"sampling": sampling, "limits": limits}

    for _ in range(draw(st.integers(1, 25))):
        kinds = ["generate", "prefill", "step", "step", "run"]
        kinds += ["fork", "fork", "restore", "rewind"] * bool(driver.capsules)
        live = [each for each in driver.running.values() if each.num_got]
        kinds += ["cancel", "cut", "capture"] * bool(live)
        kind = draw(st.sampled_from(kinds))
        name = driver.name()
        if kind == "generate":
            text = pack_tokens(draw(tokens))
            grammar = draw(st.sampled_from(GRAMMARS))
            more = {"n": draw(st.integers(1, 4)), "grammar": grammar}
            driver.ask(Generate(name, text, **options(), **more))
        elif kind == "prefill":
            driver.ask(Prefill(name, pack_tokens(draw(tokens))))
        elif kind == "step":
            if driver.engine.has_work:
                driver.step()
        elif kind == "run":
            driver.run()
        elif kind in ("cancel", "cut", "capture"):
            branch = draw(st.sampled_from(live))
            if kind == "cut":
                back = draw(st.integers(0, branch.num_got))
                most = 0 if branch.has_grammar else 2
                driver.cut(branch, back, draw(st.lists(st.integers(4, 8), max_size=most)))
            else:
                getattr(driver, kind)(branch)
        else:
            capsule = draw(st.sampled_from(sorted(driver.capsules)))
            boundary = driver.capsules[capsule]
            at = draw(st.none() | st.integers(1, boundary))
            if kind == "rewind":
                driver.rewind(capsule, at or boundary)
            elif kind == "fork" or not can_go_on(driver, capsule, at):
                suffixes = draw(st.lists(st.just([]) | tokens, min_size=1, max_size=3))
                packed = tuple(map(pack_tokens, suffixes))
                driver.ask(Fork(name, capsule, packed, **options(), at=at))
            else:
                driver.ask(Fork(name, capsule, (b"",), Limits(0), at=at, resumes=True))
    return driver


def can_go_on(driver: SessionDriver, capsule: str, at: int | None) -> bool:
    """Whether the branch that left the capsule can go on there: it is one, free, and not complete."""
    found = record_of(driver.engine, capsule)
    left, back = found.continuation, 0 if at is None else found.boundary - at
    if left is None or left.drawn < back or found.grammar is not None:
        return False
    return left.drawn - back < left.limits.max_tokens


@pytest.mark.slow
@given(sessions(), st.data())
def test_a_random_session_is_replayed_token_by_token(
    driver: SessionDriver, data: st.DataObject
) -> None:
    """F25: while it runs, after it, and as a record that began late or was torn."""
    assert bad(again(driver.raw)) == []
    driver.run()
    driver.engine.check()
    raw = driver.raw
    outcomes = again(raw)
    assert bad(outcomes) == []
    num_tokens = RecordedSession(read(raw).entries).num_tokens
    assert sum(each.num_tokens for each in outcomes) == num_tokens
    end = data.draw(st.integers(len(frame(driver.entries[0])), len(raw)))
    torn = read(raw[:end])
    assert torn.nbytes + torn.num_ignored == end
    assert bad(again(raw[:end])) == []
    if end < len(raw):
        flipped = raw[:end] + bytes([raw[end] ^ 1]) + raw[end + 1 :]
        assert read(flipped).num_ignored >= len(raw) - end, "damage ends a record"
    late = driver.forget_before(data.draw(st.integers(1, len(driver.entries))))
    assert bad(again(late)) == []


@given(sessions(), st.data())
def test_a_changed_token_is_named_with_its_branch_and_step(
    driver: SessionDriver, data: st.DataObject
) -> None:
    """F25: whichever it is; and no other branch that doesn't continue it is blamed."""
    driver.run()
    places = [i for i, e in enumerate(driver.entries) if isinstance(e, Got) and e.tokens]
    if not places:
        return
    at = data.draw(st.sampled_from(places))
    entry = driver.entries[at]
    assert isinstance(entry, Got)
    step = sum(
        len(e.tokens) // 4
        for e in driver.entries[:at]
        if isinstance(e, Got) and (e.number, e.branch) == (entry.number, entry.branch)
    )
    changed = bytes([(entry.tokens[0] + 1) % 64]) + entry.tokens[1:]
    driver.entries[at] = replace(entry, tokens=changed)
    outcomes = again(driver.raw)
    [found] = [d for each in outcomes for d in each.divergences]
    assert (found.branch, found.step, found.got) == (entry.branch, step, entry.tokens[0])
    assert found.expected == changed[0]
    session = RecordedSession(read(driver.raw).entries)
    for each in outcomes:
        maker = each.request
        while maker is not None and maker.name != found.request:
            maker = None if maker.source is None else session.maker(maker.source)
        assert each.verdict == "equal" or maker is not None
