"""Requests on their way, as clients see them (calls) and as workers do (parts); and their texts."""

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING, Final, NamedTuple

from mallee.mocker.texts import Texts
from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.protocol.ids import CapsuleId, RequestId
from mallee.protocol.messages import Limits, Share
from mallee.traces.workload import NO_PARENT, Request

if TYPE_CHECKING:
    from mallee.mocker.replay.fleet import Worker
    from mallee.mocker.replay.gateway import Gateway

MAX_BRANCHES: Final = 1 << 20  # of one request
_FIRST_MADE_ID: Final = 1 << 40  # far beyond the ids of traces
_MADE_IDS: Final = 1 << 12  # at most, for the text that one request adds


class Text(NamedTuple):
    """A whole prompt: its name in commands and the hashes of its full blocks."""

    raw: bytes
    hashes: Hashes
    num_tokens: int


class Kept(NamedTuple):
    """A capsule that an answer left, and where."""

    capsule: CapsuleId
    num_tokens: int
    worker: "Worker"


class Left(NamedTuple):
    """What a request leaves for those that fork its end."""

    kept: Kept | None  # None: no capsule
    num_tokens: int  # of prompt and answer
    ids: tuple[int, ...]  # that name the text from its first token on


class Call:
    """A request as its client sees it. Times in virtual seconds."""

    __slots__ = (
        *("arrival", "cached", "computed", "error", "first", "gateway", "kept", "left", "name"),
        *("num_parts", "output", "prompt_tokens", "raws", "request", "retries", "routed"),
        *("share", "shared", "suffixes", "why", "worker"),
    )

    def __init__(self, request: Request, gateway: "Gateway", now: float, share: Share) -> None:
        self.request = request
        self.gateway = gateway
        self.name = f"r{request.number}"
        self.arrival = now
        self.routed = self.first = nan
        self.share = share
        self.suffixes: tuple[bytes, ...] = ()  # of a fork's branches
        self.prompt_tokens = 0
        self.shared = 0  # leading prompt tokens that others had before
        self.left = request.branches  # branches that have not ended
        self.num_parts = 0  # so far; each has a name of its own
        self.output = self.cached = self.computed = 0
        self.worker = -1  # index of the first part's
        self.retries = 0
        self.error = ""  # code of why it failed
        self.why = ""  # in words
        self.kept: Kept | None = None  # of its first branch
        self.raws: list[bytes] = []  # texts to be dropped with it


class Order:
    """Rows of a call that are to be placed: all of it, or what a lost worker left undone."""

    __slots__ = (
        *("call", "capsule", "hashes", "is_fork", "last", "limits", "max_tokens", "rows", "text"),
    )

    def __init__(self, call: Call, rows: int, limits: Limits) -> None:
        self.call = call
        self.rows = rows
        self.limits = limits  # of each row
        self.max_tokens = limits.max_tokens  # 0: only the prompt is computed
        self.is_fork = False  # its rows have texts of their own after what they share
        self.text: Text | None = None  # what they share; None: it forks `capsule`
        self.hashes: Hashes = NO_HASHES  # of the text
        self.capsule: CapsuleId | None = None
        self.last = -1.0  # when its one row drew last, on a worker that was lost; before 0: never

    def bring(self, text: Text) -> None:
        """Its rows continue this text, without a capsule."""
        self.capsule, self.text, self.hashes = None, text, text.hashes
        self.call.raws.append(text.raw)


class Part:
    """Rows of an order on one worker, booked and running there."""

    __slots__ = (
        *(
            "call",
            "gateway",
            "how",
            "is_seen",
            "last",
            "left",
            "name",
            "order",
            "rows",
            "rows_told",
        ),
        *("told", "worker"),
    )

    def __init__(self, order: Order, name: RequestId, worker: "Worker", rows: range) -> None:
        self.order = order
        self.call = order.call
        self.gateway = order.call.gateway
        self.name = name
        self.worker = worker
        self.rows = rows
        self.left = len(rows)
        self.how = "stay"
        self.is_seen = False
        self.told = 0  # tokens
        self.last = order.last
        self.rows_told: dict[int, int] = {}  # tokens of branches that run, if there are several


class Library:
    """The texts of calls, made when they begin; and what ended requests leave to be forked."""

    def __init__(self, texts: Texts, id_tokens: int) -> None:
        self._texts = texts
        self._id_tokens = id_tokens
        self._limits: dict[int, Limits] = {}
        self._left: dict[int, Left] = {}  # by number of the request that left it
        self._children: dict[int, int] = {}  # forks that are still to end

    def limits(self, max_tokens: int) -> Limits:
        """Answers of just so many tokens. Equal ones are the same object."""
        limits = self._limits.get(max_tokens)
        if limits is None:
            limits = self._limits[max_tokens] = Limits(max_tokens, (), True)
        return limits

    def prompt(self, ids: Sequence[int], num_tokens: int) -> Text:
        """A whole prompt of at least one token, the first of which `ids` name."""
        num_tokens = max(1, num_tokens)
        raw = self._texts.prompt(ids, num_tokens, self._id_tokens)
        return Text(raw, self._texts.hashes(raw), num_tokens)

    def hashes(self, raw: bytes) -> Hashes:
        """Of the full blocks of the text of that name."""
        return self._texts.hashes(raw)

    def suffixes(self, request: Request) -> tuple[bytes, ...]:
        """What each branch of a fork adds to its parent's text."""
        first, suffix = request.number * MAX_BRANCHES, self._texts.suffix
        return tuple(suffix(first + i, request.input_tokens) for i in range(request.branches))

    def parent(self, request: Request) -> Left:
        """What the parent of a fork left."""
        return self._left[request.parent]

    def before(self, request: Request) -> Text:
        """What a fork continues."""
        left = self.parent(request)
        return self.prompt(left.ids, left.num_tokens)

    def whole(self, request: Request, num_told: int = 0) -> Text:
        """The whole prompt of `request`, without a capsule, and so much of its answer.

        Siblings' prompts begin alike.
        """
        ids, num_tokens = request.ids, request.input_tokens
        if request.parent != NO_PARENT:
            left = self.parent(request)
            ids, num_tokens = left.ids, left.num_tokens + request.input_tokens
        return self.prompt(ids, num_tokens + num_told)

    def drop(self, call: Call) -> None:
        """The call is over: nobody asks for its texts again."""
        for raw in call.raws:
            self._texts.drop(raw)

    def leave(self, call: Call, num_tokens: int) -> None:
        """`call` has ended, to be forked, with `num_tokens` of its own text, prompt and answer."""
        request = call.request
        ids: Sequence[int] = request.ids
        if request.parent != NO_PARENT:
            left = self.parent(request)
            ids, num_tokens = left.ids, left.num_tokens + num_tokens
        if call.kept is not None:
            num_tokens = call.kept.num_tokens
        # The text beyond what the trace names gets names of its own, whole ids again.
        known = min(len(ids), (num_tokens - 1) // self._id_tokens)
        first = _FIRST_MADE_ID + request.number * _MADE_IDS
        missing = min(-(-num_tokens // self._id_tokens) - known, _MADE_IDS)
        named = (*ids[:known], *range(first, first + missing))
        self._left[request.number] = Left(call.kept, num_tokens, named)
        self._children[request.number] = request.num_children

    def child_ended(self, parent: int) -> Kept | None:
        """A fork of `parent` is over: the capsule to be released, if that was the last one."""
        if parent not in self._children:
            return None
        self._children[parent] -= 1
        if self._children[parent]:
            return None
        del self._children[parent]
        return self._left.pop(parent).kept
