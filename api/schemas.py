"""Request bodies: bytes in, typed structs out, every refused field named.

null means absent. A field is one of ours, or harmless (accepted, ignored), or answer-changing and
unsupported (accepted only at its neutral value), or unknown (refused).
"""

import re
from typing import Any, ClassVar, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from mallee.api.errors import TooManyValues
from mallee.protocol.errors import MAX_SHOWN, BadRequest, InvalidParameter

LEAST_VALUES: Final = 1 << 18  # that a body may have, whatever the model
SMALL_BODY: Final = 64 << 10  # bytes, which are decoded in no time whatever they say
MAX_DIGITS: Final = 256  # of a number of a larger body: to read one takes the square of its length
MAX_DEPTH: Final = 128  # of objects and lists in each other; recursive code reads them later

HARMLESS = frozenset(
    (
        "metadata",
        "client_metadata",
        "prompt_cache_retention",
        "service_tier",
        "store",
    )
)

# Answer-changing fields that are not supported -> the values at which they change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`include_obfuscation` is accepted and ignored: padding of chunks is not offered."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Keep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time for which a capsule is pinned, as with `CapsuleRequest`."""

    ttl_s: float | None = None


class BudgetFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of a request or a session, and of all that is below it."""

    tokens: int | None = None
    branches: int | None = None
    wall_s: float | None = None


class LogprobFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A branch ends when the mean log-probability of its last `tokens` is `below`."""

    below: float
    tokens: int = 16


class ScoreFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A verifier at `url` scores the texts so far, one at most each `every` tokens.

    A branch ends when its score is `below`. `required`: a call that fails ends those it asked for.
    """

    url: str
    below: float
    every: int = 32
    required: bool = False


class StopWhenFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`done`: the others end when so many choices have ended by themselves."""

    regex: str | None = None
    done: int | None = None
    logprob: LogprobFields | None = None
    score: ScoreFields | None = None


