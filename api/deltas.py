"""Deltas of tokens become deltas of text: detokenized, cut at stop strings, choices numbered."""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Self, TypeAlias

import msgspec
import xxhash

from mallee.api.branches.scoring import Scored
from mallee.api.branches.watch import Watch
from mallee.api.jobs import Plan
from mallee.api.text.conversation import ToolCall
from mallee.api.text.cuts import TokenCut, find_cut
from mallee.api.text.tokenizer import Detokenizer, StopMatcher, Tokenizer
from mallee.api.text.tools.source import Call
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.request import RunningRequest
from mallee.protocol.errors import InternalError, MalleeError
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import CapsuleId, WorkerId
from mallee.protocol.messages import FinishReason, Kept, Retained, TokenLogprobs
from mallee.router.dispatch.verdicts import Verdict

LOWEST: Final = -9999.0  # JSON has no minus infinity
ROOM_OF_A_STREAM: Final = 8  # deltas of several streams on their way to one reader

TokenBytes: TypeAlias = Callable[[int], bytes]
"""The bytes that a token stands for; not always whole characters."""


class CallDelta(NamedTuple):
    """The beginning of a choice's call, or more of its arguments, without id and name then."""

    number: int  # of the choice's calls
    id: str
    name: str
    arguments: str


class TokenChance(NamedTuple):
    """A token, its log-probability (None: a prompt's first), and those of the likeliest in its place.

    `offset`: the characters of the text before the one that it is of, if they are counted.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int = 0


class TextDelta(msgspec.Struct, frozen=True):
    """New text of one choice. The last delta of a choice has `finish`; text may be empty."""

    index: int
    text: str
    num_tokens: int
    finish: FinishReason | None
    worker: WorkerId
    cached_tokens: int
    prefill_tokens: int
    capsule: CapsuleId | None
    error: MalleeError | None
    weights: tuple[str, str]  # versions that its branch began and ended with
    retained: Retained | None = None  # if that was asked for
    verdict: Verdict | None = None  # on the prompt, if it was asked for
    chances: tuple[TokenChance, ...] = ()  # of its tokens, if they were requested
    boundary: int = 0  # tokens of the capsule, at the end
    kept: Kept = ""
    drafts: tuple[int, int] | None = (
        None  # tokens drafted so far, and those of them that were drawn
    )
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()  # only the first can be of a call that began before the text
    completion_tokens: int = 0  # of the choice so far
    is_in_call: bool = False  # its tokens went into what may be a call
    resampled: bool = False
    stop: str = ""  # the stop string that ended it
    injected: tuple[tuple[int, int], ...] = ()  # as `Delta.injected`
    ended_by: str = ""  # of its budget, or of the conditions that it was to stop by
    scored: Scored | None = None  # at the end, if a verifier scores its request's branches
    tokens: tuple[int, ...] = ()  # with the one that ended it, which has no text
    prompt_logprobs: list[Any] | None = None  # in the first of a choice, if they were requested


class BranchText:
    """The text of one branch. Nothing comes out after its last delta."""

    __slots__ = (
        *("_detokenizer", "_is_whole", "_matcher", "_num_hidden", "_num_unstoppable", "_shown"),
        *("_stop_ids", "_tokens", "drafts", "is_cut", "is_finished", "num_tokens"),
    )

    def __init__(self, tokenizer: Tokenizer, plan: Plan) -> None:
        self._shown = plan.reading.marks if plan.reading is not None else ()
        self._detokenizer = tokenizer.detokenizer(self._shown)
        self._matcher = StopMatcher(plan.stops, keeps_stop=plan.keeps_stop) if plan.stops else None
        self._num_unstoppable = plan.min_tokens  # tokens whose text ends nothing
        self._stop_ids = plan.stop_token_ids
        self._tokens = array("I")  # so far, if there are stop strings
        self._num_hidden = 0  # characters of their text that the client was not sent
        self._is_whole = False  # no token follows
        self.is_finished = False
        self.is_cut = False  # at a stop string
        self.drafts: tuple[int, int] | None = None  # of all deltas so far
        self.num_tokens = 0  # the same

    def push(self, delta: Delta) -> tuple[str, FinishReason | None]:
        """New text, and the reason if the branch ended; a matched stop string ends it early.

        Tokens behind the one that completes a stop string are not taken, however many come at once.
        """
        tokens, finish = delta.tokens, delta.finish
        if delta.drafts is not None:
            drafted, accepted = self.drafts or (0, 0)
            self.drafts = (drafted + delta.drafts[0], accepted + delta.drafts[1])
        has_stop_id = bool(finish == "stop" and tokens and tokens[-1] in self._stop_ids)
        if has_stop_id:
            tokens = tokens[:-1]
        if self._matcher is None:
            self.num_tokens += len(tokens)
            text = self._detokenizer.push(tokens, is_last=finish is not None)
        else:
            head = tokens[: self._num_unstoppable]
            self._num_unstoppable -= len(head)
            self.num_tokens += len(head)
            self._tokens.extend(head)
            text, tail = self._detokenizer.push(head) if head else "", tokens[len(head) :]
            text += self._until_stop(self._matcher, tail, finish, has_stop_id=has_stop_id)
        if self.is_cut:
            finish = "stop"
        else:
            self.num_tokens += has_stop_id
        self.is_finished = finish is not None
        return text, finish

    def _until_stop(
        self,
        matcher: StopMatcher,
        tokens: Sequence[int],
        finish: FinishReason | None,
        *,
        has_stop_id: bool,
    ) -> str:
        """The text of `tokens`, one by one, up to a stop string; at the end also what was held back."""
        shown: list[str] = []
        for number, token in enumerate(tokens, 1):
            self._tokens.append(token)
            self.num_tokens += 1
            if self._is_cut_after(matcher, self._detokenizer.push((token,)), shown):
                self._is_whole = finish is not None and number == len(tokens) and not has_stop_id
                return "".join(shown)
        if finish is None:
            return "".join(shown)
        self._is_whole = True
        if not self._is_cut_after(matcher, self._detokenizer.push((), is_last=True), shown):
            shown.append(matcher.flush())
        return "".join(shown)

    def _is_cut_after(self, matcher: StopMatcher, text: str, shown: list[str]) -> bool:
        """Whether more text completes a stop string; what of it may be shown is added to `shown`."""
        if text:
            new, self.is_cut = matcher.push(text)
            self._num_hidden += len(text) - len(new)
            shown.append(new)
        return self.is_cut

    def begin(self, prompt: Sequence[int]) -> str:
        """The text of a prompt that the answer goes on in, before anything is pushed."""
        return self._detokenizer.push(prompt)

    @property
    def stop(self) -> str:
        """The stop string that was found."""
        return self._matcher.found if self._matcher is not None else ""

    def find_cut(self, tokenizer: Tokenizer, scope: str) -> TokenCut | None:
        """The tokens of the text that was cut, if they can be told."""
        return find_cut(
            tokenizer,
            self._tokens,
            self._num_hidden,
            is_whole=self._is_whole,
            shown=self._shown,
            scope=scope,
        )


class TextOffsets:
    """Places of tokens in the text of one branch: each where the character begins that it is of."""

    __slots__ = ("_detokenizer", "_num_chars")

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._num_chars = 0

    def next(self, token: int) -> int:
        before = self._num_chars
        self._num_chars += len(self._detokenizer.push((token,)))
        return before


class TextStream:
    """The running answer to a plan: text of all its choices, interleaved, then the end.

    Raises what the gateway raises. If every choice fails, the last failure is raised instead of
    given as a delta, and as long as nothing but failures came, no delta is given at all: so a
    request that fails as a whole is an error and not an answer. Must be closed with `aclose`.
    `watch` ends choices before their branches do; it is closed here.
    """

    def __init__(
        self,
        streams: Sequence[RunningRequest],
        plan: Plan,
        tokenizer: Tokenizer,
        watch: Watch | None = None,
    ) -> None:
        assert len(streams) == len(plan.jobs)
        self._watch = watch
        self._newest: dict[int, Delta] = {}  # by choices that are watched
        self._wait: asyncio.Timeout | None = None  # for a delta, if it may be cut short
        if watch is not None:
            watch.on_verdict(self._stop_waiting)
        self._held: tuple[int, Delta] | None = None  # it waits for its budget
        self.streams = streams
        self._merged = _Merged(streams) if len(streams) > 1 else None
        self._only = aiter(streams[0])
        self._plan = plan
        self._tokenizer = tokenizer
        self._branches = plan.branches
        self._output = plan.output
        self._diagnoses = plan.diagnoses
        num = plan.num_choices
        self._texts = [BranchText(tokenizer, plan) for _ in range(num)]
        reading = plan.reading
        self._parsers = [reading.parser() for _ in self._texts] if reading is not None else []
        self._offsets = (
            [TextOffsets(tokenizer.detokenizer()) for _ in self._texts] if plan.has_offsets else []
        )
        self._unbegun = set(range(num)) if plan.shows_prompt else set()
        self._num_calls = [0] * num
        self._own_ids = set[tuple[int, str]]()
        self._num_open = num
        self._num_failed = 0
        self._is_good = False  # a choice has text
        self._ready: deque[TextDelta] = deque()
        self._failure: MalleeError | None = None  # of every choice

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        while not (self._ready and self._is_good):
            if self._failure is not None:
                raise self._failure
            if not self._num_open:
                raise StopAsyncIteration
            if self._watch is not None:
                await self._push_next(self._watch)
            elif self._merged is not None or (delta := await anext(self._only, None)) is None:
                self._push(*await self._next_delta())
            else:
                self._push(0, delta)
        return self._ready.popleft()

    def take(self) -> TextDelta | None:
        """The next delta if it is there already."""
        while not (self._ready and self._is_good):
            if self._failure is not None or not self._num_open:
                return None
            waiting = self._held
            if waiting is None and self._merged is not None:
                waiting = self._merged.take()
            elif waiting is None and (delta := self.streams[0].take()) is not None:
                waiting = 0, delta
            if waiting is None:
                return None
            if self._watch is not None and self._watch.lacks(waiting[1]):
                self._held = waiting
                return None
            self._held = None
            self._push(*waiting)
        return self._ready.popleft()

    async def aclose(self) -> None:
        """End every branch still running. Idempotent."""
        if self._watch is not None:
            self._watch.close()
        try:
            if self._merged is not None:
                await self._merged.aclose()
        finally:
            for stream in self.streams:
                await stream.aclose()

    def check(self) -> None:
        """Raises AssertionError if the counts don't agree with the branches."""
        assert self._num_open == sum(not text.is_finished for text in self._texts)
        assert 0 <= self._num_failed <= len(self._texts) - self._num_open

    async def _push_next(self, watch: Watch) -> None:
        """Wait for a delta, but not beyond the time that the choices have, nor beyond a verdict on one."""
        if watch.has_verdicts:
            self._end_due()
            return
        try:
            async with asyncio.timeout(watch.rest_s) as self._wait:
                delta = await self._next_covered(watch)
        except TimeoutError:
            self._end_due()
        else:
            self._push(*delta)
        finally:
            self._wait = None

    def _stop_waiting(self) -> None:
        """Have what waits for a delta look at once what is due."""
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())

    async def _next_covered(self, watch: Watch) -> tuple[int, Delta]:
        """The next delta, once its budget has been asked for what it lacks."""
        if self._held is None:
            self._held = await self._next_delta()
        await watch.secure(self._held[1])
        held, self._held = self._held, None
        return held

    async def _next_delta(self) -> tuple[int, Delta]:
        """(job, delta). Raises InternalError if the gateway ended too early."""
        if self._merged is not None:
            found = await anext(self._merged, None)
        else:
            delta = await anext(self._only, None)
            found = None if delta is None else (0, delta)
        if found is None:
            raise InternalError(f"the answer ended with {self._num_open} branches unfinished")
        return found

    def _push(self, job: int, delta: Delta) -> None:
        """Make text of a delta. If it was the last choice and all failed, that is the failure of all."""
        index = job * self._branches + delta.branch
        if self._watch is not None and self._watch.has_verdicts:
            self._end_due()  # without this delta: its text came after the verdict
        if self._texts[index].is_finished:
            return
        if self._watch is None:
            self._add(job, index, delta)
            return
        self._newest[index] = delta
        self._add(job, index, self._watch.take(index, delta))
        self._end_due()

    def _end_due(self) -> None:
        """End the choices that are to go no further, where their clients saw them last."""
        assert self._watch is not None
        for index, finish, error in self._watch.due():
            job, branch = divmod(index, self._branches)
            last = self._newest.get(index, Delta.end(branch, None))
            nothing: tuple[()] = ()
            empty = last._replace(tokens=nothing, logprobs=nothing, injected=nothing, drafts=None)
            ended = empty._replace(finish=finish, capsule=None, boundary=0, error=error)
            self._add(job, index, ended)

    def _add(self, job: int, index: int, delta: Delta) -> None:
        stream, branch, watch = self.streams[job], self._texts[index], self._watch
        before = branch.num_tokens
        begun = self._begin(job, index, delta) if index in self._unbegun else None
        text, finish = branch.push(delta)
        num_tokens = branch.num_tokens
        if num_tokens - before < len(delta.tokens):
            delta = delta.first(num_tokens - before, before)
        if finish == "stop" and not branch.is_cut:
            delta = delta.with_end()
        num_new = len(delta.tokens)
        is_last, reasoning, is_in_call = finish is not None, "", False
        calls: tuple[CallDelta, ...] = ()
        if self._parsers:
            parser = self._parsers[index]
            found = parser.feed(text)
            text, reasoning, parts = found.plus(parser.end()) if is_last else found
            calls = tuple(self._named(index, call) for call in parts)
            is_in_call = parser.is_in_call
        capsule, boundary, ended_by, error = delta.capsule, delta.boundary, "", None
        if finish is not None:
            self._num_open -= 1
            if branch.is_cut:
                capsule, boundary = self._cut(index, job, delta.branch)
                if watch is not None:
                    watch.stopped(index)
            elif watch is not None and index in watch.reasons:
                capsule, boundary = self._cut_watched(index, job, delta.branch, finish)
            if watch is not None and finish in ("budget", "condition"):
                ended_by = watch.reasons.get(index, "")
        scored = None
        if watch is not None:
            scored = watch.score(index, text, reasoning, num_tokens=num_tokens, is_last=is_last)
        num_tokens = before + num_new
        chances = self._chances(index, delta) if delta.logprobs else ()
        if self._plan.hides_reasoning:
            reasoning = ""
        if self._plan.hides_answer and finish != "error":
            text, num_new, num_tokens, chances = "", 0, 0, ()
            finish, capsule, boundary = "length" if finish == "stop" else finish, None, 0
            delta = delta._replace(tokens=())
        if begun is not None:
            text, chances = begun.text + text, (*begun.chances, *chances)
        if finish == "error":
            self._num_failed += 1
            error = delta.error or InternalError(f"branch {delta.branch} failed")
            error = self._output.named(error)
            if self._num_failed == len(self._texts):
                self._failure = error
                return
        else:
            self._is_good = True
        self._ready.append(
            TextDelta(
                index=index,
                text=text,
                num_tokens=num_new,
                finish=finish,
                worker=delta.worker or stream.worker,
                cached_tokens=delta.cached_tokens,
                prefill_tokens=delta.prefill_tokens,
                capsule=capsule,
                error=error,
                weights=delta.weights,
                retained=delta.retained,
                verdict=delta.verdict if self._diagnoses else None,
                chances=chances,
                boundary=boundary,
                kept=delta.kept,
                drafts=branch.drafts,
                reasoning=reasoning,
                calls=calls,
                completion_tokens=num_tokens,
                is_in_call=is_in_call,
                stop=branch.stop if branch.is_cut else "",
                injected=delta.injected,
                resampled=delta.resampled,
                ended_by=ended_by,
                scored=scored,
                tokens=delta.tokens,
                prompt_logprobs=None if begun is None else begun.logprobs,
            )
        )

    def _begin(self, job: int, index: int, delta: Delta) -> "_Begun | None":
        """The prompt of a choice as its answer shows it, with its first delta; None: it ended before."""
        plan, token_bytes = self._plan, self._tokenizer.token_bytes
        tokens, reports = plan.prompt_ids(job), delta.prompt_logprobs
        wants_reports = plan.num_prompt_logprobs >= 0 or plan.logprobs
        if delta.finish == "error" or (wants_reports and len(reports) != len(tokens) - 1):
            return None
        self._unbegun.remove(index)
        shown = None
        if plan.num_prompt_logprobs >= 0:
            shown = prompt_logprobs(tokens, reports, token_bytes, plan.num_prompt_logprobs)
        if not plan.echo:
            return _Begun("", (), shown)
        chances: list[TokenChance] = []
        if plan.logprobs:
            place = self._offsets[index].next
            chances.append(TokenChance(tokens[0], None, (), place(tokens[0])))
            for token, (logprob, top) in zip(tokens[1:], reports, strict=True):
                chances.append(TokenChance(token, logprob, top, place(token)))
        return _Begun(self._texts[index].begin(tokens), tuple(chances), shown)

    def _chances(self, index: int, delta: Delta) -> tuple[TokenChance, ...]:
        place = self._offsets[index].next if self._offsets else _no_place
        pairs = zip(delta.tokens, delta.logprobs, strict=True)
        return tuple(TokenChance(token, *report, place(token)) for token, report in pairs)

    def _named(self, index: int, call: Call) -> CallDelta:
        """A part of the choice's last call, or of its next one, with its own id or a new one.

        Of two calls with the same id of their own the second has a new one.
        """
        reading, number = self._plan.reading, self._num_calls[index]
        if not call.name:
            return CallDelta(number - 1, "", "", call.arguments)
        assert reading is not None
        assert reading.form is not None
        self._num_calls[index] += 1
        job = index // self._branches
        digest = xxhash.xxh3_128_hexdigest(f"{self.streams[job].request}.{index}.{number}".encode())
        made = digest[:9] if reading.form.has_short_ids else f"call_{digest[:24]}"
        own = index, call.own_id
        is_new = bool(call.own_id) and own not in self._own_ids
        self._own_ids.add(own)
        return CallDelta(number, call.own_id if is_new else made, call.name, call.arguments)

    def _cut(self, index: int, job: int, branch: int) -> tuple[CapsuleId | None, int]:
        """End a branch at its stop string: the capsule of the text that the client saw, and its tokens."""
        stream, plan = self.streams[job], self._plan
        cut = self._texts[index].find_cut(self._tokenizer, plan.jobs[job].scope)
        if cut is None:  # no tokens have that text
            stream.cancel(branch)
            return None, 0
        at = plan.starts[index] + cut.num_tokens
        capsule = stream.cut(branch, at, as_tokens(cut.residue))
        return capsule, at + len(cut.residue) if capsule is not None else 0

    def _cut_watched(
        self, index: int, job: int, branch: int, finish: FinishReason
    ) -> tuple[CapsuleId | None, int]:
        """End a branch after the tokens that its client saw: their capsule, and its tokens."""
        stream, num_tokens = self.streams[job], self._texts[index].num_tokens
        if finish == "error" or not num_tokens:
            stream.cancel(branch)
            return None, 0
        at = self._plan.starts[index] + num_tokens
        capsule = stream.cut(branch, at, as_tokens(()), finish)
        return capsule, at if capsule is not None else 0


