"""Requests of three tenants that give every metric something to count, at a load that rises and falls."""

import asyncio
import itertools
import math
import random
from typing import Any, Final

import httpx

from bench.boards.deployment import MODEL, Deployment

WORDS: Final = ("river", "delta", "marsh", "lagoon", "dune", "forest", "ridge", "canyon", "reef")
WAVE_S: Final = 120.0  # of the load
PATIENCE_S: Final = 60.0
# Of each tenant's requests: many of one kind make the boards tell tenants apart.
PREFERENCES: Final = {
    "acme": (6, 2, 1, 1),
    "birch": (2, 6, 1, 1),
    "cedar": (1, 1, 6, 1),
}


class Traffic:
    """Clients of one deployment. What is refused is the deployment's to say, not an error here."""

    def __init__(self, served: Deployment, *, words: int = 120, max_tokens: int = 24) -> None:
        self._served = served
        self._words = words
        self._max_tokens = max_tokens
        self._random = random.Random(7)
        self._http = httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S)
        self.statuses: dict[int, int] = {}
        self._kinds = (self._completion, self._chat, self._tree, self._search)

    async def __aenter__(self) -> "Traffic":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def run(self, seconds: float, clients: int) -> None:
        """`clients` at the height of the wave, for so long."""
        end = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                tenant = list(self._served.tenants)[number % len(self._served.tenants)]
                group.create_task(self._client(tenant, number / clients, end))

    async def each_once(self) -> None:
        """Every kind of request by every tenant, one after the other."""
        for tenant in self._served.tenants:
            for kind in self._kinds:
                await kind(tenant)
            await self._refused(tenant)

    async def _client(self, tenant: str, share: float, end: float) -> None:
        """Ask while the wave is higher than this client's `share`."""
        loop, begin = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        for turn in itertools.count():
            now = loop.time()
            if now >= end:
                return
            height = 0.55 + 0.45 * math.sin(2 * math.pi * (now - begin) / WAVE_S)
            if share > height:
                await asyncio.sleep(0.2)
                continue
            (kind,) = self._random.choices(self._kinds, PREFERENCES[tenant])
            try:
                await kind(tenant)
                if turn % 40 == 39:
                    await self._refused(tenant)
            except httpx.TransportError:  # its gateway was ended under it
                await asyncio.sleep(0.5)

    async def _completion(self, tenant: str) -> None:
        """A prompt that shares its beginning with others of its tenant, and four answers to it."""
        prompt = f"{self._prefix(tenant, self._random.randrange(6))} {self._random.random()}"
        body = {"prompt": prompt, "n": 4, "stream": True}
        await self._post(tenant, "/v1/completions", body)

    async def _chat(self, tenant: str) -> None:
        """A conversation of three turns."""
        messages = [{"role": "user", "content": self._prefix(tenant, self._random.randrange(40))}]
        for turn in range(3):
            body = {"messages": messages, "mallee": {"session": f"{tenant}-{turn}"}}
            answer = await self._post(tenant, "/v1/chat/completions", body)
            if "choices" not in answer:
                return
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": f"More of that, {turn}."})

    async def _tree(self, tenant: str) -> None:
        """A capsule that is forked on the device, in host memory and on disk."""
        prompt = f"{self._prefix(tenant, 99)} {self._random.random()}"
        capsule = await self._post(
            tenant, "/v1/capsules", {"prompt": prompt, "ttl_s": 60}, draws=False
        )
        if "id" not in capsule:
            return
        path = f"/v1/capsules/{capsule['id']}"
        for tier in (None, "host", "disk"):
            if tier is not None:
                await self._post(tenant, f"{path}/demote", {"tier": tier}, draws=False)
            await self._post(tenant, f"{path}/fork", {"n": 8, "stream": True})
        if self._random.random() < 0.5:
            await self._http.delete(path, headers=self._headers(tenant))

    async def _search(self, tenant: str) -> None:
        """A beam of two steps below the beginning of the tenant's trees."""
        policy = {"type": "beam", "depth": 2, "width": 2}
        body = {"prompt": self._prefix(tenant, 99), "policy": policy}
        await self._post(tenant, "/v1/search", body, draws=False)

    async def _refused(self, tenant: str) -> None:
        """Requests that can't be served: too long, with an unknown capsule, and a text in no schema."""
        await self._post(tenant, "/v1/completions", {"prompt": "a", "max_tokens": 10**6})
        await self._post(tenant, "/v1/capsules/none/fork", {"n": 1})

    async def _post(
        self, tenant: str, path: str, body: dict[str, Any], *, draws: bool = True
    ) -> Any:
        """The answer to `body`, read to its end; {} of a stream."""
        if draws:
            body = {"max_tokens": self._max_tokens, "ignore_eos": True, **body}
        if not path.startswith("/v1/capsules/"):
            body = {"model": MODEL, **body}
        answer = await self._http.post(path, json=body, headers=self._headers(tenant))
        self.statuses[answer.status_code] = self.statuses.get(answer.status_code, 0) + 1
        return {} if body.get("stream") else answer.json()

    def _prefix(self, tenant: str, number: int) -> str:
        draw = random.Random(f"{tenant}-{number}")
        return " ".join(draw.choice(WORDS) for _ in range(self._words))

    def _headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self._served.tenants[tenant]}"}
