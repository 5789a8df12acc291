"""The cache of each worker by tier, as rows of text."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.text import Text

from mallee.cli.remote.fleet import Sample, Worker, bar

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
    counts = [
        sample.metrics.by(f"mallee_worker_{name}", "worker")
        for name in ("live_blocks", "cached_blocks", "cached_tokens_total", "prefill_tokens_total")
    ]
    yield ALL, _row(ALL, sample.workers, [sum(counted.values()) for counted in counts])
    for each in sample.workers:
        yield each.worker, _row(each.worker, [each], [c.get(each.worker) for c in counts])


def _row(name: str, workers: Sequence[Worker], counts: Sequence[float | None]) -> tuple[Text, ...]:
    """`counts`: None of a worker beyond those that have series of their own."""
    live, cached, found, computed = counts
    blocks = sum(each.num_blocks for each in workers)
    uses = [each.tiers for each in workers if each.tiers is not None]
    below = [sum(use.blocks.get(tier, 0) for use in uses) for tier in ("host", "disk")]
    moves = [
        sum(use.moved_blocks.get(move, 0) for use in uses for move in kinds)
        for kinds in (_DOWN, _FETCHES)
    ]
    dropped = sum(use.dropped_blocks for use in uses)
    figures = (blocks, live, cached, *below, *moves, dropped)
    prompts = (found or 0.0) + (computed or 0.0)
    return (
        Text(name, style="bold" if name == ALL else ""),
        Text("-") if live is None else bar(live / max(1, blocks)),
        *(Text("-" if figure is None else f"{figure:,.0f}") for figure in figures),
        Text(f"{(found or 0.0) / prompts:.0%}" if prompts else "-"),
    )
