"""Messages of one HTTP request between Envoy and the picker, as plain values.

The subset of `envoy.service.ext_proc.v3` that an endpoint picker needs; `wire` turns them into protobuf.
Source: envoyproxy/envoy api/envoy/service/ext_proc/v3/external_processor.proto (1.39); the endpoint picker
protocol 1.0.0, proposal 004 of kubernetes-sigs/gateway-api-inference-extension.
"""

from enum import IntEnum
from typing import Final, Literal, NamedTuple, TypeAlias

from mallee.actors.front.placement import Refusal

DESTINATION: Final = "x-gateway-destination-endpoint"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
LB_NAMESPACE: Final = "envoy.lb"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"

Side: TypeAlias = Literal["request", "response"]


class BodyMode(IntEnum):
    """The way in which Envoy sends a body (`ProcessingMode.BodySendMode`)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


class Modes(NamedTuple):
    """Body modes of both sides, which Envoy tells with its first message."""

    request: BodyMode
    response: BodyMode


# From Envoy


class Headers(NamedTuple):
    """Headers of a request or a response; `ends`: nothing follows."""

    side: Side
    headers: dict[str, str]
    ends: bool


class Body(NamedTuple):
    """A piece of a body; `ends`: nothing follows, trailers neither."""

    side: Side
    data: bytes
    ends: bool


class Trailers(NamedTuple):
    """The end of a body."""

    side: Side


class Incoming(NamedTuple):
    """One message of Envoy's, with what it says beside it.

    `subset`: endpoints that alone may be picked; None: all. `served`: the endpoint that the answer is from.
    `modes`: only with the first message, and not from all proxies. `is_observed`: no reply is wanted.
    """

    part: Headers | Body | Trailers
    subset: tuple[str, ...] | None = None
    served: str | None = None
    modes: Modes | None = None
    is_observed: bool = False


# To Envoy


class Destination(NamedTuple):
    """The endpoints of a request, best first; the others are for retries."""

    endpoints: tuple[str, ...]

    @property
    def value(self) -> str:
        """As the header and the metadata have it."""
        return ",".join(self.endpoints)


class Passed(NamedTuple):
    """Headers, a buffered body or trailers go on as they are, to a destination if it comes with one."""

    part: Literal["headers", "body", "trailers"]
    side: Side
    destination: Destination | None = None


class Piece(NamedTuple):
    """A piece of a body goes on, where Envoy keeps none of it (FULL_DUPLEX_STREAMED)."""

    side: Side
    data: bytes
    ends: bool


Reply: TypeAlias = Passed | Piece | Refusal
