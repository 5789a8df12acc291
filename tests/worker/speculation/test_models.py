"""Speculation over tiny real models of each family: the same tokens, and the same KV but for rounding."""

import random
from typing import Any

import pytest
import torch

from mallee.protocol.messages import Fork, Generate, Grammar, Limits, Prefill, Sampling, pack_tokens
from mallee.testing.random_model import random_model
from mallee.testing.structures import MockStructures
from mallee.worker.engine import Engine
from mallee.worker.model.tolerance import TOLERANCES
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig
from support.driving import engine_over
from support.speculating import Kind, Knowing, Teller, draft_by

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, SIZE = 128, 4
WAYS = {
    "greedy": Sampling(),
    "sampled": Sampling(0.8, seed=5, logprobs=2),
    "penalised": Sampling(0.7, seed=6, repetition_penalty=1.2, presence_penalty=0.4, top_p=0.9),
}


def make_engine(family: str, *, speculates: bool) -> Engine:
    return engine_over(
        random_model(family, 3).forward(num_blocks=300, block_size=SIZE),
        config=EngineConfig(
            SchedulerConfig(64, 16), speculation=SpeculationConfig("auto" if speculates else "off")
        ),
        structures=MockStructures(VOCAB, ()),
    )


def play(engine: Engine) -> Teller:
    """Prompts, forks in mid-block with and without suffixes, and an answer under a grammar, all at once."""
    rng = random.Random(3)
    teller = Teller(engine)
    text = [rng.randrange(VOCAB) for _ in range(37)]
    teller.run(Prefill("p", pack_tokens(text)))
    suffixes = (b"", pack_tokens([5, 6, 7]))
    for name, sampling in WAYS.items():
        limits = Limits(24, ignore_eos=True, stop_token_ids=(3, 77))
        engine.submit(Fork(f"f-{name}", "p.0", suffixes, limits, sampling), "g")
        engine.submit(Generate(name, pack_tokens(text[:21]), limits, sampling, 2), "g")
    paths = [[rng.randrange(VOCAB) for _ in range(12)] for _ in range(4)]
    grammar = Grammar("choice", str(paths))
    teller.run(Generate("c", pack_tokens(text[5:9]), Limits(20), grammar=grammar))
    return teller


def read_kv(engine: Engine) -> Any:
    """Of the layers with full attention, all of it; of windows what is read elsewhere is no more there."""
    memory = engine._forward._memory  # type: ignore[attr-defined]

    def read(table: list[int], num: int) -> Any:
        slots = [block * SIZE + i for block in table for i in range(SIZE)][:num]
        return memory[:, slots].clone()

    return read


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["right", "mixed", "wrong"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_every_family_answers_as_without_drafts(family: str, kind: Kind) -> None:
    """I15, part, F27, part: greedy, sampled, penalised and constrained rows in one batch, beyond a window."""
    plain = make_engine(family, speculates=False)
    expected = play(plain)
    engine = make_engine(family, speculates=True)
    draft_by(engine, Knowing(kind, expected.answers(), vocab=VOCAB))
    teller = play(engine)
    atol = TOLERANCES["float32"].logits
    for name, told in expected.told().items():
        found = teller.told()[name]
        assert found._replace(logprobs=()) == told._replace(logprobs=())
        for (ours, _), (theirs, _) in zip(found.logprobs, told.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=atol)
    stats = engine.stats().speculation
    assert stats.num_drafted > 30
    if kind == "right":
        assert stats.num_accepted == stats.num_drafted
        assert teller.num_steps < 0.5 * expected.num_steps
    assert teller.stored() == expected.stored()
    kept, theirs = teller.kv(read_kv(engine)), expected.kv(read_kv(plain))
    assert kept.keys() == theirs.keys() != set()
    for name, values in kept.items():
        torch.testing.assert_close(values, theirs[name], atol=atol, rtol=atol)
