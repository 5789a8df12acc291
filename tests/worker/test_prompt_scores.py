"""Log-probabilities of prompts, and the token that ends an answer, as updates tell them."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bench.doubles.random_model import random_model
from mallee.protocol.messages import Fork, Generate, Limits, Sampling, TokenLogprobs, pack_tokens
from mallee.worker.forward import ForwardBatch, Row
from mallee.worker.kv.sides.states import NO_STATE
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig
from support.driving import engine_over
from support.torch_threads import torch_threads

GREEDY = Sampling()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with torch_threads():
        yield


def plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], of one pass over all of them."""
    forward = model.forward(num_blocks=64)
    table = np.arange(64, dtype=np.int32)
    states = tuple(np.array([NO_STATE, 1]) for side in forward.spec.sides if side.kind == "state")
    row = Row(np.array(tokens, np.uint32), 0, table, len(tokens), states)
    return torch.stack(list(forward.forward(ForwardBatch((), [row])))).float()


def scored(logits: torch.Tensor, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    chances = torch.log_softmax(logits, -1)
    found = []
    for place, token in zip(chances, tokens[1:], strict=False):
        top = place.topk(num_top) if num_top else None
        pairs = () if top is None else zip(top.indices.tolist(), top.values.tolist(), strict=True)
        found.append((float(place[token]), tuple(pairs)))
    return found


def same(told: Any, expected: list[TokenLogprobs]) -> None:
    assert len(told) == len(expected)
    for (own, top), (plain_own, plain_top) in zip(told, expected, strict=True):
        assert own == pytest.approx(plain_own, abs=1e-4)
        assert [t for t, _ in top] == [t for t, _ in plain_top]
        assert [p for _, p in top] == pytest.approx([p for _, p in plain_top], abs=1e-4)


def run(engine: Any, *commands: Any) -> dict[tuple[str, int], list[Any]]:
    """Updates by branch."""
    found: dict[tuple[str, int], list[Any]] = {}
    for command in commands:
        assert engine.submit(command, "g") is None
    while engine.has_work:
        for frame in engine.step().frames.values():
            for update in frame.updates:
                found.setdefault((update.request, update.branch), []).append(update)
        engine.check()
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_prompts_are_scored_as_in_one_pass(family: str) -> None:
    """X26, part: in chunks, beside others, with n branches, from a cache that has all of it already."""
    model, rng = random_model(family), random.Random(3)
    vocab = model.config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in (1, 2, 21, 37)]
    prompts.append([*prompts[-1][:20], *prompts[2][:9]])
    logits = [plain_logits(model, prompt) for prompt in prompts]
    config = EngineConfig(SchedulerConfig(max_step_tokens=16, max_rows=12))
    engine = engine_over(model.forward(), config=config)
    for attempt in range(2):  # the second time all of it is cached
        commands = [
            Generate(f"{attempt}.{i}", pack_tokens(p), Limits(3), n=1 + i % 3, prompt_logprobs=i)
            for i, p in enumerate(prompts)
        ]
        plain = Generate(f"plain{attempt}", pack_tokens(prompts[3]), Limits(9))
        updates = run(engine, plain, *commands)
        for i, prompt in enumerate(prompts):
            expected = scored(logits[i], prompt, i)
            for branch in range(1 + i % 3):
                first, *others = updates[f"{attempt}.{i}", branch]
                same(first.prompt_logprobs, expected)
                assert not any(update.prompt_logprobs for update in others)
                assert not attempt or branch or first.prefill_tokens == len(prompt)
        assert not any(update.prompt_logprobs for update in updates[f"plain{attempt}", 0])


def test_a_prompt_that_is_preempted_is_scored_once() -> None:
    """X26, part: parts that are computed again don't count twice."""
    model, rng = random_model(), random.Random(5)
    prompts = [[rng.randrange(model.config.vocab_size) for _ in range(30)] for _ in range(4)]
    config = EngineConfig(SchedulerConfig(max_step_tokens=12, max_rows=12, headroom_tokens=0))
    engine = engine_over(model.forward(num_blocks=22), config=config)
    commands = [
        Generate(f"{i}", pack_tokens(p), Limits(24), prompt_logprobs=1)
        for i, p in enumerate(prompts)
    ]
    updates = run(engine, *commands)
    assert engine.stats().sched.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        told = [update.prompt_logprobs for update in updates[f"{i}", 0] if update.prompt_logprobs]
        assert len(told) == 1
        same(told[0], scored(plain_logits(model, prompt), prompt, 1))


@pytest.mark.parametrize("drafters", ["off", "prompt"])
def test_the_token_that_ends_an_answer_is_told(drafters: Any) -> None:
    """X26, part: beside the text, with its log-probability, drawn plainly or behind a draft."""
    model = random_model()
    config = EngineConfig(speculation=SpeculationConfig(drafters=drafters))
    engine = engine_over(model.forward(), config=config)
    prompt = [1, 2, 3, 4] * 4
    sampling = Sampling(logprobs=2)
    free = Limits(12, ignore_eos=True)
    whole = [
        token
        for update in run(engine, Generate("free", pack_tokens(prompt), free))["free", 0]
        for token in update.tokens
    ]
    stop = whole[-1]
    num = whole.index(stop)
    limits = Limits(40, (stop,), ignore_eos=True)
    for request in (
        Generate("stopped", pack_tokens(prompt), limits, sampling),
        Fork("forked", "free.0", (pack_tokens([5]),), limits, sampling),
    ):
        *_, last = run(engine, request)[request.request, 0]
        if last.finish == "length":
            assert last.end_token is None
            continue
        token, report = last.end_token
        assert token == stop
        assert report is not None
        assert len(report[1]) == 2
        if request.request == "stopped":
            plain = torch.log_softmax(plain_logits(model, [*prompt, *whole[:num]])[-1], -1)
            assert report[0] == pytest.approx(float(plain[stop]), abs=1e-4)
            assert last.boundary == len(prompt) + num
