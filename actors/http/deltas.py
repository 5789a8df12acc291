"""Deltas of tokens become pieces of text: detokenized, cut at stop strings, choices numbered."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from mallee.actors.gateway.service import BranchStream, Delta
from mallee.actors.http.jobs import Plan
from mallee.protocol.errors import InternalError, MalleeError
from mallee.protocol.ids import CapsuleId, WorkerId
from mallee.protocol.messages import FinishReason

LOWEST: Final = -9999.0  # JSON has no minus infinity


TokenBytes: TypeAlias = Callable[[int], bytes]


class TokenChance(NamedTuple):
    """A drawn token, its log-probability, and those of the likeliest in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Detokenizing(Protocol):
    """Tokens of one branch in, text that is certain out."""

    def push(self, tokens: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Stopping(Protocol):
    """Text of one branch in; what can't be the start of a stop string any more out."""

    def push(self, text: str) -> tuple[str, bool]: ...

    def flush(self) -> str: ...


class MakeStopping(Protocol):
    """A fresh matcher. `keeps_stop`: a stop string is part of the text that it ends."""

    def __call__(self, stops: tuple[str, ...], *, keeps_stop: bool) -> Stopping: ...


class TextTools(NamedTuple):
    """How one branch's text is made: fresh detokenizers and stop matchers, and single tokens."""

    detokenizer: Callable[[], Detokenizing]
    stop_matcher: MakeStopping
    token_bytes: TokenBytes


@dataclass(frozen=True, slots=True)
class TextDelta:
    """News of one choice. The last piece of a choice has `finish`; text may be empty."""

    index: int
    text: str
    num_tokens: int
    finish: FinishReason | None
    worker: WorkerId
    cached_tokens: int
    prefill_tokens: int
    capsule: CapsuleId | None
    error: MalleeError | None
    chances: tuple[TokenChance, ...] = ()  # of its tokens, if they were asked for


class BranchText:
    """The text of one branch. Nothing comes out after its last piece."""

    __slots__ = (
        *("_detokenizer", "_matcher", "_num_unstoppable", "_stop_ids", "is_cut", "is_finished"),
    )

    def __init__(self, tools: TextTools, plan: Plan) -> None:
        self._detokenizer = tools.detokenizer()
        self._matcher = (
            tools.stop_matcher(plan.stops, keeps_stop=plan.keeps_stop) if plan.stops else None
        )
        self._num_unstoppable = plan.min_tokens  # tokens whose text ends nothing
        self._stop_ids = plan.stop_token_ids
        self.is_finished = False
        self.is_cut = False  # at a stop string

    def push(self, delta: Delta) -> tuple[str, FinishReason | None]:
        """New text, and why the branch ended if it did; a matched stop string ends it early."""
        tokens = delta.tokens
        if delta.finish == "stop" and tokens and tokens[-1] in self._stop_ids:
            tokens = tokens[:-1]
        head = tokens[: self._num_unstoppable]
        self._num_unstoppable -= len(head)
        free = self._detokenizer.push(head) if head else ""
        tail = tokens[len(head) :]
        text = self._detokenizer.push(tail) if tail else ""
        if delta.finish is not None:
            text += self._detokenizer.flush()
        finish = delta.finish
        if self._matcher is not None and text:
            text, self.is_cut = self._matcher.push(text)
        if self.is_cut:
            finish = "stop"
        elif self._matcher is not None and finish is not None:
            text += self._matcher.flush()
        text = free + text
        self.is_finished = finish is not None
        return text, finish


class StreamCounts(NamedTuple):
    """Choices of one answer, by state."""

    num_choices: int
    num_open: int
    num_failed: int


class TextStream:
    """The running answer to a plan: pieces of all its choices, interleaved, then the end.

    Raises what the service raises. If every choice fails, the last failure is raised instead of
    given as a piece, and as long as nothing but failures came, no piece is given at all: so a
    request that fails as a whole is an error and not an answer. Must be closed with `aclose`.
    """

    def __init__(self, streams: Sequence[BranchStream], plan: Plan, tools: TextTools) -> None:
        assert len(streams) == len(plan.jobs)
        self._streams = streams
        self._branches = plan.branches
        self._form = plan.form
        self._texts = [BranchText(tools, plan) for _ in range(plan.num_choices)]
        self._num_open = plan.num_choices
        self._num_failed = 0
        self._pieces = self._generate()

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self._pieces

    @property
    def streams(self) -> Sequence[BranchStream]:
        return self._streams

    async def aclose(self) -> None:
        """End every branch still running. Idempotent."""
        try:
            await self._pieces.aclose()
        finally:
            await asyncio.gather(*(stream.aclose() for stream in self._streams))

    def stats(self) -> StreamCounts:
        return StreamCounts(len(self._texts), self._num_open, self._num_failed)

    def check(self) -> None:
        """Raises AssertionError if the counts don't agree with the branches."""
        assert self._num_open == sum(not text.is_finished for text in self._texts)
        assert 0 <= self._num_failed <= len(self._texts) - self._num_open

    async def _generate(self) -> AsyncGenerator[TextDelta, None]:
        held: list[TextDelta] = []
        any_good = False
        async with aclosing(_interleave(self._streams)) as deltas:
            async for job, delta in deltas:
                index = job * self._branches + delta.branch
                if self._texts[index].is_finished:
                    continue
                piece = self._piece(job, index, delta)
                if piece.error is not None and self._num_failed == len(self._texts):
                    raise piece.error
                held.append(piece)
                any_good = any_good or piece.error is None
                if any_good:
                    for ready in held:
                        yield ready
                    held.clear()
                if not self._num_open:
                    return
        raise InternalError(f"the answer ended with {self._num_open} branches unfinished")

    def _piece(self, job: int, index: int, delta: Delta) -> TextDelta:
        stream = self._streams[job]
        text, finish = self._texts[index].push(delta)
        if finish is not None:
            self._num_open -= 1
            if delta.finish is None:
                stream.cancel(delta.branch)
        error = None
        if finish == "error":
            self._num_failed += 1
            error = delta.error or InternalError(f"branch {delta.branch} failed")
            error = self._form.named(error)
        return TextDelta(
            index,
            text,
            len(delta.tokens),
            finish,
            delta.worker or stream.worker,
            delta.cached_tokens,
            delta.prefill_tokens,
            # A capsule of text beyond a stop string would continue what the client never saw.
            None if self._texts[index].is_cut else delta.capsule,
            error,
            _chances(delta) if delta.logprobs else (),
        )


def _chances(delta: Delta) -> tuple[TokenChance, ...]:
    pairs = zip(delta.tokens, delta.logprobs, strict=True)
    return tuple(TokenChance(token, logprob, top) for token, (logprob, top) in pairs)


async def _interleave(
    streams: Sequence[BranchStream],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """(stream, delta) as they come. A failure of one stream is raised."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(job: int) -> None:
        async for delta in streams[job]:
            queue.put_nowait((job, delta))

    pumps = [asyncio.create_task(pump(job)) for job in range(len(streams))]
    for task in pumps:
        task.add_done_callback(queue.put_nowait)
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if isinstance(item, tuple):
                yield item
            else:
                item.result()
                num_open -= 1
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


# Log-probabilities in OpenAI's two shapes.


"""What a token stands for; not always whole characters."""


def chat_logprobs(chances: Sequence[TokenChance], token_bytes: TokenBytes) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": _text(raw), "logprob": max(logprob, LOWEST), "bytes": list(raw)}

    content = [
        {
            **entry(chance.token, chance.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in chance.top],
        }
        for chance in chances
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    chances: Sequence[TokenChance], token_bytes: TokenBytes, offset: int
) -> dict[str, Any]:
    """`logprobs` of a completion choice whose first token stands `offset` characters into its text.

    The drawn token is among `top_logprobs` even if it is none of the likeliest.
    """
    tokens = [_text(token_bytes(chance.token)) for chance in chances]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [max(chance.logprob, LOWEST) for chance in chances],
        "tokens": tokens,
        "top_logprobs": [_top(chance, token_bytes) for chance in chances],
    }


def _top(chance: TokenChance, token_bytes: TokenBytes) -> dict[str, float]:
    top: dict[str, float] = {}
    for token, logprob in (*chance.top, (chance.token, chance.logprob)):
        # Two tokens may be written alike (parts of characters): the likelier stands for both.
        top.setdefault(_text(token_bytes(token)), max(logprob, LOWEST))
    return top


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
