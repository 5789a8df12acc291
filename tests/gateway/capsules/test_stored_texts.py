"""Texts of kept capsules in the gateways' store, by gateways that share nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench.doubles.bus import LocalBus, LocalHub
from mallee.gateway.capsules import texts as module
from mallee.gateway.capsules.texts import MAX_DEPTH, TTL_S, CapsuleTexts
from mallee.gateway.peers import Peers
from mallee.gateway.store.store import Store, StoreTerms
from mallee.protocol.errors import OtherLayout, StoreAway, UnknownCapsule
from mallee.protocol.hashing import Tokens, as_tokens
from mallee.protocol.ids import CapsuleId, Scope, capsule_id
from mallee.protocol.messages import Continuation, Grammar, Limits, Sampling
from mallee.router.dispatch.token_memory import CapsuleTokens, TokenMemory, TokenPath
from mallee.runtime.tasks import Tasks
from support.plain_ids import scopes_at

A, B = Scope("a1"), Scope("b2")
PROMPT = as_tokens([i % 61 for i in range(5000)])


class Side:
    """One gateway's texts. Its wall clock shows `now`."""

    def __init__(self, hub: LocalHub, name: str, others: list[str]) -> None:
        self.hub, self.now = hub, 1_000_000.0
        self.bus = LocalBus(hub)
        self.ids = scopes_at(name)
        self.memory = TokenMemory(64 << 20)
        self.store = Store(self.bus, StoreTerms("f"))
        self.peers = Peers(
            self.bus,
            gateway=name,
            store="f",
            others=lambda: others,
            ids=self.ids,
            clock=lambda: 0.0,
        )
        context: Any = SimpleNamespace(wall_clock=lambda: self.now)
        self.tasks = Tasks(name)
        self.texts = CapsuleTexts(context, self.store, self.peers, self.memory, self.tasks)

    def capsule(self, scope: Scope = A) -> CapsuleId:
        return capsule_id(self.ids.new(scope))

    async def keep(
        self, path: TokenPath, ttl_s: float | None = 60.0, **more: Any
    ) -> tuple[CapsuleId, TokenPath]:
        """A new capsule, and its path; in the store by now."""
        capsule = self.capsule(path.scope)
        self.memory.keep(capsule, CapsuleTokens(path, ttl_s=ttl_s, **more))
        assert await self.store.flush(1.0)
        return capsule, path

    async def tokens(self, capsule: CapsuleId, scope: Scope = A) -> list[int] | None:
        if not await self.texts.fetch(capsule, scope):
            return None
        entry = self.memory.get(capsule)
        assert entry is not None
        self.memory.check()
        return list(entry.path.tokens().tolist())

    def sizes(self) -> list[int]:
        """Bytes of the stored values, the oldest first."""
        (values,) = self.hub.kept.buckets.values()
        return [len(each.value) for each in values.values()]


@pytest.fixture
async def sides() -> Any:
    """Two gateways, and one that comes later."""
    hub, names = LocalHub(), ["g0", "g1", "g2"]
    made = [Side(hub, name, [each for each in names if each != name]) for name in names]
    for each in made:
        await each.bus.connect()
        await each.peers.start_up()
    yield made
    for each in made:
        await each.store.close(0.0)
        await each.tasks.close()
        assert each.tasks.failure is each.store.tasks.failure is None


def path_of(tokens: Tokens, parent: TokenPath | None = None, scope: Scope = A) -> TokenPath:
    return TokenPath(parent, tokens, scope)


async def test_all_that_computes_a_capsule_anew_is_read_at_another_gateway(
    sides: list[Side],
) -> None:
    """X24, part: tokens, grammar, time, branch; of one whose weights and private scope are its own."""
    one, two, _ = sides
    grammar = Grammar("json_object", consumed=7)
    left = Continuation(Sampling(temperature=1.0, seed=4), Limits(9), 3, 5)
    capsule, _ = await one.keep(path_of(PROMPT), 0.0, grammar=grammar, continuation=left)
    assert await two.tokens(capsule) == PROMPT.tolist()
    entry = two.memory.get(capsule)
    assert entry is not None
    assert entry[1:] == (grammar, 0.0, entry.weights, False, left)
    assert await two.tokens(two.capsule()) is None
    assert await two.texts.read(capsule, B) is None


