"""KV events of vLLM and SGLang against a brute-force model of an engine's cache."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.doubles.vllm_pod import encode_batch, stored
from mallee.actors.front.pods.event_order import Arrival, EventOrder
from mallee.actors.front.pods.kv_events import BlockNames, PodContents, decode_batch, salt_of
from mallee.actors.front.pods.subscriber import EventPlaces, told_places
from mallee.protocol.errors import CodecError
from mallee.protocol.events import Cleared, Event, Removed, Stored, unpack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import Incarnation

SIZE = 4
HELD = set[tuple[int, int]]  # (chain hash, tier)


def apply(held: HELD, events: Sequence[Event]) -> None:
    """As our index takes them in."""
    for event in events:
        match event:
            case Stored():
                held |= {(h, event.tier) for h in unpack_hashes(event.hashes).tolist()}
            case Removed():
                held -= {(h, event.tier) for h in unpack_hashes(event.hashes).tolist()}
            case Cleared():
                held.clear()


def take(contents: PodContents, held: HELD, arrival: Arrival) -> None:
    apply(held, contents.take(arrival))


def contents_of(*, can_replay: bool, max_blocks: int = 10_000) -> tuple[PodContents, EventOrder]:
    contents = PodContents(SIZE, max_blocks=max_blocks)
    return contents, contents.follow(0, can_replay=can_replay)


class Engine:
    """An engine's cache as copies of token prefixes, and the messages that it sends about it."""

    def __init__(self, *, is_positional: bool, uses_bytes: bool) -> None:
        self._is_positional = is_positional
        self._uses_bytes = uses_bytes
        self.messages: list[bytes] = []
        self.blocks: Counter[tuple[tuple[int, ...], str]] = (
            Counter()
        )  # copies of a prefix by medium
        self._named: set[tuple[int, ...]] = set()

    def name(self, prefix: tuple[int, ...]) -> bytes | int:
        number = hash(prefix) & (1 << 63) - 1
        return number.to_bytes(32, "big") if self._uses_bytes else number

    def send(self, *events: dict[str, Any]) -> None:
        self.messages.append(encode_batch(events, is_positional=self._is_positional))

    def store(self, tokens: tuple[int, ...], is_again: bool) -> None:
        """One copy on the device of all blocks of `tokens` that are not there; `is_again`: of all."""
        for end in range(SIZE, len(tokens) + 1, SIZE):
            prefix = tokens[:end]
            if self.blocks[prefix, "GPU"] and not is_again:
                continue
            parent = prefix[:-SIZE]
            self.blocks[prefix, "GPU"] += 1
            self._named.add(prefix)
            before = self.name(parent) if parent else None
            self.send(stored([self.name(prefix)], before, prefix[-SIZE:], SIZE))

    def offload(self, number: int, medium: str, has_tokens: bool) -> None:
        """One more copy of a block in a lower tier, as connectors tell of it: mostly without tokens."""
        if self._named:
            prefix = sorted(self._named)[number % len(self._named)]
            self.blocks[prefix, medium] += 1
            if has_tokens:
                parent = prefix[:-SIZE]
                before = self.name(parent) if parent else None
                event = stored([self.name(prefix)], before, prefix[-SIZE:], SIZE, medium=medium)
            else:
                event = stored([self.name(prefix)], None, [], 0, medium=medium)
            self.send(event)

    def remove(self, number: int) -> None:
        """A copy of any block, so that paths have holes."""
        held = sorted(self.blocks.elements())
        if held:
            prefix, medium = held[number % len(held)]
            self.blocks[prefix, medium] -= 1
            event = {"type": "BlockRemoved", "block_hashes": [self.name(prefix)], "medium": medium}
            self.send(event)

    def clear(self) -> None:
        self.blocks.clear()
        self._named.clear()
        self.send({"type": "AllBlocksCleared"})

    def truth(self) -> HELD:
        """By hashing every prefix anew."""
        tiers = {"GPU": 0, "CPU": 1, "STORAGE": 2}
        return {
            (int(block_hashes(prefix, SIZE)[-1]), tiers[medium])
            for (prefix, medium), copies in self.blocks.items()
            if copies
        }


