"""Predicted contents of workers whose cache events don't reach us, by our own routing.

Used for workers that send none (approximate mode) and while the broker is down. A prompt sent to a worker
counts as held for `ttl_s`; beyond the worker's own capacity its oldest prompts are forgotten first.
"""

from collections import deque
from typing import NamedTuple

from mallee.protocol.hashing import Hashes
from mallee.router.index.kernels.layout import Counts
from mallee.router.load.paths import STRIDE, CountedPaths


class _Prompt(NamedTuple):
    expires_at: float
    waypoints: Hashes
    num_blocks: int


class Predictions:
    """Prompts that workers 0 .. num_workers - 1 probably hold."""

    def __init__(self, num_workers: int, *, ttl_s: float, stride: int = STRIDE) -> None:
        self._paths = CountedPaths(num_workers, stride=stride)
        self._prompts: list[deque[_Prompt]] = [deque() for _ in range(num_workers)]
        self._num_blocks = [0] * num_workers
        self.busy: set[int] = set()  # workers with prompts
        self._ttl_s = ttl_s

    def add(
        self, worker: int, waypoints: Hashes, num_blocks: int, *, capacity: int, now: float
    ) -> None:
        """Predict that `worker`, which has `capacity` blocks, holds this path from now on, or soon."""
        if not num_blocks or num_blocks > capacity:
            return
        self._num_blocks[worker] += self._paths.use(worker, waypoints, num_blocks)
        self._prompts[worker].append(_Prompt(now + self._ttl_s, waypoints, num_blocks))
        self.busy.add(worker)
        while self._num_blocks[worker] > capacity:
            self._forget_oldest(worker)

    def match_into(self, waypoints: Hashes, num_blocks: int, counts: Counts) -> None:
        """Leading blocks that each worker probably holds, in `counts` [num_workers]."""
        self._paths.match_into(waypoints, num_blocks, counts)

    def clear(self, worker: int) -> None:
        """Forget all predictions for `worker`."""
        while self._prompts[worker]:
            self._forget_oldest(worker)

    def expire(self, now: float) -> None:
        """Forget prompts older than `ttl_s`."""
        for worker in list(self.busy):
            while self._prompts[worker] and self._prompts[worker][0].expires_at <= now:
                self._forget_oldest(worker)

    def work(self) -> bool:
        """Sweep and rehash a little. True: there is more to do."""
        return self._paths.work()

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self._prompts))

    def check(self) -> None:
        """Raises AssertionError unless what is counted follows from the prompts."""
        self._paths.check()
        stride = self._paths.stride
        for worker, prompts in enumerate(self._prompts):
            sizes = {
                waypoint: min(stride, prompt.num_blocks - i * stride)
                for prompt in prompts
                for i, waypoint in enumerate(prompt.waypoints.tolist())
            }
            assert sum(sizes.values()) == self._num_blocks[worker], f"blocks of worker {worker}"
            assert bool(prompts) == (worker in self.busy), f"worker {worker} is misfiled"

    def _forget_oldest(self, worker: int) -> None:
        prompt = self._prompts[worker].popleft()
        self._num_blocks[worker] -= self._paths.leave(worker, prompt.waypoints, prompt.num_blocks)
        if not self._prompts[worker]:
            self.busy.discard(worker)
