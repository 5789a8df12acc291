"""Replays with vLLM's rules: step by step as a real vLLM planned, and what holds for any requests."""

import json
import lzma
import random
from pathlib import Path
from typing import Any

import pytest

from bench.doubles.workloads import agents, forks
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faults import parse_faults
from mallee.mocker.replay.run import replay
from mallee.mocker.texts import Texts
from mallee.mocker.timing import Fixed, Timing
from mallee.mocker.vllm import VllmEngine, VllmRequest
from mallee.protocol.errors import ConfigError
from mallee.protocol.events import Removed, Stored, unpack_hashes
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.protocol.messages import Cancel, Generate, Limits, Promote
from mallee.worker.sched.policy import SchedulerConfig
from support.vllm_steps import CASES, SIZE, requests

RECORDED = Path(__file__).parent / "recorded" / "vllm_steps.xz"


class Recorder(VllmEngine):
    """Notes who is preempted."""

    preempted: list[str]

    def _give_way(self, request: VllmRequest) -> None:
        self.preempted.append(request.name)
        super()._give_way(request)


def make_engine(
    blocks: int, rows: int, budget: int, watermark: float = 0.0
) -> tuple[Recorder, Texts]:
    texts = Texts(SIZE)
    engine = Recorder(
        timing=Timing(Fixed(0.5, 0.25)),
        texts=texts,
        num_blocks=blocks,
        worker=WorkerId("w"),
        incarnation=Incarnation(1),
        config=SchedulerConfig(max_step_tokens=budget, max_rows=rows, watermark=watermark),
    )
    engine.preempted = []
    return engine, texts


def generate(texts: Texts, request: dict[str, Any]) -> Generate:
    first = 1000 * request["text"]
    ids = range(first, first + request["shared"])
    raw = texts.prompt(ids, request["shared"] + request["own"], 1)
    return Generate(RequestId(request["name"]), raw, Limits(request["max_tokens"], (), True))


def run(case: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, int], Recorder]:
    """The steps and cached tokens of a case, as a recording has them; checked after each step."""
    engine, texts = make_engine(case["blocks"], case["rows"], case["budget"], case["watermark"])
    waiting, step, now = requests(case["seed"]), 0, 0.0
    steps: list[dict[str, Any]] = []
    cached: dict[str, int] = {}
    while waiting or engine.has_work:
        while waiting and waiting[0]["step"] <= step:
            engine.submit(generate(texts, waiting.pop(0)))
        step += 1
        if (end := engine.start(now)) is None:
            continue
        planned = [[request.name, num] for request, num in engine._planned]
        steps.append({"planned": planned, "preempted": engine.preempted[:]})
        engine.preempted.clear()
        for update in engine.finish().updates:
            cached[update.request] = update.cached_tokens
        engine.check()
        now = end
    return steps, cached, engine


@pytest.mark.parametrize("name", CASES)
def test_each_step_is_the_one_that_vllm_planned(name: str) -> None:
    """X22, part: tokens of each request, who is preempted and what is cached, of 70 requests."""
    recorded = json.loads(lzma.decompress(RECORDED.read_bytes()))[name]
    steps, cached, engine = run(recorded["case"])
    for number, (ours, theirs) in enumerate(zip(steps, recorded["steps"], strict=False)):
        assert ours == theirs, f"step {number}"
    assert len(steps) == len(recorded["steps"])
    assert cached == recorded["cached"]
    assert len(engine.pool.free) == recorded["case"]["blocks"]
    assert engine.num_preemptions == {"roomy": 0, "tight": 3, "thrashing": 21, "watermark": 1}[name]


