"""Passes that are launched before the tokens of the step are here."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import pytest

from bench.doubles.forward import MockForward, linear_tokens
from bench.doubles.random_model import random_model
from mallee.mocker.passes import mock_spec
from mallee.protocol import model
from mallee.protocol.errors import DeviceMemoryExhausted
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import Cancel, Fork, Generate, Limits, Prefill, Sampling, pack_tokens
from mallee.worker.ahead import REST_STEPS, AheadStats
from mallee.worker.engine import Engine
from mallee.worker.forward import ForwardBatch, Logits
from mallee.worker.gaps import WorkGaps
from mallee.worker.kv.watch import KVChecks
from mallee.worker.model.graphs.decode import GraphOptions
from mallee.worker.records import EngineConfig
from mallee.worker.sched.plan import Plan
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig
from support import flashinfer_emulator
from support.driving import drive, engine_over
from support.fake_device import Call, FakeDevice
from support.fold_forward import FoldForward, fold_tokens
from support.recorded_graphs import RecordedGraphs
from support.tiers import LateMover, make_tiers

SPEC = mock_spec(vocab_size=64)
HOT = Sampling(temperature=1.0, seed=3)


def mock(num_blocks: int = 64) -> MockForward:
    return MockForward(SPEC, num_blocks=num_blocks, block_size=4)


def make_engine(forward: Any, device: Any = None, **switches: Any) -> Engine:
    return engine_over(forward, device=device, config=EngineConfig(**switches))


def over(device: Any, **switches: Any) -> Engine:
    """An engine that launches ahead."""
    return make_engine(device, device, **switches)


def generate(name: str, prompt: Sequence[int], n: int, **more: Any) -> Generate:
    sampling = more.pop("sampling", HOT)
    return Generate(name, pack_tokens(list(prompt)), Limits(n, **more), sampling)


def expect(prompt: Sequence[int], n: int, branch: int = 0) -> list[int]:
    seed = branch_seed(HOT.seed, branch)
    return linear_tokens(SPEC, prompt, n, sampling=HOT, seed=seed)


def step(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """The tokens of one step."""
    found: dict[tuple[str, int], list[int]] = {}
    for frame in engine.step().frames.values():
        for update in frame.updates:
            found.setdefault((update.request, update.branch), []).extend(update.tokens)
    engine.check()
    return found


def answers(engine: Engine) -> dict[tuple[str, int], list[int]]:
    return {key: tokens for key, (tokens, _) in drive(engine).items()}


# When passes are launched


def test_the_next_pass_is_launched_before_a_token_is_here() -> None:
    """I18, part: from the end of the prompt to the last token, and the host waits for draws alone."""
    calls: list[tuple[Call, int]] = []
    device = FakeDevice(mock(), told=lambda call, n: calls.append((call, n)))
    engine = over(device)
    engine.submit(generate("r", [5, 6, 7], 6), "g")
    assert answers(engine)["r", 0] == expect([5, 6, 7], 6)
    expected: list[tuple[Call, int]] = [("forward", 0)]
    for i in range(5):
        expected += [("draw", i), ("ahead", i), ("collect", i)]
    assert calls == [*expected, ("draw", 5), ("collect", 5)]
    assert engine.stats().ahead == AheadStats(num_rows=5, num_void=0)


@pytest.mark.parametrize("num_slots", [64, 12])
def test_a_state_is_written_ahead_beside_the_one_of_the_pass_under_way(
    monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    """I18, part: for each token but the first, also where most slots are cache; no answer changes."""
    monkeypatch.setattr(model, "MIN_STATES", num_slots)
    device = FakeDevice(FoldForward(num_blocks=200, vocab_size=64))
    engine = over(device, max_answer_capsules=0)
    for i in range(12):
        engine.submit(generate(f"s{i}", [i] * 9, 1), "g")
    answers(engine)
    assert num_slots > 12 or engine._tree.sides[0].pool.num_free < 3 * 3
    prompts = [[5, 6, 7, i] for i in range(3)]
    for i, prompt in enumerate(prompts):
        engine.submit(generate(f"r{i}", prompt, 150), "g")
    found = answers(engine)
    for i, prompt in enumerate(prompts):
        seed = branch_seed(HOT.seed, 0)
        assert found[f"r{i}", 0] == fold_tokens(prompt, 150, sampling=HOT, seed=seed, vocab_size=64)
    assert engine.stats().ahead == AheadStats(num_rows=3 * 149, num_void=0)


def test_the_pass_after_a_forks_first_tokens_is_launched_before_they_are_here() -> None:
    """I18, part: with a copy of the capsule's partial block for each, in blocks that they get afterwards.

    A second fork draws beside them: its first decodes are launched beside theirs.
    """
    calls: list[tuple[Call, int]] = []
    inner = mock(200)
    device = FakeDevice(inner, told=lambda call, n: calls.append((call, n)))
    engine = over(device)
    for name, length in (("p", 6), ("q", 8)):
        engine.submit(Prefill(name, pack_tokens(list(range(length)))), "g")
    answers(engine)
    calls.clear()
    for i, name in enumerate("pq"):
        engine.submit(Fork(f"f{i}", f"{name}.0", (b"",) * 3, Limits(9), HOT), "g")
        step(engine)
        step(engine)
    found = answers(engine)
    assert found["f0", 2][-1:] == expect(range(6), 9, 2)[-1:]
    assert found["f1", 1] == expect(range(8), 9, 1)[2:]
    assert [number for call, number in calls if call == "forward"] == [], "all were launched ahead"
    assert engine.stats().ahead.num_void == 0
    assert inner.num_tokens == 6 + 4 + 2 * 3 * 8  # the second prompt finds a block of the first
    assert engine.stats().tree.num_copies == 3


def test_a_row_whose_block_a_later_pass_wrote_is_not_used() -> None:
    """I18, part: a fork takes a decode's launched block, and is cancelled: the decode has it again."""
    engine = over(FakeDevice(mock()))
    engine.submit(Prefill("p", pack_tokens([1, 2, 3, 4, 5, 6])), "g")
    answers(engine)
    engine.submit(generate("r", [9, 9], 20), "g")
    for _ in range(3):  # the next pass, launched, has the first token of a block
        step(engine)
    assert engine.stats().ahead == AheadStats(3, 0)
    engine.submit(Fork("f", "p.0", (b"",), Limits(9), HOT), "g")
    step(engine)
    assert engine.stats().ahead == AheadStats(4, 1)
    engine.submit(Cancel("f"), "g")
    assert answers(engine)["r", 0] == expect([9, 9], 20)[3:]


