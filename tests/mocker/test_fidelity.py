"""A profile of one engine predicts it on another workload: the whole way, on a clock of its own."""

import random
from collections.abc import Sequence

import pytest

from bench.doubles.forward import MockForward
from bench.mocker import fidelity_engine as fidelity
from bench.mocker import fidelity_vllm as vllm
from mallee.mocker.measure import Profiler, Sweep
from mallee.mocker.passes import mock_spec
from mallee.mocker.timing.files import GridData, TimingFile
from mallee.mocker.timing.grid import Decodes, Prefills
from mallee.protocol.ids import Incarnation, WorkerId
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


def test_a_machine_of_another_speed_explains_an_error() -> None:
    """X22, part: a scene is equal to itself, and one of a faster machine once its probes are known."""
    prefill = Prefills((16, 512), (0, 448), ((0.03, 0.04), (0.5, 0.6)))
    decode = Decodes((1, 8), (32, 448), ((0.02, 0.021), (0.03, 0.036)))
    timing = TimingFile(request_s=0.01, model=GridData(prefill, decode))
    scenes = vllm.scenes(8.0, 1.0, is_quick=True)
    assert list(scenes) == ["0.7x, seed 1", "1.4x, seed 1", "3x, seed 1", "3x, long answers"]
    for requests in scenes.values():
        assert any(request.parent >= 0 for request in requests)
        faster = vllm.told_figures(vllm.told(requests, timing, 1.25))
        plain = vllm.compare(faster, vllm.told_figures(vllm.told(requests, timing)))
        assert not plain["holds"]
        assert plain["off"]["itl_p50"] > 0.2
        step_s = timing.timing().step_s
        probe = vllm.Probe((0.01 + step_s([(256, 0)], 0, 0)) / 1.25, step_s([], 1, 16) / 1.25)
        speed = vllm.speed_of([probe, probe], timing)
        assert speed == pytest.approx(1.25)
        known = vllm.compare(faster, vllm.told_figures(vllm.told(requests, timing, speed)))
        assert known["holds"]
        assert known["off"]["throughput"] == pytest.approx(0.0, abs=1e-6)
