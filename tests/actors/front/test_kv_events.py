"""KV events of vLLM and SGLang against a brute-force model of an engine's cache."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.actors.front.pods.kv_events import (
    Arrival,
    BlockNames,
    EventOrder,
    PodContents,
    decode_batch,
    salt_of,
)
from mallee.protocol.errors import CodecError
from mallee.protocol.events import Cleared, Event, Removed, Stored, unpack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import Incarnation
from mallee.testing.vllm_pod import encode_batch, stored

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


class Engine:
    """An engine's cache as sets of token prefixes, and the messages that it sends about it."""

    def __init__(self, *, is_positional: bool, uses_bytes: bool) -> None:
        self._is_positional = is_positional
        self._uses_bytes = uses_bytes
        self.messages: list[bytes] = []
        self.blocks: dict[tuple[int, ...], set[str]] = {}  # prefix of whole blocks: media

    def name(self, prefix: tuple[int, ...]) -> bytes | int:
        number = hash(prefix) & (1 << 63) - 1
        return number.to_bytes(32, "big") if self._uses_bytes else number

    def send(self, *events: dict[str, Any]) -> None:
        self.messages.append(encode_batch(events, is_positional=self._is_positional))

    def store(self, tokens: tuple[int, ...], medium: str) -> None:
        """All blocks of `tokens` that are not in `medium`, behind the last one that is anywhere."""
        ends = range(SIZE, len(tokens) + 1, SIZE)
        for end in ends:
            prefix = tokens[:end]
            if medium in self.blocks.get(prefix, ()):
                continue
            parent = prefix[:-SIZE]
            self.blocks.setdefault(prefix, set()).add(medium)
            self.send(
                stored(
                    [self.name(prefix)],
                    self.name(parent) if parent else None,
                    prefix[-SIZE:],
                    SIZE,
                    medium=medium,
                )
            )

    def remove(self, number: int, medium: str) -> None:
        """A leaf in `medium`: engines give up the ends of paths first."""
        leaves = [
            prefix
            for prefix, media in self.blocks.items()
            if medium in media and not any(p[:-SIZE] == prefix for p in self.blocks)
        ]
        if leaves:
            prefix = leaves[number % len(leaves)]
            self.blocks[prefix].discard(medium)
            if not self.blocks[prefix]:
                del self.blocks[prefix]
            event = {"type": "BlockRemoved", "block_hashes": [self.name(prefix)], "medium": medium}
            self.send(event)

    def clear(self) -> None:
        self.blocks.clear()
        self.send({"type": "AllBlocksCleared"})

    def truth(self) -> HELD:
        """By hashing every prefix anew."""
        tiers = {"GPU": 0, "CPU": 1}
        return {
            (int(block_hashes(prefix, SIZE)[-1]), tiers[medium])
            for prefix, media in self.blocks.items()
            for medium in media
        }


TOKENS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE).map(tuple)
MEDIA = st.sampled_from(["GPU", "CPU"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), TOKENS, MEDIA),
        st.tuples(st.just("remove"), st.integers(0, 99), MEDIA),
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
    contents = PodContents(SIZE, can_replay=True, max_blocks=10_000)
    held: HELD = set()
    for seq, message in enumerate(engine.messages):
        if seq >= late and seq not in lost:
            take(contents, held, contents.order.on_live(seq, message))
        if contents.order.wants_replay:
            replay(contents, held, engine.messages[: seq + 1])
    replay(contents, held, engine.messages)
    assert contents.order.is_whole
    assert held == engine.truth()


def replay(contents: PodContents, held: HELD, messages: Sequence[bytes]) -> None:
    start = contents.order.begin_replay()
    for seq in range(start, len(messages)):
        take(contents, held, contents.order.on_replayed(seq, messages[seq]))
    take(contents, held, contents.order.end_replay(is_complete=True))


@given(STEPS, STEPS, st.booleans())
def test_a_restarted_engine_holds_what_it_says_anew(
    before: list[tuple[Any, ...]], after: list[tuple[Any, ...]], can_replay: bool
) -> None:
    """Its numbers begin at 0 again; the metrics tell of it later, and change nothing then."""
    old, new = (Engine(is_positional=False, uses_bytes=False) for _ in range(2))
    run(old, before)
    run(new, after)
    contents = PodContents(SIZE, can_replay=can_replay, max_blocks=10_000)
    held: HELD = set()
    for engine in (old, new):
        for seq, message in enumerate(engine.messages):
            take(contents, held, contents.order.on_live(seq, message))
    if new.messages:
        assert held == new.truth()
    if new.messages and old.messages:
        again: HELD = set()
        apply(again, contents.begin_life(Incarnation(2)))
        assert again == held
        assert contents.order.is_whole


def test_a_restart_that_only_the_metrics_tell_of_forgets_all() -> None:
    contents = PodContents(SIZE, can_replay=False, max_blocks=100)
    engine = Engine(is_positional=False, uses_bytes=False)
    engine.store((1, 2, 3, 4), "GPU")
    contents.take(contents.order.on_live(0, engine.messages[0]))
    assert contents.order.is_whole
    assert contents.begin_life(Incarnation(7)) == []
    assert not contents.order.is_whole


def test_a_gap_without_replays_keeps_what_is_known_and_says_that_it_is_not_all() -> None:
    engine = Engine(is_positional=False, uses_bytes=False)
    engine.store(tuple(range(12)), "GPU")
    contents = PodContents(SIZE, can_replay=False, max_blocks=100)
    held: HELD = set()
    take(contents, held, contents.order.on_live(0, engine.messages[0]))
    take(contents, held, contents.order.on_live(2, engine.messages[2]))
    assert not contents.order.is_whole
    assert contents.order.num_gaps == 1
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


def test_groups_with_windows_and_unknown_media_are_left_out() -> None:
    window = stored([1], None, [1, 2, 3, 4], SIZE, group_idx=1, kv_cache_spec_kind="sliding_window")
    tape = stored([1], None, [1, 2, 3, 4], SIZE, medium="tape")
    strange = {"type": "BlockPainted"}
    assert decode_batch(encode_batch([window, tape, strange], is_positional=False)) == []
    names = BlockNames(SIZE, max_blocks=100)
    other = stored([1], None, list(range(8)), 8)  # of another block size
    assert names.translate(decode_batch(encode_batch([other], is_positional=False))) == []


def test_the_oldest_blocks_go_beyond_the_bound() -> None:
    names = BlockNames(SIZE, max_blocks=3)
    held: HELD = set()
    for number in range(10):
        event = stored([number], None, [number] * SIZE, SIZE)
        apply(held, names.translate(decode_batch(encode_batch([event], is_positional=False))))
        names.check()
    assert {h for h, _ in held} == {int(block_hashes([n] * SIZE, SIZE)[0]) for n in (7, 8, 9)}


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x90", b"\x93\x00\x01\x02", b"\x81\xa1a\x01"])
def test_a_message_that_is_none_is_refused_and_counted(raw: bytes) -> None:
    with pytest.raises(CodecError, match="no KV events"):
        decode_batch(raw)
    contents = PodContents(SIZE, can_replay=False, max_blocks=10)
    assert contents.take(Arrival(batches=(raw,))) == []
    assert contents.num_refused == 1
