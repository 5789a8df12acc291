"""OpenAI's JSON bodies. One response format per endpoint; the text comes as deltas."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal

import msgspec

from mallee.api.deltas import (
    CallDelta,
    TextDelta,
    TokenBytes,
    TokenChance,
    WholeCalls,
    chat_logprobs,
    text_logprobs,
)
from mallee.api.errors import AnswerTooLarge, error_fields
from mallee.api.jobs import MAX_CHANCES, Plan, ids
from mallee.api.sse import COMMENT, DONE, event
from mallee.api.text.conversation import ToolCall
from mallee.gateway.capsules.capsules import CapsuleInfo
from mallee.gateway.requests.lives import verdict_body
from mallee.gateway.requests.meter import outcome_of
from mallee.protocol.api.capsules import NewCapsule
from mallee.protocol.api.generate import (
    AnyChoice,
    Call,
    Chat,
    ChatChoice,
    ChatDelta,
    ChatMessage,
    Chunk,
    ChunkChoice,
    Completion,
    Fork,
    FunctionCall,
    InjectedExtras,
    Restore,
    TextChoice,
    WholeBody,
)
from mallee.protocol.api.shared import (
    OMITTED,
    ChoiceExtras,
    CompletionDetails,
    Failure,
    InjectedAt,
    PromptDetails,
    Retained,
    UsageBody,
    WeightVersions,
)
from mallee.protocol.errors import MalleeError
from mallee.protocol.ids import CapsuleId


def usage_body(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    drafts: tuple[int, int] | None = None,
) -> UsageBody:
    details = OMITTED
    if drafts is not None:
        accepted, rejected = prediction_tokens(drafts)
        details = CompletionDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected
        )
    return UsageBody(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=cached_tokens),
        completion_tokens_details=details,
    )


def prediction_tokens(drafts: tuple[int, int]) -> tuple[int, int]:
    """The drafted tokens that were drawn, and those that were not."""
    drafted, accepted = drafts
    return accepted, drafted - accepted


class UsageCounter:
    """Usage as deltas come in."""

    __slots__ = ("_completion", "_drafts", "_keep", "_prefilled", "_prompt", "_spend")

    def __init__(
        self,
        prompt_tokens: int,
        spend: Callable[[int], None] | None,
        keep: Callable[[CapsuleId], None] = lambda capsule: None,
    ) -> None:
        """`spend(tokens)`, if given, is called with each delta's tokens, `keep` with each pinned capsule."""
        self._prompt = prompt_tokens
        self._spend = spend
        self._keep = keep
        self._completion = 0
        self._prefilled: dict[int, int] = {}
        self._drafts: dict[int, tuple[int, int]] = {}  # by branch

    def add(self, delta: TextDelta) -> None:
        self._completion += delta.num_tokens
        if self._spend is not None:
            self._spend(delta.num_tokens)
        if delta.kept == "kept" and delta.capsule is not None:
            self._keep(delta.capsule)
        if delta.drafts is not None:
            self._drafts[delta.index] = delta.drafts
        # A branch that fails reports nothing: what it reported before stands.
        known = self._prefilled.get(delta.index, 0)
        self._prefilled[delta.index] = max(known, delta.prefill_tokens)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompt, those of them that were there, and tokens of the answer.

        Tokens not computed were there; of a prompt computed twice (after a loss) none were.
        """
        cached = max(self._prompt - sum(self._prefilled.values()), 0)
        return self._prompt, cached, self._completion

    def body(self) -> UsageBody:
        prompt, cached, completion = self.counts
        drafts = None
        if self._drafts:
            drafted, accepted = zip(*self._drafts.values(), strict=True)
            drafts = (sum(drafted), sum(accepted))
        return usage_body(prompt, completion, cached, drafts)


def extras(
    delta: TextDelta, injected: Sequence[tuple[int, int]] = (), *, names_workers: bool
) -> ChoiceExtras:
    """The `mallee` object of a choice, known at its end; a failed branch has its error."""
    accepted = rejected = retain = error = score = score_error = OMITTED
    ended_by: Any = delta.ended_by or OMITTED
    if delta.drafts is not None:
        accepted, rejected = prediction_tokens(delta.drafts)
    if (kept := delta.retained) is not None:
        retain = Retained(
            outcome=outcome_of(kept), asked_bytes=kept.asked_nbytes, bytes=kept.nbytes
        )
    if delta.scored is not None:
        score, score_error = delta.scored.score, delta.scored.error or OMITTED
    if delta.error is not None:
        error = Failure(message=delta.error.client_message, code=delta.error.code)
    return ChoiceExtras(
        worker=delta.worker if names_workers else None,
        capsule=delta.capsule,
        boundary=delta.boundary if delta.capsule is not None else None,
        cached_tokens=delta.cached_tokens,
        prefill_tokens=delta.prefill_tokens,
        completion_tokens=delta.completion_tokens,
        weight_version=WeightVersions(start=delta.weights[0], end=delta.weights[1]),
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=rejected,
        retain=retain,
        cache=OMITTED if delta.verdict is None else verdict_body(delta.verdict),
        kept=delta.kept or OMITTED,
        injected=_injected(injected) if injected else OMITTED,
        resampled=delta.resampled or OMITTED,
        ended_by=ended_by,
        score=score,
        score_error=score_error,
        error=error,
    )


def _injected(injected: Sequence[tuple[int, int]]) -> list[InjectedAt]:
    return [InjectedAt(at=at, tokens=num) for at, num in injected]


NOTHING: Final[dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all bodies of one answer have in common."""

    id: str
    created: int
    model: str


