"""Checks of the KV memory itself, for debugging and as proof; by default, none.

The tree's books may be right while its bytes are not: a kernel that reads a stale table, a copy that
was lost, a bit that flipped. Each level adds to the one before:

    digests   a sealed block, and a capsule's last one, has a digest from then on: verified when a
              capsule is used, and once every `sweep_steps` steps in a sweep
    canaries  a free block holds a pattern: a write to a block after it was given back is found when the
              block is handed out next. Fills the whole memory at the start.
    guards    between any two blocks that are handed out lies one that never is: a write beyond the end
              of a block lands there, and is found when the block's tokens are committed. Halves the pool.

A fault names the blocks' last owners. Prior art: SGLang's `kv_canary`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.protocol.errors import ConfigError, CorruptKV

Row: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = npt.NDArray[np.uint8]  # [number of blocks, block_nbytes]
"""The bytes of one block."""

CheckLevel: TypeAlias = Literal["none", "digests", "canaries", "guards"]
_LEVELS: tuple[CheckLevel, ...] = ("none", "digests", "canaries", "guards")
_STORY_LENGTH = 4  # the last changes of hands that are remembered of a block


class KVMemory(Protocol):
    """The bytes of KV blocks, for checks and for tiers below. Owned by the `Forward`."""

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block, of all layers; 0 if there are none (a mocked memory)."""
        ...

    def new_rows(self, num: int) -> Rows:
        """Memory of the host for the bytes of `num` blocks, which copies to and from here reach fastest."""
        ...

    def mark(self) -> object:
        """A mark behind all that is launched on the device so far, for `read` and `write`."""
        ...

    def read(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        """Copy each of `blocks` into its row. From any thread, of blocks that don't change.

        It waits for what was launched before the mark `after`, and for nothing later; without one for all.
        Raises DeviceMemoryExhausted.
        """
        ...

    def write(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        """The opposite. From any thread, to blocks that nothing else touches."""
        ...

    def are_numbers(self, blocks: Sequence[int], rows: Rows) -> bool:
        """Whether every value in `rows`, which are for `blocks`, is a finite number.

        Another one would spread to who gets the block next, whose unfilled slots are read with weight 0.
        """
        ...

    def clear(self, row: Row, num_slots: int, group: int = 0, part: int = 0) -> None:
        """Overwrite all but the first `num_slots` token slots of `row`: what was in its block before.

        It is row `part` of a block of window group `group`; 0: of the full group.
        """
        ...

    def fill(self, blocks: Sequence[int]) -> None:
        """Every byte of `blocks` is part of one pattern now. Its numbers must be finite."""
        ...

    def is_filled(self, block: int) -> bool:
        """Whether nothing but the pattern is in `block`."""
        ...

    def digest(self, block: int, num_slots: int) -> int:
        """64 bits that depend on every byte of the block's first `num_slots` token slots."""
        ...


@dataclass(frozen=True, slots=True)
class KVChecks:
    """The checks of KV memory. On a fault "log" reports it and goes on; "raise" raises CorruptKV as well."""

    level: CheckLevel = "none"
    on_fault: Literal["log", "raise"] = "raise"
    sweep_steps: int = 64

    def validate(self) -> "KVChecks":
        """Itself. Raises ConfigError."""
        if self.level not in _LEVELS:
            raise ConfigError(f"kv_checks level={self.level!r}: give one of {', '.join(_LEVELS)}")
        if self.on_fault not in ("log", "raise"):
            raise ConfigError(f"kv_checks on_fault={self.on_fault!r}: give log or raise")
        if self.sweep_steps < 1:
            raise ConfigError(f"kv_checks sweep_steps={self.sweep_steps}: give at least 1")
        return self

    def has(self, level: CheckLevel) -> bool:
        """Whether `level` is among what is checked."""
        return _LEVELS.index(self.level) >= _LEVELS.index(level)


class WatchStats(NamedTuple):
    """`num_verified` digests were compared and `num_faults` found, of any kind; both only grow."""

    num_verified: int
    num_faults: int


class _Change(NamedTuple):
    """A block changed hands."""

    step: int
    what: str
    owner: str


class BlockWatch:
    """Knows every block's last owners, and what its bytes must be. Slow, by its nature."""

    def __init__(
        self,
        checks: KVChecks,
        memory: KVMemory,
        num_blocks: int,
        report: Callable[[CorruptKV], None],
    ) -> None:
        """`usable` are the blocks of the memory's `num_blocks` that may be handed out.

        Each fault goes to `report`. Raises ConfigError if guards leave none.
        """
        self.checks = checks.validate()
        self.usable = range(1, num_blocks - 1, 2) if checks.has("guards") else range(num_blocks)
        if not self.usable:
            raise ConfigError(f"kv_checks level='guards' needs num_blocks >= 3, not {num_blocks}")
        self._memory = memory
        self._report = report
        self._has_canaries = checks.has("canaries")
        self._has_guards = checks.has("guards")
        self._stories: dict[int, deque[_Change]] = {}
        self._digests: dict[
            int, tuple[int, int]
        ] = {}  # block -> slots that are final, their digest
        self._free = set(self.usable)
        self._guards = frozenset(range(num_blocks)).difference(self.usable)
        self._to_sweep: list[int] = []
        self._step = 0
        self._thread: int | None = None
        self._num_verified = self._num_faults = 0
        if self._has_canaries:
            memory.fill(range(num_blocks))

    # What the pool and the tree tell

    def allocated(self, blocks: Sequence[int], owner: object) -> None:
        """`blocks` are about to be handed to `owner`: their canaries must be alive."""
        self._check_thread()
        for block in blocks:
            if self._has_canaries and not self._memory.is_filled(block):
                self._fault(f"block {block} was written to while it was free", block)
            self._note(block, "allocated", owner)
        self._free.difference_update(blocks)

    def freed(self, blocks: Sequence[int], owner: object) -> None:
        """`blocks` may not be written to from now on."""
        self._check_thread()
        for block in blocks:
            self._digests.pop(block, None)
            self._note(block, "freed", owner)
        if self._has_canaries:
            self._memory.fill(blocks)
        self._free.update(blocks)

    def written(self, blocks: Iterable[int]) -> None:
        """A step wrote to `blocks`: the guards beside them must be whole."""
        if not self._has_guards:
            return
        for block in blocks:
            for guard in (block - 1, block + 1):
                if not self._memory.is_filled(guard):
                    self._break_guard(guard)

    def sealed(self, block: int, num_slots: int) -> None:
        """The first `num_slots` slots of `block` are final."""
        self._digests[block] = (num_slots, self._memory.digest(block, num_slots))

    # Verifying

    def verify(self, blocks: Iterable[int]) -> None:
        """Compare `blocks` with the digests that were taken of them; a difference is a fault."""
        for block in blocks:
            entry = self._digests.get(block)
            if entry is None:
                continue
            self._num_verified += 1
            if self._memory.digest(block, entry[0]) != entry[1]:
                self.sealed(block, entry[0])  # told once, not in every sweep
                self._fault(f"block {block} changed after it was sealed", block)

    def verify_all(self) -> None:
        """Verify every digest, canary and guard now. O(memory)."""
        self.verify(list(self._digests))
        if self._has_canaries:
            for block in self._free:
                if not self._memory.is_filled(block):
                    self._memory.fill([block])
                    self._fault(f"block {block} was written to while it was free", block)
        for guard in self._guards:
            if not self._memory.is_filled(guard):
                self._break_guard(guard)

    def end_step(self) -> None:
        """A step is over: verify the next part of what `sweep_steps` steps go through."""
        self._step += 1
        if not self._to_sweep:
            self._to_sweep = list(self._digests)
        share = -(-len(self._digests) // self.checks.sweep_steps)
        part = self._to_sweep[:share]
        del self._to_sweep[:share]
        self.verify(part)

    def story(self, block: int) -> str:
        """The last owner of `block`, for people."""
        changes = self._stories.get(block, ())
        if not changes:
            return f"block {block} was never allocated"
        told = ", ".join(f"{c.what} at step {c.step} by {c.owner}" for c in changes)
        return f"block {block}: {told}"

    def check(self) -> None:
        """Raise AssertionError on a broken invariant; CorruptKV on a fault, if faults raise."""
        assert not self._free & self._digests.keys(), "a free block has a digest"
        assert not self._free & self._guards, "a guard is free"
        self.verify_all()

    def stats(self) -> WatchStats:
        return WatchStats(self._num_verified, self._num_faults)

    def _break_guard(self, guard: int) -> None:
        left, right = guard - 1, guard + 1
        self._memory.fill([guard])
        self._fault(
            f"guard {guard} was written to: a write ran over the end of block {left}, or began"
            f" before block {right}",
            left,
            right,
        )

    def _note(self, block: int, what: str, owner: object) -> None:
        story = self._stories.setdefault(block, deque(maxlen=_STORY_LENGTH))
        story.append(_Change(self._step, what, str(owner)))

    def _check_thread(self) -> None:
        """One thread owns the pool: another one would break books and bytes alike."""
        current = threading.get_ident()
        if self._thread is None:
            self._thread = current
        assert self._thread == current, "the pool is used by two threads"

    def _fault(self, what: str, *blocks: int) -> None:
        self._num_faults += 1
        error = CorruptKV(what, [self.story(block) for block in blocks])
        self._report(error)
        if self.checks.on_fault == "raise":
            raise error
