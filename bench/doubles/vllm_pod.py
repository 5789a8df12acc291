"""A stand-in for a vLLM pod: its completions API, a prefix cache, `vllm:` metrics and ZeroMQ KV events.

It computes nothing and takes time: a while for each token of a prompt that is not cached, and for each token
of the answer. Prompts are token ids, or texts for which `encode` gives them. Each token of an answer is a
letter that follows from all tokens before it, so that the rest of an answer is the answer to all before.
"""

import asyncio
import hashlib
import json
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

REPLAYED = 10_000  # batches
LETTERS = b"abcdefghij k.\n"


def drawn(tokens: Sequence[int], num: int) -> bytes:
    """The answer to a prompt: a byte a token."""
    state = zlib.crc32(b"".join(token.to_bytes(4, "little") for token in tokens))
    answer = bytearray()
    for _ in range(num):
        answer.append(LETTERS[(state ^ state >> 16) % len(LETTERS)])
        state = zlib.crc32(answer[-1].to_bytes(4, "little"), state)
    return bytes(answer)


@dataclass(frozen=True, slots=True)
class PodTiming:
    """Seconds that a pod takes."""

    prompt_token_s: float = 0.0
    output_token_s: float = 0.0


@dataclass(slots=True)
class PodCounts:
    """Counts since its start."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class KVPublisher:
    """vLLM's KV events: published, and the last ones repeated when asked. Positional ones as SGLang sends."""

    def __init__(self, *, is_positional: bool = False) -> None:
        import zmq
        import zmq.asyncio

        self._is_positional = is_positional
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self.port = self._live.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._replay.bind_to_random_port("tcp://127.0.0.1")
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=REPLAYED)
        self._seq = 0

    async def publish(self, events: Sequence[dict[str, Any]], *, is_lost: bool = False) -> None:
        """Send a batch; `is_lost`: only a replay brings it."""
        payload = encode_batch(events, is_positional=self._is_positional)
        self._batches.append((self._seq, payload))
        if not is_lost:
            await self._live.send_multipart([b"", self._seq.to_bytes(8, "big"), payload])
        self._seq += 1

    async def answer_replays(self) -> None:
        """Until cancelled."""
        while True:
            who, _, start = await self._replay.recv_multipart()
            for seq, payload in list(self._batches):
                if seq >= int.from_bytes(start, "big"):
                    await self._repeat(who, seq.to_bytes(8, "big"), payload)
            await self._repeat(who, (-1).to_bytes(8, "big", signed=True), b"")

    async def _repeat(self, who: bytes, seq: bytes, payload: bytes) -> None:
        topic = [] if self._is_positional else [b""]  # SGLang's replays have none
        await self._replay.send_multipart([who, b"", *topic, seq, payload])

    def source(self) -> dict[str, Any]:
        """The entry of `/kv_event_sources`."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
            "topic": "",
        }

    def close(self) -> None:
        self._context.destroy(linger=0)


def encode_batch(events: Sequence[dict[str, Any]], *, is_positional: bool) -> bytes:
    """A batch of maps, as vLLM 0.32 sends it, or of arrays."""
    encoded = [list(event.values()) for event in events] if is_positional else list(events)
    return msgspec.msgpack.encode([0.0, encoded, 0])


class PrefixCache:
    """Blocks by what is in them and before them, those used longest ago first to go."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def num_held(self, tokens: Sequence[int], salt: str = "") -> int:
        """The cached tokens of a prompt; its last one is always computed."""
        return min(self._held(self._names(tokens, salt)), max(0, len(tokens) - 1))

    def _names(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        size, parent = self.block_size, salt.encode()
        names: list[bytes] = []
        for start in range(0, len(tokens) // size * size, size):
            parent = _name(parent, tokens[start : start + size])
            names.append(parent)
        return names

    def _held(self, names: Sequence[bytes]) -> int:
        """Tokens in the leading blocks that are here."""
        held = 0
        while held < len(names) and names[held] in self._blocks:
            held += 1
        return held * self.block_size

    def take(self, tokens: Sequence[int], salt: str = "") -> tuple[int, list[dict[str, Any]]]:
        """The cached tokens of a prompt, which is cached from now on; and the events of that."""
        size, names = self.block_size, self._names(tokens, salt)
        held = self._held(names) // size
        for name in reversed(names):  # the end of a prompt goes first
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        events: list[dict[str, Any]] = []
        if held < len(names):
            before = names[held - 1] if held else None
            new = tokens[held * size : len(names) * size]
            keys = {"extra_keys": [[salt], *[None] * (len(names) - 1)]} if salt and not held else {}
            events.append(stored(names[held:], before, new, size, **keys))
        gone = []
        while len(self._blocks) > self.num_blocks:
            gone.append(self._blocks.popitem(last=False)[0])
        if gone:
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"})
        return min(held * size, max(0, len(tokens) - 1)), events


def stored(
    names: Sequence[bytes | int],
    parent: bytes | int | None,
    tokens: Sequence[int],
    block_size: int,
    **more: Any,
) -> dict[str, Any]:
    """A BlockStored, its fields in vLLM's order."""
    fields = {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return fields | more


def _name(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(parent + repr(list(tokens)).encode()).digest()


class VllmPod:
    """One pod. Belongs to one event loop; use as an asynchronous context manager."""

    def __init__(
        self,
        *,
        block_size: int = 16,
        num_blocks: int = 4096,
        timing: PodTiming | None = None,
        publisher: KVPublisher | None = None,
        tells_sources: bool = False,
        encode: Callable[[str], list[int]] | None = None,
        model: str = "m",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.cache = PrefixCache(block_size, num_blocks)
        self.counts = PodCounts()
        self.publisher = publisher
        self.started_at = time.time()
        self.running = self.waiting = 0
        self._timing = timing or PodTiming()
        self._tells_sources = tells_sources  # as since vLLM 0.32
        self._encode = encode
        self._model = model
        self._where = (host, port)
        self.breaks: list[int] = []  # bytes after which the bodies of the next streams end, broken
        self._server: asyncio.Server | None = None
        self._replays: asyncio.Task[None] | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[Any]] = set()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        return f"{self._where[0]}:{self.port}"

    async def __aenter__(self) -> "VllmPod":
        self._server = await asyncio.start_server(self._serve, *self._where)
        if self.publisher is not None:
            self._replays = asyncio.create_task(self.publisher.answer_replays())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        if self._replays is not None:
            self._replays.cancel()
            await asyncio.gather(self._replays, return_exceptions=True)
        if self.publisher is not None:
            self.publisher.close()

    def metrics(self) -> str:
        """The page of metrics."""
        label = f'{{engine="0",model_name="{self._model}"}}'
        size, num = self.cache.block_size, self.cache.num_blocks
        counts = self.counts
        return "\n".join(
            (
                "# TYPE vllm:num_requests_running gauge",
                f"vllm:num_requests_running{label} {float(self.running)}",
                f"vllm:num_requests_waiting{label} {float(self.waiting)}",
                f"vllm:kv_cache_usage_perc{label} 0.0",
                f'vllm:cache_config_info{{block_size="{size}",engine="0",num_gpu_blocks="{num}"}} 1.0',
                f"vllm:request_prompt_tokens_sum{label} {float(counts.prompt_tokens)}",
                f"vllm:request_prompt_tokens_count{label} {float(counts.requests)}",
                f"process_start_time_seconds {self.started_at}",
                "",
            )
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._writers.add(writer)
        self._handlers.add(handler)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                body = await _read_body(reader, headers)
                path = lines[0].split(" ")[1]
                await self._answer(path, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            self._handlers.discard(handler)
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            _write(writer, self.metrics().encode(), "text/plain")
        elif path == "/kv_event_sources":
            sources = {"0": self.publisher.source()} if self.publisher is not None else {}
            status = "200 OK" if self._tells_sources else "404 Not Found"
            _write(writer, json.dumps(sources).encode(), "application/json", status)
        elif path.endswith("/completions"):
            await self._complete(json.loads(body), writer)
        else:
            _write(writer, b'{"object": "list"}', "application/json")
        await writer.drain()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        tokens = self._tokens(body)
        self.running += 1
        try:
            cached, events = self.cache.take(tokens)
            self.counts.requests += 1
            self.counts.prompt_tokens += len(tokens)
            self.counts.cached_tokens += cached
            prefill_s = (len(tokens) - cached) * self._timing.prompt_token_s
            if prefill_s:
                await asyncio.sleep(prefill_s)
            if self.publisher is not None and events:
                await self.publisher.publish(events)
            usage = {
                "prompt_tokens": len(tokens),
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            num = int(body.get("max_tokens") or 1)
            if body.get("stream"):
                await self._stream(body, tokens, num, usage, writer)
                return
            if self._timing.output_token_s:
                await asyncio.sleep(num * self._timing.output_token_s)
            answer = {"object": "text_completion", "pod": self.address, "usage": usage}
            _write(writer, json.dumps(answer).encode(), "application/json")
        finally:
            self.running -= 1

    async def _stream(
        self,
        body: dict[str, Any],
        tokens: list[int],
        num: int,
        usage: dict[str, Any],
        writer: asyncio.StreamWriter,
    ) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
        writer.write(f"{head}\r\nx-pod: {self.address}\r\n\r\n".encode())
        left = self.breaks.pop(0) if self.breaks else None
        for event in self._events(body, tokens, num, usage):
            await asyncio.sleep(self._timing.output_token_s)
            part = b"data: " + event + b"\n\n"
            if left is not None and len(part) > left:
                writer.write(b"%x\r\n%s" % (len(part), part[:left]))
                raise ConnectionResetError("as wished")
            left = None if left is None else left - len(part)
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    def _events(
        self, body: dict[str, Any], tokens: list[int], num: int, usage: dict[str, Any]
    ) -> Iterator[bytes]:
        """An event a token, then the usage. Only with `return_token_ids` they tell tokens."""
        is_chat = "messages" in body
        names = {"id": f"cmpl-{self.counts.requests:06}-{self.port:05}", "created": 1, "model": "m"}

        def event(choice: dict[str, Any], **more: Any) -> bytes:
            return json.dumps({**names, "choices": [{"index": 0, **choice}], **more}).encode()

        if is_chat:
            yield event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        for number, token in enumerate(drawn(tokens, num)):
            text = chr(token)
            choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
            if body.get("return_token_ids"):
                choice["token_ids"] = [token]
                if not number and not is_chat:
                    choice["prompt_token_ids"] = tokens
            yield event({**choice, "finish_reason": "length" if number == num - 1 else None})
        usage |= {"completion_tokens": num, "total_tokens": len(tokens) + num}
        yield json.dumps({**names, "choices": [], "usage": usage}).encode()
        yield b"[DONE]"

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt", body.get("messages"))
        if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
            return list(prompt)
        if body.get("continue_final_message") and isinstance(prompt, list):
            text = json.dumps(prompt[:-1]) + prompt[-1]["content"]
        else:
            text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        return self._encode(text) if self._encode is not None else list(text.encode())


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body


def _write(writer: asyncio.StreamWriter, body: bytes, kind: str, status: str = "200 OK") -> None:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
