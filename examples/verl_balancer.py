"""A load balancer of rollout servers for verl, that knows which server has a prompt's beginning cached.

verl asks a Ray actor for the server of each generation: `acquire_server(request_id)` gives the server and
its handle, `release_server` ends it. Its own balancer keeps a conversation on one server, and sends a new
one where the fewest run: the 16 samples of a prompt are computed on many servers. This one is given the
prompt's tokens too, and sends a sample where its prompt is computed already, unless load makes that dearer.

    python examples/verl_balancer.py       # 8 groups of 16 samples on 4 servers
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mallee.router.balancer import Balancer


class KVAwareLoadBalancer:
    """As verl's `GlobalRequestLoadBalancer`; `ray.remote(KVAwareLoadBalancer)` is the actor class.

    For a verl whose client asks the balancer which fields it wants; older ones tell neither the prompt nor,
    at a release, the request.
    """

    def __init__(
        self, servers: Mapping[str, Any], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._handles = dict(servers)
        self._balancer = Balancer(self._handles, clock=clock)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    def acquire_server(
        self, request_id: str, prompt_ids: Sequence[int] = (), **_: Any
    ) -> tuple[str, Any]:
        """The name and the handle of the server that shall generate."""
        server = self._balancer.acquire_server(request_id, prompt_ids)
        return server, self._handles[server]

    def release_server(self, server_id: str, request_id: str) -> None:
        self._balancer.release_server(server_id, request_id)

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        self._handles |= servers
        self._balancer.add_servers(servers)

    def remove_servers(self, server_ids: Sequence[str]) -> None:
        self._balancer.remove_servers(server_ids)

    def weights_updated(self) -> None:
        """Call it after each update of the servers' weights: what they had cached is void."""
        self._balancer.forget_caches()


def main(clock: Callable[[], float] = time.monotonic) -> dict[str, Counter[str]]:
    """The samples of each group by server."""
    balancer = KVAwareLoadBalancer(dict.fromkeys("abcd"), clock=clock)
    rng = random.Random(0)  # noqa: S311
    found: dict[str, Counter[str]] = {}
    for group in range(8):
        prompt = rng.choices(range(32_000), k=2048)
        for sample in range(16):
            server, _ = balancer.acquire_server(f"{group}-{sample}", prompt_ids=prompt)
            found.setdefault(f"group {group}", Counter())[server] += 1
    return found


if __name__ == "__main__":
    for name, servers in main().items():
        print(name, dict(servers))
