"""Typed parameters of the SDK, and the HTTP calls that they become; no I/O.

Ranges and defaults of the parameters are the server's: docs/api.md. None is the same as absent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Required, TypeAlias, TypedDict, cast

import msgspec

from mallee.protocol.errors import InvalidParameter

Prompt: TypeAlias = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""Text, token ids, or several of either."""

Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = Sequence[Message]
Suffix: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"messages": [...]} that go on in a conversation."""

InjectMode: TypeAlias = Literal["append", "replace"]
Forks: TypeAlias = int | str | Mapping[str, Any] | Sequence[Suffix]
"""A number of equal branches, one suffix (a lone text is one), or one suffix a branch."""


SALT_HEADER = "x-cache-salt"
KEY_HEADER = "Idempotency-Key"


class Budget(TypedDict, total=False):
    """Bounds of a request and of all that is forked below it."""

    tokens: int
    branches: int
    wall_s: float


class Confidence(TypedDict, total=False):
    """A branch ends when the mean log-probability of its last `tokens` is `below`."""

    below: Required[float]
    tokens: int


class Verifier(TypedDict, total=False):
    """A service that scores branches, each at most every `every` tokens; one whose score is `below` ends.

    `required`: a call that fails ends the branches that it was about.
    """

    url: Required[str]
    below: Required[float]
    every: int
    required: bool


class StopWhen(TypedDict, total=False):
    """Conditions by which branches end; `done`: the others, when so many have ended by themselves."""

    regex: str
    done: int
    logprob: Confidence
    score: Verifier


class Turn(TypedDict, total=False):
    """Terms of every request: its session, and its turn where it has to wait. `user` names the tenant."""

    model: str | None
    user: str
    priority: int
    deadline_s: float
    session: str
    parent_session: str
    session_final: bool
    weight: float


class Terms(Turn, total=False):
    """Terms of every request that leaves capsules: whether they are kept, and bounds of its branches."""

    keep: bool | Mapping[str, float | None]
    record: bool
    diagnostics: bool
    budget: Budget
    stop_when: StopWhen


class Sampling(Terms, total=False):
    """Parameters of every request that generates text."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    min_tokens: int
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]
    logprobs: int | bool | None
    top_logprobs: int | None
    response_format: Mapping[str, Any] | type[Any] | None  # the API's object, or a Pydantic model
    structured_outputs: Mapping[str, Any] | None
    return_token_ids: bool


class Stepping(Turn, total=False):
    """Parameters of the steps of a search; their length and number are the policy's."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: str | Sequence[str] | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]
    return_token_ids: bool


class Importing(TypedDict, total=False):
    """Parameters of an import: as those of a capsule's creation."""

    model: str | None
    user: str
    ttl_s: float | None
    session: str
    priority: int
    weight: float
    deadline_s: float


class Going(Terms, total=False):
    """Parameters of a branch that goes on: how it draws is its capsule's."""

    at: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    include_stop_str_in_output: bool
    return_token_ids: bool


class Wanted(TypedDict, total=False):
    """The capsules that are meant. `request`: the answer that left them. Together they all hold."""

    request: str
    pinned: bool
    tier: Literal["device", "host", "disk", "none"]
    min_age_s: float


class Generation(Sampling, total=False):
    """Parameters of completions and chats: also the salt of their cache.

    From `tools` on they are those of chats alone; the server refuses them elsewhere.
    """

    cache_salt: str | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    reasoning_effort: str | None
    thinking_token_budget: int | None
    include_reasoning: bool
    continue_final_message: bool


class Prefilling(Terms, total=False):
    """Parameters of a prefill; of a conversation also what its template reads."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class Call(NamedTuple):
    """One HTTP request. `body` becomes JSON; one without a body says in a header whose salt it means.

    With a `key` it runs once, however often it is sent: its answer is given again. `form`: the Pydantic
    model that its `response_format` was.
    """

    method: str
    path: str
    body: dict[str, Any] | None = None
    cache_salt: str | None = None
    key: str = ""
    form: Any = None

    def keyed(self) -> "Call":
        """This call under a key of its own, if it is a POST."""
        from uuid import uuid4

        return self if self.method != "POST" else self._replace(key=uuid4().hex)

    @property
    def may_repeat(self) -> bool:
        """Whether sending it again changes no more than sending it once."""
        return self.method == "GET" or bool(self.key)

    @property
    def headers(self) -> dict[str, str]:
        is_said = self.cache_salt is None or self.body is not None
        salt = {} if is_said else {SALT_HEADER: str(self.cache_salt)}
        return {**salt, KEY_HEADER: self.key} if self.key else salt

    def content(self) -> bytes | None:
        """The body as bytes. Raises InvalidParameter for what JSON can't say."""
        if self.body is None:
            return None
        try:
            return msgspec.json.encode(self.body)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidParameter("body", list(self.body), f"not JSON: {error}") from error


