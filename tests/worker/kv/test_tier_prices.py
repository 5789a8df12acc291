"""K15: whether blocks are fetched or computed follows from what moves and prompts took."""

import numpy as np
import pytest

from mallee.worker.kv.journal import Journal
from mallee.worker.kv.tiers.lower import Found, LowerTiers
from mallee.worker.kv.tiers.moves import DISK, HOST, Copier
from mallee.worker.kv.tiers.prices import LATENCY_S, MeasuredPrices
from mallee.worker.kv.watch import Rows

NBYTES = 1000


class Memory:
    """Blocks of NBYTES, of which nothing is wanted."""

    block_nbytes = NBYTES
    num_blocks = 8

    def read(self, blocks: object, rows: Rows) -> None: ...

    def write(self, blocks: object, rows: Rows) -> None: ...


def tiers(prices: MeasuredPrices) -> LowerTiers:
    arena = np.zeros((8, NBYTES), np.uint8)
    copier = Copier(Memory(), arena, None, lambda: 0.0)  # type: ignore[arg-type]
    return LowerTiers(Journal(), copier, prices=prices)


def test_a_tier_that_was_never_measured_is_tried() -> None:
    """K15, part: or a guess that is too low would keep it from ever being measured."""
    prices = MeasuredPrices(NBYTES)
    prices.computed(100, 100 * 1e-4)
    assert tiers(prices).is_cheaper([Found(HOST, 10)], 40)
    assert prices.fetch_s(DISK, 10) == LATENCY_S[DISK]
    prices.moved(HOST, 10, LATENCY_S[HOST] + 10 * NBYTES * 1e-6)
    assert prices.fetch_s(HOST, 10) == pytest.approx(LATENCY_S[HOST] + 10 * NBYTES * 1e-6)
    assert not tiers(prices).is_cheaper([Found(HOST, 10)], 40)


def test_a_tier_that_was_slow_is_tried_again() -> None:
    """K15, part: one fetch in 64 is done although it is dearer; once it was quick, all are."""
    prices = MeasuredPrices(NBYTES)
    prices.computed(100, 100 * 1e-4)
    prices.moved(HOST, 10, 1.0)
    lower, asked = tiers(prices), [Found(HOST, 10)]
    tried = [lower.is_cheaper(asked, 40) for _ in range(128)]
    assert [i for i, is_done in enumerate(tried) if is_done] == [63, 127]
    assert lower.stats().num_declined == 126 * 10
    for _ in range(40):
        prices.moved(HOST, 10, 1e-4)
    assert all(lower.is_cheaper(asked, 40) for _ in range(10))
