"""A graph that runs, followed by a client that blocks. Its twin is `aio`.

`request(call)` opens a stream, `send(call)` gives a whole answer.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from mallee.client.base import failing_as, raise_refusal
from mallee.client.calls import Call
from mallee.client.errors import ConnectionFailed, StreamBroken
from mallee.client.graphs.builder import ToolFunction, tell_result
from mallee.client.graphs.results import GraphEvent, GraphReader, GraphResult, failure, outcome
from mallee.client.graphs.resuming import resume_graph, resume_waits
from mallee.protocol.errors import GraphRunning, MalleeError, NotAwaited, NotFound, Unavailable

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    import httpx

MAX_TOOLS: Final = 64  # at once: as many as a gateway asks for


class GraphRun:
    """A graph that runs. Iterate for its events as they come, or `wait`; closing early ends it.

    Functions of its tools run in threads, beside the reading. If its stream is cut, as its gateway died, it
    goes on at another with what was done (`graph.resumed`): texts of nodes that had not ended begin anew. So
    up to `max_retries` times.
    """

    def __init__(
        self,
        call: Call,
        tools: dict[str, ToolFunction],
        *,
        base_url: str,
        request: Callable[[Call], "httpx.Response"],
        send: Callable[[Call], Any],
        max_retries: int,
    ) -> None:
        self._url = base_url + call.path
        self._call = call
        self._tools = tools
        self._request = request
        self._send = send
        self._num_left = max_retries  # times that it may be resumed
        self._told: dict[str, Future[dict[str, Any]]] = {}  # results of calls, by node
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
        self._send(tell_result(self.id, node, outcome(output), self._call.cache_salt))

    def fail(self, node: str, why: str) -> None:
        """Say that such a call failed. Raises NotAwaited."""
        self._send(tell_result(self.id, node, {"error": why}, self._call.cache_salt))

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

        pool = ThreadPoolExecutor(2 * MAX_TOOLS, "mallee-tool")
        try:
            while True:
                try:
                    yield from self._stream(pool)
                    return
                except StreamBroken as error:
                    self._response.close()
                    self._response = self._resumed(error)
                    self._reader.begin_next()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._response.close()

    def _stream(self, pool: "Executor") -> Generator[GraphEvent, None, None]:
        """The events of one response. Raises StreamBroken if it has no end."""
        with failing_as(StreamBroken, self._url):
            for chunk in self._response.iter_raw():
                for event in self._reader.feed(chunk):
                    if event.type == "tool.call" and event.call in self._tools:
                        # One that is asked again gets the result of the first time.
                        if event.node not in self._told:
                            self._told[event.node] = pool.submit(self._carry_out, event)
                        pool.submit(self._tell, event, self._told[event.node])
                    yield event
                if self._reader.is_done:
                    return
        self._reader.finished()

    def _resumed(self, error: StreamBroken) -> "httpx.Response":
        """The graph's next stream, of whichever gateway answers. Raises `error` if none goes on with it."""
        for wait_s in resume_waits(error, self._reader.id, self._num_left):
            time.sleep(wait_s)
            with suppress(ConnectionFailed):
                response = self._request(resume_graph(self._call, self._reader.id))
                if response.status_code < 400:
                    self._num_left -= 1
                    return response
                try:
                    raise_refusal(response, self._url)
                except (GraphRunning, Unavailable, StreamBroken):
                    continue
                except MalleeError as refusal:
                    raise error from refusal
        raise error

    def _carry_out(self, event: GraphEvent) -> dict[str, Any]:
        try:
            return outcome(self._tools[event.call](event.input))
        except Exception as error:  # a function of the user's: its node fails with it
            return failure(error)

    def _tell(self, event: GraphEvent, told: "Future[dict[str, Any]]") -> None:
        # It comes too late, or the gateway has died: then the call is asked again by another.
        with suppress(NotAwaited, NotFound, ConnectionFailed):
            self._send(tell_result(event.id, event.node, told.result(), self._call.cache_salt))
