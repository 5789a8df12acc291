"""The synchronous SDK over one WebSocket, which has an event loop in a thread."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mallee.client import Mallee, UnknownCapsule
from mallee.client.errors import ConnectionFailed, StreamBroken
from mallee.client.transports.live import LiveTransport

pytestmark = pytest.mark.real_time

TEXTS = [f"hello {i}" for i in range(3)]


def test_many_threads_share_one_socket(live_in_thread: Any) -> None:
    """F20, part, I17, part: streams, whole answers, errors, each to its own; one that is left ends."""
    live = live_in_thread
    transport = LiveTransport(live.url)
    with Mallee(live.url, transport=transport) as client, ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda i: client.complete(f"prompt {i}", n=3), range(24))
        assert all([each.text for each in answer] == TEXTS for answer in answers)
        assert len(live.server.server_state.connections) == 1
        assert [each.text for each in client.prefill("abc").fork(3).wait()] == TEXTS
        with pytest.raises(UnknownCapsule):
            client.capsule("never")
        live.service.holds_after = 2
        with client.stream("abc", n=2) as branches:
            for _ in branches:
                if len(branches.branches) == 2:
                    break
        assert live.service.closed.wait(5)
        assert transport._inner._waiting == {}
        with client.stream("abc") as branches:
            next(iter(branches))
            assert transport._inner._socket is not None
            transport._loop.call_soon_threadsafe(transport._inner._socket.transport.abort)
            with pytest.raises(StreamBroken):
                branches.wait()
        live.service.reset()
        assert client.models()
        left = client.stream("abc")
    left.close()
    nowhere = LiveTransport("http://127.0.0.1:1")
    for closed, why in ((transport, "the transport is closed"), (nowhere, "no answer from")):
        with (
            Mallee(client.base_url, transport=closed, max_retries=0) as nobody,
            pytest.raises(ConnectionFailed, match=why),
        ):
            nobody.models()
