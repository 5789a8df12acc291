"""Passes that are launched ahead: a device computes the next tokens of decodes while the host works.

A step's draws are launched, and behind them, before the host knows one token, the next pass of the branches
that go on: their tokens are taken from the draws on the device. Then the host waits for the draws alone,
commits, reports, takes commands and plans as ever. So what is planned doesn't depend on it: the plan's row is
held against the row that was launched ahead, and has its logits if the branch is the same, and the position
and the slot that it writes. (Then the token is: those of a branch are only added to, as they are drawn.) All
other rows run as ever, and what nobody wants is dropped: its branch ended, was cancelled, preempted or
captured. The free blocks that branches get may be other ones, and with them the order of gangs in a batch.

Why a dropped row harms nobody. It has written one slot, behind all tokens of its branch, in a block that the
branch had then, though the block may be another's by now. The device works in the order of the calls. Each
later owner fills a slot before it reads it, by a pass, a copy of a block or a transfer from a tier; all of
these are called for after the row was launched, so they come after it, and overwrite it. Transfers to a tier
or a peer come after it as well, and read of a block the tokens that were computed when they were called for.
And a row that is used was overwritten by none: between its launch and the plan that it is held against
nothing is launched but the rows of a fork that draws meanwhile, which take the place of those whose blocks
they write; and the slot's block is the branch's again, or still.

A fork's first token needs no pass, and its branch has no block of its own: its next row is launched in a free
block, after the copy that it would begin with. If the branch gets that block, the copy is made. (Not if the
model has side groups: then its row runs as ever.)

A state is written to a slot of its own, beside the one that the pass under way writes, which the row reads.
So a step that fails finds the state before it. If one of the branches gets no such slot, as capsules hold
all others, nothing is launched.

Steps that leave something of a prompt for the next one launch nothing. The decodes of that alone would be a
pass of their own, which reads all weights once more than one pass with the next chunk does: the device would
work as much longer as it waits less. And a chunk that is launched before its size is known is in vain
whenever an answer ends.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from mallee.protocol.errors import DeviceMemoryExhausted
from mallee.protocol.hashing import as_tokens
from mallee.worker.forward import DeviceForward, Drawing, ForwardBatch, Logits, Row
from mallee.worker.kv.node import BlockCopy, Spare
from mallee.worker.kv.paths import flatten, side_tables
from mallee.worker.passes import ForwardPasses
from mallee.worker.sched.branch import Branch, node_of
from mallee.worker.sched.plan import Plan

REST_STEPS: Final = 64
"""Steps without a pass ahead, after one for which the device had too little memory."""

_UNKNOWN = as_tokens([0])


class AheadStats(NamedTuple):
    """Rows launched before their tokens were known, and those of them that were in vain. Both only grow."""

    num_rows: int
    num_void: int


class _Launched(NamedTuple):
    """A row that was launched ahead, with the copy before it, and its logits."""

    row: Row
    copy: BlockCopy | None
    logits: Logits

    def block(self, block_size: int) -> int:
        """The block that it writes."""
        return int(self.row.table[self.row.start // block_size])


class AheadPasses(ForwardPasses):
    """`ForwardPasses` on a device, of which the next one can be launched ahead."""

    def __init__(self, device: DeviceForward) -> None:
        super().__init__(device)
        self._device = device
        self._are_states = [side.kind == "state" for side in device.spec.sides]
        self._ahead: dict[Branch, _Launched] = {}
        self._num_rests = 0  # launches to be left out
        self._num_rows = self._num_void = 0

    def may_launch(self) -> bool:
        """Whether this step's pass is to be launched: not for some steps after one that lacked memory."""
        if not self._num_rests:
            return True
        self._num_rests -= 1
        return False

    def launch(
        self, drawing: Drawing, draws: Mapping[Branch, int], going: Mapping[Branch, Spare | None]
    ) -> None:
        """Launch the next pass of the branches of `draws`, each of which draws by that one of `drawing`.

        `going` has all branches of the next step, with the block of each that has none of its own for it.
        Nothing happens if some of the others have no pass launched already, or if the device has too little
        memory.
        """
        if any(branch not in draws and branch not in self._ahead for branch in going):
            return
        spares = {branch: going[branch] for branch in draws}
        copies = {s: spare.copy for s, spare in spares.items() if spare is not None and spare.copy}
        rows = [self._row(branch, spare) for branch, spare in spares.items()]
        batch = ForwardBatch([*copies.values()], rows)
        try:
            logits = self._device.forward_drawn(batch, drawing, [*draws.values()])
        except DeviceMemoryExhausted:
            self._num_rests = REST_STEPS
            return
        self._forget_written({spare.block for spare in spares.values() if spare is not None})
        for branch, row, own in zip(draws, rows, logits, strict=True):
            self._ahead[branch] = _Launched(row, copies.get(branch), own)
        self._num_rows += len(rows)

    def _forget_written(self, blocks: Set[int]) -> None:
        """Rows of earlier passes count no more if a block that they wrote has been written since."""
        size = self._block_size
        for branch in [s for s, own in self._ahead.items() if own.block(size) in blocks]:
            del self._ahead[branch]
            self._num_void += 1

    def run(self, plan: Plan) -> Sequence[Logits]:
        if not self._ahead or plan.draws_only:
            return super().run(plan)  # of branches that draw without a pass, none is run
        assert not plan.drafts, "of tokens that are not known when a pass is launched ahead"
        found = self._take(plan)  # logits that are not found are free before others are made
        made = {own.copy for own in found.values()}
        others = replace(
            plan,
            decodes=[s for s in plan.decodes if s not in found],
            copies=[copy for copy in plan.copies if copy not in made],
        )
        computed = iter(super().run(others))
        logits = [found[s].logits if s in found else next(computed) for s in plan.decodes]
        return [*logits, *computed]

    def _take(self, plan: Plan) -> dict[Branch, _Launched]:
        """The rows that `plan` wants; no others are kept."""
        ahead, self._ahead = self._ahead, {}
        found: dict[Branch, _Launched] = {}
        for branch in plan.decodes:
            own = ahead.get(branch)
            if own is not None and self._is_same(own, branch, plan):
                found[branch] = own
        self._num_void += len(ahead) - len(found)
        return found

    def _is_same(self, own: _Launched, branch: Branch, plan: Plan) -> bool:
        """Whether the row has computed the position of the decode of `branch`, and into its slot.

        The blocks before are the same then: they are what the branch has held since, but for a block of its
        own that begins with a copy, which must be the same.
        """
        row = own.row
        if row.start != branch.length - 1:
            return False
        place = row.start // self._block_size
        now = self._row(branch)
        if row.table[place] != now.table[place]:
            return False
        if own.copy is not None and own.copy not in plan.copies:
            return False
        written = [-1 if is_state else place for is_state in self._are_states]
        return all(a[i] == b[i] for i, a, b in zip(written, row.sides, now.sides, strict=True))

    def _row(self, branch: Branch, spare: Spare | None = None) -> Row:
        """The next decode of `branch`, whose token is not known, in the block of `spare` if it has none."""
        node, size = node_of(branch), self._block_size
        table = flatten(node, size)
        if spare is not None:
            table = np.append(table[: node.end // size], np.int32(spare.block))
        sides = side_tables(node, size)
        if self._has_states:
            tables = zip(self._are_states, sides, strict=True)
            sides = tuple(table[-2:] if is_state else table for is_state, table in tables)
        return Row(_UNKNOWN, branch.length, table, 1, sides)

    def stats(self) -> AheadStats:
        return AheadStats(self._num_rows, self._num_void)
