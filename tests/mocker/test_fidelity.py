"""A profile of one engine predicts it on another workload: the whole way, on a clock of its own."""

import random
from collections.abc import Sequence

from bench.mocker import fidelity_engine as fidelity
from mallee.mocker.measure import Profiler, Sweep
from mallee.mocker.passes import mock_spec
from mallee.mocker.timing.files import TimingFile
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.testing.forward import MockForward
from mallee.worker.engine import Engine
from mallee.worker.forward import Draw, ForwardBatch, Logits
from mallee.worker.records import EngineConfig

BLOCK_SIZE = 16


class Machine:
    """A clock that passes moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class HiddenForward(MockForward):
    """Takes time by a law that nobody is told: shared blocks read once, some noise. Computes nothing."""

    def __init__(self, machine: Machine, num_blocks: int, noise: float = 0.05) -> None:
        spec = mock_spec(vocab_size=4096, max_model_len=2048)
        super().__init__(spec, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self._machine = machine
        self._noise = noise
        self._drawn = random.Random(3)

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        num_new = sum(len(row.tokens) for row in batch.rows)
        read: set[int] = set()
        pairs = 0.0
        for row in batch.rows:
            end = row.start + len(row.tokens)
            read |= set(row.table[: -(-end // BLOCK_SIZE)].tolist())
            if len(row.tokens) > 1:
                pairs += len(row.tokens) * (row.start + len(row.tokens) / 2)
        seconds = 0.020 + 3e-4 * num_new**1.02 + 2e-6 * BLOCK_SIZE * len(read) + 1.5e-7 * pairs
        self._machine.now += seconds * self._drawn.lognormvariate(0.0, self._noise)
        return [0] * sum(row.num_logits for row in batch.rows)

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        return [7] * len(draws)


def profiled(machine: Machine, sweep: Sweep) -> TimingFile:
    forward = HiddenForward(machine, num_blocks=3072)
    fitting = sweep.fitted_to(forward.spec.max_model_len, forward.num_blocks, BLOCK_SIZE)
    return Profiler(forward, fitting, clock=machine).measure({"model": "hidden"})


def test_a_profile_predicts_another_workload() -> None:
    """K20: TTFT and ITL p50 within 10 %, p90 within 20 %, forks included."""
    machine = Machine()
    profile = profiled(machine, Sweep())
    forward = HiddenForward(machine, num_blocks=3072)
    shape = fidelity.Shape(seconds=120.0, rate=1.0)
    arrivals = fidelity.Workload(shape, forward.spec.vocab_size, 7).arrivals()
    config = EngineConfig()
    engine = Engine(
        forward, config=config, clock=machine, worker=WorkerId("w"), incarnation=Incarnation(1)
    )
    real = fidelity.play(engine, arrivals, machine, machine.wait)
    told = fidelity.foretell(profile.timing(), arrivals, forward, config)
    report = fidelity.compare(real, told)
    assert report["branches"] > 200
    assert fidelity.holds(report), report
    assert abs(report["seconds"]["off"]) < 0.05
    assert 0.02 < profile.jitter < 0.1
    assert profile.conditions["model"] == "hidden"
    assert profile.kv_bytes_per_token == mock_spec().kv_bytes_per_token
    timing = profile.timing()
    assert timing.shares_reads
    assert timing.step_s([], 16, 16 * 512) > timing.step_s([], 4, 4 * 512)