TOKENS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE).map(tuple)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), TOKENS, st.booleans()),
        st.tuples(
            st.just("offload"),
            st.integers(0, 99),
            st.sampled_from(["CPU", "STORAGE"]),
            st.booleans(),
        ),
        st.tuples(st.just("remove"), st.integers(0, 99)),
        st.tuples(st.just("clear")),
    ),
    max_size=40,
)


def run(engine: Engine, steps: Sequence[tuple[Any, ...]]) -> None:
    for kind, *rest in steps:
        getattr(engine, kind)(*rest)


@given(STEPS, st.booleans(), st.booleans())
def test_whatever_an_engine_does_its_blocks_are_known(
    steps: list[tuple[Any, ...]], is_positional: bool, uses_bytes: bool
) -> None:
    """Against a model that knows every prefix; maps and arrays, numbers and bytes as names."""
    engine = Engine(is_positional=is_positional, uses_bytes=uses_bytes)
    run(engine, steps)
    names = BlockNames(SIZE, max_blocks=10_000)
    held: HELD = set()
    for message in engine.messages:
        apply(held, names.translate(decode_batch(message)))
        names.check()
    assert held == engine.truth()
    again: HELD = set()
    apply(again, names.contents())
    assert again == held
    assert names.num_unknown == 0


@settings(max_examples=200)
@given(STEPS, st.sets(st.integers(0, 60)), st.integers(0, 60))
def test_with_replays_nothing_that_is_lost_stays_lost(
    steps: list[tuple[Any, ...]], lost: set[int], late: int
) -> None:
    """Live messages are lost at will, and the first ones come before the picker does."""
    engine = Engine(is_positional=False, uses_bytes=True)
    run(engine, steps)
    contents, order = contents_of(can_replay=True)
    held: HELD = set()
    for seq, message in enumerate(engine.messages):
        if seq >= late and seq not in lost:
            take(contents, held, order.on_live(seq, message))
        if order.wants_replay:
            replay(contents, held, engine.messages[: seq + 1])
    replay(contents, held, engine.messages)
    assert order.is_whole
    assert held == engine.truth()


def replay(contents: PodContents, held: HELD, messages: Sequence[bytes]) -> None:
    order = contents.orders[0]
    start = order.begin_replay()
    for seq in range(start, len(messages)):
        take(contents, held, order.on_replayed(seq, messages[seq]))
    take(contents, held, order.end_replay(is_complete=True))


@given(STEPS, STEPS, st.booleans())
def test_a_restarted_engine_holds_what_it_says_anew(
    before: list[tuple[Any, ...]], after: list[tuple[Any, ...]], can_replay: bool
) -> None:
    """Its numbers begin at 0 again; the metrics tell of it later, and change nothing then."""
    old, new = (Engine(is_positional=False, uses_bytes=False) for _ in range(2))
    run(old, before)
    run(new, after)
    contents, order = contents_of(can_replay=can_replay)
    held: HELD = set()
    for engine in (old, new):
        for seq, message in enumerate(engine.messages):
            take(contents, held, order.on_live(seq, message))
    if new.messages:
        assert held == new.truth()
    if new.messages and old.messages:
        again: HELD = set()
        apply(again, contents.begin_life(Incarnation(2)))
        assert again == held
        assert order.is_whole


def test_a_restart_that_only_the_metrics_tell_of_forgets_all() -> None:
    contents, order = contents_of(can_replay=False)
    engine = Engine(is_positional=False, uses_bytes=False)
    engine.store((1, 2, 3, 4), False)
    contents.take(order.on_live(0, engine.messages[0]))
    assert order.is_whole
    assert contents.begin_life(Incarnation(7)) == []
    assert not order.is_whole


