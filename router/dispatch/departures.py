"""Workers that drain, and the capsules on them that are made again elsewhere before they leave."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from mallee.protocol.ids import CapsuleId, RequestId, WorkerId

MAX_REBUILDS: Final = 4  # capsules of one worker that are made again at a time


class Departure:
    """One worker that drains: its capsules that wait to be made again, and those under way."""

    __slots__ = ("under_way", "waiting", "worker")

    def __init__(self, worker: WorkerId, capsules: Iterable[CapsuleId]) -> None:
        self.worker = worker
        self.waiting = deque(capsules)
        self.under_way: dict[RequestId, CapsuleId] = {}  # by the request that makes it

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.under_way
