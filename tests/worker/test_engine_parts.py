"""Requests that are parts of larger ones: their branches draw what they would draw in the whole."""

import time

import pytest
import torch

from mallee.protocol.ids import Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import Fork, Generate, Limits, Prefill, Sampling, pack_tokens
from mallee.testing.random_model import random_model
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig

MODEL = random_model("llama", 3)
PROMPT = [(7 * i) % MODEL.config.vocab_size for i in range(30)]
LIMITS = Limits(6, ignore_eos=True)
HOT = Sampling(temperature=1.0, seed=5)


def answers(*commands: Generate | Fork | Prefill) -> dict[tuple[str, int], list[int]]:
    """Tokens by branch, on an engine with the tiny real model; the commands one after the other."""
    engine = Engine(
        MODEL.forward(num_blocks=128, block_size=4),
        config=EngineConfig(),
        clock=time.monotonic,
        worker=WorkerId("w0"),
        incarnation=Incarnation(0),
    )
    found: dict[tuple[str, int], list[int]] = {}
    for command in commands:
        engine.submit(command, "g")
        while engine.has_work:
            for frame in engine.step().frames.values():
                for update in frame.updates:
                    assert update.error is None
                    found.setdefault((update.request, update.branch), []).extend(update.tokens)
    return found


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_parts_of_a_generate_draw_what_the_whole_draws() -> None:
    """D3, X6, part: on a real attention path, sampled."""
    tokens = pack_tokens(PROMPT)
    whole = answers(Generate("r", tokens, LIMITS, HOT, 5))
    head = answers(Generate("r", tokens, LIMITS, HOT, 2))
    tail = answers(Generate("r", tokens, LIMITS, HOT, 3, first_branch=2))
    for i in range(5):
        assert whole["r", i] == (head["r", i] if i < 2 else tail["r", i - 2])
    assert len({tuple(each) for each in whole.values()}) > 1


def test_a_capsule_computed_elsewhere_forks_like_the_first_one() -> None:
    """D3, X6, part: prefill + fork of the second half, on an engine that never saw the first."""
    suffixes = tuple(pack_tokens([i] * (i % 3)) for i in range(6))
    make = Prefill("p", pack_tokens(PROMPT))
    capsule = capsule_id(RequestId("p"))
    whole = answers(make, Fork("r", capsule, suffixes, LIMITS, HOT))
    other = answers(make, Fork("r", capsule, suffixes[2:], LIMITS, HOT, first_branch=2))
    for i in range(2, 6):
        assert whole["r", i] == other["r", i - 2]
