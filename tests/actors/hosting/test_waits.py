"""Requests whose grammar is compiled wait alone; what depends on them waits behind them, in order."""

import asyncio
import logging
import threading
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.doubles.structures import MockMatcher, MockStructures
from mallee.actors.hosting import waits
from mallee.actors.hosting.compiler import MAX_WAITING, Compiler
from mallee.actors.hosting.waits import Waits
from mallee.protocol.codec import encode
from mallee.protocol.messages import (
    Cancel,
    Command,
    Demote,
    Fork,
    Generate,
    Grammar,
    Limits,
    Prefill,
    Prioritize,
    Promote,
    Release,
    Share,
    Update,
    pack_tokens,
)
from mallee.protocol.parcels import Parcel, decode_reports
from mallee.runtime.tasks import Tasks
from support.reading import Reader
from support.waiting import until

PROMPT = pack_tokens(range(1, 11))


class SlowStructures(MockStructures):
    """Compiles nothing before `may_end`; raises `error` if there is one."""

    def __init__(self) -> None:
        super().__init__(1000, (0,))
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.known: dict[Grammar, None] = {}  # in the order of their compilation
        self.num_closed = 0

    def knows(self, grammar: Grammar) -> bool:
        return grammar in self.known

    def compile(self, grammar: Grammar) -> MockMatcher:
        if grammar not in self.known:
            self.begun.set()
            assert self.may_end.wait(10)
            if self.error is not None:
                raise self.error
            self.known[grammar] = None
        return super().compile(grammar)

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def structures() -> Any:
    found = SlowStructures()
    yield found
    found.may_end.set()


def plain(request: str, max_tokens: int = 4) -> Generate:
    return Generate(request, PROMPT, Limits(max_tokens, ignore_eos=True))


def constrained(request: str, i: int = 0, n: int = 1, tenant: str = "") -> Generate:
    grammar, share = Grammar("regex", str(100 + i)), Share(tenant=tenant)
    return Generate(request, PROMPT, Limits(4), n=n, grammar=grammar, share=share)


def continued(command: Generate) -> Generate:
    """`command`, of which another worker drew a token."""
    assert command.grammar is not None
    return replace(command, drawn=1, grammar=replace(command.grammar, consumed=1))


def batch(*commands: Command, is_end: bool = False) -> bytes:
    return encode([Parcel("w0", 1, commands, is_end)])


async def ends(frames: Reader, num: int) -> dict[tuple[str, int], Update]:
    """The next `num` last updates, by request and branch."""
    found: dict[tuple[str, int], Update] = {}
    async for raw in frames:
        for report in decode_reports(raw):
            for update in report.frame.updates:
                if update.finish is not None:
                    found[update.request, update.branch] = update
        if len(found) >= num:
            return found
    raise AssertionError(f"the stream ended after {found}")


async def test_ten_slow_grammars_hold_up_no_plain_request(
    rig: Any, structures: SlowStructures
) -> None:
    """I18, D9: neither of their batch, nor of a later one, nor one whose grammar is known."""
    structures.known[Grammar("regex", "99")] = None
    async with (
        rig(structures=structures) as r,
        aclosing(Reader(r.host, "g")) as frames,
    ):
        slow = [constrained(f"s{i}", i) for i in range(10)]
        await frames.submit(batch(*slow, plain("a")))
        await frames.submit(batch(plain("b"), constrained("known", -1)))
        assert {request for request, _ in await ends(frames, 3)} == {"a", "b", "known"}
        assert structures.begun.is_set()
        assert r.host.stats().open_requests == 10
        r.host.check()
        structures.may_end.set()
        finished = await ends(frames, 10)
        assert {u.finish for u in finished.values()} == {"length"}
        assert r.host.stats().open_requests == 0
        r.host.check()


async def test_a_request_whose_grammar_compiles_is_cancelled_at_once(
    rig: Any, structures: SlowStructures
) -> None:
    async with rig(structures=structures) as r, aclosing(Reader(r.host, "g")) as frames:
        await frames.submit(batch(constrained("a", n=3), Fork("f", "a.0", (b"",), Limits(2))))
        await frames.submit(batch(Cancel("a")))
        found = await ends(frames, 2)
        assert found.pop(("a", -1)).finish == "cancelled"
        (fork,) = found.values()
        assert fork.error is not None
        assert fork.error[0] == "capsule_not_found"
        structures.may_end.set()
        assert (await frames.submit(batch(plain("b")))) is None
        assert {request for request, _ in await ends(frames, 1)} == {"b"}
        assert r.host.stats().open_requests == 0
        r.host.check()