def test_a_gap_without_replays_keeps_what_is_known_and_says_that_it_is_not_all() -> None:
    engine = Engine(is_positional=False, uses_bytes=False)
    engine.store(tuple(range(12)), False)
    contents, order = contents_of(can_replay=False)
    held: HELD = set()
    take(contents, held, order.on_live(0, engine.messages[0]))
    take(contents, held, order.on_live(2, engine.messages[2]))
    assert not order.is_whole
    assert order.num_gaps == 1
    assert len(held) == 1, "a block behind an unknown one is never put anywhere else"
    assert contents.names.num_unknown == 1


def test_batches_that_wait_for_a_replay_are_bounded() -> None:
    order = EventOrder(can_replay=True)
    for seq in range(1, 6000):
        order.on_live(seq, b"")
    order.begin_replay()
    assert len(order.end_replay(is_complete=False).batches) == 4096
    assert not order.is_whole


def test_adapters_and_salts_have_blocks_of_their_own() -> None:
    """As the requests of the same adapter and salt name them; both only in `extra_keys`."""
    tokens = list(range(8))
    names = BlockNames(SIZE, max_blocks=100)
    cases = {
        ("", ""): [None, None],
        ("lora", ""): [("lora",), ("lora",)],
        ("", "salt"): [("salt",), None],
        ("lora", "salt"): [("lora", "salt"), ("lora",)],
    }
    for number, ((adapter, salt), keys) in enumerate(cases.items()):
        event = stored(
            [10 * number, 10 * number + 1],
            *(None, tokens, SIZE),
            lora_name=adapter or None,
            extra_keys=keys,
        )
        raw = encode_batch([event], is_positional=number % 2 == 1)
        (found,) = names.translate(decode_batch(raw))
        assert isinstance(found, Stored)
        expected = block_hashes(tokens, SIZE, salt=salt_of(adapter, salt))
        assert unpack_hashes(found.hashes).tolist() == expected.tolist()
    assert names.adapters == {"lora"}


def test_blocks_with_images_are_left_out_and_so_are_those_behind_them() -> None:
    names = BlockNames(SIZE, max_blocks=100)
    keys = [None, (("image", 0),), None]
    event = stored([1, 2, 3], None, list(range(12)), SIZE, extra_keys=keys)
    (found,) = names.translate(decode_batch(encode_batch([event], is_positional=False)))
    assert isinstance(found, Stored)
    assert unpack_hashes(found.hashes).tolist() == block_hashes(range(4), SIZE).tolist()
    behind = stored([4], 3, [1, 2, 3, 4], SIZE)
    assert names.translate(decode_batch(encode_batch([behind], is_positional=False))) == []
    assert names.num_unknown == 3


def told(names: BlockNames, *events: dict[str, Any], rank: int = 0) -> HELD:
    """The blocks that `names` makes of these events, beside those held before."""
    held: HELD = set()
    apply(held, names.translate(decode_batch(encode_batch(events, is_positional=False)), rank))
    names.check()
    return held


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
def test_every_kind_of_full_attention_counts(kind: str) -> None:
    names = BlockNames(SIZE, max_blocks=100)
    event = stored([1], None, [1, 2, 3, 4], SIZE, group_idx=0, kv_cache_spec_kind=kind)
    assert told(names, event) == {(int(block_hashes([1, 2, 3, 4], SIZE)[0]), 0)}
    assert not names.left_out


