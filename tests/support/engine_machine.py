"""A state machine of everything that can happen to an engine, in any order.

Every block is watched (canaries, guards, digests), and after every rule the whole engine is checked.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from bench.doubles.forward import MockForward, linear_tokens
from bench.doubles.random_model import random_model
from bench.doubles.structures import MockStructures
from bench.mocker.policies import make_order
from mallee.mocker.passes import mock_spec
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import (
    Cancel,
    Fork,
    Generate,
    Grammar,
    Inject,
    Limits,
    Prefill,
    Prioritize,
    Release,
    Sampling,
    Share,
    Update,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.forward import DeviceForward, Draw, Drawing, Forward, ForwardBatch, Logits, Row
from mallee.worker.kv.watch import KVChecks
from mallee.worker.records import EngineConfig, StepResult
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig
from support.driving import drive, engine_over

MODEL = random_model("llama", 3)
TOKENS = st.lists(st.integers(3, 5), min_size=1, max_size=14)
SUFFIXES = st.lists(st.lists(st.integers(3, 5), max_size=5), min_size=1, max_size=4)
SAMPLINGS = st.builds(
    Sampling, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, (1 << 64) - 1)
)
SHARES = st.builds(
    Share,
    session=st.sampled_from(["", "a", "b"]),
    weight=st.sampled_from([1.0, 3.0]),
    priority=st.integers(-2, 2).map(float),
)
GRAMMARS = st.sampled_from(
    [None, None, Grammar("choice", "[[3, 4, 5, 6], [3, 5], [4, 4, 4, 4, 4, 4]]")]
)
GATEWAYS = st.sampled_from(["g", "h"])
POINTS = ("before", "after", "sampling", "keeping", "collecting", "refolding", "refolded")


class PassFailed(Exception):
    """The forward pass failed, as planned by the test."""


class Fallible:
    """A `Forward` of which single passes can be made to fail, before or after they have written."""

    def __init__(self, inner: Forward) -> None:
        self._inner = inner
        self.fails: str | None = None
        self.error: Exception = PassFailed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        self.fail_at("before")
        logits = self._inner.forward(batch)
        self.fail_at("after")
        return logits

    def forward_drawn(self, *given: Any) -> Sequence[Logits]:
        self.fail_at("before")
        logits: Sequence[Logits] = self._inner.forward_drawn(*given)  # type: ignore[attr-defined]
        self.fail_at("after")
        return logits

    def refold(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        self.fail_at("refolding")
        self._inner.refold(rows, counts)
        self.fail_at("refolded")

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        self.fail_at("sampling")
        return self._inner.sample(draws)

    def launch_draws(self, draws: Sequence[Draw]) -> Drawing:
        self.fail_at("sampling")
        drawing: Drawing = self._inner.launch_draws(draws)  # type: ignore[attr-defined]
        return drawing

    def keep(self, logits: Logits) -> Logits:
        self.fail_at("keeping")
        return self._inner.keep(logits)

    def fail_at(self, point: str) -> None:
        if self.fails == point:
            self.fails = None
            raise self.error


def make_engine(forward: Any, clock: Any, config: EngineConfig, **more: Any) -> Engine:
    """An engine that may constrain answers."""
    structures = MockStructures(forward.spec.vocab_size, forward.spec.eos_token_ids)
    return engine_over(forward, clock=clock, config=config, structures=structures, **more)


class Plan(NamedTuple):
    """Prompt and options of a branch."""

    text: list[int]
    sampling: Sampling
    grammar: Grammar | None = None


class EngineMachine(RuleBasedStateMachine):
    """Requests come, fork, end, are cancelled, preempted, evicted, expire; gateways vanish."""

    num_blocks: ClassVar[int] = 41  # 21 of them are guards
    speculation: ClassVar[SpeculationConfig] = SpeculationConfig()
    checks: ClassVar[KVChecks] = KVChecks("guards", sweep_steps=8)
    is_ahead: ClassVar[bool] = False
    """Whether the forward is a device that passes are launched ahead on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.forward = Fallible(self.make_forward())
        self.num_requests = self.num_injects = 0
        self.texts: dict[str, list[int]] = {}  # what a capsule continues
        self.plans: dict[tuple[str, int], Plan] = {}
        self.open: dict[str, str] = {}  # request -> gateway, of those that may still answer
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.asked: dict[str, tuple[tuple[str, int], list[int]]] = {}  # injects
        self.injected: dict[tuple[str, int], list[range]] = {}  # parts of `tokens`

    @initialize(
        policy=st.sampled_from(["fair", "fair", "fcfs", "prefill_first", "decode_round_robin"]),
        eviction=st.sampled_from(["lru", "lineage"]),
        gang=st.booleans(),
        continuous=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.0, 0.1]),
        victims=st.sampled_from(["least_due", "youngest", "oldest_decode"]),
        ageing_steps=st.sampled_from([0, 5, 256]),
        max_step_tokens=st.sampled_from([6, 16, 64]),
        max_decodes=st.sampled_from([None, None, 2]),
        max_chunks=st.sampled_from([None, None, 1]),
    )
    def begin(self, eviction: Any, policy: str, victims: str, **scheduling: Any) -> None:
        order = make_order(policy, victims)
        scheduler = SchedulerConfig(max_rows=6, max_waiting=24, order=order, **scheduling)
        config = EngineConfig(
            scheduler,
            max_answer_capsules=8,
            eviction=eviction,
            kv_checks=self.checks,
            speculation=self.speculation,
        )
        self.engine = self.make_engine(config)
        self.begun()

    def make_engine(self, config: EngineConfig) -> Engine:
        return make_engine(self.forward, lambda: self.now, config, device=self.device)

    @property
    def device(self) -> DeviceForward | None:
        """The forward again, if passes are launched ahead there."""
        return cast(DeviceForward, self.forward) if self.is_ahead else None

    def begun(self) -> None:
        """There is an engine, to which nothing has happened."""

    def make_forward(self) -> Forward:
        spec = mock_spec(vocab_size=8)
        return MockForward(spec, num_blocks=self.num_blocks, block_size=4)

    def make_linear(self) -> Forward:
        """The same, for reruns."""
        return self.make_forward()

    def rerun(self, plan: Plan, n: int, seed: int) -> list[int]:
        """The n tokens that one undisturbed sequence draws."""
        if plan.grammar is None:
            sampling, spec = plan.sampling, self.forward.spec
            return linear_tokens(spec, plan.text, n, sampling=sampling, seed=seed)
        return self.run_alone(plan, n, seed)

    def rerun_around(
        self, plan: Plan, tokens: list[int], injected: list[range], seed: int
    ) -> list[int]:
        """`tokens`, each run between `injected` parts drawn again by a sequence that had those before."""
        found: list[int] = []
        for part in (*injected, range(len(tokens), len(tokens))):
            if part.start > len(found):
                before = plan._replace(text=plan.text + tokens[: len(found)])
                found += self.rerun(before, part.start - len(found), seed)
            found += tokens[part.start : part.stop]
        return found

    def run_alone(self, plan: Plan, n: int, seed: int) -> list[int]:
        """The same by an engine that has nothing else to do."""
        engine = make_engine(self.make_linear(), lambda: 0.0, EngineConfig())
        alone = Sampling(plan.sampling.temperature, seed=seed)
        limits = Limits(n, ignore_eos=True)
        command = Generate("r", pack_tokens(plan.text), limits, alone, grammar=plan.grammar)
        engine.submit(command, "g")
        return drive(engine)["r", 0][0]

    def name(self, gateway: str) -> str:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        self.open[name] = gateway
        return name

    # What clients do

    @rule(
        tokens=TOKENS,
        n=st.integers(1, 3),
        limit=st.integers(1, 24),
        sampling=SAMPLINGS,
        share=SHARES,
        grammar=GRAMMARS,
        gateway=GATEWAYS,
    )
    def generate(
        self,
        tokens: list[int],
        n: int,
        limit: int,
        sampling: Sampling,
        share: Share,
        grammar: Grammar | None,
        gateway: str,
    ) -> None:
        name = self.name(gateway)
        self.plans |= {(name, i): Plan(tokens, sampling, grammar) for i in range(n)}
        limits = Limits(limit, ignore_eos=True)
        command = Generate(
            name, pack_tokens(tokens), limits, sampling, n, share=share, grammar=grammar
        )
        self.engine.submit(command, gateway)

    @rule(tokens=TOKENS, ttl_s=st.sampled_from([0.0, 3.0]), gateway=GATEWAYS)
    def prefill(self, tokens: list[int], ttl_s: float, gateway: str) -> None:
        name = self.name(gateway)
        self.plans[name, 0] = Plan(tokens, Sampling())
        self.texts[f"{name}.0"] = tokens  # may be forked while it is computed
        self.engine.submit(Prefill(name, pack_tokens(tokens), ttl_s=ttl_s), gateway)

    @precondition(lambda self: self.texts)
    @rule(
        data=st.data(),
        suffixes=SUFFIXES,
        limit=st.integers(1, 16),
        sampling=SAMPLINGS,
        share=SHARES,
        gateway=GATEWAYS,
    )
    def fork(
        self,
        data: st.DataObject,
        suffixes: list[list[int]],
        limit: int,
        sampling: Sampling,
        share: Share,
        gateway: str,
    ) -> None:
        capsule = data.draw(st.sampled_from(sorted(self.texts)))
        text = self.texts[capsule]
        at = data.draw(st.one_of(st.none(), st.integers(1, len(text))))
        name = self.name(gateway)
        for i, suffix in enumerate(suffixes):
            self.plans[name, i] = Plan(text[:at] + suffix, sampling)
        raw = tuple(pack_tokens(s) if s else b"" for s in suffixes)
        limits = Limits(limit, ignore_eos=True)
        self.engine.submit(Fork(name, capsule, raw, limits, sampling, share=share, at=at), gateway)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), branch=st.sampled_from([None, 0, 1]))
    def cancel(self, data: st.DataObject, branch: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.engine.submit(Cancel(name, branch), self.open[name])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), priority=st.integers(-3, 3), branch=st.sampled_from([None, 0]))
    def prioritize(self, data: st.DataObject, priority: int, branch: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.engine.submit(Prioritize(name, float(priority), branch), self.open[name])

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        branch=st.sampled_from([0, 0, 1]),
        tokens=st.lists(st.integers(3, 5), min_size=1, max_size=6),
        replaces=st.booleans(),
    )
    def inject(self, data: st.DataObject, branch: int, tokens: list[int], replaces: bool) -> None:
        """F22: tokens come into a branch, which may be anywhere on its way."""
        of = data.draw(st.sampled_from(sorted(self.open)))
        self.num_injects += 1
        name = f"i{self.num_injects}"
        self.asked[name] = (of, branch), tokens
        command = Inject(name, of, branch, pack_tokens(tokens), replaces)
        assert self.engine.submit(command, self.open[of]) is None

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        capsule = data.draw(st.sampled_from(sorted(self.texts)))
        del self.texts[capsule]
        self.engine.submit(Release(capsule), "g")

    @rule(gateway=GATEWAYS, dice=st.integers(0, 5))
    def disconnect(self, gateway: str, dice: int) -> None:
        if dice:
            return  # seldom: it ends half of all there is
        self.engine.drop_gateway(gateway)
        self.open = {name: other for name, other in self.open.items() if other != gateway}

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # What the engine does

    @rule(n=st.integers(1, 6))
    def step(self, n: int) -> None:
        for _ in range(n):
            if not self.engine.has_work:
                return
            try:
                result = self.engine.step()
            except PassFailed:
                self.engine.check()
                continue
            self.take_all(result)

    def take_all(self, result: StepResult) -> None:
        """Take what a step had to tell."""
        for frame in result.frames.values():
            for update in frame.updates:
                self.take(update)

    @rule(point=st.sampled_from(POINTS))
    def fail_soon(self, point: str) -> None:
        """One of the next passes raises (I18): nothing of its step is drawn, committed or told."""
        self.forward.fails = point

    def take(self, update: Update) -> None:
        key = (update.request, update.branch)
        found = self.tokens.setdefault(key, [])
        if update.injected:
            assert self.asked.pop(update.injected) == (key, [*update.tokens])
            assert update.position == len(found)
            part = range(len(found), len(found) + len(update.tokens))
            self.injected.setdefault(key, []).append(part)
        found += update.tokens
        if update.capsule is not None:
            text = self.plans[key].text + found
            assert update.boundary == len(text)
            self.texts[update.capsule] = text

    @invariant()
    def all_is_well(self) -> None:
        """D30: books, canaries, guards and digests."""
        self.engine.check()

    def teardown(self) -> None:
        """D19, D29, I26: every branch drew what a rerun draws; released, everything is free again."""
        self.forward.fails = None
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert self.engine.stats().jobs == 0, "a request never ended"
        for (name, branch), tokens in self.tokens.items():
            if tokens:
                plan = self.plans[name, branch]
                seed = branch_seed(plan.sampling.seed, branch)
                drawn = self.rerun_around(plan, tokens, self.injected.get((name, branch), []), seed)
                assert tokens == drawn, (name, branch)
        for capsule in list(self.texts):
            self.engine.submit(Release(capsule), "g")
        self.engine.check()
        stats = self.engine.stats()
        if stats.capsules.kept == stats.capsules.replaceable == 0:
            assert stats.pool.free + stats.tree.cached_blocks == stats.pool.total
        assert stats.watch is None or stats.watch.num_faults == 0


class TorchMachine(EngineMachine):
    """The same on a real, tiny model in float32."""

    num_blocks = 61

    def make_forward(self) -> Forward:
        return MODEL.forward(num_blocks=self.num_blocks, block_size=4)

    def rerun(self, plan: Plan, n: int, seed: int) -> list[int]:
        return self.run_alone(plan, n, seed)


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]