@pytest.mark.parametrize(
    "asked",  # tokens of the prompt, of the answer, branches
    [
        [(1, 5, 1), (1, 23, 1), (10, 4, 1), (10, 16, 2), (2, 7, 3), (7, 8, 3)],
        [(7, 4, 2), (11, 8, 3), (12, 6, 3), (10, 8, 1), (9, 11, 2)],
        [(13, 9, 3), (13, 12, 3), (11, 6, 1), (9, 12, 3)],
    ],
)
def test_a_fork_that_waits_for_its_first_block_is_left_out(asked: list[tuple[int, ...]]) -> None:
    """Blocks that it needs are leaving for host memory, and the next step only draws for others."""
    movers: list[LateMover] = []
    device = FakeDevice(mock(20))
    scheduler = SchedulerConfig(max_step_tokens=64, max_rows=6)
    config = EngineConfig(scheduler, max_answer_capsules=8)
    below = make_tiers(8, movers=movers)
    engine = engine_over(device, device=device, config=config, below=below)
    for i, (length, n, branches) in enumerate(asked):
        limits = Limits(n, ignore_eos=True)
        engine.submit(Generate(f"r{i}", pack_tokens([3] * length), limits, HOT, branches), "g")
    found: dict[tuple[str, int], list[int]] = {}
    while engine.has_work or movers[0].num_under_way:
        movers[0].advance(100)
        for key, tokens in step(engine).items():
            found.setdefault(key, []).extend(tokens)
    for i, (length, n, branches) in enumerate(asked):
        for branch in range(branches):
            assert found[f"r{i}", branch] == expect([3] * length, n, branch)


def test_a_prompts_first_decode_is_launched_beside_those_that_run() -> None:
    """I18, part: of steps with prompts, those that end all of them."""
    engine = over(FakeDevice(mock(200)), scheduler=SchedulerConfig(max_step_tokens=8))
    engine.submit(generate("a", [9], 20), "g")
    for _ in range(3):
        step(engine)
    before = engine.stats().ahead.num_rows
    engine.submit(generate("b", list(range(12)), 20), "g")
    step(engine)
    assert engine.stats().ahead.num_rows == before, "the next step has more of the prompt"
    step(engine)
    assert engine.stats().ahead == AheadStats(before + 2, 0)
    found = answers(engine)
    assert found["b", 0] == expect(range(12), 20)[1:]
    assert engine.stats().ahead.num_void == 0


class _Stream:
    """`Marks` of a device's work in virtual time. A pass takes `busy` seconds, a draw none."""

    def __init__(self, busy: float) -> None:
        self.now = self.free_at = 0.0
        self._busy = busy
        self._ends: dict[int, float] = {}

    def told(self, call: Call, number: int) -> None:
        if call in ("forward", "ahead"):
            self.free_at = self.mark() + self._busy
        elif call == "draw":
            self._ends[number] = self.free_at  # before the pass that is launched behind it
        elif call == "collect":
            self.now = max(self.now, self._ends[number])

    def mark(self) -> float:
        return max(self.now, self.free_at)

    def seconds(self, first: float, second: float) -> float | None:
        return second - first if second <= self.now else None


