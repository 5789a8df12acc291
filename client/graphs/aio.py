"""A graph that runs, for asyncio: `running`, with await."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from mallee.client.base import failing_as, raise_refusal_async
from mallee.client.calls import Call
from mallee.client.critic import result_of
from mallee.client.errors import ConnectionFailed, StreamBroken
from mallee.client.graphs.builder import ToolFunction, tell_result
from mallee.client.graphs.results import GraphEvent, GraphReader, GraphResult, failure, outcome
from mallee.client.graphs.resuming import resume_graph, resume_waits
from mallee.protocol.errors import GraphRunning, MalleeError, NotAwaited, NotFound, Unavailable

if TYPE_CHECKING:
    import asyncio

    import httpx


class AsyncGraphRun:
    """A graph that runs: `async for` its events, or `await ... .wait()`. See `GraphRun`.

    It is sent when first iterated, entered or awaited. Functions of its tools may be coroutine functions;
    plain ones run in threads.
    """

    def __init__(
        self,
        call: Call,
        tools: dict[str, ToolFunction],
        *,
        base_url: str,
        request: Callable[[Call], Awaitable["httpx.Response"]],
        send: Callable[[Call], Awaitable[Any]],
        max_retries: int,
    ) -> None:
        self._url = base_url + call.path
        self._call = call
        self._tools = tools
        self._request = request
        self._send = send
        self._num_left = max_retries  # times that it may be resumed
        self._told: dict[str, asyncio.Task[dict[str, Any]]] = {}  # results of calls, by node
        self._reader = GraphReader(self._url)
        self._response: httpx.Response | None = None
        self._events = self._read()

    @property
    def id(self) -> str:
        """The graph's id on the server; empty until the first event."""
        return self._reader.id

    def __aiter__(self) -> AsyncIterator[GraphEvent]:
        return self._events

    async def wait(self) -> GraphResult:
        """The graph at its end; see `GraphRun.wait`."""
        async for _ in self._events:
            pass
        return self._reader.finished()

    async def answer(self, node: str, output: object) -> None:
        """See `GraphRun.answer`."""
        await self._send(tell_result(self.id, node, outcome(output), self._call.cache_salt))

    async def fail(self, node: str, why: str) -> None:
        """See `GraphRun.fail`."""
        await self._send(tell_result(self.id, node, {"error": why}, self._call.cache_salt))

    async def close(self) -> None:
        """End what still runs."""
        await self._events.aclose()
        if self._response is not None:
            await self._response.aclose()

    async def __aenter__(self) -> "AsyncGraphRun":
        await self._opened()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _opened(self) -> "httpx.Response":
        if self._response is None:
            self._response = await self._request(self._call)
            if self._response.status_code >= 400:
                await raise_refusal_async(self._response, self._url)
        return self._response

    async def _read(self) -> AsyncGenerator[GraphEvent, None]:
        import asyncio  # loaded by now, which `import mallee.client` is not to do

        running: set[asyncio.Task[Any]] = set()
        response = await self._opened()
        try:
            while True:
                try:
                    async with aclosing(self._stream(response, running)) as events:
                        async for event in events:
                            yield event
                    return
                except StreamBroken as error:
                    await response.aclose()
                    self._response = response = await self._resumed(error)
                    self._reader.begin_next()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await response.aclose()

    async def _stream(
        self, response: "httpx.Response", running: "set[asyncio.Task[Any]]"
    ) -> AsyncGenerator[GraphEvent, None]:
        """The events of one response. Raises StreamBroken if it has no end."""
        import asyncio

        def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            task = asyncio.create_task(work)
            running.add(task)
            task.add_done_callback(running.discard)
            return task

        with failing_as(StreamBroken, self._url):
            async for chunk in response.aiter_raw():
                for event in self._reader.feed(chunk):
                    if event.type == "tool.call" and event.call in self._tools:
                        # One that is asked again gets the result of the first time.
                        if event.node not in self._told:
                            self._told[event.node] = spawn(self._carry_out(event))
                        spawn(self._tell(event, self._told[event.node]))
                    yield event
                if self._reader.is_done:
                    return
        self._reader.finished()

    async def _resumed(self, error: StreamBroken) -> "httpx.Response":
        """See `GraphRun._resumed`."""
        import asyncio

        for wait_s in resume_waits(error, self._reader.id, self._num_left):
            await asyncio.sleep(wait_s)
            with suppress(ConnectionFailed):
                response = await self._request(resume_graph(self._call, self._reader.id))
                if response.status_code < 400:
                    self._num_left -= 1
                    return response
                try:
                    await raise_refusal_async(response, self._url)
                except (GraphRunning, Unavailable, StreamBroken):
                    continue
                except MalleeError as refusal:
                    raise error from refusal
        raise error

    async def _carry_out(self, event: GraphEvent) -> dict[str, Any]:
        try:
            return outcome(await result_of(self._tools[event.call], event.input))
        except Exception as error:  # a function of the user's: its node fails with it
            return failure(error)

    async def _tell(self, event: GraphEvent, told: "asyncio.Task[dict[str, Any]]") -> None:
        result = await told
        # It comes too late, or the gateway has died: then the call is asked again by another.
        with suppress(NotAwaited, NotFound, ConnectionFailed):
            await self._send(tell_result(event.id, event.node, result, self._call.cache_salt))
