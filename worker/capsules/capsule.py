"""A capsule, and the value that carries all of it but its KV to another process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId
from mallee.protocol.messages import Continuation, Grammar
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import path_texts
from mallee.worker.kv.text import Notation, Text, joined
from mallee.worker.kv.tree import BranchTree


class TextKV(NamedTuple):
    """The KV of a text by name: keys of its blocks, the last one partial if the tokens end inside it.

    `more` are keys of what side groups of layers read after the tokens, as rows.
    """

    tokens: Text
    salt: str
    keys: tuple[int, ...]
    more: tuple[int, ...] = ()

    @property
    def all_keys(self) -> tuple[int, ...]:
        return self.keys + self.more

    def num_private(self, block_size: int) -> int:
        """The number of keys, the last ones of all, that no event names: they are not of full blocks."""
        return (len(self.tokens) % block_size > 0) + len(self.more)


class Parked(NamedTuple):
    """A capsule's copy below the device, which stays while the capsule does."""

    kv: TextKV
    tier: int
    is_durable: bool = False  # on disk, with its record
    is_held: bool = False  # in host memory

    @property
    def is_sure(self) -> bool:
        """Whether its blocks are there; else they are cache below the device, which may be gone."""
        return self.is_durable or self.is_held


@dataclass(frozen=True, slots=True)
class Capsule:
    """State from which any number of branches can go on; holds `node`, if its KV is on the device.

    With a copy that is `parked` the device's is given up where there is no room.

    `pending` are the last tokens of the text whose KV isn't computed yet (the token that was drawn
    last). `logits` (opaque) belong to the token after the boundary; None if `pending` must run first.
    `continuation`: the branch that it was taken from, to go on as that very branch; None: a prompt's.
    `grammar`: the text's, with the tokens of it so far; `matcher` (opaque, never changed) its state at the
    boundary, None if it has to be built again from them.
    """

    id: CapsuleId
    node: Node | None  # None: its KV lies below the device alone
    pending: tuple[int, ...]
    logits: object | None
    matcher: object | None = None
    continuation: Continuation | None = None
    grammar: Grammar | None = None
    parked: Parked | None = None

    @property
    def copy(self) -> Parked:
        """Its copy below the device, which it has if it has no node."""
        assert self.parked is not None, "a capsule that is nowhere"
        return self.parked

    @property
    def num_computed(self) -> int:
        """Tokens whose KV there is."""
        if self.node is not None:
            return self.node.end
        return len(self.copy.kv.tokens)

    @property
    def boundary(self) -> int:
        """Committed tokens."""
        return self.num_computed + len(self.pending)

    @property
    def salt(self) -> str:
        """The salt of its blocks."""
        if self.node is not None:
            return self.node.salt
        return self.copy.kv.salt

    def text(self, notation: Notation, begin: int, end: int) -> Text:
        """Tokens `begin` to `end` of its text."""
        if self.node is not None:
            computed = path_texts(self.node, begin, end)
        else:
            computed = [self.copy.kv.tokens[begin:end]]
        num = self.num_computed
        pending = self.pending[max(0, begin - num) : max(0, end - num)]
        return joined(notation, *computed, pending)

    def continuation_at(self, at: int) -> Continuation | None:
        """The branch as it was after the first `at` tokens; None if they are not of its answer."""
        if self.continuation is None:
            return None
        return self.continuation.earlier(self.boundary - at)

    def grammar_at(self, at: int) -> Grammar | None:
        """The grammar and the tokens that it had taken in there; None if the text wasn't in it."""
        return None if self.grammar is None else self.grammar.before(self.boundary - at)


def kv_of(tree: BranchTree, node: Node) -> TextKV:
    """The KV of the text that ends with `node`, by name. O(tokens)."""
    tokens = joined(tree.notation, *path_texts(node, 0, node.end))
    keys: list[int] = tree.path_hashes(node).tolist()
    keys += _tail_key(tree, tokens, node.salt, keys)
    more = tree.side_keys(keys, node.end)
    return TextKV(tree.notation.compact(tokens), node.salt, tuple(keys), more)


def blocks_of(tree: BranchTree, node: Node) -> tuple[int, ...]:
    """The device's blocks of the text that ends with `node`, and rows, in the order of its keys."""
    blocks: list[int] = tree.table(node)[: -(-node.end // tree.block_size)].tolist()
    return (*blocks, *tree.side_rows(node, node.end))


def block_keys(tree: BranchTree, tokens: Text, salt: str) -> tuple[int, ...]:
    """Keys of the blocks of `tokens`, full ones and a partial last one, under `salt`. O(tokens)."""
    size = tree.block_size
    num_full = len(tokens) // size * size
    keys: list[int] = tree.notation.hashes(tokens[:num_full], size, salt=salt).tolist()
    return (*keys, *_tail_key(tree, tokens, salt, keys))


def _tail_key(tree: BranchTree, tokens: Text, salt: str, keys: Sequence[int]) -> list[int]:
    """The key of the partial last block of `tokens`, whose full blocks have `keys`; none if it is full."""
    tail = tokens[len(keys) * tree.block_size :]
    if not len(tail):
        return []
    parent = keys[-1] if keys else None
    # Under a salt of its own: no full block of other tokens has such a hash.
    found = tree.notation.hashes(tail, len(tail), salt=f"{salt}~", parent=parent)
    own: list[int] = found.tolist()
    return own


# Cutting the text of one.


def begun(
    capsule: Capsule,
    at: int,
    base: int,
    notation: Notation,
    *,
    node: Node | None = None,
    parked: Parked | None = None,
) -> Capsule:
    """The first `at` tokens of `capsule`, with the KV of the first `base` in the held `node`, or `parked`."""
    is_end = at == capsule.boundary
    return Capsule(
        capsule.id,
        node,
        tuple(capsule.text(notation, base, at)),
        logits=capsule.logits if is_end else None,
        matcher=capsule.matcher if is_end else None,
        continuation=capsule.continuation_at(at),
        grammar=capsule.grammar_at(at),
        parked=parked,
    )


def cut(tree: BranchTree, capsule: Capsule, at: int) -> Capsule:
    """The first `at` tokens of `capsule`, which has a node; that of them is held.

    No KV is copied. Fewer tokens than a block are pending, beside those that were; more where side groups
    have given up what the tokens after it would read.
    """
    node = capsule.node
    assert node is not None, "it is parked"
    base = node.end
    if at < base:
        base = tree.resume_point(node, at - at % tree.block_size)
    # A node without tokens is one of its own: that of `capsule` may be filled by a move.
    held = tree.hold_prefix(node, base) if base else tree.attach(NO_HASHES, node.salt, 0)
    return begun(capsule, at, base, tree.notation, node=held)


def lengthened(capsule: Capsule, residue: tuple[int, ...]) -> Capsule:
    """`capsule` with `residue` after its text, without logits."""
    continuation, grammar, num = capsule.continuation, capsule.grammar, len(residue)
    if continuation is not None:
        continuation = msgspec.structs.replace(continuation, drawn=continuation.drawn + num)
    if grammar is not None:
        grammar = msgspec.structs.replace(grammar, consumed=grammar.consumed + num)
    return replace(
        capsule,
        pending=(*capsule.pending, *residue),
        logits=None,
        matcher=None if residue else capsule.matcher,
        continuation=continuation,
        grammar=grammar,
    )
