"""Bodies of requests as prompts, against the tokens that the pods' own libraries make of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mallee.actors.front.pods.kv_events import salt_of
from mallee.actors.front.prompts import Prompt, PromptReader, cached_tokens
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.tokenizer import Tokenizer
from mallee.protocol.hashing import block_hashes
from support.tokenizers_made import byte_level

SIZE = 4
TEMPLATE = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking %}think{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"a": {"type": "int"}}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    byte_level().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def reader(folder: Path) -> PromptReader:
    return PromptReader(Tokenizer.load(folder), ChatTemplate.load(folder), SIZE)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    made.chat_template = TEMPLATE
    return made


def read(
    reader: PromptReader,
    body: dict[str, Any],
    path: str = "/v1/chat/completions",
    **headers: str,
) -> Prompt:
    raw = json.dumps({"model": "m", **body}).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return reader.read({":path": path, **names}, raw, adapters=("lora",))


def hashes(ids: list[int], salt: str = "") -> list[int]:
    return block_hashes(ids, SIZE, salt=salt).tolist()


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "the tree and the leaf"}],
    [
        {"role": "system", "content": "the root"},
        {"role": "user", "content": "the tree"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "look", "arguments": {"a": [1, "x"]}}}
            ],
        },
        {"role": "tool", "content": "the leaf", "tool_call_id": "1"},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"enable_thinking": True}])
def test_messages_are_rendered_as_transformers_does(
    reader: PromptReader,
    oracle: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    more: dict[str, Any],
) -> None:
    """Tools, tool calls and variables too; arguments come as text in requests."""
    opens = "enable_thinking" not in more
    text = oracle.apply_chat_template(messages, add_generation_prompt=opens, tokenize=False, **more)
    ids = oracle.encode(text, add_special_tokens=False)
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    body = more if opens else {"add_generation_prompt": False, "chat_template_kwargs": more}
    found = read(reader, {"messages": sent, **body})
    assert found.num_tokens == len(ids)
    assert found.hashes.tolist() == hashes(ids)


def test_texts_parts_ids_and_the_other_apis_are_prompts(reader: PromptReader) -> None:
    plain = read(reader, {"messages": CONVERSATIONS[0]})
    parts = [{"role": "user", "content": [{"type": "text", "text": "the tree and the leaf"}]}]
    assert read(reader, {"messages": parts}).hashes.tolist() == plain.hashes.tolist()
    said = read(reader, {"input": "the tree and the leaf"}, "/v1/responses")
    assert said.hashes.tolist() == plain.hashes.tolist()
    system = [{"role": "system", "content": "the root"}, *CONVERSATIONS[0]]
    told = read(reader, {"messages": CONVERSATIONS[0], "system": "the root"}, "/v1/messages")
    assert told.hashes.tolist() == read(reader, {"messages": system}).hashes.tolist()
    ids = list(range(3, 20))
    found = read(reader, {"prompt": ids, "max_tokens": 7}, "/v1/completions")
    assert (found.hashes.tolist(), found.num_tokens, found.max_tokens) == (hashes(ids), 17, 7)
    several = read(reader, {"prompt": [ids, [1, 2]]}, "/v1/completions")
    assert several.hashes.tolist() == hashes(ids)


def test_adapters_and_salts_are_told_apart(reader: PromptReader) -> None:
    """As KV events name their blocks; a name that is no adapter's is the model's."""
    ids = list(range(3, 20))
    body = {"prompt": ids}
    path = "/v1/completions"
    assert read(reader, {**body, "model": "alias"}, path).hashes.tolist() == hashes(ids)
    adapted = read(reader, {**body, "model": "lora", "cache_salt": "s"}, path)
    assert adapted.hashes.tolist() == hashes(ids, salt_of("lora", "s"))


def test_requests_of_a_session_belong_together(reader: PromptReader) -> None:
    body = {"prompt": [1] * 8}
    path = "/v1/completions"
    keyed = read(reader, {**body, "prompt_cache_key": "k"}, path).affinity
    assert keyed == read(reader, {"prompt_cache_key": "k"}, path).affinity != 0
    assert read(reader, body, path).affinity == 0
    assert read(reader, body, path, x_session_id="k").affinity == keyed
    assert (
        read(reader, {**body, "cache_salt": "s", "prompt_cache_key": "k"}, path).affinity != keyed
    )
    assert read(reader, body, path, x_gateway_inference_objective="batch").objective == "batch"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "no list"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [7]},
        {"prompt": {"a": 1}},
        {"prompt": [-1]},
        {"prompt": [1 << 40]},
        {"prompt": ["", 3]},
        {},
    ],
)
def test_what_can_not_be_read_has_no_hashes(reader: PromptReader, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    assert len(read(reader, body, path).hashes) == 0


def test_without_a_tokenizer_texts_are_told_apart_by_their_bytes() -> None:
    reader = PromptReader(None, None, SIZE)
    a, b, c = (
        read(reader, {"messages": [{"role": "user", "content": "x" * 200 + end}]}).hashes.tolist()
        for end in ("", "y" * 100, "z")
    )
    shared = 200 // (4 * SIZE)
    assert a[:shared] == b[:shared] == c[:shared]
    assert a != b


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'"prompt_tokens_details": {"cached_tokens": 192}}}\n\ndata: [DONE]', 192),
        (b'{"usage":{"input_tokens":3,"cache_read_input_tokens":7}}', 7),
        (b'{"usage":{"prompt_tokens_details":null}}', None),
        (b"", None),
    ],
)
def test_the_cached_tokens_are_in_the_usage(tail: bytes, expected: int | None) -> None:
    assert cached_tokens(tail) == expected