class _Begun(NamedTuple):
    """The part of a choice that is its prompt's: with `echo` text and `logprobs`, and `prompt_logprobs`."""

    text: str
    chances: tuple[TokenChance, ...]
    logprobs: list[Any] | None


def _no_place(token: int) -> int:
    return 0


class _Merged:
    """(stream, delta) of several streams as they come; a failure of one stream is raised."""

    def __init__(self, streams: Sequence[RunningRequest]) -> None:
        self._deltas: asyncio.Queue[tuple[int, Delta] | asyncio.Task[None]] = asyncio.Queue()
        # Of deltas there: what a reader leaves waits in the streams, where it is counted.
        self._room = asyncio.Semaphore(ROOM_OF_A_STREAM * len(streams))
        self._num_open = len(streams)
        self._pumps = [asyncio.create_task(self._pump(*pair)) for pair in enumerate(streams)]
        for task in self._pumps:
            task.add_done_callback(self._deltas.put_nowait)

    async def _pump(self, number: int, stream: RunningRequest) -> None:
        async for delta in stream:
            await self._room.acquire()
            self._deltas.put_nowait((number, delta))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        while self._num_open:
            item = await self._deltas.get()
            if isinstance(item, tuple):
                self._room.release()
                return item
            item.result()
            self._num_open -= 1
        raise StopAsyncIteration

    def take(self) -> tuple[int, Delta] | None:
        """The next if it is there already. The end of a stream is left to the iteration."""
        if self._deltas.empty():
            return None
        item = self._deltas.get_nowait()
        if isinstance(item, tuple):
            self._room.release()
            return item
        self._deltas.put_nowait(item)
        return None

    async def aclose(self) -> None:
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


