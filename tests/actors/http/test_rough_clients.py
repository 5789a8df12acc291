"""Responses to clients that are slow, or send much or what is odd: what they get, and what it costs."""

import json
from typing import Any
from unittest.mock import create_autospec

import msgspec
import pytest

from mallee.actors.access.quotas import UNLIMITED
from mallee.actors.config import HttpSettings
from mallee.actors.http.responses.running import Background, Run
from mallee.actors.http.responses.store import Record, ResponseStore
from mallee.actors.text.conversation import Conversation
from mallee.protocol.errors import InternalError
from mallee.protocol.ids import COMMON

RESPONSES = "/v1/responses"


@pytest.fixture
def roomy(call_with: Any, service: Any) -> Any:
    service.model = msgspec.structs.replace(service.model, max_model_len=4096)
    return call_with(HttpSettings(max_body_bytes=8 << 20))


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(part.split("\ndata: ")[1]) for part in text.split("\n\n")[:-1]]


async def test_a_reader_that_is_slow_at_the_end_gets_the_end() -> None:
    record = Record("resp_a", COMMON, {}, [], Conversation(()))
    run = create_autospec(Run, instance=True)  # it never begins
    background = Background(run, record, UNLIMITED, tenant="", streams=True)
    record.events.append(b"first")
    reading = background.follow(-1)
    assert await anext(reading) == b"first"
    record.events.append(b"last")  # while the first is written
    background.finish()
    assert [each async for each in reading] == [b"last"]


@pytest.mark.parametrize("given", [{}, {"instructions": "Be brief."}])
def test_a_system_message_beside_instructions_stays_in_later_turns(
    roomy: Any, service: Any, given: dict[str, str]
) -> None:
    system = {"role": "system", "content": "Answer in Finnish."}
    first = {"input": [system, {"role": "user", "content": "hi"}], "instructions": "Be kind."}
    made = roomy("POST", RESPONSES, first).body
    prompts = [bytes(service.job.tokens.tolist()).decode()]
    service.capsules.clear()
    then = {"input": "go on", "previous_response_id": made["id"], **given}
    assert roomy("POST", RESPONSES, then).status == 200
    prompts.append(bytes(service.job.tokens.tolist()).decode())
    assert prompts[0].startswith("<system>Be kind.\n\nAnswer in Finnish.|<user>hi|")
    assert "Answer in Finnish." in prompts[1]
    assert prompts[1].count("<system>") == 1


def test_a_response_that_fails_has_all_its_events_in_order(
    roomy: Any, service: Any, failed: Any
) -> None:
    async def broken(stream: Any) -> Any:
        async for delta in service.plain(stream):
            yield delta._replace(finish=None, capsule=None)
            break
        yield failed(0, InternalError("lost"))

    service.script = broken
    raw = roomy.raw("POST", RESPONSES, json={"input": "hi", "stream": True})
    found = events_of(raw.text)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert found[-1]["type"] == "response.failed"
    kinds = [each["type"] for each in found]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")


def test_stored_items_count_with_all_their_fields(roomy: Any) -> None:
    item = {"role": "user", "content": "hi", "note": "x" * 1_000_000}
    made = roomy("POST", RESPONSES, {"input": [item]}).body
    store = _store(roomy)
    store.check()
    assert store.nbytes > 1_000_000
    assert roomy("DELETE", f"{RESPONSES}/{made['id']}").status == 200
    assert store.nbytes == 0


def _store(call: Any) -> ResponseStore:
    route = next(r for r in call.app.routes if r.path == RESPONSES)
    store: ResponseStore = route.endpoint._handler.__self__.store
    return store


def test_items_without_an_id_are_shown_with_one(roomy: Any) -> None:
    item = {"id": None, "status": None, "role": "user", "content": "hi"}
    made = roomy("POST", RESPONSES, {"input": [item]}).body
    (shown,) = roomy("GET", f"{RESPONSES}/{made['id']}/input_items").body["data"]
    assert shown["id"].startswith("msg_")
    assert shown["status"] == "completed"


@pytest.mark.parametrize("summary", ["long", 1, [], {}])
def test_a_summary_of_no_known_kind_is_refused(roomy: Any, summary: Any) -> None:
    refused = roomy("POST", RESPONSES, {"input": "hi", "reasoning": {"summary": summary}})
    assert (refused.status, refused.body["error"]["param"]) == (400, "reasoning.summary")
    known = roomy("POST", RESPONSES, {"input": "hi", "reasoning": {"summary": "auto"}})
    assert known.body["reasoning"]["summary"] == "auto"
