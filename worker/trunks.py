"""What the branches of a fork continue: all of a capsule, its beginning, or one that is being computed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mallee.protocol.errors import InvalidParameter
from mallee.protocol.messages import Fork
from mallee.worker.kv.capsule import Capsule
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import path_texts
from mallee.worker.kv.text import Notation, Text, joined
from mallee.worker.sched.sequence import Sequence as Seq

Texts = Mapping[tuple[int, ...], Text]
"""What branches must compute, by the indices of those that compute the same."""


class Trunk(NamedTuple):
    """`boundary` tokens, of which the KV of the first `base` is shared and `rest` must run again.

    `node` has the first `base` tokens at its end or above; None if a `producer` computes them just now,
    or if `base` is 0. `logits` belong to the token after the boundary, if there is no rest.
    """

    boundary: int
    base: int
    rest: Text
    salt: str
    node: Node | None = None
    producer: Seq | None = None
    logits: object | None = None


def trunk_of(command: Fork, source: Capsule | Seq, block_size: int, notation: Notation) -> Trunk:
    """The trunk of `command` on a capsule, or on the branch that computes it. Raises InvalidParameter."""
    boundary = source.boundary if isinstance(source, Capsule) else source.length
    at = command.at
    if at is not None and not 1 <= at <= boundary:
        raise InvalidParameter("at", at, f"give 1 to {boundary}, the tokens of the capsule")
    if at is None or at == boundary:
        if isinstance(source, Capsule):
            rest = joined(notation, source.pending)
            base = source.node.end
            return Trunk(boundary, base, rest, source.node.salt, source.node, None, source.logits)
        return Trunk(boundary, boundary, notation.empty(), source.salt, None, source)
    # Inside the text there are no logits: a branch without suffix must compute the last token again.
    last = at if all(command.suffixes) else at - 1
    base = last - last % block_size
    if isinstance(source, Seq):
        return Trunk(at, base, source.tokens[base:at], source.salt, None, source if base else None)
    node = source.node
    base = min(base, node.end - node.end % block_size)
    rest = joined(notation, *path_texts(node, base, at), source.pending)[: at - base]
    return Trunk(at, base, rest, node.salt, node if base else None)


def grouped(
    rest: Text, suffixes: Sequence[Text], raws: Sequence[bytes], notation: Notation
) -> Texts:
    """What the branches must compute, by the indices of those that compute the same.

    `raws`: the suffixes as the command has them.
    """
    if not len(rest):
        if not any(raws):  # who has nothing to compute shares nothing
            return {(i,): suffix for i, suffix in enumerate(suffixes)}
        if len(suffixes) == 1:
            return {(0,): suffixes[0]}
    groups: dict[bytes | int, list[int]] = {}
    for index, raw in enumerate(raws):
        groups.setdefault(raw if raw or len(rest) else index, []).append(index)
    return {
        tuple(members): joined(notation, rest, suffixes[members[0]]) for members in groups.values()
    }