class WholeCalls:
    """The calls of one choice, put together of their parts."""

    __slots__ = ("_arguments", "_begun")

    def __init__(self) -> None:
        self._begun: list[CallDelta] = []
        self._arguments: list[list[str]] = []  # of each

    def add(self, deltas: Sequence[CallDelta]) -> None:
        for delta in deltas:
            if delta.id:
                self._begun.append(delta)
                self._arguments.append([])
            self._arguments[delta.number].append(delta.arguments)

    def found(self) -> list[ToolCall]:
        pairs = zip(self._begun, self._arguments, strict=True)
        return [ToolCall(begun.id, begun.name, "".join(parts)) for begun, parts in pairs]


# Log-probabilities in OpenAI's two shapes.


def chat_logprobs(chances: Sequence[TokenChance], token_bytes: TokenBytes) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": _text(raw), "logprob": finite(logprob), "bytes": list(raw)}

    content = [
        {
            **entry(chance.token, chance.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in chance.top],
        }
        for chance in chances
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    chances: Sequence[TokenChance], token_bytes: TokenBytes, num_chars: int
) -> dict[str, Any]:
    """`logprobs` of a completion choice, of whose text `num_chars` were written.

    The drawn token is among `top_logprobs` even if it is none of the likeliest. Parts of characters are
    written as OpenAI does, `bytes:\\xe6`, so that each stays apart. Tokens of a stop string that is no part
    of the text stand at its end.
    """
    return {
        "text_offset": [min(chance.offset, num_chars) for chance in chances],
        "token_logprobs": [finite(chance.logprob) for chance in chances],
        "tokens": [_exact(token_bytes(chance.token)) for chance in chances],
        "top_logprobs": [_top(chance, token_bytes) for chance in chances],
    }


