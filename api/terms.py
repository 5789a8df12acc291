"""The tenant of a request, its place in the queue when every worker is busy, its share of a worker and cache.

The tenant is the caller's. Where no keys are set and no proxy names one, clients name themselves, for their
share alone: state belongs to the caller's tenant and the cache salt (`protocol.scopes`).
"""

import re
from typing import Any, Final, TypeGuard

import xxhash
from starlette.requests import Request

from mallee.api.entry.middleware import HEADERS
from mallee.api.sessions.names import NO_SESSION, SESSION_HEADERS, read_session
from mallee.gateway.access.access import Caller
from mallee.protocol.api.shared import MAX_PRIORITY, MAX_TENANT, AnyRequest
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.ids import Scope
from mallee.protocol.messages import END_OF_TEXT, RetainSpan
from mallee.router.dispatch.jobs import QueueTerms

MAX_DIRECTIVES: Final = 16
MAX_RETAIN_S: Final = 86_400.0  # where capsules may live for ever
IMPLICIT_PRIORITY: Final = 50  # of a prompt whose request names a time and no priority

_PLAIN: Final = AnyRequest().mallee  # of all requests without that object
_TTL: Final = re.compile(r"([0-9]{1,6})([smh])", re.ASCII)
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600}


def read_terms(request: AnyRequest, caller: Caller, asked: Request) -> QueueTerms:
    """The terms of the body that was `asked`. Raises InvalidParameter."""
    tenant = caller.tenant or request.cache_salt or request.safety_identifier or request.user
    own, names = request.mallee, NO_SESSION
    is_plain = own is _PLAIN and not request.session_id
    if not is_plain or not SESSION_HEADERS.isdisjoint(asked.scope[HEADERS]):
        names = read_session(request, asked.headers)
    if own.record and not names.session:
        raise InvalidParameter("mallee.record", True, "name the session, as mallee.session")
    return QueueTerms(
        tenant=tenant[:MAX_TENANT],
        priority=_priority(request),
        deadline_s=own.deadline_s,
        session=names.session,
        weight=own.weight,
        tenant_weight=1.0 if caller.weight is None else caller.weight,
        owner="" if caller.weight is None else caller.tenant,
        is_recorded=own.record,
        parent_session=names.parent,
        ends_session=names.is_final,
    )


def read_affinity(request: AnyRequest, scope: Scope) -> int:
    """A digest of the request's prompt cache key, which is its scope's own; 0 without one."""
    key = request.prompt_cache_key
    return xxhash.xxh3_64_intdigest(f"{scope}\0{key}".encode()) or 1 if key else 0


def _priority(request: AnyRequest) -> int:
    if (given := request.mallee.priority) is not None:
        return given
    # The rest of `nvext` changes nothing here.
    hints = request.nvext.get("agent_hints") if isinstance(request.nvext, dict) else None
    value = hints.get("priority") if isinstance(hints, dict) else None
    if value is None:
        return 0
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_PRIORITY:
        return value
    remedy = f"give a whole number, {-MAX_PRIORITY} to {MAX_PRIORITY}"
    raise InvalidParameter("nvext.agent_hints.priority", value, remedy)


# Retention of a prompt's KV beyond that of others. The first of `kv_hints`, `prompt_cache_options` and
# `cache_control` that asks for some counts.


def read_retention(
    request: AnyRequest, prompt_tokens: int, max_ttl_s: float | None
) -> tuple[RetainSpan, ...]:
    """The spans of a prompt, and of its answers, that are to be retained. Raises InvalidParameter."""
    max_s = MAX_RETAIN_S if max_ttl_s is None else max_ttl_s
    if request.kv_hints is not None:
        spans = _hinted(request.kv_hints, prompt_tokens, max_s)
        if spans:
            return spans
    options = request.prompt_cache_options
    ttl_s = None if options is None else _options_ttl_s(options)
    ttl_s = _control_ttl_s(request, "cache_control") if ttl_s is None else ttl_s
    if ttl_s is None:
        return ()
    return (RetainSpan(prompt_tokens, IMPLICIT_PRIORITY, min(ttl_s, max_s)),)


