"""Sizes of the router's benches, and routers to begin with."""

from collections.abc import Callable
from typing import NamedTuple

from bench.router import traffic
from mallee.router.config import RouterConfig
from mallee.router.router import Router


class Scale(NamedTuple):
    """Sizes of one run."""

    workers: int = 1000
    blocks_per_worker: int = 2000
    shared_chain: int = 4000  # of the memory bench
    join_blocks: int = 10_000  # a worker's, when a replica joins
    samples: int = 200  # of the cheapest case, a round
    rounds: int = 7
    prompts: int = 2000
    mixed_s: float = 3.0


QUICK = Scale(
    workers=20,
    blocks_per_worker=200,
    shared_chain=100,
    join_blocks=50,
    samples=20,
    rounds=2,
    prompts=40,
    mixed_s=0.1,
)


def new_router(workers: int, clock: Callable[[], float] = lambda: 0.0) -> Router:
    """A router that knows `workers` workers, which hold nothing."""
    router = Router(RouterConfig(max_workers=workers, lease_s=1e6), clock=clock)
    for worker in range(workers):
        router.on_lease(traffic.lease(worker))
    return router


def keep_house(router: Router) -> None:
    """Do all work that the router put off."""
    work = getattr(router, "work", None)
    while work is not None and work():
        pass
