"""Speculation on the CPU engine: acceptance, and processor time beside plain decoding.

    python -m bench.engine.speculation [--model smollm2] [--tokens 32] [--rounds 1]

Loads: `repeat`, a prompt that asks for its own text again; `chat`, plain questions; `again`, one
question asked anew, greedy, by a later request. Each with 1 and 8 branches, with every choice of drafters by
turns in one process; medians over the rounds. `model` drafts by a copy of the model without six of its 30
layers. `cpu_ms` is processor time for a token: of one thread, where other work shares the machine, it is the
figure to go by, and `speedup` is of it. Answers are compared with those of plain decoding: a branch whose
rounding differs with the shape of a batch shows in `same`.

Then drafts that are made whatever they cost (`always`): by that copy and by one with matrices of six bits,
drawn with the branches' own noise or greedy, in bfloat16; and in float32, where every answer has to be plain
decoding's. The last line is one JSON object, which --out writes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from bench.engine.drafts import Free, GreedyDrafts, cut, rounded
from bench.measure import machine
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Limits, Sampling, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import TorchForward, load
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.draft_model import DraftModel
from mallee.worker.speculation.speculator import SpeculationConfig, SpeculationName

BLOCKS: Final = 2048
DRAFTERS: Final[tuple[SpeculationName, ...]] = ("off", "prompt", "sibling", "model")
WITHOUT: Final = range(12, 18)  # layers of the middle: without others less is right
BITS: Final = 6
WARM: Final = ("Who wrote Hamlet?", "What do bees eat in winter?")
NUM_WARM: Final = (
    16  # tokens of their answers, which are not timed: the costs of steps are known then
)
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
    return {
        "repeat": Load(asks[:rows]),
        "chat": Load(QUESTIONS[:rows]),
        "again": Load(QUESTIONS[:rows], first=QUESTIONS[:rows]),
    }


def run(
    forward: TorchForward,
    tokenizer: Tokenizer,
    load: Load,
    drafters: SpeculationName,
    num: int,
    *,
    model: DraftModel | None = None,
    always: bool = False,
) -> Run:
    """One fresh engine over `forward`. `always`: with drafts whatever they cost."""
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
        draft_model=model,
    )
    if always and engine._speculator is not None:
        engine._speculator._costs = Free()
    _answers(engine, tokenizer, "warm", WARM, load.sampling, NUM_WARM)
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


def figures(own: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Medians of one choice of drafters, and what they are beside plain decoding."""
    last, cpu_ms = own[-1], statistics.median(each.cpu_ms for each in own)
    pairs = zip(last.answers, plain[-1].answers, strict=True)
    return {
        "tokens_per_s": round(statistics.median(each.tokens_per_s for each in own), 1),
        "cpu_ms": round(cpu_ms, 2),
        "speedup": round(statistics.median(each.cpu_ms for each in plain) / cpu_ms, 2),
        "steps": last.num_steps,
        "drafted": last.drafted,
        "acceptance": round(last.accepted / last.drafted, 2) if last.drafted else None,
        "same": sum(ours == theirs for ours, theirs in pairs) / len(last.answers),
    }


class Bench:
    """Runs over one model and its copies, which are written into `folder`."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.path = resolve_model(args.model)
        self.tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        self.copies = {
            f"without {len(WITHOUT)} layers": cut(self.path, folder / "cut", WITHOUT),
            f"{BITS} bits": rounded(self.path, folder / "rounded", BITS),
        }

    def load(self, path: Path, dtype: str) -> TorchForward:
        return load(path, num_blocks=BLOCKS, dtype=dtype, threads=self.args.threads)

    def loads(self, dtype: str) -> dict[str, Any]:
        """Every load with every choice of drafters, by turns."""
        forward = self.load(self.path, dtype)
        drafts = self.load(next(iter(self.copies.values())), dtype)
        found: dict[str, Any] = {}
        for rows in self.args.rows:
            for name, each in loads(rows).items():
                runs: dict[SpeculationName, list[Run]] = {drafters: [] for drafters in DRAFTERS}
                for _ in range(self.args.rounds):
                    for drafters, own in runs.items():
                        model = None
                        if drafters == "model":
                            model = DraftModel(drafts, clock=time.perf_counter)
                        given = (forward, self.tokenizer, each, drafters, self.args.tokens)
                        own.append(run(*given, model=model))
                found[f"{name}, {rows}"] = {
                    drafters: self.tell(f"{name}, {rows}, {drafters}", own, runs["off"])
                    for drafters, own in runs.items()
                }
        return found

    def always(self, dtype: str, copies: Mapping[str, Path]) -> dict[str, Any]:
        """Drafts of each copy whatever they cost: greedy and sampled answers of the most rows."""
        forward = self.load(self.path, dtype)
        rows = max(self.args.rows)
        found: dict[str, Any] = {}
        for name, copy in copies.items():
            drafts = self.load(copy, dtype)
            for sampling in (Sampling(), Sampling(0.8, seed=7)):
                each = Load(QUESTIONS[:rows], sampling)
                given = (forward, self.tokenizer, each)
                plain = [run(*given, "off", self.args.tokens)]
                for way, kind in (("own noise", DraftModel), ("greedy", GreedyDrafts)):
                    if each.sampling.temperature == 0 and kind is GreedyDrafts:
                        continue
                    model = kind(drafts, clock=time.perf_counter)
                    own = [run(*given, "model", self.args.tokens, model=model, always=True)]
                    title = f"{name}, temperature {sampling.temperature:g}, {way}"
                    found[title] = self.tell(f"{dtype}, {title}", own, plain)
        return found

    def tell(self, title: str, own: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
        row = figures(own, plain)
        sys.stdout.write(f"{title:50} {json.dumps(row)}\n")
        return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        result = {
            "model": args.model,
            "dtype": args.dtype,
            "tokens": args.tokens,
            "rounds": args.rounds,
            "loads": bench.loads(args.dtype),
            "always": {
                args.dtype: bench.always(args.dtype, bench.copies),
                "float32": bench.always("float32", dict([*bench.copies.items()][:1])),
            },
            "machine": machine(),
        }
    sys.stdout.write(json.dumps(result) + "\n")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
