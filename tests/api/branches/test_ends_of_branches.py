"""By what branches end: budgets, at one gateway and at two, and conditions, against searches of the text."""

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.doubles.random_model import random_model
from mallee.api.branches.conditions import BranchConditions, Conditions, read_conditions
from mallee.api.callbacks.callbacks import AllowedUrls
from mallee.api.text.chat import ChatTemplate
from mallee.protocol.api.shared import StopWhenFields
from mallee.protocol.errors import InvalidParameter
from support.tiny_fleet import post, tiny_api, two_gateways
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
CHAT = ChatTemplate("{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}")
ASKED = {"prompt": "A tree of many trunks", "ignore_eos": True, "seed": 3, "temperature": 1.0}


def _ends(answer: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(c["finish_reason"], c["mallee"].get("ended_by")) for c in answer["choices"]]


async def test_branches_end_at_their_budget_with_the_text_of_an_undisturbed_run() -> None:
    """X19, part: exactly as many tokens, each branch a prefix; KV is free, and forks share what is left."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        alone = await post(client, "/v1/completions", **ASKED, n=3, max_tokens=300)
        engine = next(iter(fleet.engines.values()))
        body = {**ASKED, "n": 3, "max_tokens": 300, "mallee": {"budget": {"tokens": 100}}}
        answer = await post(client, "/v1/completions", **body)
        assert answer["usage"]["completion_tokens"] == 100
        assert _ends(answer) == [("budget", "tokens")] * 3
        for cut, whole in zip(answer["choices"], alone["choices"], strict=True):
            assert 0 < len(cut["text"]) < 300
            assert whole["text"].startswith(cut["text"])
        await until(lambda: not engine.branches)
        capsule = answer["choices"][0]["mallee"]["capsule"]
        spent = await client.post(f"/v1/capsules/{capsule}/fork", json={"n": 1})
        assert (spent.status_code, spent.json()["error"]["code"]) == (409, "budget_spent")


async def test_forks_of_its_capsules_spend_what_a_request_left() -> None:
    """X19, part: also of a fork's, and of a rewound one; the next branch is one too many."""
    async with tiny_api(MODEL, 1) as (client, _):
        budget = {"budget": {"tokens": 50, "branches": 4}}
        first = await post(client, "/v1/completions", **ASKED, max_tokens=10, mallee=budget)
        capsule = first["choices"][0]["mallee"]["capsule"]
        back = await post(client, f"/v1/capsules/{capsule}/rewind", to=12)
        more = {"ignore_eos": True, "max_tokens": 20}
        own = {"budget": {"tokens": 15}}
        second = await post(client, f"/v1/capsules/{back['id']}/fork", n=1, **more, mallee=own)
        assert second["usage"]["completion_tokens"] == 15
        assert _ends(second) == [("budget", "tokens")]
        leaf = second["choices"][0]["mallee"]["capsule"]
        whole = {"ignore_eos": True, "max_tokens": 200, "n": 2}
        third = await client.post(f"/v1/capsules/{capsule}/fork", json=whole)
        assert third.json()["usage"]["completion_tokens"] == 25
        for again in (leaf, capsule):
            answer = await client.post(f"/v1/capsules/{again}/fork", json={"n": 1})
            assert answer.json()["error"]["code"] == "budget_spent"


async def test_branches_end_when_their_time_is_over() -> None:
    """X19, part: `wall_s`, while tokens come and while none does."""
    async with tiny_api(MODEL, 1) as (client, _):
        body = {**ASKED, "n": 2, "max_tokens": 1900, "mallee": {"budget": {"wall_s": 0.2}}}
        answer = await asyncio.wait_for(post(client, "/v1/completions", **body), 20)
        assert _ends(answer) == [("budget", "wall_s")] * 2
        assert answer["usage"]["completion_tokens"] < 3800


async def test_a_budget_that_cannot_be_is_refused_by_name() -> None:
    """X19, part: so is one of a request that draws nothing."""
    cases: list[tuple[Any, str]] = [
        ({}, "mallee.budget"),
        ({"tokens": 0}, "mallee.budget.tokens"),
        ({"branches": -1}, "mallee.budget.branches"),
        ({"wall_s": 0}, "mallee.budget.wall_s"),
        ({"wall_s": 1e9}, "mallee.budget.wall_s"),
        ({"token": 5}, "mallee.budget"),
        ({"branches": 1}, "budget"),
    ]
    async with tiny_api(MODEL, 1) as (client, _):
        for budget, named in cases:
            asked = {**ASKED, "n": 2, "mallee": {"budget": budget}}
            answer = await client.post("/v1/completions", json=asked)
            assert answer.status_code in (400, 409)
            assert named in answer.text
        prefill = {"prompt": "x", "mallee": {"budget": {"tokens": 5}}}
        none = await client.post("/v1/capsules", json=prefill)
        assert (none.status_code, none.json()["error"]["param"]) == (400, "mallee.budget")


