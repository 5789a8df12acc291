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
nothing else is launched, and the slot's block is the branch's again, or still.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from mallee.protocol.errors import DeviceMemoryExhausted
from mallee.protocol.hashing import as_tokens
from mallee.worker.forward import DeviceForward, Drawing, Logits, Row
from mallee.worker.kv.node import BlockTable
from mallee.worker.kv.paths import flatten, flatten_windows
from mallee.worker.passes import ForwardPasses
from mallee.worker.sched.branch import Branch, Plan, node_of

REST_STEPS: Final = 64
"""Steps without a pass ahead, after one for which the device had too little memory."""

_UNKNOWN = as_tokens([0])


class AheadStats(NamedTuple):
    """Rows launched before their tokens were known, and those of them that were in vain. Both only grow."""

    num_rows: int
    num_void: int


class AheadPasses(ForwardPasses):
    """`ForwardPasses` on a device, of which the next one can be launched ahead."""

    def __init__(self, device: DeviceForward) -> None:
        super().__init__(device)
        self._device = device
        self._ahead: dict[Branch, tuple[Row, Logits]] | None = None
        self._num_rests = 0  # launches to be left out
        self._num_rows = self._num_void = 0

    def may_launch(self) -> bool:
        """Whether this step's pass is to be launched: not for some steps after one that lacked memory."""
        if not self._num_rests:
            return True
        self._num_rests -= 1
        return False

    def launch(self, drawing: Drawing, draws: dict[Branch, int]) -> None:
        """Launch the next pass of the branches of `draws`, each of which draws by that one of `drawing`.

        Nothing happens if the device has too little memory for it.
        """
        rows = {s: Row(_UNKNOWN, s.length, *self._tables(s)) for s in draws}
        try:
            logits = self._device.forward_drawn([*rows.values()], drawing, [*draws.values()])
        except DeviceMemoryExhausted:
            self._num_rests = REST_STEPS
            return
        self._ahead = dict(zip(rows, zip(rows.values(), logits, strict=True), strict=True))
        self._num_rows += len(rows)

    def run(self, plan: Plan) -> Sequence[Logits]:
        if self._ahead is None or (plan.ready and not plan.decodes and not plan.chunks):
            return super().run(plan)  # of branches that draw without a pass, none is run
        assert not plan.drafts, "of tokens that are not known when a pass is launched ahead"
        ahead, self._ahead = self._ahead, None
        found = self._found(ahead, plan)
        self._num_void += len(ahead) - len(found)
        del ahead  # if nothing is found, its logits are free before others are made
        others = replace(plan, decodes=[s for s in plan.decodes if s not in found])
        computed = iter(super().run(others))
        logits = [found[s] if s in found else next(computed) for s in plan.decodes]
        return [*logits, *computed]

    def _found(self, ahead: dict[Branch, tuple[Row, Logits]], plan: Plan) -> dict[Branch, Logits]:
        """The logits of those decodes of `plan` that `ahead` computed as they are."""
        found: dict[Branch, Logits] = {}
        for branch in plan.decodes:
            row, logits = ahead.get(branch, (None, None))
            if row is not None and self._is_same(row, branch):
                found[branch] = logits
        return found

    def _is_same(self, row: Row, branch: Branch) -> bool:
        """Whether `row` has computed the position of the decode of `branch`, and into its slot.

        The blocks before are the same then: they are what the branch has held since.
        """
        if row.start != branch.length - 1:
            return False
        place = row.start // self._device.block_size
        table, _, windows = self._tables(branch)
        if row.table[place] != table[place]:
            return False
        return all(a[place] == b[place] for a, b in zip(row.windows, windows, strict=True))

    def _tables(self, branch: Branch) -> tuple[BlockTable, int, tuple[BlockTable, ...]]:
        """The last fields of a row of `branch` that wants one Logits."""
        node, size = node_of(branch), self._device.block_size
        return flatten(node, size), 1, flatten_windows(node, size)

    def stats(self) -> AheadStats:
        return AheadStats(self._num_rows, self._num_void)
