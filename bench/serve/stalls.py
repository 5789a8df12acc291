"""Pauses of a plain stream beside requests that cost much: large prompts, many at once, new schemas.

    python -m bench.serve.stalls [--rounds N]

`mallee mock` with a token each 5 ms and prompts at half a million tokens/s, so that a longer pause is made by
gateway, links or the engine's own bookkeeping; the tokenizer is SmolLM2's, the window a million tokens.
Beside the stream, from another process: nothing; a prompt of 2 MB of text; one of 100,000 token ids; 1,000
requests at once. Then 100 new schemas at once beside a stream of an engine over random logits, in a host in
this process, since mocked engines know no grammars. Longest pause and 99th percentile, medians of the
rounds. The table goes to stderr, the last line of stdout is one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from bench.doubles.bus import LocalBus, LocalHub
from bench.doubles.forward import MockForward
from bench.serve.sides import MODEL, answering
from mallee.actors.hosting.engine import add_engine
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.worker import Capacity
from mallee.mocker.passes import mock_spec
from mallee.mocker.timing.closed import ClosedForm, Plane
from mallee.mocker.timing.files import TimingFile
from mallee.protocol.codec import encode
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Grammar, Limits, pack_tokens
from mallee.protocol.parcels import Parcel, decode_reports
from mallee.runtime.addresses import free_port
from mallee.runtime.bus.bus import Bus
from mallee.worker.engine import Engine
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.sampling.grammar import TokenGrammars
from mallee.worker.records import EngineConfig

TOKEN_S: Final = 0.005
NEW_S: Final = 2e-6  # of a prompt's token
WINDOW: Final = 1 << 20
PROMPT_NBYTES: Final = 2_000_000
PROMPT_TOKENS: Final = 100_000
NUM_REQUESTS: Final = 1_000
NUM_SCHEMAS: Final = 100
BASE_S: Final = 2.0  # of the stream with nothing beside it
VOCAB: Final = 49_152


class Pauses(NamedTuple):
    """Of one stream, milliseconds."""

    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, times: list[float]) -> "Pauses":
        gaps = sorted((b - a) * 1000 for a, b in pairwise(times))
        return cls(gaps[len(gaps) * 99 // 100], gaps[-1])


# Over HTTP


def long_model(folder: Path) -> Path:
    """A model for mocked engines with SmolLM2's tokenizer and a long window."""
    source = resolve_model("smollm2")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": WINDOW}))
    return folder


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """The URL of a mocked service at that pace."""
    model = folder / "model"
    model.mkdir()
    timing = folder / "timing.json"
    decode = Plane(TOKEN_S, 0.0, 0.0)
    TimingFile(model=ClosedForm(0.0, NEW_S, 0.0, 0.0, (decode,))).save(timing)
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "mock", "--model", str(long_model(model))]
    command += ["--set", f"served_model_name={MODEL}", "--port", str(port), "--engines", "2"]
    command += ["--timing", str(timing), "--kv-tokens", str(4 * WINDOW)]
    command += ["--set", "mock.jitter=0"]
    with answering(command, port, folder) as url:
        yield url


def completion(prompt: object, max_tokens: int) -> bytes:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return json.dumps(body).encode()


def words(nbytes: int, draw: random.Random) -> str:
    """Text of about six bytes a token, with a word that no tokenizer knows in every ten."""
    known = _vocabulary()
    text = draw.choices(known, k=nbytes // 5)
    for i in range(0, len(text), 10):
        text[i] = "".join(draw.choices("etaoinshrdlu", k=7))
    return " ".join(text)[:nbytes]


@cache
def _vocabulary() -> list[str]:
    """Words that are tokens of the model."""
    path = resolve_model("smollm2") / "tokenizer.json"
    tokens = json.loads(path.read_text())["model"]["vocab"]
    return [token[1:] for token in tokens if token[:1] == "\u0120" and token[1:].isalpha()]


def bodies(case: str, seed: int) -> list[bytes]:
    """The requests of a case, all sent at once."""
    draw = random.Random(seed)
    match case:
        case "prompt_2mb":
            return [completion(words(PROMPT_NBYTES, draw), 1)]
        case "ids_100k":
            return [completion([draw.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)], 1)]
        case "requests_1000":
            return [completion(words(600, draw), 4) for _ in range(NUM_REQUESTS)]
    return []


def send_all(url: str, case: str, seed: int, ready: Any, go: Any, took: Any) -> None:
    """In a process of its own: send the requests of a case together, and wait for the answers."""
    raw = bodies(case, seed)
    ready.set()
    go.wait()
    begin = time.perf_counter()
    asyncio.run(_post_all(url, raw))
    took.value = time.perf_counter() - begin


async def _post_all(url: str, raw: list[bytes]) -> None:
    place = urlsplit(url)

    async def post(body: bytes) -> None:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:300]

    await asyncio.gather(*(post(body) for body in raw))


