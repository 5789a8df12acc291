"""Computes plans by forward passes over rows and tables. The mocker has passes of its own."""

from collections.abc import Sequence
from typing import Protocol

from mallee.protocol.hashing import Tokens, as_tokens
from mallee.worker.forward import BlockCopy, Draw, Forward, ForwardBatch, Logits, Row
from mallee.worker.jobs import Branch
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Plan, node_of


class Passes(Protocol):
    """Fills the blocks that plans name. Called from one thread."""

    def run(self, plan: Plan) -> Sequence[Logits]:
        """One Logits for each decode and each last chunk, in this order; valid until the next call."""
        ...

    def multi_step(self, branches: Sequence[Branch], num_steps: int) -> Sequence[Text]:
        """The next tokens of decoding branches: `num_steps` for each, that many passes in a row.

        Their nodes have room for all of them. No branch or sequence is changed.
        """
        ...


class ForwardPasses:
    """Plans as batches for a `Forward`."""

    def __init__(self, forward: Forward, tree: BranchTree) -> None:
        self._forward = forward
        self._tree = tree

    def run(self, plan: Plan) -> Sequence[Logits]:
        rows = self._rows(plan)
        if not rows:
            return ()
        copies = [BlockCopy(*copy) for copy in plan.copies]
        return self._forward.forward(ForwardBatch(copies, rows))

    def multi_step(self, branches: Sequence[Branch], num_steps: int) -> Sequence[Text]:
        drawn: list[list[int]] = [[] for _ in branches]
        last = [branch.tokens[-1] for branch in branches]
        starts = [branch.length - 1 for branch in branches]
        tables = [self._tree.table(node_of(branch)) for branch in branches]
        for i in range(num_steps):
            tokens = as_tokens(last)
            rows = [
                Row(tokens[k : k + 1], start + i, table, True)
                for k, (start, table) in enumerate(zip(starts, tables, strict=True))
            ]
            logits = self._forward.forward(ForwardBatch((), rows))
            draws = [
                Draw(each, branch.job.sampling, branch.seed, start + i + 1)
                for each, branch, start in zip(logits, branches, starts, strict=True)
            ]
            last = self._forward.sample(draws)
            for own, token in zip(drawn, last, strict=True):
                own.append(token)
        return drawn

    def _rows(self, plan: Plan) -> list[Row]:
        """One for each decode and chunk, in this order."""
        table = self._tree.table
        last = as_tokens([s.tokens[-1] for s in plan.decodes])
        rows = [
            Row(last[i : i + 1], s.length - 1, table(node_of(s)), True)
            for i, s in enumerate(plan.decodes)
        ]
        for chunk in plan.chunks:
            node = node_of(chunk.sequence)
            rows.append(Row(_ids(chunk.tokens), chunk.start, table(node), chunk.is_last))
        return rows


def _ids(text: Text) -> Tokens:
    return as_tokens(text if isinstance(text, list) else list(text))
