"""A capsule, and the value that carries all of it but its KV to another process."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    boundary, None if it has to be built again from them. `draft`: state of a draft model, when there is one.
    """

    id: CapsuleId
    node: Node | None  # None: its KV lies below the device alone
    pending: tuple[int, ...]
    logits: object | None
    matcher: object | None = None
    continuation: Continuation | None = None
    grammar: Grammar | None = None
    draft: None = None
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


class CutText(NamedTuple):
    """The beginning of a sequence: a held node, or what is below of it, and the tokens after it."""

    node: Node | None
    pending: tuple[int, ...]
    parked: Parked | None = None

    @property
    def boundary(self) -> int:
        """Its tokens."""
        if self.node is not None:
            return self.node.end + len(self.pending)
        assert self.parked is not None, "a text that is nowhere"
        return len(self.parked.kv.tokens) + len(self.pending)


def cut_text(tree: BranchTree, node: Node, pending: Text | tuple[int, ...], at: int) -> CutText:
    """The first `at` tokens of the sequence that `node` and `pending` are; the node is held.

    No KV is copied. Fewer tokens than a block are pending, beside those that were; more where windows have
    given up what the tokens after it would read.
    """
    if at >= node.end:
        if not node.end:  # a node of its own: this one may be filled by a move
            return CutText(tree.attach(NO_HASHES, node.salt, 0), tuple(pending)[:at])
        return CutText(tree.hold_prefix(node, node.end), tuple(pending)[: at - node.end])
    base = tree.resume_point(node, at - at % tree.block_size)
    rest = tuple(joined(tree.notation, *path_texts(node, base, at)))
    if base:
        return CutText(tree.hold_prefix(node, base), rest)
    return CutText(tree.attach(NO_HASHES, node.salt, 0), rest)


def lengthened(whole: Capsule, cut: CutText, residue: tuple[int, ...]) -> Capsule:
    """`whole` cut to the text of `cut`, with `residue` after it."""
    at = cut.boundary
    continuation = whole.continuation_at(at)
    if continuation is not None:
        drawn = continuation.drawn + len(residue)
        continuation = msgspec.structs.replace(continuation, drawn=drawn)
    grammar = whole.grammar_at(at)
    if grammar is not None:
        grammar = msgspec.structs.replace(grammar, consumed=grammar.consumed + len(residue))
    return Capsule(
        whole.id,
        cut.node,
        (*cut.pending, *residue),
        logits=None,
        matcher=None if at < whole.boundary or residue else whole.matcher,
        continuation=continuation,
        grammar=grammar,
        parked=cut.parked,
    )
