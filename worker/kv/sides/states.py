"""The states of recurrent layers: each is all that they keep of a text, and belongs to one place in it.

A state can't be sliced: a text can be gone on from only where a state was left. A pass reads one slot and
writes another, so the state before it is whole until the tokens are committed: a step that fails is run
again, a fork reads its parent's state and writes its own without a copy, and a state stays by not being
written over. Rejected: one slot a branch, written in place (a failed step would fold its tokens twice; a fork
would copy). A pass that verifies a draft folds all of it: what is refused is taken out again before the rest
is committed (`Forward.refold`). A pass that is launched ahead of another one's draws reads the slot that this
one writes, and writes one more.

The end of a held node has a state, or its parent has it until the node's first tokens are computed; and a
node that has room for more has a `target`. Behind a branch that goes on, the states stay that were left for a
`Reason`, at the end of a block: they are cache. So is the end of a node that nobody holds. Of an answer under
way the last block's is, in case that it ends: the next one takes its place. Events announce these places, and
those that a capsule holds, by the hash of the block that ends there; those of answers once they are over.

When the pool needs room, cache is given up, what was used longest ago first: all that is *passing* (ends of
answers and of chunks, of which a long prompt leaves many) before any place that a client named, or where
prompts end, part or wait. A passing place that was gone on from is one where they part.

With tiers below, states that are evicted or given up go down.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from mallee.protocol.hashing import Hashes
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import BlockTable, Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.sides.group import Offload, Places, Reason, RowSpan, SideGroup

NO_STATE: Final = -1
"""In a row's table, the slot of a text without tokens."""

EVERY_BLOCKS: Final = 32
"""Decodes leave a state behind each so many blocks at least, and chunks of a prompt end there."""

PASSING: Final = frozenset[Reason | None](("answer", "cadence"))
"""Reasons of states that are given up before all others."""

NAMED_SHARE: Final = 8
"""Clients may name a place of a prompt for each so many slots."""


class State:
    """A state in `slot`. `value`: the hash of the block that ends there, once an event has announced it.

    `reason`: what it stays for when the branch has gone on; None inside a block, where it does not.
    """

    __slots__ = ("reason", "slot", "value")

    def __init__(self, slot: int, reason: Reason | None) -> None:
        self.slot = slot
        self.reason = reason
        self.value: int | None = None


class StatePart:
    """A node's states, by the number of tokens that each is after.

    `target` is the slot that the next pass of the node's one holder writes, `ahead` that of the pass after
    it, while that may be launched; `answer` the last end of a block that it drew on to, no event of which has
    told.
    """

    __slots__ = ("ahead", "answer", "states", "target")

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        self.target: int | None = None
        self.ahead: int | None = None
        self.answer: int | None = None

    def table(self, node: Node, place: int, block_size: int) -> BlockTable:
        """The slot that a pass reads, and the one that it writes; NO_STATE where there is none.

        Behind them that of a pass ahead, which reads the one before it.
        """
        found = _find(node, place, node.end)
        slots = [found.slot if found is not None else None, self.target]
        if self.ahead is not None:
            slots.append(self.ahead)
        return np.array([NO_STATE if slot is None else slot for slot in slots], dtype=np.int32)


def _part(node: Node, place: int) -> StatePart:
    part = node.sides[place]
    assert isinstance(part, StatePart), "a part of another kind of group"
    return part


def _find(node: Node, place: int, num_tokens: int) -> State | None:
    """The state after `num_tokens` on the path of `node`."""
    walk: Node | None = node
    while walk is not None and num_tokens <= walk.end:
        found = _part(walk, place).states.get(num_tokens)
        if found is not None:
            return found
        walk = walk.parent
    return None


