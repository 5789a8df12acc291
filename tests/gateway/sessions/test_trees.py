"""Trees of sessions, against histories that were made as trees: parents, limits, forgetting."""

import random
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mallee.gateway.sessions.trees import (
    END_TOKENS,
    MAX_SESSION_NODES,
    SessionKey,
    SessionTrees,
)
from mallee.gateway.store.store import Entry
from mallee.protocol.gateways.session_notes import SessionHead
from mallee.protocol.hashing import NO_HASHES, Hashes, as_tokens, block_hashes
from mallee.protocol.ids import CapsuleId, RequestId, Scope

BLOCK = 4
KEY = SessionKey(Scope("a"), "s")


class Scene:
    """Trees, and the texts of all capsules."""

    def __init__(self, max_nodes: int = 4096, ttl_s: float = 100.0) -> None:
        self.now = 0.0
        self.trees = SessionTrees(
            max_nodes=max_nodes,
            ttl_s=ttl_s,
            block_size=BLOCK,
            clock=lambda: self.now,
            on_evicted=lambda tree: self.evicted.add(tree.key.name),
            on_dropped=lambda _, capsule: self.dropped.add(capsule),
        )
        self.evicted: set[str] = set()
        self.dropped: set[str] = set()
        self.texts: dict[CapsuleId, list[int]] = {}
        self._ids = count()

    def hashes_of(self, capsule: CapsuleId) -> Hashes:
        return block_hashes(as_tokens(self.texts[capsule]), BLOCK)

    def ask(
        self,
        prompt: list[int],
        answers: list[list[int]],
        key: SessionKey = KEY,
        *,
        capsule: CapsuleId | None = None,
        **more: Any,
    ) -> list[CapsuleId]:
        """A request and its answers' capsules."""
        self.now += 1
        request = RequestId(f"r{next(self._ids)}")
        self.trees.begin(
            request, key, capsule=capsule, prompt_tokens=0 if capsule else len(prompt), **more
        )
        text = self.texts[capsule] if capsule else prompt
        hashes = NO_HASHES if capsule else block_hashes(as_tokens(prompt), BLOCK)
        left = []
        for i, answer in enumerate(answers):
            made = CapsuleId(f"{request}.{i}")
            self.texts[made] = text + answer
            self.trees.left(request, made, len(text + answer), hashes, self.hashes_of)
            left.append(made)
        self.trees.ended(request)
        self.trees.check()
        return left

    def parent(self, capsule: CapsuleId, key: SessionKey = KEY) -> str:
        tree = self.trees.get(key)
        assert tree is not None
        return tree.nodes[capsule].parent


def words(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(num)]


@given(st.integers(0, 1 << 30), st.integers(0, END_TOKENS))
def test_parents_are_those_of_the_conversations(seed: int, num_rewritten: int) -> None:
    """F31, part: turns go on from any earlier turn, in any order, by prompt or by fork; templates rewrite
    the end of each prompt."""
    rng = random.Random(seed)
    scene = Scene()
    known: list[tuple[CapsuleId, list[int], str]] = []
    for _ in range(14):
        if known and rng.random() < 0.25:
            capsule, _text, _ = rng.choice(known)
            (made,) = scene.ask([], [words(rng, 30)], capsule=capsule)
            known.append((made, scene.texts[made], capsule))
            continue
        above, history = "", words(rng, 40)
        if known and rng.random() < 0.8:
            above, history, _ = rng.choice(known)
        end = words(rng, num_rewritten)
        prompt = history + words(rng, 20) + end
        left = scene.ask(prompt, [words(rng, 24) for _ in range(rng.choice((1, 1, 3)))])
        for made in left:
            # The next turn sees the answer after another end of the prompt of the same length.
            scene.texts[made] = [*prompt, *scene.texts[made][len(prompt) :]]
            known.append((made, scene.texts[made], above))
    for made, _, above in known:
        assert scene.parent(made) == above


