"""A capsule: the whole execution state at a committed token boundary.

For models with attention only that is: the node that ends the KV, tokens committed but not yet
computed, the last logits, and where its text is in its grammar. Recurrent state joins here when
models have it.
"""

from dataclasses import dataclass

from mallee.protocol.ids import CapsuleId
from mallee.worker.kv.node import Node


@dataclass(frozen=True, slots=True)
class Capsule:
    """State from which any number of branches can go on; holds `node`.

    `pending` are the last tokens of the text whose KV isn't computed yet (the token that was drawn
    last). `logits` (opaque) belong to the token after the boundary; None if `pending` must run first.
    `matcher` (opaque, never changed): the grammar's state at the boundary, inside a constrained text.
    """

    id: CapsuleId
    node: Node
    pending: tuple[int, ...]
    logits: object | None
    matcher: object | None = None

    @property
    def boundary(self) -> int:
        """Committed tokens."""
        return self.node.end + len(self.pending)
