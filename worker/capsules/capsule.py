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


class Below(NamedTuple):
    """A capsule's copy below the device, which stays while the capsule does.

    `keys` are those of its blocks; the last one is a partial block if the tokens end inside one. `more` are
    those of the rows of windows that are read after the tokens.
    """

    tier: int
    tokens: Text  # whose KV it is
    salt: str
    keys: tuple[int, ...]
    is_durable: bool  # on disk, with its record
    is_held: bool  # in host memory
    more: tuple[int, ...] = ()

    @property
    def all_keys(self) -> tuple[int, ...]:
        return self.keys + self.more


@dataclass(frozen=True, slots=True)
class Capsule:
    """State from which any number of branches can go on; holds `node`, if its KV is on the device.

    With a copy `below` the device's is given up where there is no room.

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
    below: Below | None = None

    @property
    def num_computed(self) -> int:
        """Tokens whose KV there is."""
        if self.node is not None:
            return self.node.end
        assert self.below is not None, "a capsule that is nowhere"
        return len(self.below.tokens)

    @property
    def boundary(self) -> int:
        """Committed tokens."""
        return self.num_computed + len(self.pending)

    @property
    def salt(self) -> str:
        """The salt of its blocks."""
        if self.node is not None:
            return self.node.salt
        assert self.below is not None, "a capsule that is nowhere"
        return self.below.salt

    def text(self, notation: Notation, begin: int, end: int) -> Text:
        """Tokens `begin` to `end` of its text."""
        if self.node is not None:
            computed = path_texts(self.node, begin, end)
        else:
            assert self.below is not None, "a capsule that is nowhere"
            computed = [self.below.tokens[begin:end]]
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


class Copied(NamedTuple):
    """The KV of a node, to be copied: its tokens, and its blocks with their keys.

    After the blocks of its tokens come `more`, the rows of windows that are read after them.
    """

    tokens: Text
    keys: tuple[int, ...]
    blocks: tuple[int, ...]  # those of `more` too; none: it is below already
    has_tail: bool  # the last block of the tokens is a partial one
    more: tuple[int, ...] = ()

    @property
    def all_keys(self) -> tuple[int, ...]:
        return self.keys + self.more

    @property
    def num_untold(self) -> int:
        """The number of keys, the last ones of all, that are not of full blocks."""
        return self.has_tail + len(self.more)


def copy_of(tree: BranchTree, node: Node) -> Copied:
    """The parts of a copy of `node`. O(tokens)."""
    size = tree.block_size
    tokens = joined(tree.notation, *path_texts(node, 0, node.end))
    keys: list[int] = tree.path_hashes(node).tolist()
    num_blocks = -(-node.end // size)
    has_tail = node.end % size > 0
    keys += _tail_key(tree, tokens, node.salt, keys)
    blocks = tree.table(node)[:num_blocks].tolist()
    more = tree.side_keys(keys, node.end)
    blocks += tree.side_rows(node, node.end)
    whole = tree.notation.compact(tokens)
    return Copied(whole, tuple(keys), tuple(blocks), has_tail, more)


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
    below: Below | None = None

    @property
    def boundary(self) -> int:
        """Its tokens."""
        if self.node is not None:
            return self.node.end + len(self.pending)
        assert self.below is not None, "a text that is nowhere"
        return len(self.below.tokens) + len(self.pending)


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
        None,
        None if at < whole.boundary or residue else whole.matcher,
        continuation,
        grammar,
        below=cut.below,
    )