def beside(url: str, case: str, seed: int) -> tuple[Pauses, float]:
    """The pauses of a stream while a case is answered, and the seconds that this took."""
    context = multiprocessing.get_context("spawn")
    ready, go, took = context.Event(), context.Event(), context.Value("d", 0.0)
    other = context.Process(target=send_all, args=(url, case, seed, ready, go, took))
    other.start()
    assert ready.wait(60), "the other client did not start"
    times: list[float] = []
    body = {**json.loads(completion(f"a plain stream {seed}", 200_000)), "stream": True}
    begin = time.perf_counter()
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            now = time.perf_counter()
            if not line.startswith("data: {"):
                continue
            times.append(now)
            if len(times) == 100:
                begin = now
                go.set()
            if len(times) > 100 and not other.is_alive() and now - begin > BASE_S:
                break
    other.join(60)
    assert other.exitcode == 0, "the other client failed"
    return Pauses.of(times[50:]), took.value


# In a host


class FramesOf:
    """A `Sink` that notes when tokens of the request "plain" come, and counts the ends of others."""

    is_slow = False

    def __init__(self) -> None:
        self.times: list[float] = []
        self.num_ended = 0

    def send(self, raw: bytes) -> None:
        for report in decode_reports(raw):
            for update in report.frame.updates:
                if update.request == "plain":
                    self.times.append(time.perf_counter())
                elif update.finish is not None:
                    assert update.error is None, update.error
                    self.num_ended += 1

    def finish(self, refusal: str | None = None) -> None:
        pass


class PacedForward(MockForward):
    """A token each `TOKEN_S`."""

    def forward(self, batch: Any) -> Any:
        time.sleep(TOKEN_S)
        return super().forward(batch)


def schema(seed: int, i: int) -> Grammar:
    """A schema as of a tool with some parameters, equal to no other."""
    fields: dict[str, Any] = {
        f"field_{seed}_{i}_{j}": {"type": "string", "pattern": f"^[a-z]{{{j + 1},{j + 9}}}$"}
        for j in range(8)
    }
    fields["kind"] = {"enum": [f"kind {i} {j}" for j in range(20)]}
    body = {"type": "object", "properties": fields, "required": ["kind"]}
    return Grammar("json_schema", json.dumps(body))


async def beside_schemas(seed: int) -> tuple[Pauses, float]:
    """The pauses of a stream while new schemas are compiled, and the seconds that this took."""
    grammars = TokenGrammars(resolve_model("smollm2") / "tokenizer.json", VOCAB, [2])
    grammars.compile(Grammar("json_object"))
    spec = mock_spec(vocab_size=VOCAB, eos_token_ids=(2,))
    engine = Engine(
        PacedForward(spec, num_blocks=8192, block_size=4),
        config=EngineConfig(),
        clock=time.monotonic,
        worker=WorkerId("w0"),
        incarnation=Incarnation(1),
        structures=grammars,
    )
    bus: Bus = LocalBus(LocalHub())
    host = Host("h0", bus, fleet="bench", clock=time.monotonic)
    add_engine(host, engine, Capacity(4, 8192, 256))
    await bus.connect()
    await host.start()
    frames = FramesOf()
    stream = host.open("g", frames)
    prompt = pack_tokens(range(1, 11))

    def send(*commands: Generate) -> None:
        stream.submit(encode([Parcel("w0", 1, commands)]))

    async def until(claim: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not claim():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    send(Generate("plain", prompt, Limits(20_000, ignore_eos=True)))
    await until(lambda: len(frames.times) > 100)
    begin = time.perf_counter()
    send(
        *(Generate(f"r{i}", prompt, Limits(1), grammar=schema(seed, i)) for i in range(NUM_SCHEMAS))
    )
    await until(lambda: frames.num_ended == NUM_SCHEMAS)
    took = time.perf_counter() - begin
    await host.close()
    await bus.close()
    return Pauses.of(frames.times[50:]), took


def bench(rounds: int) -> dict[str, Any]:
    cases: dict[str, list[tuple[Pauses, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as url:
        for number in range(rounds + 1):
            for case in ("nothing", "prompt_2mb", "ids_100k", "requests_1000"):
                found = beside(url, case, number)
                if number:  # the first round warms up
                    cases.setdefault(case, []).append(found)
    cases["schemas_100_host"] = [asyncio.run(beside_schemas(i)) for i in range(rounds)]
    return {
        case: {
            "max_ms": round(statistics.median(p.max_ms for p, _ in each), 1),
            "p99_ms": round(statistics.median(p.p99_ms for p, _ in each), 1),
            "worst_ms": round(max(p.max_ms for p, _ in each), 1),
            "took_s": round(statistics.median(s for _, s in each), 2),
        }
        for case, each in cases.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    found = bench(rounds)
    for case, figures in found.items():
        print(f"{case:18} {figures}", file=sys.stderr)
    print(json.dumps({"bench": "stalls", "token_ms": TOKEN_S * 1000, "cases": found}))


if __name__ == "__main__":
    main()
