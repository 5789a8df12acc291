"""Constrained answers that were cut off go on inside their grammar; the real model's as well."""

import json
from pathlib import Path

import pytest
from msgspec import structs

from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Grammar, Limits, Sampling, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.model.loading.config_json import read_config
from mallee.worker.model.runner import TorchForward, load
from mallee.worker.model.sampling.grammar import TokenGrammars
from mallee.worker.records import EngineConfig
from support.cutting import check_cuts, check_forks, play
from support.grammar_lab import Lab

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 2000},
        "tags": {"type": "array", "items": {"enum": ["x", "größe", "🌳"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "json_object": Grammar("json_object"),
    "regex": Grammar("regex", r"[A-Z][a-z]{1,6}( [A-Z][a-z]{1,6}){0,2}(é|🌳){2}"),
    "choice": Grammar("choice", json.dumps(["yes", "yes, but", "two\nlines", "größe 🌳"])),
    "lark": Grammar("lark", 'start: sum\nsum: N | "(" sum ("+" | "-") N ")"\nN: /[1-9][0-9]?/'),
}
TEXT = [504, 3575, 282, 4649, 314, 260, 1343, 28, 284, 357, 418]  # of SmolLM2
LIMITS = Limits(20, ignore_eos=True)
NUM_BLOCKS, BLOCK = 64, 16
WAYS = {
    "greedy": Sampling(),
    "sampled": Sampling(1.0, seed=12, top_p=0.95),
    "penalised": Sampling(0.8, seed=3, repetition_penalty=1.2, frequency_penalty=0.4),
}


@pytest.mark.parametrize("max_tokens", [7, 60])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_constrained_answer_goes_on_inside_its_grammar(
    lab: Lab, kind: str, way: str, max_tokens: int
) -> None:
    """X4, part, D9: after any token, also in the middle of a character; then its forks agree."""
    text, sampling = lab.tokenizer.encode("An answer:").ids, WAYS[way]
    whole = Generate("r", pack_tokens(text), Limits(max_tokens), sampling, grammar=GRAMMARS[kind])
    engine = lab.make_engine()
    ended = play(engine, whole)["r", 0]
    check_cuts(lab.make_engine, ended, whole, text)
    check_forks(lab.make_engine, engine, ended, whole, text, sampling)


def test_what_was_taken_in_does_not_compile_a_grammar_again(lab: Lab) -> None:
    """D9: the cache is asked for the grammar alone."""
    engine, grammar = lab.make_engine(), Grammar("regex", "[ab]{9}")
    tokens = lab.tokenizer.encode("ab").ids
    before = len(lab.grammars._cache)
    for consumed in range(len(tokens) + 1):
        text = [9, *tokens[:consumed]]
        own = Grammar(grammar.kind, grammar.source, consumed)
        command = Generate(f"r{consumed}", pack_tokens(text), Limits(30), grammar=own)
        engine.prepare(command)
        assert play(engine, command)[f"r{consumed}", 0].last.finish == "stop"
    assert len(lab.grammars._cache) == before + 1


class RealModel:
    """SmolLM2 in float32, loaded once; every engine has KV memory of its own."""

    def __init__(self, path: Path) -> None:
        self._config = read_config(path)
        self._first = load(path, num_blocks=1, dtype="float32")
        spec = structs.replace(self._first.spec, max_model_len=NUM_BLOCKS * BLOCK)
        self._spec = spec
        self._grammars = TokenGrammars(path / "tokenizer.json", spec.vocab_size, spec.eos_token_ids)

    def make_engine(self) -> Engine:
        forward = TorchForward(
            self._config, self._first.decoder.weights, self._spec, num_blocks=NUM_BLOCKS
        )
        return Engine(
            forward,
            config=EngineConfig(),
            clock=lambda: 0.0,
            worker=WorkerId("w0"),
            incarnation=Incarnation(1),
            structures=self._grammars,
        )


@pytest.fixture(scope="module")
def real_model(smollm2: Path) -> RealModel:
    return RealModel(smollm2)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("way", ["greedy", "sampled", "json_schema"])
def test_the_real_model_goes_on_as_if_uncut(real_model: RealModel, way: str) -> None:
    """X4, part: in float32, cut here and there; then forks of what is left agree."""
    sampling = Sampling() if way == "greedy" else Sampling(1.0, seed=5, logprobs=2)
    grammar = GRAMMARS.get(way)
    whole = Generate("r", pack_tokens(TEXT), LIMITS, sampling, grammar=grammar)
    engine = real_model.make_engine()
    ended = play(engine, whole)["r", 0]
    check_cuts(real_model.make_engine, ended, whole, TEXT, (1, 9))
    check_forks(real_model.make_engine, engine, ended, whole, TEXT, sampling)


@pytest.mark.model
@pytest.mark.slow
def test_each_branch_of_the_real_model_goes_on_by_itself(real_model: RealModel) -> None:
    """X4, part: four branches in one batch, then each alone."""
    sampling = Sampling(0.9, seed=6, top_p=0.9)
    whole = Generate("r", pack_tokens(TEXT), LIMITS, sampling, 4)
    answers = play(real_model.make_engine(), whole)
    for i in range(4):
        own = structs.replace(whole, n=1, first_branch=i)
        check_cuts(real_model.make_engine, answers["r", i], own, TEXT, (11,))
