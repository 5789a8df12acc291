"""Chat templates: the checkpoint's own, and ours by family."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import (
    Conversation,
    Function,
    Message,
    ToolCall,
    read_functions,
    read_messages,
)
from mallee.api.text.families import FAMILIES, Family, family_of
from mallee.protocol.errors import ConfigError, InvalidParameter, UnsupportedModel
from support.tokenizers_made import byte_level

GOLDEN = Path(__file__).parent / "renders"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)
HI = [Message("user", "hi")]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
WEATHER = Function("get_weather", "Weather of a city", SCHEMA)


def weather(call_id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": "get_weather"}


AGENT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Malmö and Åbo?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Two cities, two calls.",
        "tool_calls": [
            weather("call00001", city="Malmö"),
            weather("call00002", city="Åbo", days=2),
        ],
    },
    result("call00001", "rain"),
    result("call00002", "snow"),
    {"role": "assistant", "content": "Rain and snow."},
    {"role": "user", "content": "And in Oslo?"},
]
PLAIN = [
    {"role": role, "content": text}
    for role, text in (("user", "hi"), ("assistant", "hello"), ("user", "bye"))
]
# The results of "loop" are not answered yet.
CONVERSATIONS = {"agent": (AGENT, TOOLS), "loop": (AGENT[:5], TOOLS), "plain": (PLAIN, None)}


def given(name: str) -> Conversation:
    messages, tools = CONVERSATIONS[name]
    return Conversation(read_messages(messages), read_functions(tools))


def own(family: Family) -> ChatTemplate:
    return ChatTemplate(None, family=family, bos_token="<bos>")


def families() -> list[Any]:
    return [pytest.param(each, id=each.name) for each in FAMILIES]


def test_messages_render_as_the_template_says() -> None:
    text = ChatTemplate(CHATML).render(Conversation(HI)).text
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    clock = ChatTemplate(
        "{{ strftime_now('%Y') }}{{ messages | tojson }}", now=lambda: datetime(2001, 2, 3)
    )
    assert clock.render(Conversation(HI)).text == '2001[{"role": "user", "content": "hi"}]'
    # Parts for training are plain content.
    chat = ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}!")
    assert chat.render(Conversation(HI)).text == "hi!"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    file = tmp_path_factory.mktemp("oracle") / "tokenizer.json"
    byte_level().save(str(file))
    return PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<bos>")


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_our_templates_render_as_they_did_and_as_in_transformers(
    family: Family, name: str, oracle: Any
) -> None:
    """I4: golden renders of our template of each family, with tools, calls, results and reasoning."""
    found = own(family).render(given(name)).text
    if name == "agent":
        assert found == (GOLDEN / f"{family.name}_{name}.txt").read_text(encoding="utf-8")
    messages, tools = CONVERSATIONS[name]
    wanted = oracle.apply_chat_template(
        messages,
        tools=tools,
        chat_template=family.template,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("model_type", "tokens", "name"),
    [
        ("llama", {"<|start_header_id|>", "<|eot_id|>", "<|im_x|>"}, "llama3"),
        ("llama", {"<|im_start|>", "<|im_end|>"}, "chatml"),
        ("qwen2", {"<|im_start|>", "<|im_end|>"}, "chatml"),
        ("qwen3_moe", {"<|im_start|>", "<|im_end|>"}, "qwen3"),
        ("gemma3_text", {"<start_of_turn>", "<end_of_turn>"}, "gemma3"),
    ],
)
def test_a_family_is_known_by_its_type_and_tokens(
    model_type: str, tokens: set[str], name: str
) -> None:
    found = family_of(model_type, tokens)
    assert found is not None
    assert found.name == name
    assert family_of(model_type, {"<s>"}) is None


def test_an_unknown_family_is_told_where_to_add_a_template(tmp_path: Path) -> None:
    """I4: the error names the places where one can be added."""
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    chat = ChatTemplate.load(tmp_path)
    with pytest.raises(InvalidParameter) as refused:
        chat.render(Conversation(HI))
    for part in ("'mamba'", "chat_template.jinja", "chat.template", "templates", "/v1/completions"):
        assert part in str(refused.value)


def test_the_checkpoint_s_template_goes_first_and_a_file_before_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    tokens = ("<|im_start|>", "<|im_end|>")
    ours = ChatTemplate.load(tmp_path, special_tokens=tokens)
    assert ours.family is not None
    assert ours.family.name == "qwen3"
    config = {"chat_template": [{"name": "default", "template": "D"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(Conversation(HI)).text == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    theirs = ChatTemplate.load(tmp_path, special_tokens=tokens)
    assert theirs.render(Conversation(HI)).text == "J"
    (tmp_path / "mine.jinja").write_text("F")
    mine = ChatTemplate.load(tmp_path, file=tmp_path / "mine.jinja")
    assert mine.render(Conversation(HI)).text == "F"
    with pytest.raises(ConfigError, match=r"chat\.template"):
        ChatTemplate.load(tmp_path, file=tmp_path / "none.jinja")
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UnsupportedModel, match="does not compile"):
        ChatTemplate.load(tmp_path)


def test_a_template_without_tools_leaves_them_to_the_family_s() -> None:
    """I4, part: SmolLM2's own template drops tools, calls and results."""
    family = next(each for each in FAMILIES if each.name == "chatml")
    chat = ChatTemplate(CHATML, family=family)
    plain, agent = given("plain"), given("agent")
    assert chat.render(plain).text == ChatTemplate(CHATML).render(plain).text
    assert chat.render(agent).text == own(family).render(agent).text
    with pytest.raises(InvalidParameter, match=r"shows no tools.*chat\.template"):
        ChatTemplate(CHATML).render(agent)
    both = ChatTemplate(CHATML, tool_source=family.template)
    assert both.render(agent).text == own(family).render(agent).text