class ResponseFormat:
    """Writes completions and forks, whose choices have a `text`; `answer` is the type of a whole one."""

    has_own_prompts = True  # each choice

    def __init__(
        self, answer: type[WholeBody], chunk_object: str, call_finish: str = "tool_calls"
    ) -> None:
        """`call_finish`: the reason of an answer with calls that came to its end."""
        self.answer = answer
        self.chunk_object = chunk_object
        self._call_finish = call_finish

    def finish(self, reason: str | None, *, has_calls: bool) -> str | None:
        return self._call_finish if has_calls and reason == "stop" else reason

    def begin_whole(
        self, plan: Plan, token_bytes: TokenBytes | None, *, names_workers: bool
    ) -> "WholeAnswer":
        """For a `Server`."""
        return WholeAnswer(self, plan, token_bytes, names_workers=names_workers)

    def begin_stream(
        self,
        plan: Plan,
        token_bytes: TokenBytes | None,
        envelope: "Envelope",
        *,
        names_workers: bool,
    ) -> "ChunkWriter":
        """For a `Server`."""
        return ChunkWriter(
            self,
            envelope,
            plan,
            token_bytes=token_bytes,
            names_workers=names_workers,
        )

    def whole(
        self, text: str, reasoning: str, calls: Sequence[ToolCall], **shared: Any
    ) -> AnyChoice:
        """A finished choice."""
        return TextChoice(text=text, **shared)

    def part(self, delta: TextDelta, *, is_first: bool, **shared: Any) -> ChunkChoice:
        """A choice of a chunk."""
        return ChunkChoice(text=delta.text, **shared)

    def logprobs(
        self, chances: Sequence[TokenChance], token_bytes: TokenBytes, num_chars: int
    ) -> dict[str, Any]:
        """The field of that name, where `num_chars` of the text have been written."""
        return text_logprobs(chances, token_bytes, num_chars)

    def prompt_ids(self, plan: Plan) -> list[int]:
        """The tokens before the answers that are a field of the whole body; OMITTED: none are."""
        return OMITTED if plan.prefix is None else ids(plan.prefix)

    def own_prompt_ids(self, plan: Plan, index: int) -> dict[str, list[int]]:
        """Those that are fields of a choice."""
        if plan.prefix is not None:
            return {"suffix_token_ids": plan.suffix_ids(index)}
        return {"prompt_token_ids": plan.prompt_ids(index // plan.branches)}


class ChatFormat(ResponseFormat):
    """Chat: `message`, or `delta` whose first one names the role."""

    has_own_prompts = False

    def whole(
        self, text: str, reasoning: str, calls: Sequence[ToolCall], **shared: Any
    ) -> AnyChoice:
        message = ChatMessage(
            role="assistant",
            content=None if calls and not text else text,
            reasoning_content=reasoning or OMITTED,
            reasoning=reasoning or OMITTED,
            tool_calls=list(map(_call, calls)) or OMITTED,
        )
        return ChatChoice(message=message, **shared)

    def part(self, delta: TextDelta, *, is_first: bool, **shared: Any) -> ChunkChoice:
        content = delta.text or OMITTED
        if is_first and not delta.text:
            content = None if delta.calls or delta.is_in_call else ""
        message = ChatDelta(
            role="assistant" if is_first else OMITTED,
            content=content,
            reasoning_content=delta.reasoning or OMITTED,
            reasoning=delta.reasoning or OMITTED,
            tool_calls=list(map(_call_delta, delta.calls)) or OMITTED,
        )
        return ChunkChoice(delta=message, **shared)

    def logprobs(
        self, chances: Sequence[TokenChance], token_bytes: TokenBytes, num_chars: int
    ) -> dict[str, Any]:
        return chat_logprobs(chances, token_bytes)

    def prompt_ids(self, plan: Plan) -> list[int]:
        return plan.prompt_ids(0)

    def own_prompt_ids(self, plan: Plan, index: int) -> dict[str, list[int]]:
        return {}


def _call(call: ToolCall, index: int = OMITTED) -> Call:
    function = FunctionCall(name=call.name, arguments=call.arguments)
    return Call(index=index, id=call.id, type="function", function=function)


def _call_delta(delta: CallDelta) -> Call:
    if delta.id:
        return _call(ToolCall(delta.id, delta.name, delta.arguments), delta.number)
    return Call(index=delta.number, function=FunctionCall(arguments=delta.arguments))


COMPLETION = ResponseFormat(Completion, "text_completion")
FORK = ResponseFormat(Fork, "capsule.fork.chunk")
RESTORE = ResponseFormat(Restore, "capsule.restore.chunk")
CHAT = ChatFormat(Chat, "chat.completion.chunk")
FORCED_CHAT = ChatFormat(Chat, "chat.completion.chunk", call_finish="stop")
"""Of a request that names the function to call, as OpenAI's: it knows already that the answer is a call."""


class _Written:
    """The `logprobs` of a choice, its lists in JSON as they come: all at once stops the loop for long."""

    __slots__ = ("_fields", "_num_chars", "_owed")

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}  # a list's as the JSON of its parts, without brackets
        self._num_chars = 0
        self._owed: list[TokenChance] = []

    def add(self, delta: TextDelta, written: ResponseFormat, token_bytes: TokenBytes) -> None:
        self._num_chars += len(delta.text)
        self._owed += delta.chances
        chances, self._owed = _placed(self._owed, self._num_chars, delta)
        part = written.logprobs(chances, token_bytes, self._num_chars)
        for name, value in part.items():
            if not isinstance(value, list):
                self._fields[name] = value
            elif value:
                self._fields.setdefault(name, []).append(msgspec.json.encode(value)[1:-1])
            else:
                self._fields.setdefault(name, [])

    def body(self) -> dict[str, Any]:
        """All of it, once."""
        return {
            name: _json_list(value) if isinstance(value, list) else value
            for name, value in self._fields.items()
        }


def _placed(
    owed: list[TokenChance], num_chars: int, delta: TextDelta
) -> tuple[list[TokenChance], list[TokenChance]]:
    """Those of tokens whose place is in the text so far, or all at its end; and the others.

    A stop string may still take away the text of the others.
    """
    if delta.finish is not None or not owed or owed[-1].offset <= num_chars:
        return owed, []
    num = bisect_right(owed, num_chars, key=attrgetter("offset"))
    return owed[:num], owed[num:]


def _json_list(parts: list[bytes]) -> msgspec.Raw:
    """One list of all `parts`, which are copied once."""
    parts = parts or [b""]
    parts[0] = b"[" + parts[0]
    parts[-1] += b"]"
    return msgspec.Raw(b",".join(parts))


class WholeAnswer:
    """Collects the deltas of an answer that is sent in one body.

    With `token_bytes` each choice has its log-probabilities.
    """

    __slots__ = (
        *("_calls", "_format", "_ids", "_injected", "_last", "_logprobs", "_names_workers"),
        *("_num_chances", "_plan", "_prompts", "_reasoning", "_texts", "_token_bytes"),
    )

    def __init__(
        self,
        response_format: ResponseFormat,
        plan: Plan,
        token_bytes: TokenBytes | None,
        *,
        names_workers: bool,
    ) -> None:
        self._names_workers = names_workers
        self._format = response_format
        self._token_bytes = token_bytes
        self._plan = plan
        self._ids = defaultdict[int, list[int]](list)
        self._prompts: dict[int, list[Any]] = {}
        self._texts = defaultdict[int, list[str]](list)
        self._reasoning = defaultdict[int, list[str]](list)
        self._calls = defaultdict[int, WholeCalls](WholeCalls)
        self._logprobs = defaultdict[int, _Written](_Written)
        self._last: dict[int, TextDelta] = {}
        self._injected: dict[int, list[tuple[int, int]]] = {}
        self._num_chances = 0

    def add(self, delta: TextDelta) -> None:
        """Raises AnswerTooLarge."""
        self._texts[delta.index].append(delta.text)
        if delta.reasoning:
            self._reasoning[delta.index].append(delta.reasoning)
        if delta.calls:
            self._calls[delta.index].add(delta.calls)
        if delta.injected:
            self._injected.setdefault(delta.index, []).extend(delta.injected)
        if self._token_bytes is not None:
            self._num_chances += sum(1 + len(chance.top) for chance in delta.chances)
            if self._num_chances > MAX_CHANCES:
                raise AnswerTooLarge(self._num_chances, MAX_CHANCES)
            self._logprobs[delta.index].add(delta, self._format, self._token_bytes)
        if self._plan.returns_ids:
            self._ids[delta.index] += delta.tokens
        if delta.prompt_logprobs is not None:
            self._prompts[delta.index] = delta.prompt_logprobs
        if delta.finish is not None:
            self._last[delta.index] = delta

    def choices(self) -> Iterator[AnyChoice]:
        """Every choice must be finished."""
        plan = self._plan
        assert len(self._last) == plan.num_choices, "a choice is unfinished"
        for i in range(plan.num_choices):
            more: dict[str, Any] = {}
            if plan.returns_ids:
                own = self._format.own_prompt_ids(plan, i)
                more = {"token_ids": self._ids[i], **own}
            if i in self._prompts and self._format.has_own_prompts:
                more["prompt_logprobs"] = self._prompts[i]
            calls = self._calls[i].found() if i in self._calls else ()
            last, injected = self._last[i], self._injected.get(i, ())
            yield self._format.whole(
                "".join(self._texts[i]),
                "".join(self._reasoning[i]),
                calls,
                index=i,
                logprobs=None if self._token_bytes is None else self._logprobs[i].body(),
                finish_reason=self._format.finish(last.finish, has_calls=bool(calls)),
                mallee=extras(last, injected, names_workers=self._names_workers),
                **more,
            )

    def body(self, envelope: Envelope, choices: list[AnyChoice], usage: UsageCounter) -> WholeBody:
        more: dict[str, Any] = {}
        if self._plan.returns_ids:
            more["prompt_token_ids"] = self._format.prompt_ids(self._plan)
        if self._prompts and not self._format.has_own_prompts:
            more["prompt_logprobs"] = next(iter(self._prompts.values()))  # of one prompt
        return self._format.answer(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=choices,
            usage=usage.body(),
            **more,
        )


class ChunkWriter:
    """Pieces as the bodies of stream chunks.

    With `token_bytes` a chunk has the log-probabilities of the tokens since the choice's last chunk:
    text that is held back holds back its tokens. Those of a call go out as they come, in chunks without text
    that show clients that the answer goes on.
    """

    idle: Final = COMMENT
    __slots__ = (
        *("_called", "_envelope", "_format", "_names_workers", "_num_chars", "_owed", "_owed_ids"),
        *("_plan", "_started", "_token_bytes"),
    )

    def __init__(
        self,
        response_format: ResponseFormat,
        envelope: Envelope,
        plan: Plan,
        *,
        token_bytes: TokenBytes | None,
        names_workers: bool,
    ) -> None:
        self._names_workers = names_workers
        self._format = response_format
        self._envelope = envelope
        self._plan = plan
        self._token_bytes = token_bytes
        self._started: set[int] = set()
        self._called: set[int] = set()  # choices with calls
        self._owed: dict[int, list[TokenChance]] = {}
        self._owed_ids: dict[int, list[int]] = {}
        self._num_chars: dict[int, int] = {}  # of the text so far, by choice

    def events(self, delta: TextDelta, usage: UsageCounter) -> bytes:
        """None of a delta that shows nothing: no text, no token of a call, and not the last of its choice."""
        if self._token_bytes is not None:
            self._owed.setdefault(delta.index, []).extend(delta.chances)
        if self._plan.returns_ids:
            self._owed_ids.setdefault(delta.index, []).extend(delta.tokens)
        is_shown = delta.text or delta.reasoning or delta.calls or delta.injected
        is_sign_of_life = delta.is_in_call and delta.num_tokens
        if not (is_shown or is_sign_of_life) and delta.finish is None:
            return b""
        is_first, opens = delta.index not in self._started, not self._started
        self._started.add(delta.index)
        if delta.calls:
            self._called.add(delta.index)
        finish: str | None = delta.finish
        known = OMITTED
        if finish is not None:
            known = extras(delta, delta.injected, names_workers=self._names_workers)
            finish = self._format.finish(finish, has_calls=delta.index in self._called)
        elif delta.injected:
            known = InjectedExtras(injected=_injected(delta.injected))
        plan, more = self._plan, NOTHING
        num_ids, logprobs = None, None
        if self._token_bytes is not None:
            num_ids, logprobs = self._logprobs(delta, self._token_bytes)
        if plan.returns_ids:
            more = self._taken_ids(delta, num_ids)
            if is_first:
                more |= self._format.own_prompt_ids(plan, delta.index)
        choice = self._format.part(
            delta,
            is_first=is_first,
            index=delta.index,
            logprobs=logprobs,
            finish_reason=finish,
            mallee=known,
            **more,
        )
        shown: Any = OMITTED
        if plan.include_usage:
            shown = usage.body() if plan.continuous_usage else None
        prompt = self._format.prompt_ids(plan) if opens and plan.returns_ids else OMITTED
        return event(self._body([choice], shown, prompt))

    def _body(
        self, choices: list[ChunkChoice], usage: UsageBody | None, prompt: list[int] = OMITTED
    ) -> Chunk:
        envelope = self._envelope
        return Chunk(
            prompt_token_ids=prompt,
            id=envelope.id,
            object=self._format.chunk_object,
            created=envelope.created,
            model=envelope.model,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, delta: TextDelta, token_bytes: TokenBytes) -> tuple[int, dict[str, Any]]:
        """Those that go out with a delta, and how many they are."""
        index = delta.index
        num_chars = self._num_chars[index] = self._num_chars.get(index, 0) + len(delta.text)
        chances, self._owed[index] = _placed(self._owed[index], num_chars, delta)
        return len(chances), self._format.logprobs(chances, token_bytes, num_chars)

    def _taken_ids(self, delta: TextDelta, num: int | None) -> dict[str, Any]:
        """The ids that go out with a delta: as many as log-probabilities, if those were requested."""
        owed = self._owed_ids[delta.index]
        self._owed_ids[delta.index] = [] if num is None else owed[num:]
        return {"token_ids": owed[:num]}

    def end(self, usage: UsageCounter) -> bytes:
        """The mark of the end, and before it, if it was asked for, the usage of the whole request."""
        if not self._plan.include_usage:
            return DONE
        return event(self._body([], usage.body())) + DONE

    def failure(self, error: MalleeError, left: Collection[int]) -> bytes:
        """The error, and the choices that end by it: the others have ended before."""
        unfinished = {"unfinished": sorted(left)}
        return event({"error": error_fields(error), "mallee": unfinished})


def capsule_body(info: CapsuleInfo, model: str, *, names_workers: bool, **known: Any) -> NewCapsule:
    """A capsule as `GET` shows it, with what is `known` of its making."""
    status = info.status
    state: Literal["computing", "ready", "failed"] = "ready"
    if info.error is not None:
        state = "failed"
        known["error"] = error_fields(info.error)
    elif info.is_computing:
        state = "computing"
        if status is not None:
            known["computed_tokens"] = status.computed
    else:
        known |= {"stale": True} if info.is_stale else {}
        if status is not None:
            known |= {
                "pinned": status.is_pinned,
                "ttl_s": status.ttl_s,
                "tier": status.tier,
                "nbytes": status.nbytes,
                "shared_nbytes": status.shared_nbytes,
                "drawn": status.drawn,
                "aligned_tokens": status.aligned,
            }
    return NewCapsule(
        id=info.capsule,
        created=int(info.created),
        model=model,
        worker=info.worker if names_workers else None,
        tokens=info.boundary,
        status=state,
        **known,
    )
