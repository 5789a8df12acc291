"""Speculation on the CPU engine: acceptance, and tokens/s beside plain decoding.

    python -m bench.engine.speculation [--model smollm2] [--tokens 160] [--rounds 3]

Loads: `repeat`, a prompt that asks for its own text again; `chat`, plain questions; `again`, one
question asked anew, greedy, by a later request. Each with 1 and 8 branches, with every choice of drafters by
turns in one process; medians over the rounds. `cpu_ms` is processor time for a token: of one thread, where
other work shares the machine, it is the figure to go by, and `speedup` is of it. Answers are compared with
those of plain decoding: a branch whose rounding differs with the shape of a batch shows in `same`. The last
line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from bench.measure import machine
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Limits, Sampling, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import TorchForward, load
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig, SpeculationName

BLOCKS: Final = 2048
DRAFTERS: Final[tuple[SpeculationName, ...]] = ("off", "prompt", "sibling", "auto")
PASSAGE: Final = (
    "def add_user(users, name, age):\n    if name in users:\n        raise KeyError(name)\n"
    "    users[name] = {'name': name, 'age': age}\n    return users[name]\n\n"
    "def remove_user(users, name):\n    if name not in users:\n        raise KeyError(name)\n"
    "    user = users[name]\n    del users[name]\n    return user\n"
)
QUESTIONS: Final = (
    "What is the capital of France, and what is it known for?",
    "Explain how rain forms.",
    "Write a short letter to a friend who has moved away.",
    "How do I boil an egg?",
    "Name three animals of Australia and say where they live.",
    "What is a prime number?",
    "Tell me a story about a lighthouse.",
    "Why is the sky blue?",
)


class Load(NamedTuple):
    """Prompts of branches that run at once; `first` is answered before, and not timed."""

    prompts: Sequence[str]
    sampling: Sampling = Sampling()
    first: Sequence[str] = ()


class Run(NamedTuple):
    """Of the branches of one load."""

    tokens_per_s: float
    cpu_ms: float
    num_steps: int
    drafted: int
    accepted: int
    answers: list[list[int]]


def loads(rows: int) -> dict[str, Load]:
    asks = [f"Repeat this program, but rename `users` to `people{i}`:\n{PASSAGE}" for i in range(8)]
    hot = Sampling(0.8, seed=7)
    return {
        "repeat": Load(asks[:rows]),
        "chat": Load(QUESTIONS[:rows]),
        "chat sampled": Load(QUESTIONS[:rows], hot),
        "again": Load(QUESTIONS[:rows], first=QUESTIONS[:rows]),
    }


def run(
    forward: TorchForward, tokenizer: Tokenizer, load: Load, drafters: SpeculationName, num: int
) -> Run:
    """One fresh engine over `forward`."""
    engine = Engine(
        forward,
        config=EngineConfig(
            SchedulerConfig(512),
            max_answer_capsules=0,
            speculation=SpeculationConfig(drafters),
        ),
        clock=time.perf_counter,
        worker=WorkerId("bench"),
        incarnation=Incarnation(1),
    )
    if load.first:
        _answers(engine, tokenizer, "first", load.first, load.sampling, num)
    before = engine.stats()
    begin, cpu = time.perf_counter(), time.process_time()
    answers = _answers(engine, tokenizer, "r", load.prompts, load.sampling, num)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    after = engine.stats()
    found, was = after.speculation, before.speculation
    return Run(
        sum(map(len, answers)) / seconds,
        1e3 * cpu / sum(map(len, answers)),
        after.num_steps - before.num_steps,
        found.num_drafted - was.num_drafted,
        found.num_accepted - was.num_accepted,
        answers,
    )


def _answers(
    engine: Engine,
    tokenizer: Tokenizer,
    name: str,
    prompts: Sequence[str],
    sampling: Sampling,
    num: int,
) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        tokens = pack_tokens(tokenizer.encode(text, add_special_tokens=False).ids)
        engine.submit(Generate(f"{name}{i}", tokens, Limits(num), sampling), "g")
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for frame in engine.step().frames.values():
            for update in frame.updates:
                answers[int(update.request.removeprefix(name))] += update.tokens
    return answers


def compare(runs: dict[SpeculationName, list[Run]]) -> dict[str, Any]:
    """Medians of each choice of drafters, and what they are beside plain decoding."""
    plain = statistics.median(each.cpu_ms for each in runs["off"])
    table: dict[str, Any] = {}
    for name, own in runs.items():
        speed, last = statistics.median(each.tokens_per_s for each in own), own[-1]
        cpu_ms = statistics.median(each.cpu_ms for each in own)
        pairs = zip(last.answers, runs["off"][-1].answers, strict=True)
        table[name] = {
            "tokens_per_s": round(speed, 1),
            "cpu_ms": round(cpu_ms, 2),
            "speedup": round(plain / cpu_ms, 2),
            "steps": last.num_steps,
            "drafted": last.drafted,
            "acceptance": round(last.accepted / last.drafted, 2) if last.drafted else None,
            "same": sum(ours == theirs for ours, theirs in pairs) / len(last.answers),
        }
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    args = parser.parse_args(argv)
    path = resolve_model(args.model)
    forward = load(path, num_blocks=BLOCKS, dtype=args.dtype, threads=args.threads)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    result: dict[str, Any] = {}
    for rows in args.rows:
        for name, each in loads(rows).items():
            runs: dict[SpeculationName, list[Run]] = {drafters: [] for drafters in DRAFTERS}
            for _ in range(args.rounds):
                for drafters, own in runs.items():
                    own.append(run(forward, tokenizer, each, drafters, args.tokens))
            table = result[f"{name}, {rows}"] = compare(runs)
            for drafters, row in table.items():
                sys.stdout.write(f"{name:13} {rows:2} {drafters:8} {json.dumps(row)}\n")
    figures = {"model": args.model, "dtype": forward.spec.dtype_nbytes, "loads": result}
    sys.stdout.write(json.dumps({**figures, "tokens": args.tokens, "machine": machine()}) + "\n")


if __name__ == "__main__":
    main()