def test_events_tell_what_is_cached() -> None:
    """Blocks of two copies are stored once, and removed with the last; a snapshot has the same."""
    engine, texts = make_engine(24, 12, 64)
    held: set[int] = set()
    now = 0.0
    for request in requests(5):
        engine.submit(generate(texts, request))
        for _ in range(request["step"] % 7 + 1):
            if (end := engine.start(now)) is None:
                break
            now = end
            batch = engine.finish().events
            for event in () if batch is None else batch.events:
                match event:
                    case Stored():
                        new = set(unpack_hashes(event.hashes).tolist())
                        assert not new & held
                        held |= new
                    case Removed():
                        gone = set(unpack_hashes(event.hashes).tolist())
                        assert gone <= held
                        held -= gone
            assert held == set(unpack_hashes(engine.snapshot().hashes).tolist())
    assert engine.num_evicted > 50


def test_a_text_that_never_fits_fails_and_a_cancelled_one_gives_its_blocks_back() -> None:
    engine, texts = make_engine(8, 4, 64)
    large = {"name": "large", "text": 0, "shared": 0, "own": 250, "max_tokens": 10}
    small = {"name": "small", "text": 0, "shared": 0, "own": 40, "max_tokens": 100}
    for request in (large, small):
        engine.submit(generate(texts, request))
    assert engine.start(0.0) == 0.5
    updates = engine.finish().updates
    assert [(u.request, u.finish) for u in updates] == [("large", "error"), ("small", None)]
    error = updates[0].error
    assert error is not None
    assert "9 KV blocks of 32 tokens" in error[1]
    engine.submit(Cancel("small"))
    assert engine.start(1.0) == 1.0
    ended = engine.finish().updates
    assert [(u.finish, u.num_tokens) for u in ended] == [("cancelled", 0)], "its first was reported"
    assert engine.start(2.0) is None
    assert len(engine.pool.free) == 8
    with pytest.raises(ConfigError, match="Promote"):
        engine.submit(Promote("p", "c"))


@pytest.mark.parametrize("kv_tokens", [65_536, 8_192])
def test_forks_and_conversations_replay_on_vllms_rules(kv_tokens: int) -> None:
    """X22, part: every branch answers in full; what is not cached any more is computed again."""
    for scene in (
        forks(4, 6, prefix_tokens=1024, gap_s=0.5),
        agents(8, 4, document_tokens=1024, turn_tokens=128, output_tokens=32),
    ):
        config = ReplayConfig(engines=2, kv_tokens=kv_tokens, rules="vllm")
        result = replay(scene, config)
        wanted = sum(request.branches * request.output_tokens for request in scene)
        assert int(result.columns.output_tokens.sum()) == wanted
        assert result.summary["hit_rate"] > 0.4
        assert replay(scene, config).summary["digest"] == result.summary["digest"]


def test_what_a_crash_takes_along_is_drawn_elsewhere() -> None:
    faults = parse_faults('[{"kind": "crash", "at_s": 0.1, "worker": "w0"}]')
    scene = forks(6, 8, prefix_tokens=1024, gap_s=0.01)
    config = ReplayConfig(engines=2, kv_tokens=16_384, rules="vllm", faults=faults)
    result = replay(scene, config)
    wanted = sum(request.branches * request.output_tokens for request in scene)
    assert int(result.columns.output_tokens.sum()) == wanted
    assert result.summary["retries"] > 0
    assert not result.summary["errors"]


def test_what_vllms_rules_do_not_have_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="can_migrate=True with the rules of vLLM"):
        ReplayConfig(rules="vllm", can_migrate=True).validate()
    with pytest.raises(ConfigError, match="rules='sglang': give one of mallee, vllm"):
        ReplayConfig(rules="sglang").validate()


def test_random_requests_leave_no_block_behind() -> None:
    for seed in range(6):
        drawn = random.Random(seed)
        blocks = drawn.randint(20, 60)
        case = {"blocks": blocks, "rows": drawn.randint(1, 20), "budget": drawn.randint(1, 200)}
        steps, cached, engine = run({**case, "watermark": drawn.choice((0.0, 0.2)), "seed": seed})
        assert len(cached) == len(requests(seed))
        assert len(engine.pool.free) == blocks
        assert max(sum(num for _, num in step["planned"]) for step in steps) <= case["budget"]
