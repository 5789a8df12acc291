"""The effects of a dispatcher's decisions, in order: a shell carries them out."""

from typing import Any, NamedTuple, TypeAlias

from mallee.protocol.errors import MalleeError
from mallee.protocol.ids import CapsuleId, RequestId, Scope, WorkerId
from mallee.protocol.messages import Command
from mallee.router.dispatch.shards import Shard
from mallee.router.placement.fanout_pricing import Prices
from mallee.router.placement.placer import Placement


class Placed(NamedTuple):
    """A shard of a request was booked; its commands follow."""

    request: RequestId
    shard: Shard
    placement: Placement
    prices: Prices | None  # of a fan-out's part


class Send(NamedTuple):
    """A command for a worker, after all those before it. `shard`: the one that it is for, if one is."""

    worker: WorkerId
    command: Command
    shard: Shard | None


class Deliver(NamedTuple):
    """News of a branch for its client.

    `update` is the worker's (its `branch` counts the shard's rows, `branch` here the request's); `prompt`
    are the prompt tokens cached and computed, for the client.
    """

    request: RequestId
    branch: int
    shard: Shard
    update: Any
    prompt: tuple[int, int]


class NotInjected(NamedTuple):
    """Tokens that a client wanted in a branch, and that won't be there."""

    name: str
    error: MalleeError


class Failed(NamedTuple):
    """The end of a branch by an error."""

    request: RequestId
    branch: int
    error: MalleeError


class Refused(NamedTuple):
    """The end of a request that waited, and of which nothing was sent to a worker."""

    request: RequestId
    error: MalleeError


class Ended(NamedTuple):
    """The end of a request: each branch has ended, or was cancelled. Nothing follows."""

    request: RequestId


class LetGo(NamedTuple):
    """A worker that drains has nothing left of this gateway's: the link to it can be closed."""

    worker: WorkerId


class Rebuilt(NamedTuple):
    """A capsule that is durable on `source`, which drains, is on `worker` too, and not durable there yet.

    The shell calls `Dispatcher.secured` when it is, or can't be.
    """

    capsule: CapsuleId
    source: WorkerId
    worker: WorkerId


class Missing(NamedTuple):
    """A capsule that its worker has not any more, and whose text is known: was it released?

    The shell calls `Dispatcher.confirm` when it knows, or can't.
    """

    capsule: CapsuleId
    scope: Scope


Effect: TypeAlias = (
    Placed | Send | Deliver | NotInjected | Failed | Refused | Ended | LetGo | Rebuilt | Missing
)
