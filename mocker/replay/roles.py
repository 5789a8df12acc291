"""Prompts computed on one kind of workers and answered on another, by capsules that move in between."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from mallee.mocker.replay.calls import Order, Part
from mallee.mocker.replay.fleet import Worker
from mallee.mocker.replay.gateway import Gateway
from mallee.mocker.replay.moves import Moves
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.errors import NoWorker
from mallee.protocol.ids import CapsuleId, RequestId
from mallee.protocol.messages import Command, Generate, Prefill, Release
from mallee.router.router import Router

_KEPT_S: Final = 600.0  # that a prompt waits at most for somebody to fetch it


class _Computed(NamedTuple):
    """Where a prompt was computed; no capsule: nowhere, whoever answers computes it."""

    worker: Worker
    capsule: str | None


class RoleGateway(Gateway):
    """Prompts go to prefill workers, and from there to the decode workers that answer them.

    `routers["prefill"]` knows the ones, `routers["both"]` the others, whose price of a token that they
    lack should be that of moving it. A fork goes to the decode worker that has its capsule, with its
    suffix; if nobody has it any more a decode worker computes it again. While no prefill worker takes
    prompts, decode workers compute them; without decode workers everybody waits.
    """

    def __init__(
        self, name: str, routers: Mapping[str, Router], *, moves: Moves, **more: Any
    ) -> None:
        """`more` as for a gateway."""
        super().__init__(name, routers, moves=moves, **more)
        self._prompts = routers["prefill"]
        self._links = moves
        self._computing: dict[str, Part] = {}  # prompts under way, by request
        self._computed: dict[Order, _Computed] = {}  # that wait for a decode worker
        self._handed: set[str] = set()  # requests whose first news is still to come
        self._from: _Computed | None = None  # of the order that is being placed
        self._until = 0.0  # when its last move is over

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        for name, part in self._computing.items():
            assert self._parts.get(name) is part, f"{name} is computed for nobody"
        assert self._handed <= set(self._parts), "handed over, and over"
        assert self._from is None, "an order is being placed"

    # Prompts

    def _place(self, order: Order) -> None:
        if order.text is None or order.is_fork:
            super()._place(order)
            return
        computed = self._computed.get(order)
        if computed is None and self._prompts.has_workers and self._compute(order):
            return
        self._from, self._until = computed, self._clock.now
        try:
            super()._place(order)  # raises Saturated: it waits, computed
        finally:
            self._from = None
        self._computed.pop(order, None)
        if computed is not None and computed.capsule is not None:
            self._clock.at(self._until, self._release, computed)

    def _compute(self, order: Order) -> bool:
        """Its prompt goes to a prefill worker; False if none may take it. Raises Saturated."""
        call, text = order.call, order.text
        assert text is not None, "only whole prompts are computed apart"
        name = RequestId(f"{self._part_name(call, 0)}-p")
        try:
            placement = self._prompts.route(
                name, text.hashes, prompt_tokens=text.num_tokens, max_tokens=1, may_wait=True
            )
        except NoWorker:
            return False
        worker = self._fleet.lives[placement.incarnation]
        part = Part(order, name, worker, range(order.rows))
        self._parts[name] = worker.parts[name] = self._computing[name] = part
        if call.worker < 0:
            call.worker, call.routed = worker.index, self._clock.now
        self._fleet.send(worker, Prefill(name, text.raw, "", _KEPT_S, call.share))
        return True

    def _over(self, part: Part) -> None:
        """`part`, a prompt, is under way no more."""
        name = part.name
        del self._computing[name], self._parts[name], part.worker.parts[name]
        self._prompts.free(name)

    def _hear_prompt(self, part: Part, news: CountedUpdate) -> None:
        if news.finish is None:
            return
        if news.capsule is not None:
            self._prompts.first_token(part.name)
            self._prompts.observe_hit(part.name, news.cached_tokens)
            self._book.first(part, news)
            part.call.computed += news.prefill_tokens
        # Without a capsule it was refused (no room to keep it): whoever answers computes it.
        self._computed[part.order] = _Computed(part.worker, news.capsule)
        self._over(part)
        self._try(part.order)
        self.poke(part.worker.name)

    def _release(self, computed: _Computed) -> None:
        if computed.worker.is_alive:
            assert computed.capsule is not None
            self._fleet.send(computed.worker, Release(CapsuleId(computed.capsule)))

    # Answers

    def _dispatch(self, part: Part, command: Command) -> None:
        computed, text = self._from, part.order.text
        if computed is None or computed.capsule is None or text is None:
            super()._dispatch(part, command)
            return
        assert isinstance(command, Prefill | Generate), "who brings a text forks nothing"
        size = self.router.config.block_size
        held = part.worker.engine.held_blocks(text.hashes) * size
        self._handed.add(part.name)
        at = self._links.send(
            part.worker,
            command,
            num_tokens=text.num_tokens,
            missing=text.num_tokens - held,
            source=computed.worker,
        )
        self._until = max(self._until, at)

    def hear(self, part: Part, news: CountedUpdate, ended: float) -> None:
        """News of a prompt, or of an answer to one that was computed elsewhere, or of another part."""
        if part.name in self._computing:
            self._hear_prompt(part, news)
            return
        if part.name in self._handed and news.error is None:
            if not part.is_seen:
                part.is_seen = True
                self.router.first_token(part.name)
                part.worker.engine.unsupply(part.name)
            # It was moved, not computed, and counted where it was.
            news = news._replace(
                cached_tokens=news.cached_tokens + news.prefill_tokens, prefill_tokens=0
            )
        super().hear(part, news, ended)

    def _close(self, part: Part) -> None:
        self._handed.discard(part.name)
        super()._close(part)

    def lost(self, part: Part) -> None:
        """Its worker is gone: what is left of it is done elsewhere."""
        if part.name not in self._computing:
            super().lost(part)
            return
        self.num_retries += 1
        part.call.retries += 1
        self._over(part)
        self._try(part.order)
