"""The states of recurrent layers: each is all that they keep of a text, and belongs to one place in it.

A state can't be sliced: a text can be gone on from only where a state was left. A pass reads one slot and
writes another, so the state before it is whole until the tokens are committed: a step that fails is run
again, a fork reads its parent's state and writes its own without a copy, and a state stays by not being
written over. Rejected: one slot a branch, written in place (a failed step would fold its tokens twice; a fork
would copy). A pass that verifies a draft folds all of it: what is refused is taken out again before the rest
is committed (`Forward.refold`).

The end of a held node has a state, or its parent has it until the node's first tokens are computed; and a
node that has room for more has a `target`. Behind a branch that goes on, the states stay that were left on
purpose, where a prompt's chunk or one of `every_blocks` blocks ended, if that is the end of a block: they are
cache. So is the end of a node that nobody holds. Cache is given up, what was used longest ago first, when the
pool needs room. Events announce these places, and those that a capsule holds, by the hash of the block that
ends there.

With tiers below, states that are evicted or given up go down.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from mallee.protocol.hashing import Hashes
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import BlockTable, Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.sides.group import Offload, RowSpan, SideGroup

NO_STATE: Final = -1
"""In a row's table, the slot of a text without tokens."""

EVERY_BLOCKS: Final = 32
"""Decodes leave a state behind each so many blocks, and chunks of a prompt and drafts end there."""


class State:
    """A state in `slot`. `value`: the hash of the block that ends there, once an event has announced it.

    `stays`: it is cache when the branch has gone on.
    """

    __slots__ = ("slot", "stays", "value")

    def __init__(self, slot: int, *, stays: bool) -> None:
        self.slot = slot
        self.stays = stays
        self.value: int | None = None


class StatePart:
    """A node's states, by the number of tokens that each is after.

    `target` is the slot that the next pass of the node's one holder writes.
    """

    __slots__ = ("states", "target")

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        self.target: int | None = None

    def table(self, node: Node, place: int, block_size: int) -> BlockTable:
        """The slot that a pass reads, and the one that it writes; NO_STATE where there is none."""
        found = _find(node, place, node.end)
        slots = (found.slot if found is not None else None, self.target)
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

    __slots__ = ("_every", "_idle")

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
        self._idle: dict[int, tuple[Node, int]] = {}

    def begin(self) -> StatePart:
        return StatePart()

    def _part(self, node: Node) -> StatePart:
        return _part(node, self._place)

    def can_resume(self, node: Node, num_tokens: int) -> bool:
        return num_tokens == 0 or _find(node, self._place, num_tokens) is not None

    def chunk(self, begin: int, num_tokens: int, end: int) -> int:
        """Chunks end with a block, one of them where a repeat of the text would begin to compute."""
        size = self._block_size
        last = (end - 1) // size * size
        to_next = self._every - begin % self._every
        most = min(num_tokens, to_next)
        if begin < last:
            most = min(most, last - begin)
            whole = (begin + most) // size * size - begin
            return whole if whole > 0 else most
        return most

    # Room

    @property
    def num_idle(self) -> int:
        return len(self._idle)

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

    def evict(self, num_blocks: int) -> None:
        while self.pool.num_coming < num_blocks:
            node, at = next(iter(self._idle.values()))
            self._offload_states(node, [at])
            self._drop(node, at)

    def _drop(self, node: Node, at: int) -> None:
        state = self._part(node).states.pop(at)
        self._idle.pop(state.slot, None)
        if state.value is not None:
            self.announced.remove((state.value,))
        self.pool.free((state.slot,), node)
        self.version += 1

    # Changes of a node

    def advanced(self, node: Node, num_tokens: int, *, is_drafted: bool) -> None:
        part, end = self._part(node), node.end
        assert part.target is not None, f"{node} was computed without room for its state"
        before = end - num_tokens
        behind = part.states.get(before)
        is_chunk = num_tokens > 1 and not is_drafted
        stays = end % self._block_size == 0 and (is_chunk or end % self._every == 0)
        part.states[end] = State(part.target, stays=stays)
        part.target = None
        self.version += 1
        if behind is None:
            return
        if behind.stays and node.hashes:
            self._keep(node, before)
        else:
            self._drop(node, before)

    def _keep(self, node: Node, at: int) -> None:
        """The state of `node` after `at` tokens, the end of a block, is cache from now on, and announced."""
        self._announce(node, at)
        self._idle[self._part(node).states[at].slot] = (node, at)

    def _announce(self, node: Node, at: int) -> None:
        state, place = self._part(node).states[at], (at - node.base) // self._block_size - 1
        if state.value is None and 0 <= place < len(node.hashes):
            state.value = node.hashes[place]
            self.announced.add((state.value,))

    def sealed(self, node: Node, values: list[int]) -> None:
        """Nothing to do: states are announced when others may go on from them."""

    def final(self, node: Node) -> None:
        at = node.end
        if at % self._block_size == 0 and at in self._part(node).states:
            self._announce(node, at)

    def changed(self, node: Node) -> None:
        part, at = self._part(node), node.end
        if not node.holders and part.target is not None:
            self.pool.free((part.target,), node)
            part.target = None
        state = part.states.get(at)
        if state is None:
            return
        if node.holders or node.num_copying:
            self._idle.pop(state.slot, None)
        elif state.slot not in self._idle:
            if at % self._block_size or not node.hashes:
                self._drop(node, at)
            else:
                self._keep(node, at)

    def copied(self, parent: Node) -> None:
        self.changed(parent)

    def cut(self, node: Node, num_blocks: int) -> None:
        end = node.base + num_blocks * self._block_size
        for at in [at for at in self._part(node).states if at > end]:
            self._drop(node, at)

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
            if state.slot in self._idle:
                self._idle[state.slot] = (node, at)

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
        slots = [state.slot for state in part.states.values()]
        return slots if part.target is None else [*slots, part.target]

    def check(self, nodes: AbstractSet[Node]) -> None:
        super().check(nodes)
        known: dict[int, int] = {}
        idle = {}
        for node in nodes:
            for at, state in self._part(node).states.items():
                self._check_state(node, at, state)
                if at != node.end or not (node.holders or node.num_copying):
                    idle[state.slot] = (node, at)
                if state.value is not None:
                    known[state.value] = known.get(state.value, 0) + 1
        assert idle == self._idle, "states that are cache and can't be given up"
        assert known == self.announced.counts(), "announced states that are not there"
        for node in nodes:
            assert node.holders or self._part(node).target is None, f"{node} runs for nobody"
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
