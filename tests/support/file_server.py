"""A server of a tiny model that exports and imports capsules, here or, run as a program, by itself.

python -m support.file_server FOLDER [SEED]
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mallee.actors.build import FileDesk, build_files
from mallee.actors.hosting.lending import HostLender
from mallee.actors.lending.borrower import Borrower
from mallee.actors.lending.server import LendingServer
from mallee.client import AsyncMallee
from mallee.protocol.ids import WorkerId
from mallee.runtime.addresses import socket_path
from mallee.runtime.config import AppConfig
from mallee.runtime.transport.greeting import Secret, new_secret
from mallee.testing.random_model import random_model
from support.live_fleet import LiveFleet
from support.tiny_fleet import tiny_api
from support.volumes import volume_tiers
from support.waiting import until

NODE = "n"
PROMPT = "".join(chr(33 + 7 * i % 90) for i in range(50))
SAMPLED: dict[str, Any] = {"seed": 3, "temperature": 1.0, "presence_penalty": 0.5}


class FileServer(NamedTuple):
    url: str
    fleet: LiveFleet
    desk: FileDesk


@asynccontextmanager
async def file_server(folder: Path, *, seed: int = 5, **imports: Any) -> AsyncIterator[FileServer]:
    """One gateway and one worker, whose KV crosses real sockets. `imports`: settings of that section."""
    model = random_model("llama", seed, max_position_embeddings=2048)
    secret = Secret(new_secret())
    config = AppConfig(model="tiny", imports={"folder": str(folder), **imports})  # type: ignore[arg-type]
    desk = build_files(config, "g0", secret, NODE, lambda: None)
    borrower = Borrower("w0", secret, node=NODE)
    below = volume_tiers(None, host_blocks=64, peers=borrower)  # nothing but what others lend
    options: Any = {"num_blocks": 256, "below": lambda worker: below, "files": desk.files}
    try:
        async with tiny_api(model, 1, **options) as (client, fleet):
            (host,) = fleet.hosts.values()
            lending = LendingServer(HostLender(host.workers), secret, node=NODE)
            try:
                lending.listen_unix(socket_path("w0"))
                await _tell_address(fleet, str(lending.address))
                yield FileServer(str(client.base_url), fleet, desk)
            finally:
                await asyncio.to_thread(lending.close)
    finally:
        await asyncio.to_thread(desk.close)
        await asyncio.to_thread(borrower.close)


async def _tell_address(fleet: LiveFleet, address: str) -> None:
    """Have the worker's leases say where it lends, and the gateway know it."""
    (host,) = fleet.hosts.values()
    host.lends_at = address

    def is_known() -> bool:
        found = fleet.routers[0].worker(WorkerId("w0"))
        return found is not None and found.lends_at == address

    await until(is_known)


async def cut_answer(client: AsyncMallee, **options: Any) -> tuple[Any, str, str]:
    """A capsule of an answer under way, its text until there, and all of it."""
    given = {"max_tokens": 64, "ignore_eos": True, **options}
    stream = client.stream(PROMPT, **given)
    capsule = None
    async for event in stream:
        if capsule is None and len(stream.branches[event.index].text) > 10:
            capsule = await stream.branches[0].capture(ttl_s=600)
    assert capsule is not None
    text = stream.branches[0].text
    return capsule, text[: capsule.tokens - len(PROMPT)], text


async def _serve(folder: Path, seed: int) -> None:
    async with file_server(folder, seed=seed) as server:
        sys.stdout.write(server.url + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5))
