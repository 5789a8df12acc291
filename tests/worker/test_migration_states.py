"""Random trees on two workers that fetch prefixes and whole capsules from each other, with moves that are
late, loans that break, workers that start again, and texts that are retained.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from mallee.protocol.ids import Incarnation, WorkerId, branch_seed
from mallee.protocol.messages import (
    Cancel,
    Generate,
    Limits,
    Prefill,
    Release,
    RetainSpan,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.forward import Forward
from mallee.worker.kv.watch import KVChecks
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig
from mallee.worker.transfer.values import Loan
from support.engine_machine import (
    GATEWAYS,
    QUIET,
    SAMPLINGS,
    TOKENS,
    Plan,
    TorchMachine,
    make_engine,
)
from support.examples import examples
from support.lending import Neighbours, ShortLoan, holder
from support.speculating import Free
from support.tiered_machine import (
    TieredHybridMachine,
    TieredMachine,
    TieredStateMachine,
    TieredWindowMachine,
)
from support.tiers import LateMover, make_tiers

pytestmark = pytest.mark.usefixtures("one_thread", "small_window_pools")

SPANS = st.one_of(
    st.just(()),
    st.builds(
        lambda end, priority, duration_s: (RetainSpan(end, priority, duration_s),),
        st.integers(1, 14),
        st.sampled_from([50, 100]),
        st.sampled_from([2.0, 50.0]),
    ),
)
LIFE = 1000  # the peer's first one


class MigratingMachine(TieredMachine):
    """The same with a second worker, which holds, lends, fetches, and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lender = Neighbours(self.run_lender)
        self.peer_life = LIFE
        self.peer_texts: dict[str, list[int]] = {}
        self.peer_plans: dict[str, Plan] = {}
        self.peer_tokens: dict[str, list[int]] = {}
        self.peer_open: set[str] = set()
        self.peer_movers: list[LateMover] = []
        self.num_peer = 0
        self.breaks_after: int | None = None
        self.lender.spoil = self.spoilt

    def start(self) -> None:
        super().start()
        if not self.peer_movers:
            self.start_peer()
        self.lender.engines["w0"] = self.engine

    def below(self) -> Any:
        return make_tiers(
            self.host_blocks_now,
            disk=self.disk,
            movers=self.movers,
            peers=self.lender,
            short=self.short,
        )

    def start_peer(self) -> None:
        self.peer_life += 1
        self.peer_movers = []
        checks = KVChecks("guards", sweep_steps=8)
        self.peer = make_engine(
            self.make_forward(),
            lambda: self.now,
            EngineConfig(SchedulerConfig(16, 6, 24), 8, kv_checks=checks),
            worker=WorkerId("peer"),
            incarnation=Incarnation(self.peer_life),
            below=make_tiers(peers=self.lender, movers=self.peer_movers),
        )
        self.lender.engines["peer"] = self.peer

    def spoilt(self, loan: Loan) -> Loan:
        if self.breaks_after is None:
            return loan
        num, self.breaks_after = self.breaks_after, None
        return ShortLoan(loan, num)

    def run_lender(self, engine: Engine) -> None:
        """`engine` has to bring something back before it lends: only this one has a disk."""
        assert engine is self.engine
        self.movers[0].advance(100)
        self.step(1)

    def step_peer_once(self) -> None:
        for frame in self.peer.step().frames.values():
            for update in frame.updates:
                self.peer_tokens.setdefault(update.request, []).extend(update.tokens)
                if update.finish is not None:
                    self.peer_open.discard(update.request)
                if update.capsule is not None:
                    text = self.peer_plans[update.request].text
                    self.peer_texts[update.capsule] = text + self.peer_tokens[update.request]

    # From the peer

    @rule(
        tokens=TOKENS,
        limit=st.integers(1, 12),
        n=st.integers(1, 2),
        sampling=SAMPLINGS,
        gateway=GATEWAYS,
        retain=SPANS,
    )
    def pull(
        self,
        tokens: list[int],
        limit: int,
        n: int,
        sampling: Sampling,
        gateway: str,
        retain: tuple[RetainSpan, ...],
    ) -> None:
        known = list(self.peer_texts.values())
        if known and tokens[0] != 3:  # mostly of a text that is there
            tokens = known[-1] + tokens[:3]
        name = self.name(gateway)
        self.plans |= {(name, i): Plan(tokens, sampling) for i in range(n)}
        limits, holders = Limits(limit, ignore_eos=True), (holder(self.peer, len(tokens)),)
        command = Generate(
            name, pack_tokens(tokens), limits, sampling, n, retain=retain, holders=holders
        )
        self.engine.submit(command, gateway)

    @precondition(lambda self: self.peer_texts)
    @rule(data=st.data(), ttl_s=st.sampled_from([0.0, 3.0]), gateway=GATEWAYS, retain=SPANS)
    def migrate(
        self, data: st.DataObject, ttl_s: float, gateway: str, retain: tuple[RetainSpan, ...]
    ) -> None:
        capsule = data.draw(st.sampled_from(sorted(self.peer_texts)))
        text = self.peer_texts[capsule]
        if data.draw(st.integers(0, 5)) == 0:
            text = [*text, 3]  # not the capsule's: it is computed
        name = self.name(gateway)
        self.plans[name, 0] = Plan(text, Sampling())
        self.texts[f"{name}.0"] = text
        holders = (holder(self.peer, len(text), capsule), holder(self.peer, len(text)))
        command = Prefill(name, pack_tokens(text), ttl_s=ttl_s, retain=retain, holders=holders)
        self.engine.submit(command, gateway)

    @rule(num=st.integers(0, 3))
    def break_next(self, num: int) -> None:
        self.breaks_after = num

    # At the peer

    @rule(tokens=TOKENS, limit=st.integers(1, 8), retain=SPANS)
    def peer_generate(self, tokens: list[int], limit: int, retain: tuple[RetainSpan, ...]) -> None:
        self.num_peer += 1
        name = f"g{self.num_peer}"
        self.peer_plans[name] = Plan(tokens, Sampling())
        self.peer_open.add(name)
        holders = (holder(self.engine, len(tokens)),)
        limits = Limits(limit, ignore_eos=True)
        self.peer.submit(
            Generate(name, pack_tokens(tokens), limits, holders=holders, retain=retain), "p"
        )
        self.peer_step(6, 3)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def peer_migrate(self, data: st.DataObject) -> None:
        capsule = data.draw(st.sampled_from(sorted(self.texts)))
        self.num_peer += 1
        name = f"g{self.num_peer}"
        text = self.texts[capsule]
        self.peer_plans[name] = Plan(text, Sampling())
        self.peer_open.add(name)
        holders = (holder(self.engine, len(text), capsule),)
        self.peer.submit(Prefill(name, pack_tokens(text), holders=holders), "p")

    @precondition(lambda self: self.peer_texts)
    @rule(data=st.data())
    def peer_release(self, data: st.DataObject) -> None:
        capsule = data.draw(st.sampled_from(sorted(self.peer_texts)))
        del self.peer_texts[capsule]
        self.peer.submit(Release(capsule), "p")

    @precondition(lambda self: self.peer_open)
    @rule(data=st.data())
    def peer_cancel(self, data: st.DataObject) -> None:
        self.peer.submit(Cancel(data.draw(st.sampled_from(sorted(self.peer_open)))), "p")

    @rule(n=st.integers(1, 12), num_moves=st.integers(0, 3))
    def peer_step(self, n: int, num_moves: int) -> None:
        self.peer_movers[0].advance(num_moves)
        for _ in range(n):
            if self.peer.has_work:
                self.step_peer_once()

    @rule(dice=st.integers(0, 4))
    def peer_restart(self, dice: int) -> None:
        """Its process ends: what it lent and what it borrowed ends with it."""
        if dice:
            return
        self.peer.close()
        self.peer_texts, self.peer_open = {}, set()
        self.start_peer()

    @rule(dice=st.integers(0, 4))
    def restart(self, dice: int) -> None:
        if not dice:
            self.step(1)
            self.engine._loans.close()
            self.engine._fetching.close()
            self.movers[0].close()
        super().restart(dice)

    @invariant()
    def the_peer_is_well(self) -> None:
        if self.peer_movers:
            self.peer.check()

    def teardown(self) -> None:
        """Nothing is lent any more; what the peer drew is what a rerun draws."""
        self.forward.fails = None
        movers = self.movers[0], self.peer_movers[0]
        for _ in range(2000):
            for mover in movers:
                mover.advance(100)
            if self.peer.has_work:
                self.step_peer_once()
            if self.engine.has_work:
                self.step(1)
            elif not self.peer.has_work and not any(mover.num_under_way for mover in movers):
                break  # a loan ends by a move of its borrower, after its last step
        for engine in (self.engine, self.peer):
            assert engine.stats().lending.open == 0
            assert engine.stats().jobs == 0
        for name, tokens in self.peer_tokens.items():
            if tokens:
                plan = self.peer_plans[name]
                assert tokens == self.rerun(plan, len(tokens), branch_seed(0, 0)), name
        super().teardown()
        self.peer.close()


