"""Sessions of several gateways over one store, which is away at times, against a plain model of them."""

import asyncio
import gc
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bench.doubles.bus import LocalBuckets, LocalBus, LocalHub
from mallee.gateway.sessions import stored
from mallee.gateway.sessions.copies import SessionLimits
from mallee.gateway.sessions.sessions import MAX_READ
from mallee.protocol.errors import (
    InvalidParameter,
    NotFound,
    OtherLayout,
    SessionTaken,
    StoreAway,
    StoreFull,
)
from mallee.protocol.gateways.session_notes import NodeNote
from support.session_gateways import SCOPE, SessionGateway
from support.virtual.loop import VirtualLoop
from support.waiting import elapse

ALL = ("s", "t", "u")
NAMES = st.sampled_from(ALL)


@dataclass(eq=False)
class Life:
    """A session from its beginning to its close."""

    parent: str = ""
    nodes: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    budget: str = ""


class Running(NamedTuple):
    gateway: int
    name: str
    life: Life


@dataclass
class Cut:
    """The sessions that gateway 1 knew when it was cut off, and has begun since."""

    known: dict[str, Life]
    fresh: dict[str, tuple[float, Life]] = field(default_factory=dict)
    left: dict[Life, Life] = field(default_factory=dict)  # what came to lives that it knew


