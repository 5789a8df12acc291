"""The work on tokens that the engine plans: computed over rows and tables, or only timed (the mocker)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import structs

from mallee.protocol.hashing import Tokens, as_tokens
from mallee.worker.forward import Forward, ForwardBatch, Logits, Row
from mallee.worker.kv.paths import flatten, side_tables
from mallee.worker.kv.text import Notation, Text, TokenNotation
from mallee.worker.sched.branch import Branch, node_of
from mallee.worker.sched.plan import Draft, Plan
from mallee.worker.updates import FrameSink, UpdateSink


class Passes(Protocol):
    """Fills the blocks that plans name, and says how texts are written and updates reported.

    An engine asks nothing else that depends on whether tokens are real. Called from one thread.
    """

    @property
    def notation(self) -> Notation: ...

    @property
    def updates(self) -> UpdateSink: ...

    def run(self, plan: Plan) -> Sequence[Logits]:
        """One Logits for each decode, and those that chunks want, in this order; valid until the next call.

        Of a decode with a draft one more for each token of that, behind its own.
        """
        ...

    def accept(self, num_tokens: Mapping[Branch, int]) -> None:
        """Leave of each branch with a draft in the last plan what its first so many tokens have computed.

        Its own is one of them. What the pass has read is whole, as after the pass: all may be run again.
        """
        ...


class StepWatch(Protocol):
    """Is told of the phases of each step, in this order; of a step that fails, of the first ones only."""

    def begun(self) -> None: ...

    def planned(self, plan: Plan) -> None: ...

    def launched(self) -> None:
        """The pass has been handed to the device, maybe in the step before; a CPU has computed it."""
        ...

    def collected(self) -> None:
        """The tokens are drawn, and here. A device may have been handed the next pass meanwhile."""
        ...

    def ended(self) -> None:
        """Tokens are committed, and updates and events are made."""
        ...


class ForwardPasses:
    """Plans as batches for a `Forward`: texts are lists of token ids, updates frames."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._block_size = forward.block_size
        self._has_sides = bool(forward.spec.sides)
        self._has_states = forward.spec.has_states
        self._verified: dict[Branch, Row] = {}  # of the last pass, if there are states
        self.notation: Notation = TokenNotation(forward.spec.vocab_size)
        self.updates: UpdateSink = FrameSink()

    def run(self, plan: Plan) -> Sequence[Logits]:
        rows = self._rows(plan)
        if not rows:
            assert not plan.copies, "copies for no row: they would be lost"
            return ()
        if self._has_states:
            pairs = zip(plan.decodes, rows, strict=False)
            self._verified = {s: row for s, row in pairs if s in plan.drafts}
        return self._forward.forward(ForwardBatch(plan.copies, rows))

    def accept(self, num_tokens: Mapping[Branch, int]) -> None:
        cut = [s for s, row in self._verified.items() if num_tokens[s] < len(row.tokens)]
        if cut:
            self._forward.refold([self._verified[s] for s in cut], [num_tokens[s] for s in cut])

    def _rows(self, plan: Plan) -> list[Row]:
        """One for each decode and chunk, in this order."""
        size, drafts = self._block_size, plan.drafts
        last = as_tokens([s.tokens[-1] for s in plan.decodes])
        rows: list[Row] = []
        for i, s in enumerate(plan.decodes):
            node = s.node
            assert node is not None, "a decode that does not run"
            start = s.origin_len + len(s.tokens) - 1
            rows.append(Row(last[i : i + 1], start, flatten(node, size), 1))
        if drafts:
            rows = [
                _drafted(row, drafts[s]) if s in drafts else row
                for row, s in zip(rows, plan.decodes, strict=True)
            ]
        for chunk in plan.chunks:
            table = flatten(node_of(chunk.branch), size)
            rows.append(Row(_ids(chunk.tokens), chunk.start, table, chunk.num_logits))
        if not self._has_sides:
            return rows
        branches = (*plan.decodes, *(chunk.branch for chunk in plan.chunks))
        return [
            structs.replace(row, sides=side_tables(node_of(branch), size))
            for row, branch in zip(rows, branches, strict=True)
        ]


def _drafted(row: Row, draft: Draft) -> Row:
    """`row`, the last token of a branch, with its draft behind it."""
    tokens = np.concatenate((row.tokens, as_tokens(draft.tokens)))
    return structs.replace(row, tokens=tokens, num_logits=len(tokens))


def _ids(text: Text) -> Tokens:
    return as_tokens(text if isinstance(text, list) else list(text))
