"""Caching over HTTP: how prompts were served, where those of one cache key meet, wishes for retention."""

from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from mallee.api.terms import read_retention
from mallee.gateway.access.keys import NewKey, new_key
from mallee.protocol.api.generate import ChatRequest, CompletionRequest
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.messages import END_OF_TEXT
from support.mock_scene import make_folder, mock_config
from support.mock_stack import mock_stack

ACME, EVIL = new_key("acme", "client", None), new_key("evil", "client", None)
ROOT = new_key("root", "operator", None)
TEXT = "many trunks from one root, which sprout again after fire and after frost " * 4


async def test_answers_say_how_their_prompts_were_served(tmp_path: Path) -> None:
    """X18, F9, part: also the first token that differs, other salts, and prompts that were never seen."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [key.entry for key in (ACME, EVIL, ROOT)]}))
    config = mock_config(
        make_folder(tmp_path), mock__engines_per_worker=1, http__keys_file=str(keys)
    )
    async with (
        mock_stack(config) as stack,
        httpx.AsyncClient(base_url=stack.base_url, timeout=20) as client,
    ):

        async def ask(key: NewKey, method: str, path: str, body: Any = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {key.token}"}
            return await client.request(method, path, json=body, headers=headers)

        async def served(prompt: str, key: NewKey = ACME, **more: Any) -> dict[str, Any]:
            body = {"prompt": prompt, "max_tokens": 2, "mallee": {"diagnostics": True}, **more}
            answer = await ask(key, "POST", "/v1/completions", body)
            found: dict[str, Any] = answer.json()["choices"][0]["mallee"]["cache"]
            return found | {"id": answer.json()["id"]}

        first = await served(TEXT)
        assert (first["served"], first["status"], first["reason"]) == (
            *("rebuild", "cache_miss"),
            "never_seen",
        )
        again = await served(TEXT)
        assert (again["served"], again["status"], again["reason"]) == ("exact", "cache_hit", None)
        assert again["comparison_response_id"] == first["id"]
        assert (await served(TEXT + " and more"))["served"] == "append"
        left = await served(TEXT[:150] + " x" * 60)
        assert (left["served"], left["reason"]) == ("fork", "input_changed")
        assert 16 < left["first_difference"]["token"] < 150
        salted = await served(TEXT, cache_salt="ann")
        assert (salted["served"], salted["reason"]) == ("rebuild", "prompt_cache_key_changed")
        # Of another tenant nothing is told, whatever salt it gives.
        for more in ({}, {"cache_salt": "ann"}):
            stranger = await served(TEXT, EVIL, **more)
            if not more:
                assert stranger["reason"] == "never_seen"
                assert "comparison_response_id" not in stranger
            else:
                assert stranger.get("comparison_response_id", "").startswith("req_")
        plain = {"prompt": TEXT, "max_tokens": 2}
        answer = await ask(ACME, "POST", "/v1/completions", plain)
        assert "cache" not in answer.json()["choices"][0]["mallee"]
        capsule = (await ask(ACME, "POST", "/v1/capsules", {"prompt": TEXT})).json()["id"]
        body = {"n": 3, "max_tokens": 2, "mallee": {"diagnostics": True}}
        fork = (await ask(ACME, "POST", f"/v1/capsules/{capsule}/fork", body)).json()
        assert fork["choices"][0]["mallee"]["cache"]["served"] == "fork"
        assert "cache" not in fork["choices"][1]["mallee"]
        told = await ask(ROOT, "GET", f"/v1/router/explain?request={first['id']}")
        assert told.json()["life"]["cache"]["reason"] == "never_seen"
        metrics = (await ask(ROOT, "GET", "/metrics")).text
        line = 'mallee_prompts_served_total{gateway="g0",reason="never_seen",served="rebuild"} 2.0'
        assert line in metrics


WORKERS = 6
KEYS = [f"agent-{i}" for i in range(8)]


async def worker_of(client: httpx.AsyncClient, prompt: str, key: str | None, **more: object) -> str:
    body = {"prompt": prompt, "max_tokens": 2, "prompt_cache_key": key, **more}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (worker,) = {choice["mallee"]["worker"] for choice in answer.json()["choices"]}
    return str(worker)


async def test_prompts_of_one_key_meet_at_one_worker_and_no_tenant_moves_anothers(
    tmp_path: Path,
) -> None:
    """F7, part, F31, part: of OpenAI's `prompt_cache_key`, for prompts without a common block.

    The homes of a tenant's keys are its own. Each prompt is longer than the one before it, whose load its
    worker may still tell of.
    """
    ann, eve = (new_key(name, "operator", name) for name in ("ann", "eve"))
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [ann.entry, eve.entry]}))
    settings = {"mock__engines_per_worker": WORKERS, "http__keys_file": str(file)}
    config = mock_config(make_folder(tmp_path), **settings)
    async with mock_stack(config) as stack:
        clients = [
            httpx.AsyncClient(
                base_url=stack.base_url, headers={"authorization": f"Bearer {key.token}"}
            )
            for key in (ann, eve)
        ]
        try:
            texts = (f"{n} of many trunks " * (10 + n) for n in count())

            async def homes(of: int, keys: list[str], **more: object) -> list[str]:
                return [await worker_of(clients[of], next(texts), key, **more) for key in keys]

            first = await homes(0, KEYS)
            assert len(set(first)) > 1
            scattered = {await worker_of(clients[0], next(texts), None) for _ in KEYS}
            assert len(scattered) > 2, "without a key they take turns"
            others = await homes(1, KEYS)
            assert others != first, "the same names of another tenant are other keys"
            assert await homes(0, KEYS * 2) == first * 2
            assert await homes(1, KEYS) == others
            assert await homes(0, KEYS, n=2) == first
            assert await homes(0, KEYS, cache_salt="s") != first
            kept = await clients[0].post(
                "/v1/capsules", json={"prompt": next(texts), "prompt_cache_key": KEYS[3]}
            )
            assert kept.json()["worker"] == first[3]
        finally:
            for client in clients:
                await client.aclose()


def hints(*directives: Any) -> dict[str, Any]:
    action = {"action_type": "kv.retain", "payload": {"directives": list(directives)}}
    return {"protocol_version": "0.1", "actions": [{"action_type": "kv.fetch"}, action]}


def spans(max_ttl_s: float | None = 600.0, **fields: Any) -> list[tuple[int, int, float]]:
    found = read_retention(CompletionRequest(**fields), 100, max_ttl_s)
    return [(each.end, each.priority, each.duration_s) for each in found]


def test_ranges_become_spans_in_order() -> None:
    """F8, part: wishes in the words of engines; OpenAI's and Anthropic's follow."""
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