def test_the_end_of_a_prompt_may_be_rewritten() -> None:
    """F31, part: hidden reasoning: what the prompt ended with, and the answer began with, is dropped."""
    rng = random.Random(1)
    scene = Scene()
    first, think = words(rng, 60), words(rng, 12)
    (turn,) = scene.ask(first + think, [words(rng, 50)])
    (after,) = scene.ask(first + words(rng, 30), [words(rng, 10)])
    assert scene.parent(after) == turn
    (retry,) = scene.ask(first + think, [words(rng, 50)])
    assert scene.parent(retry) == "", "the same prompt again is no turn after it"


def test_what_was_used_last_stays() -> None:
    scene = Scene(max_nodes=20)
    keys = [SessionKey(KEY.scope, f"s{i}") for i in range(12)]
    for key in keys:
        scene.ask([1] * 8, [[2]], key)
    assert [t.key for t in scene.trees.of(KEY.scope)] == keys[2:]
    for _ in range(40):
        scene.ask([1] * 8, [[2]], keys[5])
    tree = scene.trees.get(keys[5])
    assert tree is not None
    assert len(tree.nodes) == 19
    assert len(scene.trees.of(KEY.scope)) == 1


def test_a_session_remembers_so_many_capsules() -> None:
    scene = Scene()
    for _ in range(MAX_SESSION_NODES + 5):
        scene.ask([1] * 8, [[2]])
    tree = scene.trees.get(KEY)
    assert tree is not None
    assert len(tree.nodes) == MAX_SESSION_NODES


def test_a_session_without_use_is_forgotten_unless_it_runs() -> None:
    scene = Scene(ttl_s=10)
    scene.ask([1] * 8, [[2]])
    scene.now += 9
    assert scene.trees.get(KEY) is not None
    scene.trees.begin(RequestId("long"), KEY)
    scene.ask([1] * 8, [[2]], SessionKey(KEY.scope, "other"))
    scene.now += 60
    assert [tree.key for tree in scene.trees.of(KEY.scope)] == [KEY]
    scene.trees.ended(RequestId("long"))
    assert scene.trees.get(KEY) is None
    scene.trees.check()


def test_nodes_of_all_gateways_are_in_the_order_in_which_they_were_left() -> None:
    """Read in any order, whole or in parts, the newest stay; one that was cut anywhere is cut."""
    scene = Scene()
    for _ in range(3):
        scene.ask([1] * 8, [[2]])
    tree = scene.trees.get(KEY)
    assert tree is not None
    mine = list(tree.nodes.values())
    others = [
        structs.replace(mine[0], capsule=f"o{i}", created=0.501 + i / 500)
        for i in range(MAX_SESSION_NODES)
    ]
    cut = structs.replace(mine[1], tokens=3)
    scene.trees.take(tree, [others[1000], cut, mine[0]])
    scene.trees.take(tree, reversed(others))
    scene.trees.take(tree, [mine[1]])
    scene.trees.check()
    wanted = sorted([mine[0], cut, mine[2], *others], key=lambda node: node.created)
    assert list(tree.nodes.values()) == wanted[-MAX_SESSION_NODES:]
    assert scene.dropped == {node.capsule for node in wanted[:3]}


def test_what_is_stored_and_what_is_only_known_here_are_one() -> None:
    scene = Scene()
    scene.now = 50.0
    scene.ask([1] * 8, [[2]], parent="mine")
    stored = SessionHead(
        parent="theirs", tenant="", created=40.0, used=45.0, gateway="g1", kept=40.0
    )
    tree = scene.trees.adopt(KEY, Entry(stored, 7))
    assert (tree.parent, tree.created, tree.used) == ("theirs", 40.0, 51.0)
    assert tree.head("g0", 100.0).gateway == "", "two use it"
    scene.trees.give(KEY, "budget", parent="", tenant="")
    given = structs.replace(stored, budget="older", given=46.0)
    assert scene.trees.adopt(KEY, Entry(given, 8)).budget == "budget"
    given = structs.replace(stored, budget="newer", given=99.0)
    assert scene.trees.adopt(KEY, Entry(given, 9)).budget == "newer"
    scene.trees.check()


