"""Prompts that go on from capsules, token for token those of rendering the whole conversation again."""

import json
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.api.chat.reading import ChatReader
from mallee.api.jobs import JobMaker
from mallee.api.prompts import PromptReader
from mallee.api.responses.store import Left, State
from mallee.api.responses.turns import TurnMaker
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import Conversation, Message, ToolCall
from mallee.api.text.families import FAMILIES, Family
from mallee.protocol.api.responses import ResponseRequest
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, CapsuleId
from mallee.protocol.messages import pack_tokens
from mallee.protocol.model import ModelSpec
from mallee.router.dispatch.jobs import NO_TERMS, ForkJob
from mallee.runtime.config import ChatSettings, HttpSettings
from support.live_api import CharTokenizer

SPEC = ModelSpec(
    name="m",
    fingerprint="f" * 16,
    vocab_size=300,
    max_model_len=1 << 20,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    dtype_nbytes=4,
    eos_token_ids=(),
)
TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}
WORDS = st.text("ab <|\n", max_size=6).map(lambda text: f"x{text}x")
LONG = st.integers(1, 3).map(lambda n: "word " * 500 * n)


class Chain:
    """A conversation by responses: the capsule that each leaves, and the whole as a template has it."""

    def __init__(self, family: Family, effort: str | None) -> None:
        self.template = ChatTemplate(None, family=family)
        self.reader = PromptReader(
            CharTokenizer(),  # type: ignore[arg-type]
            self.template,
            SPEC.vocab_size,
            max_model_len=SPEC.max_model_len,
        )
        chat = ChatReader(self.reader, self.template, {}, ChatSettings())
        seeds = count()
        maker = JobMaker(
            *(SPEC, self.reader, chat),
            model_name="m",
            limits=HttpSettings(),
            draw_seed=lambda: next(seeds),
        )
        self.turns = TurnMaker(self.reader, chat, maker)
        self.effort = effort
        self.state: State | None = None
        self.capsule: list[int] = []

    def ask(self, items: Any, answer: Message, raw: str) -> None:
        """One turn: its prompt is checked, then answered with `raw`, which is read as `answer`."""
        body = ResponseRequest(
            input=items,
            instructions="Be brief.",
            tools=[TOOL],
            reasoning={"effort": self.effort} if self.effort else None,
        )
        planned = self.turns.plan(body, COMMON, NO_TERMS, self.state, has_capsule=True)
        (job,) = planned.plan.jobs
        if isinstance(job, ForkJob):
            assert job.at is None or job.at < len(self.capsule)
            prompt = [*self.capsule[: job.at], *np.asarray(job.suffixes[0]).tolist()]
        else:
            prompt = np.asarray(job.tokens).tolist()
        head = planned.head
        whole = Conversation(
            (*head.messages, *(message for turn in planned.turns for message in turn)),
            head.functions,
            head.variables,
        )
        text = self.template.render(whole).text
        assert bytes(prompt).decode() == text
        assert planned.plan.prompt_tokens == len(prompt)
        drawn = as_tokens([*raw.encode()])
        self.capsule = [*prompt, *drawn.tolist()]
        asked = planned.asked or (len(prompt), len(planned.turns) - 1)
        left = Left(CapsuleId("c"), len(prompt), pack_tokens(drawn), *asked)
        self.state = State.of(head, (*planned.turns, (answer,)), left)


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[Any, Message, str]]:
    """Questions, calls with and without reasoning, results; answers as models write them, or nearly."""
    found: list[tuple[Any, Message, str]] = []
    owed: list[ToolCall] = []
    for number in range(draw(st.integers(2, 6))):
        if owed:
            items: Any = [
                {"type": "function_call_output", "call_id": call.id, "output": draw(WORDS)}
                for call in owed
            ]
        else:
            items = [{"role": "user", "content": draw(WORDS | LONG)}]
        reasoning = draw(st.sampled_from(["", "hm, so"]))
        end = draw(st.sampled_from(["<|im_end|>", "<|eot_id|>", "<end_of_turn>", ""]))
        gap = draw(st.sampled_from(["\n", ""]))
        thought = f"<think>\n{reasoning}\n</think>\n{gap}" if reasoning else ""
        if draw(st.booleans()):
            owed = [ToolCall(f"call{number:05}", "look", '{"at": 1}')]
            call = json.dumps({"name": "look", "arguments": {"at": 1}})
            raw = f"{thought}<tool_call>\n{call}\n</tool_call>{end}"
            found.append((items, Message("assistant", "", reasoning, tuple(owed)), raw))
        else:
            owed = []
            text = draw(WORDS)
            found.append((items, Message("assistant", text, reasoning), f"{thought}{text}{end}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("effort", [None, "none", "high"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
@settings(max_examples=40, deadline=None)
@given(talk=turns())
def test_a_turn_has_the_tokens_of_the_whole(
    family: Family, effort: str | None, talk: list[tuple[Any, Message, str]]
) -> None:
    chain = Chain(family, effort)
    for items, answer, raw in talk:
        chain.ask(items, answer, raw)
