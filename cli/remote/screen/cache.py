"""The cache of each worker by tier, as rows of text."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.text import Text

from mallee.cli.remote.fleet import Sample, bar
from mallee.protocol.api.operator import Worker

ALL: Final = "all"
COLUMNS: Final = (
    *("worker", "device in use", "blocks", "live", "cached", "host", "disk", "moved down"),
    *("fetched", "dropped", "found"),
)
NUMBERS: Final = frozenset(COLUMNS[2:])
_DOWN: Final = ("offload", "park", "spill")
_FETCHES: Final = ("fetch_host", "fetch_disk", "fetch_peer")


def rows(sample: Sample) -> Iterator[tuple[str, tuple[Text, ...]]]:
    """A key and the cells, of COLUMNS: all workers together, then each.

    Blocks: of the device `live` are in use, `cached` are kept for prefix hits; `moved down` and `fetched` are
    moves so far. `found` is the share of prompt tokens whose KV was there.
    """
    yield ALL, _row(ALL, sample.workers)
    for each in sample.workers:
        yield each.worker, _row(each.worker, [each])


def _row(name: str, workers: Sequence[Worker]) -> tuple[Text, ...]:
    blocks = sum(each.num_blocks for each in workers)
    uses = [each.use for each in workers if each.use is not None]
    live, cached = (
        sum(counts) if uses else None
        for counts in ([use.live_blocks for use in uses], [use.cached_blocks for use in uses])
    )
    tiers = [each.tiers for each in workers if each.tiers is not None]
    below = [sum(use.blocks.get(tier, 0) for use in tiers) for tier in ("host", "disk")]
    moves = [
        sum(use.moved_blocks.get(move, 0) for use in tiers for move in kinds)
        for kinds in (_DOWN, _FETCHES)
    ]
    dropped = sum(use.dropped_blocks for use in tiers)
    figures = (blocks, live, cached, *below, *moves, dropped)
    found = sum(use.cached_tokens for use in uses)
    prompts = found + sum(use.prefill_tokens for use in uses)
    return (
        Text(name, style="bold" if name == ALL else ""),
        Text("-") if live is None else bar(live / max(1, blocks)),
        *(Text("-" if figure is None else f"{figure:,.0f}") for figure in figures),
        Text(f"{found / prompts:.0%}" if prompts else "-"),
    )
