"""One gateway of a replay: routes calls, sends them to workers, hears what comes of them.

What `actors.gateway.gateway` does live, in virtual time: the same router, the same commands, the same order.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from mallee.mocker.replay.calls import Call, Kept, Library, Order, Part
from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.commands import again_name, command_of, fork_of
from mallee.mocker.replay.fleet import Fleet, Worker
from mallee.mocker.replay.waiting import Waiting
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.errors import CapsuleAbandoned, CapsulesFull, NoWorker, UnknownCapsule
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import (
    ALL_BRANCHES,
    Command,
    Prefill,
    Release,
)
from mallee.router.placement.fanouts import Part as Placed
from mallee.router.placement.placer import Placement
from mallee.router.router import Router
from mallee.traces.workload import NO_PARENT

MAX_PARTS: Final = 64
_CAPSULE_GONE: Final = (UnknownCapsule.code, CapsuleAbandoned.code)


class Book(Protocol):
    """Who keeps count of what becomes of calls."""

    def first(self, part: Part, news: CountedUpdate) -> None:
        """The first news of a part: what of its prompt was there already."""
        ...

    def tokens(self, part: Part, news: CountedUpdate, ended: float) -> None:
        """A branch drew its first token at `ended`, or has ended with so many that were not told yet."""
        ...

    def over(self, call: Call) -> None:
        """The call has ended, well or not."""
        ...


class Moving(Protocol):
    """Who carries KV from worker to worker."""

    def send(self, worker: Worker, command: Prefill, *, num_tokens: int, missing: int) -> float:
        """`command` goes to `worker` once `missing` of its `num_tokens` tokens are there: when that is."""
        ...


class Gateway:
    """Belongs to one simulation. `routers` by the role of the workers that each knows."""

    def __init__(
        self,
        name: str,
        routers: Mapping[str, Router],
        *,
        clock: Clock,
        fleet: Fleet,
        library: Library,
        book: Book,
        parts: dict[str, Part],
        has_forks: bool,
        moves: Moving | None = None,
        on_booked: Callable[["Gateway"], None] | None = None,
    ) -> None:
        """`parts`: those under way, by request, of all gateways. `on_booked`: others must be told.

        With `moves` fan-outs may go to workers that pull their prefix.
        """
        self.name = name
        self.routers = routers
        self.router = routers["both"]
        self.waiting = Waiting(clock, self._place)
        self._clock = clock
        self._fleet = fleet
        self._library = library
        self._book = book
        self._parts = parts
        self._moves = moves
        self._has_forks = has_forks
        self._on_booked = on_booked
        self.num_rebuilt = 0  # forks whose capsule was gone
        self.num_retries = 0  # parts whose worker was lost

    def router_for(self, worker: Worker) -> Router:
        """The router that knows `worker`."""
        return self.routers.get(worker.role, self.router)

    # Calls

    def begin(self, call: Call, max_tokens: int) -> None:
        """A client asks: route it and send it off, or let it wait for room."""
        request = call.request
        if not max_tokens:
            call.left = 1  # a prompt alone has no branches
        order = Order(call, call.left, self._library.limits(max_tokens))
        if request.parent == NO_PARENT:
            text = self._library.prompt(request.ids, request.input_tokens)
            call.prompt_tokens = text.num_tokens
            order.bring(text)
        else:
            left = self._library.parent(request)
            call.prompt_tokens = left.num_tokens + request.input_tokens
            call.suffixes = self._library.suffixes(request)
            call.raws += call.suffixes
            order.is_fork = True
            if left.kept is not None:
                order.capsule = left.kept.capsule
            else:
                self._rebuild(order)
            size = self.router.config.block_size
            call.shared = (left.num_tokens - 1) // size * size
        self._try(order)

    def _try(self, order: Order) -> None:
        self.waiting.try_now(order, self._lane(order) if order.capsule is not None else None)

    def _lane(self, order: Order) -> WorkerId | None:
        """The one worker that has its capsule; if none is known to, it brings its text."""
        assert order.capsule is not None
        try:
            return self.router.capsule(order.capsule).worker
        except UnknownCapsule:
            self._rebuild(order)
            return None

    def _rebuild(self, order: Order) -> None:
        """Its capsule is gone: it brings its parent's text, to be computed again and then forked."""
        self.num_rebuilt += 1
        order.bring(self._library.before(order.call.request))
        order.is_fork = True

    def poke(self, worker: WorkerId | None) -> None:
        """`worker` may have room now: who waits is tried again."""
        if self.waiting.is_empty:
            return
        if self.waiting.stranded and self.router.has_workers:
            stranded, self.waiting.stranded = self.waiting.stranded, []
            for order in stranded:
                self._try(order)
        self.waiting.poke(worker)

    # Routing

    def _place(self, order: Order) -> None:
        """Book its rows, as one part or several, and send them. Raises Saturated."""
        try:
            if order.is_fork or order.rows > 1:
                self._place_many(order)
            else:
                self._place_one(order)
        except UnknownCapsule:
            self._rebuild(order)
            self._place(order)
        except NoWorker as error:
            if order.capsule is not None:
                self._forget(order.capsule)
                self._rebuild(order)
                self._place(order)
            elif not self.router.has_workers:
                self.waiting.stranded.append(order)
            else:
                order.call.error, order.call.why = error.code, error.message
                self._clock.at(self._clock.now, self._give_up, order)

    def _give_up(self, order: Order) -> None:
        order.call.left -= order.rows
        if not order.call.left:
            self._book.over(order.call)

    def _place_one(self, order: Order) -> None:
        text, name = order.text, self._part_name(order.call, 0)
        assert text is not None, "an order without a capsule has its whole text"
        placement = self.router.route(
            name,
            text.hashes,
            prompt_tokens=text.num_tokens,
            max_tokens=order.max_tokens,
            may_wait=True,
        )
        order.call.num_parts += 1
        self._send(order, name, placement, range(1), "stay")

    def _place_many(self, order: Order) -> None:
        call, capsule = order.call, order.capsule
        names = [self._part_name(call, k) for k in range(min(order.rows, MAX_PARTS))]
        suffix_tokens = call.request.input_tokens if order.is_fork else 0
        if capsule is not None:
            prompt_tokens = self.router.capsule(capsule).boundary
        else:
            assert order.text is not None, "an order without a capsule has its text"
            prompt_tokens = order.text.num_tokens
        placed: tuple[Placed, ...] = self.router.route_fanout(
            names,
            order.hashes,
            prompt_tokens=prompt_tokens,
            max_tokens=order.max_tokens,
            suffix_tokens=[suffix_tokens] * order.rows,
            capsule=capsule,
            can_recompute=True,
            can_migrate=self._moves is not None,
            may_wait=True,
        )
        call.num_parts += len(placed)
        for name, each in zip(names, placed, strict=False):
            self._send(order, name, each.placement, each.rows, each.how)

    @staticmethod
    def _part_name(call: Call, k: int) -> RequestId:
        k += call.num_parts
        return RequestId(f"{call.name}-{k}" if k else call.name)

    def _send(
        self, order: Order, name: RequestId, placement: Placement, rows: range, how: str
    ) -> None:
        call, worker = order.call, self._fleet.lives[placement.incarnation]
        part = Part(order, name, worker, rows)
        part.how = "recompute" if order.is_fork and order.capsule is None else how
        if call.worker < 0:
            call.worker = worker.index
            call.routed = self._clock.now
        self._parts[name] = worker.parts[name] = part
        self._dispatch(part, command_of(part, self._library))
        if self._on_booked is not None:
            self._on_booked(self)

    def _dispatch(self, part: Part, command: Command) -> None:
        """`command` goes to the part's worker; a prefix that is to be moved there moves first."""
        if isinstance(command, Prefill) and command.request != part.name:
            self._parts[command.request] = part.worker.parts[command.request] = part
        if part.how == "migrate" and self._moves is not None and isinstance(command, Prefill):
            num_tokens = self._library.parent(part.call.request).num_tokens
            held = part.worker.engine.held_blocks(self._library.hashes(command.tokens))
            missing = max(0, num_tokens - held * self.router.config.block_size)
            self._moves.send(part.worker, command, num_tokens=num_tokens, missing=missing)
        else:
            self._fleet.send(part.worker, command)

    # What workers say

    def hear(self, part: Part, news: CountedUpdate, ended: float) -> None:
        """`news` of `part`, told at `ended`: a first token, or an end."""
        if news.request != part.name:
            self._prefilled_again(part, news)
            return
        if news.error is not None:
            self._failed(part, *news.error[:2])
            return
        if not part.is_seen:
            part.is_seen = True
            self.router.first_token(part.name)
            if part.how == "stay":
                self.router.observe_hit(part.name, news.cached_tokens)
            self._book.first(part, news)
        self._book.tokens(part, news, ended)
        if news.finish is not None:
            if news.capsule is not None:
                self._learn(part, news.capsule, news)
            part.left -= 1
            if not part.left or news.branch == ALL_BRANCHES:
                self._ended(part)

    def _learn(self, part: Part, capsule: str, news: CountedUpdate) -> None:
        """`part` left a capsule. One that was asked for goes at once, if nobody will fork it."""
        call, worker = part.call, part.worker
        if not part.order.max_tokens and not call.request.num_children:
            self._fleet.send(worker, Release(capsule))
        elif self._has_forks:
            key = CapsuleId(capsule)
            if not part.rows.start + news.branch:
                call.kept = Kept(key, news.boundary, worker)
            self.router.learn_capsule(key, worker.name, news.boundary, part.order.hashes)

    def _prefilled_again(self, part: Part, news: CountedUpdate) -> None:
        """News of a capsule that is computed anew for the fork of a part: fork it once it is there."""
        if news.finish is None:
            return
        del self._parts[news.request], part.worker.parts[news.request]
        if news.capsule is None:
            self._failed(part, *(("cancelled", "") if news.error is None else news.error[:2]))
            return
        part.worker.engine.unsupply(news.request)
        if part.how == "migrate":  # moved, not computed
            cached_tokens = news.cached_tokens + news.prefill_tokens
            news = news._replace(cached_tokens=cached_tokens, prefill_tokens=0)
        part.call.computed += news.prefill_tokens
        self._book.first(part, news)
        part.is_seen = True
        self.router.first_token(part.name)
        self._fleet.send(part.worker, fork_of(part, news.capsule))
        self._fleet.send(part.worker, Release(news.capsule))

    def _ended(self, part: Part) -> None:
        self._close(part)
        call = part.call
        call.left -= len(part.rows)
        if not call.left:
            self._book.over(call)
        self.poke(part.worker.name)

    def _close(self, part: Part) -> None:
        name = part.name
        self.router.free(name)
        for key in (name, again_name(part)) if part.how != "stay" else (name,):
            self._parts.pop(key, None)
            part.worker.parts.pop(key, None)
            part.worker.engine.unsupply(key)
        if self._on_booked is not None:
            self._on_booked(self)

    # What goes wrong

    def _failed(self, part: Part, code: str, why: str) -> None:
        """A worker refused it: without its capsule it is done again, else it has failed."""
        capsule = part.order.capsule
        if code in _CAPSULE_GONE and capsule is not None:
            self._forget(capsule)
            self._again(part)
            return
        if code == CapsulesFull.code and part.order.is_fork and part.how != "stay":
            self._again(part, is_whole=True)
            return
        part.call.error, part.call.why = code, why
        self._ended(part)

    def lost(self, part: Part) -> None:
        """Its worker is gone: what is left of it is done elsewhere."""
        self.num_retries += 1
        part.call.retries += 1
        self._again(part)

    def _again(self, part: Part, *, is_whole: bool = False) -> None:
        """A new order for the rows that have not ended. One row goes on after its last token.

        A fork that `is_whole` brings all its text, because no worker may keep its parent's.
        """
        self._close(part)
        call, old = part.call, part.order
        call.left -= len(part.rows) - part.left
        told = part.told if len(part.rows) == 1 else 0
        if len(part.rows) > 1:
            call.output -= sum(part.rows_told.values())
        order = Order(call, part.left, self._library.limits(old.max_tokens - told))
        order.last = part.last
        if old.is_fork and not told and not is_whole:
            order.is_fork, order.capsule = True, old.capsule
            if old.capsule is None:
                self._rebuild(order)
            # Else, if it is gone, `_lane` or `_place` finds out.
        else:
            self.num_rebuilt += old.is_fork
            order.bring(self._library.whole(call.request, told))
        self._try(order)

    def _forget(self, capsule: CapsuleId) -> None:
        for router in self.routers.values():
            router.forget_capsule(capsule)
