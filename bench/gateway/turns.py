"""CPU time of a gateway for a turn that adds some 50 words to a history which is sent whole.

    python -m bench.gateway.turns FOLDER [--tokens 0 1000 10000 ...] [--times 15]

FOLDER has a checkpoint's tokenizer and chat template. From the bytes of a body to the worker's command, by
the three endpoints that take conversations, and the hashes of the prompt's blocks; without network, queue
and worker. A *talk* has messages of 300 words by turns; an *agent* calls a tool for each 300 words that it
reads. Each turn is a new one: the model's answer or call and the next question or result have not been there
before. `first`: the same body where nothing is known. `floor`: decoding the JSON and nothing else. Medians
in milliseconds; the last line of stdout is one JSON object.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from bench.measure import machine, quiet
from mallee.api.chat.reading import ChatReader
from mallee.api.entry.bodies import Bodies
from mallee.api.entry.decoding import read
from mallee.api.jobs import JobMaker, Plan
from mallee.api.messages.handlers import MessagesHandlers
from mallee.api.prompts import PromptReader
from mallee.api.responses.turns import TurnMaker
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.tokenizer import Tokenizer
from mallee.protocol.api.generate import ChatRequest
from mallee.protocol.api.messages import MessagesRequest
from mallee.protocol.api.responses import ResponseRequest
from mallee.protocol.ids import COMMON, RequestId
from mallee.protocol.model import ModelSpec
from mallee.router.dispatch.jobs import NO_TERMS, GenerateJob
from mallee.router.index.hashing import block_hashes, compile_hashing
from mallee.runtime.config import ChatSettings, HttpSettings

BLOCK_SIZE: Final = 16
WORDS: Final = 300  # of a message, or of a tool's result
MAX_VALUES: Final = 1 << 20
TOKENS: Final = (0, 1_000, 10_000, 50_000, 200_000)
APIS: Final = ("chat", "messages", "responses")
NAME: Final = "read_file"
SCHEMA: Final = {"type": "object", "properties": {"path": {"type": "string"}}}
SPEC: Final = ModelSpec(
    name="m",
    fingerprint="f" * 16,
    vocab_size=1 << 20,
    max_model_len=1 << 19,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    dtype_nbytes=4,
    eos_token_ids=(),
)


class Gateway:
    """The part of a gateway that reads requests."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        prompts = PromptReader(
            tokenizer, template, SPEC.vocab_size, max_model_len=SPEC.max_model_len
        )
        chat = ChatReader(prompts, template, tokenizer.added_tokens, ChatSettings())
        seeds = count()
        self._maker = JobMaker(
            SPEC,
            prompts,
            chat,
            model_name="m",
            limits=HttpSettings(),
            draw_seed=lambda: next(seeds),
        )
        context = SimpleNamespace(model=SPEC)
        server: Any = SimpleNamespace(gateway=SimpleNamespace(context=context))
        unused: Any = None
        self._turns = TurnMaker(prompts, chat, self._maker)
        self._messages = MessagesHandlers(
            server, self._maker, unused, prompts, chat, self._turns, unused
        )
        self._bodies = Bodies()

    def plan(self, api: str, raw: bytes) -> Plan:
        if api == "chat":
            chat = read(
                self._bodies.decode(raw, ChatRequest, "bench", MAX_VALUES), ChatRequest
            ).body
            return self._maker.chat(chat, COMMON, NO_TERMS)
        if api == "messages":
            message = read(
                self._bodies.decode(raw, MessagesRequest, "bench", MAX_VALUES), MessagesRequest
            ).body
            return self._messages._plan(message, COMMON, NO_TERMS)[0]
        body = read(
            self._bodies.decode(raw, ResponseRequest, "bench", MAX_VALUES), ResponseRequest
        ).body
        return self._turns.plan(body, COMMON, NO_TERMS, None, has_capsule=False).plan


