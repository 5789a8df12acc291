"""LangChain's and LangGraph's own packages against a real server, unchanged: `make clients` installs them."""

import importlib
import operator
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypedDict

import pydantic
import pytest

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from support.live_api import served
from support.tiny_fleet import BLOCK, tiny_fleet

WHY = "needs the extra clients: make clients"
langchain_openai = pytest.importorskip("langchain_openai", reason=WHY)
agents = pytest.importorskip("langchain.agents", reason=WHY)
langchain_anthropic = pytest.importorskip("langchain_anthropic", reason=WHY)
messages = pytest.importorskip("langchain_core.messages", reason=WHY)
tools = pytest.importorskip("langchain_core.tools", reason=WHY)
graphs = pytest.importorskip("langgraph.graph", reason=WHY)
memory = pytest.importorskip("langgraph.checkpoint.memory", reason=WHY)

pytestmark = pytest.mark.process

WEATHER = '{"city": "Oslo", "days": 2}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {WEATHER}}}</tool_call>'
QUESTION = "Weather in Oslo?"


class Weather(pydantic.BaseModel):
    """Weather."""

    city: str
    days: int


ENDS = {
    "chat": ("finish_reason", "stop"),
    "responses": ("status", "completed"),
    "messages": ("stop_reason", "end_turn"),
}
APIS = list(ENDS)


@asynccontextmanager
async def closing(model: Any) -> AsyncIterator[Any]:
    """Ends its asynchronous client, which the packages keep for each address, beyond the event loop."""
    yield model
    is_anthropics = isinstance(model, langchain_anthropic.ChatAnthropic)
    await (model._async_client if is_anthropics else model.root_async_client).close()
    for name in ("langchain_openai.chat_models._client_utils", "langchain_anthropic._client_utils"):
        for kept in vars(importlib.import_module(name)).values():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()


@pytest.fixture
def api() -> str:
    return "chat"


@pytest.fixture
def chat(live: Any, api: str) -> Callable[..., Any]:
    def made(**more: Any) -> Any:
        options = {"model": "tiny/bytes", "api_key": "none", "max_retries": 0, "max_tokens": 120}
        if api == "messages":
            return langchain_anthropic.ChatAnthropic(base_url=live.url, **options | more)
        options["use_responses_api"] = api == "responses"
        return langchain_openai.ChatOpenAI(base_url=f"{live.url}/v1", **options | more)

    return made


@pytest.fixture
def get_weather() -> Any:
    def get_weather(city: str, days: int) -> str:
        """Weather."""
        return f"{city}: rain for {days} days"

    return tools.tool(get_weather)


def calls_once(live: Any) -> Callable[[int], str]:
    """A model that calls its tool, and says what it found."""

    def reply(_: int) -> str:
        prompt = bytes(live.service.job.tokens.tolist()).decode()
        _, _, result = prompt.rpartition("<tool>")
        return "It rains." if "rain for 2 days" in result else CALL

    return reply


@pytest.mark.parametrize("api", APIS)
def test_langchain_answers_and_counts(chat: Any, api: str) -> None:
    """I17, part: `invoke`, with its usage and its reason of the end."""
    made = chat(temperature=0.5).invoke(QUESTION)
    assert made.text == "hello 0"
    name, value = ENDS[api]
    assert made.response_metadata[name] == value
    assert made.usage_metadata["output_tokens"] == 8
    assert made.usage_metadata["input_token_details"]["cache_read"] == 4


@pytest.mark.parametrize("api", APIS)
async def test_langchain_streams_and_takes_many(chat: Any) -> None:
    """I17, part: `stream`, `astream` with usage, `batch`."""
    whole = None
    async with closing(chat(stream_usage=True)) as model:
        assert "".join(c.text for c in model.stream(QUESTION)) == "hello 0"
        async for chunk in model.astream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        assert [each.text for each in model.batch(["a", "b", "c"])] == ["hello 0"] * 3
    assert whole is not None
    assert (whole.text, whole.usage_metadata["output_tokens"]) == ("hello 0", 8)