def _hinted(hints: Any, prompt_tokens: int, max_s: float) -> tuple[RetainSpan, ...]:
    """The directives of all `kv.retain` actions; others change nothing here."""
    actions = hints.get("actions", []) if isinstance(hints, dict) else None
    if not isinstance(actions, list) or not all(isinstance(each, dict) for each in actions):
        raise InvalidParameter("kv_hints", hints, 'give {"actions": [{"action_type", "payload"}]}')
    spans: list[RetainSpan] = []
    for i, action in enumerate(actions):
        if action.get("action_type") != "kv.retain":
            continue
        param, payload = f"kv_hints.actions[{i}].payload", action.get("payload")
        directives = payload.get("directives") if isinstance(payload, dict) else None
        if not isinstance(directives, list) or not 1 <= len(directives) <= MAX_DIRECTIVES:
            raise InvalidParameter(param, payload, f"give 1 to {MAX_DIRECTIVES} directives")
        for j, each in enumerate(directives):
            if len(spans) > MAX_DIRECTIVES:
                raise InvalidParameter(param, payload, f"give {MAX_DIRECTIVES} directives in all")
            spans += _directive(each, f"{param}.directives[{j}]", spans, prompt_tokens, max_s)
    return tuple(spans)


def _directive(
    given: Any, param: str, before: list[RetainSpan], prompt_tokens: int, max_s: float
) -> list[RetainSpan]:
    """The span of one directive, after one without retention where it leaves tokens out."""
    if not isinstance(given, dict):
        raise InvalidParameter(param, given, "give an object with priority and duration")
    at = before[-1].end if before else 0
    start, end = given.get("start", at), given.get("end")
    end = prompt_tokens if end is None else end
    if given.get("covers_output"):
        start, end = at if not before else max(at, prompt_tokens), END_OF_TEXT
    if not (_is_count(start) and _is_count(end) and at <= start <= end):
        raise InvalidParameter(param, given, f"give start from {at} on and end after it")
    priority, duration_s = given.get("priority", IMPLICIT_PRIORITY), given.get("duration", max_s)
    allowed = 0 if start > at else before[-1].priority if before else 100
    if not _is_count(priority) or priority > allowed:
        raise InvalidParameter(
            param, given, f"give a priority from 0 to {allowed}: they don't rise along the tokens"
        )
    is_number = isinstance(duration_s, int | float) and not isinstance(duration_s, bool)
    if not is_number or not 0 <= duration_s <= max_s:
        raise InvalidParameter(param, given, f"give a duration of 0 to {max_s:g} seconds")
    left_out = [RetainSpan(start, 0, 0.0)] if start > at else []
    return [*left_out, RetainSpan(end, priority, float(duration_s))]


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= END_OF_TEXT


def _options_ttl_s(options: Any) -> float | None:
    if not isinstance(options, dict) or options.get("mode", "implicit") not in (
        "implicit",
        "explicit",
    ):
        raise InvalidParameter("prompt_cache_options", options, "give a mode, implicit or explicit")
    if options.get("mode") == "explicit" or options.get("ttl") is None:
        return None
    return read_ttl_s(options["ttl"], "prompt_cache_options.ttl")


def _control_ttl_s(request: AnyRequest, param: str) -> float | None:
    """The longest time of all marks, as `ttl` of the whole prompt: a mark ends a prefix that is inside it."""
    marks = [request.cache_control] if request.cache_control is not None else []
    messages = getattr(request, "messages", None)
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            continue
        if mark := message.get("cache_control"):
            marks.append(mark)
        if isinstance(content := message.get("content"), list):
            parts = (part for part in content if isinstance(part, dict))
            marks += [part["cache_control"] for part in parts if part.get("cache_control")]
    if not marks:
        return None
    if not all(isinstance(mark, dict) and mark.get("type") == "ephemeral" for mark in marks):
        raise InvalidParameter(param, marks, 'give {"type": "ephemeral", "ttl": "5m" or "1h"}')
    return max(read_ttl_s(mark.get("ttl", "5m"), f"{param}.ttl") for mark in marks)


def read_ttl_s(text: Any, param: str) -> float:
    found = _TTL.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise InvalidParameter(param, text, "give a number and s, m or h, such as 30m")
    return float(int(found[1]) * _UNIT_S[found[2]])