def test_events_that_are_not_followed_are_counted_by_their_reason() -> None:
    """Windows, recurrent states, copies elsewhere, unknown media, types, block sizes, names."""

    def block(**more: Any) -> dict[str, Any]:
        return stored([1], None, [1, 2, 3, 4], SIZE, **more)

    cases = {
        "layers of sliding_window": block(group_idx=1, kv_cache_spec_kind="sliding_window"),
        "layers of mamba": block(group_idx=2, kv_cache_spec_kind="mamba"),
        "layers of an unknown kind": block(kv_cache_spec_kind="unknown"),
        "copies elsewhere": block(medium="STORAGE", locality="REMOTE"),
        "an unknown medium": block(medium="tape"),
        "blocks of other than 4 tokens": stored([1], None, list(range(8)), 8),
        "blocks by names that are not known": stored([1], None, [], 0, medium="CPU"),
        "blocks behind one that is not known": stored([1], 7, [1, 2, 3, 4], SIZE),
        "blocks of what is no token id": stored([1], None, [(1, 2)] * SIZE, SIZE),  # type: ignore[list-item]
        "blocks with images or other keys": block(extra_keys=[[["image", 0]]]),
    }
    names = BlockNames(SIZE, max_blocks=100)
    for reason, event in cases.items():
        assert told(names, event) == set()
        assert names.left_out[reason] == 1, reason
    told(names, {"type": "BlockPainted"})
    assert names.left_out.total() == len(cases)
    assert names.num_unknown == 5


def test_a_copy_is_taken_away_where_it_was_stored() -> None:
    """By tier, group and owner; one that the engine does not hold there changes nothing."""
    names = BlockNames(SIZE, max_blocks=100)
    chain = int(block_hashes([1, 2, 3, 4], SIZE)[0])
    assert told(names, stored([1], None, [1, 2, 3, 4], SIZE, group_idx=0)) == {(chain, 0)}
    hint = stored([1], None, [], 0, medium="CPU", group_idx=0)
    assert told(names, hint, hint | {"ownership": "kvcr"}) == {(chain, 1)}

    def removed(**more: Any) -> dict[str, Any]:
        return {
            "type": "BlockRemoved",
            "block_hashes": [1],
            "medium": "CPU",
            "group_idx": 0,
            **more,
        }

    told(names, removed(group_idx=1), removed(medium="STORAGE"), removed(ownership="other"))
    assert len(names._blocks[0, 1].copies) == 3
    told(names, removed(), removed())
    assert (chain, 1) in names._holders, "the owner kvcr still has its copy"
    told(names, removed(ownership="kvcr"))
    assert names._holders == {(chain, 0): 1}


def test_the_engines_of_a_pod_have_copies_of_their_own() -> None:
    """The pod holds what one of its ranks holds; what clears one leaves the others' alone."""
    names = BlockNames(SIZE, max_blocks=100)
    first, second = (int(block_hashes([n] * SIZE, SIZE)[0]) for n in (1, 2))
    told(names, stored([1], None, [1] * SIZE, SIZE), stored([2], None, [2] * SIZE, SIZE))
    assert told(names, stored([1], None, [1] * SIZE, SIZE), rank=1) == set()
    held = {(first, 0), (second, 0)}
    apply(held, names.clear(0))
    assert held == {(first, 0)}
    apply(held, names.clear(1))
    assert held == set()


def test_a_lower_tier_goes_by_the_name_that_the_device_gave() -> None:
    """Offloading connectors tell tokens but no keys: a salted block stays one."""
    names = BlockNames(SIZE, max_blocks=100)
    told(names, stored([1], None, [1, 2, 3, 4], SIZE, extra_keys=[["salt"]]))
    salted = int(block_hashes([1, 2, 3, 4], SIZE, salt=salt_of("", "salt"))[0])
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    offloaded = stored([1], None, [1, 2, 3, 4], SIZE, medium="CPU")
    assert told(names, removed, offloaded) == {(salted, 1)}


def test_arrays_of_sglang_are_told_from_those_of_vllm() -> None:
    """SGLang: [..., medium, cache salt, session, adapter]; vLLM: [..., medium, adapter, keys, group]."""
    tokens = [1, 2, 3, 4]
    head = ["BlockStored", [-7], None, tokens, SIZE]
    cases = {
        salt_of("", ""): [None, "GPU", None, "session", None],
        salt_of("", "salt"): [None, "GPU", "salt", None, None],
        salt_of("lora", "salt"): [None, "GPU", "salt", "session", "lora"],
        salt_of("lora", ""): [None, "CPU_PINNED", None, None, "lora"],
        salt_of("vllms", ""): [3, "GPU", "vllms", [["vllms"]], 0],
    }
    for salt, tail in cases.items():
        names = BlockNames(SIZE, max_blocks=100)
        (found,) = names.translate(decode_batch(msgspec.msgpack.encode([0.0, [head + tail], 0])))
        assert isinstance(found, Stored)
        assert found.hashes == block_hashes(tokens, SIZE, salt=salt).tobytes()
        assert found.tier == (tail[1] == "CPU_PINNED")


