"""The router as a plain object: the server for each prompt, for callers that send it there themselves.

Trainers have one beside inference servers of their own. Servers report nothing to it: a prompt counts as
cached where it was sent, for two minutes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from mallee.protocol.errors import UnknownRequest
from mallee.protocol.events import Lease
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.router.config import RouterConfig
from mallee.router.router import Router

_FOREVER_S = 1e9


class Balancer:
    """Servers by any names, and the requests on them. Single-threaded; `clock` gives monotonic seconds."""

    def __init__(
        self,
        servers: Iterable[str],
        *,
        clock: Callable[[], float],
        config: RouterConfig | None = None,
        kv_tokens: int = 262_144,
        max_rows: int = 256,
    ) -> None:
        """`kv_tokens`, `max_rows`: the KV memory of one server, and the requests that it runs at once."""
        config = replace(config or RouterConfig(), lease_s=_FOREVER_S)
        self._block_size = config.block_size
        self._router = Router(config, clock=clock)
        self._num_blocks = max(1, kv_tokens // config.block_size)
        self._max_rows = max_rows
        self._incarnations: dict[str, Incarnation] = {}
        self._running: dict[tuple[str, str], list[RequestId]] = {}  # by server and the caller's id
        self._num_lives = self._num_requests = 0
        self.add_servers(servers)

    def add_servers(self, servers: Iterable[str]) -> None:
        """Route to these too. One that is known already begins anew, with an empty cache."""
        for server in servers:
            self._num_lives += 1
            self._incarnations[server] = Incarnation(self._num_lives)
            self._router.on_lease(
                Lease(
                    worker=WorkerId(server),
                    incarnation=self._incarnations[server],
                    address=server,
                    model="",
                    fingerprint="",
                    block_size=self._block_size,
                    num_blocks=self._num_blocks,
                    max_rows=self._max_rows,
                    max_model_len=0,
                    next_seq=0,
                    kv_events=False,
                )
            )

    def remove_servers(self, servers: Iterable[str]) -> None:
        """Route to these no more; requests that run there may still be released."""
        for server in servers:
            if server in self._incarnations:
                incarnation = self._incarnations.pop(server)
                self._router.detach_worker(WorkerId(server), incarnation)

    def forget_caches(self) -> None:
        """No server has anything cached any more: its weights were updated."""
        self.add_servers(list(self._incarnations))

    def acquire_server(
        self, request_id: str, prompt_ids: Sequence[int], max_tokens: int = 1024
    ) -> str:
        """The server that shall compute this prompt; it counts there until it is released.

        The turns of a conversation may share a `request_id`. Raises NoWorker without servers, and
        KVMemoryExceeded for a prompt that fits none.
        """
        self._num_requests += 1
        booked = RequestId(f"{request_id}/{self._num_requests}")
        hashes = block_hashes(prompt_ids, self._block_size)
        placement = self._router.route(
            booked, hashes, prompt_tokens=len(prompt_ids), max_tokens=max_tokens
        )
        self._running.setdefault((placement.worker, request_id), []).append(booked)
        return placement.worker

    def release_server(self, server: str, request_id: str) -> None:
        """A request has ended there. Raises UnknownRequest."""
        running = self._running.get((server, request_id))
        if not running:
            raise UnknownRequest(RequestId(request_id))
        self._router.free(running.pop())
        if not running:
            del self._running[server, request_id]
        self._router.work()
