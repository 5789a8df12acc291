"""Random lives of constrained branches in a small pool, against one linear text at a time."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import (
    Cancel,
    Fork,
    Generate,
    Grammar,
    Limits,
    Release,
    Sampling,
    pack_tokens,
)
from mallee.testing.forward import _digest, _slots, draw_token
from mallee.testing.structures import MockStructures
from mallee.worker.forward import Draw, num_words
from support.examples import examples

VOCAB, EOS = 64, 63
STRUCTURES = MockStructures(VOCAB, (EOS,))


def linear(
    text: Sequence[int], matcher: Any, limits: Limits, sampling: Sampling, seed: int
) -> tuple[list[int], Any]:
    """The tokens of one undisturbed branch after `text`, and its matcher at the end."""
    tokens, out = list(text), []
    sets = np.zeros((1, num_words(VOCAB)), dtype=np.int32)
    matcher = matcher.fork()
    while len(out) < limits.max_tokens:
        STRUCTURES.fill([matcher], sets)
        banned = (EOS,) if len(out) < limits.min_tokens else ()
        digest = _digest(_slots(as_tokens(tokens), 0))
        draw = Draw(digest, sampling, seed, len(tokens), None, sets[0], banned)
        token = draw_token(VOCAB, draw)
        if token == EOS:
            break
        tokens.append(token)
        out.append(token)
        matcher.advance(token)
        if matcher.is_stopped:
            break
    return out, matcher


class Life:
    """Sends random commands to a bench, and knows what each branch has to say."""

    def __init__(self, bench: Any, rng: random.Random) -> None:
        self.bench = bench
        self.rng = rng
        self.wanted: dict[tuple[str, int], tuple[list[int], Any, list[int]]] = {}
        self.cancelled: set[str] = set()
        paths = [[rng.randrange(60) for _ in range(rng.randint(1, 12))] for _ in range(8)]
        paths += [[*paths[0], *paths[1]], paths[2][:1]]
        self.grammar = Grammar("choice", json.dumps(paths))

    def options(self) -> tuple[Limits, Sampling]:
        temperature = self.rng.choice([0.0, 1.0])
        limits = Limits(self.rng.randint(1, 9), min_tokens=self.rng.choice([0, 0, 1]))
        return limits, Sampling(temperature, seed=self.rng.randrange(1 << 60))

    def expect(self, name: str, texts: list[list[int]], matchers: list[Any], options: Any) -> None:
        limits, sampling = options
        for i, (text, matcher) in enumerate(zip(texts, matchers, strict=True)):
            seed = branch_seed(sampling.seed, i)
            out, end = linear(text, matcher, limits, sampling, seed)
            self.wanted[name, i] = (out, end, [*text, *out])

    def generate(self, name: str) -> None:
        prompt = [self.rng.randrange(60) for _ in range(self.rng.randint(1, 14))]
        n, options = self.rng.randint(1, 4), self.options()
        start = STRUCTURES.compile(self.grammar)
        self.bench.submit(Generate(name, pack_tokens(prompt), *options, n, grammar=self.grammar))
        self.expect(name, [prompt] * n, [start] * n, options)

    def fork(self, name: str) -> None:
        """Of a finished branch, inside its text if that goes on."""
        ended = {
            key: answer.last.capsule
            for key, answer in self.bench.answers.items()
            if answer.last.capsule is not None
        }
        if not ended:
            return
        key = self.rng.choice(sorted(ended))
        _, matcher, text = self.wanted[key]
        options, suffixes = self.options(), []
        for _ in range(self.rng.randint(1, 3)):
            path = self.rng.choice([p for p in matcher.paths if p] or [()])
            suffixes.append(list(path[: self.rng.choice([0, 0, 1])]))
        grammar = Grammar("inherit")
        if matcher.is_stopped or self.rng.random() < 0.3:
            grammar, matcher = self.grammar, STRUCTURES.compile(self.grammar)
            starts = [matcher] * len(suffixes)
        else:
            starts = [matcher.fork() for _ in suffixes]
            for start, suffix in zip(starts, suffixes, strict=True):
                for token in suffix:
                    start.advance(token)
        packed = tuple(map(pack_tokens, suffixes))
        self.bench.submit(Fork(name, ended[key], packed, *options, grammar=grammar))
        self.expect(name, [[*text, *suffix] for suffix in suffixes], starts, options)

    def disturb(self) -> None:
        """Cancel a request or forget a capsule."""
        name = self.rng.choice([name for name, _ in self.wanted] or ["nobody"])
        if self.rng.random() < 0.5:
            self.cancelled.add(name)
            self.bench.submit(Cancel(name))
        else:
            self.bench.submit(Release(f"{name}.0"), gateway="other")

    def check(self) -> None:
        for key, (out, _, _) in self.wanted.items():
            answer = self.bench.answers.get(key) or self.bench.answers[key[0], -1]
            if answer.last.finish in ("stop", "length"):
                assert answer.tokens == out, key
            else:
                gone = answer.error is not None and answer.error.code == "capsule_not_found"
                assert gone or key[0] in self.cancelled, answer.last
                assert answer.tokens == out[: len(answer.tokens)]


@settings(examples(60), derandomize=True)
@given(seed=st.integers(0, 1 << 30), blocks=st.sampled_from([16, 24, 200]))
def test_random_constrained_trees_say_what_linear_texts_say(
    make_bench: Callable[..., Any], seed: int, blocks: int
) -> None:
    """D9, D19, F1, part: forks in mid-text, suffixes, preemption, cancels: every token as if alone."""
    rng = random.Random(seed)
    bench = make_bench(num_blocks=blocks, eos=(EOS,), max_rows=6, max_answer_capsules=8)
    life = Life(bench, rng)
    for i in range(12):
        rng.choice([life.generate, life.fork, life.fork])(f"r{i}")
        if rng.random() < 0.2:
            life.disturb()
        for _ in range(rng.randint(0, 6)):
            bench.step()
    bench.run()
    life.check()
    is_all_cancelled = {name for name, _ in life.wanted} <= life.cancelled
    assert is_all_cancelled or any(answer.tokens for answer in bench.answers.values())
