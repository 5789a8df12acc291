"""The HTTP API over a gateway of this process, behind a real server in the same event loop."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from starlette.applications import Starlette

from mallee.api.api import DEFAULT_RESPONSES, ApiSettings, Draws, Entry, ServedModel, build_api
from mallee.api.text.chat import ChatTemplate
from mallee.gateway.access.access import Access
from mallee.gateway.access.keys import new_key
from mallee.gateway.gateway import Gateway
from mallee.protocol.hashing import Tokens, as_tokens
from mallee.runtime.config import HttpSettings, ResponsesSettings
from mallee.runtime.proxy.server import Server
from support.plain_ids import SCOPES
from support.waiting import until

NO_CHAT = ChatTemplate(None)


class CharTokenizer:
    """One token per ASCII character, which is its number: texts and tokens are the same."""

    longest_token: int | None = None
    added_tokens: dict[str, int] = {}
    is_waiting = False

    def encode(self, text: str, *, add_special_tokens: bool = False, scope: str = "") -> list[int]:
        return [*text.encode("ascii")]

    def tokens(self, text: str, *, add_special_tokens: bool = False, scope: str = "") -> Tokens:
        return as_tokens(self.encode(text))

    def delimiters(self, among: Collection[str]) -> tuple[str, ...]:
        return ()

    def detokenizer(self, shown: Sequence[str] = ()) -> "CharTokenizer":
        return self

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        return "".join(map(chr, tokens))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.push(tokens)

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()


def api_over(
    gateway: Gateway,
    *,
    tokenizer: Any = None,
    chat: ChatTemplate = NO_CHAT,
    access: Access | None = None,
    responses: ResponsesSettings = DEFAULT_RESPONSES,
    **settings: Any,
) -> Starlette:
    return build_api(
        gateway,
        ServedModel("m", tokenizer or CharTokenizer(), chat, created=1),
        Entry(access or Access(None, {}), SCOPES),
        ApiSettings(HttpSettings(**settings), responses=responses),
        Draws(lambda: "err", lambda: secrets.randbits(64)),
    )


def keyed(tmp_path: Path, **limits: int) -> tuple[Access, dict[str, str]]:
    """An access with one key, and the header with it."""
    key, file = new_key("alice", "client", "alice"), tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [{**key.entry, **limits}]}))
    return Access(file, {}), {"authorization": f"Bearer {key.token}"}


@asynccontextmanager
async def serving(app: Any, *, port: int = 0, **options: Any) -> AsyncIterator[tuple[str, Server]]:
    """The address of `app` behind a server, and the server. `options` are of Server."""
    server = Server(app, **options)
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
        finally:
            server.should_exit = True
            await running


@asynccontextmanager
async def served(gateway: Gateway, **settings: Any) -> AsyncIterator[tuple[str, Server]]:
    """The address of the API, and its server."""
    async with serving(api_over(gateway, **settings)) as found:
        yield found