async def test_responses_have_budgets_and_conditions() -> None:
    """X19, part, F19, part: a response, the turns that fork it, and a stream, with the text of a free run."""
    async with tiny_api(MODEL, 1, settings={"chat": CHAT}) as (client, fleet):
        asked = {"input": "A tree", "ignore_eos": True, "seed": 3, "max_output_tokens": 60}
        free = await post(client, "/v1/responses", **asked)
        text = free["output"][0]["content"][0]["text"]
        bounded = {**asked, "mallee": {"budget": {"tokens": 25}}, "stream": True}
        async with client.stream("POST", "/v1/responses", json=bounded) as response:
            lines = [line async for line in response.aiter_lines()]
        last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
        first = last["response"]
        assert last["type"] == "response.incomplete"
        assert first["output"][0]["content"][0]["text"] == text[:25]
        assert first["mallee"]["ended_by"] == "tokens"
        again = {**asked, "previous_response_id": first["id"]}
        spent = await client.post("/v1/responses", json=again)
        assert (spent.status_code, spent.json()["error"]["code"]) == (409, "budget_spent")
        met = {"stop_when": {"regex": re.escape(text[10:13])}}
        ended = await post(client, "/v1/responses", **asked, mallee=met)
        assert ended["status"] == "completed"
        assert ended["mallee"]["ended_by"] == "regex"
        said = ended["output"][0]["content"][0]["text"]
        assert said == text[: text.index(text[10:13]) + 3]
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)


async def test_a_response_is_below_the_one_that_it_names_wherever_it_is_sent() -> None:
    """X19, part: by its name alone, also where its capsule is gone; and a fork is by its capsule's."""
    async with two_gateways(MODEL, chat=CHAT) as s:
        asked = {"input": "A tree", "ignore_eos": True, "seed": 3, "max_output_tokens": 20}
        first = await post(s.a, "/v1/responses", **asked, mallee={"budget": {"tokens": 30}})
        capsule = first["mallee"]["capsule"]
        forked = await post(s.b, f"/v1/capsules/{capsule}/fork", n=1, max_tokens=4, ignore_eos=True)
        assert forked["usage"]["completion_tokens"] == 4
        await s.a.delete(f"/v1/capsules/{capsule}")
        again = {**asked, "previous_response_id": first["id"]}
        second = await post(s.b, "/v1/responses", **again)
        assert second["mallee"]["ended_by"] == "tokens"
        assert second["usage"]["output_tokens"] == 10 - 4
        third = await s.a.post(
            "/v1/responses", json={**asked, "previous_response_id": second["id"]}
        )
        assert (third.status_code, third.json()["error"]["code"]) == (409, "budget_spent")


# Conditions by which branches end

NO_URLS = AllowedUrls(())
PATTERNS = ["ab", "a+b", "(a|b){3}c", "[^c]{4}", "a.c", "(ab|ba)*cc", "c{2,3}a", "é", r"b\w"]


@settings(max_examples=150, deadline=None)
@given(
    pattern=st.sampled_from(PATTERNS),
    text=st.text("abcé", max_size=40),
    sizes=st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
def test_a_branch_ends_with_the_token_that_completes_the_first_match(
    pattern: str, text: str, sizes: list[int]
) -> None:
    """F19, part: wherever tokens cut the bytes, also inside a character."""
    conditions = read_conditions(StopWhenFields(regex=pattern), 1, NO_URLS)
    assert conditions is not None
    branch, raw, found, at = BranchConditions(conditions), text.encode(), None, 0
    for size in sizes:
        at, token = min(at + size, len(raw)), raw[at : at + size]
        if branch.take(token, None) == "regex":
            found = at
            break
    prefixes = (text[:i] for i in range(len(text) + 1))
    first = next((len(p.encode()) for p in prefixes if re.search(pattern, p)), None)
    if first is None:
        assert found is None
    else:
        ends, end = [], 0
        for size in sizes:
            end = min(end + size, len(raw))
            ends.append(end)
        assert found == next(e for e in ends if e >= first)


@given(
    values=st.lists(st.floats(-20, 0) | st.just(float("-inf")), max_size=60),
    below=st.floats(-10, 0),
    window=st.integers(1, 8),
)
def test_confidence_is_the_mean_of_a_window(values: list[float], below: float, window: int) -> None:
    """F19, part: against the definition, token by token."""
    branch = BranchConditions(Conditions(below=below, window=window))
    for i, value in enumerate(values):
        last = values[max(0, i + 1 - window) : i + 1]
        wanted = len(last) == window and sum(last) / window < below
        assert (branch.take(b"", value) == "logprob") == wanted


@pytest.mark.parametrize(
    "regex", [r"[ab]*a[ab]{400}c", r"(.{1000}){1000}", r"(a|b|ab){1,500}c", r"(a*)*(a*)*(a*)*c"]
)
def test_no_expression_takes_long_or_much(regex: str) -> None:
    """F30, part: it is followed, or refused by name once it needs too much; a byte is cheap either way."""
    conditions = read_conditions(StopWhenFields(regex=regex), 1, NO_URLS)
    assert conditions is not None
    branch, refused = BranchConditions(conditions), ""
    for i in range(20_000):
        try:
            assert branch.take(b"ab"[i * i % 3 % 2 :][:1], None) == ""
        except InvalidParameter as error:
            refused = error.message
            break
    assert not refused or "mallee.stop_when.regex" in refused


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (StopWhenFields(), "stop_when"),
        (StopWhenFields(regex="a)|(b"), "regex"),
        (StopWhenFields(regex="(?=a)b"), "regex"),
        (StopWhenFields(regex="^a"), "regex"),
        (StopWhenFields(regex="a*"), "empty text"),
        (StopWhenFields(done=3), "1 to 2"),
    ],
)
def test_conditions_that_cannot_be_are_refused_by_name(fields: Any, named: str) -> None:
    """F30, part: before anything runs."""
    with pytest.raises(InvalidParameter, match=re.escape(named)):
        read_conditions(fields, 2, NO_URLS)