def _top(chance: TokenChance, token_bytes: TokenBytes) -> dict[str, float] | None:
    if chance.logprob is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in (*chance.top, (chance.token, chance.logprob)):
        # Two tokens may be written alike: the likelier stands for both.
        top.setdefault(_exact(token_bytes(token)), max(logprob, LOWEST))
    return top


def prompt_logprobs(
    tokens: Sequence[int], reports: Sequence[TokenLogprobs], token_bytes: TokenBytes, num_top: int
) -> list[Any]:
    """vLLM's field: of each token but the first those of the likeliest, and its own, by token id.

    A token that is none of those that were reported has no `rank`.
    """
    found: list[Any] = [None]
    for token, (own, top) in zip(tokens[1:], reports, strict=True):
        place: dict[str, Any] = {}
        for rank, (other, logprob) in enumerate(top, 1):
            if rank <= num_top or other == token:
                place[str(other)] = _ranked(other, logprob, rank, token_bytes)
        if str(token) not in place:
            place[str(token)] = _ranked(token, own, None, token_bytes)
        found.append(place)
    return found


def _ranked(
    token: int, logprob: float, rank: int | None, token_bytes: TokenBytes
) -> dict[str, Any]:
    text = _text(token_bytes(token))
    return {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": text}


def finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can have it."""
    return None if logprob is None else max(logprob, LOWEST)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _exact(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
