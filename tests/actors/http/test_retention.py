"""F8, part: wishes for retention in the words of engines, OpenAI and Anthropic, and the replies."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from mallee.actors.http.schemas import ChatRequest, CompletionRequest
from mallee.actors.http.terms import read_retention
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.messages import END_OF_TEXT
from support.mock_scene import make_folder, mock_config
from support.mock_stack import mock_stack

TEXT = "many trunks from one root, which sprout again after fire and after frost " * 4


def hints(*directives: Any) -> dict[str, Any]:
    action = {"action_type": "kv.retain", "payload": {"directives": list(directives)}}
    return {"protocol_version": "0.1", "actions": [{"action_type": "kv.fetch"}, action]}


def spans(max_ttl_s: float | None = 600.0, **fields: Any) -> list[tuple[int, int, float]]:
    found = read_retention(CompletionRequest(**fields), 100, max_ttl_s)
    return [(each.end, each.priority, each.duration_s) for each in found]


def test_ranges_become_spans_in_order() -> None:
    first = {"start": 0, "end": 40, "priority": 80, "duration": 60}
    assert spans(kv_hints=hints(first)) == [(40, 80, 60.0)]
    rest = {"start": 40, "priority": 20}
    assert spans(kv_hints=hints(first, rest)) == [(40, 80, 60.0), (100, 20, 600.0)]
    output = {"covers_output": True, "priority": 20, "duration": 5}
    assert spans(kv_hints=hints(output)) == [(END_OF_TEXT, 20, 5.0)]
    both = spans(kv_hints=hints(first, rest, output))
    assert both == [(40, 80, 60.0), (100, 20, 600.0), (END_OF_TEXT, 20, 5.0)]
    assert spans(kv_hints={"actions": [{"action_type": "vllm.set_priority"}]}) == []


@pytest.mark.parametrize(
    "directives",
    [
        [{"start": 10, "end": 40, "priority": 80}],  # the prefix of a retained block is needed
        [{"end": 40, "priority": 20}, {"start": 40, "end": 50, "priority": 30}],
        [{"end": 40, "priority": 101}],
        [{"end": 40, "priority": True}],
        [{"end": 40, "priority": 2, "duration": 601}],
        [{"end": 40, "priority": 2, "duration": float("nan")}],
        [{"start": 5, "end": 4, "priority": 0}],
        [{"end": 40, "priority": 2}, {"start": 30, "priority": 1}],
        [{"end": 40, "priority": 2}, {"covers_output": True, "priority": 2}],
        ["all"],
        [],
        [{"end": 1, "priority": 0}] * 17,
    ],
)
def test_bad_directives_are_refused_by_name(directives: list[Any]) -> None:
    with pytest.raises(InvalidParameter) as error:
        spans(kv_hints=hints(*directives))
    assert str(error.value.fields["param"]).startswith("kv_hints.actions[1].payload")


def test_times_of_openai_and_anthropic_cover_the_prompt() -> None:
    assert spans(prompt_cache_options={"mode": "implicit", "ttl": "5m"}) == [(100, 50, 300.0)]
    assert spans(prompt_cache_options={"ttl": "30m"}) == [(100, 50, 600.0)], "as long as may be"
    assert spans(prompt_cache_options={"mode": "explicit", "ttl": "5m"}) == []
    assert spans(cache_control={"type": "ephemeral"}) == [(100, 50, 300.0)]
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    chat = ChatRequest(messages=[{"role": "user", "content": [part]}])
    assert [each.duration_s for each in read_retention(chat, 9, None)] == [3600.0]
    whole = {"role": "user", "content": "a", "cache_control": {"type": "ephemeral", "ttl": "2h"}}
    chat = ChatRequest(messages=[{"role": "user", "content": [part]}, whole])
    assert [each.duration_s for each in read_retention(chat, 9, None)] == [7200.0]
    for wrong in (
        {"prompt_cache_options": {"mode": "fast"}},
        {"prompt_cache_options": {"ttl": "soon"}},
        {"cache_control": {"type": "for ever"}},
        {"kv_hints": [1]},
    ):
        with pytest.raises(InvalidParameter):
            spans(**wrong)


async def test_answers_tell_what_was_retained_and_refusals_are_counted(tmp_path: Path) -> None:
    """X17: applied, clipped or refused, in each answer."""
    config = mock_config(make_folder(tmp_path), mock__engines_per_worker=1, engine__kv_tokens=512)
    async with (
        mock_stack(config) as stack,
        httpx.AsyncClient(base_url=stack.base_url, timeout=20) as client,
    ):

        async def ask(prompt: str, **more: Any) -> dict[str, Any]:
            body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **more}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()["choices"][0]["mallee"]
            return found

        wish = hints({"priority": 90, "duration": 60})
        told = (await ask(TEXT[:100], kv_hints=wish))["retain"]
        assert told["outcome"] == "applied"
        assert told["bytes"] == told["asked_bytes"] > 0
        outcomes = {told["outcome"]}
        for i in range(12):
            outcomes.add((await ask(f"{i} {TEXT}"[:200], kv_hints=wish))["retain"]["outcome"])
        assert outcomes == {"applied", "clipped", "refused"}
        assert "retain" not in await ask("x" * 150)
        metrics = (await client.get("/metrics")).text
        assert 'mallee_retentions_total{gateway="g0",outcome="refused"}' in metrics
        assert (await ask(TEXT[:100]))["cached_tokens"] > 0, "the first one is still there"
