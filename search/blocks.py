"""The KV blocks of a search's tree, from the lengths of its texts."""

from collections.abc import Sequence

from mallee.search.tree import ROOT, Node


def num_blocks(nodes: Sequence[Node], begun: int, size: int) -> int:
    """KV blocks of `size` tokens that hold a tree which goes on from `begun` tokens, shared ones once.

    Counted as a worker lays it out. A continuation shares the full blocks before it, and has a copy of one
    that is not full. The last token of a node has no KV before something follows it, and then once for all
    that does, unless the node ended by itself. A node without a state holds nothing.
    """
    ends = {ROOT: begun}
    for node in nodes:
        if node.parent is not None:
            ends[node.number] = ends[node.parent] + node.proposal.num_tokens
    num = -(-begun // size)
    for node in nodes:
        end, held = ends[node.number], [_held(nodes[each], ends) for each in node.children]
        followed = [each for each in held if each is not None]
        num += sum(-(-each // size) - end // size for each in followed if each > end)
        if node.number != ROOT and followed:
            # The block of the last token stays by itself where it is full, or nothing copied it.
            num += end % size == 0 or min(followed) <= end
    return num


def _held(node: Node, ends: dict[int, int]) -> int | None:
    """Tokens up to which there is KV of a node; None: it left no state."""
    if not node.proposal.key:
        return None
    return ends[node.number] - (0 if node.proposal.is_end else 1)
