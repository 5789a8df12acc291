"""Builds the engines, routers and gateways of a replay."""

import random
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias, cast

from mallee.mocker.passes import mock_spec
from mallee.mocker.replay.clock import Clock
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faulty import FaultyFleet
from mallee.mocker.replay.fleet.workers import FleetSettings, Listener, Role
from mallee.mocker.replay.gateway.gateway import Gateway
from mallee.mocker.replay.gateway.roles import RoleGateway
from mallee.mocker.texts import Texts
from mallee.mocker.timing import Timing
from mallee.protocol.ids import Incarnation
from mallee.router.config import CostModel, Policy, SpillModel
from mallee.router.router import Router
from mallee.router.sync.outbox import Outbox
from mallee.router.sync.replicas import Replicas
from mallee.worker.sched.policy import SchedulerConfig

AnyGateway: TypeAlias = Gateway | RoleGateway
_FOREVER_S: Final = 1e12  # no lease or booking runs out: deaths are announced


class ReplayBuilder(NamedTuple):
    """Builds the parts of one replay."""

    config: ReplayConfig
    timing: Timing
    block_size: int
    clock: Clock

    def role(self, index: int) -> Role:
        """The role of worker `index`."""
        if not self.config.prefill_engines:
            return "both"
        return "prefill" if index < self.config.prefill_engines else "decode"

    def fleet(self, listener: Listener, texts: Texts, *, has_forks: bool) -> FaultyFleet:
        """A fleet without workers yet. Answers leave capsules only if requests fork."""
        config = self.config
        scheduler = replace(
            config.engine.scheduler,
            max_step_tokens=config.max_step_tokens,
            max_rows=config.max_rows,
            gang=False,  # an order within a batch that only real memory gains by
        )
        is_vllm = config.rules == "vllm"
        if is_vllm and scheduler.watermark == SchedulerConfig().watermark:
            scheduler = replace(scheduler, watermark=0.0)  # vLLM's default
        num_capsules = config.answer_capsules if has_forks else 0
        settings = FleetSettings(
            timing=self.timing,
            texts=texts,
            block_size=self.block_size,
            num_blocks=config.num_blocks(self.block_size),
            config=replace(config.engine, scheduler=scheduler, max_answer_capsules=num_capsules),
            seed=config.seed,
            spec=mock_spec(
                vocab_size=1 << 32, max_model_len=config.max_model_len, groups=config.groups
            ),
            tiers=config.tiers,
            link=config.link if config.prefill_engines or config.can_migrate else None,
            is_lending=config.can_migrate,
            device=config.device,
            is_vllm=is_vllm,
            join_role="decode" if config.prefill_engines else "both",
        )
        return FaultyFleet(self.clock, listener, settings)

    def gateway(self, index: int, **more: Any) -> AnyGateway:
        """Gateway `index`; `more` are its own arguments."""
        config, name = self.config, f"g{index}"
        outbox = Outbox(name, Incarnation(1)) if config.are_synced else None
        more |= {"clock": self.clock, "admission": config.admission}
        cost = config.cost_model(self.block_size)
        if not config.prefill_engines:
            return Gateway(name, self._router(index, cost, outbox), **more)
        moving = replace(cost, prefill_token_s=config.link.token_s)  # of what a decode worker lacks
        routers = {
            "both": self._router(index, moving, outbox),
            "prefill": self._router(index + 1, cost, None),
        }
        return RoleGateway(name, routers, **more)

    def replicas(self, gateway: AnyGateway) -> Replicas:
        """The bookings of other gateways, as `gateway` keeps them."""
        return Replicas(
            gateway.router,
            gateway=gateway.name,
            clock=self.clock.read,
            lease_s=_FOREVER_S,
            room=gateway.room,
            incarnation=1,
        )

    def _router(self, seed: int, cost: CostModel, outbox: Outbox | None) -> Router:
        config, link = self.config, self.config.link
        spill = SpillModel(
            migrate_latency_s=link.latency_s,
            migrate_byte_s=1.0 / link.bytes_s,
            kv_block_nbytes=self.block_size * link.token_nbytes,
        )
        return Router(
            replace(
                config.routing,
                block_size=self.block_size,
                max_workers=2 * config.engines + 64,
                lease_s=_FOREVER_S,
                booking_s=_FOREVER_S,
                cost=cost,
                spill=spill,
                policy=cast("Policy", config.policy),
            ),
            clock=self.clock.read,
            draw=random.Random(config.seed * 1009 + seed).random,  # noqa: S311 # a replay
            outbox=outbox,
        )
