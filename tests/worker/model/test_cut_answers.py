"""Constrained answers that were cut off go on inside their grammar."""

import json

import pytest

from mallee.protocol.messages import Generate, Grammar, Limits, Sampling, pack_tokens
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
WAYS = {
    "greedy": Sampling(),
    "sampled": Sampling(1.0, seed=12, top_p=0.95),
    "penalised": Sampling(0.8, seed=3, repetition_penalty=1.2, frequency_penalty=0.4),
}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "max_tokens"), [("greedy", 7), ("sampled", 24), ("penalised", 7)])
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
