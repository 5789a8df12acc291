"""The way on for a graph whose stream broke off: the call that resumes it, and when to make it."""

from collections.abc import Iterator
from typing import Final

from mallee.client.base import growing_waits, was_cut
from mallee.client.calls import Call
from mallee.client.errors import StreamBroken

WAIT_S: Final = 0.25  # before the first call, and twice as long before each further one,
MAX_WAIT_S: Final = 2.0  # up to this
RESUME_S: Final = 20.0  # for a gateway that goes on with it


def resume_graph(call: Call, graph: str) -> Call:
    """The call that goes on with a graph which has stopped, as `call` began it."""
    body = {**(call.body or {}), "resume": graph}
    return Call(call.method, call.path, body, cache_salt=call.cache_salt)


def resume_waits(error: StreamBroken, graph: str, num_left: int) -> Iterator[float]:
    """Seconds before each call; none for a stream that was not cut, or did not name the graph before."""
    if not (num_left and graph and was_cut(error)):
        return
    waited_s = 0.0
    for wait_s in growing_waits(WAIT_S, MAX_WAIT_S):
        if waited_s >= RESUME_S:
            return
        yield wait_s
        waited_s += wait_s
