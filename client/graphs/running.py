"""A graph that runs, followed by a client that blocks. Its twin is `aio`.

`request(call)` opens a stream, `send(call)` gives a whole answer.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from mallee.client.base import failing_as, raise_refusal
from mallee.client.calls import Call
from mallee.client.errors import StreamBroken
from mallee.client.graphs.builder import ToolFunction, tell_result
from mallee.client.graphs.results import GraphEvent, GraphReader, GraphResult, failure, outcome
from mallee.protocol.errors import NotAwaited, NotFound

if TYPE_CHECKING:
    import httpx

MAX_TOOLS: Final = 64  # at once: as many as a gateway asks for


class GraphRun:
    """A graph that runs. Iterate for its events as they come, or `wait`; closing early ends it.

    Functions of its tools run in threads, beside the reading.
    """

    def __init__(
        self,
        call: Call,
        tools: dict[str, ToolFunction],
        *,
        base_url: str,
        request: Callable[[Call], "httpx.Response"],
        send: Callable[[Call], Any],
    ) -> None:
        self._url = base_url + call.path
        self._salt = call.cache_salt
        self._tools = tools
        self._send = send
        self._reader = GraphReader(self._url)
        self._response = request(call)
        if self._response.status_code >= 400:
            raise_refusal(self._response, self._url)
        self._events = self._read()

    @property
    def id(self) -> str:
        """The graph's id on the server; empty until the first event."""
        return self._reader.id

    def __iter__(self) -> Iterator[GraphEvent]:
        return self._events

    def wait(self) -> GraphResult:
        """The graph at its end. Nodes that failed have their errors. Raises StreamBroken."""
        for _ in self._events:
            pass
        return self._reader.finished()

    def answer(self, node: str, output: object) -> None:
        """Give the result of a call that no function here carries out. Raises NotAwaited."""
        self._send(tell_result(self.id, node, outcome(output), self._salt))

    def fail(self, node: str, why: str) -> None:
        """Say that such a call failed. Raises NotAwaited."""
        self._send(tell_result(self.id, node, {"error": why}, self._salt))

    def close(self) -> None:
        """End what still runs."""
        self._events.close()
        self._response.close()

    def __enter__(self) -> "GraphRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> Generator[GraphEvent, None, None]:
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(MAX_TOOLS, "mallee-tool")
        try:
            with failing_as(StreamBroken, self._url):
                for chunk in self._response.iter_raw():
                    for event in self._reader.feed(chunk):
                        if event.type == "tool.call" and event.call in self._tools:
                            pool.submit(self._carry_out, event)
                        yield event
                    if self._reader.is_done:
                        return
            self._reader.finished()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._response.close()

    def _carry_out(self, event: GraphEvent) -> None:
        try:
            told = outcome(self._tools[event.call](event.input))
        except Exception as error:  # a function of the user's: its node fails with it
            told = failure(error)
        with suppress(NotAwaited, NotFound):  # it comes too late
            self._send(tell_result(event.id, event.node, told, self._salt))
