"""Links over Ray Serve: every call is pinned to one replica, and refused by any other.

Serve routes a handle's calls where it likes; `PinnedRouter` (a public extension point) sends each call
to the replica whose unique id is the call's session id. If that replica is not known, the call goes to
any other one, which refuses a call with another's address: so a caller learns quickly
that its worker is gone, and no worker ever takes another's commands.

Calls are made in tasks without a Serve request context (`HostLink`): Ray 2.60 hangs concurrent calls
of one request through a custom router, because they share one internal request id.
"""

from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from mallee.actors.transport.link import ChannelTransport, Transport
from mallee.protocol.errors import MalleeError


class PinnedRouter(RequestRouter):
    """Sends a request to the replica named by its session id."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One rank of one replica: the pinned one, or any (which will refuse)."""
        if pending_request is None:
            return [candidate_replicas]
        # Without it Serve asks a full replica again and again without sleeping.
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.metadata.session_id
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == wanted:
                return [[replica]]
        return [candidate_replicas[:1]] if candidate_replicas else []


def ray_transport(gateway: str, workers: DeploymentHandle[Any]) -> Transport:
    """Links to the replicas of a deployment with methods `submit` and `frames`.

    An address is a replica's unique id. The deployment must use `PinnedRouter`.
    """
    return ChannelTransport(lambda address: _RayChannel(gateway, address, workers))


class _RayChannel:
    def __init__(self, gateway: str, address: str, workers: DeploymentHandle[Any]) -> None:
        self._gateway = gateway
        self._address = address
        self._calls: Any = workers.options(session_id=address)
        self._streams: Any = workers.options(session_id=address, stream=True)

    async def submit(self, raw: bytes) -> None:
        try:
            await self._calls.submit.remote(self._gateway, self._address, raw)
        except RayError as error:
            raise _plain(error) from error

    async def frames(self) -> AsyncGenerator[bytes, None]:
        response = self._streams.frames.remote(self._gateway, self._address)
        try:
            async for raw in response:
                yield raw
        except RayError as error:
            raise _plain(error) from error
        finally:
            response.cancel()  # or the worker goes on until it notices the silence


def _plain(error: RayError) -> Exception:
    """The error without Ray's account of processes and hosts, which clients would see."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, MalleeError):
        return error.cause
    if isinstance(error, RayActorError):
        return ConnectionError("its process died")
    return ConnectionError(type(error).__name__)
