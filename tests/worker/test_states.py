"""Models with recurrent layers: a toy whose state is a fold of all tokens, and is looked at in each pass."""

from collections.abc import Callable
from typing import Any

import pytest

from mallee.protocol import model
from mallee.protocol.errors import ConfigError
from mallee.protocol.events import Removed, Stored, unpack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import Demote, Fork, Promote, Release, Rewind
from mallee.worker.kv.sides.states import StateGroup
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.transfer.values import DISK, HOST
from support.driving import engine_over
from support.fold_forward import FoldForward, fold_tokens
from support.tier_commands import NUM, SAMPLED, flood, fork, generate, prefill, text
from support.tiers import DictDisk, make_tiers

VOCAB = 64
MakeBench = Callable[..., Any]


@pytest.fixture
def make(make_bench: Callable[..., Any]) -> MakeBench:
    """Engines over blocks of 4 tokens, in steps of at most 64 tokens."""

    def made(num_blocks: int = 64, **more: Any) -> Any:
        forward = FoldForward(num_blocks=num_blocks, vocab_size=VOCAB)
        return make_bench(forward=forward, **{"max_step_tokens": 64, "max_rows": 8, **more})

    return made


def states(bench: Any) -> StateGroup:
    (side,) = bench.engine._tree.sides
    assert isinstance(side, StateGroup)
    return side


def tokens_of(bench: Any, *commands: Any) -> list[int]:
    """The first branch's tokens of the last of `commands`."""
    bench.run(*commands)
    return list(bench.answers[commands[-1].request, 0].tokens)


def want(prompt: list[int], branch: int = 0) -> list[int]:
    seed = branch_seed(SAMPLED.seed, branch)
    return fold_tokens(prompt, NUM, sampling=SAMPLED, seed=seed, vocab_size=VOCAB)


def num_computed(bench: Any) -> int:
    return int(bench.engine.stats().num_prefill_tokens)


@pytest.mark.parametrize("num_tokens", [7, 8, 61])
def test_a_fork_computes_nothing_of_the_text_and_copies_no_state(
    make: MakeBench, num_tokens: int
) -> None:
    """A fork that waits has no slot; one that runs has two beside the capsule's."""
    bench = make(max_answer_capsules=0)
    prompt = text(num_tokens)
    bench.run(prefill("p", prompt))
    assert states(bench).in_use == 1
    computed = num_computed(bench)
    bench.submit(fork("f", "p.0", n=20))
    most = 0
    while bench.engine.has_work:
        bench.step()
        most = max(most, states(bench).in_use)
    assert most <= 1 + 2 * 8  # rows of a step
    assert num_computed(bench) == computed
    for i in range(20):
        assert bench.answers["f", i].tokens == want(prompt, i)
    bench.run(Release("p.0"))
    assert states(bench).in_use == 0