def test_host_and_device_work_at_once() -> None:
    """I18, part: n steps of a host and a device that need so long take n times the longer of both.

    The statistics tell the time that the device waits: all of the host's without passes ahead.
    """

    def run(host: float, busy: float, num_steps: int, *, is_ahead: bool) -> tuple[float, float]:
        """The seconds of so many steps, and those in which the device waited."""
        stream = _Stream(busy)
        gaps = WorkGaps(stream)
        device = FakeDevice(mock(400), told=stream.told, gaps=gaps)
        if not is_ahead:
            device = _Waiting(device)
        engine = engine_over(device, device=device, gaps=gaps)
        for i in range(4):
            engine.submit(generate(f"r{i}", [i, 9], num_steps + 20), "g")
        for _ in range(3):
            engine.step()
        began, waited = stream.now, engine.stats().host_gap.seconds
        for _ in range(num_steps):
            stream.now += host
            engine.step()
        return stream.now - began, engine.stats().host_gap.seconds - waited

    for host, busy in ((1.0, 5.0), (5.0, 1.0), (3.0, 3.0)):
        together, waited = run(host, busy, 40, is_ahead=True)
        in_turn, waited_in_turn = run(host, busy, 40, is_ahead=False)
        assert 40 * max(host, busy) <= together <= 40 * max(host, busy) + host + busy
        assert in_turn == pytest.approx(40 * (host + busy))
        assert waited == pytest.approx(40 * max(0.0, host - busy), abs=host + busy)
        assert waited_in_turn == pytest.approx(40 * host)


def test_time_without_work_is_no_gap() -> None:
    stream = _Stream(1.0)
    gaps = WorkGaps(stream)
    device = FakeDevice(mock(), told=stream.told, gaps=gaps)
    engine = engine_over(device, device=device, gaps=gaps)
    for i in range(3):
        engine.submit(generate(f"r{i}", [5, 6], 4), "g")
        while engine.has_work:
            engine.step()
        stream.now += 1000.0
    found = engine.stats().host_gap
    assert found.seconds == 0.0
    assert found.num_pieces > 3 * 4


class _Waiting(FakeDevice):
    """A device that is waited for before anything else is launched."""

    def __init__(self, device: FakeDevice) -> None:
        self.__dict__ = device.__dict__

    def forward_drawn(self, *given: Any) -> Any:
        raise DeviceMemoryExhausted("nothing is launched ahead")


@pytest.mark.parametrize(
    ("switches", "sampling"),
    [
        ({"overlap": False}, HOT),
        ({"kv_checks": KVChecks("digests")}, HOT),
        ({"kv_checks": KVChecks("guards")}, HOT),
        ({"speculation": SpeculationConfig("auto")}, HOT),
    ],
)
def test_nothing_is_launched_ahead_that_would_be_seen(switches: Any, sampling: Sampling) -> None:
    device = _Plain(mock())
    engine = over(device, **switches)
    engine.submit(generate("r", [5, 6], 9, sampling=sampling), "g")
    assert answers(engine)["r", 0] == expect([5, 6], 9)
    assert engine.stats().ahead == AheadStats(0, 0)


class _Plain(FakeDevice):
    """It draws at once as well."""

    def sample(self, draws: Any) -> list[int]:
        return self.launch_draws(draws).collect()


def test_log_probabilities_are_there_without_a_wait_for_the_pass_ahead() -> None:
    """I18, part: they are enqueued with the draws, before it, and are those of the tokens."""
    wanted = Sampling(temperature=1.0, seed=3, logprobs=2)
    found: list[list[Any]] = []
    for device in (None, FakeDevice(mock())):
        engine = make_engine(mock()) if device is None else over(device)
        engine.submit(generate("r", [5, 6], 9, sampling=wanted), "g")
        found.append([])
        while engine.has_work:
            for frame in engine.step().frames.values():
                found[-1] += [report for update in frame.updates for report in update.logprobs]
        assert engine.stats().ahead.num_rows == (0 if device is None else 8)
    assert len(found[0]) == 9
    assert found[0] == found[1]


# What becomes of them


def test_the_pass_of_a_step_outlives_one_that_only_draws() -> None:
    """D19, part: a fork arrives while others decode; its branches draw, and nothing is computed twice."""
    inner = mock()
    engine = over(FakeDevice(inner))
    engine.submit(Prefill("p", pack_tokens([1, 2, 3, 4, 5])), "g")
    answers(engine)
    engine.submit(generate("r", [9], 20), "g")
    for _ in range(5):
        step(engine)
    engine.submit(Fork("f", "p.0", (b"",) * 3, Limits(6), HOT), "g")
    found = answers(engine)
    for i in range(3):
        assert found["f", i] == expect([1, 2, 3, 4, 5], 6, i)
    assert found["r", 0] == expect([9], 20)[5:]
    assert engine.stats().ahead.num_void == 0
    assert inner.num_tokens == 5 + 1 + 19 + 3 * 5