def test_a_copy_of_a_session_that_others_use_goes_before_those_of_this_gateway() -> None:
    scene = Scene(max_nodes=6)
    for name in ("a", "b"):
        scene.ask([1] * 8, [[2]], SessionKey(KEY.scope, name))
    copy = SessionHead(parent="", tenant="", created=9.0, used=9.0, gateway="g1", kept=9.0)
    scene.trees.adopt(SessionKey(KEY.scope, "copy"), Entry(copy, 1))
    scene.ask([1] * 8, [[2]], SessionKey(KEY.scope, "c"))
    assert [tree.key.name for tree in scene.trees.of(KEY.scope)] == ["a", "b", "c"]
    assert scene.evicted == {"copy"}


def test_a_request_of_a_closed_session_leaves_nothing() -> None:
    scene = Scene()
    scene.trees.begin(RequestId("r"), KEY, prompt_tokens=8)
    scene.trees.close(KEY)
    assert scene.trees.left(RequestId("r"), CapsuleId("r.0"), 9) is None
    scene.trees.ended(RequestId("r"))
    assert scene.trees.get(KEY) is None
    scene.trees.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=120), st.integers(8, 24))
def test_a_tenant_loses_only_what_is_beyond_its_share(
    asked: list[tuple[int, int]], max_nodes: int
) -> None:
    """F7, part: requests of one tenant never take from another that has less than an even part."""
    scene = Scene(max_nodes=max_nodes)
    for tenant, session in asked:
        before = sizes(scene)
        key = SessionKey(Scope(f"salt{tenant}{session}"), f"s{session}")
        scene.ask([1] * 8, [[2]], key, tenant=f"t{tenant}")
        after = sizes(scene)
        for other, size in before.items():
            if other != f"t{tenant}" and after.get(other, 0) < size:
                assert size >= max_nodes // 4, (before, after)
        assert scene.trees.get(key) is not None
        scene.trees.check()


def sizes(scene: Scene) -> dict[str, int]:
    """Sessions and nodes by tenant."""
    found: dict[str, int] = {}
    for tree in scene.trees._trees.values():
        found[tree.tenant] = found.get(tree.tenant, 0) + 1 + len(tree.nodes)
    return found


@pytest.mark.parametrize("num", [0, 3, 7])
def test_hashes_that_are_not_known_tie_to_the_newest(num: int) -> None:
    scene = Scene()
    left = scene.ask([5] * 40, [[i] * 9 for i in range(8)])
    scene.hashes_of = lambda capsule: np.array([], dtype="<u8")  # type: ignore[method-assign]
    (made,) = scene.ask([*scene.texts[left[num]], *range(30)], [[1]])
    assert scene.parent(made) == left[-1]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=9))
def test_prompts_that_part_share_the_blocks_that_they_begin_with(shapes: list[list[int]]) -> None:
    """Of each two requests without a parent, by comparing their texts; prefixes of all come first."""
    scene = Scene()
    alone: dict[CapsuleId, list[int]] = {}
    for i, shape in enumerate(
        shapes
    ):  # a block a number, and an own end for each, which is no turn of another
        prompt = [each for each in shape for _ in range(BLOCK)] + [2 + i] * (BLOCK + END_TOKENS)
        for made in scene.ask(prompt, [[9] * 8] * 2):
            if not scene.parent(made):
                alone[made] = prompt
    tree = scene.trees.get(KEY)
    assert tree is not None
    found = scene.trees.prefixes(tree, scene.hashes_of)
    for a, first in alone.items():
        for b, second in alone.items():
            if a.partition(".")[0] == b.partition(".")[0]:
                continue
            same = next(i for i in range(len(first)) if first[i : i + 1] != second[i : i + 1])
            told = [each.tokens for each in found if {a, b} <= {*each.capsules}]
            assert max(told, default=0) == same // BLOCK * BLOCK
            assert told == sorted(told)
