"""A gateway for prefill and decode workers: capsules move from the ones to the others."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from mallee.mocker.replay.fleet.transfers import Transfers
from mallee.mocker.replay.fleet.workers import Worker
from mallee.mocker.replay.gateway.gateway import Gateway
from mallee.mocker.replay.gateway.requests import Dispatch, Shard
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.errors import KVMemoryExceeded, NoWorker
from mallee.protocol.ids import CapsuleId, RequestId
from mallee.protocol.messages import Command, Generate, Prefill, Release
from mallee.router.router import Router

_KEPT_S: Final = 600.0  # that a prefill worker keeps a prompt at most until it is fetched


class _Computed(NamedTuple):
    """The worker that computed a prompt. Without a capsule the decode worker computes it."""

    worker: Worker
    capsule: str | None


class RoleGateway(Gateway):
    """Sends prompts to prefill workers, and from there to the decode workers that answer them.

    `routers["prefill"]` knows the prefill workers, `routers["both"]` the decode workers; the latter's
    price of a missing token should be that of moving it. A fork goes with its suffix to the decode worker
    that has its capsule; if that is gone, a decode worker computes it again. While no prefill worker takes
    prompts, decode workers compute them; without decode workers all requests wait.
    """

    def __init__(
        self, name: str, routers: Mapping[str, Router], *, transfers: Transfers, **more: Any
    ) -> None:
        """`more` as for a gateway."""
        super().__init__(name, routers, transfers=transfers, **more)
        self._prefill_router = routers["prefill"]
        self._kv_transfers = transfers
        self._computing: dict[str, Shard] = {}  # prompts under way, by request
        self._computed: dict[Dispatch, _Computed] = {}  # that wait for a decode worker
        self._handed: set[str] = set()  # requests whose first update is still to come
        self._from: _Computed | None = None  # of the dispatch that is being placed
        self._until = 0.0  # when its last move is over

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        for name, shard in self._computing.items():
            assert self._shards.get(name) is shard, f"{name} is computed for no request"
        assert self._handed <= set(self._shards), "handed over, and over"
        assert self._from is None, "a dispatch is being placed"

    # Prompts

    def _place(self, dispatch: Dispatch) -> None:
        if dispatch.text is None or dispatch.is_fork:
            super()._place(dispatch)
            return
        computed = self._computed.get(dispatch)
        if computed is None and self._prefill_router.has_workers and self._compute(dispatch):
            return
        self._from, self._until = computed, self._clock.now
        try:
            super()._place(dispatch)  # raises Saturated: it waits, computed
        finally:
            self._from = None
        self._computed.pop(dispatch, None)
        if computed is not None and computed.capsule is not None:
            self._clock.at(self._until, self._release, computed)

    def _compute(self, dispatch: Dispatch) -> bool:
        """Send its prompt to a prefill worker; False if none can take it. Raises Saturated."""
        state, text = dispatch.state, dispatch.text
        assert text is not None, "only whole prompts are computed apart"
        name = RequestId(f"{self._shard_name(state, 0)}-p")
        try:
            placement = self._prefill_router.route(
                name, text.hashes, prompt_tokens=text.num_tokens, max_tokens=1, may_wait=True
            )
        except (NoWorker, KVMemoryExceeded):
            return False
        worker = self._fleet.lives[placement.incarnation]
        shard = Shard(dispatch, name, worker, range(dispatch.rows))
        self._shards[name] = worker.shards[name] = self._computing[name] = shard
        if state.worker < 0:
            state.worker, state.routed = worker.index, self._clock.now
        self._fleet.send(worker, Prefill(name, text.raw, "", _KEPT_S, state.share))
        return True

    def _over(self, shard: Shard) -> None:
        """Forget `shard`, a prompt that is computed or lost."""
        name = shard.name
        del self._computing[name], self._shards[name], shard.worker.shards[name]
        self._prefill_router.free(name)

    def _on_prompt_update(self, shard: Shard, update: CountedUpdate) -> None:
        if update.finish is None:
            return
        if update.capsule is not None:
            self._prefill_router.first_token(shard.name)
            self._prefill_router.observe_hit(shard.name, update.cached_tokens)
            self._recorder.first(shard, update)
            shard.state.computed += update.prefill_tokens
        # Without a capsule it was refused (no room to keep it): the decode worker computes it.
        self._computed[shard.dispatch] = _Computed(shard.worker, update.capsule)
        self._over(shard)
        self._try(shard.dispatch)
        self.poke(shard.worker.name)

    def _release(self, computed: _Computed) -> None:
        if computed.worker.is_alive:
            assert computed.capsule is not None
            self._fleet.send(computed.worker, Release(CapsuleId(computed.capsule)))

    # Answers

    def _deliver(self, shard: Shard, command: Command) -> None:
        computed, text = self._from, shard.dispatch.text
        if computed is None or computed.capsule is None or text is None:
            super()._deliver(shard, command)
            return
        assert isinstance(command, Prefill | Generate), "a dispatch with a text forks nothing"
        size = self.router.config.block_size
        held = shard.worker.engine.held_blocks(text.hashes) * size
        self._handed.add(shard.name)
        at = self._kv_transfers.send(
            shard.worker,
            command,
            num_tokens=text.num_tokens,
            missing=text.num_tokens - held,
            source=computed.worker,
        )
        self._until = max(self._until, at)

    def on_update(self, shard: Shard, update: CountedUpdate, ended: float) -> None:
        """Handle an update of a prompt, of an answer to one computed elsewhere, or of another shard."""
        if shard.name in self._computing:
            self._on_prompt_update(shard, update)
            return
        if shard.name in self._handed and update.error is None:
            if not shard.is_seen:
                shard.is_seen = True
                self.router.first_token(shard.name)
                shard.worker.engine.unsupply(shard.name)
            # It was moved, not computed, and counted where it was.
            update = update._replace(
                cached_tokens=update.cached_tokens + update.prefill_tokens, prefill_tokens=0
            )
        super().on_update(shard, update, ended)

    def _close(self, shard: Shard) -> None:
        self._handed.discard(shard.name)
        super()._close(shard)

    def lost(self, shard: Shard) -> None:
        """Place `shard`, or the rest of it, elsewhere: its worker is gone."""
        if shard.name not in self._computing:
            super().lost(shard)
            return
        self.num_retries += 1
        shard.state.retries += 1
        self._over(shard)
        self._try(shard.dispatch)
