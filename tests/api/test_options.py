"""Sampling options, log-probabilities and the form of answers, as clients write and read them."""

import json
from typing import Any

import pytest

from mallee.protocol.errors import GrammarFailed, InvalidParameter
from mallee.protocol.messages import Grammar
from support.plain_ids import SCOPES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FORK = "/v1/capsules/req_x.0/fork"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
BODIES = {COMPLETIONS: {"prompt": [1, 2, 299]}, CHAT: {"messages": MESSAGES}, FORK: {"n": 1}}


@pytest.mark.parametrize("path", BODIES)
def test_sampling_options_reach_the_job(call: Any, path: str) -> None:
    """I17, I5: every kind of generation takes every option."""
    body = {
        **BODIES[path],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": -1,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "cache_salt": "tenant",
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -100, "8": 2.5},
        "min_tokens": 2,
        "max_tokens": 9,
    }
    assert call("POST", path, body).status == 200
    sampling, limits = call.service.job.sampling, call.service.job.limits
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert sampling.seed == (1 << 64) - 1
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 0.5)
    assert sampling.logit_bias == ((7, -100.0), (8, 2.5))
    assert sampling.logprobs == -1
    assert (limits.min_tokens, limits.max_tokens) == (2, 9)
    assert (limits.stop_token_ids, limits.ignore_eos) == ((5,), True)
    assert call.service.job.scope == SCOPES.scope("", "tenant")


@pytest.mark.parametrize("path", BODIES)
def test_without_options_nothing_is_asked_for(call: Any, path: str) -> None:
    """I17: the defaults are OpenAI's, and a seed is drawn."""
    for seed in (1000, 1001):
        answer = call("POST", path, {**BODIES[path], "seed": None, "logprobs": None})
        job, sampling = call.service.job, call.service.job.sampling
        assert (sampling.temperature, sampling.seed) == (1.0, seed)
    assert (path == CHAT) == (job.limits.max_tokens != 16)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.logit_bias) == (0.0, 1.0, ())
    assert (sampling.logprobs, job.grammar, job.limits.min_tokens) == (-1, None, 0)
    assert answer.body["choices"][0]["logprobs"] is None


SAID = [
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        Grammar("json_schema", json.dumps(SCHEMA)),
    ),
    ({"response_format": {"type": "text"}}, None),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "é"]}}, Grammar("choice", json.dumps(["a", "é"]))),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, Grammar("lark", 'start: "x"')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ({"structured_outputs": {"json": None, "disable_any_whitespace": False}}, None),
    ({"guided_json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_regex": "[0-9]"}, Grammar("regex", "[0-9]")),
    ({"guided_choice": ["x", "y"]}, Grammar("choice", '["x", "y"]')),
    ({"guided_grammar": 'start: "x"'}, Grammar("lark", 'start: "x"')),
    ({"guided_regex": "a", "response_format": {"type": "text"}}, Grammar("regex", "a")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("said", "grammar"), SAID)
def test_the_form_is_read_in_every_client_s_way(
    call: Any, path: str, said: Any, grammar: Grammar | None
) -> None:
    """I16, part, I17: response_format, structured_outputs and guided fields; key order kept."""
    assert call("POST", path, {**BODIES[path], **said}).status == 200
    found = call.service.job.grammar
    if path == CHAT and grammar is not None:  # the model may reason first
        assert (found.kind, found.source[:30]) == ("lark", 'start: ("<think>" thoughts gap')
    else:
        assert found == grammar