class Sessions(RuleBasedStateMachine):
    """All gateways show, list and close the same sessions, whatever begins where; what is over stays over."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.now, self.num = 1000.0, 0
        self.hub = LocalHub()
        self.gateways = [self.made(i) for i in range(2)]
        self.lives: dict[str, Life] = {}
        self.ends: dict[str, float] = {}
        self.running: dict[str, Running] = {}
        self.cut: Cut | None = None
        self.run(self.quiet())

    def made(self, i: int) -> SessionGateway:
        self.num += 1
        made = SessionGateway(
            f"g{i}-{self.num}",
            self.hub,
            lambda: self.now,
            others=lambda: [each.name for each in self.gateways if each is not made],
        )
        self.run(made.start_up())
        return made

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        self.now += 1
        return self.runner.run(work)

    async def quiet(self) -> None:
        for _ in range(2):  # what one stores, the other may have to read
            for gateway in self.gateways:
                await gateway.quiet()

    def teardown(self) -> None:
        try:
            for gateway in self.gateways:
                self.run(gateway.close())
        finally:
            self.runner.close()

    @property
    def is_up(self) -> bool:
        return self.hub.is_up

    def can_ask(self, gateway: int) -> bool:
        return self.is_up and (self.cut is None or gateway == 0)

    def fresh(self) -> str:
        self.num += 1
        return f"r{self.num}"

    # Requests

    @rule(i=st.integers(0, 1), name=NAMES, parent=st.sampled_from(["", "s"]))
    def begin(self, i: int, name: str, parent: str) -> None:
        parent = parent if parent != name else ""
        request = self.fresh()

        async def begin() -> None:
            self.gateways[i].begin(request, name, parent)
            await self.quiet()

        life = self.life_at(i, name)
        life.parent = life.parent or parent
        self.running[request] = Running(i, name, life)
        self.run(begin())

    def life_at(self, i: int, name: str) -> Life:
        """The session of that name as gateway `i` takes it to be; it begins, if there is none."""
        if self.cut is None or i == 0:
            return self.lives.setdefault(name, Life())
        if name in self.cut.known:
            return self.cut.known[name]
        return self.cut.fresh.setdefault(name, (self.now + 1, Life()))[1]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_over=st.booleans())
    def leave(self, data: st.DataObject, is_over: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.running)))
        i, _, life = self.running[request]
        self.num += 1

        async def leave() -> str:
            capsule = self.gateways[i].leave(request, self.num)
            if is_over:
                self.gateways[i].end(request)
            await self.quiet()
            return capsule

        capsule = self.run(leave())
        if self.cut is not None and i == 1 and life in self.cut.known.values():
            life = self.cut.left.setdefault(life, Life())  # it is told later
        life.nodes.add(capsule)
        life.own.add(capsule)
        if is_over:
            del self.running[request]

    # Clients

    @rule(i=st.integers(0, 1), name=NAMES)
    def close(self, i: int, name: str) -> None:
        async def close() -> Any:
            try:
                return await self.gateways[i].sessions.close(name, SCOPE)
            finally:
                await self.quiet()

        if not self.can_ask(i):
            with pytest.raises(StoreAway):
                self.run(close())
            return
        life = self.lives.pop(name, None)
        if life is None:
            with pytest.raises(NotFound):
                self.run(close())
            return
        closed = self.run(close())
        self.ends[name] = self.now
        assert set(closed.released) == life.own
        gone = [request for request, each in self.running.items() if each.life is life]
        heard = [each for each in gone if self.cut is None or self.running[each].gateway == 0]
        assert closed.num_cancelled == len(heard)
        for request in heard:
            del self.running[request]

    @precondition(lambda self: self.can_ask(1))
    @rule(i=st.integers(0, 1), name=NAMES, new=NAMES)
    def fork(self, i: int, name: str, new: str) -> None:
        async def fork() -> Any:
            try:
                return await self.gateways[i].sessions.fork(name, SCOPE, new, None)
            finally:
                await self.quiet()

        source = self.lives.get(name)
        if source is None or new in self.lives or not source.nodes:
            with pytest.raises((NotFound, InvalidParameter, SessionTaken)):
                self.run(fork())
            return
        (root,) = self.run(fork()).nodes
        assert root.capsule in source.nodes
        self.lives[new] = Life(name, {root.capsule})

    @precondition(lambda self: self.can_ask(1))
    @rule(i=st.integers(0, 1), name=NAMES)
    def give(self, i: int, name: str) -> None:
        self.num += 1
        budget = f"budget{self.num}"
        sessions = self.gateways[i].sessions

        async def give() -> None:
            await sessions.own_budget(name, SCOPE)
            await sessions.give(name, SCOPE, budget, parent="", tenant="")
            await self.quiet()

        self.run(give())
        self.lives.setdefault(name, Life()).budget = budget

    # Faults

    @precondition(lambda self: self.cut is None)
    @rule()
    def lose_or_find_the_store(self) -> None:
        async def turn() -> None:
            self.hub.set_up(not self.is_up)
            await self.quiet()

        self.run(turn())

    @precondition(lambda self: self.can_ask(1))
    @rule()
    def cut_off(self) -> None:
        self.look()
        self.cut = Cut(dict(self.lives))
        self.run(self.set_cut(True))

    async def set_cut(self, is_cut: bool) -> None:
        self.gateways[1].bus.is_mute = is_cut
        self.gateways[1].bus.signals.set_up(not is_cut)
        await self.quiet()

    @precondition(lambda self: self.cut is not None)
    @rule()
    def heal(self) -> None:
        cut, self.cut = self.cut, None
        assert cut is not None
        for life, more in cut.left.items():
            life.nodes |= more.nodes
            life.own |= more.own
        for name, (since, life) in cut.fresh.items():
            if self.ends.get(name, 0.0) < since or not life.nodes:
                now = self.lives.setdefault(name, life)
                now.parent = now.parent or life.parent
                now.nodes |= life.nodes
                now.own |= life.own
                for request, each in list(self.running.items()):
                    if each.life is life:
                        self.running[request] = each._replace(life=now)
        for request, each in list(self.running.items()):
            if self.lives.get(each.name) is not each.life:
                del self.running[request]
        self.run(self.set_cut(False))

        async def look() -> None:
            for name in ALL:  # copies of what is over go
                with suppress(NotFound):
                    await self.gateways[1].sessions.show(name, SCOPE)
            await self.quiet()

        self.run(look())
        self.look()

    @precondition(lambda self: self.can_ask(1))
    @rule(i=st.integers(0, 1))
    def replace_gateway(self, i: int) -> None:
        self.run(self.gateways[i].close())
        self.gateways[i] = self.made(i)
        self.running = {name: each for name, each in self.running.items() if each.gateway != i}

    # What is seen

    @precondition(lambda self: self.can_ask(1))
    @rule()
    def look(self) -> None:
        for i in range(2):
            self.run(self.seen_at(i))

    async def seen_at(self, i: int) -> None:
        sessions = self.gateways[i].sessions
        listed = await sessions.page(SCOPE, "", 9)
        assert {view.name: view.num_capsules for view in listed} == {
            name: len(life.nodes) for name, life in sorted(self.lives.items())
        }
        assert [view.name for view in await sessions.page(SCOPE, "s", 1)] == sorted(
            name for name in self.lives if name > "s"
        )[:1]
        for name in ALL:
            life = self.lives.get(name)
            if life is None:
                with pytest.raises(NotFound):
                    await sessions.show(name, SCOPE)
                continue
            view = await sessions.show(name, SCOPE)
            assert {node.capsule for node in view.nodes} == life.nodes
            assert (view.parent, view.budget) == (life.parent, life.budget)
            assert list(view.children) == sorted(
                each for each, below in self.lives.items() if below.parent == name
            )
            assert await sessions.own_budget(name, SCOPE) == life.budget
            over = self.lives.get(life.parent)
            if over is not None and over.budget and not life.budget:
                assert await sessions.budget(name, SCOPE) == over.budget

    @precondition(lambda self: not self.can_ask(1))
    @rule(name=NAMES)
    def look_without_the_store(self, name: str) -> None:
        async def show() -> list[NodeNote]:
            return [*(await self.gateways[1].sessions.show(name, SCOPE)).nodes]

        known, more = self.lives, Life()
        if self.cut is not None:
            known = self.cut.known | {each: life for each, (_, life) in self.cut.fresh.items()}
            more = self.cut.left.get(known.get(name, more), more)
        with suppress(StoreAway):
            shown = {node.capsule for node in self.run(show())}
            assert shown <= known[name].nodes | more.nodes

    @invariant()
    def what_runs_is_what_was_not_ended(self) -> None:
        for i, gateway in enumerate(self.gateways):
            assert gateway.running == {
                request for request, each in self.running.items() if each.gateway == i
            }


Sessions.TestCase.settings = settings(stateful_step_count=25)
TestSessions = Sessions.TestCase


# What many cost

NUM_SESSIONS, NUM_CAPSULES = 700, 8
MAX_CALLBACK_S = 0.005
MAX_BURST = 1 << 20


async def made(hub: LocalHub, n: int, clock: Any = lambda: 1000.0) -> list[SessionGateway]:
    names = [f"g{i}" for i in range(n)]
    gateways = [
        SessionGateway(name, hub, clock, others=lambda own=name: {*names} - {own}) for name in names
    ]
    for gateway in gateways:
        await gateway.start_up()
    return gateways


async def test_a_broker_that_comes_back_is_no_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that all gateways have, and a node of each that waited: what was told, at once and in all."""
    gateways = await made(LocalHub(), 3)
    hub, longest, sizes = gateways[0].bus._hub, [0.0], [0]
    for i in range(NUM_SESSIONS):
        gateways[i % 3].begin(f"r{i}", f"s{i}")
        for j in range(NUM_CAPSULES):
            gateways[i % 3].leave(f"r{i}", j)
        if i % 100 == 0:
            await elapse(0.01)
    for gateway in gateways:
        await gateway.quiet()

    def counted(kind: Any, name: str, raw_at: int) -> None:
        real = getattr(kind, name)

        def call(self: Any, *given: Any) -> Any:
            sizes[0] += len(given[raw_at])
            return real(self, *given)

        monkeypatch.setattr(kind, name, call)

    def run(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        real_run(handle)
        longest[0] = max(longest[0], time.thread_time() - begun)

    real_run = asyncio.Handle._run
    counted(LocalBus, "publish", 1)
    counted(LocalBus, "request", 1)
    counted(LocalBuckets, "put", 2)
    hub.set_up(False)
    for i in range(NUM_SESSIONS):
        gateways[i % 3].leave(f"r{i}", NUM_CAPSULES)
    await elapse(1)
    monkeypatch.setattr(asyncio.Handle, "_run", run)
    gc.disable()
    try:
        sizes[0] = 0
        hub.set_up(True)
        for gateway in gateways:
            await gateway.quiet()
    finally:
        gc.enable()
    assert 0 < sizes[0] < MAX_BURST / 4, "of those nodes alone"
    assert longest[0] < MAX_CALLBACK_S
    shown = await gateways[0].sessions.show("s1", SCOPE)
    assert len(shown.nodes) == NUM_CAPSULES + 1
    for gateway in gateways:
        await gateway.close()


async def test_requests_of_a_session_that_one_gateway_uses_put_its_nodes_alone() -> None:
    """And every few seconds that it is used; one without a session puts nothing."""
    now = [1000.0]
    (gateway,) = await made(LocalHub(), 1, lambda: now[0])
    kept = gateway.bus._hub.kept
    gateway.ask("r0", "s")
    await gateway.quiet()
    assert kept.revision == 2
    for i in range(1, 5):
        gateway.ask(f"r{i}", "s")
        await gateway.quiet()
    assert kept.revision == 6
    now[0] += 10
    gateway.ask("r5", "s")
    await gateway.quiet()
    assert kept.revision == 8
    await gateway.close()


async def test_a_session_in_use_is_stored_anew_before_its_nodes_go() -> None:
    now = [1000.0]
    limits = SessionLimits(ttl_s=100.0)
    gateway = SessionGateway("g", LocalHub(), lambda: now[0], limits=limits)
    await gateway.start_up()
    kept = gateway.bus._hub.kept
    for i in range(4):
        gateway.ask(f"r{i}", "s", "above")
    await gateway.quiet()
    before = kept.revision
    now[0] += 26
    gateway.ask("r4", "s")
    await gateway.quiet()
    assert all(stored.revision > before for stored in kept.buckets["mallee_f_sessions"].values())
    await gateway.close()


async def test_what_a_gateway_forgets_for_want_of_room_goes_unless_others_use_it() -> None:
    hub, names = LocalHub(), ["g0", "g1"]
    limits = SessionLimits(max_nodes=8)
    one, two = (
        SessionGateway(
            name, hub, lambda: 1000.0, others=lambda own=name: {*names} - {own}, limits=limits
        )
        for name in names
    )
    for gateway in (one, two):
        await gateway.start_up()
    for request, gateway in (("r0", one), ("r1", two)):
        gateway.ask(request, "both")
        await gateway.quiet()
    for i in range(6):
        one.ask(f"o{i}", f"s{i}")
        await one.quiet()
    listed = [view.name for view in await two.sessions.page(SCOPE, "", 99)]
    assert listed == ["both", "s2", "s3", "s4", "s5"]
    assert len((await two.sessions.show("both", SCOPE)).nodes) == 2
    for gateway in (one, two):
        await gateway.close()


async def test_a_budget_far_above_is_found_by_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session knows what bounds the one above it, so a long line is not read whole."""
    one, two = await made(LocalHub(), 2)
    await one.sessions.give("s0", SCOPE, "budget", parent="", tenant="")
    for i in range(1, 3 * MAX_READ):
        assert await one.sessions.budget(f"s{i}", SCOPE, f"s{i - 1}") == "budget"
        one.ask(f"r{i}", f"s{i}", f"s{i - 1}")
        await one.quiet()
    reads: list[str] = []
    get = LocalBuckets.get

    async def counted(buckets: LocalBuckets, bucket: Any, key: str) -> Any:
        reads.append(key)
        return await get(buckets, bucket, key)

    monkeypatch.setattr(LocalBuckets, "get", counted)
    assert await two.sessions.budget(f"s{3 * MAX_READ - 1}", SCOPE) == "budget"
    assert len(reads) <= MAX_READ + 2
    for gateway in (one, two):
        await gateway.close()


async def test_a_full_store_ends_no_request_and_is_told_once_it_takes_more() -> None:
    one, two = await made(LocalHub(), 2)
    kept = one.bus._hub.kept
    kept.is_full = True
    one.begin("r0", "s")
    await elapse(5)
    with pytest.raises(StoreFull):
        await one.sessions.give("t", SCOPE, "budget", parent="", tenant="")
    kept.is_full = False
    one.leave("r0")
    one.end("r0")
    await one.quiet()
    assert [node.capsule for node in (await two.sessions.show("s", SCOPE)).nodes] == ["r0.0"]
    for gateway in (one, two):
        await gateway.close()


async def test_a_session_of_another_layout_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = LocalHub()
    (old,) = await made(hub, 1)
    old.ask("r0", "s")
    await old.quiet()
    monkeypatch.setattr(stored, "LAYOUT", 2)
    new = SessionGateway("new", hub, lambda: 1000.0)
    await new.start_up()
    with pytest.raises(OtherLayout, match="'mallee_f_sessions' with layout 1"):
        await new.sessions.show("s", SCOPE)
    with pytest.raises(OtherLayout):
        await new.sessions.budget("s", SCOPE)
    new.ask("r1", "s")
    await elapse(3)
    assert len(new.sessions.trees.of(SCOPE)) == 1, "the request runs"
    for gateway in (old, new):
        await gateway.close()
