"""Grammars on engines with random models: whatever the model prefers, the text is valid."""

import json
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from mallee.protocol.errors import InvalidParameter
from mallee.protocol.messages import (
    MAX_GRAMMAR_NBYTES,
    Fork,
    Generate,
    Grammar,
    Limits,
    Sampling,
    Update,
    pack_tokens,
)
from mallee.worker.forward import num_words
from mallee.worker.model.sampling import grammar as grammars
from mallee.worker.model.sampling.grammar import TokenGrammars
from support.cutting import check_cuts, check_forks, play
from support.grammar_lab import Lab

WORD = {"type": "string", "maxLength": 8}
SMALL = {"type": "integer", "minimum": -20, "maximum": 2000}


def thing(required: Sequence[str] = (), more: Any = False, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": more,
    }


SCHEMAS: dict[str, Any] = {
    "three fields": thing(
        name=WORD, age=SMALL, tags={"type": "array", "items": WORD, "maxItems": 3}
    ),
    "optional fields": thing(["a"], a=SMALL, b=WORD, c={"type": "boolean"}),
    "nested": thing(a=thing(b=thing(c=SMALL), d=WORD)),
    "a list of things": {"type": "array", "items": thing(k=WORD), "minItems": 1, "maxItems": 3},
    "enums": thing(color={"enum": ["red", "green", "blue"]}, n={"enum": [1, 2.5, None, "x"]}),
    "any of": {"anyOf": [thing(a=SMALL), thing(b=WORD), {"type": "null"}]},
    "one of, by a tag": {
        "oneOf": [
            thing(kind={"const": "cat"}, lives=SMALL),
            thing(kind={"const": "dog"}, name=WORD),
        ]
    },
    "references": {
        **thing(home={"$ref": "#/$defs/place"}, work={"$ref": "#/$defs/place"}),
        "$defs": {"place": thing(city=WORD, zip={"type": "string", "pattern": "^[0-9]{5}$"})},
    },
    "a recursive tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": thing(
                v={"type": "boolean"}, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
            )
        },
    },
    "patterns": thing(
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        hex={"type": "string", "pattern": "^(0x)?[0-9a-f]{1,6}$"},
    ),
    "free keys": {"type": "object", "additionalProperties": SMALL, "maxProperties": 2},
    "long names and unicode": thing(
        **{"größe": SMALL, "🌳": {"enum": ["ä", "🌲"]}, 'quote"d\\': {"type": "boolean"}}
    ),
}
REGEXES = [
    r"[a-z]{3,9}",
    r"[A-Z][a-z]{1,6}( [A-Z][a-z]{1,6}){0,2}",
    r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,3})?",
    r"(a|b)*c{2,5}[^abc]",
    r"(é|🌳|ß){2,6}",
    r'"([^"\\\x00-\x1f]|\\["\\/bfnrt]){0,12}"',
]


LARK = 'start: sum\nsum: N | "(" sum ("+" | "-") N ")"\nN: /[1-9][0-9]?/'