def test_a_reset_cache_is_known_whole_again() -> None:
    contents, order = contents_of(can_replay=False)
    engine = Engine(is_positional=False, uses_bytes=False)
    engine.store((1, 2, 3, 4), False)
    engine.clear()
    contents.take(order.on_live(5, engine.messages[0]))
    assert not contents.is_whole
    assert "first events are not known" in contents.why_incomplete
    contents.take(order.on_live(6, engine.messages[1]))
    assert contents.is_whole
    assert contents.why_incomplete == ""


def test_vllm_tells_where_it_publishes() -> None:
    text = """{"0": {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": null, "topic": ""},
        "1": {"publisher": "zmq", "endpoint": "tcp://10.0.0.9:5558", "replay_endpoint": "tcp://[::]:6",
              "topic": "kv", "hwm": 7}}"""
    assert told_places(text, "10.0.0.7") == {
        0: EventPlaces("tcp://10.0.0.7:5557", None, ""),
        1: EventPlaces("tcp://10.0.0.9:5558", "tcp://10.0.0.7:6", "kv"),
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "publishes no KV events"),
        ('{"0": {"publisher": "null"}}', "publishes no KV events"),
        ("[]", "not understood"),
        ('{"object": "list"}', "not understood"),
        ("x", "Expecting value"),
        (
            '{"0": {"publisher": "zmq", "endpoint": "ipc:///a", "replay_endpoint": null}}',
            "ipc:///a",
        ),
        (
            '{"0": {"publisher": "zmq", "endpoint": "tcp://a b:5", "replay_endpoint": null}}',
            "a b",
        ),
    ],
)
def test_an_engine_without_events_has_a_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        told_places(text, "10.0.0.7")


def test_the_oldest_blocks_go_beyond_the_bound() -> None:
    names = BlockNames(SIZE, max_blocks=3)
    held: HELD = set()
    for number in range(10):
        event = stored([number], None, [number] * SIZE, SIZE)
        apply(held, names.translate(decode_batch(encode_batch([event], is_positional=False))))
        names.check()
    assert {h for h, _ in held} == {int(block_hashes([n] * SIZE, SIZE)[0]) for n in (7, 8, 9)}


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x90", b"\x93\x00\x01\x02", b"\x81\xa1a\x01", b"\x91" * 3000]
)
def test_a_message_that_is_none_is_refused_and_counted(raw: bytes) -> None:
    with pytest.raises(CodecError, match="no KV events"):
        decode_batch(raw)
    contents, _ = contents_of(can_replay=False)
    assert contents.take(Arrival(batches=(raw,))) == []
    assert contents.num_refused == 1


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 1 << 63)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)
FIELDS = [*stored([], None, [], SIZE), "extra_keys", "group_idx", "ownership", "locality"]


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(FIELDS), JUNK), max_size=4), st.booleans(), st.booleans())
def test_nonsense_is_left_out_or_refused_and_breaks_nothing(
    changes: list[tuple[str, Any]], is_positional: bool, is_removal: bool
) -> None:
    """Any fields with any values: the next sound event is taken in as ever."""
    sound = stored([1], None, [1, 2, 3, 4], SIZE)
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"} if is_removal else sound
    contents, order = contents_of(can_replay=False)
    for number, each in enumerate(
        (sound, event | dict(changes), {"type": "AllBlocksCleared"}, sound)
    ):
        raw = encode_batch([each], is_positional=is_positional)
        held: HELD = set()
        take(contents, held, order.on_live(number, raw))
        contents.names.check()
    assert held == {(int(block_hashes([1, 2, 3, 4], SIZE)[0]), 0)}
