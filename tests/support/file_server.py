"""A server of a tiny model that exports and imports capsules, here or, run as a program, by itself.

python -m support.file_server FOLDER [SEED]
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.doubles.random_model import random_model
from mallee.actors.build import FileDesk, build_files
from mallee.actors.kv_transfer.client import KvClient
from mallee.client import AsyncMallee
from mallee.runtime.config import AppConfig
from mallee.runtime.transport.greeting import Secret, new_secret
from support.kv import ServedKv
from support.live_fleet import LiveFleet
from support.tiny_fleet import tiny_api
from support.volumes import volume_tiers

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
    kv_client = KvClient("w0", secret, node=NODE)
    below = volume_tiers(None, host_blocks=64, peers=kv_client)  # nothing but KV of others
    options: Any = {"num_blocks": 256, "below": lambda worker: below, "files": desk.files}
    try:
        async with tiny_api(model, 1, **options) as (client, fleet):
            served = await ServedKv.of(fleet, secret, NODE)
            try:
                yield FileServer(str(client.base_url), fleet, desk)
            finally:
                await served.listener.close()
    finally:
        await desk.close()
        await asyncio.to_thread(kv_client.close)


async def cut_answer(client: AsyncMallee, **options: Any) -> tuple[Any, str, str]:
    """A capsule of an answer under way, its text until there, and all of it."""
    given = {"max_tokens": 64, "ignore_eos": True, **options}
    stream = client.stream(PROMPT, **given)
    capsule = None
    async for event in stream.events():
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
