"""The gateway of a replay: routes requests, sends them to workers, takes their updates.

Router, admission queue and commands are those of the live gateway (`actors.gateway`); the state machine
between them is not. A request whose worker is lost is placed again here (live its stream ends with an
error); time limits, the order of what waits and the observed hits differ too.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.fleet.transfers import Transfers
from mallee.mocker.replay.fleet.workers import Fleet, Worker
from mallee.mocker.replay.gateway.commands import again_name, command_of, fork_of
from mallee.mocker.replay.gateway.prompts import PromptTexts
from mallee.mocker.replay.gateway.requests import CapsuleRef, Dispatch, RequestState, Shard
from mallee.mocker.replay.gateway.waiting import WaitingQueue
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.errors import (
    CapsuleAbandoned,
    CapsulesFull,
    KVMemoryExceeded,
    NoWorker,
    UnknownCapsule,
)
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import (
    ALL_BRANCHES,
    Command,
    Prefill,
    Release,
)
from mallee.router.placement.fanouts import Part
from mallee.router.placement.placer import Placement
from mallee.router.router import Router
from mallee.traces.workload import NO_PARENT

MAX_SHARDS: Final = 64
_CAPSULE_GONE: Final = (UnknownCapsule.code, CapsuleAbandoned.code)


class Recorder(Protocol):
    """Records the course of requests."""

    def first(self, shard: Shard, update: CountedUpdate) -> None:
        """Take the first update of a shard, which has the number of cached tokens."""
        ...

    def tokens(self, shard: Shard, update: CountedUpdate, ended: float) -> None:
        """Take a branch's first token, drawn at `ended`, or the tokens up to its end."""
        ...

    def over(self, state: RequestState) -> None:
        """Take the end of a request, well or not."""
        ...


