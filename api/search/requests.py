"""Bodies of searches; a request is read and checked before anything is computed."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from mallee.api.callbacks.callbacks import AllowedUrls
from mallee.api.jobs import JobMaker
from mallee.protocol.api.capsules import CapsuleRequest
from mallee.protocol.api.generate import DrawFields, ForkRequest, ReturnIds, StopText
from mallee.protocol.api.shared import (
    OBJECT,
    OMITTED,
    STRING,
    AnyRequest,
    Messages,
    Prompt,
    Stream,
    TemplateVariables,
    Tools,
    shape,
)
from mallee.protocol.errors import BadRequest, InvalidParameter
from mallee.protocol.ids import CapsuleId, Scope
from mallee.router.dispatch.jobs import PrefillJob, QueueTerms
from mallee.search.driver import Reason
from mallee.search.policies.named import read_policy
from mallee.search.policy import Policy, SearchBudget, within
from mallee.search.results import SearchResult
from mallee.search.runner import Ends
from mallee.search.scores import Scoring, Verifier

MAX_NODES: Final = 16_384  # of one search
MAX_ENDS: Final = 16
MAX_END_CHARS: Final = 4096  # of all marks together

R = TypeVar("R", bound=AnyRequest)


class SearchRequest(DrawFields, frozen=True, kw_only=True):
    """`POST /v1/search`: where it begins (`prompt`, `messages` or `capsule`), its policy and its steps."""

    prompt: Prompt = None
    messages: Messages = None
    tools: Tools = None
    chat_template_kwargs: TemplateVariables = None
    capsule: Annotated[str | None, Meta(description="Instead of a prompt.")] = None
    policy: Annotated[
        Any,
        shape(
            "`type` names it, its own fields beside: docs/api/search.md.",
            **OBJECT,
            required=["type"],
            properties={"type": STRING},
        ),
    ] = None
    score: Annotated[
        Any,
        shape(
            "By log-probability, a verifier that asks the model, or a service by its URL.",
            anyOf=[
                {"enum": ["mean_logprob", "sum_logprob"]},
                {**OBJECT, "required": ["prompt", "answers"]},
                {**OBJECT, "required": ["url"]},
            ],
        ),
    ] = "mean_logprob"
    budget: SearchBudget | None = None
    ends: Annotated[
        tuple[StopText, ...],
        Meta(max_length=MAX_ENDS, description="A step with one of these texts ends an answer."),
    ] = ()
    return_token_ids: ReturnIds = False
    stream: Stream = False


class Spent(msgspec.Struct, kw_only=True):
    """Tokens that were computed for a search, in its tree or not, and the requests that it made."""

    prefill_tokens: int
    completion_tokens: int
    requests: int


class SearchAnswer(SearchResult, frozen=True, kw_only=True):
    """The tree of a search. `principal`: numbers of nodes from the root to the selected one.

    `prompt_token_ids`: the tokens that it begins with, if ids were asked for.
    """

    object: Literal["search"]
    created: int
    model: str
    seed: int
    reason: Reason
    blocks: int
    spent: Spent
    prompt_token_ids: list[int] = OMITTED


class UrlScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values by a service of the client's, of those that the operator allows."""

    url: str


class SearchPlan(NamedTuple):
    """A search that may run: from `prompt`, or else from `capsule`. `step`: a fork but for its length."""

    policy: Policy
    score: Scoring | Verifier
    url: str  # of the service that gives values; "": none does
    seed: int
    budget: SearchBudget
    ends: Ends
    capsule: CapsuleId
    prompt: PrefillJob | None
    step: ForkRequest
    scope: Scope
    terms: QueueTerms


def read_search(
    request: SearchRequest,
    scope: Scope,
    terms: QueueTerms,
    *,
    kinds: Mapping[str, type[msgspec.Struct]],
    maker: JobMaker,
    draw_seed: Callable[[], int],
) -> SearchPlan:
    """Raises BadRequest, InvalidParameter, UnknownModel."""
    places = (request.prompt, request.messages, request.capsule)
    if sum(each is not None for each in places) != 1:
        raise BadRequest("give one of prompt, messages and capsule", param="prompt")
    _check_terms(request)
    terms = terms._replace(ends_session=False)  # as a header may say: more than one request follows
    _, policy = read_policy(request.policy, kinds)
    if (num_chars := sum(map(len, request.ends))) > MAX_END_CHARS:
        remedy = f"{num_chars} characters; give at most {MAX_END_CHARS} in all"
        raise InvalidParameter("ends", request.ends, remedy)
    score, url = _read_score(request.score, maker.urls)
    step = _as(
        ForkRequest,
        request,
        include_stop_str_in_output=bool(request.stop),
        **{"n": 1, "logprobs": 0, "stream": False, "kv_hints": None},
        **{"prompt_cache_options": None, "cache_control": None},  # of the prompt alone
    )
    maker.check_fork(step)
    prompt = None
    if request.capsule is None:
        is_chat = request.messages is not None
        body = _as(CapsuleRequest, request, add_generation_prompt=is_chat)
        prompt = maker.capsule(body, scope, terms)
    budget = request.budget or SearchBudget()
    within("budget.nodes", budget.nodes or 1, 1, MAX_NODES)
    return SearchPlan(
        policy=policy,
        score=score,
        url=url,
        seed=draw_seed() >> 1 if request.seed is None else request.seed,
        budget=msgspec.structs.replace(budget, nodes=budget.nodes or MAX_NODES),
        ends=Ends.of(request.stop, request.ends),
        capsule=CapsuleId(request.capsule or ""),
        prompt=prompt,
        step=step,
        scope=scope,
        terms=terms,
    )


def _as(kind: type[R], request: AnyRequest, **own: Any) -> R:
    """A `kind` with the fields that it has in common with `request`, and its `own`."""
    common = (name for name in kind.__struct_fields__ if name in request.__struct_fields__)
    return kind(**{name: getattr(request, name) for name in common} | own)


def _check_terms(request: SearchRequest) -> None:
    """Raises InvalidParameter for terms of a request that its steps can't have."""
    extras = request.mallee
    for name, value, remedy in (
        ("session_final", extras.session_final, "close the session after the search"),
        ("keep", extras.keep, "pin the capsules of the nodes that you want to keep"),
        ("diagnostics", extras.diagnostics, "a search has none; leave it out"),
    ):
        if value is not False:
            raise InvalidParameter(f"mallee.{name}", value, remedy)


def _read_score(score: Any, urls: AllowedUrls) -> tuple[Scoring | Verifier, str]:
    """The score, and the URL of the service that gives values, if one does. Raises InvalidParameter."""
    if score in ("mean_logprob", "sum_logprob"):
        return score, ""
    if not isinstance(score, dict):
        remedy = (
            "give mean_logprob, sum_logprob, an object with prompt and answers, or one with a url"
        )
        raise InvalidParameter("score", score, remedy)
    kind: type[Verifier | UrlScore] = UrlScore if "url" in score else Verifier
    try:
        found = msgspec.convert(score, kind, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidParameter("score", score, str(error)) from error
    if isinstance(found, Verifier):
        return found, ""
    urls.check("score.url", found.url)
    return "outside", found.url
