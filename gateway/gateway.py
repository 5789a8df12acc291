"""One gateway: its requests, capsules, sessions and operator, over one router, one transport and one bus."""

from typing import TYPE_CHECKING, Final

from mallee.gateway.capsules.capsules import CapsuleFiles, Capsules
from mallee.gateway.operator import Operator
from mallee.gateway.peers import Peers
from mallee.gateway.recording.recorder import Recorder
from mallee.gateway.requests.requests import Requests
from mallee.gateway.sessions.copies import SessionLimits
from mallee.gateway.sessions.sessions import GatewaySessions
from mallee.gateway.shell import GatewayContext, Shell
from mallee.gateway.store.store import Store, StoreTerms
from mallee.router.dispatch.dispatcher import DispatchConfig, Dispatcher
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.router.dispatch.texts import TokenTexts
from mallee.router.dispatch.token_memory import TokenMemory
from mallee.router.index.hashing import compile_hashing
from mallee.runtime.transport.link import Transport

if TYPE_CHECKING:
    from mallee.gateway.requests.spans import RequestSpans

PATIENCE_S: Final = 3.0  # for which a busy worker may make no progress
MAX_MOVES: Final = 16  # of one request's shards from worker to worker


class Gateway:
    """The parts of a gateway, by noun. Belongs to one event loop."""

    def __init__(
        self,
        context: GatewayContext,
        transport: Transport,
        *,
        expected_workers: int = 1,
        admission: AdmissionConfig | None = None,
        sessions: SessionLimits | None = None,
        store: StoreTerms | None = None,
        token_memory_nbytes: int = 256 << 20,
        recorder: Recorder | None = None,
        files: CapsuleFiles | None = None,
        spans: "RequestSpans | None" = None,
    ) -> None:
        """Without a `recorder` no session is recorded, without `files` no capsule is exported or imported,
        without `spans` no request is traced.

        With fewer than `expected_workers` routable, health is degraded. Capsules whose tokens fit into
        `token_memory_nbytes` can be computed on other workers.
        """
        compile_hashing()
        router, memory = context.router, TokenMemory(token_memory_nbytes)
        block_size = router.config.block_size
        config = DispatchConfig(
            admission or AdmissionConfig(),
            max_moves=MAX_MOVES,
            patience_s=PATIENCE_S,
            asks_first=True,
        )
        texts = TokenTexts(memory, context.model, block_size, serving=router)
        dispatcher = Dispatcher(router, texts, config, clock=context.clock)
        self.context: Final = context
        self.memory: Final = memory
        self.shell: Final = Shell(context, dispatcher, transport)
        links = self.shell.links
        terms = store or StoreTerms(context.fleet)
        self.store: Final = Store(context.bus, terms, context.metrics.stored, context.clock)
        self.peers: Final = Peers(
            context.bus,
            gateway=context.gateway,
            store=terms.name,
            others=lambda: links.other_gateways,
            ids=context.ids,
            clock=context.clock,
        )
        self.capsules: Final = Capsules(context, self.shell, self.store, self.peers, memory, files)
        self.sessions: Final = GatewaySessions(
            context,
            self.shell,
            self.capsules,
            self.store,
            self.peers,
            sessions or SessionLimits(),
        )
        self.requests: Final = Requests(
            context,
            self.shell,
            self.capsules,
            self.sessions,
            self.peers,
            memory,
            recorder=recorder,
            spans=spans,
        )
        self.operator: Final = Operator(
            context, self.shell, self.requests, self.store, expected_workers=expected_workers
        )
        self._recorder = recorder
        self.tasks: Final = self.shell.tasks
        self.tasks.include(self.store.tasks)
        self.tasks.include(self.sessions.tasks)
        if recorder is not None:
            self.tasks.include(recorder.tasks)
            self.capsules.watch(recorder)
        context.metrics.show_store(self.store)
        context.metrics.show_router(
            router.stats, dispatcher.stats, links.replica_stats, self.peers.outcomes
        )

    async def start_up(self, metrics_at: str = "") -> None:
        """Listen to the fleet and to other gateways. Workers join as their leases arrive.

        `metrics_at`: host and port of its own metrics, if it serves them.
        """
        self.operator.metrics_at = metrics_at
        if self._recorder is not None:
            await self._recorder.start_up()
        await self.shell.links.start_up(metrics_at)
        await self.peers.start_up()
        await self.sessions.start_up()

    async def wait_for_worker(self, timeout_s: float) -> bool:
        """Whether a worker has joined by then; requests before that would be refused."""
        return await self.shell.links.wait_for_worker(timeout_s)

    async def close(self) -> None:
        """End every answer, every link and every task."""
        self.capsules.texts.close()
        await self.shell.end_requests()
        await self.tasks.close()
        await self.sessions.close_up()
        await self.store.close()
        await self.shell.links.close()
        if self._recorder is not None:
            await self._recorder.close()

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of requests, sessions or remembered prompts."""
        self.requests.check()
        self.sessions.trees.check()