def nested(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are given, as requests have them: Mallee's own terms in an object `mallee`.

    Raises InvalidParameter for that object itself.
    """
    params = given(params)
    if "mallee" in params:
        remedy = "give its fields as keywords, as keep=True"
        raise InvalidParameter("mallee", params["mallee"], remedy)
    own = {name: params[name] for name in params if name in _OWN}
    rest = {name: params[name] for name in params if name not in own}
    return {**rest, "mallee": own} if own else rest


def terms_of(params: Mapping[str, Any]) -> Turn:
    """Those of the parameters that every request takes."""
    known = Turn.__annotations__
    return cast(Turn, {name: value for name, value in params.items() if name in known})


_OWN: Final = Terms.__annotations__.keys() - {"model", "user"}

HEALTH = Call("GET", "/health")
METRICS = Call("GET", "/metrics")
MODELS = Call("GET", "/v1/models")
WORKERS = Call("GET", "/v1/router/workers")
MAX_PAGE: Final = 100  # entries that the server lists at once


def explain(request: str | None, limit: int | None, candidates: int) -> Call:
    """Decisions of the router, the last ones or those of a request."""
    query = query_of({"request": request, "limit": limit, "candidates": candidates})
    return Call("GET", f"/v1/router/explain{query}")


def is_several(prompt: Prompt | None) -> bool:
    """Whether these are several prompts: a list of texts, or of lists of token ids."""
    return isinstance(prompt, list | tuple) and not isinstance(next(iter(prompt), 0), int)


def generate(
    prompt: Prompt | None, messages: Sequence[Message] | None, params: Mapping[str, Any]
) -> Call:
    """A streamed completion, or a chat if `messages` are given. Raises InvalidParameter."""
    path = "/v1/completions" if messages is None else "/v1/chat/completions"
    return _drawn(path, {**_prompt(prompt, messages), **params})


def prefill(
    prompt: Prompt | None,
    messages: Sequence[Message] | None,
    params: Mapping[str, Any],
    *,
    is_open: bool,
) -> Call:
    """A capsule's creation. `is_open` ends a conversation after its last message."""
    body = {**_prompt(prompt, messages), **params}
    if messages is not None:
        body["add_generation_prompt"] = not is_open
    return Call("POST", "/v1/capsules", nested(body), params.get("cache_salt"))


def fork(capsule: str, branches: Forks, params: Mapping[str, Any]) -> Call:
    """`branches` forks of a capsule, or one for each suffix; a lone text or object is one suffix.

    Raises InvalidParameter for anything else.
    """
    if isinstance(branches, int) and not isinstance(branches, bool):
        body: dict[str, Any] = {"n": branches}
    elif isinstance(branches, str | Mapping):
        body = {"suffixes": [branches]}
    elif isinstance(branches, list | tuple) and all(map(_is_suffix, branches)):
        body = {"suffixes": list(branches)}
    else:
        remedy = (
            'give a number, a text, {"messages": [...]}, or a list with one suffix a branch: texts, lists of'
            " token ids, or such objects"
        )
        raise InvalidParameter("branches", branches, remedy)
    return _drawn(f"{_capsule_path(capsule)}/fork", {**body, **params})


def forks(
    branches: Forks | None,
    n: int | None,
    messages: Messages | Sequence[Messages] | None,
    suffixes: Sequence[Suffix] | None,
) -> Forks:
    """The branches of a fork, by any of the ways to name them; with `n` so many of each suffix.

    Raises InvalidParameter for none, and for two at once.
    """
    if messages is not None:
        is_one = bool(messages) and all(isinstance(each, Mapping) for each in messages)
        several = cast("Sequence[Messages]", [messages] if is_one else messages)
        conversations: list[Any] | None = [{"messages": list(each)} for each in several]
    else:
        conversations = None
    ways = [each for each in (branches, conversations, suffixes) if each is not None]
    if len(ways) != 1 and (ways or n is None):
        remedy = "give a number, or suffixes, or messages; n= may go with these: so many of each"
        raise InvalidParameter("branches", branches, remedy)
    if n is None or not ways:
        return ways[0] if ways else n  # type: ignore[return-value]
    (way,) = ways
    if isinstance(way, int):
        raise InvalidParameter("n", n, f"it is {way} already")
    each_of: Any = [way] if isinstance(way, str | Mapping) else way
    return [suffix for suffix in each_of for _ in range(n)]


def _is_suffix(value: object) -> bool:
    return isinstance(value, str | Mapping | list | tuple)


def restore(capsule: str, params: Mapping[str, Any]) -> Call:
    """The branch that a capsule was taken from, going on."""
    return _drawn(f"{_capsule_path(capsule)}/restore", params)


def change(capsule: str, verb: str, params: Mapping[str, Any]) -> Call:
    """A capsule's rewind, pin, demotion, promotion, or the prune below it."""
    return _post(f"{_capsule_path(capsule)}/{verb}", params)


def of_request(request: str, verb: str, params: Mapping[str, Any]) -> Call:
    """A change of a request's running branches."""
    return _post(f"/v1/requests/{quoted(request)}/{verb}", params)


def of_capsule(
    method: str, capsule: str, cache_salt: str | None, part: str = "", **query: Any
) -> Call:
    """A look at a capsule or a part of it, or the end of one."""
    path = f"{_capsule_path(capsule)}{part}{query_of(query)}"
    return Call(method, path, cache_salt=cache_salt)


def of_capsules(
    method: str, wanted: Mapping[str, Any], cache_salt: str | None, part: str = "", **query: Any
) -> Call:
    """A look at all capsules that are `wanted`, or their end."""
    path = f"/v1/capsules{part}{query_of({**query, **wanted})}"
    return Call(method, path, cache_salt=cache_salt)


def _post(path: str, params: Mapping[str, Any]) -> Call:
    return Call("POST", path, given(params), params.get("cache_salt"))


def import_capsule(params: Mapping[str, Any], cache_salt: str | None = None) -> Call:
    """A capsule from a file, which is the body; so `params` are in the query."""
    return Call("POST", f"/v1/capsules/import{query_of(params)}", cache_salt=cache_salt)


def checked_url(base_url: str) -> str:
    """`base_url` without its `/` or `/v1` at the end. Raises InvalidParameter without http(s)://."""
    if not base_url.startswith(("http://", "https://")):
        raise InvalidParameter("base_url", base_url, f"it lacks http://, as in http://{base_url}")
    return base_url.rstrip("/").removesuffix("/v1")


def checked_retries(max_retries: int) -> int:
    """Raises InvalidParameter for less than none."""
    if max_retries < 0:
        raise InvalidParameter("max_retries", max_retries, "give 0 or more")
    return max_retries


def quoted(name: str) -> str:
    from urllib.parse import quote  # 10 ms of the import, which httpx needs anyway

    return quote(name, safe="")


def _capsule_path(capsule: str) -> str:
    return f"/v1/capsules/{quoted(capsule)}"


def query_of(params: Mapping[str, Any]) -> str:
    """The end of a path, with a question mark unless it is empty."""
    from urllib.parse import urlencode

    texts = {n: str(v).lower() if isinstance(v, bool) else v for n, v in given(params).items()}
    return f"?{urlencode(texts)}" if texts else ""


def _prompt(prompt: Prompt | None, messages: Sequence[Message] | None) -> dict[str, Any]:
    if (prompt is None) == (messages is None):
        raise InvalidParameter("prompt", prompt, "give either prompt or messages")
    return {"prompt": prompt} if messages is None else {"messages": list(messages)}


def _drawn(path: str, params: Mapping[str, Any]) -> Call:
    """A call whose branches stream. A Pydantic model as `response_format` becomes its schema."""
    body = {**nested(params), "stream": True, "stream_options": {"include_usage": True}}
    form = body.get("response_format")
    if isinstance(form, type):
        if not hasattr(form, "model_json_schema"):
            remedy = "give a Pydantic model, or an object as the API's"
            raise InvalidParameter("response_format", form.__name__, remedy)
        schema = {"name": form.__name__, "schema": form.model_json_schema(), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        form = None
    return Call("POST", path, body, params.get("cache_salt"), form=form)


def num_branches(call: Call) -> int:
    """The branches that a call of `_drawn` asks for."""
    body: Mapping[str, Any] = call.body or {}
    prompt = body.get("prompt")
    num = len(body.get("suffixes", ())) or body.get("n") or 1
    return int(num) * (len(prompt) if prompt is not None and is_several(prompt) else 1)


def given(body: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None."""
    return {name: value for name, value in body.items() if value is not None}
