"""Dispatches that wait for a worker with room, and the order in which they are tried.

Nothing happens between choosing, booking and sending: a dispatch is placed in the very call in which
its turn has come. A dispatch that can go to one worker alone waits in that worker's lane, all others
in the common one; `router.dispatch.queue` has the order within a lane and the limits over all. In the common
one, requests at other gateways have their turns (`router.dispatch.elsewhere`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from mallee.protocol.errors import DeadlineExceeded, MalleeError, NoWorker, Saturated, WorkerLost
from mallee.protocol.ids import WorkerId
from mallee.router.dispatch.elsewhere import Elsewhere
from mallee.router.dispatch.fairness import Ticket
from mallee.router.dispatch.queue import HELD, AdmissionConfig, AdmissionQueue
from mallee.router.dispatch.shards import Dispatch
from mallee.router.sync.outbox import Outbox

# Room may come unannounced: another gateway's request ended, or a worker reported less load.
RECHECK_S: Final = 0.02
# Per call, so that a loop has others' turns in between. A dispatch of several rows that is refused
# doesn't hold up those behind it, up to a point.
MAX_PLACED: Final = 16
MAX_REFUSED: Final = 4
# Dispatches that are placed before a refused one of many rows goes in beyond the limit.
MAX_PASSED: Final = 16
_MOVED: Final = (
    1 << 40
)  # priority of a dispatch whose worker was lost: its client waits in mid-answer


class Waiting:
    """The waiting dispatches of one dispatcher.

    `place(dispatch, may_wait)` places one and returns its cost in tokens; None, Saturated and WorkerLost mean
    that it goes on waiting (in `dispatch.lane`), and so does NoWorker while no worker is there. In the lane
    HELD it is not tried until it is cancelled and added again.
    `has_room()`: whether any worker takes as much as one row.
    `placed(dispatch)` and `failed(dispatch, error)` are called as one leaves. `recheck_s` None: all
    room is announced. `outbox` tells the other gateways who waits.
    """

    def __init__(
        self,
        config: AdmissionConfig,
        *,
        place: Callable[[Dispatch, bool], float | None],
        placed: Callable[[Dispatch], None],
        failed: Callable[[Dispatch, MalleeError], None],
        has_workers: Callable[[], bool],
        has_room: Callable[[], bool],
        clock: Callable[[], float],
        recheck_s: float | None = RECHECK_S,
        outbox: Outbox | None = None,
    ) -> None:
        self.queue = AdmissionQueue(config, lambda *told: self.elsewhere.tell(*told))
        self.elsewhere = Elsewhere(self.queue, outbox)
        self._place = place
        self._placed = placed
        self._failed = failed
        self._has_workers = has_workers
        self._has_room = has_room
        self._clock = clock
        self._recheck_s = recheck_s
        self._woken: dict[WorkerId | None, None] = {}  # lanes to look at, in order
        self._is_common_next = True
        self._num_placed = 0
        self._placed_on: dict[WorkerId, int] = {}  # since dispatches wait
        self._refused_at: dict[Dispatch, int] = {}  # placed by then where it could have gone
        self._num_rechecked = 0  # lanes
        self._recheck_at = 0.0

    def __len__(self) -> int:
        return len(self.queue)

    def is_free(self, lane: WorkerId | None) -> bool:
        """Whether a dispatch that comes now has none before it."""
        if lane is None and self.elsewhere.claims and self.queue.config.max_waiting:
            return False  # where none may wait, all would be refused beside free rows
        if not self.queue.tickets:
            return True
        return not self.queue.waiting(None) and not self.queue.waiting(lane)

    def add(self, dispatch: Dispatch, cost: float) -> None:
        """Let it wait; `cost` in tokens, as estimated. Raises TenantQueueFull, Overloaded.

        If it has waited before, its time goes on, and it is not refused.
        """
        now, terms = self._clock(), dispatch.job.terms
        is_new = dispatch.queued_at is None
        since = now if dispatch.queued_at is None else dispatch.queued_at
        deadline, priority = None, terms.priority
        if dispatch.is_moved:
            priority = _MOVED
        elif terms.deadline_s is not None:
            deadline = since + terms.deadline_s
        if not self.queue.tickets:
            self._recheck_at = now + (self._recheck_s or 0.0)
            self.elsewhere.yields_until = math.inf  # that was for those that waited before
        place = (priority, deadline, dispatch.lane)
        ticket = Ticket(dispatch, terms.tenant, since, cost, *place)
        self.queue.offer(ticket, is_limited=is_new and not dispatch.is_moved)
        dispatch.queued_at = since
        if dispatch.lane is not None or self.elsewhere.claims:
            self.wake(dispatch.lane)  # others wait, but perhaps not for this worker, or elsewhere

    def cancel(self, dispatch: Dispatch) -> None:
        self.queue.cancel(dispatch)
        self._refused_at.pop(dispatch, None)

    def note(self, worker: WorkerId) -> None:
        """Count a dispatch that was placed on `worker` while others wait."""
        self._num_placed += 1
        self._placed_on[worker] = self._placed_on.get(worker, 0) + 1

    def wake_all(self) -> None:
        """Have what waits for any worker tried."""
        for lane in self.queue.lanes():
            self.wake(lane)

    def wake(self, worker: WorkerId | None = None) -> None:
        """Have what waits for `worker` tried, which may have room or be gone; None: for a new one."""
        if not self.queue.tickets:
            return
        self._woken[None] = None
        if worker is not None and worker != HELD and self.queue.waiting(worker):
            self._woken[worker] = None

    def on_heard(self) -> None:
        """Other gateways said what they booked and freed: take the room that is left to this one."""
        if self.queue.common and self.elsewhere.is_turn() and self._has_room():
            self.wake(None)
            self.pump()

    def pump(self) -> None:
        """Try the next dispatches of the woken lanes by turns, a bounded number of them."""
        if not self._woken:
            return
        self._expire()
        for _ in range(MAX_PLACED):
            if not self._woken:
                break
            lane = self._next_lane()
            if not self._try_lane(lane):
                self._woken.pop(lane, None)
        if not self.queue.tickets:
            self._woken.clear()
            self._placed_on.clear()
            self._refused_at.clear()

    def on_time(self) -> None:
        """End what waited too long, look for room that came unannounced."""
        if not self.queue.tickets:
            return
        now = self._clock()
        if self._recheck_s is not None and now >= self._recheck_at:
            self._recheck_at = now + self._recheck_s
            for lane in self._some_lanes():
                self.wake(lane)
        if now >= self.elsewhere.yields_until:
            self.wake(None)
        self._expire()
        self.pump()

    def next_time(self) -> float | None:
        """The time to call `on_time` next; None: not before something else happens."""
        if not self.queue.tickets:
            return None
        if self._woken:
            return self._clock()
        deadline = self.queue.next_deadline()
        if deadline is None:
            return None
        has_recheck = self._recheck_s is not None and not self._are_all_held
        recheck_at = self._recheck_at if has_recheck else deadline
        return min(deadline, recheck_at, self.elsewhere.yields_until)

    @property
    def _are_all_held(self) -> bool:
        return len(self.queue) == self.queue.waiting(HELD)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of the queue."""
        self.queue.check()
        self.elsewhere.check()

    def _some_lanes(self) -> list[WorkerId | None]:
        lanes = self.queue.lanes()
        some = [
            lanes[(self._num_rechecked + i) % len(lanes)]
            for i in range(min(len(lanes), MAX_PLACED))
        ]
        self._num_rechecked += MAX_PLACED
        return some

    def _next_lane(self) -> WorkerId | None:
        """The common lane and the workers' lanes in turn, so that neither starves the other."""
        own = next((lane for lane in self._woken if lane is not None), None)
        if None not in self._woken or (own is not None and not self._is_common_next):
            self._is_common_next = True
            assert own is not None
            self._woken[own] = self._woken.pop(own)  # behind the other workers'
            return own
        self._is_common_next = False
        return None

    def _try_lane(self, lane: WorkerId | None) -> bool:
        """Whether a dispatch has left this lane, so that the next one may; the others stay in line."""
        now = self._clock()
        if lane is None and self.elsewhere.must_yield(now, self._has_room):
            return False
        refused: list[Ticket] = []
        is_done = False
        while not is_done and len(refused) < (MAX_REFUSED if lane is None else 1):
            ticket = self.queue.pop(now, lane)
            if ticket is None:
                break
            cost = self._try(ticket)
            if cost is None:
                refused.append(ticket)
                if not self._has_room():
                    break  # those behind it need no less than a row
            else:
                is_done = True
                self.queue.settle(ticket, cost, now)
        for ticket in reversed(refused):
            self.queue.push_back(ticket)
        for ticket in refused:
            is_done |= self._change_lane(ticket)
        return is_done

    def _change_lane(self, ticket: Ticket) -> bool:
        """Have a refused dispatch wait where it can go now: its capsule moved, or went with its worker."""
        dispatch = ticket.key
        assert isinstance(dispatch, Dispatch)
        if dispatch.lane == ticket.worker:
            return False
        self.queue.cancel(dispatch)
        self.queue.offer(replace(ticket, worker=dispatch.lane), is_limited=False)
        self.wake(dispatch.lane)
        return True

    def _try(self, ticket: Ticket) -> float | None:
        """The ticket's cost, if it is dealt with: placed or failed."""
        dispatch = ticket.key
        assert isinstance(dispatch, Dispatch)
        try:
            cost = self._place(dispatch, not self._is_overdue(dispatch))
        except (Saturated, WorkerLost):
            return None
        except MalleeError as error:
            if isinstance(error, NoWorker) and not self._has_workers():
                return None
            self._refused_at.pop(dispatch, None)
            self._failed(dispatch, error)
            return 0.0
        if cost is not None:
            self._refused_at.pop(dispatch, None)
            self._placed(dispatch)
        return cost

    def _is_overdue(self, dispatch: Dispatch) -> bool:
        """Whether too many have gone where it could have gone, since its turn came.

        Rows come free one by one, and smaller requests take them; one of many rows would wait
        for ever. Then it goes in beyond the limit and waits for its rows in the worker.
        """
        worker = dispatch.lane
        placed = self._num_placed if worker is None else self._placed_on.get(worker, 0)
        refused_at = self._refused_at.setdefault(dispatch, placed)
        return len(dispatch.branches) > 1 and placed - refused_at >= MAX_PASSED

    def _expire(self) -> None:
        now = self._clock()
        while (ticket := self.queue.expire(now)) is not None:
            dispatch = ticket.key
            assert isinstance(dispatch, Dispatch)
            self._refused_at.pop(dispatch, None)
            is_own = ticket.deadline is not None and ticket.deadline <= now
            retry_s = self.queue.retry_after_s(now)
            capsule = dispatch.job.capsule if ticket.worker == HELD else None
            waited_s = now - ticket.arrival
            error = DeadlineExceeded(waited_s, retry_s, is_own=is_own, capsule=capsule)
            self._failed(dispatch, error)
