"""Gateway CPU of a turn by `previous_response_id`: about 50 new tokens after contexts of 1 k to 200 k.

    python -m bench.responses [--times 100]

Bodies are read, rendered, tokenized and made into the worker's command, as `POST /v1/responses` does, with a
family's template and a byte-level tokenizer; no network and no worker. `whole_ms` is the same turn with the
conversation sent again, as clients of chat completions do, and known (`bench.gateway.turns` has new turns).
The contexts are conversations of many turns, and
one long document with a question (`document`). Medians of CPU time; the last line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import numpy as np
import tokenizers

from bench.measure import machine
from mallee.api.chat.reading import ChatReader
from mallee.api.entry.bodies import Bodies
from mallee.api.entry.decoding import read
from mallee.api.jobs import JobMaker
from mallee.api.prompts import PromptReader
from mallee.api.responses.store import Left, State
from mallee.api.responses.turns import PlannedTurn, TurnMaker
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import Message
from mallee.api.text.families import FAMILIES
from mallee.api.text.tokenizer import Tokenizer
from mallee.protocol.api.responses import ResponseRequest
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, CapsuleId, RequestId
from mallee.protocol.messages import pack_tokens
from mallee.protocol.model import ModelSpec
from mallee.router.dispatch.jobs import NO_TERMS
from mallee.runtime.config import ChatSettings, HttpSettings

CONTEXTS: Final = (1_000, 10_000, 50_000, 200_000)
WORDS: Final = (
    "the",
    "agent",
    "reads",
    "a",
    "file",
    "and",
    "writes",
    "another",
    "while",
    "its",
    "tests",
    "run",
)
TURN_WORDS: Final = 400
SPEC: Final = ModelSpec(
    name="m",
    fingerprint="f" * 16,
    vocab_size=1 << 17,
    max_model_len=1 << 19,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    dtype_nbytes=4,
    eos_token_ids=(),
)
INSTRUCTIONS: Final = "You are an agent. " * 50
TOOLS: Final = [
    {
        "type": "function",
        "name": f"tool_{i}",
        "description": "Does a thing with a file. " * 4,
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
    for i in range(8)
]


def tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    return Tokenizer(inner)


class Gateway:
    """The part of a gateway that reads requests."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()
        family = next(each for each in FAMILIES if each.name == "qwen3")
        special = self.tokenizer.special_tokens
        template = ChatTemplate(None, family=family, special_tokens=special)
        reader = PromptReader(
            self.tokenizer, template, SPEC.vocab_size, max_model_len=SPEC.max_model_len
        )
        chat = ChatReader(reader, template, self.tokenizer.added_tokens, ChatSettings())
        seeds = count()
        maker = JobMaker(
            *(SPEC, reader, chat),
            model_name="m",
            limits=HttpSettings(),
            draw_seed=lambda: next(seeds),
        )
        self.turns = TurnMaker(reader, chat, maker)
        self._bodies = Bodies()

    def plan(self, raw: bytes, previous: State | None) -> PlannedTurn:
        given = self._bodies.decode(raw, ResponseRequest, "bench", 1 << 20)
        body = read(given, ResponseRequest).body
        planned = self.turns.plan(body, COMMON, NO_TERMS, previous, has_capsule=True)
        planned.plan.jobs[0].command(RequestId("r"))
        return planned


def words(num: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    return " ".join(WORDS[i] for i in draw.integers(0, len(WORDS), num))


def body(items: Any) -> bytes:
    return json.dumps({"input": items, "instructions": INSTRUCTIONS, "tools": TOOLS}).encode()


def history(num_tokens: int, *, is_document: bool) -> list[dict[str, str]]:
    if is_document:
        return [{"role": "user", "content": words(num_tokens, 0)}]
    found: list[dict[str, str]] = []
    for i in range(max(1, num_tokens // TURN_WORDS // 2)):
        found.append({"role": "user", "content": words(TURN_WORDS, 2 * i)})
        found.append({"role": "assistant", "content": words(TURN_WORDS, 2 * i + 1)})
    return [*found, {"role": "user", "content": "Go on."}]


def cpu_ms(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        begin = time.thread_time()
        work()
        taken.append((time.thread_time() - begin) * 1e3)
    return statistics.median(taken)


def run(gateway: Gateway, num_tokens: int, times: int, *, is_document: bool) -> dict[str, Any]:
    items = history(num_tokens, is_document=is_document)
    first = gateway.plan(body(items), None)
    answer = words(30, 7)
    drawn = as_tokens(gateway.tokenizer.encode(f"{answer}<|im_end|>"))
    prompt_tokens = first.plan.prompt_tokens
    left = Left(CapsuleId("c"), prompt_tokens, pack_tokens(drawn), prompt_tokens, 0)
    state = State.of(first.head, (*first.turns, (Message("assistant", answer),)), left)
    question = words(40, 9)
    turn = body(question)
    again = body(
        [
            *items,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        ]
    )
    planned = gateway.plan(turn, state)
    whole = gateway.plan(again, None)
    assert planned.plan.prompt_tokens == whole.plan.prompt_tokens
    return {
        "context_tokens": prompt_tokens,
        "is_document": is_document,
        "turn": planned.how,
        "new_tokens": planned.new_tokens,
        "turn_ms": round(cpu_ms(lambda: gateway.plan(turn, state), times), 3),
        "whole_ms": round(cpu_ms(lambda: gateway.plan(again, None), max(3, times // 20)), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=100)
    times = parser.parse_args().times
    gateway = Gateway()
    runs = [run(gateway, n, times, is_document=False) for n in CONTEXTS]
    runs.append(run(gateway, CONTEXTS[-1], times, is_document=True))
    print(json.dumps({"runs": runs, "machine": machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