@pytest.mark.parametrize("api", APIS)
def test_langchain_puts_streamed_calls_together(chat: Any, live: Any, get_weather: Any) -> None:
    """I17, part: a call in a stream; a forced one is drawn under a grammar."""
    live.service.reply = calls_once(live)
    whole = None
    for chunk in chat().bind_tools([get_weather], tool_choice="get_weather").stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.tool_calls[0]["args"] == {"city": "Oslo", "days": 2}
    assert live.service.job.grammar is not None


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_parses_structured_output(chat: Any, live: Any, method: str) -> None:
    """I17, part: `with_structured_output` by each of its methods, under a grammar."""
    named = CALL.replace("get_weather", "Weather")
    live.service.reply = lambda _: named if method == "function_calling" else WEATHER
    model = chat().with_structured_output(Weather, method=method)
    assert model.invoke(f"{QUESTION} As JSON.") == Weather(city="Oslo", days=2)
    assert live.service.job.grammar is not None


def test_langchain_raises_the_api_s_errors(chat: Any) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        chat(model="gpt-9").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        chat(logprobs=True, top_logprobs=21).invoke(QUESTION)


def test_langchain_goes_on_from_a_response(chat: Any, live: Any) -> None:
    """F31, part: `use_previous_response_id` sends what is new, and the prompt is the whole."""
    model = chat(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke(QUESTION)
    second = model.invoke([messages.HumanMessage(QUESTION), first, messages.HumanMessage("Why?")])
    assert second.text == "hello 0"
    prompt = bytes(live.service.job.tokens.tolist()).decode()
    assert prompt.endswith(f"<user>{QUESTION}|<assistant>hello 0|<user>Why?|<assistant>")


@pytest.mark.parametrize("api", APIS)
async def test_an_agent_of_langgraph_calls_its_tool(chat: Any, live: Any, get_weather: Any) -> None:
    """I17, part: `create_agent` (once `create_react_agent`), whole and as a stream of steps."""
    live.service.reply = calls_once(live)
    asked = {"messages": [("user", QUESTION)]}
    async with closing(chat()) as model:
        agent = agents.create_agent(model, [get_weather])
        found = agent.invoke(asked)["messages"]
        steps = [list(step) async for step in agent.astream(asked, stream_mode="updates")]
    assert [each.type for each in found] == ["human", "ai", "tool", "ai"]
    assert (found[2].text, found[3].text) == ("Oslo: rain for 2 days", "It rains.")
    assert steps == [["model"], ["tools"], ["model"]]


class Tree(TypedDict):
    """State of a graph that branches."""

    topic: str
    cached: Annotated[list[tuple[int, int]], operator.add]


async def test_branches_of_a_graph_share_their_prefix_in_the_engine() -> None:
    """I17, part: over a real engine a fan-out, and forks of a checkpoint, compute their document once."""
    spec = random_model("llama", 5, max_position_embeddings=8192)
    document = "A mallee is a eucalypt with many stems from one root. " * 12
    async with (
        tiny_fleet(spec, 1, num_blocks=4096) as fleet,
        served(fleet.gateways[0], chat=ChatTemplate(None, family=FAMILIES[0])) as (url, _),
    ):
        model = langchain_openai.ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", model="m", max_tokens=4, max_retries=0
        )

        async def ask(state: Any) -> Any:
            made = await model.ainvoke([("system", document), ("user", state["topic"])])
            usage = made.usage_metadata
            read = usage.get("input_token_details", {}).get("cache_read", 0)
            return {"cached": [(usage["input_tokens"], read)]}

        def spread(state: Any) -> Any:
            sends = pytest.importorskip("langgraph.types").Send
            return [sends("ask", {"topic": f"{state['topic']} {i}?"}) for i in range(4)]

        made = graphs.StateGraph(Tree)
        made.add_node("read", ask)
        made.add_node("ask", ask)
        made.add_edge(graphs.START, "read")
        made.add_conditional_edges("read", spread, ["ask"])
        made.add_edge("ask", graphs.END)
        graph = made.compile(checkpointer=memory.InMemorySaver())
        thread: Any = {"configurable": {"thread_id": "a"}}
        found = (await graph.ainvoke({"topic": "Roots", "cached": []}, thread))["cached"]
        assert len(found) == 5
        assert found[0][1] == 0
        shared = len(document) // BLOCK * BLOCK
        assert all(shared <= read <= asked for asked, read in found[1:]), found
        past = [
            each async for each in graph.aget_state_history(thread) if each.next[:1] == ("ask",)
        ]
        forked = await graph.aupdate_state(past[-1].config, {"topic": "Leaves"}, as_node="read")
        again = (await graph.ainvoke(None, forked))["cached"]
        assert len(again) == 5
        assert all(shared <= read for _, read in again[1:])