def test_an_assistant_without_text_is_none_where_the_template_asks() -> None:
    """Templates that know calls by content being none get none, others an empty text."""
    call = (Message("user", "x"), Message("assistant", tool_calls=(ToolCall("i", "f", "{}"),)))
    source = (
        "{{ tools }}{% for m in messages %}{% if m.content is none %}NONE{% endif %}"
        "{{ m.tool_calls }}{{ m.content }}{% endfor %}"
    )
    chat = ChatTemplate(source)
    assert "NONE" in chat.render(Conversation(call)).text
    assert chat.render(Conversation(HI)).text.endswith("hi")


def test_developers_are_the_system_to_templates_that_don_t_know_them() -> None:
    given = Conversation((Message("developer", "x"), *HI))
    assert "system\nx" in ChatTemplate(CHATML).render(given).text
    assert ChatTemplate("{# developer #}{{ messages[0].role }}").render(given).text == "developer"


@pytest.mark.parametrize("source", [CHATML, STRICT])
def test_a_continuation_is_what_the_messages_add(source: str) -> None:
    chat = ChatTemplate(source)
    assert chat.render_continuation(HI) == chat.render(Conversation(HI))


def test_a_template_that_rewrites_the_past_has_no_continuation_and_its_refusals_are_told() -> None:
    chat = ChatTemplate("{{ messages | length }}" + CHATML)
    with pytest.raises(InvalidParameter, match="rewrites"):
        chat.render_continuation(HI)
    with pytest.raises(InvalidParameter, match="no system"):
        ChatTemplate(STRICT).render(Conversation([Message("system", "x")]))


def turns() -> Iterator[tuple[Conversation, str]]:
    """Conversations of an agent, each with the text of the answer that the next one goes on from."""
    history: list[Message] = [Message("system", "Be brief."), Message("user", "Weather?")]
    for turn in range(4):
        call = ToolCall(f"call0000{turn}", "get_weather", json.dumps({"city": f"c{turn}"}))
        yield Conversation(tuple(history), (WEATHER,)), call.arguments
        history.append(Message("assistant", tool_calls=(call,)))
        history.append(Message("tool", f"rain {turn}", tool_call_id=call.id, name=call.name))


@pytest.mark.parametrize("family", families())
def test_the_prompt_of_the_next_turn_begins_with_the_last_one_and_its_answer(
    family: Family,
) -> None:
    """F31, part: in a loop of tools each prompt is the one before, the call as it was written, and more."""
    chat = own(family)
    before, answered = "", ""
    for conversation, arguments in turns():
        text = chat.render(conversation).text
        assert text.startswith(before)
        # Between the prompts stand the answer's own text and the result, nothing else.
        assert answered in text[len(before) :]
        before, answered = text, arguments
