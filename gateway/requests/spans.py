"""The spans of requests in a gateway: one each, below it its wait, its shards on workers, its branches.

    chat m                     from the job's start to its end; a fork links to what made its capsule
    |- queue                   until a worker takes it
    |- shard                   branches on one worker, where `engine` joins it; one more after a move
    `- branch
       |- prefill              from its worker's taking it to its first token
       `- decode               to its end

Times are those that a gateway keeps of each branch; a branch's spans are made when it is over.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, get_current_span
from opentelemetry.trace import set_span_in_context as below

from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.lives import BranchLife
from mallee.gateway.requests.observers import Observer
from mallee.protocol.errors import MalleeError
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, RequestId, request_of
from mallee.router.dispatch.jobs import Job
from mallee.router.dispatch.shards import Shard
from mallee.router.placement.placer import Placement
from mallee.runtime.telemetry.tracing import genai
from mallee.runtime.telemetry.tracing.genai import Attributes
from mallee.runtime.telemetry.tracing.http import traceparent
from mallee.runtime.telemetry.tracing.provider import Tracing

MAX_LINKED: Final = 4096  # requests whose capsules' forks can link to them


def request_attributes(job: Job, model: str) -> Attributes:
    """The fields that a client gave, without any text."""
    found: Attributes = {
        genai.OPERATION: job.operation,
        genai.PROVIDER: "mallee",
        genai.REQUEST_MODEL: model,
        genai.RESPONSE_MODEL: model,
        genai.CHOICES: job.num_branches,
    }
    if job.capsule is not None:
        found[genai.CAPSULE] = job.capsule
    if not job.max_tokens:
        return found
    sampling = job.sampling
    found |= {
        genai.MAX_TOKENS: job.max_tokens,
        genai.TEMPERATURE: sampling.temperature,
        genai.TOP_P: sampling.top_p,
        genai.FREQUENCY_PENALTY: sampling.frequency_penalty,
        genai.PRESENCE_PENALTY: sampling.presence_penalty,
    }
    if sampling.top_k:
        found[genai.TOP_K] = sampling.top_k
    if job.grammar is not None and job.grammar.kind.startswith("json"):
        found[genai.OUTPUT_TYPE] = "json"
    return found


class RequestSpans:
    """Begins the spans of a gateway's requests. Belongs to one event loop."""

    def __init__(
        self, tracing: Tracing, model: str, *, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """`clock_ns`: nanoseconds since the epoch."""
        self._tracer = tracing.tracer
        self._model = model
        self._clock_ns = clock_ns
        self._past: OrderedDict[RequestId, SpanContext] = OrderedDict()

    def begin(self, request: RequestId, job: Job, prepare_s: float) -> "RequestTrace | None":
        """The trace of a request, below the span of this context; None if it is not sampled."""
        now = self._clock_ns()
        parent = get_current_span()
        attributes = request_attributes(job, self._model)
        span = self._tracer.start_span(
            f"{job.operation} {self._model}",
            attributes={**attributes, genai.RESPONSE_ID: request},
            links=self._links(job.capsule),
            start_time=now,
        )
        if not span.is_recording():
            return None
        if parent.is_recording() and prepare_s > 0:
            begun = now - int(prepare_s * 1e9)
            self._tracer.start_span("prepare", start_time=begun).end(now)
        self._past[request] = span.get_span_context()
        if len(self._past) > MAX_LINKED:
            self._past.popitem(last=False)
        return RequestTrace(span, self._start, now)

    def _links(self, capsule: CapsuleId | None) -> list[Link]:
        made_by = None if capsule is None else self._past.get(request_of(capsule))
        return [] if made_by is None else [Link(made_by)]

    def _start(
        self, name: str, context: Context, start_ns: int, attributes: Attributes | None = None
    ) -> Span:
        return self._tracer.start_span(
            name, context, start_time=start_ns, attributes=attributes or {}
        )


class _ShardSpan:
    """The span of a shard, and its branches that run there."""

    __slots__ = ("open", "span")

    def __init__(self, span: Span, branches: range) -> None:
        self.span = span
        self.open = set(branches)


class RequestTrace(Observer):
    """The spans of one request. Times are seconds since it began."""

    __slots__ = ("_begun_ns", "_context", "_is_placed", "_shards", "_span", "_start", "exemplar")

    def __init__(self, span: Span, start: Callable[..., Span], begun_ns: int) -> None:
        self._span = span
        self._start = start
        self._begun_ns = begun_ns
        self._context = below(span)
        self._is_placed = False
        self._shards: dict[RequestId, _ShardSpan] = {}
        context = span.get_span_context()
        self.exemplar = {
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
        }

    @property
    def trace_id(self) -> str:
        return self.exemplar["trace_id"]

    def parent_of(self, shard: RequestId) -> str:
        """W3C's traceparent for the worker that a shard is sent to."""
        return traceparent(self._shards[shard].span)

    def placed(self, shard: Shard, placement: Placement, at_s: float) -> None:
        if not self._is_placed:
            self._is_placed = True
            self._start("queue", self._context, self._begun_ns).end(self._at(at_s))
        for branch in shard.branches:
            self._leave(branch, at_s, is_moved=True)
        span = self._start(
            "shard",
            self._context,
            self._at(at_s),
            {
                genai.SHARD: shard.name,
                genai.WORKER: shard.worker,
                genai.BRANCHES: len(shard.branches),
                genai.OVERLAP: placement.overlap_blocks,
                genai.BEST_OVERLAP: placement.best_overlap_blocks,
                genai.REASON: placement.reason,
                genai.HOW: shard.how,
            },
        )
        self._shards[shard.name] = _ShardSpan(span, shard.branches)

    def delivered(self, branch: BranchLife, delta: Delta) -> None:
        if delta.finish is not None:
            self._branch_ended(branch, delta.error)

    def gave_up(self, branch: BranchLife) -> None:
        self._branch_ended(branch)

    def cut(self, branch: BranchLife, at: int, residue: Tokens) -> None:
        self._branch_ended(branch)

    def _branch_ended(self, life: BranchLife, error: MalleeError | None = None) -> None:
        """A branch is over, as `life` says."""
        assert life.end_s is not None, "it is over"
        end_s, placed_s, first_s = life.end_s, life.placed_s, life.first_token_s
        attributes: Attributes = {
            genai.BRANCH: life.index,
            genai.OUTPUT_TOKENS: life.num_tokens,
            genai.MOVES: life.num_moves,
            genai.FINISH_REASONS: [str(life.end)],
        }
        if life.worker is not None:
            attributes[genai.WORKER] = life.worker
        span = self._start("branch", self._context, self._at(placed_s or 0.0), attributes)
        if placed_s is not None:
            inside = below(span)
            tokens: Attributes = {
                genai.CACHED_TOKENS: life.cached_tokens,
                genai.COMPUTED_TOKENS: life.prefill_tokens,
            }
            prefill = self._start("prefill", inside, self._at(placed_s), tokens)
            prefill.end(self._at(end_s if first_s is None else first_s))
            if first_s is not None:
                drawn: Attributes = {genai.OUTPUT_TOKENS: life.num_tokens}
                self._start("decode", inside, self._at(first_s), drawn).end(self._at(end_s))
        if error is not None:
            _fail(span, error)
            _fail(self._span, error)
        span.end(self._at(end_s))
        self._leave(life.index, end_s)

    def ended(self, branches: Sequence[BranchLife], error: MalleeError | None) -> None:
        first = branches[0]
        begun = [life.first_token_s for life in branches if life.first_token_s is not None]
        self._span.set_attributes(
            {
                genai.INPUT_TOKENS: first.cached_tokens + first.prefill_tokens,
                genai.CACHED_TOKENS: first.cached_tokens,
                genai.OUTPUT_TOKENS: sum(life.num_tokens for life in branches),
                genai.FINISH_REASONS: [str(life.end) for life in branches],
            }
        )
        if begun:
            self._span.set_attribute(genai.FIRST_CHUNK_S, min(begun))
        if error is not None:
            _fail(self._span, error)
        end_s = max(life.end_s or 0.0 for life in branches)
        for branch in range(len(branches)):
            self._leave(branch, end_s)
        self._span.end(self._at(end_s))

    def _leave(self, branch: int, at_s: float, *, is_moved: bool = False) -> None:
        """The branch's shard, if it has one, is without it; the last one ends it."""
        for shard in self._shards.values():
            if branch in shard.open:
                shard.open.discard(branch)
                if is_moved:
                    shard.span.add_event("moved", {genai.BRANCH: branch}, timestamp=self._at(at_s))
                if not shard.open:
                    shard.span.end(self._at(at_s))

    def _at(self, seconds: float) -> int:
        return self._begun_ns + int(seconds * 1e9)


def _fail(span: Span, error: MalleeError) -> None:
    """Mark a span as failed: by the error's code, for its text may quote a client."""
    span.set_attribute(genai.ERROR, error.code)
    span.set_status(Status(StatusCode.ERROR))
