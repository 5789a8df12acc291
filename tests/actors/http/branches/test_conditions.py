"""Conditions by which branches end: expressions against a search of the whole text, and over HTTP."""

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.actors.http.branches.conditions import BranchConditions, Conditions, read_conditions
from mallee.actors.http.callbacks.callbacks import AllowedUrls
from mallee.actors.http.schemas import LogprobFields, StopWhenFields
from mallee.protocol.errors import InvalidParameter
from mallee.testing.random_model import random_model
from support.tiny_fleet import post, tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
ASKED = {"prompt": "A tree of many trunks", "ignore_eos": True, "seed": 3, "temperature": 1.0}
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
        (StopWhenFields(regex=""), "regex"),
        (StopWhenFields(regex="a" * 600), "600 characters"),
        (StopWhenFields(regex="a)|(b"), "regex"),
        (StopWhenFields(regex="(?=a)b"), "regex"),
        (StopWhenFields(regex="^a"), "regex"),
        (StopWhenFields(regex="a*"), "empty text"),
        (StopWhenFields(done=3), "1 to 2"),
        (StopWhenFields(done=0), "1 to 2"),
        (StopWhenFields(logprob=LogprobFields(below=0.5)), "below"),
        (StopWhenFields(logprob=LogprobFields(below=-1, tokens=0)), "tokens"),
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