class Gateway:
    """One gateway of one simulation. `routers` by the role of the workers that each knows."""

    def __init__(
        self,
        name: str,
        routers: Mapping[str, Router],
        *,
        clock: Clock,
        fleet: Fleet,
        prompts: PromptTexts,
        recorder: Recorder,
        shards: dict[str, Shard],
        has_forks: bool,
        transfers: Transfers | None = None,
        on_booked: Callable[["Gateway"], None] | None = None,
    ) -> None:
        """`shards`: those of all gateways that are under way, by request.

        `on_booked` is called after each change of a booking.

        With `transfers` fan-outs may go to workers that pull their prefix.
        """
        self.name = name
        self.routers = routers
        self.router = routers["both"]
        self.waiting = WaitingQueue(clock, self._place)
        self._clock = clock
        self._fleet = fleet
        self._prompts = prompts
        self._recorder = recorder
        self._shards = shards
        self._transfers = transfers
        self._has_forks = has_forks
        self._on_booked = on_booked
        self.num_rebuilt = 0  # forks whose capsule was gone
        self.num_retries = 0  # shards whose worker was lost

    def router_for(self, worker: Worker) -> Router:
        """The router that knows `worker`."""
        return self.routers.get(worker.role, self.router)

    # Requests

    def begin(self, state: RequestState, max_tokens: int) -> None:
        """Route a new request and send it off, or let it wait for room."""
        request = state.request
        if not max_tokens:
            state.num_left = 1  # a prompt alone has no branches
        dispatch = Dispatch(state, state.num_left, self._prompts.limits(max_tokens))
        if request.parent == NO_PARENT:
            text = self._prompts.prompt(request.ids, request.input_tokens)
            state.prompt_tokens = text.num_tokens
            dispatch.bring(text)
        else:
            parent = self._prompts.parent(request)
            state.prompt_tokens = parent.num_tokens + request.input_tokens
            state.suffixes = self._prompts.suffixes(request)
            state.raws += state.suffixes
            dispatch.is_fork = True
            if parent.capsule is not None:
                dispatch.capsule = parent.capsule.id
            else:
                self._rebuild(dispatch)
            size = self.router.config.block_size
            state.shared = (parent.num_tokens - 1) // size * size
        self._try(dispatch)

    def _try(self, dispatch: Dispatch) -> None:
        self.waiting.try_now(
            dispatch, self._lane(dispatch) if dispatch.capsule is not None else None
        )

    def _lane(self, dispatch: Dispatch) -> WorkerId | None:
        """The one worker that has its capsule. None if it is unknown: then the whole text is sent."""
        assert dispatch.capsule is not None
        try:
            return self.router.capsule(dispatch.capsule).worker
        except UnknownCapsule:
            self._rebuild(dispatch)
            return None

    def _rebuild(self, dispatch: Dispatch) -> None:
        """Give it its parent's text in place of a lost capsule, to be computed and then forked."""
        self.num_rebuilt += 1
        dispatch.bring(self._prompts.before(dispatch.state.request))
        dispatch.is_fork = True

    def poke(self, worker: WorkerId | None) -> None:
        """Try what waits again: `worker` may have room now."""
        if self.waiting.is_empty:
            return
        if self.waiting.stranded and self.router.has_workers:
            stranded, self.waiting.stranded = self.waiting.stranded, []
            for dispatch in stranded:
                self._try(dispatch)
        self.waiting.poke(worker)

    # Routing

    def _place(self, dispatch: Dispatch) -> None:
        """Book its rows, as one shard or several, and send them. Raises Saturated."""
        try:
            if dispatch.is_fork or dispatch.rows > 1:
                self._place_many(dispatch)
            else:
                self._place_one(dispatch)
        except UnknownCapsule:
            self._rebuild(dispatch)
            self._place(dispatch)
        except (NoWorker, KVMemoryExceeded) as error:
            if dispatch.capsule is not None:
                self._forget(dispatch.capsule)
                self._rebuild(dispatch)
                self._place(dispatch)
            elif not self.router.has_workers:
                self.waiting.stranded.append(dispatch)
            else:
                dispatch.state.error, dispatch.state.reason = error.code, error.message
                self._clock.at(self._clock.now, self._give_up, dispatch)

    def _give_up(self, dispatch: Dispatch) -> None:
        dispatch.state.num_left -= dispatch.rows
        if not dispatch.state.num_left:
            self._recorder.over(dispatch.state)

    def _place_one(self, dispatch: Dispatch) -> None:
        text, name = dispatch.text, self._shard_name(dispatch.state, 0)
        assert text is not None, "a dispatch without a capsule has its whole text"
        placement = self.router.route(
            name,
            text.hashes,
            prompt_tokens=text.num_tokens,
            max_tokens=dispatch.max_tokens,
            may_wait=True,
        )
        dispatch.state.num_shards += 1
        self._send(dispatch, name, placement, range(1), "stay")

    def _place_many(self, dispatch: Dispatch) -> None:
        state, capsule = dispatch.state, dispatch.capsule
        names = [self._shard_name(state, k) for k in range(min(dispatch.rows, MAX_SHARDS))]
        suffix_tokens = state.request.input_tokens if dispatch.is_fork else 0
        if capsule is not None:
            prompt_tokens = self.router.capsule(capsule).boundary
        else:
            assert dispatch.text is not None, "a dispatch without a capsule has its text"
            prompt_tokens = dispatch.text.num_tokens
        placed: tuple[Part, ...] = self.router.route_fanout(
            names,
            dispatch.hashes,
            prompt_tokens=prompt_tokens,
            max_tokens=dispatch.max_tokens,
            suffix_tokens=[suffix_tokens] * dispatch.rows,
            capsule=capsule,
            can_recompute=True,
            can_migrate=self._transfers is not None,
            may_wait=True,
        )
        state.num_shards += len(placed)
        for name, each in zip(names, placed, strict=False):
            self._send(dispatch, name, each.placement, each.rows, each.how)

    @staticmethod
    def _shard_name(state: RequestState, k: int) -> RequestId:
        k += state.num_shards
        return RequestId(f"{state.name}-{k}" if k else state.name)

    def _send(
        self, dispatch: Dispatch, name: RequestId, placement: Placement, rows: range, how: str
    ) -> None:
        state, worker = dispatch.state, self._fleet.lives[placement.incarnation]
        shard = Shard(dispatch, name, worker, rows)
        shard.how = "recompute" if dispatch.is_fork and dispatch.capsule is None else how
        if state.worker < 0:
            state.worker = worker.index
            state.routed = self._clock.now
        self._shards[name] = worker.shards[name] = shard
        self._deliver(shard, command_of(shard, self._prompts))
        if self._on_booked is not None:
            self._on_booked(self)

    def _deliver(self, shard: Shard, command: Command) -> None:
        """Send `command` to the shard's worker, after the prefix if that is to be moved there."""
        if isinstance(command, Prefill) and command.request != shard.name:
            self._shards[command.request] = shard.worker.shards[command.request] = shard
        if shard.how == "migrate" and self._transfers is not None and isinstance(command, Prefill):
            num_tokens = self._prompts.parent(shard.state.request).num_tokens
            held = shard.worker.engine.held_blocks(self._prompts.hashes(command.tokens))
            missing = max(0, num_tokens - held * self.router.config.block_size)
            self._transfers.send(shard.worker, command, num_tokens=num_tokens, missing=missing)
        else:
            self._fleet.send(shard.worker, command)

    # Updates of workers

    def on_update(self, shard: Shard, update: CountedUpdate, ended: float) -> None:
        """Handle an update of `shard` by a step that ended at `ended`: a first token, or an end."""
        if update.request != shard.name:
            self._prefilled_again(shard, update)
            return
        if update.error is not None:
            self._failed(shard, *update.error[:2])
            return
        if not shard.is_seen:
            shard.is_seen = True
            self.router.first_token(shard.name)
            if shard.how == "stay":
                self.router.observe_hit(shard.name, update.cached_tokens)
            self._recorder.first(shard, update)
        self._recorder.tokens(shard, update, ended)
        if update.finish is not None:
            if update.capsule is not None:
                self._learn(shard, update.capsule, update)
            shard.num_left -= 1
            if not shard.num_left or update.branch == ALL_BRANCHES:
                self._ended(shard)

    def _learn(self, shard: Shard, capsule: str, update: CountedUpdate) -> None:
        """Note a capsule of `shard`. One that no request will fork is released at once."""
        state, worker = shard.state, shard.worker
        if not shard.dispatch.max_tokens and not state.request.num_children:
            self._fleet.send(worker, Release(capsule))
        elif self._has_forks:
            key = CapsuleId(capsule)
            if not shard.rows.start + update.branch:
                state.capsule = CapsuleRef(key, update.boundary, worker)
            self.router.learn_capsule(key, worker.name, update.boundary, shard.dispatch.hashes)

    def _prefilled_again(self, shard: Shard, update: CountedUpdate) -> None:
        """Fork the capsule that was computed anew for a shard, once it is there."""
        if update.finish is None:
            return
        del self._shards[update.request], shard.worker.shards[update.request]
        capsule = update.capsule
        if capsule is None:
            self._failed(shard, *(("cancelled", "") if update.error is None else update.error[:2]))
            return
        shard.worker.engine.unsupply(update.request)
        if shard.how == "migrate":  # moved, not computed
            cached_tokens = update.cached_tokens + update.prefill_tokens
            update = update._replace(cached_tokens=cached_tokens, prefill_tokens=0)
        shard.state.computed += update.prefill_tokens
        self._recorder.first(shard, update)
        shard.is_seen = True
        self.router.first_token(shard.name)
        self._fleet.send(shard.worker, fork_of(shard, capsule))
        self._fleet.send(shard.worker, Release(capsule))

    def _ended(self, shard: Shard) -> None:
        self._close(shard)
        state = shard.state
        state.num_left -= len(shard.rows)
        if not state.num_left:
            self._recorder.over(state)
        self.poke(shard.worker.name)

    def _close(self, shard: Shard) -> None:
        name = shard.name
        self.router.free(name)
        for key in (name, again_name(shard)) if shard.how != "stay" else (name,):
            self._shards.pop(key, None)
            shard.worker.shards.pop(key, None)
            shard.worker.engine.unsupply(key)
        if self._on_booked is not None:
            self._on_booked(self)

    # Failures

    def _failed(self, shard: Shard, code: str, reason: str) -> None:
        """Place a shard again whose worker lost its capsule; end one that was refused otherwise."""
        capsule = shard.dispatch.capsule
        if code in _CAPSULE_GONE and capsule is not None:
            self._forget(capsule)
            self._again(shard)
            return
        if code == CapsulesFull.code and shard.dispatch.is_fork and shard.how != "stay":
            self._again(shard, is_whole=True)
            return
        shard.state.error, shard.state.reason = code, reason
        self._ended(shard)

    def lost(self, shard: Shard) -> None:
        """Place the rest of `shard` elsewhere: its worker is gone."""
        self.num_retries += 1
        shard.state.retries += 1
        self._again(shard)

    def _again(self, shard: Shard, *, is_whole: bool = False) -> None:
        """Dispatch the rows that have not ended again. A single row goes on after its last token.

        A fork that `is_whole` is sent with all its text, as no worker can keep its parent's.
        """
        self._close(shard)
        state, old = shard.state, shard.dispatch
        state.num_left -= len(shard.rows) - shard.num_left
        num_reported = shard.num_reported if len(shard.rows) == 1 else 0
        if len(shard.rows) > 1:
            state.output -= sum(shard.reported_by_row.values())
        dispatch = Dispatch(
            state, shard.num_left, self._prompts.limits(old.max_tokens - num_reported)
        )
        dispatch.last = shard.last
        if old.is_fork and not num_reported and not is_whole:
            dispatch.is_fork, dispatch.capsule = True, old.capsule
            if old.capsule is None:
                self._rebuild(dispatch)
            # Else, if it is gone, `_lane` or `_place` finds out.
        else:
            self.num_rebuilt += old.is_fork
            dispatch.bring(self._prompts.whole(state.request, num_reported))
        self._try(dispatch)

    def _forget(self, capsule: CapsuleId) -> None:
        for router in self.routers.values():
            router.forget_capsule(capsule)
