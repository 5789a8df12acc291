"""State of requests in a replay: whole (the client's view), to be placed, and on one worker."""

from math import nan
from typing import NamedTuple, Protocol

from mallee.mocker.replay.fleet.workers import Worker
from mallee.mocker.updates import CountedUpdate
from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.protocol.ids import CapsuleId, RequestId
from mallee.protocol.messages import Limits, Share
from mallee.traces.workload import Request


class PromptText(NamedTuple):
    """A whole prompt: its name in commands and the hashes of its full blocks."""

    raw: bytes
    hashes: Hashes
    num_tokens: int


class CapsuleRef(NamedTuple):
    """A capsule of an answer, and the worker that keeps it."""

    id: CapsuleId
    num_tokens: int
    worker: Worker


class ParentState(NamedTuple):
    """The state of a finished request that its forks continue."""

    capsule: CapsuleRef | None
    num_tokens: int  # of prompt and answer
    ids: tuple[int, ...]  # that name the text from its first token on


class ShardOwner(Protocol):
    """The gateway that a shard belongs to."""

    def on_update(self, shard: "Shard", update: CountedUpdate, ended: float) -> None:
        """Handle an update of `shard` by a step that ended at `ended`."""
        ...

    def lost(self, shard: "Shard") -> None:
        """Place the rest of `shard` again: its worker is gone."""
        ...


class RequestState:
    """A whole request, the client's view. Times in virtual seconds."""

    __slots__ = (
        *("arrival", "cached", "capsule", "computed", "error", "first", "gateway", "name"),
        *("num_left", "num_shards", "output", "prompt_tokens", "raws", "reason", "request"),
        *("retries", "routed", "share", "shared", "suffixes", "worker"),
    )

    def __init__(self, request: Request, gateway: ShardOwner, now: float, share: Share) -> None:
        self.request = request
        self.gateway = gateway
        self.name = f"r{request.number}"
        self.arrival = now
        self.routed = self.first = nan
        self.share = share
        self.suffixes: tuple[bytes, ...] = ()  # of a fork's branches
        self.prompt_tokens = 0
        self.shared = 0  # leading prompt tokens that earlier requests had
        self.num_left = request.branches  # branches that have not ended
        self.num_shards = 0  # so far; each has a name of its own
        self.output = self.cached = self.computed = 0
        self.worker = -1  # index of the first shard's
        self.retries = 0
        self.error = ""  # code of a failure
        self.reason = ""  # the failure in words
        self.capsule: CapsuleRef | None = None  # of its first branch
        self.raws: list[bytes] = []  # texts to be dropped with it


class Dispatch:
    """Rows of a request to be placed: all of them, or what a lost worker left undone."""

    __slots__ = (
        *("capsule", "hashes", "is_fork", "last", "limits", "max_tokens", "rows", "state", "text"),
    )

    def __init__(self, state: RequestState, rows: int, limits: Limits) -> None:
        self.state = state
        self.rows = rows
        self.limits = limits  # of each row
        self.max_tokens = limits.max_tokens  # 0: only the prompt is computed
        self.is_fork = False  # each row adds a text of its own to the shared one
        self.text: PromptText | None = None  # shared by the rows; None: they fork `capsule`
        self.hashes: Hashes = NO_HASHES  # of the text
        self.capsule: CapsuleId | None = None
        self.last = -1.0  # time of the last token of its one row, on a lost worker; negative: none

    def bring(self, text: PromptText) -> None:
        """Continue `text` in all rows, without a capsule."""
        self.capsule, self.text, self.hashes = None, text, text.hashes
        self.state.raws.append(text.raw)


class Shard:
    """Rows of a dispatch that are booked and run on one worker."""

    __slots__ = (
        *("dispatch", "gateway", "how", "is_seen", "last", "name", "num_left", "num_reported"),
        *("reported_by_row", "rows", "state", "worker"),
    )

    def __init__(self, dispatch: Dispatch, name: RequestId, worker: Worker, rows: range) -> None:
        self.dispatch = dispatch
        self.state = dispatch.state
        self.gateway = dispatch.state.gateway
        self.name = name
        self.worker = worker
        self.rows = rows
        self.num_left = len(rows)
        self.how = "stay"
        self.is_seen = False
        self.num_reported = 0  # tokens
        self.last = dispatch.last
        self.reported_by_row: dict[int, int] = {}  # tokens of running rows, if there are several