class History:
    """A conversation in the form of one endpoint, with words of this repository's pages."""

    def __init__(self, api: str, words: list[str], *, is_agent: bool) -> None:
        self._api = api
        self._words = words
        self._is_agent = is_agent
        self._rng = random.Random(1)
        self._calls = 0
        self.items: list[dict[str, Any]] = []
        self.items.append({"role": "user", "content": self._text(25)})

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choice(self._words) for _ in range(num_words))

    def add(self, num_words: int) -> None:
        """The assistant's part, and what comes back."""
        if not self._is_agent:
            for role in ("assistant", "user"):
                self.items.append({"role": role, "content": self._text(num_words)})
            return
        self._calls += 1
        key, path, text = f"call_{self._calls}", {"path": self._text(8)}, self._text(num_words)
        made: dict[str, list[dict[str, Any]]] = {
            "chat": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": key,
                            "type": "function",
                            "function": {"name": NAME, "arguments": json.dumps(path)},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": key, "content": text},
            ],
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": key, "name": NAME, "input": path}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": key, "content": text}],
                },
            ],
            "responses": [
                {
                    "type": "function_call",
                    "call_id": key,
                    "name": NAME,
                    "arguments": json.dumps(path),
                },
                {"type": "function_call_output", "call_id": key, "output": text},
            ],
        }
        self.items += made[self._api]

    def raw(self) -> bytes:
        """The body of a request."""
        match self._api:
            case "chat":
                tools = {"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}
                body: dict[str, Any] = {"messages": self.items}
            case "messages":
                tools = {"name": NAME, "input_schema": SCHEMA}
                body = {"model": "m", "max_tokens": 50, "messages": self.items}
            case _:
                tools = {"type": "function", "name": NAME, "parameters": SCHEMA}
                body = {"input": self.items}
        return json.dumps(body | ({"tools": [tools]} if self._is_agent else {})).encode()


def cpu_ms(work: Callable[[], Any]) -> float:
    begin = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - begin)


def measured(
    load: Callable[[], Gateway], history: History, api: str, num_tokens: int, times: int
) -> dict[str, Any]:
    """The row of one history, which grows to `num_tokens`."""
    gateway = load()

    def prompt(plan: Plan) -> Any:
        (job,) = plan.jobs
        assert isinstance(job, GenerateJob)
        return job.tokens

    def length() -> int:
        return len(prompt(gateway.plan(api, history.raw())))

    while (num := length()) < num_tokens:
        for _ in range(1 + (num_tokens - num) // (8 * WORDS)):
            history.add(min(WORDS, num_tokens // 8))
    turns, floors = [], []
    with quiet():
        for _ in range(times):
            history.add(25)
            raw = history.raw()

            def turn(raw: bytes = raw) -> None:
                plan = gateway.plan(api, raw)
                plan.jobs[0].command(RequestId("r"))
                block_hashes(prompt(plan), BLOCK_SIZE)

            turns.append(cpu_ms(turn))
            floors.append(cpu_ms(partial(msgspec.json.decode, raw)))
        raw, tokens = history.raw(), length()
        unused = [load() for _ in range(3)]
        first = statistics.median(cpu_ms(partial(each.plan, api, raw)) for each in unused)
    return {
        "tokens": tokens,
        "messages": len(history.items),
        "turn": round(statistics.median(turns), 3),
        "first": round(first, 3),
        "floor": round(statistics.median(floors), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--times", type=int, default=15)
    args = parser.parse_args()
    compile_hashing()

    def load() -> Gateway:
        tokenizer = Tokenizer.load(args.folder)
        template = ChatTemplate.load(  # with the protection of special tokens, as gateways have it
            args.folder,
            special_tokens=tokenizer.special_tokens,
            added_tokens=tokenizer.added_tokens,
        )
        return Gateway(tokenizer, template)

    words = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text().split()
    rows = []
    for is_agent in (False, True):
        for api in APIS:
            for num in sorted(args.tokens):
                history = History(api, words, is_agent=is_agent)
                row = measured(load, history, api, num, args.times)
                rows.append({"history": "agent" if is_agent else "talk", "api": api, **row})
                sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(json.dumps({"turns": rows, "machine": machine()}) + "\n")


if __name__ == "__main__":
    main()
