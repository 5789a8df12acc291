"""The ZeroMQ sockets of one engine's KV events: published ones, and replays of those that were missed."""

import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from mallee.actors.front.pods.event_order import Arrival, EventOrder
from mallee.protocol.errors import shown

if TYPE_CHECKING:
    import zmq.asyncio

log = logging.getLogger(__name__)

REPLAY_S: Final = 5.0  # for the next message of a replay
MAX_QUEUED: Final = 10_000  # messages, in the socket
MAX_NBYTES: Final = 64 << 20  # of a message
_LOOK_S: Final = 0.5  # between two looks for a replay that is wanted, in silence
MAX_RANKS: Final = 256  # of one pod
_ENDPOINT: Final = re.compile(
    r"tcp://(?P<host>\[[0-9A-Fa-f:.]*\]|\*|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
)
_ANY_HOST: Final = ("*", "0.0.0.0", "[::]")  # noqa: S104
_SEQ_NBYTES: Final = 8
_END: Final = (-1).to_bytes(_SEQ_NBYTES, "big", signed=True)


class EventPlaces(NamedTuple):
    """The addresses of one engine's sockets; `replay` None: what is missed is lost."""

    live: str
    replay: str | None
    topic: str


def told_places(text: str, host: str) -> dict[int, EventPlaces]:
    """The places by rank in vLLM's answer to `GET /kv_event_sources`, of an engine at `host`.

    Raises ValueError, with a reason for the user.
    """
    found: dict[int, EventPlaces] = {}
    try:
        sources: dict[str, dict[str, str | None]] = json.loads(text)
        for rank, source in list(sources.items())[:MAX_RANKS]:
            if source["publisher"] == "zmq":
                replay = source["replay_endpoint"]
                found[int(rank)] = EventPlaces(
                    live=_reachable(str(source["endpoint"]), host),
                    replay=None if replay is None else _reachable(replay, host),
                    topic=source["topic"] or "",
                )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"/kv_event_sources is not understood: {error!r}") from error
    if not found:
        raise ValueError("it publishes no KV events: start vLLM with --kv-events-config")
    return found


def _reachable(endpoint: str, host: str) -> str:
    """`endpoint` as an engine binds it, for those elsewhere."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise ValueError(
            f"it publishes KV events at {shown(endpoint)}, which is no tcp://host:port"
        )
    return f"tcp://{host if match['host'] in _ANY_HOST else match['host']}:{match['port']}"


class Subscriber:
    """Reads one engine's messages, in the order of `order`, into `take(arrival)`.

    The engine may come late, go away and come back: ZeroMQ reconnects.
    """

    def __init__(
        self,
        context: "zmq.asyncio.Context",
        places: EventPlaces,
        order: EventOrder,
        take: Callable[[Arrival], None],
    ) -> None:
        self._context = context
        self._places = places
        self._order = order
        self._take = take

    async def run(self) -> None:
        """Until cancelled."""
        import zmq  # an extra: pickers without KV events don't need it

        with self._context.socket(zmq.SUB) as live:
            live.setsockopt(zmq.RCVHWM, MAX_QUEUED)
            live.setsockopt(zmq.MAXMSGSIZE, MAX_NBYTES)
            live.setsockopt(zmq.LINGER, 0)
            live.setsockopt(zmq.IPV6, 1)
            live.subscribe(self._places.topic)
            live.connect(self._places.live)
            while True:
                if await live.poll(int(_LOOK_S * 1000)):
                    self._on_live(await live.recv_multipart())
                if self._order.wants_replay:
                    await self._replay(live)

    def _on_live(self, frames: list[bytes]) -> None:
        if len(frames) == 3 and len(frames[1]) == _SEQ_NBYTES:
            seq = int.from_bytes(frames[1], "big")
            self._take(self._order.on_live(seq, frames[2]))
        else:
            log.warning("%s sends messages that are no KV events", self._places.live)

    async def _replay(self, live: "zmq.asyncio.Socket") -> None:
        """Ask for what is missing and take it in; live messages go on being read, and wait."""
        import zmq

        assert self._places.replay is not None
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_NBYTES)
            socket.connect(self._places.replay)
            start, is_complete = self._order.begin_replay(), False
            await socket.send_multipart([b"", start.to_bytes(_SEQ_NBYTES, "big")])
            heard_at = asyncio.get_running_loop().time()
            while not self._order.wants_replay:
                while await live.poll(0):
                    self._on_live(await live.recv_multipart())
                if not await socket.poll(50):
                    if asyncio.get_running_loop().time() - heard_at > REPLAY_S:
                        log.info("no replay from %s", self._places.replay)
                        break
                    continue
                heard_at = asyncio.get_running_loop().time()
                frames = await socket.recv_multipart()
                if len(frames) < 3 or frames[-2] == _END:
                    is_complete = len(frames) >= 3
                    break
                seq = int.from_bytes(frames[-2], "big")
                self._take(self._order.on_replayed(seq, frames[-1]))
        self._take(self._order.end_replay(is_complete=is_complete))