class Extras(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `mallee` object of a request. `session`: the tree that it belongs to, of the tenant's.

    `parent_session`: the session that it branched off from. `session_final`: the session ends with it.
    `keep`: pin the capsules that its answers leave. `record`: into the session's record. `budget` and
    `stop_when` are read by `http.branches`.
    """

    keep: bool | Keep = False
    record: bool = False
    priority: int | None = None
    deadline_s: float | None = None
    session: str = ""
    parent_session: str = ""
    session_final: bool = False
    weight: float = 1.0
    diagnostics: bool = False  # the answer says how its prompt was served
    budget: BudgetFields | None = None
    stop_when: StopWhenFields | None = None


class AnyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every request: its owner, its place in the queue, its wishes for the cache.

    `nvext` is NVIDIA Dynamo's, `prompt_cache_key` and `prompt_cache_options` are OpenAI's, `cache_control` is
    Anthropic's, `kv_hints` common to engines: `http.terms` reads them. `session_id` is vLLM's and SGLang's.
    """

    is_bounded: ClassVar[bool] = False  # it may have a budget, and conditions to stop by
    history: ClassVar[str] = ""  # the list that clients send again with more at its end

    model: str | None = None
    user: str = ""
    safety_identifier: str = ""
    cache_salt: str = ""
    session_id: str = ""
    mallee: Extras = Extras()
    nvext: Any = None
    kv_hints: Any = None
    prompt_cache_key: str = ""
    prompt_cache_options: Any = None
    cache_control: Any = None


class SamplingFields(AnyRequest, frozen=True, kw_only=True):
    """Fields of every generating request; ranges are checked where jobs are made.

    The grammar of the answer (`response_format`, `structured_outputs`, `guided_`) is read by
    `http.grammars`.
    """

    is_bounded: ClassVar[bool] = True

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    stream: bool = False
    stream_options: StreamOptions | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """`logprobs` counts the likeliest tokens to report; false is the same as to leave it out."""

    prompt: Any = None
    logprobs: int | bool | None = None
    n: int = 1


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """`tools` and messages are read by `text.conversation`, the rest of them by `http.chat`."""

    history: ClassVar[str] = "messages"

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Any = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    n: int = 1


class CapsuleRequest(AnyRequest, frozen=True, kw_only=True):
    """`add_generation_prompt`: end rendered `messages` where the assistant's answer begins.

    `ttl_s`: seconds that the capsule is kept without being used; 0: until it is deleted, if that may be.
    Without `wait` it is answered at once, before the capsule is there.
    """

    prompt: Any = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: bool = False
    ttl_s: float | None = None
    wait: bool = True


class TokenizeRequest(AnyRequest, frozen=True, kw_only=True):
    """vLLM's. `add_special_tokens`: those of a text's beginning; by default with `prompt` alone.

    `add_generation_prompt`: end rendered `messages` where the assistant's answer begins.
    """

    prompt: Any = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(AnyRequest, frozen=True, kw_only=True):
    """vLLM's. Special tokens become text too."""

    tokens: list[int] | None = None


class WeightsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/models/weights`. Without `path` the weights stay, and their KV counts no more."""

    version: str = ""  # refused, as all that is no label
    path: str | None = None
    drain_s: float = 30.0  # that running answers have to end
    wait_s: float = 0.0  # until every worker serves the version, or failed


class ForkRequest(SamplingFields, frozen=True, kw_only=True):
    suffixes: list[Any] | None = None
    n: int | None = None
    at: int | None = None
    logprobs: int | bool | None = None


class RestoreRequest(AnyRequest, frozen=True, kw_only=True):
    """Fields of an answer that goes on; how it draws is the capsule's. `max_tokens`: tokens from here on."""

    is_bounded: ClassVar[bool] = True

    at: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None


class CaptureRequest(AnyRequest, frozen=True, kw_only=True):
    branch: int = 0
    ttl_s: float | None = None


class PruneRequest(AnyRequest, frozen=True, kw_only=True):
    branches: list[int] | None = None


class PrioritizeRequest(AnyRequest, frozen=True, kw_only=True):
    priority: int | None = None
    branches: list[int] | None = None


class InjectRequest(AnyRequest, frozen=True, kw_only=True):
    suffix: Any = None
    mode: str = "append"


class RewindRequest(AnyRequest, frozen=True, kw_only=True):
    to: int | None = None
    ttl_s: float | None = None


class PinRequest(AnyRequest, frozen=True, kw_only=True):
    ttl_s: float | None = None


class DemoteRequest(AnyRequest, frozen=True, kw_only=True):
    tier: str | None = None


class SessionForkRequest(AnyRequest, frozen=True, kw_only=True):
    """`session` names the new one; `capsule`: where it begins, by default with the newest."""

    session: str = ""
    capsule: str | None = None
    budget: BudgetFields | None = None


class SessionRequest(AnyRequest, frozen=True, kw_only=True):
    """The budget of a session, and of all below it; `parent`: the session that a new one is below."""

    budget: BudgetFields | None = None
    parent: str = ""


class CloseSessionRequest(AnyRequest, frozen=True, kw_only=True):
    """SGLang's: `session_id` is the session to close."""


R = TypeVar("R", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_QUOTED = re.compile(r"(?s)(?<=unknown field )`(.*)`(?= - at|$)")
_STEP = re.compile(r"(\w+)|\[(\d+)\]")


def parse(raw: bytes, kind: type[R], max_values: int = LEAST_VALUES) -> R:
    """`raw` as a request of type `kind`.

    Raises BadRequest, InvalidParameter naming the field, and TooManyValues beyond `max_values`.
    """
    return read(decode(raw, max_values), kind)


def decode(raw: bytes, max_values: int) -> dict[str, Any]:
    """The JSON object in `raw`. Raises BadRequest, and TooManyValues beyond `max_values`."""
    _check_values(raw, max_values)
    try:
        body = msgspec.json.decode(raw)
    except RecursionError as e:
        raise _too_deep() from e
    except ValueError as e:  # not JSON, not UTF-8, a number of thousands of digits
        raise BadRequest(f"the body is not JSON: {e}") from e
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and not _is_flat(body):
        raise _too_deep()
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def read(body: dict[str, Any], kind: type[R]) -> R:
    """`body` as a request of type `kind`. Raises BadRequest, and InvalidParameter naming the field."""
    known = kind.__struct_fields__
    given = {
        name: value
        for name, value in body.items()
        if value is not None and (name in known or not _is_ignored(name, value))
    }
    try:
        return msgspec.convert(given, kind, strict=True)
    except (msgspec.ValidationError, OverflowError) as e:
        raise _bad_field(str(e), given) from e


def num_values(raw: bytes) -> int:
    """At least the values and names of the JSON in `raw`."""
    return _num_values(np.frombuffer(raw, np.uint8))


def may_have_long_number(raw: bytes) -> bool:
    """Whether `decode` may refuse JSON with `raw` in it for a long number, wherever that stands in it."""
    return _has_long_number(np.frombuffer(raw, np.uint8), MAX_DIGITS // 2)


def _check_values(raw: bytes, most: int) -> None:
    """Refuse what would hold the interpreter's lock for long, also in another thread.

    Raises TooManyValues and BadRequest. numpy counts without the lock.
    """
    if len(raw) <= SMALL_BODY:
        return
    text = np.frombuffer(raw, np.uint8)
    if _num_values(text) <= most and not _has_long_number(text):
        return
    if b"\\" in raw:  # a quote after one is part of a text
        text = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    text = text * ~np.logical_xor.accumulate(text == ord('"'))  # without what stands in texts
    if (num := _num_values(text)) > most:
        raise TooManyValues(num, most)
    if _has_long_number(text):
        raise BadRequest(f"the body has a number of more than {MAX_DIGITS} digits")


def _num_values(text: NDArray[np.uint8]) -> int:
    """At least the values and names of JSON."""
    return sum(int(np.count_nonzero(text == mark)) for mark in b",:[{")


def _has_long_number(text: NDArray[np.uint8], length: int = MAX_DIGITS) -> bool:
    """Whether digits fill a block of that length: those of twice of it always do."""
    is_digit = text - np.uint8(ord("0")) < 10
    blocks = is_digit[: len(text) // length * length].reshape(-1, length)
    return bool(blocks.all(axis=1).any())


def _is_flat(value: object) -> bool:
    """Whether `value` has at most MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[attr-defined]
            if isinstance(inner, list | dict)
        ]
        if not level:
            return True
    return False


def _too_deep() -> BadRequest:
    return BadRequest(f"the body is not JSON that is read here: more than {MAX_DEPTH} levels deep")


def _is_ignored(name: str, value: object) -> bool:
    """True for fields that change nothing. Raises InvalidParameter for all else."""
    if name in HARMLESS:
        return True
    if name not in NEUTRAL:
        raise InvalidParameter(name, value, "this server does not know the field; leave it out")
    neutral = NEUTRAL[name]
    if any(type(value) is type(other) and value == other for other in neutral):
        return True
    allowed = "".join(f", or give {other!r}" for other in neutral)
    raise InvalidParameter(name, value, f"not supported; leave it out{allowed}")


def _bad_field(message: str, given: dict[str, Any]) -> BadRequest:
    message = _QUOTED.sub(lambda name: f"`{name[1][:MAX_SHOWN]}`", message)
    found = _PATH.search(message)
    if not found or not found[1]:
        return BadRequest(message)
    value: Any = given
    for key, index in _STEP.findall(found[1]):
        value = value[key] if key else value[int(index)]
    return InvalidParameter(found[1], value, message[: found.start()])
