"""A small verifier over HTTP on loopback, in the event loop of its test."""

import asyncio
import inspect
import json
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple


class Raw(NamedTuple):
    """An answer as it stands."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = {}


class Verifier:
    """Scores each branch of a question by `score(branch)`; if `reply` is set, that answers the question."""

    def __init__(self) -> None:
        self.url = ""
        self.score: Callable[[dict[str, Any]], float | None] = lambda branch: 1.0
        self.reply: Callable[[dict[str, Any]], Raw | Awaitable[Raw]] | None = None
        self.questions: list[dict[str, Any]] = []
        self.heads: list[dict[str, str]] = []  # header lines of each question
        self.paths: list[str] = []
        self.running = self.most_running = 0
        self._serving: set[asyncio.Task[None] | None] = set()

    def seen(self, index: int) -> list[dict[str, Any]]:
        """The branch in all questions that were about it."""
        return [b for each in self.questions for b in each["branches"] if b["index"] == index]

    async def _answer(self, question: dict[str, Any]) -> Raw:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.reply is None:
                return verdict([self.score(branch) for branch in question["branches"]])
            reply = self.reply(question)
            return await reply if inspect.isawaitable(reply) else reply
        finally:
            self.running -= 1

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """One connection."""
        self._serving.add(asyncio.current_task())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().rstrip().split("\r\n")
                names = dict(line.lower().split(": ", 1) for line in lines)
                question = json.loads(await reader.readexactly(int(names["content-length"])))
                self.questions.append(question)
                self.paths.append(first.split(" ")[1])
                self.heads.append(names)
                status, body, headers = await self._answer(question)
                headers = {"content-length": str(len(body)), **headers}
                told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                writer.write(f"HTTP/1.1 {status} -\r\n{told}\r\n".encode() + body)
                if headers.get("connection") == "close":
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the caller has hung up
        finally:
            self._serving.discard(asyncio.current_task())
            writer.close()

    def close(self) -> None:
        """Give up what it still thinks about."""
        for task in self._serving:
            assert task is not None
            task.cancel()


def verdict(scores: list[Any]) -> Raw:
    return Raw(200, json.dumps({"scores": scores}).encode())


@asynccontextmanager
async def verifying() -> AsyncIterator[Verifier]:
    """A verifier at a free port; its address is `url`."""
    verifier = Verifier()
    server = await asyncio.start_server(verifier.serve, "127.0.0.1", 0)
    verifier.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/verify"
    try:
        yield verifier
    finally:
        server.close()
        verifier.close()
