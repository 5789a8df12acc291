"""The engine's state machine with tiers below: host memory and a disk, both small, and late moves."""

from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from bench.doubles.random_model import random_model
from bench.mocker.policies import make_order
from mallee.protocol import model
from mallee.protocol.events import Removed, Stored, unpack_hashes
from mallee.protocol.ids import Incarnation
from mallee.protocol.messages import CapsuleReply, Demote, Prefill, Promote, Sampling, pack_tokens
from mallee.worker.engine import MakeTiers
from mallee.worker.forward import Forward
from mallee.worker.model.runner import TorchForward
from mallee.worker.records import EngineConfig, StepResult
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.transfer.values import DISK, HOST
from support.engine_machine import (
    GATEWAYS,
    TOKENS,
    EngineMachine,
    Fallible,
    Plan,
    TorchMachine,
    make_engine,
)
from support.fold_forward import FoldForward, fold_tokens
from support.tiers import DictDisk, LateMover, ShortMemory, make_tiers

WINDOW_MODEL = random_model("gemma3_text", 3, sliding_window=6)
HYBRID_MODEL = random_model("qwen3_5_text", 3)


class TieredMachine(EngineMachine):
    """The same with host memory and a disk below, both small."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = DictDisk(max_blocks=40)
        self.movers: list[LateMover] = []
        self.short = ShortMemory()
        self.held: list[set[int]] = [set(), set(), set()]  # by tier, as events tell
        self.demoted: dict[str, tuple[str, int]] = {}  # request: capsule, tier
        self.durable: set[str] = set()
        self.lasting: set[str] = set()  # capsules that nothing but a release ends
        self.num_lives = 0
        self.config: EngineConfig

    @initialize(
        policy=st.sampled_from(["fair", "fcfs"]),
        eviction=st.sampled_from(["lru", "lineage"]),
        victims=st.sampled_from(["least_due", "youngest"]),
        max_step_tokens=st.sampled_from([6, 16, 64]),
        host_blocks=st.sampled_from([0, 8, 24]),
    )
    def begin(
        self,
        eviction: Any,
        host_blocks: int = 24,
        policy: str = "fair",
        victims: str = "least_due",
        **scheduling: Any,
    ) -> None:
        order = make_order(policy, victims)
        scheduler = SchedulerConfig(max_rows=6, max_waiting=24, order=order, **scheduling)
        self.host_blocks_now = host_blocks
        self.config = EngineConfig(
            scheduler,
            max_answer_capsules=8,
            eviction=eviction,
            kv_checks=self.checks,
            speculation=self.speculation,
        )
        self.start()

    def start(self) -> None:
        self.num_lives += 1
        self.movers = []
        self.held = [set(), set(), set()]
        self.engine = make_engine(
            self.forward,
            lambda: self.now,
            self.config,
            device=self.device,
            incarnation=Incarnation(self.num_lives),
            below=self.below(),
        )
        self.begun()

    def below(self) -> MakeTiers:
        """The tiers of the next life."""
        return make_tiers(
            self.host_blocks_now, disk=self.disk, movers=self.movers, short=self.short
        )

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tier=st.sampled_from([HOST, DISK]), gateway=GATEWAYS)
    def demote(self, data: st.DataObject, tier: int, gateway: str) -> None:
        capsule = data.draw(st.sampled_from(sorted(self.texts)))
        name = self.name(gateway)
        self.demoted[name] = (capsule, tier)
        self.engine.submit(Demote(name, capsule, tier), gateway)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), gateway=GATEWAYS)
    def promote(self, data: st.DataObject, gateway: str) -> None:
        capsule = data.draw(st.sampled_from(sorted(self.texts)))
        name = self.name(gateway)
        self.demoted[name] = (capsule, 0)
        self.engine.submit(Promote(name, capsule), gateway)

    @rule(n=st.integers(1, 2))
    def exhaust(self, n: int) -> None:
        """The next copies to or from the device find no memory there: what they were for goes on."""
        self.short.num_failing = n

    @rule(n=st.integers(1, 3))
    def move(self, n: int) -> None:
        self.movers[0].advance(n)

    @precondition(lambda self: self.disk.blocks)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.disk.broken.add(data.draw(st.sampled_from(sorted(self.disk.blocks))))

    @rule(dice=st.integers(0, 4))
    def restart(self, dice: int) -> None:
        """The process is killed: what was acknowledged durable is there, nothing else."""
        if dice:
            return
        self.step(1)
        released = set(self.durable) - set(self.texts)
        named = {name for name in self.disk.named if name in self.texts}
        assert self.durable - released <= named, "a durable capsule is lost"
        self.texts = {name: self.texts[name] for name in named}
        self.durable &= named
        self.open, self.demoted = {}, {}
        self.start()

    @rule(tokens=TOKENS, ttl_s=st.sampled_from([0.0, 0.0, 3.0]), gateway=GATEWAYS)
    def prefill(self, tokens: list[int], ttl_s: float, gateway: str) -> None:
        name = f"{self.num_requests + 1}"
        if not ttl_s:
            self.lasting.add(f"r{name}.0")
        name = self.name(gateway)
        self.plans[name, 0] = Plan(tokens, Sampling())
        self.texts[f"{name}.0"] = tokens
        self.engine.submit(Prefill(name, pack_tokens(tokens), ttl_s=ttl_s), gateway)

    def take_all(self, result: StepResult) -> None:
        self.replay(result)
        for frame in result.frames.values():
            for reply in frame.replies:
                if self.asked.pop(reply.request, None) is None:  # else an inject's
                    self.answered(reply)
        super().take_all(result)

    def replay(self, result: StepResult) -> None:
        for event in result.events.events if result.events is not None else ():
            if isinstance(event, Stored | Removed) and event.group:
                continue  # of windows: not told of the tiers below
            match event:
                case Stored():
                    new = set(unpack_hashes(event.hashes).tolist())
                    assert not new & self.held[event.tier], "stored twice"
                    self.held[event.tier] |= new
                case Removed():
                    gone = set(unpack_hashes(event.hashes).tolist())
                    assert gone <= self.held[event.tier], "removed, and was not there"
                    self.held[event.tier] -= gone

    def answered(self, reply: CapsuleReply) -> None:
        capsule, tier = self.demoted.pop(reply.request)
        self.open.pop(reply.request, None)
        if reply.status is None:
            return
        assert reply.status.capsule == capsule
        if capsule in self.texts:
            assert reply.status.boundary == len(self.texts[capsule])
        if tier == DISK and capsule in self.lasting and reply.status.tier == "disk":
            self.durable.add(capsule)

    def teardown(self) -> None:
        """Events tell what is in each tier; released, nothing is held anywhere."""
        self.forward.fails = None
        for _ in range(2000):
            self.movers[0].advance(100)
            if not self.engine.has_work:
                break
            self.step(1)
        snapshot = self.engine.snapshot()
        for tier, raw in enumerate(snapshot.by_tier):
            assert set(unpack_hashes(raw).tolist()) == self.held[tier], f"tier {tier}"
        super().teardown()
        while self.engine.has_work or self.movers[0].num_under_way:  # steps evict ahead of need
            self.movers[0].advance(100)
            self.replay(self.engine.step())
        stats = self.engine.stats()
        if stats.capsules.kept == stats.capsules.replaceable == 0:
            assert stats.tiers is not None
            assert stats.tiers.host_held == 0
            assert not self.disk.named


class TieredStateMachine(TieredMachine):
    """The same with a layer that folds all tokens into a state, of which there may be few or many."""

    patched: Any = None

    def make_forward(self) -> Forward:
        return FoldForward(num_blocks=self.num_blocks)

    def rerun(self, plan: Plan, n: int, seed: int) -> list[int]:
        if plan.grammar is None:
            return fold_tokens(plan.text, n, sampling=plan.sampling, seed=seed)
        return self.run_alone(plan, n, seed)

    @initialize(
        policy=st.sampled_from(["fair", "fcfs"]),
        eviction=st.sampled_from(["lru", "lineage"]),
        max_step_tokens=st.sampled_from([6, 16, 64]),
        host_blocks=st.sampled_from([0, 12, 40]),
        num_states=st.sampled_from([5, 16, 64]),
    )
    def begin(
        self, eviction: Any, host_blocks: int = 40, num_states: int = 16, **scheduling: Any
    ) -> None:
        self.patched = patch.multiple(model, MIN_STATES=num_states, FEWEST_STATES=num_states)
        self.patched.start()
        self.forward = Fallible(self.make_forward())
        self.disk.max_blocks = 80
        super().begin(eviction, host_blocks, **scheduling)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if self.patched is not None:
                self.patched.stop()


class TieredHybridMachine(TieredStateMachine):
    """The same on a real, tiny model in float32, whose states take 38 rows each."""

    num_blocks = 61
    rerun = TorchMachine.rerun  # type: ignore[assignment]

    def make_forward(self) -> Forward:
        return HYBRID_MODEL.forward(num_blocks=self.num_blocks, block_size=4)

    @initialize(
        policy=st.sampled_from(["fair", "fcfs"]),
        max_step_tokens=st.sampled_from([6, 16]),
        host_blocks=st.sampled_from([0, 100, 1000]),
        num_states=st.sampled_from([5, 16]),
    )
    def begin(self, host_blocks: int = 1000, num_states: int = 16, **scheduling: Any) -> None:
        super().begin("lru", host_blocks, num_states, **scheduling)
        self.disk.max_blocks = 2000


class TieredTorchMachine(TieredMachine):
    """The same on a real, tiny model in float32."""

    num_blocks = 61
    make_forward = TorchMachine.make_forward
    rerun = TorchMachine.rerun


class TieredWindowMachine(TieredTorchMachine):
    """The same with layers that read a window, whose pool is small."""

    def make_forward(self) -> Forward:
        return WINDOW_MODEL.forward(num_blocks=self.num_blocks, block_size=4)

    def make_linear(self) -> Forward:
        """In one group of layers that keeps all its KV."""
        split = WINDOW_MODEL.forward(num_blocks=1)
        config, weights = split.decoder.config, split.decoder.weights
        spec = msgspec.structs.replace(split.spec, groups=())
        return TorchForward(config, weights, spec, num_blocks=self.num_blocks, block_size=4)

    @initialize(
        policy=st.sampled_from(["fair", "fcfs"]),
        max_step_tokens=st.sampled_from([6, 16]),
        host_blocks=st.sampled_from([0, 16, 60, 200]),
    )
    def begin(self, host_blocks: int = 60, **scheduling: Any) -> None:
        super().begin("lru", host_blocks, **scheduling)
        self.disk.max_blocks = 120