class StateGroup(SideGroup):
    """All nodes' states in one group of recurrent layers, a slot of `pool` each."""

    __slots__ = ("_every", "_lasting", "_passing", "num_evicted")

    def __init__(
        self,
        pool: BlockPool,
        span: RowSpan,
        *,
        block_size: int,
        journal: Journal,
        offload: Offload | None = None,
        every_blocks: int = EVERY_BLOCKS,
    ) -> None:
        super().__init__(
            pool,
            span,
            block_size=block_size,
            journal=journal,
            offload=offload,
            needs_parent=True,
        )
        self._every = every_blocks * block_size
        # Cache by slot, what was used longest ago first: whose it is, and after how many tokens.
        self._lasting: dict[int, tuple[Node, int]] = {}
        self._passing: dict[int, tuple[Node, int]] = {}
        self.num_evicted = 0

    def begin(self) -> StatePart:
        return StatePart()

    def _part(self, node: Node) -> StatePart:
        return _part(node, self._place)

    def can_resume(self, node: Node, num_tokens: int) -> bool:
        return num_tokens == 0 or _find(node, self._place, num_tokens) is not None

    def aligned_len(self, num_tokens: int) -> int:
        return num_tokens // self._block_size * self._block_size

    def places(self, begin: int, end: int, num_known: int, named: Sequence[int]) -> Places:
        """Named places, the end of known text, and where a repeat of the text begins to compute.

        Each takes a slot until it is given up. Of many named ones the first stay: most prompts share those.
        One block more of known text is not worth a slot: each turn of a conversation would leave two.
        """
        last = self.aligned_len(end - 1)
        wanted = sorted({self.aligned_len(at) for at in named if begin < self.aligned_len(at)})
        most = max(1, self.pool.num_blocks // NAMED_SHARE)
        places: Places = dict.fromkeys(wanted[:most], "named")
        if num_known - begin > self._block_size:
            places[num_known] = "branching"
        places[last] = "end"
        return {at: reason for at, reason in places.items() if begin < at <= last}

    def chunk(self, begin: int, num_tokens: int, places: Places) -> int:
        """Chunks end with a block while a place is ahead, and at each place."""
        ahead = [at - begin for at in places if at > begin]
        most = min([num_tokens, self._every - begin % self._every, *ahead])
        whole = self.aligned_len(begin + most) - begin
        return whole if ahead and whole > 0 else most

    # Room

    @property
    def num_idle(self) -> int:
        return len(self._lasting) + len(self._passing)

    def num_by_reason(self) -> Counter[str]:
        """States that are cache, by what they were left for. O(their number)."""
        found = Counter[str]()
        for node, at in (*self._lasting.values(), *self._passing.values()):
            found[self._part(node).states[at].reason or "cadence"] += 1
        return found

    def _cache(self, state: State) -> dict[int, tuple[Node, int]]:
        """The states that are given up with `state`, if it is cache."""
        return self._passing if state.reason in PASSING else self._lasting

    def num_needed(self, node: Node, num_blocks: int, end: int | None) -> int:
        return int(self._part(node).target is None)

    def has_room(self, num_blocks: int, num_texts: int, num_computed: int, num_states: int) -> bool:
        return 2 * num_texts + num_states <= self.num_available

    def share(self, num_blocks: int, num_full: int) -> int:
        return -(-num_full // self.pool.num_blocks)

    def least_blocks(self, num_step_blocks: int) -> int:
        return 3  # of the text that a branch was forked from, and of its own the last and the next

    def extend(self, node: Node, num_blocks: int, end: int | None) -> None:
        part = self._part(node)
        if part.target is None:
            (part.target,) = self.pool.alloc(1, node)

    def extend_ahead(self, node: Node) -> bool:
        part = self._part(node)
        if part.ahead is None and self.num_available:
            self.evict(1)
            if self.pool.num_free:
                (part.ahead,) = self.pool.alloc(1, node)
        return part.ahead is not None

    def trim(self, node: Node) -> None:
        part = self._part(node)
        for slot in (part.target, part.ahead):
            if slot is not None:
                self.pool.free((slot,), node)
        part.target = part.ahead = None

    def evict(self, num_blocks: int) -> None:
        while self.pool.num_coming < num_blocks:
            node, at = next(iter((self._passing or self._lasting).values()))
            if self._part(node).states[at].value is not None:
                self._offload_states(node, [at])
            self._drop(node, at)
            self.num_evicted += 1

    def _drop(self, node: Node, at: int) -> None:
        state = self._part(node).states.pop(at)
        self._cache(state).pop(state.slot, None)
        if state.value is not None:
            self.announced.remove((state.value,))
        self.pool.free((state.slot,), node)
        self.version += 1

    # Changes of a node

    def advanced(self, node: Node, num_tokens: int, reason: Reason | None) -> None:
        part, end = self._part(node), node.end
        assert part.target is not None, f"{node} was computed without room for its state"
        before = end - num_tokens
        if before in part.states:
            self._passed(node, part, before)
        if end % self._block_size:
            reason = None
        else:
            reason = reason or ("cadence" if num_tokens > 1 else "answer")
            if reason == "answer" and end % self._every == 0:
                reason = "cadence"
            self._drop_answer(node, part)
        part.states[end] = State(part.target, reason)
        part.target = None
        self.version += 1

    def _passed(self, node: Node, part: StatePart, at: int) -> None:
        """The text of `node` goes on after `at` tokens."""
        state = part.states[at]
        if state.reason is None or not node.hashes:
            self._drop(node, at)
        elif state.reason == "answer":
            part.answer = at
            self._cache(state)[state.slot] = (node, at)
        else:
            self._keep(node, at)

    def _drop_answer(self, node: Node, part: StatePart) -> None:
        """The answer of `node` has come to a later place."""
        at, part.answer = part.answer, None
        if at is not None and at in part.states and part.states[at].value is None:
            self._drop(node, at)

    def _keep(self, node: Node, at: int) -> None:
        """The state of `node` after `at` tokens, the end of a block, is cache from now on, and announced."""
        self._announce(node, at)
        state = self._part(node).states[at]
        self._cache(state)[state.slot] = (node, at)

    def _announce(self, node: Node, at: int) -> None:
        state, place = self._part(node).states[at], (at - node.base) // self._block_size - 1
        if state.value is None and state.reason is not None and 0 <= place < len(node.hashes):
            state.value = node.hashes[place]
            self.announced.add((state.value,))

    def sealed(self, node: Node, values: list[int]) -> None:
        """Nothing to do: states are announced when others may go on from them."""

    def final(self, node: Node) -> None:
        part = self._part(node)
        for at in (node.end, part.answer):
            if at is not None and at in part.states:
                self._announce(node, at)

    def changed(self, node: Node) -> None:
        part, at = self._part(node), node.end
        if not node.holders:
            self.final(node)
            self.trim(node)
        state = part.states.get(at)
        if state is None:
            return
        cache = self._cache(state)
        if node.holders or node.num_copying:
            if cache.pop(state.slot, None) is not None and state.reason in PASSING:
                state.reason = "branching"
        elif state.slot not in cache:
            if at % self._block_size or not node.hashes:
                self._drop(node, at)
            else:
                self._keep(node, at)

    def copied(self, parent: Node) -> None:
        self.changed(parent)

    def cut(self, node: Node, num_blocks: int) -> None:
        part, end = self._part(node), node.base + num_blocks * self._block_size
        for at in [at for at in part.states if at > end]:
            self._drop(node, at)
        if part.answer is not None and part.answer > end:
            part.answer = None

    def split(self, node: Node, upper: Node, num_blocks: int) -> None:
        above, own = self._part(upper), self._part(node)
        self._move(own, above, upper, [at for at in own.states if at <= upper.end])

    def merge(self, node: Node, child: Node) -> None:
        above, own = self._part(node), self._part(child)
        self._move(above, own, child, list(above.states))

    def _move(
        self, source: StatePart, target: StatePart, node: Node, places: Sequence[int]
    ) -> None:
        """The states after these tokens are those of `node`, whose part is `target`."""
        for at in places:
            state = target.states[at] = source.states.pop(at)
            cache = self._cache(state)
            if state.slot in cache:
                cache[state.slot] = (node, at)

    def evicting(self, node: Node, num_blocks: int) -> None:
        end = node.base + num_blocks * self._block_size
        self._offload_states(node, sorted(at for at in self._part(node).states if at > end))

    def _offload_states(self, node: Node, places: Sequence[int]) -> None:
        """Offload the states after these tokens, where blocks of `node` end."""
        hashes = [node.hashes[(at - node.base) // self._block_size - 1] for at in places]
        states = self._part(node).states
        self._send_below(hashes, [states[at].slot for at in places])

    # Reading

    def keys_after(
        self, keys: Hashes | Sequence[int], num_tokens: int, begin: int = 0
    ) -> Iterator[int]:
        if num_tokens > begin * self._block_size:
            yield from self.span.keys(int(keys[(num_tokens - 1) // self._block_size]))

    def rows_after(self, node: Node, num_tokens: int, begin: int = 0) -> Iterator[int]:
        if num_tokens > begin * self._block_size:
            found, target = _find(node, self._place, num_tokens), self._part(node).target
            slot = target if found is None else found.slot  # what comes from below is written there
            assert slot is not None, f"{node} has no state after {num_tokens} tokens"
            yield from self.span.rows(slot)

    # Checking

    def owned(self, node: Node) -> Sequence[int]:
        part = self._part(node)
        slots = (*(state.slot for state in part.states.values()), part.target, part.ahead)
        return [slot for slot in slots if slot is not None]

    def check(self, nodes: AbstractSet[Node]) -> None:
        super().check(nodes)
        known: dict[int, int] = {}
        idle: tuple[dict[int, tuple[Node, int]], ...] = ({}, {})
        for node in nodes:
            for at, state in self._part(node).states.items():
                self._check_state(node, at, state)
                if at != node.end or not (node.holders or node.num_copying):
                    idle[state.reason in PASSING][state.slot] = (node, at)
                if state.value is not None:
                    known[state.value] = known.get(state.value, 0) + 1
        assert idle == (self._lasting, self._passing), "states that are cache and can't be given up"
        assert known == self.announced.counts(), "announced states that are not there"
        for node in nodes:
            assert node.holders or self._part(node).target is None, f"{node} runs for nobody"
            assert self._part(node).ahead is None, f"{node} keeps a slot of a pass ahead"
            if node.holders:
                assert self.can_resume(node, node.end), f"{node} lacks the state of its end"

    def _check_state(self, node: Node, at: int, state: State) -> None:
        assert node.base < at <= node.end, f"{node} has a state after {at} tokens"
        if at != node.end or not node.holders:
            is_cache = at % self._block_size == 0 or (at == node.end and node.num_copying)
            assert is_cache, f"{node} keeps a state inside a block"
        if state.value is not None:
            place = (at - node.base) // self._block_size - 1
            assert state.value == node.hashes[place], f"{node} announced another text"
