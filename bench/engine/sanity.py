"""Sanity of models: the engine's features one after the other, each with the answers of the plainest engine.

    python -m bench.engine.sanity [--models llama,qwen3,gemma3_text] [--phases plain,...]

A family's name is that of a tiny random model; anything else is a checkpoint, as `mallee serve --model` takes
it. All compute in float32 on the CPU. A phase has one feature more than the one before it, so that a fault is
named by the first that differs; the last one drafts, and each request tells how many of its drafts were
accepted. The last line is one JSON object. Exit status 1: some answer differs from that of the first phase.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from bench.doubles.random_model import random_model
from bench.measure import machine
from bench.mocker.policies import Fcfs
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command, Fork, Generate, Limits, Prefill, Sampling, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.model.config import FAMILIES
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import TorchForward, load
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig

LENGTH = 256  # of the context that is served
SLOTS = 16 * LENGTH
BLOCK_SIZE = 16
MakeForward = Callable[[int], TorchForward]  # by the size of a block


class Answers(NamedTuple):
    """Tokens by branch; by request the tokens that were drafted and those of them that it drew."""

    tokens: dict[str, list[int]]
    drafted: Counter[str]
    accepted: Counter[str]


class Phase(NamedTuple):
    """An engine, over memory in pages or in blocks of a whole sequence, and how rows' reads are shared."""

    engine: EngineConfig
    paged: bool = True
    tree_attention: bool = False


def phases() -> dict[str, Phase]:
    """From an engine with all features off to one with all on."""
    off = SchedulerConfig(LENGTH, chunked=False, continuous=False, order=Fcfs(), gang=False)
    plain = EngineConfig(off, 0, prefix_cache=False, overlap=False)
    continuous = replace(plain, scheduler=replace(off, continuous=True))
    chunked = replace(continuous, scheduler=SchedulerConfig(64))
    prefix = replace(chunked, prefix_cache=True, overlap=True, max_answer_capsules=64)
    drafting = replace(prefix, speculation=SpeculationConfig("auto"))
    return {
        "plain": Phase(plain, paged=False),
        "continuous": Phase(continuous, paged=False),
        "paged": Phase(continuous),
        "chunked": Phase(chunked),
        "prefix": Phase(prefix),
        "tree": Phase(prefix, tree_attention=True),
        "speculation": Phase(drafting, tree_attention=True),
    }


def maker(model: str) -> MakeForward:
    """Makes what computes `model`, once for each size of blocks. Raises ModelError."""
    if model in FAMILIES:
        tiny = random_model(model, max_position_embeddings=LENGTH)
        return cache(lambda size: tiny.forward(num_blocks=SLOTS // size, block_size=size))
    path = resolve_model(model)
    made = partial(load, path, dtype="float32", max_model_len=LENGTH)
    return cache(lambda size: made(num_blocks=SLOTS // size, block_size=size))


def waves(vocab_size: int) -> Iterator[list[Command]]:
    """Prompts with a common beginning and a text that repeats itself; then forks of a capsule."""
    rng, limits = random.Random(9), Limits(24, ignore_eos=True)
    common = [rng.randrange(3, vocab_size) for _ in range(50)]
    texts = [[*common, *(rng.randrange(3, vocab_size) for _ in range(n))] for n in (1, 9, 30)]
    texts.append(common[:12] * 6)
    yield [
        Prefill("p", pack_tokens(common)),
        *(
            Generate(
                f"g{i}", pack_tokens(text), limits, Sampling(float(i == 1), seed=i), n=1 + i % 2
            )
            for i, text in enumerate(texts)
        ),
    ]
    yield [
        Fork("f", "p.0", (b"", pack_tokens([7]), pack_tokens([8, 9, 10])), limits, Sampling()),
        Fork("h", "p.0", (b"",) * 4, limits, Sampling(temperature=1.0, seed=4)),
    ]


def play(forward: TorchForward, phase: Phase) -> Answers:
    """On an engine of its own. Raises RuntimeError on an error."""
    forward.shares_reads = phase.tree_attention
    engine = Engine(
        forward,
        config=phase.engine,
        clock=lambda: 0.0,
        worker=WorkerId("w0"),
        incarnation=Incarnation(0),
    )
    found = Answers({}, Counter(), Counter())
    for commands in waves(forward.spec.vocab_size):
        for command in commands:
            engine.submit(command, "sanity")
        while engine.has_work:
            for frame in engine.step().frames.values():
                for update in frame.updates:
                    if update.error is not None:
                        raise RuntimeError(f"{update.request} failed: {update.error}")
                    name = f"{update.request}.{update.branch}"
                    found.tokens.setdefault(name, []).extend(update.tokens)
                    drafted, accepted = update.drafts or (0, 0)
                    found.drafted[update.request] += drafted
                    found.accepted[update.request] += accepted
        engine.check()
    engine.close()
    return found


def examine(make: MakeForward, wanted: Sequence[str]) -> dict[str, Any]:
    """By phase the branches that differ from those of the first, and the drafts of each request.

    Prints a line for each phase.
    """
    found: dict[str, Any] = {"differ": {}, "requests": {}}
    every, plain = phases(), None
    for name in wanted:
        phase = every[name]
        answers = play(make(BLOCK_SIZE if phase.paged else LENGTH), phase)
        plain = plain or answers
        differ = found["differ"][name] = [
            branch for branch, tokens in answers.tokens.items() if tokens != plain.tokens[branch]
        ]
        print(f"  {name:<12} {'differs in ' + ', '.join(differ) if differ else 'same'}", flush=True)
        for request, num in answers.drafted.items():
            if num:
                found["requests"][request] = {"drafted": num, "accepted": answers.accepted[request]}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=lambda s: s.split(","), default=list(FAMILIES))
    parser.add_argument("--phases", type=lambda s: s.split(","), default=list(phases()))
    args = parser.parse_args(argv)
    models = {}
    for model in args.models:
        print(model)
        found = models[model] = examine(maker(model), args.phases)
        for request, drafts in found["requests"].items():
            print(
                f"  request {request}: {drafts['accepted']} of {drafts['drafted']} drafts accepted"
            )
    has_failed = any(any(found["differ"].values()) for found in models.values())
    print(json.dumps({"models": models, "has_failed": has_failed, **machine()}))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