class MigratingTorchMachine(MigratingMachine):
    """The same on a real, tiny model in float32."""

    num_blocks = 61
    make_forward = TorchMachine.make_forward
    rerun = TorchMachine.rerun


class MigratingWindowMachine(MigratingMachine, TieredWindowMachine):
    """The same with layers that read a window, whose pool is small."""

    num_blocks = 61

    def make_forward(self) -> Forward:
        return TieredWindowMachine.make_forward(self)

    def rerun(self, plan: Plan, n: int, seed: int) -> list[int]:
        return TorchMachine.rerun(self, plan, n, seed)  # type: ignore[arg-type]


class MigratingStateMachine(MigratingMachine, TieredStateMachine):
    """The same with a layer that folds all tokens into a state."""

    make_forward = TieredStateMachine.make_forward
    rerun = TieredStateMachine.rerun


class DraftingStateMachine(MigratingStateMachine):
    """The same with drafts from texts that repeat themselves, as their vocabulary is small."""

    speculation = SpeculationConfig("auto")

    def begun(self) -> None:
        assert self.engine._speculator is not None
        self.engine._speculator._costs = Free()


class DraftingHybridMachine(DraftingStateMachine, TieredHybridMachine):
    """The same on a real, tiny model in float32."""

    make_forward = TieredHybridMachine.make_forward
    rerun = TieredHybridMachine.rerun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "num", "steps"),
    [
        (MigratingMachine, 30, 40),
        (MigratingTorchMachine, 5, 20),
        (MigratingWindowMachine, 5, 25),
        (DraftingStateMachine, 20, 40),
        (DraftingHybridMachine, 4, 25),
    ],
)
def test_workers_that_lend_to_each_other_draw_what_each_would_alone(
    machine: type[MigratingMachine], num: int, steps: int
) -> None:
    """X6, part, F6, part: with parking, eviction, retention, damage, cancels and restarts interleaved."""
    bounds = settings(examples(num), stateful_step_count=steps, suppress_health_check=QUIET)
    run_state_machine_as_test(machine, settings=bounds)