@pytest.mark.parametrize("tier", [HOST, DISK])
@pytest.mark.parametrize("num_tokens", [3, 8, 61, 130])
def test_a_parked_capsule_comes_back_with_its_state(
    make: MakeBench, num_tokens: int, tier: int
) -> None:
    """F1, part, F6, part, F11, part: its rows come back with its blocks; nothing is computed again."""
    bench = make(below=make_tiers(160, disk=DictDisk()))
    prompt = text(num_tokens)
    bench.run(prefill("p", prompt))
    bench.run(Demote("d", "p.0", tier))
    assert states(bench).in_use == 0
    flood(bench)
    computed = num_computed(bench)
    assert tokens_of(bench, fork("f", "p.0")) == want(prompt)
    assert num_computed(bench) == computed
    flood(bench)
    bench.run(Promote("u", "p.0"))
    assert bench.replies["u"].status.tier == "device"
    at = max(1, num_tokens // 2)
    assert tokens_of(bench, fork("g", "p.0", at=at)) == want(prompt[:at])
    bench.run(Rewind("r", "p.0", at))
    assert tokens_of(bench, fork("h", "r.0")) == want(prompt[:at])
    bench.run(Release("p.0"), Release("r.0"))
    assert bench.engine.stats().tiers.host_held == 0


def test_a_state_that_is_lost_below_is_computed_again(make: MakeBench) -> None:
    """F24, part: a damaged row of a state takes the cold path; no request fails."""
    disk = DictDisk()
    bench = make(below=make_tiers(0, disk=disk))
    prompt = text(41)
    bench.run(prefill("p", prompt))
    bench.run(Demote("d", "p.0", DISK))
    flood(bench)
    rows = disk.named["p.0"][1]
    assert len(rows) == 11 + 2
    disk.broken.add(rows[-1])
    for request in ("f", "g"):
        assert tokens_of(bench, fork(request, "p.0")) == want(prompt)


def test_a_prompt_begins_where_a_state_was_left(make: MakeBench) -> None:
    """A prompt leaves one where a repeat of it begins, and one for so many blocks on the way there."""
    bench = make()
    prompt = text(150)
    assert tokens_of(bench, generate("a", prompt)) == want(prompt)
    assert tokens_of(bench, generate("b", prompt)) == want(prompt)
    assert bench.answers["b", 0].last.cached_tokens == 148
    other = [*prompt[:140], *text(9, first=2)]
    assert tokens_of(bench, generate("c", other)) == want(other)
    assert bench.answers["c", 0].last.cached_tokens == 128  # 32 blocks of 4


def test_cold_siblings_compute_once_what_they_share(make: MakeBench) -> None:
    """X2, part: the one that computes it leaves its state where the others wait."""
    bench = make(num_blocks=100)
    prefix = text(100)
    prompts = [[*prefix, 40 + i, *text(20)] for i in range(6)]
    for i, prompt in enumerate(prompts):
        bench.submit(generate(f"r{i}", prompt))
    bench.run()
    for i, prompt in enumerate(prompts):
        assert bench.answers[f"r{i}", 0].tokens == want(prompt)
    assert num_computed(bench) == len(prefix) + 6 * 21


def test_a_prompt_does_not_wait_for_blocks_that_left_no_state(make: MakeBench) -> None:
    """S6, part: the other one has passed them, and goes on for long; of those that come late one computes."""
    bench = make(num_blocks=300, max_step_tokens=16)
    bench.submit(generate("long", text(600)))
    for _ in range(4):
        bench.step()
    before = num_computed(bench)
    late = [generate(f"late{i}", [*text(40), 60, i]) for i in range(3)]
    bench.submit(*late)
    for _ in range(8):
        bench.step()
    assert all((f"late{i}", 0) in bench.answers for i in range(3))
    bench.run()
    for i in range(3):
        assert bench.answers[f"late{i}", 0].tokens == want([*text(40), 60, i])
    assert num_computed(bench) - before == 600 - 64 + (8 + 2) + 2 * 2


def test_events_tell_of_places_with_a_state_alone(make: MakeBench) -> None:
    """F12, part, X3, part: routers never offer another one; what is told of is found."""
    bench = make()
    prompt = text(150)
    bench.run(generate("a", prompt), prefill("p", prompt[:80]))
    told: set[int] = set()
    for event in bench.events:
        if isinstance(event, Stored | Removed) and event.group == 1:
            told ^= {*unpack_hashes(event.hashes).tolist()}
    salt = bench.engine.spec.salt()
    hashes = block_hashes(prompt, 4, salt=salt).tolist()
    places = {4 * (hashes.index(value) + 1) for value in told if value in hashes}
    assert {80, 128, 148} <= places
    for place in range(4, 150, 4):
        found = bench.engine._tree.find(block_hashes(prompt[:place], 4, salt=salt))
        assert (4 * found == place) is (place in places)


def test_branches_give_way_where_slots_are_few(
    make: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "MIN_STATES", 6)
    bench = make()
    prompts = [text(10 + 7 * i) for i in range(8)]
    for i, prompt in enumerate(prompts):
        bench.submit(generate(f"r{i}", prompt))
    bench.run()
    for i, prompt in enumerate(prompts):
        assert bench.answers[f"r{i}", 0].tokens == want(prompt)


@pytest.mark.parametrize("num_slots", [8, 24, 60])
def test_forks_are_admitted_as_far_as_slots_go(
    make: MakeBench, monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    """None is begun that others must give way for."""
    monkeypatch.setattr(model, "MIN_STATES", num_slots)
    bench = make(num_blocks=1000, max_rows=64, max_answer_capsules=0)
    prompt = text(41)
    bench.run(prefill("p", prompt))
    most = 0
    bench.submit(fork("f", "p.0", n=100))
    while bench.engine.has_work:
        bench.step()
        most = max(most, bench.engine.stats().sched.running)
    assert bench.engine.stats().sched.num_preemptions == 0
    assert num_slots // 3 <= most <= num_slots
    assert all(bench.answers["f", i].tokens == want(prompt, i) for i in range(100))


def test_one_request_alone_never_waits_for_slots(
    make: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "MIN_STATES", 3)
    bench = make(max_answer_capsules=1)
    prompt = text(150)
    assert tokens_of(bench, generate("a", prompt)) == want(prompt)
    assert tokens_of(bench, Fork("f", "a.0", (b"",), generate("x", [3]).limits, SAMPLED, at=100))


def test_settings_that_recurrent_layers_forbid_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model, "MIN_STATES", 2)
    with pytest.raises(ConfigError, match="needs 3 KV blocks in layer group 1, which has 2"):
        engine_over(FoldForward(num_blocks=64), config=EngineConfig(SchedulerConfig(64)))
