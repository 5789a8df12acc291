"""Empty side groups of a model."""

from collections.abc import Sequence

from mallee.protocol.errors import ConfigError
from mallee.protocol.model import GroupSpec
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.sides.group import Offload, SideGroup, row_spans
from mallee.worker.kv.sides.states import EVERY_BLOCKS, StateGroup
from mallee.worker.kv.sides.windows import WindowGroup


def make_sides(
    groups: Sequence[GroupSpec],
    num_blocks: int,
    block_size: int,
    journal: Journal,
    offload: Offload | None = None,
) -> list[SideGroup]:
    """Each of `groups` but the first, which is the full one and has `num_blocks`.

    `offload` takes their rows.
    """
    sides: list[SideGroup] = []
    for spec, span in zip(groups[1:], row_spans(groups, num_blocks, block_size), strict=True):
        pool = BlockPool(spec.num_blocks(num_blocks, block_size))
        match spec.kind:
            case "window":
                assert spec.window is not None, "a window of no size"
                sides.append(
                    WindowGroup(
                        spec.window,
                        pool,
                        span,
                        block_size=block_size,
                        journal=journal,
                        offload=offload,
                    )
                )
            case "state":
                sides.append(
                    StateGroup(
                        pool,
                        span,
                        block_size=block_size,
                        journal=journal,
                        offload=offload,
                        every_blocks=max(EVERY_BLOCKS, 2 * num_blocks // pool.num_blocks),
                    )
                )
            case "full":
                raise ConfigError("a second group of layers with full attention: make them one")
    return sides


def check_sides(
    sides: Sequence[SideGroup], num_blocks: int, max_step_tokens: int, size: int
) -> None:
    """Raises ConfigError if one of `sides`, beside `num_blocks`, can't hold a step's work."""
    for side in sides:
        own, needed = side.pool.num_blocks, side.least_blocks(-(-max_step_tokens // size))
        if own < min(needed, num_blocks):
            raise ConfigError(
                f"max_step_tokens={max_step_tokens} needs {needed} KV blocks in layer group"
                f" {side.span.group}, which has {own} beside {num_blocks} of the full one; lower it, or"
                " start the worker with more blocks"
            )