async def test_what_keeps_nothing_stores_nothing_and_is_told_by_its_maker(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer's capsule; one that is too long for a message goes by the store."""
    one, two, three = sides
    capsule, _ = await one.keep(path_of(PROMPT), None)
    assert not one.hub.kept.buckets
    assert await two.tokens(capsule) == PROMPT.tolist()
    assert not any(one.hub.kept.buckets.values())
    monkeypatch.setattr(module, "MAX_TOLD_NBYTES", 100)
    assert await three.tokens(capsule) == PROMPT.tolist()
    assert len(one.sizes()) == 1


async def test_a_tree_is_stored_once_and_a_long_chain_in_runs(sides: list[Side]) -> None:
    """Each capsule adds what is new; one in `MAX_DEPTH` is whole, so that few values are read."""
    one, two, three = sides
    root, path = await one.keep(path_of(PROMPT))
    made = [(root, path)]
    for i in range(2 * MAX_DEPTH + 3):
        made.append(await one.keep(path_of(as_tokens([i, i]), path)))
        path = made[-1][1]
    whole = [size > 4 * len(PROMPT) for size in one.sizes()]
    assert [i for i, is_whole in enumerate(whole) if is_whole] == [
        0,
        MAX_DEPTH + 1,
        2 * MAX_DEPTH + 2,
    ]
    assert max(size for size, each in zip(one.sizes(), whole, strict=True) if not each) < 300
    for capsule, path in made[::3]:
        assert await two.tokens(capsule) == path.tokens().tolist()
    # What another one made is gone on from as if it were one's own, and its memory has it once.
    entry = two.memory.get(made[9][0])
    assert entry is not None
    further, _ = await two.keep(path_of(as_tokens([9]), entry.path))
    assert one.sizes()[-1] < 300
    assert await three.tokens(further) == [*made[9][1].tokens().tolist(), 9]
    assert two.memory.nbytes < 4 * 4 * len(PROMPT)


async def test_a_released_capsule_is_none_and_those_that_begin_with_it_are_whole(
    sides: list[Side],
) -> None:
    """Whether the gateway that releases it knows its text or not; and where another one remembers it."""
    one, two, three = sides
    for releasing in (one, three):
        parent, path = await one.keep(path_of(PROMPT))
        child, path = await one.keep(path_of(as_tokens([1, 2]), path))
        assert await two.tokens(parent) == PROMPT.tolist()
        await releasing.texts.release(parent, A)
        await releasing.texts.released(parent, A)
        with pytest.raises(UnknownCapsule):
            await two.texts.check(parent, A)
        assert parent not in two.memory
        for side in (two, three):
            with pytest.raises(UnknownCapsule):
                await side.tokens(parent)
            assert await side.tokens(child) == path.tokens().tolist()
    # One that was never stored: an answer's.
    capsule, _ = await one.keep(path_of(PROMPT), None)
    assert await two.tokens(capsule) is not None
    await one.texts.release(capsule, A)
    await one.texts.released(capsule, A)
    with pytest.raises(UnknownCapsule):
        await two.texts.check(capsule, A)


async def test_a_text_that_is_told_by_the_store_does_not_come_after_its_release(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its maker was asked for it before, and has not heard of the release."""
    one, two, three = sides
    monkeypatch.setattr(module, "MAX_TOLD_NBYTES", 100)
    capsule, _ = await one.keep(path_of(PROMPT), None)
    await three.texts.release(capsule, A)
    await three.texts.released(capsule, A)
    with pytest.raises(UnknownCapsule):
        await two.peers.ask_maker("capsule.text", capsule, A)
    with pytest.raises(UnknownCapsule):
        await two.tokens(capsule)
    assert capsule not in one.memory


async def test_a_text_that_comes_late_does_not_undo_a_release(sides: list[Side]) -> None:
    """Its maker was cut off from the broker when the capsule was made, and still when it was released."""
    one, two, three = sides
    one.bus.is_mute = True
    capsule = one.capsule()
    one.memory.keep(capsule, CapsuleTokens(path_of(PROMPT), ttl_s=60.0))
    await three.texts.release(capsule, A)
    assert await three.store.flush(1.0)
    one.bus.is_mute = False
    assert await one.store.flush(2.0)
    with pytest.raises(UnknownCapsule):
        await two.tokens(capsule)
    with pytest.raises(UnknownCapsule):
        await one.texts.check(capsule, A)


async def test_a_released_text_is_gone_from_the_store_where_no_other_begins_with_it() -> None:
    hub = LocalHub()
    alone = Side(hub, "g0", [])
    await alone.bus.connect()
    parent, path = await alone.keep(path_of(PROMPT))
    lone, _ = await alone.keep(path_of(PROMPT[::-1].copy()))
    child, _ = await alone.keep(path_of(as_tokens([1]), path))
    for capsule in (parent, lone):
        await alone.texts.release(capsule, A)
    await alone.store.flush(1.0)
    assert sorted(size > 4 * len(PROMPT) for size in alone.sizes()) == [False, False, True]
    alone.memory.forget(child)
    assert await alone.tokens(child) == [*PROMPT.tolist(), 1]
    await alone.store.close(0.0)


async def test_another_text_under_the_same_id_spoils_no_other(sides: list[Side]) -> None:
    """An answer that is cut where its client saw its last text. One that is computed again is the same."""
    one, two, _ = sides
    parent, path = await one.keep(path_of(PROMPT))
    child, _ = await one.keep(path_of(as_tokens([1, 2]), path))
    num = len(one.sizes())
    puts = one.hub.kept.revision
    again = path_of(PROMPT.copy())
    one.memory.keep(parent, CapsuleTokens(again, ttl_s=60.0))
    await one.store.flush(1.0)
    assert one.hub.kept.revision == puts, "it is there"
    entry = one.memory.get(parent)
    assert entry is not None
    one.memory.keep(parent, entry.cut(len(PROMPT) - 1, as_tokens([60])))
    grandchild, deeper = await one.keep(path_of(as_tokens([3]), path))
    assert len(one.sizes()) == num + 1
    assert await two.tokens(parent) == [*PROMPT[:-1].tolist(), 60]
    assert await two.texts.read(child, A) is None, "its beginning was replaced"
    assert await two.tokens(grandchild) == deeper.tokens().tolist()
    assert await two.tokens(child) == [*PROMPT.tolist(), 1, 2], "its maker remembers it"


async def test_a_text_that_is_used_stays_and_no_new_one_begins_with_an_old_one(
    sides: list[Side],
) -> None:
    one, two, _ = sides
    old, path = await one.keep(path_of(PROMPT))
    first = one.hub.kept.revision
    one.now += TTL_S / 2 - 1.0
    one.texts.renew(old)
    _, _ = await one.keep(path_of(as_tokens([1]), path))
    assert one.hub.kept.revision == first + 1
    one.now += 2.0
    _, _ = await one.keep(path_of(as_tokens([2]), path))
    assert one.sizes()[-1] > 4 * len(PROMPT)
    one.texts.renew(old)
    await one.store.flush(1.0)
    assert one.hub.kept.revision == first + 3
    one.texts.renew(old)
    await one.store.flush(1.0)
    assert one.hub.kept.revision == first + 3
    assert await two.tokens(old) == PROMPT.tolist()


async def test_with_the_store_away_what_is_remembered_is_used_and_the_rest_is_503(
    sides: list[Side],
) -> None:
    one, two, three = sides
    known, path = await one.keep(path_of(PROMPT))
    assert await two.tokens(known) is not None
    one.hub.set_up(False)
    await two.texts.check(known, A)
    assert await two.tokens(known) == PROMPT.tolist()
    with pytest.raises(StoreAway) as told:
        await three.tokens(known)
    assert told.value.fields["retry_after_s"] == 1.0
    made = one.capsule()
    one.memory.keep(made, CapsuleTokens(path_of(as_tokens([5]), path), ttl_s=60.0))
    await one.texts.release(known, A)
    await one.texts.released(known, A)
    one.hub.set_up(True)
    assert await one.store.flush(2.0)
    with pytest.raises(UnknownCapsule):
        await three.tokens(known)
    assert await three.tokens(made) == [*PROMPT.tolist(), 5]


async def test_a_full_store_and_one_that_lost_values_lose_texts_alone(sides: list[Side]) -> None:
    one, two, three = sides
    parent, path = await one.keep(path_of(PROMPT))
    one.hub.kept.is_full = True
    child, path = await one.keep(path_of(as_tokens([1]), path))
    one.hub.kept.is_full = False
    grandchild, _ = await one.keep(path_of(as_tokens([2]), path))
    assert await one.tokens(child) is not None
    await one.texts.check(child, A)
    assert await two.tokens(parent) == PROMPT.tolist()
    one.bus.is_mute = True  # its maker is silent for them: only the store is asked
    assert await three.texts.read(child, A) is None
    assert await three.texts.read(grandchild, A) is None


async def test_a_text_of_another_layout_is_refused_by_name(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = sides
    capsule, _ = await one.keep(path_of(PROMPT))
    (values,) = one.hub.kept.buckets.values()
    ((key, stored),) = values.items()
    values[key] = stored._replace(value=stored.value[:1] + b"\x07" + stored.value[2:])
    with pytest.raises(OtherLayout, match="'mallee_f_texts' with layout 7"):
        await two.tokens(capsule)


async def test_what_is_not_made_after_all_is_stored_no_more(sides: list[Side]) -> None:
    one, two, _ = sides
    capsule, _ = await one.keep(path_of(PROMPT))
    one.memory.drop(capsule)
    await one.store.flush(1.0)
    assert await two.texts.read(capsule, A) is None
    assert one.sizes() == []