def test_a_pass_outlives_no_step_that_gives_its_blocks_to_a_transfer() -> None:
    """I18, part: while decodes wait for blocks that leave, a fetch may get the block of a row ahead."""
    branch: Any = object()
    assert Plan([], [], [branch], [], []).draws_only
    assert not Plan([], [], [branch], [], [], begins=True).draws_only


def test_a_pass_ahead_without_memory_ends_no_branch() -> None:
    """I26, part: and it is not tried again for a while."""
    device = _Tight(mock(200))
    engine = over(device)
    engine.submit(generate("r", [4, 4], REST_STEPS + 40), "g")
    found = drive(engine)["r", 0]
    assert found[0] == expect([4, 4], REST_STEPS + 40)
    assert found[1].error is None
    assert device.num_refused == 1
    assert engine.stats().ahead.num_rows == 40 - 2


def test_logits_that_nobody_wants_are_gone_before_the_next_are_made() -> None:
    """I5, part, I26, part: a pass of branches that ended takes no memory beside that of the next one."""
    engine = over(_Frugal(mock(), eagerness=1.0))
    for i in range(6):
        tokens = expect([4, i], 9)
        last = next(at for at in range(3, 9) if tokens[at] not in tokens[:at])
        engine.submit(generate(f"r{i}", [4, i], 12, stop_token_ids=(tokens[last],)), "g")
        assert drive(engine)[f"r{i}", 0][0] == tokens[:last]
    assert engine.stats().ahead.num_void == 5  # one for each request that came later


class _Frugal(FakeDevice):
    """Has no memory for a pass beside one that was launched ahead."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._kept: WeakSet[Any] = WeakSet()

    def forward_drawn(self, *given: Any) -> Sequence[Logits]:
        logits = super().forward_drawn(*given)
        self._kept.update(logits)
        return logits

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        assert not self._kept
        return super().forward(batch)


class _Tight(FakeDevice):
    """Its memory is too small once."""

    num_refused = 0

    def forward_drawn(self, *given: Any) -> Sequence[Logits]:
        if not self.num_refused:
            self.num_refused += 1
            raise DeviceMemoryExhausted("Tried to allocate")
        return super().forward_drawn(*given)


# Models


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_a_model_draws_the_same_tokens_with_passes_ahead(
    family: str, one_thread: Any, small_window_pools: Any
) -> None:
    """I18, part, I5, part: in torch, launched as on a GPU; with windows, and with states."""
    model = random_model(family, 5)
    found = []
    for is_ahead in (True, False):
        forward = model.forward(num_blocks=200, block_size=4)
        scheduler = SchedulerConfig(max_step_tokens=16)
        engine = make_engine(forward, forward if is_ahead else None, scheduler=scheduler)
        for i in range(4):
            prompt = [7 * i + k for k in range(5 + 3 * i)]
            sampling = Sampling(
                temperature=0.0 if i == 0 else 1.0, seed=i, top_p=0.9, logprobs=i - 1
            )
            engine.submit(generate(f"r{i}", prompt, 40, sampling=sampling, ignore_eos=True), "g")
        found.append(answers(engine))
        stats = engine.stats().ahead
        assert stats.num_void == 0
        assert (stats.num_rows > 100) == is_ahead
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_recorded_steps_are_launched_ahead(family: str, one_thread: Any) -> None:
    """I18, part: graphs replayed over tokens that only the device knows, forks among them."""
    model = random_model(family, head_dim=64)
    found = []
    for is_ahead in (True, False):
        forward = model.forward(
            dtype="bfloat16",
            num_blocks=100,
            graphs=GraphOptions(16, 1 << 30, RecordedGraphs()),
            flashinfer=flashinfer_emulator,
        )
        engine = make_engine(forward, forward if is_ahead else None)
        engine.submit(Prefill("p", pack_tokens(list(range(9)))), "g")
        answers(engine)
        engine.submit(Fork("f", "p.0", (b"",) * 3, Limits(30, ignore_eos=True), HOT), "g")
        found.append(answers(engine))
        graphs_used = forward.graph_stats()
        assert graphs_used.num_replays >= 28
        assert engine.stats().ahead.num_void == 0
        assert (engine.stats().ahead.num_rows >= 3 * 27) == is_ahead
    assert found[0] == found[1]


def test_a_worker_launches_ahead_where_its_device_computes_beside_it() -> None:
    forward = random_model().forward()
    assert not forward.is_beside_host
    forward._device = "cuda:0"
    assert forward.is_beside_host
