"""The request of a search, read and checked before anything is computed."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from mallee.api.callbacks.callbacks import AllowedUrls
from mallee.api.jobs import JobMaker
from mallee.protocol.api.generate import (
    ForkRequest,
    LogitBias,
    Penalty,
    RepetitionPenalty,
    Share,
    Stop,
    StopText,
    Temperature,
    TopK,
    TopP,
)
from mallee.protocol.api.shared import (
    OBJECT,
    STRING,
    AnyRequest,
    Messages,
    Prompt,
    Seed,
    Stream,
    TemplateVariables,
    Tools,
    shape,
)
from mallee.protocol.errors import BadRequest, InvalidParameter
from mallee.search.drawn import Ends
from mallee.search.policies.named import read_policy
from mallee.search.policy import Policy, SearchBudget, within
from mallee.search.scores import Scoring, Verifier

MAX_NODES: Final = 16_384  # of one search
MAX_ENDS: Final = 16
MAX_END_CHARS: Final = 4096  # of all marks together
_OF_PROMPTS: Final = (
    *("prompt", "messages", "tools", "chat_template_kwargs"),
    *("kv_hints", "prompt_cache_options", "cache_control"),
)
_OF_STEPS: Final = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias"),
)
_OF_ALL: Final = (
    *(
        "model",
        "user",
        "safety_identifier",
        "cache_salt",
        "session_id",
        "nvext",
        "prompt_cache_key",
    ),
)


class SearchRequest(AnyRequest, frozen=True, kw_only=True):
    """`POST /v1/search`: where it begins (`prompt`, `messages` or `capsule`), its policy and its steps.

    `score`: "mean_logprob", "sum_logprob", a verifier of the same model (`prompt`, `answers`, `read`,
    `max_tokens`), or one of the client's (`url`). A step with one of the texts `ends` ends an answer.
    """

    prompt: Prompt = None
    messages: Messages = None
    tools: Tools = None
    chat_template_kwargs: TemplateVariables = None
    capsule: Annotated[str | None, Meta(description="Where it begins, instead of a prompt.")] = None
    policy: Annotated[
        Any,
        shape(
            "`type` names it, its own fields beside: docs/api/search.md.",
            required=["type"],
            properties={"type": STRING},
            **OBJECT,
        ),
    ] = None
    score: Annotated[
        Any,
        shape(
            "By log-probability, a verifier that asks the model, or a gateway by its URL.",
            anyOf=[
                {"enum": ["mean_logprob", "sum_logprob"]},
                {**OBJECT, "required": ["prompt", "answers"]},
                {**OBJECT, "required": ["url"]},
            ],
        ),
    ] = "mean_logprob"
    seed: Seed | None = None
    budget: SearchBudget | None = None
    ends: Annotated[
        tuple[StopText, ...],
        Meta(max_length=MAX_ENDS, description="A step with one of these texts ends an answer."),
    ] = ()
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: Share = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = msgspec.field(default_factory=dict)
    stop: Stop = None
    stream: Stream = False


class UrlScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values by a gateway of the client's, of those that the operator allows."""

    url: str


class SearchPlan(NamedTuple):
    """A search that may run. The mappings are fields of the requests that it makes."""

    policy: Policy
    scoring: Scoring
    verifier: Verifier | UrlScore | None  # if values come from outside
    seed: int
    budget: SearchBudget
    ends: Ends
    capsule: str | None
    prompt: Mapping[str, Any]  # of its capsule, if it makes one
    steps: Mapping[str, Any]  # of its forks
    common: Mapping[str, Any]  # of all


def read_search(
    request: SearchRequest,
    kinds: Mapping[str, type[msgspec.Struct]],
    maker: JobMaker,
    draw_seed: Callable[[], int],
) -> SearchPlan:
    """Raises BadRequest, InvalidParameter, UnknownModel."""
    given = [
        name for name in ("prompt", "messages", "capsule") if getattr(request, name) is not None
    ]
    if len(given) != 1:
        raise BadRequest("give one of prompt, messages and capsule", param="prompt")
    if request.mallee.session_final:
        raise InvalidParameter("mallee.session_final", True, "close the session after the search")
    _, policy = read_policy(request.policy, kinds)
    scoring, verifier = _scoring(request.score, maker.urls)
    ends = _ends(request)
    steps = {name: getattr(request, name) for name in _OF_STEPS}
    maker.check_fork(msgspec.convert({**steps, "model": request.model, "n": 1}, ForkRequest))
    if ends.stop:
        steps["include_stop_str_in_output"] = True
    seed = draw_seed() >> 1 if request.seed is None else request.seed
    if not -(1 << 63) <= seed < 1 << 63:
        raise InvalidParameter("seed", seed, "give a number of 64 bits")
    return SearchPlan(
        policy=policy,
        scoring=scoring,
        verifier=verifier,
        seed=seed,
        budget=_budget(request),
        ends=ends,
        capsule=request.capsule,
        prompt={
            name: value for name in _OF_PROMPTS if (value := getattr(request, name)) is not None
        },
        steps=steps,
        common={
            **{name: value for name in _OF_ALL if (value := getattr(request, name))},
            "mallee": _mallee(request),
        },
    )


def _mallee(request: SearchRequest) -> dict[str, Any]:
    """The waiting terms, which each step has too; `keep` is not one of them."""
    if request.mallee.keep is not False:
        remedy = "pin the capsules of the nodes that you want to keep"
        raise InvalidParameter("mallee.keep", request.mallee.keep, remedy)
    if request.mallee.diagnostics:
        raise InvalidParameter("mallee.diagnostics", True, "a search has none; leave it out")
    known: dict[str, Any] = msgspec.to_builtins(request.mallee)
    return {name: value for name, value in known.items() if name in _TERMS and value is not None}


_TERMS: Final = ("priority", "deadline_s", "session", "parent_session", "weight", "record")


def _budget(request: SearchRequest) -> SearchBudget:
    budget = request.budget or SearchBudget()
    nodes = (
        MAX_NODES if budget.nodes is None else within("budget.nodes", budget.nodes, 1, MAX_NODES)
    )
    return msgspec.structs.replace(budget, nodes=nodes)


def _scoring(score: Any, urls: AllowedUrls) -> tuple[Scoring, Verifier | UrlScore | None]:
    if score == "mean_logprob":
        return "mean_logprob", None
    if score == "sum_logprob":
        return "sum_logprob", None
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
    if isinstance(found, UrlScore):
        urls.check("score.url", found.url)
    return "outside", found


def _ends(request: SearchRequest) -> Ends:
    stop = request.stop or ()
    marks = request.ends
    if sum(map(len, marks)) > MAX_END_CHARS:
        remedy = f"give at most {MAX_END_CHARS} characters in all"
        raise InvalidParameter("ends", request.ends, remedy)
    return Ends((stop,) if isinstance(stop, str) else tuple(stop), marks)
