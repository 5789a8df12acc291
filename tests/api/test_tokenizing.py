"""`/tokenize` and `/detokenize`, and paths that this server has not."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mallee.actors import build
from mallee.api.chat.reading import ChatReader
from mallee.api.errors import UNSERVED
from mallee.api.prompts import PromptReader
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.tokenizer import Tokenizer
from mallee.api.tokenizing import Tokenizing
from mallee.gateway.access.access import Access
from mallee.protocol.api.generate import DetokenizeRequest, TokenizeRequest
from mallee.protocol.ids import COMMON
from mallee.runtime.config import ChatSettings
from support.examples import examples
from support.mock_scene import make_folder, mock_config
from support.plain_ids import SCOPES
from support.tokenizers_made import byte_level

MESSAGES = [{"role": "user", "content": "hi"}]


def test_tokens_are_those_of_a_completion_or_chat(call: Any) -> None:
    """I17, part: tokens without a worker."""
    for path in ("/tokenize", "/v1/tokenize"):
        for body, asked in (
            ({"prompt": "abc"}, ("/v1/completions", {"prompt": "abc", "max_tokens": 1})),
            ({"messages": MESSAGES}, ("/v1/chat/completions", {"messages": MESSAGES})),
        ):
            call("POST", *asked)
            answer = call("POST", path, {"model": "tiny/bytes", **body})
            tokens = call.service.job.tokens.tolist()
            assert answer.status == 200
            assert answer.body == {
                "count": len(tokens),
                "max_model_len": 256,
                "tokens": tokens,
                "token_strs": None,
            }


def test_special_tokens_and_texts_of_tokens_are_given_if_asked_for(call: Any) -> None:
    body = {"prompt": "ab", "return_token_strs": True}
    assert call("POST", "/tokenize", body).body["token_strs"] == ["<bos>", "a", "b"]
    bare = {**body, "add_special_tokens": False}
    assert call("POST", "/tokenize", bare).body["token_strs"] == ["a", "b"]
    chat = {"messages": MESSAGES, "add_generation_prompt": False}
    tokens = call("POST", "/tokenize", chat).body["tokens"]
    assert bytes(tokens) == b"<user>hi|"
    assert call("POST", "/tokenize", {**chat, "add_special_tokens": True}).body["tokens"] == [
        *(257, *tokens)
    ]
    assert call("POST", "/tokenize", {"prompt": ""}).body["count"] == 0


def test_tokens_become_text_again(call: Any) -> None:
    for path in ("/detokenize", "/v1/detokenize"):
        answer = call("POST", path, {"tokens": [257, 97, 98]})
        assert (answer.status, answer.body) == (200, {"prompt": "<bos>ab"})
    assert call("POST", "/detokenize", {"tokens": []}).body == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": "hi"}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, 300]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
    ],
)
def test_bad_input_is_refused_by_name(call: Any, path: str, body: Any, param: str) -> None:
    answer = call("POST", path, body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


TOKENIZER = Tokenizer(byte_level())
CHAT = ChatTemplate(None)
READER = PromptReader(TOKENIZER, CHAT, TOKENIZER.vocab_size, max_model_len=4096)
TOKENIZING = Tokenizing(READER, ChatReader(READER, CHAT, {}, ChatSettings()), TOKENIZER, 4096)


@examples(200)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_a_text_comes_back_from_its_tokens(text: str) -> None:
    """With the library's own tokens, and texts that belong to them."""
    asked = TokenizeRequest(prompt=text, return_token_strs=True)
    made = json.loads(TOKENIZING.tokenize(asked, COMMON))
    assert made["tokens"] == byte_level().encode(text).ids
    assert made["token_strs"] == byte_level().encode(text).tokens
    back = TOKENIZING.detokenize(DetokenizeRequest(tokens=made["tokens"]), COMMON)
    assert json.loads(back) == {"prompt": text}


@pytest.mark.slow
@pytest.mark.parametrize("path", [*UNSERVED, "/v1/images/generations", "/v1/audio/speech"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_served_is_refused_by_its_name(call: Any, method: str, path: str) -> None:
    """I17, part: a client of another kind of model learns what this server is for."""
    if path == "/v1/chat/completions":
        path += "/chatcmpl-1/messages"
    answer = call(method, path, {"input": "x"} if method == "POST" else None)
    error = answer.body["error"]
    assert (answer.status, error["code"], error["type"]) == (404, "not_served", "not_found_error")
    assert f"{method} {path}: this server has no " in error["message"]
    assert "/v1/chat/completions" in error["message"]


def test_a_path_that_only_begins_alike_is_no_such_path(call: Any) -> None:
    assert call("GET", "/v1/embeddingsx").body["error"]["code"] == "not_found"


async def test_a_checkpoint_s_own_marks_are_plain_text_in_messages(
    tmp_path: Path, service: Any
) -> None:
    """I4, part: a token that its tokenizer doesn't flag as special and its template writes, as served."""
    folder = make_folder(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens(["<turn>"])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<turn>{{ m.content }}{% endfor %}"
    )
    with ThreadPoolExecutor(1) as pool:
        app = build.build_api(mock_config(folder), service, Access(None, {}), SCOPES, pool)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = {
                "messages": [{"role": "user", "content": "a<turn>b"}],
                "return_token_strs": True,
            }
            found = (await client.post("/tokenize", json=asked)).json()
    assert found["token_strs"].count("<turn>") == 1
    assert "".join(found["token_strs"]) == "<turn>a<turn>b"