def validate(text: str, schema: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_valid_under_every_schema_also_when_forked_in_mid_object(
    lab: Lab, name: str
) -> None:
    """D9, I16, part: 100 % of branches, then 100 % of the children of branches cut inside their object."""
    schema = SCHEMAS[name]
    grammar = Grammar("json_schema", json.dumps(schema))
    whole = lab.generate(grammar, 8, seed=1)
    for tokens, last in whole:
        assert last.finish == "stop"
        validate(lab.text(tokens), schema)
    shortest = min(len(tokens) for tokens, _ in whole)
    cuts = lab.generate(grammar, 3, tokens=max(1, shortest // 2), seed=2)
    num_texts = num_cuts = 0
    for i, (start, last) in enumerate(cuts):
        assert last.capsule is not None
        if last.finish == "stop":
            continue
        children = lab.run(
            Fork(
                f"f{i}",
                last.capsule,
                (b"",) * 4,
                Limits(600),
                Sampling(temperature=1.0, seed=9 + i),
                grammar=Grammar("inherit"),
            )
        )
        texts = [lab.text(start + tokens) for tokens, _ in children]
        assert all(end.finish == "stop" for _, end in children)
        for text in texts:
            validate(text, schema)
        num_texts += len(set(texts))
        num_cuts += 1
    assert num_texts > num_cuts, "children of each cut all say the same"


@pytest.mark.parametrize("pattern", REGEXES)
def test_answers_match_every_pattern_also_when_forked_in_the_middle(lab: Lab, pattern: str) -> None:
    """D9, I16, part: regular expressions, tokens of several characters, characters of several tokens."""
    grammar = Grammar("regex", pattern)
    for tokens, last in lab.generate(grammar, 12, seed=3):
        assert last.finish == "stop"
        assert re.fullmatch(pattern, lab.text(tokens)), lab.text(tokens)
    ((start, last),) = lab.generate(grammar, 1, tokens=1, seed=4)
    if last.finish == "length" and last.capsule is not None:
        hot, more = Sampling(1.0, seed=5), Grammar("inherit")
        for tokens, _ in lab.run(
            Fork("f", last.capsule, (b"",) * 6, Limits(99), hot, grammar=more)
        ):
            assert re.fullmatch(pattern, lab.text(start + tokens))


def test_choices_are_taken_as_they_are_written(lab: Lab) -> None:
    """D9: quotes, backslashes, newlines, other alphabets; every choice is reached."""
    choices = ["yes", "no", 'say "x"', "back\\slash", "two\nlines", "größe 🌳", "yes, but"]
    grammar = Grammar("choice", json.dumps(choices))
    found = {lab.text(t) for seed in range(4) for t, _ in lab.generate(grammar, 32, seed=seed)}
    assert found == set(choices)


def test_json_object_is_any_object_and_a_lark_grammar_is_kept(lab: Lab) -> None:
    """D9: "json_object" until it is closed or cut; Lark with rules that call each other."""
    for tokens, last in lab.generate(Grammar("json_object"), 8, tokens=80, seed=6):
        text = lab.text(tokens)
        assert text.startswith("{")
        assert last.finish == "length" or isinstance(json.loads(text), dict)
    gbnf = 'root ::= sum\nsum ::= [1-9] [0-9]? | "(" sum ("+" | "-") [1-9] [0-9]? ")"'
    for source in (LARK, gbnf):
        for tokens, last in lab.generate(Grammar("lark", source), 8, tokens=300, seed=7):
            assert last.finish == "stop"
            assert abs(eval(lab.text(tokens))) < 10_000


BAD = {
    "json_schema": ["", "not json", "[1]", '{"type": "foo"}', "false", '{"$ref": "#/nowhere"}',
                    '{"$ref": "http://example.com/x"}', "[" * 100_000, '{"a"}, {"lark_grammar": "x"',
                    json.dumps({"enum": ["x" * MAX_GRAMMAR_NBYTES]})],
    "regex": ["[a-z", "(?=x)y", r"[^\s\S]", "(a"],
    "lark": ["start: foo", "", 'begin: "x"'],
    "choice": ["", "[]", '["a", 1]', '{"a": 1}', '[""]'],
    "json_object": ["{}"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "source"), [(k, s) for k, all_ in BAD.items() for s in all_])
def test_bad_grammars_are_refused_with_their_reason(lab: Lab, kind: Any, source: str) -> None:
    """D9: InvalidParameter names the field, shortly; the second time without another compilation."""
    for _ in "ab":
        with pytest.raises(InvalidParameter) as caught:
            lab.grammars.compile(Grammar(kind, source))
    assert caught.value.fields["param"] == "grammar"
    assert 0 < len(caught.value.fields["remedy"]) <= 400


def chain(n: int) -> str:
    """Rules that end `n` rules deep."""
    rules = [f'r{i}: "a" r{i + 1} | "b"' for i in range(n)]
    return "\n".join(["start: r0", *rules, f'r{n}: "c"'])


def references(n: int) -> str:
    """Schemas, each of which refers to the next."""
    defs: dict[str, Any] = {
        f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(n)
    }
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{n}": {}}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("lark", chain(2500)), "out of memory or stack"),
        (Grammar("json_schema", references(1000)), "out of memory or stack"),
        (
            Grammar(
                "lark", "start: T\nT: " + " & ".join(f"/(.{{{n}}})*/" for n in (17, 19, 23, 29, 31))
            ),
            "more than 1 s",
        ),
    ],
)
def test_a_grammar_that_would_end_or_stall_the_process_is_refused(
    lab: Lab, grammar: Grammar, reason: str
) -> None:
    """Under llguidance's own limits the first two overflow the stack, the third takes minutes."""
    begin = time.process_time()
    for _ in "ab":
        with pytest.raises(InvalidParameter, match=reason):
            lab.grammars.compile(grammar)
    assert time.process_time() - begin < 0.5
    lab.grammars.compile(Grammar("regex", f"after {reason}"))


@pytest.mark.slow
def test_the_end_of_a_worker_in_the_midst_of_a_grammar_leaves_no_traceback_in_its_log(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    lab.grammars.compile(Grammar("regex", "a{3}|the midst"))
    assert lab.grammars._trial is not None
    lab.grammars._trial.close()
    child = lab.grammars._trial._started()
    assert child.stdin is not None
    child.stdin.write(b'{"grammar": "a cli')
    child.stdin.close()
    assert child.wait(10) == 0, "a thread of it has failed"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "source",
    [
        'start: e\ne: e e | e "+" e | "a" | ',
        'start: a+\na: b b b b b\nb: c*\nc: "x"? "y"? | ',
        "start: T\nT: ~(/(.*a.{15}.*)/) & /[ab]*/",
    ],
)
def test_a_mask_beyond_the_limits_ends_its_branch_and_no_other(lab: Lab, source: str) -> None:
    """Each of these takes up to 600 ms a step under llguidance's own limits."""
    lab.restart()
    prompt = pack_tokens([1, 2, 3])
    sampling = Sampling(temperature=1.0, seed=3)
    free = Generate("free", prompt, Limits(200, ignore_eos=True), sampling)
    bad = Generate("bad", prompt, Limits(200, min_tokens=200), sampling)
    lab.engine.submit(free, "g")
    lab.engine.submit(msgspec.structs.replace(bad, grammar=Grammar("lark", source)), "g")
    ends: dict[str, Update] = {}
    while lab.engine.has_work:
        for frame in lab.engine.step().frames.values():
            ends |= {u.request: u for u in frame.updates if u.finish is not None}
    assert ends["free"].finish == "length"
    assert ends["bad"].error is not None
    assert ends["bad"].error[0] == "grammar_failed"


def test_a_model_without_a_tokenizer_or_an_end_says_so(lab: Lab, tmp_path: Path) -> None:
    grammar = Grammar("regex", "a")
    with pytest.raises(InvalidParameter, match=r"no tokenizer\.json"):
        TokenGrammars(tmp_path / "tokenizer.json", 100, [0]).compile(grammar)
    with pytest.raises(InvalidParameter, match="no end-of-text token"):
        TokenGrammars(lab.grammars._path, lab.vocab_size, []).compile(grammar)
    with pytest.raises(InvalidParameter, match="vocab size too small"):
        TokenGrammars(lab.grammars._path, 20, [0]).compile(grammar)


def test_added_tokens_without_a_logit_are_left_out(lab: Lab, tmp_path: Path) -> None:
    """I1: Gemma 3's text models: the tokenizer has one token for images more than they have rows."""
    size = lab.tokenizer.get_vocab_size()
    content = json.loads(lab.tokenizer.to_str())
    image = {**content["added_tokens"][0], "id": size, "content": "<image>"}
    content["added_tokens"].append(image)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    small = TokenGrammars(path, size, [lab.eos])
    first = np.zeros((1, num_words(size)), dtype=np.int32)
    small.fill((small.compile(Grammar("regex", "[a-z<]{3}")),), first)
    same = np.zeros_like(first)
    lab.grammars.fill((lab.grammars.compile(Grammar("regex", "[a-z<]{3}")),), same)
    assert first.any()
    assert (first == same).all()


def test_a_grammar_is_compiled_once_while_it_is_among_the_newest(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED", 3)
    fresh = TokenGrammars(lab.grammars._path, lab.vocab_size, [lab.eos])
    kinds = [Grammar("regex", f"{c}+") for c in "abcd"]
    first, second, third = (fresh.compile(kind) for kind in kinds[:3])
    assert fresh.compile(kinds[0]) is first
    fourth = fresh.compile(kinds[3])  # b goes
    assert fresh.compile(kinds[2]) is third
    assert fresh.compile(kinds[3]) is fourth
    assert fresh.compile(kinds[0]) is first
    assert fresh.compile(kinds[1]) is not second
    fresh.check()


def test_a_slow_compilation_holds_up_nobody_who_has_a_grammar(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I18: an engine step that needs a compiled grammar never waits for another's compilation."""
    fresh = TokenGrammars(lab.grammars._path, lab.vocab_size, [lab.eos])
    ready = fresh.compile(Grammar("regex", "a"))
    begun, may_end = threading.Event(), threading.Event()
    compiled: list[Grammar] = []

    def slow(grammar: Grammar) -> Any:
        compiled.append(grammar)
        begun.set()
        assert may_end.wait(10)
        return ready

    monkeypatch.setattr(fresh, "_compile", slow)
    with ThreadPoolExecutor(2) as pool:
        askers = [pool.submit(fresh.compile, Grammar("regex", "b")) for _ in "ab"]
        assert begun.wait(10)
        assert fresh.compile(Grammar("regex", "a")) is ready
        may_end.set()
        assert [asker.result() for asker in askers] == [ready, ready]
    assert len(compiled) == 1


def test_a_token_that_is_not_allowed_breaks_a_fork_and_not_its_parent(lab: Lab) -> None:
    start = lab.grammars.compile(Grammar("regex", "abc"))
    child = start.fork()
    child.advance(lab.tokenizer.encode("x").ids[0])
    assert child.error
    assert child.is_stopped
    assert not start.error
    assert not start.is_accepting


# Cut off

GRAMMARS = {
    "json_schema": Grammar("json_schema", json.dumps(SCHEMAS["long names and unicode"])),
    "json_object": Grammar("json_object"),
    "regex": Grammar("regex", r"[A-Z][a-z]{1,6}( [A-Z][a-z]{1,6}){0,2}(é|🌳){2}"),
    "choice": Grammar("choice", json.dumps(["yes", "yes, but", "two\nlines", "größe 🌳"])),
    "lark": Grammar("lark", LARK),
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
    """X4, part, D9: after any token, also in the middle of a character; then its forks agree.

    What was taken in is no part of the grammar that is compiled.
    """
    text, sampling = lab.tokenizer.encode("An answer:").ids, WAYS[way]
    whole = Generate("r", pack_tokens(text), Limits(max_tokens), sampling, grammar=GRAMMARS[kind])
    engine = lab.make_engine()
    engine.prepare(whole)
    ended = play(engine, whole)["r", 0]
    check_cuts(lab.make_engine, ended, whole, text)
    assert not lab.grammars.knows(msgspec.structs.replace(GRAMMARS[kind], consumed=1))
    check_forks(lab.make_engine, engine, ended, whole, text, sampling)
