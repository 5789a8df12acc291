"""The memory that kept capsules below the device may take."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from mallee.protocol.codec import encode
from mallee.protocol.errors import CapsulesFull, InvalidParameter, from_wire
from mallee.protocol.messages import (
    Demote,
    Generate,
    Limits,
    Pin,
    Prefill,
    Promote,
    Release,
    Rewind,
    pack_tokens,
)
from mallee.worker.transfer.values import DISK, HOST
from support.tiers import DictDisk, LateMover, make_tiers

MakeBench = Callable[..., Any]
BLOCK = 4
LIMIT = 6_000


def capsules(bench: Any) -> dict[str, Any]:
    registry = bench.engine._capsules
    return {capsule.id: capsule for capsule in registry}


def is_kept(bench: Any, name: str) -> bool:
    registry = bench.engine._capsules
    return registry.ttl_s(registry.peek(name)) is not None


def state_nbytes(capsule: Any) -> int:
    return len(encode(capsule.continuation)) + len(encode(capsule.grammar))


def memory(num_tokens: int, num_computed: int, state: int, row: int) -> int:
    """Bytes of a capsule below: its own, its tokens', its keys', its state's."""
    return 1024 + 4 * num_tokens + 44 * -(-num_computed // BLOCK) + state + row


def taken(bench: Any) -> int:
    """Bytes of all kept capsules below, counted from the capsules themselves."""
    row = bench.forward.row_nbytes
    return sum(
        memory(each.boundary, each.num_computed, state_nbytes(each), row * bool(each.logits))
        for name, each in capsules(bench).items()
        if each.parked is not None and is_kept(bench, name)
    )


def refused_bytes(bench: Any, request: str) -> CapsulesFull | None:
    reply = bench.replies.get(request)
    if reply is None or reply.error is None:
        return None
    error = from_wire(reply.error)
    if isinstance(error, InvalidParameter):
        return None
    assert isinstance(error, CapsulesFull), error
    assert error.fields["unit"] == "bytes"
    return error


def needed(bench: Any, command: Any) -> int:
    """Bytes that `command` adds below, by what its capsule is now."""
    capsule, row = capsules(bench)[command.capsule], bench.forward.row_nbytes
    own_row = row * bool(capsule.logits)
    own = memory(capsule.boundary, capsule.num_computed, state_nbytes(capsule), own_row)
    match command:
        case Demote():
            parked = capsule.parked
            if not capsule.num_computed or (parked is not None and parked.tier >= command.tier):
                return 0  # it has no KV, or lies there
            return 0 if parked is not None and is_kept(bench, command.capsule) else own
        case Pin(is_pinned=True):
            was_kept = is_kept(bench, command.capsule)
            return own if capsule.parked is not None and not was_kept else 0
        case Rewind():
            at, num = command.at, capsule.num_computed
            base = num if at >= num else at - at % BLOCK
            if capsule.node is not None or not base:
                return 0
            state = len(encode(capsule.continuation_at(at))) + len(encode(capsule.grammar_at(at)))
            return memory(at, base, state, own_row * (at == capsule.boundary))
    return 0


def some_command(rng: random.Random, bench: Any, i: int) -> Any:
    """A prompt, an answer, or something about a capsule that is there."""
    here = capsules(bench)
    if not here or rng.random() < 0.2:
        tokens = pack_tokens([rng.randrange(50) for _ in range(rng.randint(1, 40))])
        if rng.random() < 0.4:
            return Generate(f"c{i}", tokens, Limits(rng.randint(1, 5), ignore_eos=True))
        return Prefill(f"c{i}", tokens)
    name = rng.choice(sorted(here))
    commands = [
        Demote(f"c{i}", name, rng.choice([HOST, DISK])),
        Demote(f"c{i}", name, rng.choice([HOST, DISK])),
        Rewind(f"c{i}", name, rng.randint(1, here[name].boundary)),
        Rewind(f"c{i}", name, here[name].boundary),
        Pin(f"c{i}", name, rng.random() < 0.7),
        Promote(f"c{i}", name),
        Release(name),
    ]
    return rng.choice(commands)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_capsule_is_refused_below_exactly_when_its_bytes_do_not_fit(
    make_bench: MakeBench, seed: int
) -> None:
    """F8, part: against a count of all capsules' bytes from their values.

    A refusal changes nothing, and names the remedy.
    """
    rng = random.Random(seed)
    below = make_tiers(4096, disk=DictDisk())
    bench = make_bench(
        num_blocks=1024, below=below, max_below_nbytes=LIMIT, row_blocks=1, max_kept_share=1.0
    )
    num_refused = 0
    for i in range(150):
        command = some_command(rng, bench, i)
        before, here = taken(bench), capsules(bench)
        more = 0
        if isinstance(command, Demote | Pin | Rewind):
            more = needed(bench, command)
        bench.run(command)
        error = refused_bytes(bench, f"c{i}") if more else None
        assert (error is not None) == (more > 0 and before + more > LIMIT), (command, before, more)
        if error is not None:
            num_refused += 1
            fields = error.fields
            assert (fields["needed"], fields["kept"], fields["limit"]) == (more, before, LIMIT)
            assert capsules(bench) == here
            assert "give them a ttl_s, or raise engine.max_below_mb" in str(error)
            assert str(LIMIT) not in error.client_message  # what others keep is not told
        stats = bench.engine.stats().capsules
        assert stats.max_blocks == 1024
        assert stats.nbytes_below == taken(bench) <= LIMIT
        assert stats.num_refused == num_refused
    assert num_refused
    for name in list(capsules(bench)):
        bench.run(Release(name))
    assert bench.engine.stats().capsules.nbytes_below == 0
    assert bench.engine.stats().tiers.host_held == 0


@pytest.mark.parametrize("seed", range(8))
def test_capsules_on_their_way_down_have_their_bytes_promised(
    make_bench: MakeBench, seed: int
) -> None:
    """F8, part: moves that end late and in between other commands never pass the limit together."""
    rng, movers = random.Random(seed), list[LateMover]()
    below = make_tiers(4096, disk=DictDisk(), movers=movers)
    bench = make_bench(
        num_blocks=1024, below=below, max_below_nbytes=LIMIT, row_blocks=1, max_kept_share=1.0
    )
    for i in range(150):
        bench.submit(some_command(rng, bench, i))
        for _ in range(rng.randint(0, 2)):
            bench.step()
        if rng.random() < 0.5:
            movers[0].advance(rng.randint(1, 3))
        assert bench.engine.stats().capsules.nbytes_below <= LIMIT
    bench.run()
    while movers[0].num_under_way:
        movers[0].advance()
        bench.run()
    assert bench.engine._capsules._promised_nbytes == 0
    assert bench.engine.stats().capsules.num_refused