def test_only_a_fork_inherits(call: Any) -> None:
    said = {"response_format": {"type": "inherit"}}
    assert call("POST", FORK, {"n": 2, **said}).status == 200
    assert call.service.job.grammar == Grammar("inherit")
    answer = call("POST", COMPLETIONS, {"prompt": "a", **said})
    assert (answer.status, answer.body["error"]["param"]) == (400, "response_format.type")


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
    ],
)  # fmt: skip
def test_a_form_that_can_t_be_read_names_its_field(call: Any, said: Any, param: str) -> None:
    answer = call("POST", COMPLETIONS, {"prompt": "a", **said})
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    assert not call.service.streams


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "failure", [InvalidParameter("grammar", "[a", "unclosed"), GrammarFailed("x")]
)
def test_what_the_worker_says_of_a_grammar_names_the_client_s_field(
    call: Any, failed: Any, stream: bool, failure: Any
) -> None:
    """D9: 400, not "grammar" but what the client wrote."""

    async def script(_: Any) -> Any:
        yield failed(0, failure)

    call.service.script = script
    body = {"prompt": "a", "guided_regex": "[a", "stream": stream}
    answer = call("POST", COMPLETIONS, body)
    assert (answer.status, answer.body["error"]["param"]) == (400, "guided_regex")
    assert "grammar=" not in answer.body["error"]["message"]
    assert answer.body["error"]["code"] == failure.code


def test_chat_logprobs_have_openai_s_shape(call: Any) -> None:
    """I5: token, bytes and the likeliest, for each token of the text."""
    call.service.reply = lambda _: "hé"
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    (choice,) = call("POST", CHAT, asked).body["choices"]
    assert call.service.job.sampling.logprobs == 2
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert content[0] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "i", "logprob": -1.5, "bytes": [105]},
        ],
    }
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "hé"
    bare = call("POST", CHAT, {"messages": MESSAGES, "logprobs": True}).body["choices"][0]
    assert bare["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("path", [COMPLETIONS, FORK])
def test_completion_logprobs_have_openai_s_shape(call: Any, path: str) -> None:
    body = {**BODIES[path], "logprobs": 2, "max_tokens": 3}
    (choice,) = call("POST", path, body).body["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-0.5] * 3,
        "tokens": ["h", "e", "l"],
        "top_logprobs": [{"h": -0.5, "i": -1.5}, {"e": -0.5, "f": -1.5}, {"l": -0.5, "m": -1.5}],
    }
    none = call("POST", path, {**body, "logprobs": 0}).body["choices"][0]["logprobs"]
    assert none["top_logprobs"] == [{"h": -0.5}, {"e": -0.5}, {"l": -0.5}]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streamed_logprobs_add_up_to_the_whole(call: Any, path: str) -> None:
    """I5: also where text is held back, for a stop string or a character in the making."""
    call.service.reply = lambda branch: ("aé END x", "é🌳 EN")[branch]
    more = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    body = {**BODIES[path], **more, "n": 2, "stop": "END", "seed": 1, "max_tokens": 40}
    whole = call("POST", path, body).body["choices"]
    events = call("POST", path, {**body, "stream": True}).events[:-1]
    for index in (0, 1):
        added: dict[str, list[Any]] = {}
        for event in events:
            (choice,) = event["choices"]
            if choice["index"] == index:
                for name, values in choice["logprobs"].items():
                    added.setdefault(name, []).extend(values or [])
        wanted = whole[index]["logprobs"]
        for name in ("content", "tokens", "token_logprobs", "top_logprobs"):
            assert added.get(name) == wanted.get(name)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, FORK])
def test_a_stop_string_may_stay_in_the_text(call: Any, path: str) -> None:
    """I5: include_stop_str_in_output; min_tokens looks for no stop before."""
    call.service.reply = lambda _: "one STOP two STOP three"
    body = {**BODIES[path], "stop": "STOP", "max_tokens": 60, "include_stop_str_in_output": True}
    for min_tokens, wanted in ((0, "one STOP"), (8, "one STOP two STOP")):
        (choice,) = call("POST", path, {**body, "min_tokens": min_tokens}).body["choices"]
        found = choice["message"]["content"] if path == CHAT else choice["text"]
        assert (found, choice["finish_reason"]) == (wanted, "stop")