async def test_a_match_ends_its_branch_alone_with_a_capsule_of_what_was_seen() -> None:
    """F19, part, F28, part: the next tokens of a branch that was ended are those of the undisturbed run."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        alone = await post(client, "/v1/completions", **ASKED, n=3, max_tokens=120)
        texts = [choice["text"] for choice in alone["choices"]]
        wanted = texts[1][30:32]
        stop_when = {"regex": re.escape(wanted)}
        body = {**ASKED, "n": 3, "max_tokens": 120, "mallee": {"stop_when": stop_when}}
        answer = await post(client, "/v1/completions", **body)
        for text, choice in zip(texts, answer["choices"], strict=True):
            at = text.find(wanted)
            if at < 0:
                assert (choice["text"], choice["finish_reason"]) == (text, "length")
                continue
            assert choice["text"] == text[: at + len(wanted)]
            assert choice["finish_reason"] == "condition"
            assert choice["mallee"]["ended_by"] == "regex"
            left = choice["mallee"]["capsule"]
            more = await post(client, f"/v1/capsules/{left}/restore", max_tokens=5)
            assert more["choices"][0]["text"] == text[at + len(wanted) :][:5]
        assert answer["choices"][1]["finish_reason"] == "condition"
        engine = next(iter(fleet.engines.values()))
        await until(lambda: not engine.branches)


async def test_the_rest_ends_when_enough_are_done() -> None:
    """F19, part, F20, part: k of n; the others' KV is free and their texts are prefixes."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        alone = await post(client, "/v1/completions", **ASKED, n=4, max_tokens=400)
        texts = [choice["text"] for choice in alone["choices"]]
        early = {texts[0][20:23], texts[2][25:28]}
        stop_when = {"done": 2}
        stops = {"stop": sorted(early), "mallee": {"stop_when": stop_when}}
        body = {**ASKED, **stops, "n": 4, "max_tokens": 400}
        answer = await asyncio.wait_for(post(client, "/v1/completions", **body), 60)
        ends = [choice["finish_reason"] for choice in answer["choices"]]
        assert ends.count("stop") == 2
        assert ends.count("condition") == 2
        engine = next(iter(fleet.engines.values()))
        await until(lambda: not engine.branches)
        for text, choice in zip(texts, answer["choices"], strict=True):
            assert text.startswith(choice["text"])
            if choice["finish_reason"] == "condition":
                assert choice["mallee"]["ended_by"] == "done"


async def test_a_branch_that_loses_confidence_ends() -> None:
    """F19, part: at the token where the log-probabilities that a client sees say so."""
    async with tiny_api(MODEL, 1) as (client, _):
        whole = await post(client, "/v1/completions", **ASKED, n=2, max_tokens=80, logprobs=0)
        stop_when = {"logprob": {"below": -4.4, "tokens": 4}}
        more = {"max_tokens": 80, "mallee": {"stop_when": stop_when}}
        answer = await post(client, "/v1/completions", **ASKED, n=2, **more)
        for before, choice in zip(whole["choices"], answer["choices"], strict=True):
            values = before["logprobs"]["token_logprobs"]
            ends = (i for i in range(4, len(values) + 1) if sum(values[i - 4 : i]) / 4 < -4.4)
            at = next(ends, None)
            assert choice["logprobs"] is None
            assert choice["text"] == before["text"][:at]
            assert choice["finish_reason"] == ("length" if at is None else "condition")
        assert "condition" in {choice["finish_reason"] for choice in answer["choices"]}