@pytest.mark.parametrize("how", ["stream", "life", "crash", "close"])
async def test_nothing_is_handed_over_for_a_gateway_or_worker_that_is_gone(
    rig: Any, structures: SlowStructures, how: str
) -> None:
    async with rig(structures=structures) as r:
        frames = Reader(r.host, "g")
        seen: list[Command] = []
        r.engine.submit = lambda command, gateway: seen.append(command)
        await frames.submit(batch(constrained("a"), constrained("b", 1)))
        assert await asyncio.to_thread(structures.begun.wait, 10)
        match how:
            case "stream":
                await frames.aclose()
            case "life":
                await frames.submit(batch(is_end=True))
            case "crash":
                await r.host.crash(r.engine.worker, "it crashed")
            case "close":
                await r.host.close()
        structures.may_end.set()
        await until(lambda: not any("compilation" in t.get_name() for t in asyncio.all_tasks()))
        assert not seen
        assert r.host.stats().open_requests == 0
        r.host.check()
    await until(lambda: not any(t.name.startswith("grammars") for t in threading.enumerate()))
    assert structures.num_closed >= 1


class PanicException(BaseException):
    """As pyo3's, which is no Exception."""


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), PanicException("index"), RecursionError(), MemoryError()]
)
async def test_any_error_of_the_compiler_is_a_refusal_of_its_request_alone(
    rig: Any,
    structures: SlowStructures,
    error: BaseException,
    forgets: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also in the engine's own thread, which compiles a grammar that was forgotten meanwhile."""
    structures.error = error
    structures.may_end.set()
    if forgets:
        monkeypatch.setattr(structures, "knows", lambda grammar: True)
    async with rig(structures=structures) as r, aclosing(Reader(r.host, "g")) as frames:
        await frames.submit(batch(constrained("bad"), plain("good")))
        found = await ends(frames, 2)
        assert found["good", 0].finish == "length"
        code, message, fields = found["bad", -1].error or ("", "", {})
        assert (code, fields["param"]) == ("invalid_parameter", "grammar")
        assert type(error).__name__ in message
        logged = [rec.getMessage() for rec in caplog.records if rec.levelno == logging.ERROR]
        assert ["bad" in message for message in logged] == ([] if forgets else [True])
        assert r.host.healthy()
        r.host.check()


async def test_a_compilation_shows_gateways_progress_while_the_engine_is_idle(
    rig: Any, structures: SlowStructures
) -> None:
    """Or they would take the worker for one that hangs."""
    async with (
        rig(structures=structures, heartbeat_s=0.01) as r,
        aclosing(Reader(r.host, "g")) as frames,
    ):
        await frames.submit(batch(constrained("a")))
        steps: list[int] = []
        async for raw in frames:
            steps += [report.frame.step for report in decode_reports(raw)]
            if len(steps) == 4:
                break
        assert len(set(steps)) == 4


async def test_as_many_commands_wait_as_may_and_others_are_refused(
    rig: Any, structures: SlowStructures, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 64
    monkeypatch.setattr(waits, "MAX_HELD", most)
    async with rig(structures=structures) as r, aclosing(Reader(r.host, "g")) as frames:
        requests = [constrained(f"r{i}", i, tenant=f"t{i % 32}") for i in range(most + 2)]
        await frames.submit(batch(*requests))
        found = await ends(frames, 2)
        errors = [update.error for update in found.values()]
        assert {error and error[0] for error in errors} == {"unavailable"}
        assert str(most) in str(errors)
        await frames.submit(batch(*(Cancel(f"r{i}") for i in range(most))))
        await ends(frames, most)
        assert r.host.stats().open_requests == 0


async def test_as_many_grammars_of_a_tenant_wait_as_may_whatever_their_salts(
    rig: Any, structures: SlowStructures
) -> None:
    async with rig(structures=structures) as r, aclosing(Reader(r.host, "g")) as frames:
        many = [constrained(f"r{i}", i, tenant="t") for i in range(MAX_WAITING + 3)]
        many = [replace(each, salt=f"s{i}") for i, each in enumerate(many)]
        await frames.submit(batch(*many, constrained("other", tenant="u")))
        errors = [update.error for update in (await ends(frames, 2)).values()]
        assert {error and error[0] for error in errors} == {"unavailable"}
        assert {error and error[2]["limit"] for error in errors} == {MAX_WAITING}
        r.host.check()
        structures.may_end.set()
        assert len(await ends(frames, MAX_WAITING + 2)) == MAX_WAITING + 2
        assert r.host.stats().open_requests == 0


async def test_tenants_take_turns_with_their_grammars(rig: Any, structures: SlowStructures) -> None:
    """A grammar waits for one of another tenant at most, however many of those wait."""
    async with rig(structures=structures) as r, aclosing(Reader(r.host, "g")) as frames:
        await frames.submit(batch(*(constrained(f"r{i}", i, tenant="t") for i in range(12))))
        assert await asyncio.to_thread(structures.begun.wait, 10)
        await frames.submit(batch(constrained("a", 50, tenant="u"), constrained("b", 51)))
        structures.may_end.set()
        await ends(frames, 14)
        order = [int(grammar.source) - 100 for grammar in structures.known]
        assert order == [0, 50, 51, *range(1, 12)]


async def test_a_grammar_whose_turn_does_not_come_is_refused(
    rig: Any, structures: SlowStructures
) -> None:
    async with (
        rig(structures=structures, max_grammar_wait_s=0.05) as r,
        aclosing(Reader(r.host, "g")) as frames,
    ):
        await frames.submit(batch(constrained("a"), constrained("late", 1)))
        (late,) = (await ends(frames, 1)).values()
        assert late.request == "late"
        code, message, fields = late.error or ("", "", {})
        assert (code, fields) == ("unavailable", {"others": 1, "limit_s": 0.05})
        assert "retry later" in message
        structures.may_end.set()
        assert {request for request, _ in await ends(frames, 1)} == {"a"}
        await frames.submit(batch(constrained("again", 1)))
        assert {update.finish for update in (await ends(frames, 1)).values()} == {"length"}
        r.host.check()


async def test_an_answer_that_goes_on_from_another_worker_waits_as_long_as_it_takes(
    rig: Any, structures: SlowStructures
) -> None:
    """X4, part: however many of its tenant wait."""
    async with (
        rig(structures=structures, max_grammar_wait_s=0.05) as r,
        aclosing(Reader(r.host, "g")) as frames,
    ):
        moved = [continued(constrained(f"r{i}", i + 3)) for i in range(MAX_WAITING + 3)]
        await frames.submit(batch(constrained("a"), *moved[:1], constrained("late", 2)))
        assert {request for request, _ in await ends(frames, 1)} == {"late"}
        await frames.submit(batch(*moved[1:]))
        structures.may_end.set()
        found = await ends(frames, len(moved) + 1)
        assert {update.finish for update in found.values()} == {"length"}
        r.host.check()


async def test_a_turn_that_is_given_up_goes_to_the_next() -> None:
    """Whether it was under way, waited behind one of its tenant, or for the thread."""
    tasks, order, may_end = Tasks("test"), list[str](), threading.Event()
    compiler = Compiler("w0", tasks)

    def submit(tenant: str) -> asyncio.Task[None]:
        before = set(asyncio.all_tasks())
        compiler.submit(tenant, may_end.wait, lambda error: order.append(tenant))
        (task,) = asyncio.all_tasks() - before
        return task

    first, second, _, other, _ = map(submit, "aaabb")
    for given_up in (first, second, other):
        for _ in range(5):  # turns of the loop
            await asyncio.sleep(0)
        tasks.cancel(given_up)
    may_end.set()
    await tasks.finish()
    assert order == ["a", "b"]
    assert compiler.num_open == 0
    compiler.close()


NAMES = st.sampled_from("abc")


@st.composite
def commands(draw: st.DrawFn) -> Command:
    name = draw(NAMES)
    grammar = draw(st.sampled_from([None, Grammar("regex", "1"), Grammar("inherit")]))
    match draw(st.integers(0, 6)):
        case 0:
            return Generate(name, PROMPT, Limits(1), n=2, grammar=grammar)
        case 1:
            return Fork(name, f"{draw(NAMES)}.0", (b"", b""), Limits(1), grammar=grammar)
        case 2:
            return Prefill(name, PROMPT, capsule=draw(st.sampled_from(["", "x.0"])))
        case 3:
            return Release(f"{name}.0")
        case 4:
            return Prioritize(name, 1.0)
        case 5:
            return draw(st.sampled_from([Demote, Promote]))(f"m{name}", f"{draw(NAMES)}.0", 1)
    return Cancel(name, draw(st.sampled_from([0, 1])))


def names(command: Command) -> set[str]:
    found = {getattr(command, "request", ""), getattr(command, "capsule", "").split(".")[0]}
    return found - {""}


@given(st.lists(commands(), max_size=24), st.data())
def test_commands_that_share_a_request_keep_their_order_whatever_compiles(
    given_: list[Command], data: st.DataObject
) -> None:
    """Each command goes to the engine once, after all before it that name the same requests."""
    held = Waits(lambda command: getattr(command, "grammar", None) != Grammar("regex", "1"))
    done: list[int] = []
    compiling: list[Command] = []
    number = {id(command): i for i, command in enumerate(given_)}

    def take(free: list[Command]) -> None:
        done.extend(number[id(command)] for command in free)
        if len(held):
            held.check()

    for command in given_:
        admitted = held.admit([command])
        compiling += admitted.compiling
        take(admitted.free)
        while compiling and data.draw(st.booleans()):
            take(held.compiled(compiling.pop(data.draw(st.integers(0, len(compiling) - 1)))))
    while compiling:
        take(held.compiled(compiling.pop()))
    assert sorted(done) == list(range(len(given_)))
    assert not len(held)
    place = {i: at for at, i in enumerate(done)}
    for j, later in enumerate(given_):
        for i, earlier in enumerate(given_[:j]):
            if names(earlier) & names(later):
                assert place[i] < place[j], (earlier, later)
