"""Requests become jobs: ranges, token limits and defaults are decided here, before any worker."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from mallee.api.branches.accounts import Budget, read_budget
from mallee.api.branches.conditions import Conditions, read_conditions
from mallee.api.callbacks.callbacks import AllowedUrls
from mallee.api.chat.reading import Chat, ChatReader
from mallee.api.grammars import FORM_FIELDS, FREE_TEXT, OutputFormat, read_output_format
from mallee.api.prompts import PromptReader
from mallee.api.terms import read_affinity, read_retention
from mallee.api.text.answers import Reading
from mallee.gateway.capsules.capsules import CapsuleInfo
from mallee.gateway.capsules.files.imports import Received
from mallee.protocol.api.capsules import (
    CapsuleRequest,
    DemoteRequest,
    ImportRequest,
    PinRequest,
    RewindRequest,
)
from mallee.protocol.api.generate import (
    ChatRequest,
    CompletionRequest,
    ForkRequest,
    RestoreRequest,
    SamplingFields,
)
from mallee.protocol.api.shared import AnyRequest
from mallee.protocol.errors import (
    BadRequest,
    ContextLengthExceeded,
    InvalidParameter,
    UnknownModel,
    shown,
)
from mallee.protocol.hashing import Tokens, as_tokens
from mallee.protocol.ids import COMMON, CapsuleId, Scope
from mallee.protocol.messages import (
    MAX_LOGPROBS,
    MAX_PLACES,
    Limits,
    ReasoningBudget,
    RetainSpan,
    Sampling,
    unpack_tokens,
)
from mallee.protocol.model import ModelSpec
from mallee.router.dispatch.jobs import (
    NO_MESSAGES,
    NO_TERMS,
    ForkJob,
    GenerateJob,
    Messages,
    PrefillJob,
    QueueTerms,
    TokenText,
)
from mallee.runtime.config import HttpSettings

MAX_STOP_CHARS: Final = 4096  # of all stop strings together
DEFAULT_MAX_TOKENS: Final = 16
MAX_CHANCES: Final = 1 << 19
"""Log-probabilities of an answer that is sent in one body: tens of megabytes until it is sent."""
MAX_PROMPT_CHANCES: Final = 1 << 16  # of one prompt: a frame of a worker, and a megabyte or two
LOWER_TIERS: Final = {"host": 1, "disk": 2}


def ids(tokens: TokenText) -> list[int]:
    """The token ids of a text."""
    found: list[int] = unpack_tokens(tokens.tobytes()).tolist()
    return found


class Plan(msgspec.Struct, frozen=True):
    """Jobs to start, and the rules by which their text is cut. Choice index = job * branches + branch."""

    jobs: tuple[GenerateJob | ForkJob, ...]
    branches: int
    prompt_tokens: int
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]  # that end a branch and are not part of its text
    stream: bool
    include_usage: bool
    keeps_stop: bool = False  # a stop string is part of the text that it ends
    min_tokens: int = 0  # of which no stop string is looked for
    logprobs: bool = False
    output: OutputFormat = FREE_TEXT
    diagnoses: bool = False  # the answer says how its prompts were served
    starts: tuple[int, ...] = ()  # tokens before each choice's answer
    reading: Reading | None = None  # of reasoning and calls in the text, if there may be any
    budget: Budget | None = None
    conditions: Conditions | None = None  # that end branches before their limits
    model: str = ""  # as the request names it
    continuous_usage: bool = False
    returns_ids: bool = False
    prefix: Tokens | None = None  # of the capsule that is gone on from, if ids are returned
    has_offsets: bool = False  # log-probabilities say where in the text their tokens are
    echo: bool = False  # the text begins with the prompt
    hides_answer: bool = False
    hides_reasoning: bool = False
    num_prompt_logprobs: int = -1  # of the likeliest in each place of the prompt; -1: no report

    @property
    def shows_prompt(self) -> bool:
        """Whether the first delta of a choice has anything of its prompt."""
        return self.echo or self.num_prompt_logprobs >= 0

    def prompt_ids(self, job: int) -> list[int]:
        """The tokens that job `job` begins with, without those of its capsule, if it has one."""
        found = self.jobs[job]
        assert isinstance(found, GenerateJob), "forks have suffixes"
        return ids(found.tokens)

    def suffix_ids(self, index: int) -> list[int]:
        """The tokens that choice `index` of a fork begins with, behind its capsule's."""
        job = self.jobs[0]
        assert isinstance(job, ForkJob), "prompts are whole"
        return ids(job.suffixes[index])

    def whole_prompt_ids(self, index: int) -> list[int]:
        """All tokens before choice `index`; of a fork once `prefix` is known."""
        if self.prefix is None:
            return self.prompt_ids(index // self.branches)
        return [*ids(self.prefix), *self.suffix_ids(index)]

    @property
    def keeps(self) -> bool:
        """Whether the capsules of its choices are to be pinned."""
        return self.jobs[0].keep_s is not None  # as of all

    @property
    def needs(self) -> dict[str, float]:
        """Of its key's limits, as `Visit.ready` takes them."""
        kept: dict[str, float] = {}
        if self.keeps:
            kept = {"capsules": 1, "capsule_tokens": self.prompt_tokens}
        return {"branches": self.num_choices, **kept}

    @property
    def num_choices(self) -> int:
        return len(self.jobs) * self.branches


class Start(NamedTuple):
    """The first `num_tokens` tokens of a capsule, which has more of them if `is_cut`."""

    capsule: CapsuleId
    num_tokens: int
    is_cut: bool


class Options(NamedTuple):
    """Wishes that most requests have none of: of such a one the defaults."""

    stops: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1  # of the likeliest tokens, to be reported; -1: no report at all
    keep_s: float | None = (
        None  # of the capsules of its answers without use; None: while there is room
    )
    affinity: int = 0
    budget: Budget | None = None
    conditions: Conditions | None = None


class _Asked(NamedTuple):
    """A request for answers, with all that was read of it."""

    body: SamplingFields
    options: Options
    max_tokens: int
    output: OutputFormat
    scope: Scope
    terms: QueueTerms
    messages: Messages = NO_MESSAGES
    reading: Reading | None = None
    reasoning: ReasoningBudget | None = None
    prompt_logprobs: int = -1  # that the engine reports


_PLAIN: Final = Options()
_OPTIONAL: Final = attrgetter(
    *("logit_bias", "logprobs", "mallee", "prompt_cache_key", "stop", "stop_token_ids"),
    *("stream_options", *FORM_FIELDS),
)
_LEFT_OUT: Final[dict[type, object]] = {
    kind: _OPTIONAL(kind()) for kind in (CompletionRequest, ChatRequest, ForkRequest)
}

T = TypeVar("T", int, float)


def _within(param: str, value: T, low: T, high: T) -> T:
    if not low <= value <= high:  # also refuses NaN
        raise InvalidParameter(param, value, f"give {low} to {high}")
    return value


class JobMaker:
    """Turns parsed requests into plans. `draw_seed` gives a seed in [0, 2**64) where none was given.

    Every method raises BadRequest (or UnknownModel) and has no other effect.
    """

    def __init__(
        self,
        spec: ModelSpec,
        reader: PromptReader,
        chat: ChatReader,
        *,
        model_name: str,
        aliases: Sequence[str] = (),
        limits: HttpSettings,
        draw_seed: Callable[[], int],
    ) -> None:
        self._spec = spec
        self._reader = reader
        self._chat = chat
        self._model_names = (model_name, *aliases)
        self._limits = limits
        self._has_states = spec.has_states
        self.urls = AllowedUrls(limits.callbacks)
        self._draw_seed = draw_seed

    def check_model(self, model: str | None) -> None:
        """Raises UnknownModel; a request that names no model means the one served, of whatever name."""
        if model is not None and model not in self._model_names:
            raise UnknownModel(model, [*self._model_names])

    def completion(self, request: CompletionRequest, scope: Scope, terms: QueueTerms) -> Plan:
        self.check_model(request.model)
        num_prompts = len(request.prompt) if _is_batch(request.prompt) else 1
        self._check_branches("n", request.n, num_prompts)
        options = self._options(request, num_prompts * request.n, scope)
        prompts = self._reader.prompts(request.prompt, scope)
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        if not max_tokens and not request.echo:
            raise InvalidParameter(
                "max_tokens", 0, "give at least 1, or echo=true for the prompt alone"
            )
        output = FREE_TEXT if options is _PLAIN else read_output_format(request)
        asked = _Asked(request, options, max_tokens or 1, output, scope, terms)
        if not request.echo and request.prompt_logprobs is None:
            return self._generate(asked, prompts, request.n)
        num = options.num_logprobs if request.echo else -1
        plan = self._generate(self._scored(asked, num, prompts, request.n), prompts, request.n)
        return msgspec.structs.replace(
            plan, echo=request.echo, hides_answer=not max_tokens, **_shown_prompt(request)
        )

    def chat(self, request: ChatRequest, scope: Scope, terms: QueueTerms) -> Plan:
        """Without a token limit the setting's counts, as far as the prompt leaves room in the window."""
        self.check_model(request.model)
        self._check_branches("n", request.n, 1)
        old, new = request.max_tokens, request.max_completion_tokens
        if old is not None and new is not None and old != new:
            remedy = f"max_completion_tokens={shown(new)}: give one"
            raise InvalidParameter("max_tokens", old, remedy)
        return self.conversation(request, self._chat.read(request, scope), scope, terms)

    def conversation(
        self,
        request: ChatRequest,
        chat: Chat,
        scope: Scope,
        terms: QueueTerms,
        start: Start | None = None,
    ) -> Plan:
        """The plan of a request that was read; its prompt goes on from `start`, if that is given.

        A request of another API sets `max_completion_tokens`, and names its own fields before.
        """
        options = self._options(request, request.n, scope)
        max_tokens = request.max_completion_tokens or request.max_tokens
        begun = 0 if start is None else start.num_tokens
        default = self._chat_tokens(begun + len(chat.prompt))
        if ends := self._chat.stop_token_ids:
            ids = [*request.stop_token_ids, *(() if request.ignore_eos else ends)]
            request = msgspec.structs.replace(request, stop_token_ids=ids)
        asked = _Asked(
            body=request,
            options=options,
            max_tokens=max_tokens or default,
            output=chat.output,
            scope=scope,
            terms=terms,
            messages=chat.messages,
            reading=chat.reading,
            reasoning=chat.reasoning,
        )
        if request.prompt_logprobs is not None:
            prompts = [chat.prompt]
            plan = self._generate(self._scored(asked, -1, prompts, request.n), prompts, request.n)
            return msgspec.structs.replace(plan, **_shown_prompt(request))
        if start is None:
            return self._generate(asked, [chat.prompt], request.n)
        return self._fork(
            asked, start.capsule, [chat.prompt], begun, begun if start.is_cut else None
        )

    def capsule(self, request: CapsuleRequest, scope: Scope, terms: QueueTerms) -> PrefillJob:
        self.check_model(request.model)
        ttl_s = self._ttl_s(request.ttl_s)
        if (request.prompt is None) == (request.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")
        messages = NO_MESSAGES
        if request.messages is None:
            tokens = self._reader.prompt(request.prompt, scope=scope)
        else:
            tokens, messages = self._chat.prefix(request, scope)
        self._check_fits(len(tokens), 0)
        retain = read_retention(request, len(tokens), self._limits.max_ttl_s)
        return PrefillJob(
            tokens,
            scope,
            ttl_s,
            terms,
            messages=messages,
            retain=retain,
            affinity=read_affinity(request, scope),
            places=self._places(tokens, messages, retain) if self._has_states else (),
        )

    def imported(
        self, request: ImportRequest, found: Received, scope: Scope, terms: QueueTerms
    ) -> PrefillJob:
        """The job that makes a capsule of a file that has come, under a salt that nobody knows."""
        record = found.record
        return PrefillJob(
            unpack_tokens(record.tokens),
            scope,
            self._ttl_s(request.ttl_s),
            terms,
            grammar=record.grammar,
            continuation=record.continuation,
            holders=(found.holder,),
            nonce=found.holder.capsule,
        )

    def check_import(self, request: ImportRequest) -> None:
        """Raises what `imported` would, before the file comes."""
        self.check_model(request.model)
        self._ttl_s(request.ttl_s)

    def check_fork(self, request: ForkRequest) -> None:
        """Raises what a fork of any capsule would raise for its model and sampling."""
        self.check_model(request.model)
        options = self._options(request, self._limits.max_branches, COMMON)
        self._sampling(_Asked(request, options, 0, FREE_TEXT, COMMON, NO_TERMS))

    def fork(
        self, request: ForkRequest, capsule: CapsuleInfo, scope: Scope, terms: QueueTerms
    ) -> Plan:
        self.check_model(request.model)
        if sum(each is not None for each in (request.suffixes, request.suffix_ids, request.n)) != 1:
            raise BadRequest("give one of suffixes, suffix_ids and n", param="suffixes")
        if request.n is not None:
            self._check_branches("n", request.n, 1)
        param = "suffixes" if request.suffix_ids is None else "suffix_ids"
        entries: Sequence[object] = request.suffixes or request.suffix_ids or ()
        num = len(entries) if request.n is None else request.n
        self._check_branches(param, num, 1)
        options = self._options(request, num, scope)
        suffixes = [self._reader.suffix(s, f"{param}[{i}]", scope) for i, s in enumerate(entries)]
        suffixes = suffixes or [as_tokens(())] * num
        boundary = _checked_at("at", request.at, capsule)
        is_chat = any(isinstance(each, dict) for each in entries)
        default = (
            self._chat_tokens(boundary + max(map(len, suffixes))) if is_chat else DEFAULT_MAX_TOKENS
        )
        max_tokens = request.max_tokens or default
        output = FREE_TEXT if options is _PLAIN else read_output_format(request)
        asked = _Asked(request, options, max_tokens, output, scope, terms)
        return self._fork(asked, capsule.capsule, suffixes, boundary, request.at)

    def restore(
        self, request: RestoreRequest, capsule: CapsuleInfo, scope: Scope, terms: QueueTerms
    ) -> Plan:
        """The branch that a capsule was taken from, going on from there."""
        self.check_model(request.model)
        stops = _read_stops(request)
        more = request.max_tokens or 0
        boundary = _checked_at("at", request.at, capsule)
        self._check_fits(boundary, more or 1)
        conditions = read_conditions(request.mallee.stop_when, 1, self.urls)
        if conditions is not None and conditions.below is not None:
            remedy = "how a restored branch draws is its capsule's; leave it out, or fork"
            raise InvalidParameter("mallee.stop_when.logprob", {"below": conditions.below}, remedy)
        job = ForkJob(
            capsule.capsule,
            [as_tokens(())],
            Limits(more),
            terms=terms,
            at=request.at,
            scope=scope,
            resumes=True,
            keep_s=self._keep_s(request),
        )
        options = request.stream_options
        return Plan(
            jobs=(job,),
            branches=1,
            prompt_tokens=boundary,
            stops=stops,
            stop_token_ids=frozenset(),
            stream=request.stream,
            include_usage=options is not None and options.include_usage,
            keeps_stop=request.include_stop_str_in_output,
            starts=(boundary,),
            budget=read_budget(request.mallee.budget),
            conditions=conditions,
            model=request.model or "",
            continuous_usage=options is not None and options.continuous_usage_stats,
            returns_ids=request.return_token_ids,
        )

    def rewind(self, request: RewindRequest, capsule: CapsuleInfo) -> tuple[int, float]:
        """The boundary to rewind to, and the seconds to keep that without use."""
        self.check_model(request.model)
        if request.to is None:
            raise BadRequest("to is required", param="to")
        return _checked_at("to", request.to, capsule), self._ttl_s(request.ttl_s)

    def pin(self, request: PinRequest) -> float:
        """Seconds to keep a capsule without use; 0: until it is deleted."""
        self.check_model(request.model)
        return self._ttl_s(request.ttl_s)

    def demote(self, request: DemoteRequest) -> int:
        """The tier to move a capsule to."""
        self.check_model(request.model)
        if request.tier is None:
            raise BadRequest("tier is required: host or disk", param="tier")
        return LOWER_TIERS[request.tier]

    def _keep_s(self, request: AnyRequest) -> float | None:
        """Seconds to keep the capsules of an answer without use; None: while there is room."""
        keep = request.mallee.keep
        if keep is False:
            return None
        return self._ttl_s(None if keep is True else keep.ttl_s)

    def _places(
        self, prompt: Tokens, messages: Messages, retain: Sequence[RetainSpan]
    ) -> tuple[int, ...]:
        """Places of `prompt` from which others are likely to go on, of a model that leaves states at some.

        Those that its client marked or wants retained, and ends of messages, which are where the model's own
        would end: of the first, which other conversations have too, and of the last two.
        """
        ends = (np.flatnonzero(np.isin(prompt, self._spec.eos_token_ids)) + 1).tolist()
        asked = [*messages.places, *(span.end for span in retain)]
        found = {at for at in (*asked, *ends[:1], *ends[-2:]) if 0 < at < len(prompt)}
        return tuple(sorted(found)[:MAX_PLACES])

    def _generate(self, asked: _Asked, prompts: Sequence[Tokens], n: int) -> Plan:
        """`n` branches of each prompt."""
        options, messages, starts = asked.options, asked.messages, list[int]()
        limits = _branch_limits(asked)
        jobs = list[GenerateJob]()
        for prompt in prompts:
            length = len(prompt)
            self._check_fits(length, asked.max_tokens)
            starts += [length] * n
            retain = read_retention(asked.body, length, self._limits.max_ttl_s)
            jobs.append(
                GenerateJob(
                    tokens=prompt,
                    limits=limits,
                    sampling=self._sampling(asked),
                    n=n,
                    scope=asked.scope,
                    terms=asked.terms,
                    grammar=asked.output.grammar,
                    messages=messages,
                    keep_s=options.keep_s,
                    retain=retain,
                    affinity=options.affinity,
                    places=self._places(prompt, messages, retain) if self._has_states else (),
                    prompt_logprobs=asked.prompt_logprobs,
                )
            )
        return self._plan(asked, tuple(jobs), n, sum(starts) // n, tuple(starts))

    def _fork(
        self,
        asked: _Asked,
        capsule: CapsuleId,
        suffixes: Sequence[Tokens],
        begun: int,
        at: int | None,
    ) -> Plan:
        """A branch of the first `begun` tokens of a capsule for each suffix; `at`: these are not all."""
        starts = tuple(begun + len(suffix) for suffix in suffixes)
        longest = max(starts)
        self._check_fits(longest, asked.max_tokens)
        job = ForkJob(
            capsule=capsule,
            suffixes=suffixes,
            limits=_branch_limits(asked),
            sampling=self._sampling(asked),
            terms=asked.terms,
            grammar=asked.output.grammar,
            at=at,
            scope=asked.scope,
            keep_s=asked.options.keep_s,
            retain=read_retention(asked.body, longest, self._limits.max_ttl_s),
        )
        num = len(suffixes)
        return self._plan(asked, (job,), num, sum(starts) - (num - 1) * begun, starts)

    def _plan(
        self,
        asked: _Asked,
        jobs: tuple[GenerateJob | ForkJob, ...],
        branches: int,
        prompt_tokens: int,
        starts: tuple[int, ...],
    ) -> Plan:
        body, options = asked.body, asked.options
        own = () if body.ignore_eos else self._spec.eos_token_ids
        streaming = body.stream_options
        return Plan(
            jobs=jobs,
            branches=branches,
            prompt_tokens=prompt_tokens,
            stops=options.stops,
            stop_token_ids=frozenset((*own, *body.stop_token_ids)),
            stream=body.stream,
            include_usage=streaming is not None and streaming.include_usage,
            keeps_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
            logprobs=options.num_logprobs >= 0,
            output=asked.output,
            diagnoses=body.mallee.diagnostics,
            starts=starts,
            reading=asked.reading,
            budget=options.budget,
            conditions=options.conditions,
            model=body.model or "",
            continuous_usage=streaming is not None and streaming.continuous_usage_stats,
            returns_ids=body.return_token_ids,
            has_offsets=options.num_logprobs >= 0 and not isinstance(body, ChatRequest),
            hides_reasoning=isinstance(body, ChatRequest) and not body.include_reasoning,
        )

    def _scored(self, asked: _Asked, num_top: int, prompts: Sequence[Tokens], n: int) -> _Asked:
        """With the log-probabilities that are wanted of its prompts. Raises BadRequest."""
        body = asked.body
        assert isinstance(body, CompletionRequest | ChatRequest), "others have no prompt"
        if body.prompt_logprobs is not None:
            if body.stream:
                raise BadRequest("prompt_logprobs needs stream=false", param="prompt_logprobs")
            num_top = max(num_top, body.prompt_logprobs)
        longest = max(map(len, prompts))
        for num, most in ((longest, MAX_PROMPT_CHANCES), (n * sum(map(len, prompts)), MAX_CHANCES)):
            if num * (1 + num_top) > most:
                remedy = (
                    f"{num} tokens x {1 + num_top} = {num * (1 + num_top)} > {most}; ask for less"
                )
                raise InvalidParameter("prompt_logprobs", num_top, remedy)
        return asked._replace(prompt_logprobs=num_top)

    def _options(self, request: SamplingFields, num_choices: int, scope: Scope) -> Options:
        """Raises BadRequest."""
        is_plain = _OPTIONAL(request) == _LEFT_OUT.get(type(request))
        if is_plain and not getattr(request, "top_logprobs", None):
            return _PLAIN
        if request.stop_token_ids:
            self._reader.ids(request.stop_token_ids, "stop_token_ids")
        own = request.mallee
        return Options(
            stops=_read_stops(request),
            logit_bias=self._logit_bias(request.logit_bias),
            num_logprobs=_num_logprobs(request),
            keep_s=self._keep_s(request),
            affinity=read_affinity(request, scope),
            budget=read_budget(own.budget),
            conditions=read_conditions(own.stop_when, num_choices, self.urls),
        )

    def _sampling(self, asked: _Asked) -> Sampling:
        """Checked sampling; negative seeds keep their 64 bits, top_k -1 means off."""
        request, options = asked.body, asked.options
        seed = self._draw_seed() if request.seed is None else request.seed
        top_k = min(max(request.top_k, 0), self._spec.vocab_size)
        if request.top_p == 0:  # no share at all: the likeliest is always in it
            top_k = 1
        follows = options.conditions is not None and options.conditions.below is not None
        return Sampling(
            temperature=request.temperature,
            top_k=top_k,
            top_p=request.top_p or 1.0,
            seed=seed % (1 << 64),
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=options.logit_bias,
            logprobs=max(options.num_logprobs, 0 if follows else -1),
        ).validate()

    def _logit_bias(self, bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
        """Keys are token ids written as text, as JSON has no others."""
        found: dict[int, float] = {}
        for key, value in bias.items():
            is_id = key.isascii() and key.isdigit() and len(key) < 10
            if not is_id or int(key) >= self._spec.vocab_size:
                raise InvalidParameter(
                    "logit_bias", key, f"keys are token ids, 0 to {self._spec.vocab_size - 1}"
                )
            found[int(key)] = value
        return tuple(found.items())

    def _check_branches(self, param: str, n: int, num_prompts: int) -> None:
        most = self._limits.max_branches
        if not 1 <= n <= most:
            raise InvalidParameter(param, n, f"give 1 to {most} branches")
        if n * num_prompts > most:
            raise InvalidParameter(
                param, n, f"{num_prompts} prompts x {n} = {n * num_prompts} > {most} branches"
            )

    def _ttl_s(self, asked: float | None) -> float:
        """Seconds without use that a capsule is kept; 0: until it is deleted. Raises InvalidParameter."""
        most = self._limits.max_ttl_s
        if asked is None:
            return self._limits.default_ttl_s
        if asked == 0.0 and most is not None:
            raise InvalidParameter(
                "ttl_s", asked, f"no capsule is kept for ever here; give up to {most:g} seconds"
            )
        return _within("ttl_s", asked, 0.0, most or 1e9)

    def _chat_tokens(self, prompt_tokens: int) -> int:
        """The limit of a chat's answer that names none: the setting's, as far as the window has room."""
        room = max(self._spec.max_model_len - prompt_tokens, 1)
        return min(self._chat.settings.max_tokens or room, room)

    def _check_fits(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens + max_tokens > self._spec.max_model_len:
            raise ContextLengthExceeded(prompt_tokens, max_tokens, self._spec.max_model_len)


def _branch_limits(asked: _Asked) -> Limits:
    body, most = asked.body, asked.max_tokens
    if not 0 <= body.min_tokens <= most:
        remedy = f"give 0 to {most}, which is max_tokens"
        raise InvalidParameter("min_tokens", body.min_tokens, remedy)
    ids = tuple(body.stop_token_ids)
    return Limits(most, ids, body.ignore_eos, body.min_tokens, asked.reasoning)


def _num_logprobs(request: SamplingFields) -> int:
    """The number of likeliest tokens to report, -1 for no report at all."""
    if isinstance(request, ChatRequest):
        top = request.top_logprobs
        if top is not None and top != 0 and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        return (top or 0) if request.logprobs else -1
    assert isinstance(request, CompletionRequest | ForkRequest), "no other request draws tokens"
    asked = request.logprobs
    if asked is None or asked is False:
        return -1
    if asked is True:
        raise InvalidParameter("logprobs", asked, f"give how many, 0 to {MAX_LOGPROBS}")
    return asked


def _shown_prompt(request: CompletionRequest | ChatRequest) -> dict[str, int]:
    return (
        {} if request.prompt_logprobs is None else {"num_prompt_logprobs": request.prompt_logprobs}
    )


def _is_batch(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


def _checked_at(param: str, at: int | None, capsule: CapsuleInfo) -> int:
    """The boundary to go on from: `at`, if it is given. Raises InvalidParameter."""
    if at is None:
        return capsule.boundary
    if not 1 <= at <= capsule.boundary:
        raise InvalidParameter(
            param, at, f"give 1 to {capsule.boundary}, the tokens of the capsule"
        )
    return at


def _read_stops(request: SamplingFields | RestoreRequest) -> tuple[str, ...]:
    """Raises BadRequest for what can't be looked for in a text, and for options of no stream."""
    given = request.stop or ()
    stops = (given,) if isinstance(given, str) else tuple(given)
    if (num_chars := sum(map(len, stops))) > MAX_STOP_CHARS:
        raise InvalidParameter(
            "stop", request.stop, f"{num_chars} characters; give at most {MAX_STOP_CHARS}"
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream=true", param="stream_options")
    return stops
