"""Places of a prompt that clients name, where a model with recurrent layers leaves its state."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mallee.protocol.messages import MAX_PLACES
from mallee.protocol.model import GroupSpec, ModelSpec
from mallee.runtime.config import HttpSettings

MARK = {"cache_control": {"type": "ephemeral"}}
SYSTEM, LONG, ASKS, ANSWERS = "You help.", "A long text.", "Which one?", "That one."


def hybrid(plain: ModelSpec) -> ModelSpec:
    """The model with recurrent layers, whose answers end with the template's mark."""
    state = GroupSpec(kind="state", layers=(9,), nbytes=64)
    return msgspec.structs.replace(plain, groups=(*plain.groups, state), eos_token_ids=(ord("|"),))


@pytest.fixture
def places(service: Any, call_with: Callable[..., Any]) -> Callable[..., list[str]]:
    """The prompt up to each place that a request's job names."""
    service.model = hybrid(service.model)
    call = call_with(HttpSettings())

    def found(path: str, body: dict[str, Any]) -> list[str]:
        answer = call("POST", path, {"model": "tiny/bytes", **body})
        assert answer.status in (200, 201), answer.body
        job: Any = service.job
        command = job.command("r")
        assert command.places == job.places
        return [bytes(job.tokens[:at].tolist()).decode() for at in job.places]

    return found


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": ANSWERS},
    {"role": "user", "content": [text(LONG, **MARK), text(ASKS)]},
]
BEFORE = f"<user>Hi|<assistant>{ANSWERS}|"


def test_messages_end_and_marks_stand_where_others_may_go_on(places: Any) -> None:
    system = f"<system>{SYSTEM}|"
    first, *_ = wanted = [
        system,
        f"{system}{BEFORE}",
        f"{system}{BEFORE}<user>{LONG}",
        f"{system}{BEFORE}<user>{LONG}\n{ASKS}|",
    ]
    talk = [{"role": "system", "content": SYSTEM}, *TALK]
    assert places("/v1/chat/completions", {"messages": talk}) == wanted
    assert places("/v1/capsules", {"messages": talk}) == wanted[:-1], "the last one is its end"
    body = {"messages": TALK, "max_tokens": 5, "system": [text(SYSTEM, **MARK)]}
    assert places("/v1/messages", body) == [first[:-1], *wanted]
    begun = {**body, "messages": [*TALK, {"role": "assistant", "content": [text("No", **MARK)]}]}
    assert places("/v1/messages", begun) == [first[:-1], *wanted]
    assert places("/v1/completions", {"prompt": [*b"a|b|c|d|e"]}) == ["a|", "a|b|c|", "a|b|c|d|"]
    retained = {"directives": [{"end": 7, "priority": 9}]}
    hints = {"actions": [{"action_type": "kv.retain", "payload": retained}]}
    assert places("/v1/completions", {"prompt": [*b"a" * 20], "kv_hints": hints}) == ["a" * 7]


def test_a_mark_is_found_behind_any_other_text(places: Any) -> None:
    talk = [{"role": "user", "content": [text("\ufffc"), text(LONG, **MARK), text(ASKS)]}]
    (first, *_) = places("/v1/chat/completions", {"messages": talk})
    assert first == f"<user>\ufffc\n{LONG}"


def test_a_mark_of_null_is_none(places: Any) -> None:
    none = [text(f"{i}.", cache_control=None) for i in range(4)]
    talk = [{"role": "user", "content": [text(LONG, **MARK), *none]}]
    for path in ("/v1/messages", "/v1/chat/completions"):
        (first, *rest) = places(path, {"messages": talk, "max_tokens": 5})
        assert first == f"<user>{LONG}"
        assert len(rest) == 1, "the end of the message"


def test_no_request_names_many(places: Any) -> None:
    talk = [{"role": "user", "content": [text(f"{i}.", **MARK) for i in range(40)]}]
    (first, *rest) = places("/v1/chat/completions", {"messages": talk})
    assert first.endswith("\n36.")
    assert len(rest) == 4 < MAX_PLACES


def test_models_without_states_get_none(service: Any, call_with: Any) -> None:
    call = call_with(HttpSettings())
    assert call("POST", "/v1/chat/completions", {"messages": TALK}).status == 200
    job: Any = service.job
    assert job.places == ()
